"""Traffic VLM: a small vision-language model that looks at a traffic scene once and answers many questions."""

from .configuration_traffic_vlm import TrafficVLMConfig, TrafficVLMTextConfig
from .modeling_traffic_vlm import (
    EncodedImages,
    TrafficVLMForCausalLM,
    TrafficVLMForConditionalGeneration,
    TrafficVLMForSequenceClassification,
    TrafficVLMModel,
    TrafficVLMTextModel,
)
from .processing_traffic_vlm import TrafficVLMProcessor
from .tokenization_traffic_vlm import TrafficVLMTokenizer


__all__ = [
    "EncodedImages",
    "TrafficVLMConfig",
    "TrafficVLMForCausalLM",
    "TrafficVLMForConditionalGeneration",
    "TrafficVLMForSequenceClassification",
    "TrafficVLMModel",
    "TrafficVLMProcessor",
    "TrafficVLMTextConfig",
    "TrafficVLMTextModel",
    "TrafficVLMTokenizer",
]

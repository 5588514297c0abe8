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


__all__ = [
    "EncodedImages",
    "TrafficVLMConfig",
    "TrafficVLMForCausalLM",
    "TrafficVLMForConditionalGeneration",
    "TrafficVLMForSequenceClassification",
    "TrafficVLMModel",
    "TrafficVLMTextConfig",
    "TrafficVLMTextModel",
]

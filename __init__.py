"""Traffic VLM: a small vision-language model that encodes a traffic scene once and answers many questions about it.

Importing this package registers its classes with transformers, so that models load without `trust_remote_code`:

    import traffic_vlm
    vqa = transformers.pipeline("visual-question-answering", model=folder)
"""

import transformers

from .configuration_traffic_vlm import TrafficVLMConfig, TrafficVLMTextConfig
from .modeling_traffic_vlm import EncodedImages as EncodedImages
from .modeling_traffic_vlm import (
    TrafficVLMForCausalLM,
    TrafficVLMForConditionalGeneration,
    TrafficVLMForSequenceClassification,
    TrafficVLMTextModel,
)
from .modeling_traffic_vlm import TrafficVLMModel as TrafficVLMModel
from .pipeline_traffic_vlm import TrafficVLMPipeline as TrafficVLMPipeline
from .processing_traffic_vlm import TrafficVLMProcessor
from .tokenization_traffic_vlm import TrafficVLMTokenizer


def register() -> None:
    """Register the classes of this package with the auto classes and pipelines of transformers."""
    full, text, auto = TrafficVLMConfig, TrafficVLMTextConfig, transformers
    for config in (full, text):
        auto.AutoConfig.register(config.model_type, config, exist_ok=True)
    for name in ("AutoModel", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
        getattr(auto, name).register(full, TrafficVLMForConditionalGeneration, exist_ok=True)
    auto.AutoModelForSequenceClassification.register(full, TrafficVLMForSequenceClassification, exist_ok=True)
    auto.AutoModel.register(text, TrafficVLMTextModel, exist_ok=True)
    auto.AutoModelForCausalLM.register(text, TrafficVLMForCausalLM, exist_ok=True)
    auto.AutoTokenizer.register(full, fast_tokenizer_class=TrafficVLMTokenizer, exist_ok=True)
    auto.AutoProcessor.register(full, TrafficVLMProcessor, exist_ok=True)
    TrafficVLMConfig.pipelines = {}  # a pipeline that config.json names would need code from the folder


register()

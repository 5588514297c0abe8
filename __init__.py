"""Traffic VLM: a small vision-language model that encodes a traffic scene once and answers many questions about it."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
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


# Modules of version 0.1: an import of one names its successor.
RENAMED_MODULES = {
    "asking_traffic_vlm": "traffic_vlm.scoring_traffic_vlm",
    "benchmark": "scripts/benchmark.py",
    "data.mixture": "traffic_vlm.data.dataset",
    "data.phrases": "traffic_vlm.data.templates",
    "data.readers": "traffic_vlm.data.formats",
    "data.targets": "traffic_vlm.data.grounding",
    "data.truths": "traffic_vlm.data.ground_truth",
    "evaluation.folders": "traffic_vlm.data.folders",
    "evaluation.perplexity": "traffic_vlm.evaluation.predict",
    "evaluation.pointing": "traffic_vlm.evaluation.grounding",
    "evaluation.tables": "traffic_vlm.evaluation.markdown",
    "publishing": "traffic_vlm.training.hub, traffic_vlm.export and traffic_vlm.training.card",
    "serving.labelling": "traffic_vlm.serving.labeling",
    "training.annotated": "scripts/train_tower.py",
    "training.auxiliary": "traffic_vlm.training.losses and traffic_vlm.training.head",
}


class _RenamedModules:
    """The last import finder: it is asked only for modules that no other finder has."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if new := RENAMED_MODULES.get(name.removeprefix("traffic_vlm.")) if name.startswith("traffic_vlm.") else None:
            raise ModuleNotFoundError(f"{name} is now {new}", name=name)


sys.meta_path.append(_RenamedModules)  # type: ignore[arg-type]

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


def __getattr__(name: str) -> Any:
    """Import a class when it is first used: the HTTP proxy of the service imports this package, but needs no torch."""
    if name in __all__:
        for module in ("configuration", "tokenization", "processing", "modeling"):
            found = import_module(f".{module}_traffic_vlm", __name__)
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

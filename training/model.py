"""The model that a training run starts from: weights, tower, head, and what of them is trained."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, BaseImageProcessor, PreTrainedConfig

from ..common.loading import load_weights
from ..configuration_traffic_vlm import TrafficVLMConfig, TrafficVLMVisionConfig
from ..modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from ..processing_traffic_vlm import TrafficVLMProcessor
from ..vision_traffic_vlm import TrafficVLMVisionModel
from .options import TrainOptions


ROOT = Path(__file__).resolve().parent.parent


def start_message(options: TrainOptions) -> str:
    """A line that says which weights training starts from."""
    base, tower = options.model_name_or_path, options.vision_tower
    if not options.questions_per_image:
        return f"Training the vision tower {tower or (f'of {base}' if base else 'from random weights')} alone."
    if base:
        return f"Fine-tuning {base}{f' with the vision tower {tower}, new to its decoder' if tower else ''}."
    if tower:
        return f"Training from scratch with the vision tower {tower}: the decoder's weights are random."
    return "Training from scratch: all weights are random."


def prepare_model(options: TrainOptions, num_sources: int = 1) -> tuple[Any, Any]:
    """The model to train, in float32, frozen as the options say, and its processor.

    The model has a query head for the presence loss, or is a `TowerModel` if no questions are asked.

    Args:
        num_sources: number of sources that the presence loss balances separately.
    """
    model, base = build_model(options), options.model_name_or_path
    tower = model.model.vision_tower
    processor = TrafficVLMProcessor.from_pretrained(base or ROOT)
    if not base:
        processor.taught, processor.own_questions = [], False
    size = model.config.vision_config.image_size
    processor.image_processor.size = {"height": size, "width": size}
    for name, value in read_normalization(options.vision_tower).items():
        setattr(processor.image_processor, name, value)
    if options.freeze_vision:
        tower.requires_grad_(False)
    if options.freeze_blocks is not None:
        freeze_blocks(tower, options.freeze_blocks)
    if "presence" in options.loss_weights():
        from .auxiliary.head import PresenceLoss, QueryHead, load_training_head

        trained = options.vision_tower or base
        head = (load_training_head(trained) if trained else None) or QueryHead(tower.config.hidden_size)
        if not options.questions_per_image:
            from .auxiliary.tower import TowerModel

            return TowerModel(tower, head, num_sources), processor
        model.training_head = nn.ModuleDict({"head": head, "loss": PresenceLoss(num_sources)})
    return model, processor


def build_model(options: TrainOptions) -> Any:
    """The full model, in float32: from weights or from scratch, and with another tower if the options name one.

    Raises:
        ValueError: the weights or the tower do not fit.
    """
    base, attention = options.model_name_or_path, {"attn_implementation": options.attn_implementation}
    size = {} if options.image_size is None else {"image_size": options.image_size}
    tower = load_tower(options.vision_tower, size) if options.vision_tower else None
    sizes = base or options.config
    config = TrafficVLMConfig.from_pretrained(sizes) if sizes else TrafficVLMConfig()
    config.vision_config.update(size)
    if options.hidden_dropout is not None:
        config.text_config.hidden_dropout = options.hidden_dropout
    if base:
        model: Any = load_weights(base, config=config, dtype=torch.float32, **attention)
    else:  # dtype and temperature in a config.json belong to its weights
        config = TrafficVLMConfig(tower.config if tower else config.vision_config, config.text_config)
        model = TrafficVLMForConditionalGeneration._from_config(config, **attention)
    if tower:
        width, expected = tower.config.hidden_size, model.config.vision_config.hidden_size
        if width != expected:
            raise ValueError(
                f"--vision_tower {options.vision_tower} gives tokens of {width} numbers, the decoder reads {expected}"
            )
        model.config.vision_config, model.model.vision_tower = tower.config, tower
    if options.pool_above is not None:
        pooled = add_pooling(model.model.vision_tower, options.pool_above)
        model.config.vision_config, model.model.vision_tower = pooled.config, pooled
    return model


def load_tower(name: str, fields: dict[str, Any] | None = None) -> Any:
    """A trained vision tower in float32; `fields` change its configuration.

    Args:
        name: folder or Hub name of a tower that was trained alone, of a Traffic VLM, or of a model of transformers.

    Raises:
        OSError: there is no such model. ValueError: it has no vision tower, or not all of its weights.
    """
    try:
        found = PreTrainedConfig.get_config_dict(name)[0]
    except OSError as error:
        raise OSError(f"{name}: there is no such model, neither a folder nor on the Hub") from error
    if "model_type" not in found:
        raise ValueError(f"{name}: no config.json there names a model_type, so it is not a vision tower")
    found.get("vision_config", found).update(fields or {})
    if found["model_type"] == TrafficVLMConfig.model_type:
        config = TrafficVLMConfig.from_dict(found)
        return load_weights(name, config=config, dtype=torch.float32).model.vision_tower
    config = TrafficVLMConfig(vision_config=found).vision_config
    is_custom = config.model_type == TrafficVLMVisionConfig.model_type
    tower_class: Any = TrafficVLMVisionModel if is_custom else AutoModel
    tower, loaded = tower_class.from_pretrained(name, config=config, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(loaded["missing_keys"]):
        raise ValueError(f"{name}: the vision tower has no weights {', '.join(missing[:3])} ({len(missing)} in all)")
    return tower


def add_pooling(tower: Any, pool_above: int) -> Any:
    """A tower with these weights that pools the patches of larger images; see `TrafficVLMVisionConfig.pool_above`."""
    config = copy.deepcopy(tower.config)
    config.pool_above = pool_above
    pooled = TrafficVLMVisionModel(config)
    pooled.load_state_dict(tower.state_dict(), strict=False)  # all but the new layer
    return pooled


def freeze_blocks(tower: Any, blocks: int) -> None:
    """Freeze the stem and the first `blocks` convolution blocks of a tower; if these are all, all convolutions.

    Raises:
        ValueError: the tower has no convolutions, or `blocks` is negative.
    """
    if blocks < 0 or not hasattr(tower, "convolutions"):
        needed = "a number of at least 0, and a vision tower with convolutions"
        raise ValueError(f"--freeze_blocks {blocks} needs {needed}, this is a {type(tower).__name__}")
    convolutions = tower.convolutions
    if blocks >= len(convolutions.blocks):
        convolutions.requires_grad_(False)
    for module in (convolutions.stem, *convolutions.blocks[:blocks]):
        module.requires_grad_(False)


def read_normalization(vision_tower: str | None) -> dict[str, list[float]]:
    """Mean and standard deviation by which a tower's image processor normalizes pixels; {} if it has none."""
    try:
        fields, _ = BaseImageProcessor.get_image_processor_dict(vision_tower) if vision_tower else ({}, None)
    except OSError:  # a tower saved without an image processor
        return {}
    return {name: fields[name] for name in ("image_mean", "image_std") if name in fields}

"""The model that a training run starts from: weights, tower, head, and what of them is trained."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, BaseImageProcessor, PreTrainedConfig

from ..attention_traffic_vlm import TrafficVLMAttention, TrafficVLMRMSNorm
from ..common.loading import load_weights
from ..configuration_traffic_vlm import PATCH_TOWER, TrafficVLMConfig, TrafficVLMVisionConfig
from ..modeling_traffic_vlm import TrafficVLMForConditionalGeneration, TrafficVLMMLP
from ..processing_traffic_vlm import TrafficVLMProcessor
from ..vision_traffic_vlm import TrafficVLMVisionModel
from .options import PATCH, ModelOptions
from .trainer import unwrap


ROOT = Path(__file__).resolve().parent.parent


def start_message(options: ModelOptions) -> str:
    """A line that says which weights training starts from."""
    base, tower = options.model_name_or_path, options.trained_tower
    if base:
        return f"Fine-tuning {base}{f' with the vision tower {tower}, new to its decoder' if tower else ''}."
    if tower:
        return f"Training from scratch with the vision tower {tower}: the decoder's weights are random."
    return "Training from scratch: all weights are random."


def prepare_model(options: ModelOptions, has_head: bool = True, num_sources: int = 1) -> tuple[Any, Any]:
    """The model, frozen and compiled as the options say, and its processor.

    Args:
        has_head: add the query head, for the presence loss. LoRA leaves tower and head as they are.
        num_sources: number of sources that the presence loss balances separately.
    """
    model, base = build_model(options), options.model_name_or_path
    processor = TrafficVLMProcessor.from_pretrained(base or ROOT)
    if not base:
        processor.taught, processor.own_questions = [], False
    size = model.config.vision_config.image_size
    processor.image_processor.size = {"height": size, "width": size}
    for name, value in read_normalization(options.trained_tower).items():
        setattr(processor.image_processor, name, value)
    if options.lora_rank:
        model = add_lora(model, options.lora_rank)
    elif has_head:
        from .auxiliary.head import add_training_head, load_training_head

        trained = options.trained_tower or base
        add_training_head(model, load_training_head(trained) if trained else None, num_sources)
    full = unwrap(model)
    if options.compile_decoder:
        compile_decoder(full)
    if options.freeze_vision:
        full.model.vision_tower.requires_grad_(False)
    if options.freeze_blocks is not None:
        freeze_blocks(full.model.vision_tower, options.freeze_blocks)
    return model, processor


def build_model(options: ModelOptions) -> Any:
    """The model to train, in float32: from weights or from scratch, and with another tower if the options name one.

    Raises:
        ValueError: the weights or the tower do not fit.
    """
    base, attention = options.model_name_or_path, {"attn_implementation": options.attn_implementation}
    size = {} if options.image_size is None else {"image_size": options.image_size}
    text = options.text_fields()
    if options.hidden_dropout is not None:
        text["hidden_dropout"] = options.hidden_dropout
    tower = load_tower(options.trained_tower, size) if options.trained_tower else None
    if base:
        config = TrafficVLMConfig.from_pretrained(base)
        config.vision_config.update(size)
        config.text_config.update(text)
        model: Any = load_weights(base, config=config, dtype=torch.float32, **attention)
    else:
        new = (PATCH_TOWER if options.vision_tower == PATCH else {}) | size
        config = TrafficVLMConfig(vision_config=tower.config if tower else new, text_config=text)
        model = TrafficVLMForConditionalGeneration._from_config(config, **attention)
    if tower:
        width, expected = tower.config.hidden_size, model.config.vision_config.hidden_size
        if width != expected:
            raise ValueError(
                f"--vision_tower {options.vision_tower} gives tokens of {width} numbers, the decoder reads {expected}"
            )
        model.config.vision_config, model.model.vision_tower = tower.config, tower
    return model


def load_tower(name: str, fields: dict[str, Any] | None = None) -> Any:
    """A trained vision tower in float32; `fields` change its configuration.

    Args:
        name: folder or Hub name of a tower of `train_tower.py`, of a Traffic VLM, or of a model of transformers.

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


def add_lora(model: Any, rank: int) -> Any:
    """Add LoRA matrices to every linear layer of the decoder; only they are trained."""
    from peft import LoraConfig, get_peft_model

    linear = r"model\.text_model\..*_proj"
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear))


def compile_decoder(model: Any) -> None:
    """Compile the modules of each decoder layer, for rows of any length. Forward hooks still work.

    The compiled functions are bound to this model: a deep copy would compute with the weights of the original.
    """
    classes = (TrafficVLMAttention, TrafficVLMMLP, TrafficVLMRMSNorm)
    modules: list[Any] = [module for module in model.get_decoder().modules() if isinstance(module, classes)]
    for module in modules:
        module.forward = torch.compile(module.forward, dynamic=True)

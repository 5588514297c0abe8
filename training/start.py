"""The model that a training run starts from: weights, tower, head, new words, and what of them is trained."""

from pathlib import Path
from typing import Any, cast

import torch
from transformers import BaseImageProcessor, PreTrainedConfig

from ..attention_traffic_vlm import TrafficVLMAttention, TrafficVLMRMSNorm
from ..configuration_traffic_vlm import PATCH_TOWER, TrafficVLMConfig, TrafficVLMVisionConfig
from ..loading import load_weights, refuse_adapter
from ..modeling_traffic_vlm import TrafficVLMForConditionalGeneration, TrafficVLMMLP
from ..processing_traffic_vlm import TrafficVLMProcessor
from ..tokenization_traffic_vlm import TrafficVLMTokenizer
from ..vision_traffic_vlm import TrafficVLMVisionModel
from .auxiliary.head import QueryHead, add_training_head, load_training_head
from .options import PATCH, DataOptions, ModelOptions
from .rows import own_questions
from .tower import is_tower_folder, load_tower
from .trainer import unwrap
from .words import add_words


ROOT = Path(__file__).resolve().parent.parent


def start_message(options: ModelOptions) -> str:
    """A line that says which weights training starts from."""
    if options.model_name_or_path:
        tower = f" with the vision tower {options.vision_tower}, new to its decoder" if options.vision_tower else ""
        return f"Fine-tuning {options.model_name_or_path}{tower}."
    if options.trained_tower:
        return (
            f"Training from scratch with the vision tower {options.trained_tower}: the decoder's weights are random."
        )
    return "Training from scratch: all weights are random."


def prepare_model(model_options: ModelOptions, data_options: DataOptions, num_sources: int = 1) -> tuple[Any, Any]:
    """The model with its training head, frozen and compiled as the options say, and its processor."""
    model = build_model(model_options)
    processor = TrafficVLMProcessor.from_pretrained(model_options.model_name_or_path or ROOT)
    if not model_options.model_name_or_path:
        processor.taught, processor.own_questions = None, False
    size = model.config.vision_config.image_size
    processor.image_processor.size = {"height": size, "width": size}
    for name, value in read_normalization(model_options.trained_tower).items():
        setattr(processor.image_processor, name, value)
    if model_options.lora_rank:
        model = add_lora(model, model_options.lora_rank)
    elif data_options.presence_weight or data_options.distillation_weight:
        head = find_head(model_options)
        if head is None and data_options.distillation_weight:
            raise ValueError("--distillation_weight needs a trained query head: pass --vision_tower TOWER")
        add_training_head(model, head, num_sources)
    full = unwrap(model)
    if model_options.compile_decoder:
        compile_decoder(full)
    if model_options.freeze_vision:
        full.model.vision_tower.requires_grad_(False)
    if model_options.freeze_blocks is not None:
        freeze_blocks(full.model.vision_tower, model_options.freeze_blocks)
    return model, processor


def build_model(options: ModelOptions) -> Any:
    """The model to train: from scratch, from weights, or with a vision tower of transformers or of our own."""
    vision: dict[str, Any] = {} if options.image_size is None else {"image_size": options.image_size}
    text = options.text_fields()
    if options.hidden_dropout is not None:
        text["hidden_dropout"] = options.hidden_dropout
    attention = {"attn_implementation": options.attn_implementation}
    if options.model_name_or_path:
        refuse_adapter(options.model_name_or_path, "--model_name_or_path")
        config = TrafficVLMConfig.from_pretrained(options.model_name_or_path)
        for name, value in vision.items():
            setattr(config.vision_config, name, value)
        for name, value in text.items():
            setattr(config.text_config, name, value)
        model = load_weights(options.model_name_or_path, config=config, dtype=torch.float32, **attention)
        if options.vision_tower:
            replace_tower(model, Path(options.vision_tower), vision)
        return model
    tower_fields = vision
    if options.vision_tower == PATCH:
        tower_fields = PATCH_TOWER | vision
    elif options.vision_tower:
        tower_fields = PreTrainedConfig.get_config_dict(options.vision_tower)[0]
        if "vision_config" in tower_fields:  # a model with a text and a vision part
            tower_fields["vision_config"] |= vision
        else:
            tower_fields |= vision
        if "model_type" not in tower_fields:
            raise ValueError(f"--vision_tower {options.vision_tower}: its config.json names no model_type")
    config = TrafficVLMConfig(vision_config=tower_fields, text_config=text)
    model = TrafficVLMForConditionalGeneration._from_config(config, **attention)
    tower = model.model.vision_tower
    if options.trained_tower and is_tower_folder(options.trained_tower):
        tower.load_state_dict(load_tower(Path(options.trained_tower))["tower"].state_dict())
    elif options.trained_tower:
        model.model.vision_tower = type(tower).from_pretrained(
            options.trained_tower, config=tower.config, dtype=torch.float32
        )
    return model


def replace_tower(model: Any, folder: Path, fields: dict[str, Any]) -> None:
    """Give a model the vision tower of a folder of `train_tower.py`; `fields` change the tower's configuration.

    Raises:
        ValueError: the tower's tokens have another width than the decoder reads.
    """
    trained: Any = load_tower(folder)["tower"]
    width = model.config.vision_config.hidden_size
    if trained.config.hidden_size != width:
        raise ValueError(f"{folder} gives tokens of {trained.config.hidden_size} numbers, the decoder reads {width}")
    config = TrafficVLMVisionConfig.from_dict(trained.config.to_dict() | fields)
    model.config.vision_config, model.model.vision_tower = config, TrafficVLMVisionModel(config)
    model.model.vision_tower.load_state_dict(trained.state_dict())


def freeze_blocks(tower: Any, blocks: int) -> None:
    """Freeze the stem and the first `blocks` convolution blocks of a tower; if these are all, all convolutions.

    Raises:
        ValueError: the tower has no convolutions, or `blocks` is negative.
    """
    if blocks < 0:
        raise ValueError(f"--freeze_blocks must be at least 0, got {blocks}")
    if not hasattr(tower, "convolutions"):
        raise ValueError(
            f"--freeze_blocks needs a vision tower with convolutions; this {type(tower).__name__} has none"
        )
    convolutions = tower.convolutions
    if blocks >= len(convolutions.blocks):
        convolutions.requires_grad_(False)
    for module in (convolutions.stem, *convolutions.blocks[:blocks]):
        module.requires_grad_(False)


def find_head(options: ModelOptions) -> QueryHead | None:
    """The query head that was trained with the tower or the weights to start from, if there is one."""
    if options.trained_tower and is_tower_folder(options.trained_tower):
        return cast(QueryHead, load_tower(Path(options.trained_tower))["head"])
    return load_training_head(options.model_name_or_path) if options.model_name_or_path else None


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


def prepare_words(
    model: Any, processor: Any, options: ModelOptions, datasets: list[Any], checkpoint: Path | str | None
) -> None:
    """Add the words of --add_words to the tokenizer and the model; or take the tokenizer of a checkpoint."""
    if not options.add_words:
        return
    if checkpoint:  # its weights are loaded later, and belong to its words
        processor.tokenizer = TrafficVLMTokenizer.from_pretrained(str(checkpoint))
    else:
        texts = {text for dataset in datasets for pair in own_questions(dataset) for text in pair}
        taught = {word for words in (processor.taught or {}).values() for word in words}
        processor.tokenizer = add_words(model, processor.tokenizer, options.add_words, taught, texts)

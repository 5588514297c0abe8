"""The model that a training run starts from: weights, tower, head, and what of them is trained."""

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, BaseImageProcessor, PreTrainedConfig

from ..common.files import ROOT
from ..common.loading import load_weights
from ..configuration_traffic_vlm import TrafficVLMConfig, TrafficVLMVisionConfig, height_and_width
from ..modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from ..processing_traffic_vlm import TrafficVLMProcessor
from ..vision_traffic_vlm import TrafficVLMBatchNorm2d, TrafficVLMVisionModel
from .options import TrainOptions
from .words import AskedWords


NEW_SCORE = 0.3  # from which objects of a new center head are reported; evaluate.py tells better ones


class TowerModel(nn.Module):
    """A vision tower with its training head, to train without a decoder. Its output is that of the tower.

    Batch normalization uses its stored statistics, also in training: those of a batch differ between sizes.
    """

    def __init__(self, tower: Any, training_head: nn.ModuleDict):
        super().__init__()
        self.tower, self.training_head = tower, training_head

    def train(self, mode: bool = True) -> "TowerModel":
        super().train(mode)
        for module in self.tower.modules():
            if isinstance(module, TrafficVLMBatchNorm2d):
                module.eval()
        return self

    def forward(self, pixel_values: torch.Tensor) -> Any:
        return self.tower(pixel_values)


def prepare_model(options: TrainOptions, num_sources: int = 1) -> tuple[Any, Any]:
    """The model to train, in float32, frozen as the options say, and its processor.

    Its `training_head` has the query head for the presence loss, with a balance within each of `num_sources` sources,
    and the counts of the words asked. Without questions, the model is a `TowerModel`, and there are no counts.
    """
    model, base = build_model(options), options.model_name_or_path
    tower = model.model.vision_tower
    processor = TrafficVLMProcessor.from_pretrained(base or ROOT)
    if not base:
        processor.taught, processor.own_questions = [], False
    height, width = height_and_width(model.config.vision_config.image_size)
    processor.image_processor.size = {"height": height, "width": width}
    if options.vision_tower:
        with suppress(OSError):  # a tower of ours has no image processor
            fields, _ = BaseImageProcessor.get_image_processor_dict(options.vision_tower)
            for name in {"image_mean", "image_std"} & fields.keys():
                setattr(processor.image_processor, name, fields[name])
    if options.freeze_vision:
        tower.requires_grad_(False)
        # What follows the maps and patches is still trained: by the answers, or without questions by centers.
        for name in ("pool", "objects") if options.questions_per_image else ("center_head",):
            getattr(tower, name, nn.Identity()).requires_grad_(True)
    if options.freeze_blocks:
        tower.convolutions.stem.requires_grad_(False)
        tower.convolutions.blocks[: options.freeze_blocks].requires_grad_(False)
    head = nn.ModuleDict()
    if "presence" in options.loss_weights():  # a training without auxiliary losses loads none of their code
        from .auxiliary.presence import PresenceLoss, QueryHead, load_training_head

        trained = options.vision_tower or base
        loaded = load_training_head(trained) if trained else None
        head.update({"head": loaded or QueryHead(tower.config.hidden_size), "loss": PresenceLoss(num_sources)})
    if not options.questions_per_image:
        return TowerModel(tower, head), processor
    head["words"] = AskedWords(model.config.get_text_config())
    model.training_head = head
    return model, processor


def build_model(options: TrainOptions) -> Any:
    """The full model, in float32: from weights or from scratch, and with another tower if the options name one."""
    base, size = options.model_name_or_path, {"image_size": options.image_size} if options.image_size else {}
    tower = load_tower(options.vision_tower, size) if options.vision_tower else None
    sizes = base or options.config
    config = TrafficVLMConfig.from_pretrained(sizes) if sizes else TrafficVLMConfig()
    if options.image_size:
        config.yes_no_temperature = config.temperature_at(height_and_width(options.image_size))
    config.vision_config.update(size)
    if options.hidden_dropout is not None:
        config.text_config.hidden_dropout = options.hidden_dropout
    if base:
        model: Any = load_weights(base, config=config, dtype=torch.float32)
    else:  # dtype and temperature in a config.json belong to its weights
        config = TrafficVLMConfig(tower.config if tower else config.vision_config, config.text_config)
        model = TrafficVLMForConditionalGeneration(config)
    if tower:
        model.config.vision_config, model.model.vision_tower = tower.config, tower
    given = [name for name in ("freeze_blocks", "locate", "pool_above") if getattr(options, name)]
    if given and not isinstance(model.model.vision_tower, TrafficVLMVisionModel):
        raise ValueError(
            f"--{given[0]} is for our own vision tower, not for {type(model.model.vision_tower).__name__}"
        )
    parts = {"pool_above": options.pool_above, "located": dict.fromkeys(options.locate, NEW_SCORE)}
    if new := {name: value for name, value in parts.items() if value}:
        model.model.vision_tower = add_parts(model.model.vision_tower, **new)
        model.config.vision_config = model.model.vision_tower.config
    return model


def load_tower(name: str, fields: dict[str, Any] | None = None) -> Any:
    """A trained vision tower in float32; `fields` change its configuration.

    `name` is a folder or Hub name: of a tower that was trained alone, a Traffic VLM, or a model of transformers.
    """
    found = PreTrainedConfig.get_config_dict(name)[0]
    found.get("vision_config", found).update(fields or {})
    if found.get("model_type") == TrafficVLMConfig.model_type:
        config = TrafficVLMConfig.from_dict(found)
        return load_weights(name, config=config, dtype=torch.float32).model.vision_tower
    config = TrafficVLMConfig(vision_config=found).vision_config
    is_custom = config.model_type == TrafficVLMVisionConfig.model_type
    tower_class: Any = TrafficVLMVisionModel if is_custom else AutoModel
    return tower_class.from_pretrained(name, config=config, dtype=torch.float32)


def add_parts(tower: Any, **fields: Any) -> Any:
    """A tower with these weights and new parts: `pool_above`, `located` of `TrafficVLMVisionConfig`."""
    config = copy.deepcopy(tower.config)
    for name, value in fields.items():
        setattr(config, name, value)
    config.check_fields()
    larger = TrafficVLMVisionModel(config)
    renewed = ("center_head.", "objects.") if "located" in fields else ()
    kept = {name: value for name, value in tower.state_dict().items() if not name.startswith(renewed)}
    larger.load_state_dict(kept, strict=False)  # all but the new parts
    return larger

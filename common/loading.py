"""The full model of a folder or of the Hub, refused where its weights are damaged or incomplete."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..configuration_traffic_vlm import check_image_size
from ..modeling_traffic_vlm import TrafficVLMForConditionalGeneration


def load_weights(name: str | Path, **options: Any) -> TrafficVLMForConditionalGeneration:
    """The full model of a folder or the Hub, with every weight present.

    `from_pretrained` fills missing tensors with random numbers and ignores tensors that the model does not have. Here
    both are errors.

    Args:
        name: a folder, or the name of a repository on the Hub.
        options: passed to `from_pretrained`: config, dtype, attn_implementation, ...

    Raises:
        OSError: there is no such folder or repository, or its model cannot be read.
        ValueError: tensors are missing, unexpected or of another shape, which are named.
    """
    try:
        model, loaded = TrafficVLMForConditionalGeneration.from_pretrained(
            str(name), output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (OSError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"{name}: no model can be loaded from this folder or the Hub: {reason}") from error
    for problem, names in (
        ("no", sorted(loaded["missing_keys"])),
        ("unexpected tensors:", sorted(loaded["unexpected_keys"])),
        ("another shape of", sorted(key for key, *_ in loaded["mismatched_keys"])),
    ):
        if names:
            why = "they do not belong to the model that its config.json describes"
            raise ValueError(f"{name}: the weights have {problem} {', '.join(names[:3])} ({len(names)} in all): {why}")
    return model


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) of images in pixels, of an option such as "384" or "288,512". Raises a ValueError."""
    sides = text.split(",")
    return check_image_size([int(side) if side.strip().isdecimal() else side for side in sides])


def set_image_size(model: Any, processor: Any, size: tuple[int, int]) -> None:
    """Make (height, width) the default size of images of a loaded model, with the temperature of this size."""
    config, vision = model.config, model.config.vision_config
    if config.size_temperatures:  # the default is measured, too, and may be asked for later
        config.size_temperatures = {f"{side:g}": value for side, value in config.measured_temperatures().items()}
    config.yes_no_temperature = config.temperature_at(size)
    vision.image_size = list(size)
    processor.image_processor.size = {"height": size[0], "width": size[1]}

"""Opening a model whose weights must all be there, whoever asks: training, evaluation, answers."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..modeling_traffic_vlm import TrafficVLMForConditionalGeneration


def load_weights(name: str | Path, **options: Any) -> TrafficVLMForConditionalGeneration:
    """The full model of a folder, or of a name on the Hub.

    The library fills in what a file of weights lacks by random numbers, with a warning; here it is an error.

    Args:
        options: of `from_pretrained`: config, dtype, attn_implementation, ...

    Raises:
        OSError: there is no such model, or it has no weights.
        ValueError: a file that is torn, lacks tensors or has some of another shape; the message names them.
    """
    try:
        model, loaded = TrafficVLMForConditionalGeneration.from_pretrained(
            str(name), output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except SafetensorError as error:
        raise ValueError(f"{name}: the weights cannot be read: {error}") from error
    for what, names in (
        ("no", sorted(loaded["missing_keys"])),
        ("another shape of", sorted(key for key, *_ in loaded["mismatched_keys"])),
    ):
        if names:
            raise ValueError(
                f"{name}: the weights have {what} {', '.join(names[:3])} ({len(names)} in all): they are of another "
                "model than its config.json tells"
            )
    return model

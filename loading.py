"""Load the weights of a model, and refuse damaged or incomplete ones."""

import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .modeling_traffic_vlm import TrafficVLMForConditionalGeneration


HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # of a repository: user/model


def load_weights(name: str | Path, **options: Any) -> TrafficVLMForConditionalGeneration:
    """Load the full model from a folder or the Hub, with every weight present.

    `from_pretrained` fills missing tensors with random numbers and ignores tensors that the model does not have. Here
    both are errors, and so are NaN and infinity.

    Args:
        name: a folder, or the name of a repository on the Hub.
        options: passed to `from_pretrained`: config, dtype, attn_implementation, ...

    Raises:
        OSError: there is no such folder or model on the Hub, or it has no weights.
        ValueError: the file is damaged; tensors are missing, unexpected, of another shape, NaN or infinite; the
            message names them.
    """
    is_folder = os.path.isdir(name)
    if not is_folder and not HUB_NAME.fullmatch(str(name)):
        raise FileNotFoundError(f"{name}: no such folder")
    try:
        model, loaded = TrafficVLMForConditionalGeneration.from_pretrained(
            str(name), output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except SafetensorError as error:
        raise ValueError(f"{name}: the weights cannot be read: {error}") from error
    except OSError as error:
        if is_folder:
            raise
        reason = str(error).partition("\n")[0]
        raise OSError(f"{name}: no such folder, and it cannot be loaded from the Hub: {reason}") from error
    for problem, names in (
        ("no", sorted(loaded["missing_keys"])),
        ("unexpected tensors:", sorted(loaded["unexpected_keys"])),
        ("another shape of", sorted(key for key, *_ in loaded["mismatched_keys"])),
    ):
        if names:
            raise ValueError(
                f"{name}: the weights have {problem} {', '.join(names[:3])} ({len(names)} in all): they do not belong "
                "to the model that its config.json describes"
            )
    damaged = [key for key, tensor in model.state_dict().items() if not bool(tensor.isfinite().all())]
    if damaged:
        raise ValueError(f"{name}: NaN or infinite weights in {', '.join(damaged[:3])} ({len(damaged)} in all)")
    return model

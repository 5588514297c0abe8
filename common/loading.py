"""Load the weights and the processor of a model, and refuse damaged or incomplete weights.

A model is a folder or a repository on the Hub. It can also be an adapter of PEFT (LoRA), whose small matrices are
merged into the weights of its base model.
"""

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils.peft_utils import find_adapter_config_file

from ..configuration_traffic_vlm import TrafficVLMConfig
from ..modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from ..processing_traffic_vlm import TrafficVLMProcessor


HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # of a repository: user/model


def load_weights(name: str | Path, **options: Any) -> TrafficVLMForConditionalGeneration:
    """The full model of a folder or the Hub, with every weight present; adapters are merged.

    `from_pretrained` fills missing tensors with random numbers and ignores tensors that the model does not have. Here
    both are errors, and so are NaN and infinity.

    Args:
        name: a folder, or the name of a repository on the Hub.
        options: passed to `from_pretrained`: config, dtype, attn_implementation, ...

    Raises:
        OSError: there is no such folder or model on the Hub, or it has no weights; or it is an adapter, and its base
            or PEFT is missing.
        ValueError: the file is damaged; tensors are missing, unexpected, of another shape, NaN or infinite; the
            message names them.
    """
    is_folder = os.path.isdir(name)
    if not is_folder and not HUB_NAME.fullmatch(str(name)):
        raise FileNotFoundError(f"{name}: no such folder")
    if base := base_of_adapter(name):
        return merge_adapter(name, base, **options)
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
    check_finite(name, model)
    return model


def has_model(folder: str | Path) -> bool:
    """Whether a folder has the config.json of this model, or is an adapter of PEFT."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return bool(config["model_type"] == TrafficVLMConfig.model_type)
    except (OSError, ValueError, KeyError, TypeError):
        return (Path(folder) / "adapter_config.json").is_file()


def check_finite(name: str | Path, model: TrafficVLMForConditionalGeneration) -> None:
    """Raise a ValueError that names weights with NaN or infinity."""
    damaged = [key for key, tensor in model.state_dict().items() if not bool(tensor.isfinite().all())]
    if damaged:
        raise ValueError(f"{name}: NaN or infinite weights in {', '.join(damaged[:3])} ({len(damaged)} in all)")


def base_of_adapter(name: str | Path) -> str | None:
    """The base model of an adapter of PEFT, a folder or a name on the Hub; None if `name` is a full model."""
    if os.path.isdir(name) and any(Path(name).glob("model*.safetensors")):
        return None
    path = find_adapter_config_file(str(name))
    if path is None:
        return None
    try:
        return str(json.loads(Path(path).read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged: it does not name the base model") from error


def refuse_adapter(name: str | Path, purpose: str) -> None:
    """Raise a ValueError if a model is an adapter, which `purpose` cannot use."""
    if base := base_of_adapter(name):
        raise ValueError(
            f"{name} is an adapter of {base}, and {purpose} needs a full model. To write one: "
            f"traffic_vlm.common.loading.load_weights({str(name)!r}).save_pretrained(FOLDER)"
        )


def merge_adapter(name: str | Path, base: str, **options: Any) -> TrafficVLMForConditionalGeneration:
    """The base model with an adapter merged into its weights. Raises what `load_weights` raises."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise OSError(f"{name} is an adapter of {base}. To merge them on loading: pip install peft") from error
    if os.path.isdir(name) and not any(Path(name).glob("adapter_model.*")):
        raise FileNotFoundError(f"{name} is an adapter without adapter_model.safetensors")
    try:
        model = load_weights(base, **options)
    except OSError as error:
        raise OSError(f"{name} is an adapter, whose base (in its adapter_config.json) is missing: {error}") from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            merged = PeftModel.from_pretrained(model, str(name)).merge_and_unload()
    except Exception as error:  # whatever the parts of PEFT raise
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: the adapter cannot be merged into {base}: {reason:.300}") from error
    check_finite(name, merged)
    return merged


def load_processor(name: str | Path) -> TrafficVLMProcessor:
    """The processor of a model; for a folder of an adapter without a processor, that of its base."""
    if os.path.isdir(name) and not (Path(name) / "processor_config.json").exists() and (base := base_of_adapter(name)):
        return load_processor(base)
    return TrafficVLMProcessor.from_pretrained(name)

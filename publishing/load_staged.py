"""Load a staged folder as a stranger would: `hub.check_loading` runs this file in a fresh process.

Writes a list of `[what was tried, problem or ""]` as JSON. It imports nothing of ours, and hides the package.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


NEEDED = ("AutoConfig", "AutoModel", "AutoProcessor", "AutoTokenizer")


def load(name: str, reference: str, folder: str, loaded: dict[str, Any]) -> None:
    """Load by one auto class into `loaded`.

    Raises:
        ValueError: it gives another class than `auto_map` names, or weights do not fit the model that they belong to.
    """
    import transformers

    auto, wanted = getattr(transformers, name), reference.rpartition(".")[2]
    if not name.startswith("AutoModel"):
        loaded[name] = auto.from_pretrained(folder, trust_remote_code=True)
    else:
        loaded[name], info = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
        faults = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys") if info[kind]}
        if faults and wanted in (loaded[name].config.architectures or [wanted]):  # other heads begin with fresh ones
            raise ValueError(f"the weights are not those of {wanted}: {faults}")
    if type(loaded[name]).__name__ != wanted:
        raise ValueError(f"it gives {type(loaded[name]).__name__}, auto_map names {wanted}")


def answer(loaded: dict[str, Any]) -> None:
    """Ask about a blank image.

    Raises:
        ValueError: probabilities or logits are no usable numbers.
    """
    import torch
    from PIL import Image

    model, processor = loaded["AutoModel"], loaded["AutoProcessor"]
    questions = [["Is there a car?", "Is it raining?"]]
    inputs = processor(images=[Image.new("RGB", (64, 48))], text=questions, packed=True, return_tensors="pt")
    with torch.no_grad():
        [probabilities] = model.score_yes_no(**inputs)
        logits = model(**inputs).logits
    if len(probabilities) != 2 or not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise ValueError(f"P(yes) of two questions is {probabilities.tolist()}")
    if not torch.isfinite(logits).all():
        raise ValueError("the logits are not finite")


def attempt(task: Callable[..., None], *arguments: Any) -> str:
    try:
        task(*arguments)
    except Exception as error:  # code from the folder may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return ""


def main(folder: str, auto_map: str, results: str) -> None:
    # Not to be found: the folder must do alone, as it must where this package is not installed.
    sys.modules["traffic_vlm"] = None  # type: ignore[assignment]
    import transformers

    entries: dict[str, str] = json.loads(auto_map)
    loaded: dict[str, Any] = {}
    outcomes = [(name, "auto_map does not name it") for name in NEEDED if name not in entries]
    for name, reference in sorted(entries.items()):
        if not hasattr(transformers, name):
            outcomes.append((f"{name}, not tried: transformers {transformers.__version__} does not know it", ""))
            continue
        outcomes.append((f"{name} loads", attempt(load, name, reference, folder, loaded)))
    if {"AutoModel", "AutoProcessor"} <= loaded.keys():
        outcomes.append(("an answer about a blank image", attempt(answer, loaded)))
    Path(results).write_text(json.dumps(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The card of a model that somebody trained: what it was made from, and its own figures in place of ours."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from ..utils import atomic_write_text


ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- Written by scripts/train.py; take this line away, and it will not be written again. -->"
KEPT = ("language", "library_name", "pipeline_tag", "tags")
LICENSE = ("license", "license_name", "license_link")
OWN_LICENSE = {"license": "other", "license_name": "not-chosen-yet"}
BODY = """
{mark}

# {name}

A Traffic VLM: it looks at a traffic scene once and answers many questions about it.
{made} on {datasets}, {steps} steps.

{figures}

With `folder` for this one, or its name on the Hub:

```python
from transformers import AutoModel, AutoProcessor

model = AutoModel.from_pretrained(folder, trust_remote_code=True)
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
questions = [["Is there a pedestrian?"]]  # a list for each image
scores = model.score_yes_no(**processor(images=["scene.jpg"], text=questions, packed=True, return_tensors="pt"))
print(processor.post_process_yes_no(scores, questions))
```
"""


def read_metadata(card: Path) -> dict[str, Any]:
    """What stands at the head of a card; nothing where there is none that can be read."""
    try:
        found = metadata_load(card)
    except Exception:  # whatever is wrong with somebody's card: a run that has finished must not end by it
        return {}
    return found if isinstance(found, dict) else {}


def write_card(
    folder: Path, base: str | None, datasets: Sequence[str], steps: int, figures: Mapping[str, float]
) -> None:
    """Write README.md of a trained model, unless somebody has written one; and the licence that it names.

    Args:
        base: the folder or name of the weights that training started from; None if it started from scratch. The
            licence of a folder's card holds for what became of its weights; where there is none to read, as with a
            name on the Hub, and from scratch, it is left to be chosen.
        datasets: names of what it was trained on.
        figures: of its last evaluation, by name; none if there was none.
    """
    path = folder / "README.md"
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    origin, ours = Path(base or ""), read_metadata(ROOT / "README.md")
    theirs = read_metadata(origin / "README.md") if base else {}
    terms = {name: theirs[name] for name in LICENSE if isinstance(theirs.get(name), str)} or OWN_LICENSE
    metadata = ModelCardData(**({name: ours[name] for name in KEPT if name in ours} | terms))
    link = terms.get("license_link", "")
    is_inside = (folder / link).resolve().is_relative_to(folder.resolve())
    if is_inside and (origin / link).is_file() and origin.resolve() != folder.resolve():
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin / link, folder / link)
    table = ["| evaluated while training | |", "|---|--:|"] + [
        f"| {key} | {value:.3f} |" for key, value in figures.items()
    ]
    body = BODY.format(
        mark=MARK,
        name=folder.resolve().name,
        made=f"Fine-tuned from `{Path(base).name or 'traffic-vlm'}`" if base else "Trained from scratch",
        datasets=", ".join(f"`{Path(name).name}`" for name in datasets),
        steps=steps,
        figures="\n".join(table) if figures else "It was not evaluated: `scripts/evaluate.py` does that.",
    )
    atomic_write_text(path, f"---\n{metadata.to_yaml()}\n---\n{body}")

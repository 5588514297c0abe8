"""The model card (README.md) of a trained model: its base, its datasets, its metrics and its license."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from ..files import atomic_write_text


ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- Written by scripts/train.py"
COPIED_FIELDS = ("language", "library_name", "pipeline_tag", "tags")
LICENSE_FIELDS = ("license", "license_name", "license_link")
NO_LICENSE = {"license": "other", "license_name": "not-chosen-yet"}
TEMPLATE = """---
{metadata}
---

{mark}, which overwrites this file as long as this line is in it. -->

# {name}

A Traffic VLM: it encodes an image of a traffic scene once and answers many questions about it.
{origin} on {datasets}, {steps} steps.

{metrics}

`folder` is this folder, or its name on the Hub:

```python
from transformers import pipeline

vqa = pipeline("visual-question-answering", model=folder, trust_remote_code=True)
print(vqa("scene.jpg", ["Is there a pedestrian?", "What color is the traffic light?"]))
```
"""


def read_metadata(card: Path) -> dict[str, Any]:
    """Return the metadata of a model card, or {} if there are none or they cannot be read."""
    try:
        metadata = metadata_load(card)
    except Exception:  # a broken card of the base model must not make a finished training run fail
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def write_card(
    folder: Path,
    base: str | None,
    datasets: Sequence[str],
    steps: int,
    before: Mapping[str, float],
    after: Mapping[str, float],
    verdict: str = "",
) -> None:
    """Write README.md of a trained model, and copy the license file that it names.

    A hand-written card, one without the line `MARK`, is not overwritten.

    Args:
        base: folder or Hub name of the initial weights; None if trained from scratch. The license is taken from the
            card in that folder. Without such a card the license is marked as not chosen yet.
        datasets: folders or names of the training datasets.
        before, after: metrics by name, before training and of the finished weights; may be empty.
        verdict: a sentence on the difference.
    """
    path = folder / "README.md"
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    base_folder = Path(base or "")
    base_metadata = read_metadata(base_folder / "README.md") if base else {}
    own_metadata = read_metadata(ROOT / "README.md")
    fields = {name: base_metadata[name] for name in LICENSE_FIELDS if isinstance(base_metadata.get(name), str)}
    fields = fields or NO_LICENSE
    link = fields.get("license_link", "")
    if link == Path(link).name and (base_folder / link).is_file() and base_folder.resolve() != folder.resolve():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base_folder / link, folder / link)
    metadata = {name: own_metadata[name] for name in COPIED_FIELDS if name in own_metadata} | fields
    metrics = "It was not evaluated; `scripts/evaluate.py` does that."
    if after:
        rows = [f"| {name} | {_format(before.get(name))} | {value:.3f} |" for name, value in after.items()]
        header = ["| evaluated while training | before | after |", "|---|--:|--:|"]
        metrics = "\n".join([verdict, "", *header, *rows]).strip()
    card = TEMPLATE.format(
        metadata=ModelCardData(**metadata).to_yaml(),
        mark=MARK,
        name=folder.resolve().name,
        origin=f"Fine-tuned from `{Path(base).name or 'traffic-vlm'}`" if base else "Trained from scratch",
        datasets=", ".join(f"`{Path(name).name}`" for name in datasets),
        steps=steps,
        metrics=metrics,
    )
    atomic_write_text(path, card)

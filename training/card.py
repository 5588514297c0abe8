"""The model card (README.md) of a trained model: its base, its datasets, its metrics and its license."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from ..common.files import atomic_write_text


ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- Written by scripts/train.py"
COPIED_FIELDS = ("language", "library_name", "pipeline_tag", "tags")  # of our own card
LICENSE_FIELDS = ("license", "license_name", "license_link")  # of the card of the base
NO_LICENSE = {"license": "other", "license_name": "not-chosen-yet"}
TEMPLATE = """---
{metadata}
---

{mark}, which overwrites this file as long as this line is in it. -->

# {name}

A Traffic VLM: it encodes an image of a traffic scene once and answers many questions about it.
{origin} on {datasets}, {steps} steps.

{verdict}

{metrics}

`folder` is this folder, or its name on the Hub:

```python
from transformers import pipeline

vqa = pipeline("visual-question-answering", model=folder, trust_remote_code=True)
print(vqa("scene.jpg", ["Is there a pedestrian?", "What color is the traffic light?"]))
```
"""


def write_card(
    folder: Path,
    base: str | None,
    datasets: Sequence[str],
    steps: int,
    verdict: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> None:
    """Write README.md of a trained model, and copy the license file that it names.

    A hand-written card, one without the line `MARK`, is not overwritten.

    Args:
        base: folder or Hub name of the initial weights; None if trained from scratch. The license is taken from the
            card in that folder. Without such a card the license is marked as not chosen yet.
        datasets: folders or names of the training datasets.
        verdict: sentences on what training changed.
        before, after: metrics by name, before training and of the finished weights; may be empty.
    """
    path, base_folder = folder / "README.md", Path(base or "")
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    found = read_metadata(base_folder / "README.md") if base else {}
    license = {name: found[name] for name in LICENSE_FIELDS if isinstance(found.get(name), str)}
    link = license.get("license_link", "")
    if link == Path(link).name and (base_folder / link).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base_folder / link, folder / link)
    own = read_metadata(ROOT / "README.md")
    metadata = {name: own[name] for name in COPIED_FIELDS if name in own} | (license or NO_LICENSE)
    rows = [f"| {name} | {before[name]:.3f} | {value:.3f} |" for name, value in after.items() if name in before]
    card = TEMPLATE.format(
        metadata=ModelCardData(**metadata).to_yaml(),
        mark=MARK,
        name=folder.resolve().name,
        origin=f"Fine-tuned from `{base_folder.name or 'traffic-vlm'}`" if base else "Trained from scratch",
        datasets=", ".join(f"`{Path(name).name}`" for name in datasets),
        steps=steps,
        verdict=verdict,
        metrics="\n".join(["| on the evaluation images | before | after |", "|---|--:|--:|", *rows] if rows else []),
    )
    atomic_write_text(path, card)


def read_metadata(card: Path) -> dict[str, Any]:
    """The metadata of a model card; {} if there are none or they cannot be read: training must not fail at its end."""
    try:
        metadata = metadata_load(card)
    except Exception:  # YAML and encoding have classes of errors of their own
        return {}
    return metadata if isinstance(metadata, dict) else {}

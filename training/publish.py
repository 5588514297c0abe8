"""The model card of a trained model, and its upload to the Hugging Face Hub.

`publish` copies what belongs to a model into a folder, loads that folder in a new process without this package, and
uploads it. After an error nothing on the Hub has changed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CardData, HfApi, ModelCard

from ..common.files import ROOT, atomic_write_text


MARK = "<!-- Written by scripts/train.py, which overwrites this file as long as this line is in it. -->"
FIELDS: dict[str, Any] = {
    "language": "en",
    "library_name": "transformers",
    "pipeline_tag": "visual-question-answering",
    "tags": ["vision-language", "visual-question-answering", "traffic"],
}
LICENSE_FIELDS = ("license", "license_name", "license_link")  # from the card of the initial weights
UNKNOWN_LICENSE: dict[str, Any] = {"license": "other", "license_name": "not-chosen-yet"}
CARD = """# {name}

A Traffic VLM: it encodes an image of a traffic scene once and answers many questions about it.
{origin} on {datasets}, {steps} steps.

{verdict}

`folder` is this folder, or its name on the Hub:

```python
from transformers import pipeline

vqa = pipeline("visual-question-answering", model=folder, trust_remote_code=True)
print(vqa("scene.jpg", ["Is there a pedestrian?", "What color is the traffic light?"]))
```
"""
MODEL_FILES = (
    *("model.safetensors", "config.json", "generation_config.json", "processor_config.json", "tokenizer*.json"),
    *("chat_template.jinja", "README.md", "LICENSE*", "docs/**/*", "training_head.safetensors"),
)

# Load a folder as a user without this package does, and answer a question about a blank image.
LOADING_TEST = """
import sys
sys.modules["traffic_vlm"] = None
from PIL import Image
from transformers import AutoModel, pipeline

_, info = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, output_loading_info=True)
for kind in ("missing_keys", "unexpected_keys"):
    if info[kind]:
        raise ValueError(f"model.safetensors does not fit config.json: {kind} {sorted(info[kind])[:3]}")
vqa = pipeline("visual-question-answering", model=sys.argv[1], trust_remote_code=True)
[answer] = vqa(Image.new("RGB", (64, 48)), "Is it wet?")
if answer["answer"] not in ("yes", "no"):
    raise ValueError(f"a question is answered {answer}")
"""


def write_card(folder: Path, base: str | None, datasets: Sequence[str], steps: int, verdict: str) -> None:
    """Write README.md of a trained model, with the license of the initial weights; a hand-written card is kept.

    Args:
        base: folder or Hub name of the initial weights; None if trained from scratch. Without a card in that folder
            the license is marked as not chosen yet.
        verdict: sentences on what training changed.
    """
    path, start = folder / "README.md", Path(base or "")
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    found = read_metadata(start) if base else {}
    terms = {name: found[name] for name in LICENSE_FIELDS if name in found} or UNKNOWN_LICENSE
    link = start / terms.get("license_link", "")
    if link.is_file():
        shutil.copyfile(link, folder / link.name)
    text = CARD.format(
        name=folder.resolve().name,
        origin=f"Fine-tuned from `{start.name or 'traffic-vlm'}`" if base else "Trained from scratch",
        datasets=", ".join(f"`{Path(name).name}`" for name in datasets),
        steps=steps,
        verdict=verdict,
    )
    atomic_write_text(path, f"---\n{CardData(**FIELDS, **terms).to_yaml()}\n---\n\n{MARK}\n\n{text}")


def read_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of the model card in a folder; {} without a card."""
    path = folder / "README.md"
    return ModelCard.load(path).data.to_dict() if path.is_file() else {}


def publish(
    folder: Path, repo_id: str, dry_run: bool = False, token: str | None = None, private: bool | None = None
) -> str | None:
    """Check and upload a model folder, and print its files.

    Args:
        token: of the Hub; default: `HF_TOKEN`, or the token that `hf auth login` saved.
        private: make a private repository; a public one is a ValueError.

    Returns:
        The URL of the commit; None after a dry run, which uploads nothing.

    Raises:
        ValueError: the folder does not load, or has no card with a license.
        OSError: an error of the Hub.
    """
    if "license" not in read_metadata(folder):
        raise ValueError(f"{folder / 'README.md'}: there is no model card with a license")
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary)
        copy_files(ROOT, ("*_traffic_vlm.py", "LICENSE"), staged)
        copy_files(folder, MODEL_FILES, staged)
        copy_files(folder / "training" / "auxiliary", ["training_head.safetensors"], staged)  # of a clone
        for path in sorted(path for path in staged.rglob("*") if path.is_file()):
            print(f"{path.stat().st_size:>12,}  {path.relative_to(staged)}", flush=True)
        check_loading(staged)
        print("ok: the folder loads in a new process and answers a question", flush=True)
        if dry_run:
            return None
        api = HfApi(token=token)
        # The answer has the user's name, if it was missing.
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id).private:
            raise ValueError(f"{repo_id} exists and is public; nothing was uploaded")
        return api.upload_folder(repo_id=repo_id, folder_path=staged).commit_url


def copy_files(folder: Path, patterns: Sequence[str], target: Path) -> None:
    """Copy the files of a folder that match glob patterns."""
    for path in {path for pattern in patterns for path in folder.glob(pattern)}:
        if path.is_file() and "__pycache__" not in path.parts:
            copied = target / path.relative_to(folder)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)


def check_loading(staged: Path) -> None:
    """Raise a ValueError unless the folder loads in a new process, without a cache of remote code, and answers."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"HF_HOME": cache, "HF_MODULES_CACHE": f"{cache}/modules", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-P", "-c", LOADING_TEST, str(staged.resolve())]
        process = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise ValueError(f"the folder does not load in a new process: {process.stderr[-1000:].strip()}")

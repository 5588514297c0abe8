"""Upload a model to the Hugging Face Hub: weights, processor, code and model card in one commit.

`publish` copies the files to upload into a folder, checks the model card, loads the folder in a new process without
this package, and uploads it. A failed check or an interrupted upload changes nothing on the Hub.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token


ROOT = Path(__file__).resolve().parent.parent
FILES = (
    *("model.safetensors", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"),
)
ATTRIBUTES = "*.safetensors filter=lfs diff=lfs merge=lfs -text\n"  # .gitattributes on the Hub
CARD_FILES = ("README.md", "LICENSE*", "docs/**/*")
APP_FILES = (
    *("*.py", "*.json", "*.jinja", "model.safetensors", "README.md", "LICENSE*", "docs/*.jpg"),
    *(f"{room}/**/*" for room in ("common", "data", "evaluation", "serving")),
)
CARD_FIELDS = ("license", "library_name", "pipeline_tag", "tags")

# Load a folder as a user without this package does, and answer a question about a blank image.
LOADING_TEST = """
import sys
sys.modules["traffic_vlm"] = None
from PIL import Image
from transformers import AutoModel, pipeline

try:
    _, info = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys"):
        if info[kind]:
            raise ValueError(f"model.safetensors does not fit config.json: {kind} {sorted(info[kind])[:3]}")
    vqa = pipeline("visual-question-answering", model=sys.argv[1], trust_remote_code=True)
    [answer] = vqa(Image.new("RGB", (64, 48)), "Is it wet?")
    if answer["answer"] not in ("yes", "no"):
        raise ValueError(f"a question is answered {answer}")
except Exception as error:
    sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
"""


class PublishError(ValueError):
    """The model cannot be uploaded; the message gives the reasons."""


def publish(
    folder: Path, repo_id: str, dry_run: bool = False, token: str | None = None, private: bool | None = None
) -> str | None:
    """Check and upload a model folder, and print its files; `token` and `private` are those of `push`.

    Returns:
        The URL of the commit; None after a dry run, which uploads nothing.

    Raises:
        PublishError: the model cannot be uploaded. OSError: the disk is full.
    """
    files = collect_files(folder)
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary) / "staged"
        for name, path in files.items():
            print(f"{path.stat().st_size:>12,}  {name}", flush=True)
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, staged / name)
        (staged / ".gitattributes").write_text(ATTRIBUTES)
        check_card(staged)
        check_loading(staged)
        print("ok: the folder loads in a new process and answers a question", flush=True)
        return None if dry_run else push(staged, repo_id, token, private)


def publish_space(folder: Path, repo_id: str, dry_run: bool = False, private: bool | None = None) -> str | None:
    """Upload a folder as a Space: with app.py as a Gradio app, or a page of `scripts/export.py --web` as static files.

    Returns and raises what `publish` does.
    """
    if (folder / "app.py").is_file():
        with tempfile.TemporaryDirectory() as temporary:
            stage_app(folder, Path(temporary))
            return None if dry_run else push(Path(temporary), repo_id, private=private, space="gradio")
    try:
        files = json.loads((folder / "page.json").read_text(encoding="utf-8"))["files"]
    except FileNotFoundError as error:
        raise PublishError(f"{folder} has no page.json: scripts/export.py --web writes such a folder") from error
    missing = [name for paths in files.values() for name in paths if not (folder / "pinned" / name).is_file()]
    if missing:
        raise PublishError(f"{folder} has no pinned/{', '.join(missing)}")
    return None if dry_run else push(folder, repo_id, private=private, space="static")


def stage_app(folder: Path, staged: Path) -> None:
    """Copy the model, app.py and the code that it needs, and write requirements.txt; gradio comes with its Space."""
    for pattern in APP_FILES:
        for path in folder.glob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                target = staged / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (staged / "requirements.txt").write_text("\n".join([*project["dependencies"], "pyyaml", ""]), encoding="utf-8")
    (staged / ".gitattributes").write_text(ATTRIBUTES)


def collect_files(folder: Path) -> dict[str, Path]:
    """The files to upload: path in the Hub repository → local path.

    README.md, LICENSE files and docs/ are those of the folder if it has a README.md; otherwise, as the code, those of
    this repository.

    Raises:
        PublishError: a file is missing.
    """
    files = {name: folder / name for name in FILES}
    heads = [*folder.glob("training_head.safetensors"), *folder.glob("training/auxiliary/training_head.safetensors")]
    files |= {path.name: path for path in heads}  # for further training
    files |= {path.name: path for path in (*ROOT.glob("*_traffic_vlm.py"), ROOT / "LICENSE")}
    card_folder = folder if (folder / "README.md").is_file() else ROOT
    for pattern in CARD_FILES:
        files |= {p.relative_to(card_folder).as_posix(): p for p in card_folder.glob(pattern) if p.is_file()}
    missing = [name for name, path in files.items() if not path.is_file()]
    if missing:
        raise PublishError(f"{folder} has no {', '.join(missing)}")
    return dict(sorted(files.items()))


def check_card(staged: Path) -> None:
    """Raise a PublishError unless README.md has readable metadata, the fields that the Hub shows, and its license."""
    try:
        metadata = ModelCard.load(staged / "README.md").data
    except Exception as error:  # YAML, encoding or evaluation results: each has its own class of errors
        raise PublishError(f"README.md: the metadata cannot be read: {error}") from error
    missing = [name for name in CARD_FIELDS if not getattr(metadata, name, None)]
    if missing:
        raise PublishError(f"README.md: the metadata have no {', '.join(missing)}")
    link = metadata.get("license_link")
    if link and "://" not in link and not (staged / link).is_file():
        raise PublishError(f"README.md: license_link names {link}, which is not among the files to upload")


def check_loading(staged: Path) -> None:
    """Raise a PublishError unless the folder loads in a new process, without a cache of remote code, and answers."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"HF_HOME": cache, "HF_MODULES_CACHE": f"{cache}/modules", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-P", "-c", LOADING_TEST, str(staged.resolve())]
        process = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True)
    if process.returncode:
        last_line = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise PublishError(f"the folder does not load in a new process: {last_line}")


def push(
    folder: Path, repo_id: str, token: str | None = None, private: bool | None = None, space: str | None = None
) -> str:
    """Upload a folder in one commit and return the URL of the commit. The repository is created if it is missing.

    Args:
        token: of the Hub; default: `HF_TOKEN`, or the token that `hf auth login` saved.
        private: create a private repository, and refuse a public one.
        space: kind of a Space, "static" or "gradio"; None for a model.

    Raises:
        PublishError: no token, a public repository where a private one is required, or an error of the Hub.
    """
    token = token or get_token()
    if not token:
        raise PublishError("uploading needs a token of the Hub: log in with `hf auth login`, or set HF_TOKEN")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in paths]
    api, kind, sdk = HfApi(token=token), "space" if space else "model", space
    try:
        # The answer has the user's name, if it was missing.
        repo_id = api.create_repo(repo_id, repo_type=kind, space_sdk=sdk, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id, repo_type=kind).private:
            raise PublishError(f"{repo_id} exists and is public; nothing was uploaded")
        # Not `upload_folder`: newer releases may split it into several commits, and the first would be incomplete.
        message = "Upload the page" if space else "Upload model, processor, code and model card"
        return api.create_commit(repo_id, operations, commit_message=message, repo_type=kind).commit_url
    except PublishError:
        raise
    except Exception as error:  # the classes of network errors differ between releases of huggingface_hub
        raise PublishError(f"uploading to {repo_id} failed: {type(error).__name__}: {error}") from error

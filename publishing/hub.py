"""Put a model on the Hub: weights, code, processor and card together, or nothing.

- `stage` copies exactly what goes up into an empty folder;
- `check` looks at that folder as a stranger would, and names all that is wrong at once;
- `push` uploads it in one commit, so that nothing half is ever public;
- `publish` is the three in a row.
"""

import ast
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, metadata_load
from huggingface_hub.utils import validate_repo_id


ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = "model.safetensors"
MODEL_FILES = (WEIGHTS, "config.json", "generation_config.json", "decision.json")
PROCESSOR_FILES = ("tokenizer.json", "tokenizer_config.json", "processor_config.json")
TEMPLATES = ("chat_template.jinja", "decision_template.jinja")
OWN_OR_SHARED = ("README.md", "LICENSE")  # a model's own go before the repository's
MAPPED_FILES = ("config.json", "tokenizer_config.json", "processor_config.json")  # those that hold an `auto_map`

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".pkl", ".pickle"}
# What a training run leaves in a folder besides weights: it stays behind, and is no reason to stop.
RUN_STATES = re.compile(r"training_args\.bin|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state.*\.pth")

# numpy and PIL are needed by the image processors of transformers, tokenizers by its tokenizers.
ALLOWED_IMPORTS = sys.stdlib_module_names | {"torch", "transformers", "tokenizers", "numpy", "PIL"}
CARD_FIELDS = ("license", "library_name", "pipeline_tag", "tags")
IDENTIFIER = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
LICENSE_LINK = re.compile(r"^license_link: *[\"']?([^\"'\s]+)", re.MULTILINE)
LINK = re.compile(r"""\]\(([^)\s#]+)|<img\b[^>]*\bsrc=["']([^"'#]+)""")  # of Markdown, of HTML
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINKED_SUFFIXES = {".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp"}
MESSAGE = "Upload model, code, processor and card"

Report = Callable[[str], None]


class PublishError(ValueError):
    """A model cannot go up, and why; `problems` are the reasons one by one."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems if len(problems) == 1 else [f"- {problem}" for problem in problems]))


@dataclass(frozen=True)
class Outcome:
    """What one check found; without a problem it passed."""

    check: str
    problem: str = ""

    def __str__(self) -> str:
        return f"FAIL  {self.check}: {self.problem}" if self.problem else f"ok    {self.check}"


# ---- What goes up


def stage(model_folder: str | os.PathLike, staged: str | os.PathLike, code_folder: str | os.PathLike = ROOT) -> None:
    """Copy what goes up into an empty folder: weights, JSON, templates, the code they need, card and licence.

    Args:
        model_folder: what `save_pretrained` of model and processor wrote, and README.md and LICENSE if it has its own.
        staged: a folder that is empty or not there yet.
        code_folder: where the flat modules are, and README.md and LICENSE for a model without its own.

    Raises:
        PublishError: a file is missing, weights are not in one safetensors file, or `staged` is not empty.
    """
    model, target, code = Path(model_folder), Path(staged), Path(code_folder)
    if not model.is_dir():
        raise PublishError(f"there is no model folder {str(model)!r}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PublishError(f"{str(target)!r} must be an empty folder, or not be there yet")
    sources = {name: model / name for name in (*MODEL_FILES, *PROCESSOR_FILES, *TEMPLATES)}
    sources |= {
        name: next((f for f in (model / name, code / name) if f.is_file()), code / name) for name in OWN_OR_SHARED
    }
    problems = [f"{name} is missing in {source.parent}" for name, source in sources.items() if not source.is_file()]
    others = _other_weights(model)
    if others:
        problems.append(f"weights must be in one {WEIGHTS}, but there are also: {', '.join(others)}")
    if problems:
        raise PublishError(*problems)
    sources |= {name: code / name for name in _reached_code(model, code)}
    card = sources["README.md"]
    sources |= {name: card.parent / name for name in _linked_files(card) if (card.parent / name).is_file()}
    for name, source in sources.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name)


def list_files(staged: str | os.PathLike) -> list[Path]:
    """All files of a folder, in order."""
    return sorted(path for path in Path(staged).rglob("*") if path.is_file())


def _other_weights(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    return [name for name in names if name != WEIGHTS and not RUN_STATES.fullmatch(name)]


def _auto_map(folder: Path) -> dict[str, str]:
    """Each auto class with the `module.Class` that it loads.

    Raises:
        PublishError: a file is no JSON object, or an entry is something else.
    """
    entries: dict[str, str] = {}
    for name in MAPPED_FILES:
        try:
            content = dict(json.loads((folder / name).read_text(encoding="utf-8")))
            auto_map = dict(content.get("auto_map") or {})
        except (ValueError, TypeError) as error:
            raise PublishError(f"{name} is not a JSON object with an auto_map: {error}") from error
        for auto, reference in auto_map.items():
            # A tokenizer has a pair, slow and fast, of which one is null.
            names = [one for one in reference if one] if isinstance(reference, list) else [reference]
            if len(names) != 1 or not isinstance(names[0], str):
                raise PublishError(f"{name}: {auto} in auto_map must be module.Class, got {reference!r}")
            entries[auto] = names[0]
    return entries


def _reached_code(model: Path, code: Path) -> list[str]:
    """Names of the flat modules that `auto_map` reaches, with what they import; those missing are found by `check`."""
    waiting = {reference.rpartition(".")[0] for reference in _auto_map(model).values()}
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        path = code / f"{module}.py"
        if module.isidentifier() and path.name not in found and path.is_file():
            found.add(path.name)
            waiting |= {
                node.module or "" for node in _imports(path) if isinstance(node, ast.ImportFrom) and node.level
            }
    return sorted(found)


def _imports(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise PublishError(f"{path.name} is not valid Python: {error}") from error
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def _linked_files(card: Path) -> list[str]:
    """Paths, from the card's folder, of the pictures, pages and licence that it and these pages link to.

    Without them it would be broken on the Hub. Links out of the folder are left out.
    """
    found: set[str] = set()
    pages = [card.name]
    while pages:
        page = pages.pop()
        path = card.parent / page
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        written = (unquote("".join(either)) for either in LINK.findall(FENCED.sub("", text)))
        links = [link for link in written if PurePosixPath(link).suffix.lower() in LINKED_SUFFIXES]
        for link in links + LICENSE_LINK.findall(text):
            name = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
            if ":" not in link and not name.startswith(("/", "..")) and name not in (*found, card.name):
                found.add(name)
                if name.endswith(".md"):
                    pages.append(name)
    return sorted(found)


# ---- Whether it holds


def check(staged: str | os.PathLike, report: Report | None = None) -> list[Outcome]:
    """Everything that can be known about a staged folder without the Hub, and without running from this package.

    Args:
        report: is told each outcome as it comes.

    Raises:
        PublishError: with all that is wrong.
    """
    outcomes = []
    for look in (check_imports, check_card, check_loading):
        for outcome in look(Path(staged)):
            outcomes.append(outcome)
            if report:
                report(str(outcome))
    problems = [f"{outcome.check}: {outcome.problem}" for outcome in outcomes if outcome.problem]
    if problems:
        raise PublishError(*problems)
    return outcomes


def check_imports(staged: Path) -> list[Outcome]:
    """The code imports only what everybody has who uses transformers, and modules that stand beside it."""
    problems = []
    for path in sorted(staged.glob("*.py")):
        try:
            problems += [
                f"{path.name}:{node.lineno} {fault}" for node in _imports(path) for fault in _faults(node, staged)
            ]
        except PublishError as error:
            problems.append(str(error))
    return [Outcome("imports of the code", "; ".join(problems))]


def _faults(node: ast.Import | ast.ImportFrom, folder: Path) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.level:
        # The library copies what it finds by these lines, and knows no other form.
        if node.level > 1 or not node.module or "." in node.module:
            yield "must import siblings as `from .module import Name`"
        elif not (folder / f"{node.module}.py").is_file():
            yield f"imports {node.module}, which is not there"
        return
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        if name.partition(".")[0] not in ALLOWED_IMPORTS:
            yield f"imports {name}; allowed are torch, transformers, tokenizers, numpy, PIL and the standard library"


def check_card(staged: Path) -> list[Outcome]:
    """README.md has metadata that the Hub can use; the Hub itself looks again when the files arrive."""
    path = staged / "README.md"
    try:
        ModelCard(path.read_text(encoding="utf-8"))  # looks at the evaluation results as well
        fields: dict[str, Any] = metadata_load(path) or {}
    except Exception as error:  # of YAML, of the encoding or of the card's classes: in any case the card is not valid
        return [Outcome("metadata of the card", " ".join(str(error).split()) or type(error).__name__)]
    problems = [f"{name} is missing" for name in CARD_FIELDS if not fields.get(name)]
    for name in ("license", "pipeline_tag"):
        value = fields.get(name)
        if value and not (isinstance(value, str) and IDENTIFIER.fullmatch(value)):
            problems.append(f"{name} must be an identifier in small letters like apache-2.0, got {value!r}")
    if fields.get("license") == "other" and not fields.get("license_name"):
        problems.append("license: other needs a license_name")
    if fields.get("library_name") not in (None, "transformers"):
        problems.append(f"library_name must be transformers, got {fields['library_name']!r}")
    tags = fields.get("tags") or []
    if not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        problems.append(f"tags must be a list of words, got {tags!r}")
    absent = [name for name in _linked_files(path) if not (staged / name).is_file()]
    if absent:
        problems.append(f"it names files that are not there: {', '.join(absent)}")
    return [Outcome("metadata of the card", "; ".join(problems))]


def check_loading(staged: Path) -> list[Outcome]:
    """Every entry of `auto_map` loads in a fresh process with an empty cache of code, and the model answers."""
    try:
        entries = _auto_map(staged)
    except PublishError as error:
        return [Outcome("auto_map", str(error))]
    with tempfile.TemporaryDirectory(prefix="traffic-vlm-") as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-P", str(Path(__file__).with_name("load_staged.py"))]
        command += [str(staged.resolve()), json.dumps(entries), str(results)]
        caches = {"HF_MODULES_CACHE": f"{folder}/modules", "HF_HOME": f"{folder}/home", "HF_HUB_OFFLINE": "1"}
        run = subprocess.run(command, cwd=folder, env=os.environ | caches, capture_output=True, text=True)
        if run.returncode or not results.is_file():
            last = (run.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return [Outcome("loading in a fresh process", f"it ended with status {run.returncode}: {last}")]
        return [Outcome(name, problem) for name, problem in json.loads(results.read_text(encoding="utf-8"))]


# ---- The upload


def push(
    staged: str | os.PathLike,
    repo_id: str,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
) -> str:
    """Upload a staged folder in one commit; the repository is made if need be. Files there that are not here stay.

    Args:
        token: who pushes; by default `HF_TOKEN` or the one that `hf auth login` saved.
        private: True makes the repository so, and refuses one that is public already.
        revision: a branch, made if need be; by default the main one.

    Returns:
        The address of the commit.

    Raises:
        PublishError: the Hub cannot be reached, or refuses.
    """
    path = Path(staged)
    operations = [CommitOperationAdd(file.relative_to(path).as_posix(), file) for file in list_files(path)]
    if not operations:
        raise PublishError(f"there is nothing to push in {str(path)!r}")
    api = HfApi(token=token)
    try:
        # From here on with the user's name, if it had none.
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id).private:
            raise PublishError(f"{repo_id} is there already and is public: nothing was uploaded")
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        # Not `upload_folder`: newer releases cut it into several commits, of which the first would be public alone.
        return api.create_commit(repo_id, operations, commit_message=MESSAGE, revision=revision).commit_url
    except PublishError:
        raise
    # Whatever its class: the HTTP library under huggingface_hub changed twice already, and its errors with it.
    except Exception as error:
        raise PublishError(f"pushing to {repo_id} failed: {_explain(error)}") from error


def _explain(error: BaseException) -> str:
    """One sentence on why the Hub did not take it, and what to do."""
    chain: list[Any] = [error]
    while chain[-1].__cause__ and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    response = next((one.response for one in chain if getattr(one, "response", None) is not None), None)
    words = next((one.server_message for one in chain if getattr(one, "server_message", None)), str(chain[-1]))
    said = " ".join(str(error if isinstance(error, ValueError) else words).split())[:300]
    if response is None:
        offline = type(chain[-1]).__name__ == "OfflineModeIsEnabled"
        advice = "unset HF_HUB_OFFLINE" if offline else "the same command may be given again"
        return f"{type(chain[-1]).__name__}: {said or 'the connection broke'}; {advice}"
    advice = "; log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
    refused = response.status_code in (401, 403)
    return f"the Hub answered {response.status_code} ({said}){advice if refused else ''}"


def publish(
    model_folder: str | os.PathLike,
    repo_id: str,
    dry_run: bool = False,
    *,
    output: str | os.PathLike | None = None,
    code_folder: str | os.PathLike = ROOT,
    report: Report | None = None,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
) -> str | None:
    """Stage, check and push a model folder.

    Args:
        dry_run: do all but the push.
        output: keep the staged folder here; by default it is a temporary one.
        report: is told the files and what each check found.
        code_folder: as in `stage`. token, private, revision: as in `push`.

    Returns:
        The address of the commit, or None after a dry run.

    Raises:
        PublishError: something is missing or wrong, or the Hub does not take it. OSError: the disk is full.
    """
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise PublishError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="traffic-vlm-") as temporary:
        staged = Path(output) if output else Path(temporary) / "staged"
        stage(model_folder, staged, code_folder)
        if report and not (Path(model_folder) / "README.md").is_file():
            report("note: README.md and licences are this repository's; a model of yours should have its own")
        if report:
            for path in list_files(staged):
                report(f"{path.stat().st_size:>12,}  {path.relative_to(staged).as_posix()}")
        check(staged, report)
        return None if dry_run else push(staged, repo_id, token, private, revision)

"""Resuming a run: its last complete checkpoint, and whether a folder belongs to the same run."""

import json
from pathlib import Path
from typing import Any

from ..files import atomic_write_text


OPTIONS_FILE = "training_options.json"  # beside the checkpoints
# These may change when a run is resumed.
RUNTIME_ONLY_OPTIONS = ("attn_implementation", "compile_decoder", "from_scratch", "save_dtype")


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; the library writes `trainer_state.json` last."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if _is_json(path)]
    return max(complete, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def check_same_run(folder: Path, options: dict[str, Any]) -> None:
    """Raise a ValueError if a folder has checkpoints of a run with other options; save the options of this one."""
    path = folder / OPTIONS_FILE
    options = {name: value for name, value in options.items() if name not in RUNTIME_ONLY_OPTIONS}
    if last_checkpoint(folder) and path.is_file():
        before = json.loads(path.read_text())
        for name, value in options.items():
            if before.get(name, value) != value:  # absent: an option that is newer than the run
                raise ValueError(
                    f"{folder} holds a run with --{name} {before.get(name)}, not {value}: choose another "
                    "--output_dir, or delete that run"
                )
    atomic_write_text(path, json.dumps(options, indent=1))

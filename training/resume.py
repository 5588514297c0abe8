"""Resuming a run: its last complete checkpoint."""

import json
from pathlib import Path
from typing import Any

from ..files import claim


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


def claim_run(folder: Path, options: dict[str, Any]) -> None:
    """Note the options of a run in its folder, beside its checkpoints.

    Raises:
        DataError: the folder has checkpoints of a run with other options.
    """
    if last_checkpoint(folder) is None:
        (folder / ".options.json").unlink(missing_ok=True)  # of a run that ended before its first checkpoint
    claim(folder, options)

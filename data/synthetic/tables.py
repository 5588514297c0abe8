"""Tables of this folder that are to be edited by hand: shapes, colors, and what scenes hold."""

import functools
from pathlib import Path
from typing import Any

import yaml


FOLDER = Path(__file__).parent


@functools.cache
def load(name: str) -> dict[str, Any]:
    """The content of a YAML file; a folder's files put together."""
    if not name.endswith(".yaml"):
        return {key: value for path in sorted((FOLDER / name).glob("*.yaml")) for key, value in _read(path).items()}
    return _read(FOLDER / name)


def _read(path: Path) -> dict[str, Any]:
    # PyYAML's parser in C, which most installations have, takes 20 ms for all tables, the one in Python 300.
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))

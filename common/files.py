"""Files: `DataError`, and atomic writes of files and folders. This module needs only the standard library."""

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


_UMASK = os.umask(0o022)  # the only way to read the umask is to set it
os.umask(_UMASK)
FILE_MODE = 0o666 & ~_UMASK  # the mode of files from `open`; files from safetensors would be for their owner only

ROOT = Path(__file__).resolve().parent.parent  # a clone has weights here, an installed package has none


class DataError(ValueError):
    """Invalid input data. The message names the file, and the line or record."""


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` at the end of the block. Creates missing folders.

    After an error inside the block the temporary file is removed and `path` is unchanged. Several writers of one file
    each have their own temporary file; the last one to finish wins.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        temporary.chmod(FILE_MODE)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically: after a crash `path` is either the old or the complete new file."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder, and rename it to `path` at the end of the block. Creates missing parents.

    After an error inside the block nothing is left.

    Raises:
        DataError: `path` exists.
    """
    if path.exists():
        raise DataError(f"{path} exists; choose another --output_dir")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        folder = Path(temporary) / path.name
        folder.mkdir()
        yield folder
        os.replace(folder, path)

"""Files of a source: only those inside of its folder, each read once. What is wrong with one is an `Unusable`."""

import codecs
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

from ...common.files import DataError


class Unusable(DataError):
    """An image, or a file with all of its images, that cannot be used.

    The arguments are the kind of problem, where it is (file:line, or file and record), and a message.
    """

    def __str__(self) -> str:
        _, where, message = self.args
        return f"{where}: {message}"


def open_inside(path: Path, folder: Path) -> BinaryIO:
    """The open file, to read its bytes.

    Raises:
        DataError: it is outside of the folder once all links are followed, or not a regular file (a FIFO would block).
        OSError: for example, there is no such file.
    """
    target, root = path.resolve(), folder.resolve()
    if not target.is_relative_to(root):
        raise DataError(f"{path} leads to {target}, which is outside of {folder}: files of other folders are not read")
    if target.exists() and not target.is_file():
        raise DataError(f"{path} is not a regular file")
    return open(path, "rb")


@contextmanager
def reading(where: object, message: str = "cannot be read", kind: str = "bad file") -> Iterator[None]:
    """Turn any error of the block, which opens or parses a file, into an `Unusable` with the reason behind `message`.

    What `open_inside` refuses, such as a link out of the source, is of the kind "refused file".
    """
    try:
        yield
    except Unusable:
        raise
    except DataError as error:
        raise Unusable("refused file", where, str(error)) from error
    except Exception as error:  # on broken files, parsers and Pillow raise almost anything
        raise Unusable(kind, where, f"{message}: {' '.join(str(error).split()) or type(error).__name__}") from error


class Folder:
    """The folder of a source. It is walked once, and none of its annotation files is read twice.

    All methods raise `Unusable`.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.walked: dict[Path, list[str]] = {}
        self.kept: dict[Path, Any] = {}

    def files(self, path: Path) -> list[str]:
        """Sorted paths of all files below a folder, relative to it; links to folders are not followed."""
        if not path.is_dir():
            raise Unusable("bad file", path, "there is no such folder")
        for walked, names in self.walked.items():
            if path.is_relative_to(walked):
                start = f"{path.relative_to(walked).as_posix()}/".removeprefix("./")
                return [name.removeprefix(start) for name in names if name.startswith(start)]
        paths = (Path(parent, name) for parent, _, names in os.walk(path) for name in names)
        self.walked[path] = sorted(one.relative_to(path).as_posix() for one in paths)
        return self.walked[path]

    def open(self, path: Path) -> BinaryIO:
        return open_inside(path, self.root)

    def lines(self, path: Path) -> list[tuple[str, str]]:
        """(file:line, line) of each line that is not blank."""
        return [(f"{path}:{i}", line) for i, line in split_lines(self.parse(path, decode_text))]

    def json(self, path: Path, keep: bool = False) -> Any:
        """Value of a JSON file; a list for JSON lines."""
        return self.parse(path, _parse_json, keep)

    def xml(self, path: Path, keep: bool = False) -> ElementTree.Element:
        """Root of an XML file, in the encoding that it declares."""
        return self.parse(path, ElementTree.fromstring, keep)

    def parse(self, path: Path, parser: Callable[[bytes], Any], keep: bool = False) -> Any:
        """`parser` of the content of a file. With `keep`, the next call returns this value without reading."""
        if path in self.kept:
            value = self.kept.pop(path)
        else:
            with reading(path), self.open(path) as file:
                value = parser(file.read())
        if keep:
            self.kept[path] = value
        return value


def _parse_json(content: bytes) -> Any:
    text = decode_text(content)
    try:
        return json.loads(text)
    except ValueError as error:
        try:
            return [json.loads(line) for _, line in split_lines(text)]
        except ValueError:
            raise error from None


def decode_text(content: bytes) -> str:
    """The text of a file in UTF-8, with or without a byte-order mark, or in UTF-16 with one.

    Raises:
        UnicodeDecodeError: it is in another encoding.
    """
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_utf16 else "utf-8-sig")


def split_lines(text: str) -> list[tuple[int, str]]:
    """(number, line) of each line that is not blank. Only \\n and \\r end one: a JSON text may hold U+2028."""
    return [(i, line.strip()) for i, line in enumerate(io.StringIO(text, newline=None), start=1) if line.strip()]


def to_number(value: Any) -> float:
    """Number of a value, NaN if it is not one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def to_flag(value: Any) -> bool:
    """Whether a value means yes: true, 1, "1", "1.0", " true ", "yes". All others mean no."""
    return str(value).strip().casefold() in ("true", "yes") or to_number(value) > 0

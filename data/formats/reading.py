"""Files of a labeled folder: only those inside of it, each read once. What is wrong with one is an `Unusable`."""

import io
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ...common.files import DataError


Box = tuple[float, float, float, float]  # left, top, right, bottom
UNREADABLE: Box = (math.nan,) * 4


class Unusable(DataError):
    """An image, or a file of all images, that cannot be used: the kind of problem, where it is, and a message."""

    def __str__(self) -> str:
        return f"{self.args[1]}: {self.args[2]}"


def reason_of(error: Exception) -> str:
    """The message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass
class Folder:
    """A folder of images and labels, walked once; none of its label files is read twice. Methods raise `Unusable`."""

    root: Path
    walked: dict[Path, list[str]] = field(default_factory=dict)
    kept: dict[Path, Any] = field(default_factory=dict)

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

    def read(self, path: Path, parse: Callable[[BinaryIO], Any], keep: bool = False) -> Any:
        """`parse` of an open file. With `keep`, the next call takes this value. No link may lead out of the folder."""
        if path not in self.kept:
            target = path.resolve()
            if not target.is_relative_to(self.root.resolve()):
                why = f"leads to {target}, which is outside of {self.root}: files of other folders are not read"
                raise Unusable("refused file", path, why)
            try:
                with path.open("rb") as file:
                    self.kept[path] = parse(file)
            except Exception as error:  # on broken files, parsers and Pillow raise almost anything
                raise Unusable("bad file", path, f"cannot be read: {reason_of(error)}") from error
        return self.kept[path] if keep else self.kept.pop(path)

    def lines(self, path: Path) -> list[tuple[str, str]]:
        """(file:line, line) of each line that is not blank."""
        return [(f"{path}:{i}", line) for i, line in split_lines(self.read(path, parse_text))]


def parse_text(file: BinaryIO) -> str:
    """The text of a file in UTF-8 or UTF-16, with or without a byte-order mark."""
    content = file.read()
    return content.decode(json.detect_encoding(content))


def split_lines(text: str) -> list[tuple[int, str]]:
    """(number, line) of each line that is not blank. Only \\n and \\r end one: a JSON text may hold U+2028."""
    return [(i, line.strip()) for i, line in enumerate(io.StringIO(text, newline=None), start=1) if line.strip()]


def parse_lists(file: BinaryIO, keys: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The lists of JSON objects in a JSON file; a file that is a list is the first one. Others are a ValueError."""
    data = json.load(file)
    data = {keys[0]: data} if isinstance(data, list) else data
    lists = [data.get(key) for key in keys] if isinstance(data, dict) else [None]
    if not all(isinstance(one, list) and all(isinstance(entry, dict) for entry in one) for one in lists):
        raise ValueError(f"it is not a JSON object with the lists {', '.join(keys)} of objects")
    return data


def to_number(value: Any) -> float:
    """Number of a value, NaN if it is not one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan

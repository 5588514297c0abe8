"""Other people's files as text, lines, JSON and XML: whatever is wrong with a file is an `Unusable` that names it."""

import io
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ...common.files import DataError, open_inside
from .names import decode_text


class Unusable(DataError):
    """An image, or a file with all of its images, that cannot be used.

    The arguments are the kind of problem, where it is (file:line, or file and record), and a message.
    """

    def __str__(self) -> str:
        _, where, message = self.args
        return f"{where}: {message}"


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


def read_text(path: Path, root: Path) -> str:
    """Text of a file below `root`. Like all functions here that read a file, it raises `Unusable`."""
    with reading(path), open_inside(path, root) as file:
        return decode_text(file.read())


def read_lines(path: Path, root: Path) -> list[tuple[str, str]]:
    """(file:line, line) of each line that is not blank."""
    return [(f"{path}:{i}", line) for i, line in split_lines(read_text(path, root))]


def split_lines(text: str) -> list[tuple[int, str]]:
    """(number, line) of each line that is not blank. Only \\n and \\r end one: a JSON text may hold U+2028."""
    return [(i, line.strip()) for i, line in enumerate(io.StringIO(text, newline=None), start=1) if line.strip()]


def read_json(path: Path, root: Path) -> Any:
    """Value of a JSON file; a list for JSON lines."""
    text = read_text(path, root)
    with reading(path):
        try:
            return json.loads(text)
        except ValueError as error:
            try:
                return [json.loads(line) for _, line in split_lines(text)]
            except ValueError:
                raise error from None


def read_xml(path: Path, root: Path) -> ElementTree.Element:
    """Root of an XML file, in the encoding that it declares."""
    with reading(path), open_inside(path, root) as file:
        return ElementTree.parse(file).getroot()


def to_number(value: Any) -> float:
    """Number of a value, NaN if it is not one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def to_flag(value: Any) -> bool:
    """Whether a value means yes: true, 1, "1", "1.0", " true ", "yes". All others mean no."""
    return str(value).strip().casefold() in ("true", "yes") or to_number(value) > 0

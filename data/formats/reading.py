"""Files of a labeled folder: only those inside of it, each read once. What is wrong with one is an `Unusable`."""

import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

from ...common.files import DataError, decode_text


Box = tuple[float, float, float, float]  # left, top, right, bottom
UNREADABLE: Box = (math.nan,) * 4
EXPORT = "export COCO JSON, YOLO or Pascal VOC"
# Labels that are not read, by a key of the JSON object, or of the first entry of it or of its lists
OTHER_FORMS = {
    "segments_info": "panoptic COCO: use instances_*.json of the same images",
    "shapes": "JSON of LabelMe: convert it with labelme2coco.py or labelme2voc.py of LabelMe",
    "data": f"JSON of Label Studio: {EXPORT} from it",
    "lead_time": f"short JSON of Label Studio: {EXPORT} from it",
    "regions": "JSON of VGG Image Annotator: export COCO from it",
    "_via_img_metadata": "JSON of VGG Image Annotator: export COCO from it",
    "items": f"JSON of Datumaro: {EXPORT} from it",
    "classTitle": f"JSON of Supervisely: {EXPORT} from it",
    "data_row": "JSON of Labelbox: convert it to COCO JSON",
}


class Unusable(DataError):
    """An image, or a file of all images, that cannot be used: the kind of problem, where it is, and a message."""

    def __str__(self) -> str:
        return f"{self.args[1]}: {self.args[2]}"


@contextmanager
def reading(where: object, message: str = "cannot be read", kind: str = "bad file") -> Iterator[None]:
    """Turn any error of the block, which opens or parses a file, into an `Unusable`: `message` and the reason."""
    try:
        yield
    except Unusable:
        raise
    except Exception as error:  # on broken files, parsers and Pillow raise almost anything
        raise Unusable(kind, where, f"{message}: {' '.join(str(error).split()) or type(error).__name__}") from error


class Folder:
    """A folder of images and labels, walked once; none of its label files is read twice. Methods raise `Unusable`."""

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

    def read(self, path: Path, parse: Callable[[BinaryIO], Any], keep: bool = False, **wrong: Any) -> Any:
        """`parse` of an open file. With `keep`, the next call takes this value; `wrong` are arguments of `reading`.

        No link may lead out of the folder, and a FIFO would block.
        """
        if path not in self.kept:
            target = path.resolve()
            if not target.is_relative_to(self.root.resolve()):
                why = f"leads to {target}, which is outside of {self.root}: files of other folders are not read"
                raise Unusable("refused file", path, why)
            if target.exists() and not target.is_file():
                raise Unusable("refused file", path, "is not a regular file")
            with reading(**{"where": path} | wrong), path.open("rb") as file:
                self.kept[path] = parse(file)
        return self.kept[path] if keep else self.kept.pop(path)

    def lines(self, path: Path) -> list[tuple[str, str]]:
        """(file:line, line) of each line that is not blank."""
        return [(f"{path}:{i}", line) for i, line in split_lines(self.read(path, parse_text))]


def parse_text(file: BinaryIO) -> str:
    """The text of a file in UTF-8 or UTF-16."""
    return decode_text(file.read())


def parse_json(file: BinaryIO) -> Any:
    """Value of a JSON file; a list for JSON lines. One of OTHER_FORMS is a ValueError."""
    text = decode_text(file.read())
    try:
        data = json.loads(text)
    except ValueError as error:
        try:
            data = [json.loads(line) for _, line in split_lines(text)]
        except ValueError:
            raise error from None
    parts = [data, *data.values()] if isinstance(data, dict) else [data]
    firsts = [part[0] if isinstance(part, list) and part else part for part in parts]
    keys = {key for first in firsts if isinstance(first, dict) for key in first}
    for form in (form for key, form in OTHER_FORMS.items() if key in keys):
        raise ValueError(f"it is {form}")
    return data


def parse_xml(file: BinaryIO) -> ElementTree.Element:
    """Root of a Pascal VOC file. Another root is a ValueError."""
    root = ElementTree.parse(file).getroot()
    if root.tag != "annotation":
        form = {"annotations": ", as XML of CVAT: export PASCAL VOC 1.1, COCO or YOLO 1.1 from it"}.get(root.tag, "")
        raise ValueError(f"its root is <{root.tag}>, not <annotation>{form}")
    return root


def split_lines(text: str) -> list[tuple[int, str]]:
    """(number, line) of each line that is not blank. Only \\n and \\r end one: a JSON text may hold U+2028."""
    return [(i, line.strip()) for i, line in enumerate(io.StringIO(text, newline=None), start=1) if line.strip()]


def to_number(value: Any) -> float:
    """Number of a value, NaN if it is not one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def around(x: Sequence[Any], y: Sequence[Any]) -> Box:
    """The box around points; UNREADABLE if one of the values is not a number."""
    xs, ys = list(map(to_number, x)), list(map(to_number, y))
    is_readable = xs and len(xs) == len(ys) and all(map(math.isfinite, xs + ys))
    return (min(xs), min(ys), max(xs), max(ys)) if is_readable else UNREADABLE

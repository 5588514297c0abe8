"""Mapping files: what the class names of a source mean in our categories, and which of them it labels completely.

Comments in `SourceMapping` explain the keys. The first four are required; "license" and "notes" are for human readers.
"""

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...common.files import DataError
from ..scene import CLASSES, classes_of, is_a
from .reading import reason_of


MAPPINGS = Path(__file__).parent / "mappings"
SHIPPED = sorted(path.stem for path in MAPPINGS.glob("*.json"))
# Required keys of a split
BOXES = {"coco": "annotations", "yolo": "labels", "voc": "annotations", "kitti": "labels", "bdd100k": "annotations"}
LAYOUTS = {format: {"images", key} for format, key in BOXES.items()} | {"masks": {"images", "masks", "classes"}}


@dataclass(frozen=True)
class ClassMapping:
    """The meaning of one class name of a source."""

    category: str | None  # a key of CLASSES; None if the class is ignored
    attributes: dict[str, str] = field(hash=False)  # of every object of the class
    maybe: frozenset[str]  # other categories that an object of the class may have
    doubted: frozenset[str]  # with an object in the image, categories of which there may be more than are labeled
    lost: frozenset[str]  # the same if its label cannot be used


@dataclass(frozen=True)
class SourceMapping:
    """A checked mapping file."""

    name: str  # of the source
    format: str  # a key of LAYOUTS
    # {"train": {"images": folder, and "annotations", "labels", "masks", "classes" as LAYOUTS says; "only" and
    # "except": lists of patterns of image paths below that folder, without suffix; "list": a text file of such paths;
    # "part": for coco, only images whose entry has it}}; paths are relative to the source's folder, and inside it
    splits: dict[str, dict[str, Any]]
    # {class name of the source: category}; null ignores the class. The long form is {"class": category or null,
    # "maybe": [other possible categories], attribute: value}. Case, "_", "-" and spaces make no difference: the keys
    # of a checked mapping are as `normalize` gives them.
    classes: dict[str, ClassMapping]
    exhaustive: frozenset[str] = frozenset()  # categories of which every visible object is labeled
    attributed: dict[str, frozenset[str]] = field(default_factory=dict)  # {category: attributes that all have}
    scene_attributes: dict[str, str] = field(default_factory=dict)  # {name: value} of every image
    scene_attributes_of: dict[str, dict[str, str]] = field(default_factory=dict)  # by pattern of image paths
    # {scene attribute or attribute: {"from": key, "values": {value of the source: ours or null}}}, for bdd100k
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    # {"absent": pixels, "present": pixels, "at": [width, height]}: the minimum size of a mask
    presence: dict[str, Any] = field(default_factory=lambda: {"absent": 0, "present": 0, "at": [1, 1]})
    group: str = ""  # key of an image's entry that names its camera or drive, for coco
    unlabeled: str = ""  # "empty": an image without labels was not labeled, rather than being an empty scene


@lru_cache(maxsize=4096)
def normalize(name: str) -> str:
    """A class name without differences of case, "_", "-", spaces, and the two ways to write an accent."""
    return re.sub(r"[_\s-]", "", unicodedata.normalize("NFC", name).casefold())


def load_mapping(mapping: str | Path) -> SourceMapping:
    """The mapping in a JSON file, given by its path, or by the name of one in `data/formats/mappings`.

    A file that is missing or wrong is a `DataError` that names the wrong value.
    """
    path = Path(mapping) if Path(mapping).suffix == ".json" else MAPPINGS / f"{mapping}.json"
    if not path.is_file():
        raise DataError(f"{path}: cannot be read, there is no such file; shipped mappings are {', '.join(SHIPPED)}")
    try:
        return parse_mapping(json.loads(path.read_bytes()))
    except Exception as error:  # values of other types raise almost anything
        raise DataError(f"{path}: not a mapping file: {reason_of(error)}") from error


def parse_mapping(raw: dict[str, Any]) -> SourceMapping:
    """The mapping in the content of a file. Raises ValueError, or whatever a value of a wrong type raises."""
    mapping = SourceMapping(**{key: value for key, value in raw.items() if key not in ("license", "notes")})
    _check("format", [mapping.format], LAYOUTS)
    for split, layout in mapping.splits.items():
        if missing := LAYOUTS[mapping.format] - layout.keys():
            raise ValueError(f"split {split!r} does not name its {' and '.join(sorted(missing))}")
    classes = {
        normalize(name): _parse_class(name, entry, mapping.exhaustive) for name, entry in mapping.classes.items()
    }
    mapped = [name for name in CLASSES if any(meaning.category == name for meaning in classes.values())]
    _check("exhaustive", mapping.exhaustive, [name for name in CLASSES if any(is_a(one, name) for one in mapped)])
    _check("attributed", mapping.attributed, mapped)
    attributed = {category: frozenset(names) for category, names in mapping.attributed.items()}
    return replace(mapping, classes=classes, exhaustive=frozenset(mapping.exhaustive), attributed=attributed)


def _parse_class(name: str, entry: Any, exhaustive: Iterable[str]) -> ClassMapping:
    """The meaning of a class. By default, a broad category may be any of its exhaustively labeled members."""
    attributes = dict(entry) if isinstance(entry, dict) else {"class": entry}
    if "class" not in attributes:
        raise ValueError(f"{name!r}: {entry} has no 'class'")
    category = attributes.pop("class")
    if category not in [None, *CLASSES]:
        advice = "Ignore such a class with null, and teach its word with questions of your own: train.py --add_words"
        raise ValueError(f"{name!r}: {category!r} is not one of null, {', '.join(CLASSES)}. {advice}")
    members = [member for member in CLASSES if member in exhaustive and category in classes_of(member)[1:]]
    maybe = attributes.pop("maybe", members)
    _check(repr(name), maybe, CLASSES)
    own = frozenset(classes_of(category) if category else ())
    lost = own.union(*map(classes_of, maybe))
    return ClassMapping(category, attributes, frozenset(maybe), lost - own | set(maybe), lost)


def _check(where: str, found: Iterable[Any], allowed: Iterable[Any]) -> None:
    """Raise a ValueError that names the first value that is not allowed."""
    allowed = list(allowed)
    for value in found:
        if value not in allowed:
            raise ValueError(f"{where}: {value!r} is not one of {', '.join(map(str, allowed)) or 'none'}")

"""Readers: annotations of other people → scenes.

    COCO JSON · YOLO · KITTI · BDD100K JSON · masks  +  data/mappings/<source>.json  →  Record(image, scene)

What is special here:
- A mapping file says what a source's names mean in ours, and of which classes it labels everything that can be seen.
- Doubt stays in the scene it touches. A name that may be several of our classes ("maybe"), a bad box, a name that the
  mapping does not list, a region that was not labelled: each takes the classes it may be out of that scene's
  `exhaustive` and `attributed`, so that a "yes" can be said of them, and no "no", count or "only".
- Bad input is counted and skipped (`Problems`), or with `strict=True` an error that names the file and line or record.
- Of an image only the header is read; masks are decoded. A photograph is taken as it is shown: boxes and masks are
  those of the picture turned upright by its EXIF, which is what labelling tools show.

Mapping file, all keys but the first four optional:

    name, format      the source's name, and "coco", "yolo", "kitti", "bdd100k" or "masks"
    splits            {"train": {"images": folder, and "annotations", "labels", "masks", "classes" as the format needs;
                      "only", "except": patterns of image paths below that folder, without suffix}}, below the root
    classes           {its name: ours}; null is known and ignored; {"class": ours or null, "maybe": [ours, ...],
                      attribute: value} where more is to be said. Case, "_" and "-" make no difference in a name.
    exhaustive        our classes of which everything that can be seen is labelled
    attributed        {our class: [attributes given to every object of it]}
    facts, facts_of   facts of every image; {pattern of image paths: facts of these}
    values            {fact or attribute: {"from": key, "values": {its value: ours or null}}}, for bdd100k
    names             its class names in order of their ids, where no file of the source tells them
    presence          {"absent": pixels, "present": pixels, "at": [width, height]}: how big a mask has to be
    unlabelled        "empty": images without one label are ones that nobody labelled, not empty ones
    license, notes    for people
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from ..utils import DataError
from .scene import ATTRIBUTES, CLASSES, FACTS, Scene, SceneObject, given_to_all, is_a


Layout = dict[str, Any]  # one split of a mapping
GRID = 14  # cells per side of `SceneObject.cells`
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"}
MAPPINGS = Path(__file__).parent / "mappings"
LAYOUTS = {  # what a split of each format has to name; YOLO may also name its "classes" file
    "coco": {"images", "annotations"},
    "yolo": {"images", "labels"},
    "kitti": {"images", "labels"},
    "bdd100k": {"images", "annotations"},
    "masks": {"images", "masks"},
}
IMAGE_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow raises on bad files
PRESENCE = {"absent": 0, "present": 0, "at": [1, 1]}  # any mask counts, unless the mapping says otherwise
KITTI_VISIBLE = {0: 1.0, 1: 0.7, 2: 0.25, 3: 0.0}  # fully seen, partly hidden, largely hidden, nobody knows
BDD_FLAG_VISIBLE = 0.7  # "occluded" and "truncated" only tell that some of the object cannot be seen


@dataclass
class Problems:
    """Collects what is wrong with the input: `counts` by kind, and the first `keep` messages."""

    strict: bool = False
    keep: int = 1000
    counts: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def add(self, kind: str, where: object, what: str, expected: bool = False) -> None:
        """Count one problem at `where` (file:line, or file and record); `DataError` if strict, unless `expected`."""
        if self.strict and not expected:
            raise DataError(f"{where}: {what}")
        self.counts[kind] += 1
        if len(self.messages) < self.keep:
            self.messages.append(f"{where}: {what}")


@dataclass(frozen=True)
class Record:
    """One image and its scene."""

    image: Path
    scene: Scene


@dataclass(frozen=True)
class Target:
    """What a source's name means: one of our classes or None (ignored), and classes that it may be as well."""

    label: str | None
    attributes: dict[str, str] = field(default_factory=dict)
    maybe: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SourceMap:
    """A checked mapping file; its keys are explained at the top of this module."""

    name: str
    format: str
    splits: dict[str, Layout]
    classes: dict[str, Target]
    exhaustive: frozenset[str] = frozenset()
    attributed: dict[str, frozenset[str]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    facts_of: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    presence: dict[str, Any] = field(default_factory=PRESENCE.copy)
    unlabelled: str | None = None

    def target(self, name: str) -> Target | None:
        """What `name` means; None if the mapping does not list it."""
        return self.classes.get(_plain(name))

    def scene_facts(self, stem: str) -> dict[str, str]:
        """Facts of the image with this path below its folder, without suffix."""
        facts = dict(self.facts)
        for pattern, more in self.facts_of.items():
            if fnmatchcase(stem, pattern):
                facts |= more
        return facts

    def given(self, key: str, attributes: dict[str, Any], where: str, problems: Problems) -> str | None:
        """Our value of a fact or attribute that the source tells in its own words."""
        rule = self.values[key]
        value = attributes.get(rule["from"])
        if value is not None and str(value) not in rule["values"]:
            problems.add("unknown value", where, f"{rule['from']} is {value!r}, which the mapping does not list")
        return rule["values"].get(str(value))


@lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    return " ".join(re.sub("[_-]", " ", name.casefold()).split())


# ---------------------------------------------------------------------------------------------------------- mappings


def load_mapping(mapping: str | Path) -> SourceMap:
    """Read and check a mapping file, or by its bare name one of those shipped in `data/mappings`."""
    path = Path(mapping)
    if path.suffix != ".json":
        path = MAPPINGS / f"{mapping}.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_clash)
        return _checked_map(raw)
    except OSError as error:
        shipped = ", ".join(shipped_mappings())
        raise DataError(f"{path}: cannot be read ({error.strerror}); shipped mappings are {shipped}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a mapping file: {error!r}") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def shipped_mappings() -> list[str]:
    """Names of the mapping files that come with the project."""
    return sorted(path.stem for path in MAPPINGS.glob("*.json"))


def check_sources(mappings: Iterable[SourceMap]) -> None:
    """`DataError` if two different mappings claim the same source name: their images could not be told apart."""
    seen: dict[str, SourceMap] = {}
    for mapping in mappings:
        if seen.setdefault(mapping.name, mapping) != mapping:
            raise DataError(f"two sources are named {mapping.name!r} and map their classes differently")


def _without_clash(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if result.setdefault(key, value) != value:
            raise ValueError(f"{key!r} stands there twice, as {result[key]!r} and as {value!r}")
    return result


def _checked_map(raw: dict[str, Any]) -> SourceMap:
    if unknown := raw.keys() - SourceMap.__dataclass_fields__.keys() - {"license", "notes"}:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    if raw["format"] not in LAYOUTS:
        raise ValueError(f"format {raw['format']!r} is not among {', '.join(LAYOUTS)}")
    if raw.get("unlabelled", "empty") != "empty" or raw.get("presence", PRESENCE).keys() != PRESENCE.keys():
        raise ValueError(f'"unlabelled" can only be "empty", and "presence" needs {", ".join(PRESENCE)}')
    for split, layout in raw["splits"].items():
        if missing := LAYOUTS[raw["format"]] - layout.keys():
            raise ValueError(f"split {split!r} does not name its {' and '.join(sorted(missing))}")
        if wrong := [key for key in LAYOUTS[raw["format"]] if not isinstance(layout[key], str)]:
            raise ValueError(f"split {split!r}: {wrong[0]} must be a path, got {layout[wrong[0]]!r}")
    exhaustive = frozenset(raw.get("exhaustive", []))
    classes: dict[str, Target] = {}
    spelled: dict[str, str] = {}
    for name, meaning in raw["classes"].items():
        target = _target(name, meaning, exhaustive)
        if classes.setdefault(_plain(name), target) != target:
            raise ValueError(f"{spelled[_plain(name)]!r} and {name!r} are one name and mean different things")
        spelled.setdefault(_plain(name), name)
    labels = {target.label for target in classes.values() if target.label}
    for label in sorted(exhaustive):
        if label not in CLASSES or not any(is_a(mapped, label) for mapped in labels):
            raise ValueError(f"{label!r} cannot be exhaustive: it is no class of ours, or no name is mapped to it")
    every_fact = [raw.get("facts", {}), *raw.get("facts_of", {}).values()]
    every_fact += [{key: value} for key, rule in raw.get("values", {}).items() for value in rule["values"].values()]
    for key, value in (pair for facts in every_fact for pair in facts.items()):
        if value is not None and value not in (FACTS | ATTRIBUTES).get(key, ()):
            raise ValueError(f"{key}={value!r} is no fact or attribute of ours")
    for label, attributes in raw.get("attributed", {}).items():
        if label not in labels or not set(attributes) <= ATTRIBUTES.keys():
            raise ValueError(f"{label!r} cannot be attributed {attributes}: not mapped to, or no such attribute")
    kept = {key: raw[key] for key in ("facts", "facts_of", "values", "presence", "unlabelled") if key in raw}
    attributed = {label: frozenset(names) for label, names in raw.get("attributed", {}).items()}
    names = tuple(raw.get("names", []))
    return SourceMap(raw["name"], raw["format"], raw["splits"], classes, exhaustive, attributed, names=names, **kept)


def _target(name: str, meaning: Any, exhaustive: frozenset[str]) -> Target:
    """One entry of "classes". A wide class may by default be any of its members that are labelled exhaustively."""
    entry = dict(meaning) if isinstance(meaning, dict) else {"class": meaning}
    label = entry.pop("class")
    if label is not None and not isinstance(label, str):
        raise ValueError(f"{name!r} is mapped to {label!r}, which is no class of ours")
    members = [member for member in CLASSES if label and member in exhaustive and CLASSES[member][2] == label]
    maybe = frozenset(entry.pop("maybe", members))
    if unknown := sorted((maybe | ({label} if label else set())) - CLASSES.keys()):
        raise ValueError(f"{name!r} is mapped to {unknown}, which are no classes of ours")
    for key, value in entry.items():
        if value not in ATTRIBUTES.get(key, ()):
            raise ValueError(f"{name!r} is given {key}={value!r}, which is no attribute of ours")
    return Target(label, entry, maybe)


# ------------------------------------------------------------------------------------------------------------ scenes


@dataclass
class _Draft:
    """A scene in the making; objects that cannot be used become problems and doubts."""

    mapping: SourceMap
    problems: Problems
    image: Path
    image_id: str
    width: int
    height: int
    facts: dict[str, str]
    objects: list[SceneObject] = field(default_factory=list)
    doubted: set[str] = field(default_factory=set)
    seen: int = 0  # labels of any kind, also those that are ignored

    def lookup(self, name: str, where: str) -> Target | None:
        """What a name means. A name that is not listed may be anything, so nothing is exhaustive any more."""
        self.seen += 1
        target = self.mapping.target(name)
        if target is None:
            self.problems.add("unknown class", where, f"class {name!r} is not in the mapping of {self.mapping.name!r}")
            self.doubted |= CLASSES.keys()
        return target

    def doubt(self, target: Target, lost: bool = False) -> None:
        """Classes that an object may be, beside the one it is taken for; that one too if the object is `lost`."""
        for label in target.maybe | ({target.label} if lost and target.label else set()):
            wider = CLASSES[label][2]
            self.doubted.add(label)
            if wider and (lost or target.label is None or not is_a(target.label, wider)):
                self.doubted.add(wider)

    def add(self, name: str, box: Sequence[float], where: str, *, visible: float = 1.0, **more: Any) -> None:
        """One labelled box (left, top, right, bottom): mapped, clipped to the image, kept."""
        target = self.lookup(name, where)
        if target is None or (target.label is None and not target.maybe):
            return
        left, top, right, bottom = box
        clipped = (max(left, 0.0), max(top, 0.0), min(right, float(self.width)), min(bottom, float(self.height)))
        area = (clipped[2] - clipped[0]) * (clipped[3] - clipped[1])
        if not (math.isfinite(area) and left < right and top < bottom):
            self.problems.add("bad box", where, f"box {tuple(box)} of {name!r} has no size")
            self.doubt(target, lost=True)
        elif not (clipped[0] < clipped[2] and clipped[1] < clipped[3]):
            size = f"{self.width} × {self.height}"
            self.problems.add("bad box", where, f"box {tuple(box)} of {name!r} lies outside its image of {size}")
            self.doubt(target, lost=True)
        elif target.label is None:
            if area >= self.width * self.height / GRID**2:  # what is smaller than a patch is never asked
                self.doubt(target)
        else:
            self.doubt(target)
            visible = min(max(visible, 0.0), 1.0) * area / ((right - left) * (bottom - top))
            attributes = target.attributes | more.pop("attributes", {})
            self.objects.append(SceneObject(target.label, clipped, visible=visible, attributes=attributes, **more))

    def records(self) -> Iterator[Record]:
        """The finished record, or none if nobody labelled this image."""
        if self.mapping.unlabelled == "empty" and not self.seen:
            what = "has no label, which in this source means that nobody labelled it"
            self.problems.add("unlabelled image", self.image, what, expected=True)
            return
        attributed = given_to_all(self.mapping.attributed, self.objects)
        attributed = {label: names for label, names in attributed.items() if label not in self.doubted}
        exhaustive = self.mapping.exhaustive - self.doubted
        facts, name, size = self.facts, self.mapping.name, (self.width, self.height)
        yield Record(self.image, Scene(*size, tuple(self.objects), facts, exhaustive, attributed, name, self.image_id))


def _draft(root: Path, layout: Layout, name: str, where: str, m: SourceMap, problems: Problems) -> _Draft | None:
    """Begin the scene of the image `name` in the split's image folder; None if the image cannot be used."""
    stem = os.path.splitext(name)[0]
    if not _wanted(layout, stem):
        return None
    path = root / layout["images"] / name
    if os.path.isabs(name) or ".." in PurePosixPath(name).parts:
        problems.add("bad record", where, f"image {name!r} leaves its folder")
        return None
    try:
        with Image.open(path) as image:
            width, height = _upright_size(image)
    except FileNotFoundError:
        problems.add("missing image", where, f"image {path} is missing")
        return None
    except IMAGE_ERRORS as error:
        problems.add("corrupt image", where, f"image {path} cannot be opened: {error}")
        return None
    image_id = PurePosixPath(layout["images"], name).as_posix()
    return _Draft(m, problems, path, image_id, width, height, m.scene_facts(stem))


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of an open image as it is shown, turned by its EXIF; nothing is decoded."""
    width, height = image.size
    try:
        exif = Image.Image.getexif(image)  # a PNG's own method would decode its pixels
        is_turned = image.format != "TIFF" and exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception:  # a broken EXIF block does not stop a person from seeing the picture
        is_turned = False
    return (height, width) if is_turned else (width, height)


def _wanted(layout: Layout, stem: str) -> bool:
    only = any(fnmatchcase(stem, pattern) for pattern in layout.get("only", ["*"]))
    return only and not any(fnmatchcase(stem, pattern) for pattern in layout.get("except", []))


def _read_json(path: Path, problems: Problems, *keys: str) -> dict[str, Any] | None:
    """The object in a JSON file if it has all these lists; a bare list stands for the only one."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problems.add("bad file", path, f"cannot be read: {error}")
        return None
    data = {keys[0]: data} if isinstance(data, list) else data
    if not (isinstance(data, dict) and all(isinstance(data.get(key), list) for key in keys)):
        problems.add("bad file", path, f"is no JSON object with the lists {', '.join(keys)}")
        return None
    return data


def _read_lines(path: Path, problems: Problems) -> list[tuple[str, list[str]]] | None:
    """(file:line, fields) of each line that is not empty; None if the file cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        problems.add("bad file", path, f"cannot be read: {error}")
        return None
    return [(f"{path}:{number}", line.split()) for number, line in enumerate(lines, start=1) if line.strip()]


def _items(path: Path, data: dict[str, Any], key: str, problems: Problems) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and record, object) of each object of the list `data[key]` of a JSON file."""
    for number, entry in enumerate(data[key]):
        if isinstance(entry, dict):
            known = entry.get("id", entry.get("name"))
            yield f"{path}: {key}[{number}]" + ("" if known is None else f" ({known})"), entry
        else:
            problems.add("bad record", f"{path}: {key}[{number}]", "is no JSON object")


def _dict(entry: dict[str, Any], key: str) -> dict[str, Any]:
    value = entry.get(key)
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    """The value as a number, NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _pairs(
    root: Path, layout: Layout, key: str, suffixes: Sequence[str], problems: Problems
) -> Iterator[tuple[str, Path]]:
    """(image path in its folder, annotation file) by equal paths without suffix, in order of these."""
    found: list[dict[str, Path]] = []
    for folder, wanted in ((root / layout["images"], IMAGE_SUFFIXES), (root / layout[key], set(suffixes))):
        if not folder.is_dir():
            problems.add("bad file", folder, "there is no such folder")
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in wanted)
        found.append({path.relative_to(folder).with_suffix("").as_posix(): path for path in files})
    images, annotations = found
    for stem in sorted(images.keys() | annotations.keys()):
        if not _wanted(layout, stem):
            continue
        if stem not in images:
            problems.add("annotation without image", annotations[stem], f"has no image in {root / layout['images']}")
        elif stem not in annotations:
            problems.add("image without annotation", images[stem], f"has no annotation in {root / layout[key]}")
        else:
            yield images[stem].relative_to(root / layout["images"]).as_posix(), annotations[stem]


# ----------------------------------------------------------------------------------------------------------- readers


def read_coco(root: Path, mapping: SourceMap, problems: Problems, split: str = "train") -> Iterator[Record]:
    """COCO JSON. Boxes are scaled where an image was resized in proportion; a crowd is no instance."""
    layout = mapping.splits[split]
    path = root / layout["annotations"]
    data = _read_json(path, problems, "images", "annotations", "categories")
    if data is None:
        return
    names = {str(item.get("id")): str(item.get("name")) for _, item in _items(path, data, "categories", problems)}
    images = list(_items(path, data, "images", problems))
    used = Counter(f"{key} {item.get(key)}" for _, item in images for key in ("id", "file_name"))
    labels: dict[str, list[tuple[str, dict[str, Any]]]] = {str(item.get("id")): [] for _, item in images}
    for where, item in _items(path, data, "annotations", problems):
        if str(item.get("image_id")) in labels:
            labels[str(item.get("image_id"))].append((where, item))
        else:
            problems.add("annotation without image", where, f"there is no image {item.get('image_id')!r}")
    for where, item in images:
        if twice := [f"{key} {item.get(key)}" for key in ("id", "file_name") if used[f"{key} {item.get(key)}"] > 1]:
            problems.add("bad record", where, f"another image has the same {twice[0]}")
            continue
        draft = _draft(root, layout, str(item.get("file_name")), where, mapping, problems)
        if draft is None or (scale := _scale(item, draft, where)) is None:
            continue
        for place, label in labels[str(item.get("id"))]:
            name = names.get(str(label.get("category_id")), f"id {label.get('category_id')}")
            left, top, wide, high = _four(label.get("bbox"))
            box = (left * scale[0], top * scale[1], (left + wide) * scale[0], (top + high) * scale[1])
            area = _number(label.get("area")) * scale[0] * scale[1]
            known = bool(label.get("segmentation")) and 0 < area < math.inf  # without an outline it is that of the box
            draft.add(name, box, place, area=area if known else None, is_instance=not label.get("iscrowd"))
        yield from draft.records()


def _scale(entry: dict[str, Any], draft: _Draft, where: str) -> tuple[float, float] | None:
    """Factors from the size that the annotation was made for to the image's own; None if the shapes differ."""
    width, height = _number(entry.get("width")), _number(entry.get("height"))
    if not (0 < width < math.inf and 0 < height < math.inf):
        return 1.0, 1.0
    across, down = draft.width / width, draft.height / height
    if abs(across - down) > 0.02 * max(across, down):
        what = f"the image is {draft.width} × {draft.height}, its annotation is for {width:g} × {height:g}"
        draft.problems.add("image size", where, what)
        return None
    return across, down


def _four(values: Any) -> list[float]:
    """A list of four numbers; NaN for what is none."""
    return [_number(value) for value in values] if isinstance(values, list) and len(values) == 4 else [math.nan] * 4


def read_yolo(root: Path, mapping: SourceMap, problems: Problems, split: str = "train") -> Iterator[Record]:
    """YOLO folders: `class x y width height` in parts of the image, or `class x1 y1 x2 y2 ...` of an outline."""
    layout = mapping.splits[split]
    names = dict(enumerate(mapping.names)) or _yolo_names(root, layout, problems)
    for name, path in _pairs(root, layout, "labels", [".txt"], problems):
        draft = _draft(root, layout, name, str(path), mapping, problems)
        if draft is None or (lines := _read_lines(path, problems)) is None:
            continue
        for where, fields in lines:
            index, values = _number(fields[0]), np.array([_number(value) for value in fields[1:]])
            if len(values) == 4 and index.is_integer():
                corners = np.stack([values[:2] - values[2:] / 2, values[:2] + values[2:] / 2])
            elif len(values) >= 6 and len(values) % 2 == 0 and index.is_integer():
                corners = np.stack([values.reshape(-1, 2).min(0), values.reshape(-1, 2).max(0)])
            else:
                problems.add("bad record", where, f"{' '.join(fields)[:80]!r} is no class with a box or an outline")
                draft.doubted |= CLASSES.keys()
                continue
            box = (corners * (draft.width, draft.height)).ravel().tolist()
            draft.add(names.get(int(index), f"id {index:g}"), box, where)
        yield from draft.records()


def _yolo_names(root: Path, layout: Layout, problems: Problems) -> dict[int, str]:
    """{id: class name} from `classes.txt` or the "names" of `data.yaml`: by its number, or else its place in the list.

    An id that is left blank or out has no name.
    """
    options = [layout["classes"]] if "classes" in layout else ["data.yaml", "classes.txt"]
    path = next((root / option for option in options if (root / option).is_file()), root / options[0])
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".txt":
            entries = [("", line) for line in text.splitlines()]
        elif inline := re.search(r"^names:\s*([\[{].*?[\]}])", text, re.MULTILINE | re.DOTALL):
            words = re.findall(r"""'[^']*'|"[^"]*"|[^,\[\]{}]+""", inline[1])
            entries = [re.findall(r"^(?:(\d+):)?(.*)", word.strip())[0] for word in words if word.strip()]
        else:
            block = re.search(r"^names:\s*\n((?:\s*(?:-|\d+:).*\n?)+)", text, re.MULTILINE)
            entries = re.findall(r"^\s*(?:-|(\d+):)(.*)", block[1], re.MULTILINE) if block else []
        cleaned = [(number, name.split(" #")[0].strip().strip("'\"")) for number, name in entries]
        if names := {int(number or place): name for place, (number, name) in enumerate(cleaned) if name}:
            return names
        problems.add("bad file", path, "names no classes")
    except (OSError, ValueError) as error:
        problems.add("bad file", path, f"class names cannot be read: {error}")
    return {}


def read_kitti(root: Path, mapping: SourceMap, problems: Problems, split: str = "train") -> Iterator[Record]:
    """KITTI lines: type, truncated, occluded, alpha, left, top, right, bottom, and what this reader leaves alone.

    A DontCare region is one that nobody labelled: the mapping maps it to null and all that it may hold.
    """
    layout = mapping.splits[split]
    for name, path in _pairs(root, layout, "labels", [".txt"], problems):
        draft = _draft(root, layout, name, str(path), mapping, problems)
        if draft is None or (lines := _read_lines(path, problems)) is None:
            continue
        for where, fields in lines:
            values = [_number(value) for value in fields[1:8]]
            if len(values) < 7 or not all(math.isfinite(value) for value in values):
                problems.add("bad record", where, f"{' '.join(fields)[:80]!r} is no KITTI label")
                draft.doubted |= CLASSES.keys()
                continue
            visible = KITTI_VISIBLE.get(int(values[1]), 1.0) * (1.0 - max(values[0], 0.0))
            draft.add(fields[0], values[3:], where, visible=visible)
        yield from draft.records()


def read_bdd100k(root: Path, mapping: SourceMap, problems: Problems, split: str = "train") -> Iterator[Record]:
    """BDD100K detection JSON, also as {"frames": [...]}. "occluded" and "truncated" are yes or no there."""
    layout = mapping.splits[split]
    path = root / layout["annotations"]
    data = _read_json(path, problems, "frames")
    for where, frame in _items(path, data, "frames", problems) if data else ():
        draft = _draft(root, layout, str(frame.get("name")), where, mapping, problems)
        if draft is None:
            continue
        labels = frame.get("labels") or []
        if not isinstance(labels, list):
            problems.add("bad record", where, "its labels are no list")
            continue
        told = _dict(frame, "attributes")
        for fact in FACTS:
            if fact in mapping.values and (value := mapping.given(fact, told, where, problems)):
                draft.facts[fact] = value
        for number, entry in enumerate(labels):
            place = f"{where}, label {number}"
            label = entry if isinstance(entry, dict) else {}  # whose class is unknown then
            told = _dict(label, "attributes")
            name = str(label.get("category"))
            target = mapping.target(name)
            attributes = {
                key: value
                for key in ATTRIBUTES
                if target and target.label and key in mapping.attributed.get(target.label, ())
                if key in mapping.values and (value := mapping.given(key, told, place, problems))
            }
            box = [_number(_dict(label, "box2d").get(key)) for key in ("x1", "y1", "x2", "y2")]
            visible = BDD_FLAG_VISIBLE ** sum(told.get(key) is True for key in ("occluded", "truncated"))
            draft.add(name, box, place, visible=visible, attributes=attributes)
        yield from draft.records()


def read_masks(root: Path, mapping: SourceMap, problems: Problems, split: str = "train") -> Iterator[Record]:
    """Images beside masks of class ids. All that is labelled with one class becomes one object, which is no instance.

    A mask smaller than "absent" of the mapping's `presence` is no object; one smaller than "present" may be overlooked
    or be an error, and gets `visible=0.0`, so that nothing is asked about its class.
    """
    layout = mapping.splits[split]
    names: dict[int, str] = dict(enumerate(mapping.names))
    if "classes" in layout and (data := _read_json(root / layout["classes"], problems, "categories")):
        for where, entry in _items(root / layout["classes"], data, "categories", problems):
            if isinstance(entry.get("id"), int):
                names[entry["id"]] = str(entry.get("name"))
            else:
                problems.add("bad record", where, "has no whole number as id")
    for name, path in _pairs(root, layout, "masks", [".png", ".bmp", ".tif", ".tiff"], problems):
        draft = _draft(root, layout, name, str(path), mapping, problems)
        if draft is None:
            continue
        try:
            with Image.open(path) as image:
                mask = np.asarray(image)
        except IMAGE_ERRORS as error:
            problems.add("corrupt image", path, f"mask cannot be decoded: {error}")
            continue
        if mask.shape != (draft.height, draft.width):
            what = f"the mask is an array of {mask.shape}, its image {draft.width} × {draft.height}"
            problems.add("image size", path, what)
            continue
        _add_masks(draft, mask, names, str(path))
        yield from draft.records()


def _add_masks(draft: _Draft, mask: np.ndarray, names: dict[int, str], where: str) -> None:
    """Add what each class of ours covers in a mask [height, width] of class ids."""
    height, width = mask.shape
    presence = draft.mapping.presence
    scale = width * height / (presence["at"][0] * presence["at"][1])  # thresholds are for images of this size
    cell = (np.arange(height) * GRID // height)[:, None] * GRID + np.arange(width) * GRID // width  # [height, width]
    cell_sizes = np.maximum(np.bincount(cell.ravel(), minlength=GRID**2), 1)
    ids_of: dict[str, tuple[Target, list[int]]] = {}
    for class_id in np.unique(mask).tolist():
        target = draft.lookup(names.get(class_id, f"id {class_id}"), where)
        if target is not None and (target.label or target.maybe):
            ids_of.setdefault(repr(target), (target, []))[1].append(class_id)
    for target, ids in ids_of.values():
        filled = np.isin(mask, ids)
        area = int(filled.sum())
        if area < presence["absent"] * scale:
            continue
        draft.doubt(target)
        if target.label is None:
            continue
        rows, columns = np.flatnonzero(filled.any(1)), np.flatnonzero(filled.any(0))
        box = (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))
        parts = np.bincount(cell[filled], minlength=GRID**2) / cell_sizes
        cells = tuple(tuple(row) for row in parts.reshape(GRID, GRID).round(4).tolist())
        visible = 0.0 if area < presence["present"] * scale else 1.0
        draft.objects.append(SceneObject(target.label, box, float(area), visible, target.attributes, cells, False))


READERS: dict[str, Callable[[Path, SourceMap, Problems, str], Iterator[Record]]] = {
    "coco": read_coco,
    "yolo": read_yolo,
    "kitti": read_kitti,
    "bdd100k": read_bdd100k,
    "masks": read_masks,
}


def read_source(
    root: str | Path, mapping: SourceMap | str | Path, split: str = "train", problems: Problems | None = None
) -> Iterator[Record]:
    """Records of one split of a source, in the order of its annotations, read as its mapping's "format" says.

    Args:
        root: the source's folder.
        mapping: a mapping, the path of its file, or the bare name of one that is shipped.
        split: a key of the mapping's "splits".
        problems: collects what is wrong; by default everything that is wrong is skipped.
    """
    mapping = mapping if isinstance(mapping, SourceMap) else load_mapping(mapping)
    if split not in mapping.splits:
        raise DataError(f"source {mapping.name!r} has no split {split!r}; it has {', '.join(mapping.splits)}")
    return _counted(Path(root), mapping, split, problems if problems is not None else Problems())


def _counted(root: Path, mapping: SourceMap, split: str, problems: Problems) -> Iterator[Record]:
    empty = True
    for record in READERS[mapping.format](root, mapping, problems, split):
        empty = False
        yield record
    if empty:
        problems.add("empty source", root, f"split {split!r} of source {mapping.name!r} has no image that can be used")

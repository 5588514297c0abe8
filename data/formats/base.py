"""What all readers share: problems, files of a source, images by their names, and the construction of a scene.

list_images → (image, file and record, annotation) → SceneBuilder ← add_labels → Record
"""

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from PIL import ExifTags, Image

from ...files import DataError, open_inside
from ...image_files import IMAGE_SUFFIXES, decode_text, find_by_name, index_files, select_files, stem_of
from ..patches import GRID
from ..scene import CLASSES, Scene, SceneObject, given_to_all, is_a
from .mapping import ClassMapping, SourceMapping, normalize


IMAGE_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # raised by Pillow for bad files
VISIBLE_IF_FLAGGED = 0.7  # where "occluded" and "truncated" are only yes or no
ANNOTATIONS = (".txt", ".xml", ".json", ".jsonl", ".yaml", ".yml", ".csv")  # nobody takes them for images
ImageEntry = tuple[str, str, Any]  # path below the image folder; file and record, for messages; annotation
Entry = tuple[str, dict[str, Any]]  # file and record, for messages; JSON object


@dataclass
class Problems:
    """Problems found in the input: counts by kind, and the first `keep` messages."""

    strict: bool = False
    keep: int = 1000
    counts: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def add(self, kind: str, where: object, message: str, expected: bool = False, count: int = 1) -> None:
        """Count a problem at `where` (file:line, or file and record); `DataError` if strict, unless `expected`."""
        if self.strict and not expected:
            raise DataError(f"{where}: {message}")
        self.counts[kind] += count
        if len(self.messages) < self.keep:
            self.messages.append(f"{where}: {message}")


@dataclass(frozen=True)
class Record:
    """One image and its scene."""

    image: Path
    scene: Scene


class SkippedImage(Exception):
    """An image, or each image of a file, cannot be used. The arguments are the kind of problem and a message."""


@dataclass(frozen=True)
class Source:
    """One split of a source: its folder, its mapping, and the problems found in it."""

    root: Path
    mapping: SourceMapping
    split: str
    problems: Problems

    @property
    def layout(self) -> dict[str, Any]:
        return self.mapping.splits[self.split]

    def path(self, key: str) -> Path:
        """File or folder that the split names as `key`."""
        return self.root / self.layout[key]

    def open(self, path: Path) -> BinaryIO:
        """Opened file of the source; all readers open files here.

        Raises:
            SkippedImage: the file is outside of the source, through a link for example, or is not a regular file.
            OSError: the file cannot be opened.
        """
        try:
            return open_inside(path, self.root)
        except DataError as error:
            raise SkippedImage("refused file", str(error)) from error

    def read_text(self, path: Path) -> str:
        """Text of a file. Raises what `open` raises, and UnicodeDecodeError."""
        with self.open(path) as file:
            return decode_text(file.read())

    def read_lines(self, path: Path) -> list[tuple[str, str]]:
        """(file:line, line) of each line of a text file that is not blank.

        Raises:
            SkippedImage: the file cannot be read.
        """
        try:
            lines = self.read_text(path).splitlines()
        except (OSError, ValueError) as error:
            raise SkippedImage("bad file", f"cannot be read: {error}") from error
        return [(f"{path}:{i}", line.strip()) for i, line in enumerate(lines, start=1) if line.strip()]

    def read_json(self, path: Path, *keys: str) -> dict[str, list[Entry]]:
        """Objects in these lists of a JSON file. A bare list, or JSON lines, is the first of the lists."""
        entries: dict[str, list[Entry]] = {key: [] for key in keys}
        try:
            data = parse_json(self.read_text(path))
        except (OSError, ValueError, RecursionError) as error:
            self.problems.add("bad file", path, f"cannot be read: {error}")
            return entries
        data = {keys[0]: data} if isinstance(data, list) else data
        if not (isinstance(data, dict) and all(isinstance(data.get(key), list) for key in keys)):
            self.problems.add("bad file", path, f"is not a JSON object with the lists {', '.join(keys)}")
            return entries
        for key, found in entries.items():
            for i, entry in enumerate(data[key]):
                if isinstance(entry, dict):
                    known = entry.get("id", entry.get("name"))
                    found.append((f"{path}: {key}[{i}]" + ("" if known is None else f" ({known})"), entry))
                else:
                    self.problems.add("bad record", f"{path}: {key}[{i}]", "is not a JSON object")
        return entries

    def class_names(self, found: dict[int, str], path: Path) -> dict[int, str]:
        """Names {id: class name} of the mapping, and those `found` in a file of the source.

        Raises:
            DataError: they name an id differently. Taking either would give every label of it a wrong category.
        """
        listed = dict(enumerate(self.mapping.names))
        if any(normalize(listed[i]) != normalize(found[i]) for i in listed.keys() & found.keys()):
            raise DataError(
                f"'names' of the mapping {self.mapping.name!r} are {list(listed.values())}, but {path} has "
                f"{list(found.values())}: remove 'names' from the mapping file, or correct it"
            )
        return listed | found

    @cached_property
    def images(self) -> dict[str, list[str]]:
        """Images of the split's folder, {path without suffix: [paths]}."""
        folders = [self.path(key) for key in ("labels", "annotations", "masks") if key in self.layout]
        return self._files("images", IMAGE_SUFFIXES, [path for path in folders if self.path("images") in path.parents])

    def _files(self, key: str, suffixes: Iterable[str], without: Sequence[Path] = ()) -> dict[str, list[str]]:
        folder = self.path(key)
        if not folder.is_dir():
            self.problems.add("bad file", folder, "there is no such folder")
            return {}
        found: list[Path] = []
        for parent, _, names in os.walk(folder):
            if not {Path(parent), *Path(parent).parents} & set(without):
                found += [Path(parent, name) for name in names]
        if key == "images":
            found = [path for path in found if path.suffix.lower() not in ANNOTATIONS]
        names, note = select_files(sorted(path.relative_to(folder).as_posix() for path in found), set(suffixes))
        if note and key == "images":
            self.problems.add("files left out", folder, note, expected=True)
        return index_files(names)

    def selects(self, stem: str) -> bool:
        """Whether "only", "except" and "list" of the split select the image with this path, without suffix."""
        if self.listed is not None and stem not in self.listed:
            return False
        is_included = any(fnmatchcase(stem, pattern) for pattern in self.layout.get("only", ["*"]))
        return is_included and not any(fnmatchcase(stem, pattern) for pattern in self.layout.get("except", []))

    @cached_property
    def listed(self) -> frozenset[str] | None:
        """Image paths, without suffix, in the split's file "list"; None if it has none."""
        if "list" not in self.layout:
            return None
        stems = set()
        try:
            for where, line in self.read_lines(self.path("list")):
                # VOC adds a column to the name. A path may have spaces.
                found = find_by_name(self.images, line) or find_by_name(self.images, line.split()[0])
                if not found:
                    self.problems.add("missing image", where, f"image {line!r} is missing in {self.path('images')}")
                stems |= {stem_of(name) for name in found}
        except SkippedImage as error:
            self.problems.add(error.args[0], self.path("list"), error.args[1])
        return frozenset(stems)

    def by_name(self, entries: Iterable[ImageEntry]) -> Iterator[ImageEntry]:
        """Entries with the image's path in place of its name as written, if exactly one image has that name.

        Images that no entry names are counted: they may belong to another split, or have lost their annotation.
        """
        used = set()
        for written, where, annotation in entries:
            found = find_by_name(self.images, written)
            used.update(found)
            yield found[0] if len(found) == 1 else written, where, annotation
        names = [name for found in self.images.values() for name in found]
        rest = sorted(name for name in names if name not in used and self.selects(stem_of(name)))
        if used and rest:
            message = f"does not list {len(rest)} images of {self.path('images')}, such as {', '.join(rest[:3])}"
            self.problems.add("image not listed", self.path("annotations"), message, expected=True, count=len(rest))

    def pairs(self, key: str, *suffixes: str) -> Iterator[ImageEntry]:
        """Each image that has a file of the same path but for the suffix in the split's folder `key`.

        Where both lie in folders of one folder, as a/images/1.jpg and a/labels/1.txt, these are the same path, too.
        """
        annotations: dict[str, list[str]] = {}
        for stem, names in self._files(key, suffixes).items():
            image = stem if stem in self.images else replace_last(stem, key, "images")
            annotations.setdefault(image if image in self.images else stem, []).extend(names)
        for stem in sorted(self.images.keys() | annotations.keys()):
            if not self.selects(stem):
                continue
            images, found = self.images.get(stem, []), annotations.get(stem, [])
            if len(images) > 1 or len(found) > 1:
                twins, folder = (images, "images") if len(images) > 1 else (found, key)
                message = f"{' and '.join(twins)} differ only in the suffix: none is read"
                self.problems.add("two files of one name", self.path(folder), message)
            elif not images and PurePosixPath(found[0]).name == "classes.txt":
                continue  # LabelImg's list of classes
            elif not images:
                where = self.path(key) / found[0]
                self.problems.add("annotation without image", where, f"has no image in {self.path('images')}")
            elif not found:
                where = self.path("images") / images[0]
                self.problems.add("image without annotation", where, f"has no annotation in {self.path(key)}")
            else:
                yield images[0], str(self.path(key) / found[0]), self.path(key) / found[0]


@dataclass
class SceneBuilder:
    """Collects the labels of one image. A label that is unclear or unusable makes categories uncertain.

    An uncertain category is removed from the scene's `exhaustive` and `attributed`: "yes" can still be answered for
    it, but not "no", a count, or "only".
    """

    source: Source
    name: str  # path below the image folder
    objects: list[SceneObject] = field(default_factory=list)
    uncertain: set[str] = field(default_factory=set)
    num_labels: int = 0  # including those of ignored classes
    seen: set[Any] = field(default_factory=set)  # what tells objects apart

    def __post_init__(self) -> None:
        """Read the image's size; raise `SkippedImage` if that is impossible."""
        folder = self.source.path("images")
        self.image = folder / self.name
        self.scene_attributes = self.source.mapping.scene_attributes_for(stem_of(self.name))
        if os.path.isabs(self.name) or ".." in PurePosixPath(self.name).parts:
            raise SkippedImage("bad record", f"image {self.name!r} is outside the image folder")
        try:
            with self.source.open(self.image) as file, Image.open(file) as image:
                self.width, self.height = _upright_size(image, file)
        except FileNotFoundError as error:
            if twins := find_by_name(self.source.images, self.name):
                message = f"image {self.name!r} may be {' or '.join(twins)} in {folder}"
                raise SkippedImage("two files of one name", message) from error
            raise SkippedImage("missing image", f"image {self.name!r} is missing in {folder}") from error
        except IMAGE_ERRORS as error:
            raise SkippedImage("corrupt image", f"image {self.image} cannot be opened: {error}") from error

    def reject(self, kind: str, where: str, message: str) -> None:
        """Report a label that may be of any category."""
        self.num_labels += 1
        self.source.problems.add(kind, where, message)
        self.uncertain |= CLASSES.keys()

    def find(self, name: str, where: str) -> ClassMapping | None:
        """Meaning of a label's class, or None if the mapping does not list it."""
        mapping = self.source.mapping.find(name)
        if mapping is None:
            message = f"class {name!r} is not in the mapping of {self.source.mapping.name!r}"
            self.reject(f"unknown class {name!r}", where, message)
        else:
            self.num_labels += 1
        return mapping

    def scale_from(self, width: float, height: float) -> tuple[float, float]:
        """Factors from the annotated size, in pixels, to that of the image file; 1.0 if it is unknown.

        Raises:
            SkippedImage: they differ, so the image was not just resized.
        """
        if not (0 < width < math.inf and 0 < height < math.inf):
            return 1.0, 1.0
        scale_x, scale_y = self.width / width, self.height / height
        if abs(scale_x - scale_y) > 0.02 * max(scale_x, scale_y):
            message = f"the image is {self.width} × {self.height}, its annotation is for {width:g} × {height:g}"
            raise SkippedImage("image size", message)
        return scale_x, scale_y

    def mark_uncertain(self, mapping: ClassMapping, lost: bool = False) -> None:
        """Mark what an object may be besides its category; also the category itself if the object is `lost`."""
        for category in mapping.maybe | ({mapping.category} if lost and mapping.category else set()):
            broader = CLASSES[category][2]
            self.uncertain.add(category)
            if broader and (lost or mapping.category is None or not is_a(mapping.category, broader)):
                self.uncertain.add(broader)

    def add(
        self,
        name: str,
        box: Sequence[float],
        where: str,
        visible: float = 1.0,
        attributes: Any = None,
        written: object = None,
        wrong: str = "",
        **fields: Any,
    ) -> None:
        """Add a labeled box (left, top, right, bottom) in pixels, clipped to the image.

        Args:
            box: NaN stands for a number that cannot be read.
            visible: the fraction of the box that is not hidden; what lies outside the image reduces it.
            attributes: added to those of the class mapping.
            written: the numbers as the file has them, for messages.
            wrong: why the box cannot be used; its class is known.
        """
        mapping = self.find(name, where)
        if mapping is None or (mapping.category is None and not mapping.maybe):
            return
        if not wrong and not all(map(math.isfinite, box)):
            is_comma = re.search("[0-9],[0-9]", str(written))
            wrong = f"is not four numbers{': decimals need a point' if is_comma else ''}"
        elif not wrong:
            written = tuple(box)
            wrong = self._check(*box)
        if wrong:
            self.source.problems.add("bad box", where, f"box {written} of {name!r} {wrong}")
            self.mark_uncertain(mapping, lost=True)
            return
        left, top, right, bottom = box
        clipped = (max(left, 0.0), max(top, 0.0), min(right, float(self.width)), min(bottom, float(self.height)))
        clipped_area = (clipped[2] - clipped[0]) * (clipped[3] - clipped[1])
        if mapping.category is None:
            if clipped_area >= self.width * self.height / GRID**2:  # no question is about less than a patch
                self.mark_uncertain(mapping)
        else:
            self.mark_uncertain(mapping)
            visible = min(max(visible, 0.0), 1.0) * clipped_area / ((right - left) * (bottom - top))
            attributes = mapping.attributes | (attributes or {})
            item = SceneObject(mapping.category, clipped, visible=visible, attributes=attributes, **fields)
            key = (item.category, item.box, item.is_instance, *sorted(attributes.items()))
            if key in self.seen:
                message = f"box {written} of {name!r} is listed twice, and counted once"
                self.source.problems.add("label listed twice", where, message, expected=True)
            else:
                self.seen.add(key)
                self.objects.append(item)

    def _check(self, left: float, top: float, right: float, bottom: float) -> str:
        """What is wrong with a box; empty if nothing is."""
        if not (left < right and top < bottom and (right - left) * (bottom - top) > 0):
            return "has no size"
        if left >= self.width or top >= self.height or right <= 0 or bottom <= 0:
            return f"lies outside its image of {self.width} × {self.height}"
        if max(right, bottom) <= 1 < min(self.width, self.height):
            return "lies within the first pixel: are these fractions of the image in place of pixels?"
        return ""

    def finish(self) -> Record | None:
        """Record of the image, or None if it has no label and the mapping excludes such images."""
        mapping = self.source.mapping
        if mapping.unlabeled == "empty" and not self.num_labels:
            message = "has no label; in this source such images are not empty, but were not labeled"
            self.source.problems.add("unlabeled image", self.image, message, expected=True)
            return None
        attributed = given_to_all(mapping.attributed, self.objects)
        scene = Scene(
            self.width,
            self.height,
            tuple(self.objects),
            scene_attributes=self.scene_attributes,
            exhaustive=mapping.exhaustive - self.uncertain,
            attributed={category: names for category, names in attributed.items() if category not in self.uncertain},
            source=mapping.name,
            image_id=PurePosixPath(self.source.layout["images"], self.name).as_posix(),
        )
        return Record(self.image, scene)


def to_number(value: Any) -> float:
    """Number of a value, NaN if it is not one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def to_flag(value: Any) -> bool:
    """Whether a value means yes: true, 1, "1", "1.0", " true ", "yes". All others mean no."""
    return str(value).strip().casefold() in ("true", "yes") or to_number(value) > 0


def parse_json(text: str) -> Any:
    """Value of a JSON text; of JSON lines a list.

    Raises:
        ValueError: it is neither.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        try:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise error from None


def replace_last(path: str, old: str, new: str) -> str:
    """Path in which the last folder named `old` is `new`."""
    parts = list(PurePosixPath(path).parts)
    if old in parts:
        parts[len(parts) - 1 - parts[::-1].index(old)] = new
    return PurePosixPath(*parts).as_posix()


def _upright_size(image: Image.Image, file: BinaryIO) -> tuple[int, int]:
    """Width and height of an open image as labeling tools show it: turned by its EXIF. Pixels are rarely decoded."""
    width, height = image.size
    try:
        if image.format == "PNG" and _has_text_after_pixels(file):
            image.load()
        exif = Image.Image.getexif(image)  # a PNG's own method would always decode its pixels
        is_turned = image.format != "TIFF" and exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception:  # viewers ignore a broken EXIF block
        is_turned = False
    return (height, width) if is_turned else (width, height)


def _has_text_after_pixels(file: BinaryIO) -> bool:
    """Whether a PNG has EXIF or text, which may hold EXIF, after its pixels."""
    position, seen_pixels = file.tell(), False
    file.seek(8)
    try:
        while len(header := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", header)
            if seen_pixels and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            seen_pixels = seen_pixels or kind == b"IDAT"
            file.seek(length + 4, os.SEEK_CUR)
        return False
    finally:
        file.seek(position)

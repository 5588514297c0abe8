"""What all annotation readers share: problems, records, access to files, and the construction of a scene."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from PIL import ExifTags, Image

from ...files import DataError, open_inside
from ...image_files import IMAGE_SUFFIXES, select_files
from ..patches import GRID
from ..scene import CLASSES, Scene, SceneObject, given_to_all, is_a
from .mapping import ClassMapping, SourceMapping, normalize


IMAGE_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # raised by Pillow for bad files
VISIBLE_IF_FLAGGED = 0.7  # where "occluded" and "truncated" are only yes or no
ImageEntry = tuple[str, str, Any]  # path below the image folder; file and record, for messages; annotation


@dataclass
class Problems:
    """Problems found in the input: counts by kind, and the first `keep` messages."""

    strict: bool = False
    keep: int = 1000
    counts: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def add(self, kind: str, where: object, message: str, expected: bool = False) -> None:
        """Count a problem at `where` (file:line, or file and record); `DataError` if strict, unless `expected`."""
        if self.strict and not expected:
            raise DataError(f"{where}: {message}")
        self.counts[kind] += 1
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
        """Return the file or folder that the split names as `key`."""
        return self.root / self.layout[key]

    def open(self, path: Path) -> BinaryIO:
        """Open a file of the source; all readers open files here.

        Raises:
            SkippedImage: the file is outside of the source, through a link for example, or is not a regular file.
            OSError: the file cannot be opened.
        """
        try:
            return open_inside(path, self.root)
        except DataError as error:
            raise SkippedImage("refused file", str(error)) from error

    def read_text(self, path: Path) -> str:
        """Return the UTF-8 text of a file. Raises what `open` raises, and UnicodeDecodeError."""
        with self.open(path) as file:
            return file.read().decode("utf-8")

    def read_lines(self, path: Path) -> list[tuple[str, list[str]]]:
        """Return (file:line, fields) of each line of a text file that is not blank.

        Raises:
            SkippedImage: the file cannot be read.
        """
        try:
            lines = self.read_text(path).splitlines()
        except (OSError, ValueError) as error:
            raise SkippedImage("bad file", f"cannot be read: {error}") from error
        return [(f"{path}:{i}", line.split()) for i, line in enumerate(lines, start=1) if line.strip()]

    def selects(self, stem: str) -> bool:
        """Return whether "only", "except" and "list" of the split select the image with this path, without suffix."""
        if self.listed is not None and stem not in self.listed:
            return False
        is_included = any(fnmatchcase(stem, pattern) for pattern in self.layout.get("only", ["*"]))
        return is_included and not any(fnmatchcase(stem, pattern) for pattern in self.layout.get("except", []))

    @cached_property
    def listed(self) -> frozenset[str] | None:
        """The image paths, without suffix, in the split's file "list"; None if it has none."""
        if "list" not in self.layout:
            return None
        try:
            return frozenset(fields[0] for _, fields in self.read_lines(self.path("list")))
        except SkippedImage as error:
            self.problems.add(error.args[0], self.path("list"), error.args[1])
            return frozenset()

    def class_names(self, found: dict[int, str], path: Path) -> dict[int, str]:
        """Return {id: class name} of the mapping's "names" and of those `found` in a file of the source.

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

    def pairs(self, key: str, *suffixes: str) -> Iterator[ImageEntry]:
        """Yield each image that has a file of the same path but for the suffix in the split's folder `key`."""
        images, annotations = self._files("images", *IMAGE_SUFFIXES), self._files(key, *suffixes)
        for stem in sorted(images.keys() | annotations.keys()):
            if not self.selects(stem):
                continue
            if stem not in images:
                message = f"has no image in {self.path('images')}"
                self.problems.add("annotation without image", annotations[stem], message)
            elif stem not in annotations:
                self.problems.add("image without annotation", images[stem], f"has no annotation in {self.path(key)}")
            else:
                name = images[stem].relative_to(self.path("images")).as_posix()
                yield name, str(annotations[stem]), annotations[stem]

    def _files(self, key: str, *suffixes: str) -> dict[str, Path]:
        folder = self.path(key)
        if not folder.is_dir():
            self.problems.add("bad file", folder, "there is no such folder")
            return {}
        found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        names, note = select_files(found, suffixes)
        if note and key == "images":
            self.problems.add("files left out", folder, note, expected=True)
        return {os.path.splitext(name)[0]: folder / name for name in names}

    def read_json(self, path: Path, *keys: str) -> dict[str, list[tuple[str, dict[str, Any]]]]:
        """Return (file and record, object) of each object in these lists of a JSON file; a bare list is the first."""
        entries: dict[str, list[tuple[str, dict[str, Any]]]] = {key: [] for key in keys}
        try:
            with self.open(path) as file:
                data = json.load(file)
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

    def __post_init__(self) -> None:
        """Read the image's size; raise `SkippedImage` if that is impossible."""
        self.image = self.source.path("images") / self.name
        self.scene_attributes = self.source.mapping.scene_attributes_for(os.path.splitext(self.name)[0])
        if os.path.isabs(self.name) or ".." in PurePosixPath(self.name).parts:
            raise SkippedImage("bad record", f"image {self.name!r} is outside the image folder")
        try:
            with self.source.open(self.image) as file, Image.open(file) as image:
                self.width, self.height = _upright_size(image)
        except FileNotFoundError as error:
            raise SkippedImage("missing image", f"image {self.image} is missing") from error
        except IMAGE_ERRORS as error:
            raise SkippedImage("corrupt image", f"image {self.image} cannot be opened: {error}") from error

    def reject(self, kind: str, where: str, message: str) -> None:
        """Report a label that may be of any category."""
        self.source.problems.add(kind, where, message)
        self.uncertain |= CLASSES.keys()

    def find(self, name: str, where: str) -> ClassMapping | None:
        """Return the meaning of a label's class, or None if the mapping does not list it."""
        self.num_labels += 1
        mapping = self.source.mapping.find(name)
        if mapping is None:
            message = f"class {name!r} is not in the mapping of {self.source.mapping.name!r}"
            self.reject(f"unknown class {name!r}", where, message)
        return mapping

    def scale_from(self, width: float, height: float) -> tuple[float, float]:
        """Return the factors from the annotated size, in pixels, to that of the image file; 1.0 if it is unknown.

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
        self, name: str, box: Sequence[float], where: str, visible: float = 1.0, attributes: Any = None, **fields: Any
    ) -> None:
        """Add a labeled box (left, top, right, bottom) in pixels, clipped to the image.

        NaN stands for a number that cannot be read. `attributes` are added to those of the class mapping, and
        `visible`, the fraction of the box that is not hidden, is reduced by what lies outside the image.
        """
        mapping = self.find(name, where)
        if mapping is None or (mapping.category is None and not mapping.maybe):
            return
        left, top, right, bottom = box
        clipped = (max(left, 0.0), max(top, 0.0), min(right, float(self.width)), min(bottom, float(self.height)))
        clipped_area = (clipped[2] - clipped[0]) * (clipped[3] - clipped[1])
        has_size = math.isfinite(clipped_area) and left < right and top < bottom
        if not has_size or clipped[0] >= clipped[2] or clipped[1] >= clipped[3]:
            wrong = f"lies outside its image of {self.width} × {self.height}" if has_size else "has no size"
            self.source.problems.add("bad box", where, f"box {tuple(box)} of {name!r} {wrong}")
            self.mark_uncertain(mapping, lost=True)
        elif mapping.category is None:
            if clipped_area >= self.width * self.height / GRID**2:  # no question is about less than a patch
                self.mark_uncertain(mapping)
        else:
            self.mark_uncertain(mapping)
            visible = min(max(visible, 0.0), 1.0) * clipped_area / ((right - left) * (bottom - top))
            attributes = mapping.attributes | (attributes or {})
            item = SceneObject(mapping.category, clipped, visible=visible, attributes=attributes, **fields)
            self.objects.append(item)

    def finish(self) -> Record | None:
        """Return the record, or None if the image has no label and the mapping excludes such images."""
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
    """Return the value as a number, NaN if it is not one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of an open image as labeling tools show it: rotated by its EXIF. Decodes no pixels."""
    width, height = image.size
    try:
        exif = Image.Image.getexif(image)  # a PNG's own method would decode its pixels
        is_turned = image.format != "TIFF" and exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception:  # viewers ignore a broken EXIF block
        is_turned = False
    return (height, width) if is_turned else (width, height)

"""The scene of an image, from its labels. A label that is wrong or unclear limits what is known of the scene."""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from PIL import ExifTags, Image

from ..scene import CLASSES, GRID, Scene, SceneObject, given_to_all
from .mapping import normalize
from .reading import UNREADABLE, Box, Unusable, to_number
from .split import Split


HIDING = {"occluded": 0.7, "truncated": 0.7, "difficult": 0.0}  # visible fractions; at 0, no question is asked
REGIONS = ("iscrowd", "crowd", "ignore", "ignored")  # marks of a region that may hold several objects
YES = ("true", "yes")  # values of marks that are set, besides numbers above 0
LOST = 0.25  # a box with a larger fraction outside of the image is not used


@dataclass(frozen=True)
class Record:
    """One image and its scene; `group` names its camera or drive, "" if the source does not tell."""

    image: Path
    scene: Scene
    group: str = ""


@dataclass
class SceneBuilder:
    """Collects the labels of one image of `width` × `height` pixels. Wrong labels make categories uncertain.

    An uncertain category is removed from the scene's `exhaustive` and `attributed`: "yes" can still be answered for
    it, but not "no", a count, or "only".
    """

    split: Split
    name: str  # path below the image folder
    where: str  # file and record that name the image, for messages
    width: int
    height: int
    scale: tuple[float, float] = (1.0, 1.0)  # from the units of the boxes to pixels of the image file
    group: str = ""  # camera or drive
    objects: list[SceneObject] = field(default_factory=list)
    uncertain: set[str] = field(default_factory=set)
    num_labels: int = 0  # including those of ignored classes
    scene_attributes: dict[str, str] = field(default_factory=dict)  # in addition to those of the mapping

    def reject(self, kind: str, where: str, message: str) -> None:
        """Report a label that may be of any category."""
        self.num_labels += 1
        self.split.problems.add(kind, where, message)
        self.uncertain |= CLASSES.keys()

    def reject_class(self, name: str, where: str) -> None:
        """Report a label of a class that the mapping does not list."""
        message = f"class {name!r} is not in the mapping of {self.split.mapping.name!r}"
        self.reject(f"unknown class {name!r}", where, message)

    def scale_from(self, width: float, height: float) -> None:
        """Set the scale for boxes in pixels of an image of this size; an unknown size is ignored."""
        if 0 < width < math.inf and 0 < height < math.inf:
            scale_x, scale_y = self.scale = self.width / width, self.height / height
            if abs(scale_x - scale_y) > 0.02 * max(scale_x, scale_y):  # not only resized
                sizes = f"{self.width} × {self.height}, its annotation is for {width:g} × {height:g}"
                raise Unusable("image size", self.where, f"the image is {sizes}")

    def add(
        self, name: str, box: Sequence[float], where: str, written: object, marks: Any = None, **fields: Any
    ) -> None:
        """Add a labeled box (left, top, right, bottom), clipped to the image.

        Args:
            box: in units that `scale` turns into pixels; NaN stands for a number that cannot be read.
            written: the box as the file has it, for messages.
            marks: what else the label says: flags of HIDING and REGIONS; a box with a "rotation" is not read.
            fields: of the `SceneObject`. Marks and what lies outside the image reduce "visible".
        """
        meaning, marks = self.split.mapping.classes.get(normalize(name)), marks or {}
        if meaning is None:
            self.reject_class(name, where)
            return
        self.num_labels += 1
        if meaning.category is None and not meaning.maybe:
            return
        clipped, inside, flaw = self.clip(box)
        flaw = flaw or ("is turned" if to_number(marks.get("rotation") or 0) else "")
        if flaw:
            self.split.problems.add("bad box", where, f"box {written} of {name!r} {flaw}")
            self.uncertain |= meaning.lost
            return
        left, top, right, bottom = clipped
        if meaning.category or (right - left) * (bottom - top) >= self.width * self.height / GRID**2:
            self.uncertain |= meaning.doubted  # no question is about less than a patch
        if meaning.category is None:
            return
        yes = {key for key, value in marks.items() if str(value).strip().casefold() in YES or to_number(value) > 0}
        shown = math.prod(factor for mark, factor in HIDING.items() if mark in yes)
        fields["visible"] = min(max(fields.get("visible", 1.0), 0.0), 1.0) * shown * inside
        fields["attributes"] = meaning.attributes | fields.get("attributes", {})
        fields["is_instance"] = yes.isdisjoint(REGIONS)
        item = SceneObject(meaning.category, clipped, **fields)
        if item in self.objects:
            message = f"box {written} of {name!r} is listed twice, and counted once"
            self.split.problems.add("label listed twice", where, message, expected=True)
        else:
            self.objects.append(item)

    def clip(self, box: Sequence[float]) -> tuple[Box, float, str]:
        """(part of a box inside the image, in pixels; fraction of the box; why it cannot be used or "")."""
        left, top, right, bottom = (side * self.scale[i % 2] for i, side in enumerate(box))
        width, height = right - left, bottom - top
        if not all(map(math.isfinite, (left, top, right, bottom, width * height))):
            return UNREADABLE, 0.0, "is not four numbers with decimal points"
        if width <= 0 or height <= 0 or width * height == 0:
            return UNREADABLE, 0.0, "has a width or height that is not positive"
        clipped = max(left, 0.0), max(top, 0.0), min(right, float(self.width)), min(bottom, float(self.height))
        inside = max(clipped[2] - clipped[0], 0.0) * max(clipped[3] - clipped[1], 0.0) / (width * height)
        flaw = ""
        if inside < 1 - LOST:
            flaw = f"lies to {1 - inside:.0%} outside its image of {self.width} × {self.height}"
        elif max(right, bottom) <= 1 < min(self.width, self.height):
            flaw = "lies within the first pixel: are these fractions of the image in place of pixels?"
        return clipped, inside, flaw

    def finish(self) -> Record | None:
        """Record of the image, or None if it has no label and the mapping excludes such images."""
        mapping, image = self.split.mapping, self.split.paths["images"] / self.name
        if mapping.unlabeled == "empty" and not self.num_labels:
            message = "has no label; in this source such images are not empty, but were not labeled"
            self.split.problems.add("unlabeled image", image, message, expected=True)
            return None
        attributes = dict(mapping.scene_attributes)
        for pattern, more in mapping.scene_attributes_of.items():
            attributes |= more if fnmatchcase(os.path.splitext(self.name)[0], pattern) else {}
        given = given_to_all(mapping.attributed, self.objects)
        attributed = {category: names for category, names in given.items() if category not in self.uncertain}
        known = attributes | self.scene_attributes, mapping.exhaustive - self.uncertain, attributed
        image_id = PurePosixPath(self.split.layout["images"], self.name).as_posix()
        scene = Scene(self.width, self.height, tuple(self.objects), *known, mapping.name, image_id)
        return Record(image, scene, self.group)


def upright_size(file: BinaryIO) -> tuple[int, int]:
    """Width and height of an image as labeling tools show it, turned by its EXIF. Pixels are not decoded."""
    with Image.open(file) as image:
        (width, height), turn = image.size, None
        with suppress(Exception):  # viewers ignore a broken EXIF block
            turn = image.getexif().get(ExifTags.Base.Orientation)  # decodes a PNG: its EXIF may follow the pixels
        return (height, width) if turn in (5, 6, 7, 8) and image.format != "TIFF" else (width, height)

"""The scene of an image, from its labels. A label that is wrong or unclear limits what is known of the scene."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from PIL import ExifTags, Image

from ..scene import CLASSES, GRID, Scene, SceneObject, classes_of, given_to_all
from .mapping import ClassMapping
from .reading import UNREADABLE, Box, Unusable, to_number
from .split import Split, stem_of


HIDING = {"occluded": 0.7, "truncated": 0.7, "difficult": 0.0}  # visible fractions; at 0, no question is asked
REGIONS = ("iscrowd", "crowd", "ignore", "ignored")  # marks of a region that may hold several objects
YES = ("true", "yes")  # values of marks that are set, besides numbers above 0
LEAVING, LOST = 0.05, 0.25  # fractions of a box outside of the image: most boxes are like that; it is not used


@dataclass(frozen=True)
class Record:
    """One image and its scene; `group` names its camera or drive, "" if the source does not tell."""

    image: Path
    scene: Scene
    group: str = ""


class SceneBuilder:
    """Collects the labels of one image, of which only the header is read. Wrong labels make categories uncertain.

    An uncertain category is removed from the scene's `exhaustive` and `attributed`: "yes" can still be answered for
    it, but not "no", a count, or "only". `where` is the file and record that name the image, for messages.
    """

    def __init__(self, split: Split, name: str, where: str):
        self.split, self.where = split, where
        self.image = split.paths["images"] / name
        self.image_id = PurePosixPath(split.layout["images"], name).as_posix()
        wrong: Any = {"where": where, "message": f"image {self.image} cannot be opened", "kind": "corrupt image"}
        self.width, self.height = split.folder.read(self.image, upright_size, **wrong)
        self.scale = 1.0, 1.0  # from the units of the boxes to pixels of the image file
        self.group = ""  # camera or drive
        self.objects: list[SceneObject] = []
        self.seen: set[Any] = set()  # objects so far, to find labels that are listed twice
        self.uncertain: set[str] = set()
        self.num_labels = 0  # including those of ignored classes
        self.scene_attributes = dict(split.mapping.scene_attributes)
        for pattern, more in split.mapping.scene_attributes_of.items():
            self.scene_attributes |= more if fnmatchcase(stem_of(name), pattern) else {}

    def reject(self, kind: str, where: str, message: str) -> None:
        """Report a label that may be of any category."""
        self.num_labels += 1
        self.split.problems.add(kind, where, message)
        self.uncertain |= CLASSES.keys()

    def find(self, name: str, where: str) -> ClassMapping | None:
        """Meaning of a label's class, or None if the mapping does not list it."""
        if meaning := self.split.mapping.find(name):
            self.num_labels += 1
        else:
            message = f"class {name!r} is not in the mapping of {self.split.mapping.name!r}"
            self.reject(f"unknown class {name!r}", where, message)
        return meaning

    def scale_from(self, width: float, height: float) -> None:
        """Set the scale for boxes in pixels of an image of this size; an unknown size, 0 or not finite, is ignored."""
        if width < 0 or height < 0:
            raise Unusable("image size", self.where, f"the size {width:g} × {height:g} of its annotation is negative")
        if 0 < width < math.inf and 0 < height < math.inf:
            scale_x, scale_y = self.scale = self.width / width, self.height / height
            if abs(scale_x - scale_y) > 0.02 * max(scale_x, scale_y):  # not only resized
                sizes = f"{self.width} × {self.height}, its annotation is for {width:g} × {height:g}"
                raise Unusable("image size", self.where, f"the image is {sizes}")

    def mark_uncertain(self, mapping: ClassMapping, lost: bool = False) -> None:
        """Mark as uncertain what an object may be besides its category; if it is `lost`, its category as well."""
        known = () if lost or mapping.category is None else classes_of(mapping.category)
        for category in mapping.maybe | ({mapping.category} if lost and mapping.category else set()):
            self.uncertain |= set(classes_of(category)) - set(known) | {category}

    def add(
        self,
        name: str,
        box: Sequence[float],
        where: str,
        written: object,
        marks: Any = None,
        wrong: str = "",
        **fields: Any,
    ) -> None:
        """Add a labeled box (left, top, right, bottom), clipped to the image.

        Args:
            box: in units that `scale` turns into pixels; NaN stands for a number that cannot be read.
            written: the box as the file has it, for messages.
            marks: what else the label says: flags of HIDING and REGIONS, "rotation" about the center in degrees.
            wrong: why the box cannot be used; its class is known.
            fields: of the `SceneObject`. Marks and what lies outside the image reduce "visible".
        """
        meaning, marks = self.find(name, where), marks or {}
        if meaning is None or (meaning.category is None and not meaning.maybe):
            return
        clipped, inside, flaw = self.clip(box, written, to_number(marks.get("rotation") or 0))
        if wrong or flaw:
            self.split.problems.add("bad box", where, f"box {written} of {name!r} {wrong or flaw}")
            self.mark_uncertain(meaning, lost=True)
            return
        left, top, right, bottom = clipped
        if meaning.category or (right - left) * (bottom - top) >= self.width * self.height / GRID**2:
            self.mark_uncertain(meaning)  # no question is about less than a patch
        if meaning.category is None:
            return
        yes = {key for key, value in marks.items() if str(value).strip().casefold() in YES or to_number(value) > 0}
        shown = math.prod(factor for mark, factor in HIDING.items() if mark in yes)
        fields["visible"] = min(max(fields.get("visible", 1.0), 0.0), 1.0) * shown * inside
        fields["attributes"] = meaning.attributes | fields.get("attributes", {})
        fields["is_instance"] = yes.isdisjoint(REGIONS)
        item = SceneObject(meaning.category, clipped, **fields)
        key = (item.category, item.box, item.is_instance, *sorted(item.attributes.items()))
        if key in self.seen:
            message = f"box {written} of {name!r} is listed twice, and counted once"
            self.split.problems.add("label listed twice", where, message, expected=True)
        else:
            self.seen.add(key)
            self.objects.append(item)

    def clip(self, box: Sequence[float], written: object, rotation: float) -> tuple[Box, float, str]:
        """(part of a turned box inside the image, in pixels; fraction of the box; why it cannot be used or "")."""
        left, top, right, bottom = (side * self.scale[i % 2] for i, side in enumerate(box))
        width, height = right - left, bottom - top
        if not all(map(math.isfinite, (left, top, right, bottom, width * height, rotation))):
            is_comma = re.search("[0-9],[0-9]", str(written))
            return UNREADABLE, 0.0, f"is not four numbers{': decimals need a point' if is_comma else ''}"
        if width < 0 or height < 0:
            return UNREADABLE, 0.0, f"has a {'width' if width < 0 else 'height'} that is negative"
        if width * height == 0:
            return UNREADABLE, 0.0, "has no size"
        if rotation:
            cosine, sine = abs(math.cos(math.radians(rotation))), abs(math.sin(math.radians(rotation)))
            x, y = (width * cosine + height * sine - width) / 2, (width * sine + height * cosine - height) / 2
            left, top, right, bottom = left - x, top - y, right + x, bottom + y
        clipped = max(left, 0.0), max(top, 0.0), min(right, float(self.width)), min(bottom, float(self.height))
        inside = (
            max(clipped[2] - clipped[0], 0.0) * max(clipped[3] - clipped[1], 0.0) / ((right - left) * (bottom - top))
        )
        self.split.boxes.update(all=1, leaving=inside < 1 - LEAVING)
        flaw = ""
        if inside < 1 - LOST:
            part = "" if inside == 0 else f"to {1 - inside:.0%} "
            flaw = f"lies {part}outside its image of {self.width} × {self.height}"
        elif max(right, bottom) <= 1 < min(self.width, self.height):
            flaw = "lies within the first pixel: are these fractions of the image in place of pixels?"
        return clipped, inside, flaw

    def finish(self) -> Record | None:
        """Record of the image, or None if it has no label and the mapping excludes such images."""
        mapping = self.split.mapping
        if mapping.unlabeled == "empty" and not self.num_labels:
            message = "has no label; in this source such images are not empty, but were not labeled"
            self.split.problems.add("unlabeled image", self.image, message, expected=True)
            return None
        given = given_to_all(mapping.attributed, self.objects)
        attributed = {category: names for category, names in given.items() if category not in self.uncertain}
        known = self.scene_attributes, mapping.exhaustive - self.uncertain, attributed
        scene = Scene(self.width, self.height, tuple(self.objects), *known, mapping.name, self.image_id)
        return Record(self.image, scene, self.group)


def upright_size(file: BinaryIO) -> tuple[int, int]:
    """Width and height of an image as labeling tools show it, turned by its EXIF. Pixels are not decoded."""
    with Image.open(file) as image:
        (width, height), turn = image.size, None
        with suppress(Exception):  # viewers ignore a broken EXIF block
            turn = image.getexif().get(ExifTags.Base.Orientation)  # decodes a PNG: its EXIF may follow the pixels
        return (height, width) if turn in (5, 6, 7, 8) and image.format != "TIFF" else (width, height)

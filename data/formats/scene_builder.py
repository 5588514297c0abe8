"""The scene of an image, from its labels. A label that is wrong or unclear limits what is known of the scene."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import ExifTags, Image

from ..scene import CLASSES, GRID, Scene, SceneObject, classes_of, given_to_all
from .mapping import ClassMapping
from .names import stem_of
from .reading import Unusable, reading, to_flag
from .source import Source


VISIBLE_IF_FLAGGED = 0.7  # where "occluded" and "truncated" are only yes or no


@dataclass(frozen=True)
class Record:
    """One image and its scene; `group` names its camera or drive, "" if the source does not tell."""

    image: Path
    scene: Scene
    group: str = ""


@dataclass
class SceneBuilder:
    """Collects the labels of one image. A label that is wrong or unclear makes categories uncertain.

    An uncertain category is removed from the scene's `exhaustive` and `attributed`: "yes" can still be answered for
    it, but not "no", a count, or "only".

    Raises:
        Unusable: the image cannot be opened. Only its header is read.
    """

    source: Source
    name: str  # path below the image folder
    where: str  # file and record that name the image
    objects: list[SceneObject] = field(default_factory=list)
    uncertain: set[str] = field(default_factory=set)
    num_labels: int = 0  # including those of ignored classes
    group: str = ""  # camera or drive
    scale: tuple[float, float] = (1.0, 1.0)  # from the units of the boxes to pixels of the image file
    seen: set[Any] = field(default_factory=set)  # objects so far, to find labels that are listed twice

    def __post_init__(self) -> None:
        self.image = self.source.path("images") / self.name
        self.scene_attributes = self.source.mapping.scene_attributes_for(stem_of(self.name))
        with (
            reading(self.where, f"image {self.image} cannot be opened", "corrupt image"),
            self.source.folder.open(self.image) as file,
            Image.open(file) as image,
        ):
            self.width, self.height = _upright_size(image)

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

    def scale_from(self, width: float, height: float) -> None:
        """Set the scale for boxes in pixels of an image of this size; an unknown size, 0 or not finite, is ignored.

        Raises:
            Unusable: the image has another proportion, so it was not only resized.
        """
        if 0 < width < math.inf and 0 < height < math.inf:
            scale_x, scale_y = self.scale = self.width / width, self.height / height
            if abs(scale_x - scale_y) > 0.02 * max(scale_x, scale_y):
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
        visible: float = 1.0,
        attributes: dict[str, str] | None = None,
        wrong: str = "",
        **fields: Any,
    ) -> None:
        """Add a labeled box (left, top, right, bottom), clipped to the image.

        Args:
            box: in units that `scale` turns into pixels; NaN stands for a number that cannot be read.
            written: the box as the file has it, for messages.
            visible: the fraction of the box that is not hidden; what lies outside the image reduces it.
            attributes: added to those of the class mapping.
            wrong: why the box cannot be used; its class is known.
            fields: further fields of the `SceneObject`.
        """
        mapping = self.find(name, where)
        if mapping is None or (mapping.category is None and not mapping.maybe):
            return
        left, top, right, bottom = box = tuple(side * self.scale[i % 2] for i, side in enumerate(box))
        if wrong := wrong or self._what_is_wrong(box, written):
            self.source.problems.add("bad box", where, f"box {written} of {name!r} {wrong}")
            self.mark_uncertain(mapping, lost=True)
            return
        clipped = (max(left, 0.0), max(top, 0.0), min(right, float(self.width)), min(bottom, float(self.height)))
        clipped_area = (clipped[2] - clipped[0]) * (clipped[3] - clipped[1])
        if mapping.category is None:
            if clipped_area >= self.width * self.height / GRID**2:  # no question is about less than a patch
                self.mark_uncertain(mapping)
            return
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

    def _what_is_wrong(self, box: Sequence[float], written: object) -> str:
        """Why a box in pixels cannot be used; empty if it can."""
        if not all(map(math.isfinite, box)):
            is_comma = re.search("[0-9],[0-9]", str(written))
            return f"is not four numbers{': decimals need a point' if is_comma else ''}"
        left, top, right, bottom = box
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
        return Record(self.image, scene, self.group)


def visible_by(*flags: Any) -> float:
    """Visible fraction of an object, estimated from its flags "occluded" and "truncated"."""
    return VISIBLE_IF_FLAGGED ** sum(map(to_flag, flags))


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of an open image as labeling tools show it, turned by its EXIF."""
    width, height = image.size
    try:
        turn = image.getexif().get(ExifTags.Base.Orientation)  # decodes a PNG: its EXIF may follow the pixels
    except Exception:  # viewers ignore a broken EXIF block
        turn = None
    return (height, width) if turn in (5, 6, 7, 8) and image.format != "TIFF" else (width, height)

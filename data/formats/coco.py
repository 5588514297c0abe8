"""COCO JSON: boxes of instances and crowds. Boxes are scaled if an image was resized in proportion."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ...common.files import DataError
from ..scene import CLASSES
from .reading import to_flag, to_number
from .scene_builder import SceneBuilder
from .source import ImageEntry, Source


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Images; the annotation is (entry of the image, [(file and record, class name, label)], complete).

    `complete` is False if the image may lack labels: it has no id, no label of the file belongs to an image, or the
    image id of some label is of another type than the ids of the images.

    Raises:
        DataError: two categories have one id.
    """
    categories, images, annotations = source.records("annotations", "categories", "images", "annotations")
    part = source.layout.get("part")
    names: dict[int | str | None, str] = {}
    for where, category in categories:
        key, name = to_key(category.get("id")), str(category.get("name"))
        if names.setdefault(key, name) != name:
            raise DataError(f"{where}: categories {names[key]!r} and {name!r} have the same id {key}")
    uses = Counter(to_key(image.get("id")) for _, image in images)
    labels: dict[int | str | None, list[Any]] = {key: [] for key in uses if key is not None}
    types = {type(key) for key in labels}
    all_placed = True
    for where, label in annotations:
        image_key, category_key = to_key(label.get("image_id")), to_key(label.get("category_id"))
        if image_key in labels:
            labels[image_key].append((where, names.get(category_key, f"id {label.get('category_id')}"), label))
        else:
            source.problems.add("annotation without image", where, f"there is no image {label.get('image_id')!r}")
            all_placed = all_placed and type(image_key) in types
    all_placed = all_placed and (not annotations or any(labels.values()))
    entries: list[ImageEntry] = []
    for where, image in images:
        key = to_key(image.get("id"))
        if uses[key] > 1:
            source.problems.add("bad record", where, f"another image has the same id {image.get('id')}")
        elif part in (None, image.get("part")):
            annotation = (image, labels.get(key, []), all_placed and key is not None)
            entries.append((str(image.get("file_name")), where, annotation))
    return source.by_name(entries)


def add_labels(scene: SceneBuilder, annotation: tuple[dict[str, Any], list[Any], bool]) -> None:
    """Add the boxes of one image. A crowd is not an instance."""
    image, labels, is_complete = annotation
    scene.group = str(image.get(scene.source.mapping.group, ""))
    if not is_complete:
        scene.uncertain |= CLASSES.keys()
    scene.scale_from(to_number(image.get("width")), to_number(image.get("height")))
    for where, name, label in labels:
        area = to_number(label.get("area")) * math.prod(scene.scale)
        # Without an outline, "area" is that of the box, not of what is visible.
        is_known = label.get("segmentation") and 0 < area < math.inf
        fields: dict[str, Any] = {"is_instance": not to_flag(label.get("iscrowd"))}
        scene.add(name, corners_of(label), where, label.get("bbox"), area=area if is_known else None, **fields)


def corners_of(label: dict[str, Any]) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the "bbox" of a label; without one, of the outlines of its "segmentation".

    All are NaN if neither can be read.
    """
    bbox, outlines = label.get("bbox"), label.get("segmentation")
    if bbox or not (isinstance(outlines, list) and outlines):
        left, top, width, height = map(to_number, bbox if isinstance(bbox, list) and len(bbox) == 4 else [None] * 4)
        return left, top, left + width, top + height
    parts = outlines if isinstance(outlines[0], list) else [outlines]
    x, y = ([to_number(value) for part in parts if isinstance(part, list) for value in part[i::2]] for i in (0, 1))
    if not x or not all(map(math.isfinite, x + y)) or len(x) != len(y):
        return math.nan, math.nan, math.nan, math.nan
    return min(x), min(y), max(x), max(y)


def to_key(value: Any) -> int | str | None:
    """An id: a number for 1, 1.0 (pandas writes that) and "1", otherwise its text; None for any other value."""
    if isinstance(value, str):
        return int(value.partition(".")[0]) if re.fullmatch(r"[0-9]{1,18}(\.0*)?", value) else value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None

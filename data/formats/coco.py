"""COCO JSON: boxes of instances and crowds. Boxes are scaled if an image was resized in proportion."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ...files import DataError
from ..scene import CLASSES
from .base import ImageEntry, SceneBuilder, Source, to_flag, to_number


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Images; the annotation is (entry of the image, [(file and record, class name, label)], complete).

    `complete` is False if a label of the file may belong to any image: its id is none that an image of this file has
    or could have, or no label at all belongs to an image.

    Raises:
        DataError: two categories have one id.
    """
    data = source.read_json(source.path("annotations"), "categories", "images", "annotations")
    names: dict[int | str | None, str] = {}
    for where, category in data["categories"]:
        key, name = to_key(category.get("id")), str(category.get("name"))
        if names.setdefault(key, name) != name:
            raise DataError(f"{where}: categories {names[key]!r} and {name!r} have the same id {key}")
    uses = Counter(to_key(image.get("id")) for _, image in data["images"])
    labels: dict[int | str | None, list[Any]] = {key: [] for key in uses if key is not None}
    types = {type(key) for key in labels}
    all_placed = True
    for where, label in data["annotations"]:
        image_key, category_key = to_key(label.get("image_id")), to_key(label.get("category_id"))
        if image_key in labels:
            labels[image_key].append((where, names.get(category_key, f"id {label.get('category_id')}"), label))
        else:
            source.problems.add("annotation without image", where, f"there is no image {label.get('image_id')!r}")
            all_placed = all_placed and type(image_key) in types
    all_placed = all_placed and (not data["annotations"] or any(labels.values()))
    entries: list[ImageEntry] = []
    for where, image in data["images"]:
        key = to_key(image.get("id"))
        if uses[key] > 1:
            source.problems.add("bad record", where, f"another image has the same id {image.get('id')}")
        else:
            annotation = (image, labels.get(key, []), all_placed and key is not None)
            entries.append((str(image.get("file_name")), where, annotation))
    return source.by_name(entries)


def add_labels(scene: SceneBuilder, annotation: Any, where: str) -> None:
    """Add the boxes of one image. A crowd is not an instance."""
    image, labels, is_complete = annotation
    if not is_complete:
        scene.uncertain |= CLASSES.keys()
    scale_x, scale_y = scene.scale_from(to_number(image.get("width")), to_number(image.get("height")))
    for label_where, name, label in labels:
        left, top, right, bottom = corners_of(label)
        box = (left * scale_x, top * scale_y, right * scale_x, bottom * scale_y)
        area = to_number(label.get("area")) * scale_x * scale_y
        # Without an outline it is the area of the box, not of what is visible.
        is_known = bool(label.get("segmentation")) and 0 < area < math.inf
        is_crowd = to_flag(label.get("iscrowd"))
        written = label.get("bbox")
        scene.add(name, box, label_where, written=written, area=area if is_known else None, is_instance=not is_crowd)


def corners_of(label: dict[str, Any]) -> tuple[float, float, float, float]:
    """Left, top, right and bottom by the "bbox" of a label; without one, by the outlines of its "segmentation"."""
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
    """An id as a number where it is one, as 1, 1.0 (pandas writes that) and "1" are; None if it is no id."""
    if isinstance(value, str):
        return int(value.partition(".")[0]) if re.fullmatch(r"[0-9]{1,18}(\.0*)?", value) else value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None

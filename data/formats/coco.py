"""COCO JSON: boxes of instances and crowds. Boxes are scaled if an image was resized in proportion."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ...common.files import DataError
from ..scene import CLASSES
from .reading import around, to_number
from .scene_builder import SceneBuilder
from .split import ImageEntry, Split


LVIS = ("neg_category_ids", "not_exhaustive_category_ids")  # of an image


def list_images(split: Split) -> Iterator[ImageEntry]:
    """Images; the annotation is (entry of the image, [(file and record, class name, label)], unchecked).

    `unchecked` are class names that may lack labels in the image. It is None, for all classes, if the image has no id,
    no label of the file belongs to an image, or an image id in a label is of another type than those of images.
    """
    categories, images, annotations = split.records("annotations", "categories", "images", "annotations")
    names: dict[int | str | None, str] = {}
    for where, category in categories:
        key, name = to_key(category.get("id")), str(category.get("name"))
        if names.setdefault(key, name) != name:
            raise DataError(f"{where}: categories {names[key]!r} and {name!r} have the same id {key}")
    uses = Counter(to_key(image.get("id")) for _, image in images)
    labels: dict[int | str | None, list[Any]] = {key: [] for key in uses}
    strays = set[type]()
    for where, label in annotations:
        image_key, category_key = to_key(label.get("image_id")), to_key(label.get("category_id"))
        if image_key in labels and image_key is not None:
            labels[image_key].append((where, names.get(category_key, f"id {label.get('category_id')}"), label))
        else:
            split.problems.add("annotation without image", where, f"there is no image {label.get('image_id')!r}")
            strays.add(type(image_key))
    is_placed = strays <= {type(key) for key in uses} - {type(None)} and (not annotations or any(labels.values()))
    entries: list[ImageEntry] = []
    for where, image in images:
        key = to_key(image.get("id"))
        if uses[key] > 1:
            split.problems.add("bad record", where, f"another image has the same id {image.get('id')}")
        elif split.layout.get("part") in (None, image.get("part")):
            unchecked: set[str] | None = set() if is_placed and key is not None else None
            if unchecked is not None and not image.keys().isdisjoint(LVIS):
                listed = (image[ids] if isinstance(image.get(ids), list) else [] for ids in LVIS)
                absent, partly = ({names.get(to_key(one), "") for one in ids} for ids in listed)
                unchecked = set(names.values()) - absent - {name for _, name, _ in labels[key]} | partly
            name = str(image.get("file_name") or image.get("coco_url"))
            entries.append((name, where, (image, labels[key], unchecked)))
    return split.by_name(entries)


def add_labels(scene: SceneBuilder, annotation: tuple[dict[str, Any], list[Any], set[str] | None]) -> None:
    """Add the boxes of one image, with the attributes of CVAT."""
    image, labels, unchecked = annotation
    scene.group = str(image.get(scene.split.mapping.group, ""))
    if unchecked is None:
        scene.uncertain |= CLASSES.keys()
    for meaning in filter(None, map(scene.split.mapping.find, unchecked or ())):
        scene.mark_uncertain(meaning, lost=True)
    scene.scale_from(to_number(image.get("width")), to_number(image.get("height")))
    for where, name, label in labels:
        bbox, outlines, attributes = (label.get(key) for key in ("bbox", "segmentation", "attributes"))
        marks = label | attributes if isinstance(attributes, dict) else label
        if bbox or not isinstance(outlines, list):
            left, top, width, height = map(
                to_number, bbox if isinstance(bbox, list) and len(bbox) == 4 else [None] * 4
            )
            box = left, top, left + width, top + height
        else:
            values = [value for part in outlines for value in (part if isinstance(part, list) else [part])]
            box = around(values[::2], values[1::2])
        area = None  # without an outline, "area" is that of the box, not of what is visible
        if isinstance(outlines, list | dict) and any(outlines):
            visible = to_number(label.get("area")) * math.prod(scene.scale)
            area = visible if 0 < visible < math.inf else None
            marks = marks | {"rotation": 0}  # the box is around the outline
        scene.add(name, box, where, bbox, marks, area=area)


def to_key(value: Any) -> int | str | None:
    """An id: a number for 1, 1.0 (pandas writes that) and "1", otherwise its text; None for any other value."""
    if isinstance(value, str):
        return int(value.partition(".")[0]) if re.fullmatch(r"[0-9]{1,18}(\.0*)?", value) else value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None

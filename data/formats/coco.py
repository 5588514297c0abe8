"""COCO JSON: boxes of instances and crowds. Boxes are scaled if an image was resized in proportion."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .mapping import normalize
from .reading import to_number
from .scene_builder import SceneBuilder
from .split import ImageEntry, Split


LISTS = ("categories", "images", "annotations")
LVIS = ("neg_category_ids", "not_exhaustive_category_ids")  # of an image


def list_images(split: Split) -> Iterator[ImageEntry]:
    """Images; the annotation is (entry of the image, [(file and record, class name, label)], unchecked).

    `unchecked` are class names that may lack labels in the image: all if no label belongs to an image of the file. Ids
    are compared as texts: 1 is "1".
    """
    categories, images, annotations = split.records("annotations", *LISTS)
    names = {str(category.get("id")): str(category.get("name")) for _, category in categories}
    uses = Counter(str(image.get("id")) for _, image in images)
    labels: dict[str, list[Any]] = {key: [] for key in uses}
    for where, label in annotations:
        key, category_id = str(label.get("image_id")), str(label.get("category_id"))
        if key in labels:
            labels[key].append((where, names.get(category_id, f"id {category_id}"), label))
        else:
            split.problems.add("annotation without image", where, f"there is no image {key}")
    is_placed = not annotations or any(labels.values())
    entries: list[ImageEntry] = []
    for where, image in images:
        key = str(image.get("id"))
        if uses[key] > 1:
            split.problems.add("bad record", where, f"another image has the same id {key}")
        elif split.layout.get("part") in (None, image.get("part")):
            unchecked = set() if is_placed else set(names.values())
            if is_placed and not image.keys().isdisjoint(LVIS):
                absent, partly = ({names.get(str(one), "") for one in image.get(ids) or ()} for ids in LVIS)
                unchecked = set(names.values()) - absent - {name for _, name, _ in labels[key]} | partly
            name = str(image.get("file_name") or image.get("coco_url"))
            entries.append((name, where, (image, labels[key], unchecked)))
    return split.by_name(entries)


def add_labels(scene: SceneBuilder, annotation: tuple[dict[str, Any], list[Any], set[str]]) -> None:
    """Add the boxes of one image, with the attributes of CVAT."""
    image, labels, unchecked = annotation
    scene.group = str(image.get(scene.split.mapping.group, ""))
    for name in unchecked:
        if meaning := scene.split.mapping.classes.get(normalize(name)):
            scene.uncertain |= meaning.lost
    scene.scale_from(to_number(image.get("width")), to_number(image.get("height")))
    for where, name, label in labels:
        bbox, outline, attributes = (label.get(key) for key in ("bbox", "segmentation", "attributes"))
        marks = label | attributes if isinstance(attributes, dict) else label
        left, top, width, height = map(to_number, bbox or [None] * 4)
        # Without an outline, "area" is that of the box, not of what is visible.
        area = to_number(label.get("area")) * math.prod(scene.scale) if outline else 0.0
        visible = area if 0 < area < math.inf else None
        scene.add(name, (left, top, left + width, top + height), where, bbox, marks, area=visible)

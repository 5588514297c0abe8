"""COCO JSON: boxes of instances and crowds. Boxes are scaled if an image was resized in proportion."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .base import ImageEntry, SceneBuilder, SkippedImage, Source, to_number


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Yield the images; the annotation is (entry of the image, [(file and record, class name, label)])."""
    data = source.read_json(source.path("annotations"), "categories", "images", "annotations")
    names = {str(category.get("id")): str(category.get("name")) for _, category in data["categories"]}
    uses = Counter((key, str(image.get(key))) for _, image in data["images"] for key in ("id", "file_name"))
    labels: dict[str, list[Any]] = {str(image.get("id")): [] for _, image in data["images"]}
    for where, label in data["annotations"]:
        image_id, category_id = str(label.get("image_id")), str(label.get("category_id"))
        if image_id in labels:
            labels[image_id].append((where, names.get(category_id, f"id {category_id}"), label))
        else:
            source.problems.add("annotation without image", where, f"there is no image {label.get('image_id')!r}")
    for where, image in data["images"]:
        if repeated := [key for key in ("id", "file_name") if uses[key, str(image.get(key))] > 1]:
            message = f"another image has the same {repeated[0]} {image.get(repeated[0])}"
            source.problems.add("bad record", where, message)
        else:
            yield str(image.get("file_name")), where, (image, labels[str(image.get("id"))])


def add_labels(scene: SceneBuilder, annotation: Any, where: str) -> None:
    """Add the boxes of one image. A crowd is not an instance."""
    image, labels = annotation
    scale_x, scale_y = _scale(scene, to_number(image.get("width")), to_number(image.get("height")))
    for label_where, name, label in labels:
        bbox = label.get("bbox")
        values = bbox if isinstance(bbox, list) and len(bbox) == 4 else [None] * 4
        left, top, width, height = (to_number(value) for value in values)
        box = (left * scale_x, top * scale_y, (left + width) * scale_x, (top + height) * scale_y)
        area = to_number(label.get("area")) * scale_x * scale_y
        # Without an outline it is the area of the box, not of what is visible.
        is_known = bool(label.get("segmentation")) and 0 < area < math.inf
        scene.add(name, box, label_where, area=area if is_known else None, is_instance=not label.get("iscrowd"))


def _scale(scene: SceneBuilder, width: float, height: float) -> tuple[float, float]:
    """Return the factors from the annotated size to the size of the image file."""
    if not (0 < width < math.inf and 0 < height < math.inf):
        return 1.0, 1.0
    scale_x, scale_y = scene.width / width, scene.height / height
    if abs(scale_x - scale_y) > 0.02 * max(scale_x, scale_y):
        message = f"the image is {scene.width} × {scene.height}, its annotation is for {width:g} × {height:g}"
        raise SkippedImage("image size", message)
    return scale_x, scale_y

"""Semantic masks: an image of class ids beside each image."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from ..patches import mask_coverage
from ..scene import SceneObject
from .base import IMAGE_ERRORS, ImageEntry, SceneBuilder, SkippedImage, Source
from .mapping import ClassMapping


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Yield the images; the annotation is (path of the mask, {id: class name})."""
    found: dict[int, str] = {}
    if "classes" in source.layout:
        for where, entry in source.read_json(source.path("classes"), "categories")["categories"]:
            if isinstance(entry.get("id"), int):
                found[entry["id"]] = str(entry.get("name"))
            else:
                source.problems.add("bad record", where, f"id must be a whole number, got {entry.get('id')!r}")
    names = source.class_names(found, source.path("classes") if "classes" in source.layout else source.root)
    for name, where, path in source.pairs("masks", ".png", ".bmp", ".tif", ".tiff"):
        yield name, where, (path, names)


def add_labels(scene: SceneBuilder, annotation: Any, where: str) -> None:
    """Add an object for each category in a mask: all of its pixels together, which is not an instance.

    The mapping's "presence" sets the minimum size. A mask smaller than "absent" is no object. One smaller than
    "present" may be overlooked or an error: it gets `visible=0.0`, so that no question is about its category.
    """
    path, names = annotation
    try:
        with scene.source.open(path) as file, Image.open(file) as image:
            mask = np.asarray(image)
    except IMAGE_ERRORS as error:
        raise SkippedImage("corrupt image", f"mask cannot be decoded: {error}") from error
    if mask.shape != (scene.height, scene.width):
        message = f"the mask has shape {mask.shape}, its image is {scene.width} × {scene.height}"
        raise SkippedImage("image size", message)
    class_ids: dict[ClassMapping, list[int]] = {}
    for class_id in np.unique(mask).tolist():
        mapping = scene.find(names.get(class_id, f"id {class_id}"), where)
        if mapping is not None and (mapping.category or mapping.maybe):
            class_ids.setdefault(mapping, []).append(class_id)
    presence = scene.source.mapping.presence
    scale = mask.size / (presence["at"][0] * presence["at"][1])  # the thresholds are for images of this size
    for mapping, ids in class_ids.items():
        filled = np.isin(mask, ids)
        area = int(filled.sum())
        if area < presence["absent"] * scale:
            continue
        scene.mark_uncertain(mapping)
        if mapping.category is None:
            continue
        rows, columns = np.flatnonzero(filled.any(1)), np.flatnonzero(filled.any(0))
        box = (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))
        visible = 0.0 if area < presence["present"] * scale else 1.0
        coverage = tuple(map(tuple, mask_coverage(filled).round(4).tolist()))
        item = SceneObject(
            mapping.category, box, float(area), visible, mapping.attributes, coverage, is_instance=False
        )
        scene.objects.append(item)

"""Semantic masks: an image of class ids for each image, and {"categories": [{"id", "name"}]} in the file "classes"."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from ..scene import GRID, SceneObject, mask_patches
from .mapping import ClassMapping, normalize
from .reading import Unusable
from .scene_builder import SceneBuilder
from .split import ImageEntry, Split


IGNORED = 255  # "void", "ignore": pixels without a label, in most data sets


def list_images(split: Split) -> Iterator[ImageEntry]:
    """Images; the annotation is (path of the mask, {id: class name})."""
    [categories] = split.records("classes", "categories")
    names = {str(entry.get("id")): str(entry.get("name")) for _, entry in categories}
    for name, where, path in split.pairs("masks", ".png", ".bmp", ".tif", ".tiff"):
        yield name, where, (path, names)


def add_labels(scene: SceneBuilder, annotation: tuple[Path, dict[str, str]]) -> None:
    """Add one object for each category in a mask: all of its pixels together, which are not an instance.

    An area smaller than "absent" of the mapping's "presence" is ignored. One smaller than "present" may be an error:
    it gets `visible=0.0`, so that no question is about its category.
    """
    path, names = annotation
    mask = _read(scene, path)
    ids_of: dict[ClassMapping, list[int]] = {}
    found = set(np.unique(mask).tolist())
    if str(IGNORED) not in names and found - {0, IGNORED}:  # in a mask of 0 and 255 only, 255 may be a class, in white
        found.discard(IGNORED)
    scene.num_labels = len(found)
    for class_id in map(int, sorted(found)):
        name = names.get(str(class_id), f"id {class_id}")
        mapping = scene.split.mapping.classes.get(normalize(name))
        if mapping is None:
            scene.reject_class(name, scene.where)
        elif mapping.category or mapping.maybe:
            ids_of.setdefault(mapping, []).append(class_id)
    presence = scene.split.mapping.presence
    scale = mask.size / (presence["at"][0] * presence["at"][1])  # the thresholds are for images of this size
    for mapping, ids in ids_of.items():
        filled = np.isin(mask, ids)
        area = int(filled.sum())
        if area < presence["absent"] * scale:
            continue
        scene.uncertain |= mapping.doubted
        if mapping.category is None:
            continue
        rows, columns = np.flatnonzero(filled.any(1)), np.flatnonzero(filled.any(0))
        box = float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
        visible = 0.0 if area < presence["present"] * scale else 1.0
        coverage = mask_patches(filled, (GRID, GRID))
        item = SceneObject(
            mapping.category, box, float(area), visible, mapping.attributes, coverage, is_instance=False
        )
        scene.objects.append(item)


def _read(scene: SceneBuilder, path: Path) -> np.ndarray:
    """Class ids [H, W] of a mask, which may be gray saved as RGB."""
    mask = scene.split.folder.read(path, lambda file: np.asarray(Image.open(file)))
    if mask.shape[:2] != (scene.height, scene.width):
        shape = f"{mask.shape[1]} × {mask.shape[0]}"
        raise Unusable("image size", path, f"the mask is {shape}, its image is {scene.width} × {scene.height}")
    if mask.ndim == 3:
        if mask.shape[2] < 3 or (mask[..., :3] != mask[..., :1]).any():
            raise Unusable("bad mask", path, "the mask has colors in place of class ids")
        mask = mask[..., 0]
    return mask

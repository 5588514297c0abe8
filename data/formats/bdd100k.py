"""BDD100K's own JSON: a list of frames with scene attributes, and boxes with attributes."""

from collections.abc import Iterable, Iterator
from typing import Any

from ..scene import ATTRIBUTES, SCENE_ATTRIBUTES
from .mapping import normalize
from .reading import to_number
from .scene_builder import SceneBuilder
from .split import ImageEntry, Split


def list_images(split: Split) -> Iterator[ImageEntry]:
    """Images; the annotation is a frame of the list, or of {"frames": [...]}."""
    [frames] = split.records("annotations", "frames")
    return split.by_name([(str(frame.get("name")), where, frame) for where, frame in frames])


def add_labels(scene: SceneBuilder, frame: dict[str, Any]) -> None:
    """Add the scene attributes and boxes of one frame."""
    mapping = scene.split.mapping
    scene.scene_attributes |= _translate(scene, SCENE_ATTRIBUTES, frame, scene.where)
    for i, label in enumerate(frame.get("labels") or []):
        where, name, box = f"{scene.where}, label {i}", str(label.get("category")), label.get("box2d") or {}
        meaning = mapping.classes.get(normalize(name))
        attributed = mapping.attributed.get(meaning.category or "", ()) if meaning else ()
        attributes = _translate(scene, [key for key in ATTRIBUTES if key in attributed], label, where)
        written = [box.get(key) for key in ("x1", "y1", "x2", "y2")]
        marks = label | (label.get("attributes") or {})
        scene.add(name, [to_number(value) for value in written], where, written, marks, attributes=attributes)


def _translate(scene: SceneBuilder, names: Iterable[str], entry: dict[str, Any], where: str) -> dict[str, str]:
    """{name: value} of those attributes that a frame or label has, in our words by the mapping's "values"."""
    translated, values = {}, scene.split.mapping.values
    for name in filter(values.__contains__, names):
        key, words = values[name]["from"], values[name]["values"]
        value = (entry.get("attributes") or {}).get(key)
        if value is not None and str(value) not in words:
            message = f"{key} is {value!r}, which the mapping does not list"
            scene.split.problems.add("unknown value", where, message)
        elif known := words.get(str(value)):
            translated[name] = known
    return translated

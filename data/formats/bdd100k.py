"""BDD100K's own JSON: a list of frames with scene attributes, and boxes with attributes."""

from collections.abc import Iterable, Iterator
from typing import Any

from ..scene import ATTRIBUTES, SCENE_ATTRIBUTES
from .base import VISIBLE_IF_FLAGGED, ImageEntry, SceneBuilder, SkippedImage, Source, to_flag, to_number


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Images; the annotation is a frame of the list, of {"frames": [...]}, or of JSON lines."""
    frames = source.read_json(source.path("annotations"), "frames")["frames"]
    return source.by_name((str(frame.get("name")), where, frame) for where, frame in frames)


def add_labels(scene: SceneBuilder, frame: dict[str, Any], where: str) -> None:
    """Add the scene attributes and boxes of one frame."""
    labels = frame.get("labels") or []
    if not isinstance(labels, list):
        raise SkippedImage("bad record", "'labels' is not a list")
    scene.scene_attributes |= _translate(scene.source, SCENE_ATTRIBUTES, frame, where)
    for i, label in enumerate(labels):
        label_where, label = f"{where}, label {i}", label if isinstance(label, dict) else {}
        name = str(label.get("category"))
        mapping = scene.source.mapping.find(name)
        attributed = scene.source.mapping.attributed.get(mapping.category or "", ()) if mapping else ()
        attributes = _translate(scene.source, [key for key in ATTRIBUTES if key in attributed], label, label_where)
        box = [_get_dict(label, "box2d").get(key) for key in ("x1", "y1", "x2", "y2")]
        flags = [to_flag(_get_dict(label, "attributes").get(key)) for key in ("occluded", "truncated")]
        visible = VISIBLE_IF_FLAGGED ** sum(flags)
        scene.add(name, [to_number(value) for value in box], label_where, visible, attributes, written=box)


def _translate(source: Source, names: Iterable[str], entry: dict[str, Any], where: str) -> dict[str, str]:
    """Attributes in our words that a frame or label has, by the mapping's "values"."""
    translated = {}
    for name, rule in ((name, source.mapping.values[name]) for name in names if name in source.mapping.values):
        value = _get_dict(entry, "attributes").get(rule["from"])
        if value is not None and str(value) not in rule["values"]:
            message = f"{rule['from']} is {value!r}, which the mapping does not list"
            source.problems.add("unknown value", where, message)
        if known := rule["values"].get(str(value)):
            translated[name] = known
    return translated


def _get_dict(entry: dict[str, Any], key: str) -> dict[str, Any]:
    value = entry.get(key)
    return value if isinstance(value, dict) else {}

"""Colors of vehicles: human annotations of the largest vehicle of a class in an image, one JSON object per line.

    {"image": path, "class": ..., "box": [left, top, width, height], "color": ...}

The box is in fractions of the image. "gray" includes silver. A vehicle of several colors is "mixed": it has no color.
"""

from dataclasses import dataclass, replace
from typing import Any

from ...locating_traffic_vlm import overlap
from ..scene import Scene
from .split import plain_name


MIXED = "mixed"
MIN_OVERLAP = 0.5  # intersection over union of the box with that of the same vehicle in the source


@dataclass(frozen=True)
class VehicleColor:
    """The color of the largest vehicle of a class in one image."""

    image: str  # path as `plain_name` gives it
    category: str  # "vehicle" or one of its subclasses
    box: tuple[float, float, float, float]  # left, top, right, bottom as fractions of the image
    color: str  # of ATTRIBUTES, or MIXED


def parse_vehicle_color(entry: dict[str, Any]) -> VehicleColor:
    """The label of one line. Raises a KeyError, TypeError or ValueError if the line is wrong."""
    left, top, width, height = map(float, entry["box"])
    box = (left, top, left + width, top + height)
    return VehicleColor(plain_name(str(entry["image"])), entry["class"], box, entry["color"])


def with_vehicle_color(scene: Scene, label: VehicleColor) -> Scene:
    """The scene with the color of the object that has the label's class and box.

    Raises:
        ValueError: no object has them, or the color is unknown.
    """
    sides = (scene.width, scene.height) * 2
    box = [fraction * side for fraction, side in zip(label.box, sides)]
    overlaps = [overlap(item.box, box) if item.category == label.category else 0.0 for item in scene.objects]
    best = max(overlaps, default=0.0)
    if best < MIN_OVERLAP:
        raise ValueError(f"no {label.category} of the source has the box {box}; the best overlap is {best:.2f}")
    index = overlaps.index(best)
    item = scene.objects[index]
    attributes = item.attributes if label.color == MIXED else item.attributes | {"color": label.color}
    named = replace(item, attributes=attributes, is_largest=True)
    return replace(scene, objects=(*scene.objects[:index], named, *scene.objects[index + 1 :]))

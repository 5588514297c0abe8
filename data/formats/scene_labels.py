"""Scene labels: human annotations of whole images, one JSON object per line, one file per source.

    {"image": path, "weather": ..., "time_of_day": ..., "road": ..., "traffic": ..., "place": ..., "view": ...,
     "present": [categories], "unsure": [categories], "counts": {category: number}}

Null is unknown. A category in neither list is absent; objects below about 1 % of the image were often missed.
Counts may be left out; 7 is more than 6, and a category that is present without a count was not counted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..scene import CLASSES, PRESENCE_ONLY, TABLES, Scene, classes_of
from .split import Problems, plain_name, read_json_lines


_FIELDS = TABLES["scene_labels"]["fields"]
SCENE_VALUES: dict[str, tuple[str, ...]] = {name: tuple(field["values"]) for name, field in _FIELDS.items()}
# {field: (scene attribute, {value: value of the scene attribute})}
SCENE_ATTRIBUTE_OF = {name: (field["attribute"], field["values"]) for name, field in _FIELDS.items()}
SEEN, SEEN_BY_DRIVERS = (tuple(TABLES["scene_labels"][name]) for name in ("seen", "seen_by_drivers"))
VEHICLES = frozenset(TABLES["scene_labels"]["vehicles"])
CLASS_OF: dict[str, str] = TABLES["scene_labels"]["classes"]  # of categories of scene labels, where it differs


@dataclass(frozen=True)
class SceneLabels:
    """The scene labels of one image; categories are named as our classes."""

    scene_attributes: dict[str, str]  # without unknown ones
    present: frozenset[str]  # categories that are visible
    unsure: frozenset[str]  # categories that may be visible
    asked: frozenset[str]  # all categories that the annotators checked; those in neither of the two are absent
    counts: dict[str, int]  # of present categories, of those that were counted


def read_scene_labels(path: Path, problems: Problems) -> Iterator[tuple[str, SceneLabels]]:
    """Yield (image path as `plain_name` gives it, labels) for each line of a file. Invalid lines are `problems`."""
    asked = _classes((*SEEN, *SEEN_BY_DRIVERS) if path.stem == "bdd100k" else SEEN)
    for _, labels in read_json_lines(path, partial(_parse_labels, asked=asked), problems, "bad scene label"):
        yield labels


def _parse_labels(entry: dict[str, Any], asked: frozenset[str]) -> tuple[str, SceneLabels]:
    scene_attributes: dict[str, str] = {}
    for field, (name, values) in SCENE_ATTRIBUTE_OF.items():
        value = entry.get(field)
        if value in values:
            scene_attributes[name] = values[value]
        elif value is not None and (field, value) not in (("road", "none"), ("place", "none")):  # none is in view
            raise ValueError(f"{field} is {value!r}, expected null or one of {', '.join(values)}")
    present, unsure, counts = _classes(entry["present"]), _classes(entry["unsure"]), entry.get("counts", {})
    if unknown := sorted((present | unsure) - asked):
        raise ValueError(f"unknown categories {unknown}; expected some of {', '.join(sorted(asked))}")
    if wrong := {name: n for name, n in counts.items() if name not in present or type(n) is not int or n < 1}:
        raise ValueError(f"counts must be positive whole numbers of present categories, got {wrong}")
    return plain_name(str(entry["image"])), SceneLabels(scene_attributes, present, unsure, asked, counts)


def _classes(categories: Iterable[str]) -> frozenset[str]:
    return frozenset(CLASS_OF.get(name, name) for name in categories)


def with_scene_labels(scene: Scene, labels: SceneLabels) -> Scene:
    """The scene with its scene labels. Where the source labels a class itself, its boxes say yes.

    They say no only if nobody saw one by looking either: boxes often leave out far and parked objects.
    """
    present, maybe = labels.present, labels.present | labels.unsure
    known = sorted((labels.asked - labels.unsure) & (CLASSES.keys() | PRESENCE_ONLY))
    presence, counts = {name: name in present for name in known}, labels.counts
    vehicles = VEHICLES & maybe
    if VEHICLES & present or not vehicles:
        presence["vehicle"] = bool(vehicles)
    if vehicles and vehicles <= counts.keys():  # all of them were counted
        counts = counts | {"vehicle": sum(counts[name] for name in vehicles)}
    boxed = {name for item in scene.objects for name in classes_of(item.category)}
    seen = {name for one in maybe & CLASSES.keys() for name in classes_of(one)}
    seen |= {"pedestrian"} if "person" in maybe else set()  # a person that was seen may be one without a box
    exhaustive = scene.exhaustive - (seen - boxed)
    presence = {name: is_present for name, is_present in presence.items() if name not in exhaustive | boxed}
    attributes = scene.scene_attributes | labels.scene_attributes
    return replace(scene, exhaustive=exhaustive, scene_attributes=attributes, presence=presence, counts=counts)

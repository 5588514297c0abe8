"""Scene labels: human annotations of whole images, one JSON object per line, one file per source.

    {"image": path, "weather": ..., "time_of_day": ..., "road": ..., "traffic": ..., "place": ..., "view": ...,
     "present": [categories], "unsure": [categories], "counts": {category: number}}

Null is unknown. A category in neither list is absent; objects below about 1 % of the image were often missed.
Counts may be left out; 7 is more than 6, and a category that is present without a count was not counted.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..scene import CLASSES, PRESENCE_ONLY, TABLES, Scene, classes_of
from .reading import Folder
from .split import Problems, plain_name


_FIELDS = TABLES["scene_labels"]["fields"]
SCENE_VALUES: dict[str, tuple[str, ...]] = {name: tuple(field["values"]) for name, field in _FIELDS.items()}
# {field: (scene attribute, {value: value of the scene attribute})}
SCENE_ATTRIBUTE_OF = {name: (field["attribute"], field["values"]) for name, field in _FIELDS.items()}
SEEN, SEEN_BY_DRIVERS = (tuple(TABLES["scene_labels"][name]) for name in ("seen", "seen_by_drivers"))
VEHICLES = frozenset(TABLES["scene_labels"]["vehicles"])
CLASS_OF: dict[str, str] = TABLES["scene_labels"]["classes"]  # of categories of scene labels, where it differs


@dataclass(frozen=True)
class SceneLabels:
    """The scene labels of one image."""

    values: dict[str, str]  # of SCENE_VALUES, without unknown ones; "none" where no road or place is in view
    present: frozenset[str]  # categories that are visible
    unsure: frozenset[str]  # categories that may be visible
    asked: frozenset[str]  # all categories that the annotators checked; those in neither of the two are absent
    counts: dict[str, int]  # of present categories, of those that were counted


def read_scene_labels(path: Path, problems: Problems) -> Iterator[tuple[str, SceneLabels]]:
    """Yield (image path as `plain_name` gives it, labels) for each line of a file. Invalid lines are `problems`."""
    asked = frozenset(SEEN) | (frozenset(SEEN_BY_DRIVERS) if path.stem == "bdd100k" else frozenset())
    for where, line in Folder(path.parent).lines(path):
        try:
            entry = json.loads(line)
            values = {name: entry[name] for name in SCENE_VALUES if entry.get(name) is not None}
            for name, value in values.items():
                allowed = (*SCENE_VALUES[name], "none") if name in ("road", "place") else SCENE_VALUES[name]
                if value not in allowed:
                    raise ValueError(f"{name} is {value!r}, expected null or one of {', '.join(allowed)}")
            present, unsure = frozenset(entry["present"]), frozenset(entry["unsure"])
            if unknown := sorted((present | unsure) - asked):
                raise ValueError(f"unknown categories {unknown}; expected some of {', '.join(sorted(asked))}")
            counts = entry.get("counts", {})
            if wrong := {name: n for name, n in counts.items() if name not in present or type(n) is not int or n < 1}:
                raise ValueError(f"counts must be positive whole numbers of present categories, got {wrong}")
            yield plain_name(str(entry["image"])), SceneLabels(values, present, unsure, asked, counts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.add("bad scene label", where, f"{type(error).__name__}: {error}")


def with_scene_labels(scene: Scene, labels: SceneLabels) -> Scene:
    """The scene with its scene labels. Where the source labels a class itself, its boxes say yes.

    They say no only if nobody saw one by looking either: boxes often leave out far and parked objects.
    """
    attributes = dict(scene.scene_attributes)
    for name, value in labels.values.items():
        attribute, values = SCENE_ATTRIBUTE_OF[name]
        attributes |= {attribute: values[value]} if value != "none" else {}
    presence = {
        CLASS_OF.get(name, name): name in labels.present
        for name in sorted(labels.asked - labels.unsure)
        if CLASS_OF.get(name, name) in CLASSES.keys() | PRESENCE_ONLY
    }
    if labels.asked >= VEHICLES and not VEHICLES & (labels.present | labels.unsure):
        presence["vehicle"] = False
    elif VEHICLES & labels.present:
        presence["vehicle"] = True
    boxed = {name for item in scene.objects for name in classes_of(item.category)}
    seen = {CLASS_OF.get(name, name) for name in labels.present | labels.unsure} & CLASSES.keys()
    seen = {name for one in seen for name in classes_of(one)}
    exhaustive = scene.exhaustive - (seen - boxed)
    presence = {name: is_present for name, is_present in presence.items() if name not in exhaustive | boxed}
    return replace(
        scene, exhaustive=exhaustive, scene_attributes=attributes, presence=presence, counts=_counts_of(labels)
    )


def _counts_of(labels: SceneLabels) -> dict[str, int]:
    """The number of objects of each class that was counted, and of all vehicles if each of them was."""
    vehicles = VEHICLES & (labels.present | labels.unsure)
    if not vehicles or not vehicles <= labels.counts.keys():
        return labels.counts
    return labels.counts | {"vehicle": sum(labels.counts[name] for name in vehicles)}

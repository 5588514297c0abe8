"""Scene labels: what a person saw in each image of a source, one JSON object a line.

    {"image": path, "weather": ..., "time_of_day": ..., "road": ..., "traffic": ..., "place": ..., "view": ...,
     "present": [categories], "unsure": [categories]}

A value of null is unknown. A category in neither list is absent.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils import DataError
from .formats import Problems


SCENE_VALUES: dict[str, tuple[str, ...]] = {
    "weather": ("clear", "cloudy", "rain", "fog", "snow"),
    "time_of_day": ("day", "dusk", "night"),
    "road": ("dry", "wet", "snowy"),
    "traffic": ("empty", "light", "busy", "jam"),
    "place": (
        "city street",
        "residential street",
        "highway",
        "rural road",
        "intersection",
        "parking",
        "bridge or tunnel",
    ),
    "view": ("driver", "camera", "roadside", "close-up", "drawing"),
}
SEEN = (
    *("car", "van", "truck", "bus", "motorcycle", "bicycle", "rickshaw", "person", "traffic light", "traffic sign"),
    *("crosswalk", "roadworks", "animal", "emergency vehicle", "train", "pedestrian on the road"),
)
SEEN_BY_DRIVERS = ("red light", "green light", "yellow light", "parked car", "traffic island", "own hood", "glare")


@dataclass(frozen=True)
class SceneLabels:
    """What was seen in one image.

    Attributes:
        values: a value of SCENE_VALUES for each field that is known; "none" where a road or place is not in view.
        present, unsure: categories.
        asked: all categories that were looked for; those in neither list are absent.
    """

    values: dict[str, str]
    present: frozenset[str]
    unsure: frozenset[str]
    asked: frozenset[str]


def read_scene_labels(path: str | Path, problems: Problems) -> Iterator[tuple[str, SceneLabels]]:
    """(image path, labels) of each line of a file. A line that cannot be used is a problem with its number and value.

    Raises:
        DataError: the file cannot be read, or `problems.strict`.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    asked = frozenset(SEEN) | (frozenset(SEEN_BY_DRIVERS) if Path(path).stem == "bdd100k" else frozenset())
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _parse(json.loads(line), asked)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.add("bad scene label", f"{path}:{number}", f"{type(error).__name__}: {error}")


def _parse(entry: dict[str, Any], asked: frozenset[str]) -> tuple[str, SceneLabels]:
    values = {name: entry[name] for name in SCENE_VALUES if entry.get(name) is not None}
    for name, value in values.items():
        allowed = (*SCENE_VALUES[name], "none") if name in ("road", "place") else SCENE_VALUES[name]
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}, expected null or one of {', '.join(allowed)}")
    present, unsure = frozenset(entry["present"]), frozenset(entry["unsure"])
    if unknown := sorted((present | unsure) - asked):
        raise ValueError(f"unknown categories {unknown}; known are {', '.join(sorted(asked))}")
    return str(entry["image"]), SceneLabels(values, present, unsure, asked)

"""A scene: what is known about one image, whatever it came from.

    annotation → Scene → questions → row → packed batch

A source labels some classes exhaustively: all of them that can be seen are there. Only of those may a "no", a count or
an "only" be said. It may also tell instances apart (boxes) or not (masks of a class): only instances can be counted.
Boxes are (left, top, right, bottom) in pixels of an image of `width` × `height`, inside it, with left < right.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from .patches import resampling


# class: (singular, plural, the wider class that it belongs to). All are words of the vocabulary.
CLASSES: dict[str, tuple[str, str, str | None]] = {
    "vehicle": ("vehicle", "vehicles", None),
    "car": ("car", "cars", "vehicle"),
    "van": ("van", "vans", "vehicle"),
    "bus": ("bus", "buses", "vehicle"),
    "truck": ("truck", "trucks", "vehicle"),
    "trailer": ("trailer", "trailers", "vehicle"),
    "train": ("train", "trains", "vehicle"),
    "rickshaw": ("rickshaw", "rickshaws", "vehicle"),
    "ambulance": ("ambulance", "ambulances", "vehicle"),
    "motorcycle": ("motorcycle", "motorcycles", "vehicle"),
    "bicycle": ("bicycle", "bicycles", "vehicle"),
    "person": ("person", "people", None),
    "pedestrian": ("pedestrian", "pedestrians", "person"),
    "rider": ("rider", "riders", "person"),
    "animal": ("animal", "animals", None),
    "dog": ("dog", "dogs", "animal"),
    "cow": ("cow", "cows", "animal"),
    "horse": ("horse", "horses", "animal"),
    "deer": ("deer", "deer", "animal"),
    "traffic light": ("traffic light", "traffic lights", None),
    "traffic sign": ("traffic sign", "traffic signs", None),
    "stop sign": ("stop sign", "stop signs", "traffic sign"),
    "yield sign": ("yield sign", "yield signs", "traffic sign"),
    "speed limit sign": ("speed limit sign", "speed limit signs", "traffic sign"),
    "crosswalk sign": ("crosswalk sign", "crosswalk signs", "traffic sign"),
    "crosswalk": ("crosswalk", "crosswalks", None),
    "cone": ("traffic cone", "traffic cones", None),
    "barrier": ("barrier", "barriers", None),
    "fence": ("fence", "fences", None),
    "pole": ("pole", "poles", None),
    "building": ("building", "buildings", None),
    "tree": ("tree", "trees", None),
    "sidewalk": ("sidewalk", "sidewalks", None),
    "road": ("road", "roads", None),
    "sky": ("sky", "sky", None),
}

COLORS = ("white", "black", "gray", "silver", "red", "blue", "green", "yellow", "orange", "brown")
LIGHT_STATES = ("red", "yellow", "green")
SPEED_LIMITS = tuple(str(limit) for limit in range(10, 131, 10))
FACTS: dict[str, tuple[str, ...]] = {
    "weather": ("clear", "cloudy", "rainy", "snowy", "foggy"),
    "time of day": ("day", "night", "dusk"),
    "view": ("driver", "camera"),  # from a vehicle on the road, or from a fixed camera above it
}
ATTRIBUTES: dict[str, tuple[str, ...]] = {"color": COLORS, "state": LIGHT_STATES, "value": SPEED_LIMITS}


@dataclass(frozen=True)
class SceneObject:
    """One object, or with `is_instance=False` all that a mask labels with one class.

    Attributes:
        label: a key of CLASSES.
        box: (left, top, right, bottom) of what can be seen.
        area: pixels that can be seen, from a mask; None where only the box is known.
        visible: the part of the object that is neither hidden nor cut by the border, 0..1; 1.0 where unknown.
        attributes: values of ATTRIBUTES, those that are known.
        cells: for masks, the part of each cell of a 14 × 14 grid over the image that it fills, row by row; else None.
        is_instance: whether this is one object.
    """

    label: str
    box: tuple[float, float, float, float]
    area: float | None = None
    visible: float = 1.0
    attributes: dict[str, str] = field(default_factory=dict)
    cells: tuple[tuple[float, ...], ...] | None = None
    is_instance: bool = True

    def __post_init__(self) -> None:
        if self.label not in CLASSES:
            raise ValueError(f"unknown class {self.label!r}; known are {', '.join(CLASSES)}")
        left, top, right, bottom = self.box
        if not (left < right and top < bottom):
            raise ValueError(f"a box of {self.label!r} has no size: {self.box}")
        for name, value in self.attributes.items():
            if value not in ATTRIBUTES.get(name, ()):
                raise ValueError(f"{name}={value!r} of {self.label!r} is not among {ATTRIBUTES.get(name, ())}")

    @property
    def size(self) -> float:
        """Pixels that can be seen, of the mask or else of the box."""
        left, top, right, bottom = self.box
        return self.area if self.area is not None else (right - left) * (bottom - top)


@dataclass(frozen=True)
class Scene:
    """What is known about one image of `width` × `height` pixels.

    Attributes:
        objects: all labelled objects.
        facts: values of FACTS that hold; a fact that the source does not know is not there.
        exhaustive: classes that the source labels wherever they can be seen. A wide class ("vehicle") has to be named
            itself; all its members being there is not enough, as there may be vehicles of other kinds.
        attributed: attributes that the source gives to every object of a class: {"traffic light": {"state"}}.
        source: name of the dataset.
        image_id: names the image within the source.
    """

    width: int
    height: int
    objects: tuple[SceneObject, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    exhaustive: frozenset[str] = frozenset()
    attributed: dict[str, frozenset[str]] = field(default_factory=dict)
    source: str = ""
    image_id: str = ""

    def __post_init__(self) -> None:
        if self.width <= 0 or self.height <= 0:
            raise ValueError(f"an image has {self.width} × {self.height} pixels")
        for item in self.objects:
            left, top, right, bottom = item.box
            if left < 0 or top < 0 or right > self.width or bottom > self.height:
                size = f"{self.width} × {self.height}"
                raise ValueError(f"box {item.box} of {item.label!r} leaves its image of {size}")
        for name, value in self.facts.items():
            if value not in FACTS.get(name, ()):
                raise ValueError(f"fact {name}={value!r} is not among {FACTS.get(name, ())}")
        if unknown := self.exhaustive - CLASSES.keys():
            raise ValueError(f"unknown exhaustive classes {sorted(unknown)}")

    def of(self, label: str) -> list[SceneObject]:
        """Objects of a class or of a member of it."""
        return [item for item in self.objects if is_a(item.label, label)]

    def without(self, *names: str) -> "Scene":
        """The scene of which these attributes and facts are not known."""
        objects = tuple(
            item
            if item.attributes.keys().isdisjoint(names)
            else replace(item, attributes={name: v for name, v in item.attributes.items() if name not in names})
            for item in self.objects
        )
        facts = {name: value for name, value in self.facts.items() if name not in names}
        return replace(self, objects=objects, facts=facts, attributed=given_to_all(self.attributed, objects))

    def flipped(self) -> "Scene":
        """The mirrored scene, left and right exchanged. Nobody can read mirrored digits: values are not known."""
        objects = tuple(
            replace(
                item,
                box=(self.width - item.box[2], item.box[1], self.width - item.box[0], item.box[3]),
                cells=None if item.cells is None else tuple(row[::-1] for row in item.cells),
            )
            for item in self.objects
        )
        return replace(self, objects=objects).without("value")

    def cropped(self, left: int, top: int, right: int, bottom: int) -> "Scene":
        """What is seen of the scene through a window in whole pixels: boxes, areas, visibility and cells of it."""
        if not (0 <= left < right <= self.width and 0 <= top < bottom <= self.height):
            window, size = (left, top, right, bottom), f"{self.width} × {self.height}"
            raise ValueError(f"the window {window} is empty or leaves the image of {size}")
        parts = (_crop_object(item, self, (left, top, right, bottom)) for item in self.objects)
        objects = tuple(part for part in parts if part is not None)
        facts = self.facts
        if (right - left, bottom - top) != (self.width, self.height):
            # Near, far and ahead are read off the place in a whole driver's view; a window moves it.
            facts = {name: value for name, value in facts.items() if name != "view"}
        seen = replace(self, width=right - left, height=bottom - top, objects=objects, facts=facts)
        return replace(seen, attributed=given_to_all(self.attributed, objects))

    def to_json(self) -> str:
        """All fields as one line of JSON; `from_json` gives an equal scene."""
        fields = asdict(self)
        fields["exhaustive"] = sorted(self.exhaustive)
        fields["attributed"] = {label: sorted(names) for label, names in sorted(self.attributed.items())}
        defaults: dict[str, Any] = {"area": None, "visible": 1.0, "attributes": {}, "cells": None, "is_instance": True}
        fields["objects"] = [
            {name: value for name, value in item.items() if name not in defaults or value != defaults[name]}
            for item in fields["objects"]
        ]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Scene":
        fields = json.loads(text)
        fields["objects"] = tuple(_object_from_json(item) for item in fields["objects"])
        fields["exhaustive"] = frozenset(fields["exhaustive"])
        fields["attributed"] = {label: frozenset(names) for label, names in fields["attributed"].items()}
        return cls(**fields)


def _object_from_json(fields: dict[str, Any]) -> SceneObject:
    cells = fields.get("cells")
    return SceneObject(
        **(
            fields
            | {
                "box": tuple(fields["box"]),
                "cells": None if cells is None else tuple(tuple(row) for row in cells),
            }
        )
    )


def _crop_object(item: SceneObject, scene: Scene, window: tuple[int, int, int, int]) -> SceneObject | None:
    """The part of an object inside the window, in its coordinates; None where nothing is left."""
    box = (
        max(item.box[0], window[0]) - window[0],
        max(item.box[1], window[1]) - window[1],
        min(item.box[2], window[2]) - window[0],
        min(item.box[3], window[3]) - window[1],
    )
    if box[0] >= box[2] or box[1] >= box[3]:
        return None
    area = item.area
    if item.cells is not None:
        cells = _crop_cells(item.cells, scene, window)
        cell_size = (window[2] - window[0]) * (window[3] - window[1]) / len(cells) / len(cells[0])
        area = sum(map(sum, cells)) * cell_size
        return replace(item, box=box, area=area, cells=cells) if area > 0 else None
    kept = (box[2] - box[0]) * (box[3] - box[1]) / ((item.box[2] - item.box[0]) * (item.box[3] - item.box[1]))
    if kept < 1 and area is not None:
        area *= kept  # as if it filled its box evenly
    attributes = item.attributes
    if kept < 0.9:  # the lamp that is lit, or a digit, may be what is gone
        attributes = {name: value for name, value in attributes.items() if name == "color"}
    return replace(item, box=box, area=area, visible=item.visible * kept, attributes=attributes)


def _crop_cells(
    cells: tuple[tuple[float, ...], ...], scene: Scene, window: tuple[int, int, int, int]
) -> tuple[tuple[float, ...], ...]:
    """Coverage of the window's patches, as many as the image's."""
    rows = resampling(window[1] / scene.height, window[3] / scene.height, len(cells), len(cells))
    columns = resampling(window[0] / scene.width, window[2] / scene.width, len(cells[0]), len(cells[0]))
    return tuple(map(tuple, (rows @ np.array(cells) @ columns.T).round(4).tolist()))


def given_to_all(
    attributed: Mapping[str, frozenset[str]], objects: Sequence[SceneObject]
) -> dict[str, frozenset[str]]:
    """Of attributes {class: names} those that all objects of the class have indeed."""
    kept = {}
    for label, names in attributed.items():
        alike = [item for item in objects if is_a(item.label, label)]
        if found := frozenset(name for name in names if all(name in item.attributes for item in alike)):
            kept[label] = found
    return kept


def is_a(label: str, wider: str) -> bool:
    """Whether a class is the other one or a member of it."""
    return label == wider or CLASSES[label][2] == wider

"""A scene: what is known about one image, in a form common to all datasets.

    annotation → Scene → questions → row → packed batch

`classes.yaml` lists the classes. A source labels some of them exhaustively: every visible object of the class is
labeled. Only these classes allow the answer "no", a count, or "the only one". A source labels either instances (boxes)
or classes (one mask for all objects of a class); only instances can be counted. Boxes are (left, top, right, bottom)
in pixels, inside an image of `width` × `height`, with left < right and top < bottom.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml


GRID = 14  # patches per side of stored masks, which are resampled to the grid of the model
SYNTHETIC = "synthetic"  # the source of rendered scenes; all others are photographs


# All names and values in it are texts: `on` is not true, and a number of lanes is not a number.
TABLES = yaml.load(Path(__file__).with_name("classes.yaml").read_text(encoding="utf-8"), yaml.BaseLoader)
# {class: (singular, plural, its superclass or None)}
CLASSES: dict[str, tuple[str, str, str | None]] = {
    name: (nouns[0], nouns[1], nouns[2] if len(nouns) > 2 else None) for name, nouns in TABLES["classes"].items()
}
UNBOXED = frozenset(TABLES["unboxed"])
ATTRIBUTES: dict[str, tuple[str, ...]] = {name: tuple(values) for name, values in TABLES["attributes"].items()}
SCENE_ATTRIBUTES: dict[str, tuple[str, ...]] = {n: tuple(values) for n, values in TABLES["scene_attributes"].items()}
LIGHT_STATES, SPEED_LIMITS = ATTRIBUTES["state"], ATTRIBUTES["value"]
# What scene labels say about the whole image, in addition to CLASSES.
PRESENCE_ONLY = frozenset({*(f"{state} light" for state in LIGHT_STATES), "pedestrian on the road"})
PRESENT_IN_CROP = 0.7  # a crop of this fraction of the area is assumed to show what the image shows
MIRRORED = {"left": "right", "right": "left"}
# Defaults of objects, which are not written to JSON.
UNWRITTEN: dict[str, Any] = {"area": None, "visible": 1.0, "attributes": {}, "coverage": None}
UNWRITTEN |= {"is_instance": True, "is_largest": False}
Coverage = tuple[tuple[float, ...], ...]  # rows of patches
PARSED = 1 << 13  # scenes that a worker keeps, of about 12 kB each


@dataclass(frozen=True)
class SceneObject:
    """One object, or with `is_instance=False` everything that a mask labels with one class.

    Attributes:
        category: the class, a key of CLASSES.
        box: (left, top, right, bottom) of the visible part, in pixels.
        area: visible pixels, from a mask; None where only the box is known.
        visible: fraction of the object that is neither hidden nor cut by the image border, 0..1; 1.0 where unknown.
        attributes: known values of ATTRIBUTES by name.
        coverage: for masks, the fraction of each patch of a 14 × 14 grid that is filled, row by row; else None.
        is_instance: whether this is a single object.
        is_largest: whether it is known to be the largest object of its class in the image, labeled or not.

    Raises:
        ValueError: the class or an attribute value is unknown, or the box is empty.
    """

    category: str
    box: tuple[float, float, float, float]
    area: float | None = None
    visible: float = 1.0
    attributes: dict[str, str] = field(default_factory=dict)
    coverage: Coverage | None = None
    is_instance: bool = True
    is_largest: bool = False

    def __post_init__(self) -> None:
        if self.category not in CLASSES:
            raise ValueError(f"unknown class {self.category!r}; expected one of {', '.join(CLASSES)}")
        left, top, right, bottom = self.box
        if not (left < right and top < bottom):
            raise ValueError(f"the box of {self.category!r} must have left < right and top < bottom, got {self.box}")
        for name, value in self.attributes.items():
            if value not in ATTRIBUTES.get(name, ()):
                known = f"expected one of {', '.join(ATTRIBUTES.get(name, ATTRIBUTES))}"
                raise ValueError(f"attribute {name}={value!r} of {self.category!r} is unknown; {known}")

    @property
    def size(self) -> float:
        """Visible pixels: of the mask if there is one, else of the box."""
        left, top, right, bottom = self.box
        return self.area if self.area is not None else (right - left) * (bottom - top)


@dataclass(frozen=True)
class Scene:
    """What is known about one image of `width` × `height` pixels.

    Attributes:
        objects: all labeled objects.
        scene_attributes: scene attributes, {name: value} of SCENE_ATTRIBUTES; unknown ones are absent.
        exhaustive: classes of which the source labels every visible object. A superclass ("vehicle") must be listed
            itself: listing all its subclasses is not enough, as there may be other types of vehicles.
        attributed: attributes that the source gives for every object of a class: {"traffic light": {"state"}}.
        source: name of the dataset.
        image_id: name of the image within the source.
        presence: whether the image shows a class or one of PRESENCE_ONLY, {name: bool}, where neither boxes nor masks
            say it; a missing name is unknown.
        counts: number of objects of a class, as someone counted them who looked at the image; more than 6 are 7 or
            more. A count is worth one more or less, and is not used where boxes tell the number.

    Raises:
        ValueError: the size is not positive, a box leaves the image, or a scene attribute is unknown.
    """

    width: int
    height: int
    objects: tuple[SceneObject, ...] = ()
    scene_attributes: dict[str, str] = field(default_factory=dict)
    exhaustive: frozenset[str] = frozenset()
    attributed: dict[str, frozenset[str]] = field(default_factory=dict)
    source: str = ""
    image_id: str = ""
    presence: dict[str, bool] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.width <= 0 or self.height <= 0:
            raise ValueError(f"an image needs a positive width and height, got {self.width} × {self.height}")
        for item in self.objects:
            left, top, right, bottom = item.box
            if left < 0 or top < 0 or right > self.width or bottom > self.height:
                size = f"{self.width} × {self.height}"
                raise ValueError(f"box {item.box} of {item.category!r} leaves its image of {size}")
        for name, value in self.scene_attributes.items():
            if value not in SCENE_ATTRIBUTES.get(name, ()):
                known = ", ".join(SCENE_ATTRIBUTES.get(name, SCENE_ATTRIBUTES))
                raise ValueError(f"scene attribute {name}={value!r} is unknown; expected one of {known}")

    def of(self, category: str) -> list[SceneObject]:
        """Objects of a class or of its subclasses."""
        return [item for item in self.objects if is_a(item.category, category)]

    def without(self, *names: str) -> "Scene":
        """The scene with these attributes of objects, scene attributes and names of `presence` unknown."""
        objects = tuple(
            replace(item, attributes={name: value for name, value in item.attributes.items() if name not in names})
            for item in self.objects
        )
        return replace(
            self,
            objects=objects,
            scene_attributes={name: value for name, value in self.scene_attributes.items() if name not in names},
            presence={name: is_seen for name, is_seen in self.presence.items() if name not in names},
            attributed=given_to_all(self.attributed, objects),
        )

    def flipped(self) -> "Scene":
        """The horizontally mirrored scene. Values of signs become unknown: mirrored digits cannot be read."""
        objects = tuple(
            replace(
                item,
                box=(self.width - item.box[2], item.box[1], self.width - item.box[0], item.box[3]),
                coverage=None if item.coverage is None else tuple(row[::-1] for row in item.coverage),
            )
            for item in self.objects
        )
        scene_attributes = dict(self.scene_attributes)
        if shape := scene_attributes.get("road shape"):
            scene_attributes["road shape"] = MIRRORED.get(shape, shape)
        return replace(self, objects=objects, scene_attributes=scene_attributes).without("value")

    def cropped(self, left: int, top: int, right: int, bottom: int) -> "Scene":
        """The part of the scene inside a window in whole pixels, with its boxes, areas, visibility and patches."""
        parts = (_crop_object(item, self, (left, top, right, bottom)) for item in self.objects)
        objects = tuple(part for part in parts if part is not None)
        presence, counts = self.presence, self.counts
        cut: set[str] = set()
        if (right - left, bottom - top) != (self.width, self.height):
            counts = {}
            # Near, far and ahead depend on the position in a driver's whole view, which a window moves or cuts.
            cut |= {"view", "lane count", "road shape"}
        if (right - left) * (bottom - top) < PRESENT_IN_CROP * self.width * self.height:
            # Absence would still be true, but if crops only ever told of absence, "cropped" would be learned as "no".
            presence = {}
            cut |= {"traffic density"}
        return replace(
            self,
            width=right - left,
            height=bottom - top,
            objects=objects,
            scene_attributes={name: value for name, value in self.scene_attributes.items() if name not in cut},
            presence=presence,
            counts=counts,
            attributed=given_to_all(self.attributed, objects),
        )

    def to_json(self) -> str:
        """All fields as one line of JSON; `from_json` restores an equal scene."""
        objects = [
            {name: value for name, value in vars(item).items() if name not in UNWRITTEN or value != UNWRITTEN[name]}
            for item in self.objects
        ]
        attributed = {category: sorted(names) for category, names in sorted(self.attributed.items())}
        changed = {"objects": objects, "exhaustive": sorted(self.exhaustive), "attributed": attributed}
        return json.dumps(vars(self) | changed, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Scene":
        """The scene that `to_json` wrote."""
        fields = json.loads(text)
        for item in fields["objects"]:
            item["box"] = tuple(item["box"])
            item["coverage"] = tuple(map(tuple, item["coverage"])) if "coverage" in item else None
        fields["objects"] = tuple(SceneObject(**item) for item in fields["objects"])
        fields["exhaustive"] = frozenset(fields["exhaustive"])
        fields["attributed"] = {category: frozenset(names) for category, names in fields["attributed"].items()}
        return cls(**fields)


# The scene of one line of JSON. A worker that draws an image again finds its scene parsed.
parse_scene = lru_cache(maxsize=PARSED)(Scene.from_json)


def scene_of(row: Mapping[str, Any]) -> Scene | None:
    """The scene of a dataset's row: JSON, or a `Scene` that was rendered just now. None for hand-written questions."""
    scene = row.get("scene") or None
    return parse_scene(scene) if isinstance(scene, str) else scene


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
    if item.coverage is not None:
        part = [side / whole for side, whole in zip(window, (scene.width, scene.height) * 2)]
        coverage = mask_patches(item.coverage, (GRID, GRID), part)
        patch_size = (window[2] - window[0]) * (window[3] - window[1]) / len(coverage) / len(coverage[0])
        area = sum(map(sum, coverage)) * patch_size
        return replace(item, box=box, area=area, coverage=coverage) if area > 0 else None
    kept = (box[2] - box[0]) * (box[3] - box[1]) / ((item.box[2] - item.box[0]) * (item.box[3] - item.box[1]))
    if kept < 1 and area is not None:
        area *= kept  # assumes that the object fills its box evenly
    item = replace(item, box=box, area=area, visible=item.visible * kept)
    if kept >= 0.9:
        return item
    # The part outside may be the lit lamp, a digit, most of the paint, or the difference between front and back.
    attributes = {name: value for name, value in item.attributes.items() if name == "status"}
    return replace(item, attributes=attributes, is_largest=False)


def mask_patches(mask: Any, grid: tuple[int, int], window: Sequence[float] = (0.0, 0.0, 1.0, 1.0)) -> Coverage:
    """Fraction [rows,columns] of each patch of a window that a mask fills.

    Args:
        grid: (rows, columns). window: (left, top, right, bottom) as fractions of the mask.
    """
    mask, (left, top, right, bottom) = np.asarray(mask), window
    rows, columns = resampling(top, bottom, grid[0], len(mask)), resampling(left, right, grid[1], len(mask[0]))
    return tuple(map(tuple, (rows @ mask @ columns.T).round(4).tolist()))


def resampling(low: float, high: float, count: int, old: int) -> np.ndarray:
    """Resampling matrix [count,old]: `old` equal bins on [0, 1] → `count` equal bins on [low, high]."""
    edges, starts = low + (high - low) * np.arange(count + 1) / count, np.arange(old) / old
    overlap = np.minimum(edges[1:, None], starts + 1 / old) - np.maximum(edges[:-1, None], starts)
    return overlap.clip(0) * count / (high - low)


def given_to_all(
    attributed: Mapping[str, frozenset[str]], objects: Sequence[SceneObject]
) -> dict[str, frozenset[str]]:
    """Reduce `attributed` {class: names} to the attributes that every object of the class has."""
    kept = {}
    for category, names in attributed.items():
        alike = [item for item in objects if is_a(item.category, category)]
        if found := frozenset(name for name in names if all(name in item.attributes for item in alike)):
            kept[category] = found
    return kept


@lru_cache(maxsize=len(CLASSES))
def classes_of(category: str) -> tuple[str, ...]:
    """A class and all that contain it: ("parked car", "car", "vehicle")."""
    superclass = CLASSES[category][2]
    return (category, *(classes_of(superclass) if superclass else ()))


def is_a(category: str, wider: str) -> bool:
    """Whether a class is `wider` or one of its subclasses."""
    return wider in classes_of(category)


def class_words(category: str) -> tuple[str, str]:
    """The singular and plural word that names a category in a question: the last word of its name."""
    singular, plural, _ = CLASSES[category]
    return singular.rsplit(" ", 1)[-1], plural.rsplit(" ", 1)[-1]

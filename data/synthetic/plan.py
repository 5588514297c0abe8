"""The plan of a scene, before anything is drawn: light, road, camera, ground and things."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .camera import Camera, Point2, Point3
from .colors import Color
from .dice import Dice
from .light import Light
from .mesh import Mesh
from .road import Road


FAR = 300.0  # meters: end of the ground ahead
# Numbers on the canvas of the classes without instances; instances are numbered from FIRST on.
SKY, TERRAIN, ROAD, SIDEWALK, BUILDING, TREE, POLE, FENCE, OTHER = range(9)
FIRST = 16
STUFF = {
    "sky": SKY,
    "road": ROAD,
    "sidewalk": SIDEWALK,
    "building": BUILDING,
    "tree": TREE,
    "pole": POLE,
    "fence": FENCE,
}
CROSSWALK, STRIPES = -1, -2  # kinds of patches; both belong to one instance


@dataclass(frozen=True)
class Lamp:
    """A light that shines into the lens.

    Attributes:
        place: x, y, z in the axes of the thing, in meters.
        color: of its glow.
        radius: of its glow in meters.
        front: 1 if it shines to the front of its thing, -1 to the back, 0 for both.
    """

    place: Point3
    color: Color
    radius: float
    front: int = 0


@dataclass(frozen=True)
class Thing:
    """One object of a scene: meshes with colors at a place.

    Attributes:
        category: the class.
        meshes: parts, each painted at its depth.
        palette: RGB of the meshes' color names.
        place: x, y, z in meters.
        heading: radians to the right of +z.
        scale: factors of x, y, z in the thing's axes.
        bright: names of colors that shine by themselves.
        attributes: annotated values, such as {"color": "red"}.
        lamps: its lights that shine into the lens.
        carried: whether the thing is painted together with the one before it in the plan.
        shadow: whether the thing casts a shadow.
        traits: classes of UNBOXED that the thing shows: a helmet, a child.
    """

    category: str
    meshes: tuple[Mesh, ...]
    palette: dict[str, Color]
    place: Point3
    heading: float
    scale: Point3 = (1.0, 1.0, 1.0)
    bright: tuple[str, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)
    lamps: tuple[Lamp, ...] = ()
    carried: bool = False
    shadow: bool = True
    traits: tuple[str, ...] = ()

    @functools.cached_property
    def matrix(self) -> np.ndarray:
        """Rotation and scale from the thing's axes to the world's, [3, 3]."""
        sine, cosine = math.sin(self.heading), math.cos(self.heading)
        return np.array([(cosine, 0.0, sine), (0.0, 1.0, 0.0), (-sine, 0.0, cosine)]) * self.scale

    def colors(self, names: Sequence[str]) -> list[tuple[int, int, int, bool]]:
        """(red, green, blue, whether it shines by itself) of each color name."""
        return [(*self.palette[name], name in self.bright) for name in names]

    def world(self, point: Point3) -> Point3:
        """World coordinates (x, y, z) of a point in the thing's axes."""
        return tuple((self.matrix @ point + self.place).tolist())


@dataclass(frozen=True)
class Patch:
    """A colored piece of ground: polygons of (x, z) in meters; `kind` is ROAD, SIDEWALK, CROSSWALK or STRIPES."""

    polygons: Sequence[list[Point2]]
    color: Color
    kind: int


@dataclass
class Plan:
    """A scene before it is drawn: `things` in any order, `patches` of ground bottom to top.

    Attributes:
        setting: "city", "suburb", "rural" or "highway".
        view: value of the scene attribute "view"; None for a close-up.
        land: color of the ground beside the road.
        skyline: outline of far hills or roofs: (x as a fraction of the width, height in image sizes).
        hood: color of the hood of the camera's vehicle, None if it is out of view.
        marked: whether the road has lane lines.
    """

    seed: int
    setting: str
    view: str | None
    light: Light
    road: Road
    camera: Camera
    dice: Dice = field(default_factory=Dice)
    things: list[Thing] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    land: Color = (0, 0, 0)
    skyline: list[Point2] = field(default_factory=list)
    skyline_color: Color = (0, 0, 0)
    hood: Color | None = None
    marked: bool = False

    def pave(self, kind: int, color: Color, *polygons: list[Point2]) -> None:
        """Add a patch of ground on top of the others."""
        self.patches.append(Patch(polygons, color, kind))


def billboard(
    plan: Plan, category: str, mesh: Mesh, palette: dict[str, Color], x: float, z: float, scale: Point3, **more: Any
) -> Thing:
    """A thing of one flat mesh at (x, z) that faces the camera; `more` are other attributes of `Thing`."""
    return Thing(category, (mesh,), palette, (x, 0.0, z), plan.camera.bearing(x, z), scale, **more)

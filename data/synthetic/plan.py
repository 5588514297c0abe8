"""The plan of a scene, before anything is drawn: light, road, camera, ground and things, and places for more."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .camera import Camera, Point2, Point3
from .dice import Color, Dice
from .light import Light
from .mesh import Mesh
from .road import Road


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
        view: value of the scene attribute "view".
        land: color of the ground beside the road.
        skyline: outline of far hills or roofs: (x as a fraction of the width, height in image sizes).
        marked: whether the road has lane lines.
        crosswalks: meters ahead of each crosswalk.
        taken: rectangles along the road that things stand on: left, right, back, front.
    """

    seed: int
    setting: str
    view: str
    light: Light
    road: Road
    camera: Camera
    dice: Dice = field(default_factory=Dice)
    things: list[Thing] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    land: Color = (0, 0, 0)
    skyline: list[Point2] = field(default_factory=list)
    marked: bool = False
    crosswalks: list[float] = field(default_factory=list)
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def pave(self, kind: int, color: Color, *polygons: list[Point2]) -> None:
        """Add a patch of ground on top of the others."""
        self.patches.append(Patch(polygons, color, kind))

    def ahead(self, nearest: float, span: float) -> float:
        """Random z in meters, near ones more often: at least `nearest`, and where the ground is in the picture."""
        return max(nearest, self.camera.nearest_ground) + span * self.dice.random() ** 2

    def beside(self, nearest: float, span: float, on_road: float) -> Point2:
        """Random x and z: on the road with probability `on_road`, else next to it."""
        dice, road, z = self.dice, self.road, self.ahead(nearest, span)
        if dice.chance(on_road):
            return dice.uniform(road.left, road.right), z
        return road.side(dice.choice((-1, 1)), dice.uniform(0.5, max(road.sidewalk, 3.0))), z

    def put(
        self,
        make: Callable[..., Thing | list[Thing]],
        spot: tuple[float, float, float, float],
        *more: Any,
        height: float = 0.8,
        margin: float = 0.0,
        nearest: float = 2.0,
    ) -> bool:
        """Add what `make(plan, x, z, *more)` returns if a spot is visible and free; return whether it was.

        Args:
            spot: x and z of its middle along the road, and half the meters that it takes in x and z.
            height: meters above the ground of the point that must be in the picture.
            margin: how far outside of the picture this point may be, in image sizes.
            nearest: least depth of this point, meters.
        """
        (x, z, half_x, half_z), (low, high) = spot, (-margin, 1 + margin)
        world = self.road.at(x, z)
        column, row, depth = self.camera.look(world[0], height, world[1])
        if depth <= nearest or not (low < column < high and low < row < high):
            return False
        x0, x1, z0, z1 = x - half_x, x + half_x, z - half_z, z + half_z
        if any(x0 < right and left < x1 and z0 < front and back < z1 for left, right, back, front in self.taken):
            return False
        self.taken.append((x0, x1, z0, z1))
        made = make(self, *world, *more)
        self.things += made if isinstance(made, list) else [made]
        return True


def billboard(
    plan: Plan, category: str, mesh: Mesh, palette: dict[str, Color], x: float, z: float, scale: Point3, **more: Any
) -> Thing:
    """A thing of one flat mesh at (x, z) that faces the camera; `more` are other attributes of `Thing`."""
    return Thing(category, (mesh,), palette, (x, 0.0, z), plan.camera.bearing(x, z), scale, **more)

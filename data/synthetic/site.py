"""The ground of a plan while things are placed on it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .camera import Point2
from .dice import load
from .ground import lay_ground
from .plan import Plan, Thing


TRIES = 10  # spots tried for each thing


class Spot(NamedTuple):
    """A place along the road where a thing would stand.

    Attributes:
        x, z: of its middle, along the road.
        half_x, half_z: half the ground that it takes, meters.
        height: meters above the ground of the point that must be in the picture.
        margin: how far outside of the picture this point may be, in image sizes.
        nearest: least depth of this point, meters.
    """

    x: float
    z: float
    half_x: float
    half_z: float
    height: float = 0.8
    margin: float = 0.0
    nearest: float = 2.0


class Site:
    """Finds places so that things do not overlap and most are visible.

    Attributes:
        plan, dice, road, camera: of the scene.
        wants: for each class, whether some are to be placed.
        crosswalks: where crosswalks are, in meters ahead.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.dice, self.road, self.camera = plan, plan.dice, plan.road, plan.camera
        dice, camera, tables = plan.dice, plan.camera, load("scenes.yaml")
        self._taken: list[tuple[float, float, float, float]] = []  # left, right, back, front
        down = camera.pitch + math.atan(0.5 / camera.focal[1])
        # Meters from which the ground comes into the picture of a high camera.
        self._nearest = camera.height * math.cos(down) / max(math.sin(down), 0.05) if camera.height > 3 else 0.0
        self._jam = dice.chance(0.2)
        self._density = dice.pick(tables["densities"])
        self.wants = {category: dice.chance(probability) for category, probability in tables["presence"].items()}
        self._crowd = dice.pick(tables["crowds"])
        self.crosswalks = lay_ground(plan)

    def number(self, category: str) -> int:
        """How many of a class to place."""
        dice = self.dice
        if not self.wants[category]:
            return 0
        count = dice.pick((1, 1, 1, 2, 2, 3, 4))
        if category == self._crowd:
            count = dice.integer(6, 11) if self._jam else dice.integer(2, 8)
        return max(1, round(count * self._density)) if self._density or dice.chance(0.15) else 0

    def ahead(self, nearest: float, span: float) -> float:
        """Random z in meters, near ones more often: at least `nearest`, and where the ground is in the picture."""
        fraction = self.dice.random()
        return max(nearest, self._nearest) + span * fraction * (0.6 if self._jam else fraction)

    def beside(self, nearest: float, span: float, on_road: float, choice: float | None = None) -> Point2:
        """Random x and z: on the road with probability `on_road`, else next to it; `choice` is a draw made before."""
        dice, road = self.dice, self.road
        choice = dice.random() if choice is None else choice
        z = self.ahead(nearest, span)
        if choice < on_road:
            return dice.uniform(road.left, road.right), z
        side = dice.pick((-1, 1))
        return road.side(side, dice.uniform(0.5, max(road.sidewalk, 3.0))), z

    def seen(self, x: float, y: float, z: float, margin: float = 0.0, nearest: float = 2.0) -> bool:
        """Whether a world point is in the picture, widened by a margin in image sizes."""
        column, row, depth = self.camera.look(x, y, z)
        return depth > nearest and -margin < column < 1 + margin and -margin < row < 1 + margin

    def free(self, x: float, z: float, half_x: float, half_z: float) -> bool:
        """Whether a rectangle along the road is free; from then on it is taken."""
        x0, x1, z0, z1 = x - half_x, x + half_x, z - half_z, z + half_z
        if any(x0 < right and left < x1 and z0 < front and back < z1 for left, right, back, front in self._taken):
            return False
        self._taken.append((x0, x1, z0, z1))
        return True

    def place(
        self, choose: Callable[[], tuple[Spot, *tuple[Any, ...]] | None], make: Callable[..., Thing | list[Thing]]
    ) -> None:
        """Place what `make(plan, x, z, ...)` returns at the first visible and free spot, if there is one.

        Args:
            choose: returns a spot with further arguments of `make`, or None.
            make: is called with world x and z of the spot, and these arguments.
        """
        for _ in range(TRIES):
            if (choice := choose()) and self.add(choice[0], make, *choice[1:]):
                return

    def add(self, spot: Spot, make: Callable[..., Thing | list[Thing]], *more: Any) -> bool:
        """Place what `make` returns if the spot is visible and free; return whether it is."""
        x, z = self.road.at(spot.x, spot.z)
        if not self.seen(x, spot.height, z, spot.margin, spot.nearest) or not self.free(*spot[:4]):
            return False
        made = make(self.plan, x, z, *more)
        self.plan.things += made if isinstance(made, list) else [made]
        return True

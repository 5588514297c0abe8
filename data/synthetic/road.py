"""The road of a scene, and the camera that looks along it or down on it."""

import math
from dataclasses import dataclass

from .camera import Camera, Point2
from .dice import Dice, load


START, FAR = -60.0, 300.0  # meters: the ground begins behind the camera
# Meters ahead where a curve is cut into straight pieces.
STATIONS = (-40, -25, -15, -9, -5, -2, 0.5, 2, 4, 6, 9, 12, 16, 21, 27, 35, 45, 60, 80, 110, 150, 210)


@dataclass(frozen=True)
class Road:
    """Cross-section and course of a road. Along it, z is meters ahead, and x meters to the right of its middle line.

    Attributes:
        lanes: (x of its middle, 1 ahead or -1 towards the camera) of each lane.
        left, right: edges of the pavement, meters.
        lane: width of a lane in meters.
        bend: curvature in 1/m, to the right.
        parking: meters on either side for parked vehicles.
        sidewalk: meters on either side, 0 without.
        junction: (z of its middle, half width) of a crossing road, or None.
    """

    lanes: tuple[tuple[float, int], ...]
    left: float
    right: float
    lane: float
    bend: float = 0.0
    parking: float = 0.0
    sidewalk: float = 0.0
    junction: Point2 | None = None

    def at(self, x: float, z: float) -> Point2:
        """World (x, z) of a place along the road, which runs straight beyond 120 m."""
        near = min(max(z, -40.0), 120.0)
        return x + self.bend * near * (z - near / 2), z

    def strip(self, left: float, right: float, start: float = START, end: float = FAR) -> list[Point2]:
        """World outline of the ground from `left` to `right` and from `start` to `end` along the road."""
        stations = [start, *(z for z in STATIONS if start < z < end), end] if self.bend else [start, end]
        return [self.at(left, z) for z in stations] + [self.at(right, z) for z in reversed(stations)]

    def side(self, side: int, offset: float) -> float:
        """x of a place `offset` meters outside of the right edge (`side` = 1) or the left one (-1)."""
        return (self.right if side > 0 else self.left) + side * offset

    def heading(self, z: float) -> float:
        """Direction of the road at z, radians to the right."""
        return math.atan(self.bend * min(max(z, -40.0), 120.0))

    def crossing(self, z: float, margin: float = 0.0) -> bool:
        """Whether z is in the junction, or nearer to it than a margin in meters."""
        return self.junction is not None and abs(z - self.junction[0]) < self.junction[1] + margin


def make_road(dice: Dice, setting: str) -> Road:
    """A random road that suits a setting."""
    lane = dice.uniform(2.9, 3.7)
    most = load("scenes.yaml")["lanes"][setting]
    ahead, back = dice.randint(1, most), dice.randint(1, most)
    if setting == "highway":
        ahead, back = max(ahead, 2), max(back, 2)
    side = 1 if dice.chance(0.6) else -1  # traffic keeps to the right or left
    lanes = [(side * (i + 0.5) * lane, 1) for i in range(ahead)]
    lanes += [(-side * (i + 0.5) * lane, -1) for i in range(back)]
    parking = dice.choice((0.0, 2.2)) if setting in ("city", "suburb") else dice.uniform(0.4, 2.0)
    shape = dice.choice(("straight", "straight", "curve", "curve", "junction", "junction", "junction"))
    if setting == "highway" and shape == "junction":
        shape = "straight"
    bend = dice.choice((-1, 1)) * dice.uniform(0.003, 0.018) if shape == "curve" else 0.0
    half = dice.uniform(3.2, 7.5)
    junction = (dice.uniform(9, 28) + half, half) if shape == "junction" else None
    sidewalk = dice.uniform(1.8, 4.0) if setting == "city" or (setting == "suburb" and dice.chance(0.8)) else 0.0
    edge = lane / 2 + parking
    left, right = min(x for x, _ in lanes) - edge, max(x for x, _ in lanes) + edge
    return Road(tuple(lanes), left, right, lane, bend, parking, sidewalk, junction)


def make_camera(dice: Dice, road: Road, view: str) -> Camera:
    """A random camera behind a windshield or above the roadside."""
    focal = dice.uniform(0.85, 1.6)
    lens = (focal * dice.choice((1.0, 1.0, 0.75, 0.62)), focal)
    if view == "driver":
        x = dice.choice([lane for lane, way in road.lanes if way > 0]) + dice.uniform(-0.5, 0.5)
        height = dice.uniform(2.1, 2.7) if dice.chance(0.2) else dice.uniform(1.15, 1.65)
        yaw = dice.uniform(-0.12, 0.12) + road.heading(18) * 0.8
        return Camera(x, height, yaw, dice.uniform(-0.06, 0.12), lens)
    height = dice.uniform(3.5, 6.0) if dice.chance(0.5) else dice.uniform(5.0, 9.5)
    x = dice.uniform(road.left - 12, road.right + 12) if dice.chance(0.7) else dice.uniform(road.left, road.right)
    target, z = road.at(dice.uniform(road.left, road.right), dice.uniform(10, 28))
    yaw = math.atan2(target - x, z) + dice.uniform(-0.08, 0.08)
    pitch = math.atan2(height, math.hypot(target - x, z)) - dice.uniform(0.0, 0.2)
    return Camera(x, height, yaw, pitch, lens)

"""Roads and cameras of the synthetic scenes, and the plan that holds a scene before it is painted."""

import math
from dataclasses import dataclass, field

from .synthetic_dice import Dice
from .synthetic_drawing import Patch, Thing
from .synthetic_mesh import Camera
from .synthetic_weather import Color, Light


# Where the ground is cut into pieces, metres ahead of the camera.
STATIONS = (-60, -40, -25, -15, -9, -5, -2, 0.5, 2, 4, 6, 9, 12, 16, 21, 27, 35, 45, 60, 80, 110, 150, 210, 300)
FAR = 300.0


@dataclass(frozen=True)
class Road:
    """A road's cross-section and course.

    Attributes:
        lanes: (x of its middle, 1 ahead or -1 towards the camera) of each lane.
        left, right: edges of what is driven on, metres.
        lane: width of a lane in metres.
        bend: curvature in 1/m, to the right.
        parking: metres on either side for parked vehicles.
        sidewalk: metres on either side, 0 without.
        junction: (z of its middle, half width) of a crossing road, or None.
    """

    lanes: tuple[tuple[float, int], ...]
    left: float
    right: float
    lane: float
    bend: float
    parking: float
    sidewalk: float
    junction: tuple[float, float] | None

    def at(self, x: float, z: float) -> tuple[float, float]:
        """World (x, z) of a place beside the middle line; beyond 120 m the road runs straight."""
        near = min(max(z, -40.0), 120.0)
        shift = self.bend * near * near / 2 + self.bend * near * (z - near)
        return x + shift, z

    def heading(self, z: float) -> float:
        """Direction of the road at z, radians to the right."""
        return math.atan(self.bend * min(max(z, -40.0), 120.0))

    def crossing(self, z: float, margin: float = 0.0) -> bool:
        """Whether z lies in the junction."""
        return self.junction is not None and abs(z - self.junction[0]) < self.junction[1] + margin


@dataclass
class Plan:
    """All of a scene before it is painted: `things` in any order, `patches` of ground in theirs."""

    seed: int
    setting: str
    view: str | None
    light: Light
    road: Road
    camera: Camera
    things: list[Thing] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    land: Color = (0, 0, 0)  # of the ground beside the road
    skyline: list[tuple[float, float]] = field(default_factory=list)  # (share of the width, height in image sizes)
    skyline_color: Color = (0, 0, 0)
    hood: Color | None = None


def make_road(dice: Dice, setting: str) -> Road:
    """A road that suits a setting."""
    lane = dice.between(2.9, 3.7)
    most = {"highway": 4, "city": 3, "suburb": 2, "rural": 1}[setting]
    ahead, back = dice.count(1, most), dice.count(1, most)
    if setting == "highway":
        ahead, back = max(ahead, 2), max(back, 2)
    elif setting == "city" and dice.chance(0.15):
        back = 0
    side = 1 if dice.chance(0.6) else -1  # traffic keeps to the right or left
    lanes = [(side * (i + 0.5) * lane, 1) for i in range(ahead)] + [
        (-side * (i + 0.5) * lane, -1) for i in range(back)
    ]
    parking = dice.pick((0.0, 2.2)) if setting in ("city", "suburb") else dice.between(0.4, 2.0)
    xs = [x for x, _ in lanes]
    shape = dice.pick(("straight", "straight", "curve", "curve", "junction", "junction", "junction"))
    if setting == "highway" and shape == "junction":
        shape = "straight"
    bend = dice.pick((-1, 1)) * dice.between(0.003, 0.018) if shape == "curve" else 0.0
    half = dice.between(3.2, 7.5)
    junction = (dice.between(9, 28) + half, half) if shape == "junction" else None
    sidewalk = dice.between(1.8, 4.0) if setting == "city" or (setting == "suburb" and dice.chance(0.8)) else 0.0
    low, high = min(xs) - lane / 2 - parking, max(xs) + lane / 2 + parking
    return Road(tuple(lanes), low, high, lane, bend, parking, sidewalk, junction)


def make_camera(dice: Dice, road: Road, view: str) -> Camera:
    """A driver's or a roadside camera."""
    squeeze = dice.pick((1.0, 1.0, 0.75, 0.62))
    focal = dice.between(0.85, 1.6)
    roll = dice.between(-0.03, 0.03) if dice.chance(0.5) else 0.0
    if view == "driver":
        own = dice.pick([x for x, way in road.lanes if way > 0])
        height = dice.between(2.1, 2.7) if dice.chance(0.2) else dice.between(1.15, 1.65)
        yaw = dice.between(-0.12, 0.12) + (road.heading(18) * 0.8 if road.bend else 0.0)
        pitch = dice.between(-0.06, 0.12)
        return Camera(own + dice.between(-0.5, 0.5), height, yaw, pitch, roll, (focal * squeeze, focal))
    height = dice.between(3.5, 6.0) if dice.chance(0.5) else dice.between(5.0, 9.5)
    x = dice.between(road.left - 12, road.right + 12) if dice.chance(0.7) else dice.between(road.left, road.right)
    z = dice.between(10, 28)
    target_x, _ = road.at(dice.between(road.left, road.right), z)
    yaw = math.atan2(target_x - x, z) + dice.between(-0.08, 0.08)
    distance = math.sqrt((target_x - x) ** 2 + z * z)
    pitch = math.atan2(height, distance) - dice.between(0.0, 0.2)
    return Camera(x, height, yaw, pitch, roll, (focal * squeeze, focal))

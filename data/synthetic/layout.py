"""Plans a scene from a seed: light, road, camera, and where things stand and move."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

from ..scene import LIGHT_STATES, SPEED_LIMITS
from . import roadside, scenery
from .camera import Point2, Point3
from .colors import draw_color
from .dice import Dice
from .figures import make_animal, make_pedestrian
from .ground import lay_ground, skyline
from .light import make_light
from .plan import Plan, Thing
from .road import make_camera, make_road
from .tables import load
from .vehicles import make_cycle, make_vehicle


# class: fraction of the scenes in which some are placed
PRESENCE = {
    "car": 0.74, "van": 0.36, "bus": 0.26, "truck": 0.38, "motorcycle": 0.42, "bicycle": 0.48, "pedestrian": 0.58,
    "traffic light": 0.5, "stop sign": 0.22, "yield sign": 0.28, "speed limit sign": 0.38, "crosswalk sign": 0.22,
    "traffic sign": 0.24, "cone": 0.5, "barrier": 0.34, "dog": 0.19, "cow": 0.24, "horse": 0.26, "deer": 0.32,
    "trailer": 0.22,
}  # fmt: skip
SIGNS = ("stop sign", "yield sign", "speed limit sign", "crosswalk sign", "traffic sign")
CROWDS = ("car", "car", "pedestrian", "van", "truck", "bus", "bicycle", "motorcycle", "cone")
LENGTH_AND_WIDTH = {
    "car": (4.8, 2.0), "van": (5.4, 2.2), "bus": (12.5, 2.8), "truck": (9.0, 2.8), "trailer": (5.5, 2.4),
}  # fmt: skip
# What hides other things, with half its width in meters.
BIG = {"car": 1.5, "van": 1.8, "bus": 3.0, "truck": 2.5, "trailer": 2.0, "building": 6.0, "tree": 1.0}
TREES = {
    "city": ("leafy", "leafy", "bare"),
    "suburb": ("leafy", "leafy", "conifer"),
    "rural": ("leafy", "conifer", "leafy"),
    "highway": ("leafy", "conifer", "palm"),
}
TRIES = 10  # places tried for each thing


def make_plan(seed: int) -> Plan:
    """The plan of a seed."""
    return Planner(seed).plan


class Planner:
    """Places things so that they do not overlap and most are visible."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = Dice(f"scene {seed}")
        setting = dice.pick(("city", "city", "city", "suburb", "suburb", "rural", "rural", "highway"))
        view = "driver" if dice.chance(0.52) else "camera"
        zoom = dice.chance(0.22)
        light = make_light(dice, view == "driver", setting != "rural")
        self.road = road = make_road(dice, setting)
        self.camera = camera = make_camera(dice, road, view)
        self.plan = plan = Plan(seed, setting, view, light, road, camera, dice)
        self.taken: list[tuple[float, float, float, float]] = []  # left, right, back, front
        down = camera.pitch + math.atan(0.5 / camera.focal[1])
        self.nearest = camera.height * math.cos(down) / max(math.sin(down), 0.05) if camera.height > 3 else 0.0
        self.jam = dice.chance(0.2)
        self.density = dice.pick((0.0, 0.6, 1.0, 1.0, 1.0, 1.4, 1.8))  # from empty to crowded
        self.wants = {category: dice.chance(probability) for category, probability in PRESENCE.items()}
        self.crowd = dice.pick(CROWDS)
        self.crosswalks = lay_ground(plan)
        self.backdrop(zoom)
        self.traffic_lights()
        self.signs()
        self.cones()
        self.barriers()
        self.vehicles()
        self.cycles()
        self.walkers()
        self.buildings()
        self.trees()
        self.street_lamps()
        self.fences()
        if zoom:
            self.aim()

    def number(self, category: str) -> int:
        """How many of a class to place."""
        dice = self.dice
        if not self.wants[category]:
            return 0
        count = dice.pick((1, 1, 1, 2, 2, 3, 4))
        if category == self.crowd:
            count = dice.integer(6, 11) if self.jam else dice.integer(2, 8)
        return max(1, round(count * self.density)) if self.density or dice.chance(0.15) else 0

    def free(self, x: float, z: float, half_x: float, half_z: float) -> bool:
        """Whether nothing is in a rectangle along the road; if so, it is taken from now on."""
        x0, x1, z0, z1 = x - half_x, x + half_x, z - half_z, z + half_z
        if any(x0 < right and left < x1 and z0 < front and back < z1 for left, right, back, front in self.taken):
            return False
        self.taken.append((x0, x1, z0, z1))
        return True

    def ahead(self, nearest: float, span: float) -> float:
        """Random meters ahead of the camera, more often near, from where the ground comes into the picture."""
        fraction = self.dice.random()
        return max(nearest, self.nearest) + span * fraction * (0.6 if self.jam else fraction)

    def seen(self, x: float, y: float, z: float, margin: float = 0.0, nearest: float = 2.0) -> bool:
        """Whether a world point is in the picture."""
        column, row, depth = self.camera.look(x, y, z)
        return depth > nearest and -margin < column < 1 + margin and -margin < row < 1 + margin

    def place(self, half_x: float, half_z: float, choose: Callable[[], tuple]) -> tuple | None:
        """World x and z, and the rest, of the first visible and free place that is chosen; None if there is none.

        Args:
            half_x, half_z: half the ground that the thing takes, meters.
            choose: gives x and z along the road, and more.
        """
        for _ in range(TRIES):
            x, z, *rest = choose()
            wx, wz = self.road.at(x, z)
            if self.seen(wx, 0.8, wz) and self.free(x, z, half_x, half_z):
                return wx, wz, *rest
        return None

    def backdrop(self, zoom: bool) -> None:
        """Far hills or roofs, and sometimes the own hood."""
        dice, plan = self.dice, self.plan
        plan.skyline = skyline(dice, plan.setting)
        plan.skyline_color = (112, 112, 116) if plan.setting == "city" else (92, 112, 88)
        if plan.light.weather == "snowy":
            plan.skyline_color = (170, 178, 186)
        if plan.view == "driver" and not zoom and dice.chance(0.16):
            plan.hood = draw_color(dice, "hood")

    # Beside the road

    def traffic_lights(self) -> None:
        """Traffic lights of one state, at the junction, a crosswalk or anywhere."""
        dice, plan, road = self.dice, self.plan, self.road
        if not self.wants["traffic light"]:
            return
        state = dice.pick(LIGHT_STATES)
        z = road.junction[0] - road.junction[1] - 1.5 if road.junction else self.ahead(7, 14)
        sides = [side for side in (1, -1) if dice.chance(0.75)] or [1]
        tall = dice.uniform(1.1, 1.75)
        sideways, over = dice.chance(0.12), dice.chance(0.55)
        for side in sides:
            x, wz = road.at(road.side(side, dice.uniform(0.4, 1.2)), z)
            height = dice.uniform(5.4, 6.4) if over else dice.uniform(3.0, 3.8)
            arm = -side * round(dice.uniform(2.0, 5.0), 1) if over else 0.0
            plan.things.append(roadside.make_pole(plan, x, wz, height, arm))
            places = []  # (offset along the arm, height)
            if not over or dice.chance(0.5):
                places.append((0.0, min(height - tall * 0.6, dice.uniform(2.7, 3.3))))
            if over:
                places.append((arm, height - tall * 0.45))
            sight = self.camera.bearing(x, wz)
            for offset, y in places:
                lx, lz = x + offset * math.cos(sight), wz - offset * math.sin(sight) - 0.25
                plan.things.append(roadside.make_traffic_light(plan, state, lx, y, lz, tall, sideways))

    def signs(self) -> None:
        """Signs on poles beside the road."""
        dice = self.dice
        for kind in SIGNS:
            if self.wants[kind]:
                for _ in range(2 if dice.chance(0.15) else 1):
                    self.sign(kind, dice.pick(SPEED_LIMITS) if kind == "speed limit sign" else "")

    def sign(self, kind: str, text: str) -> None:
        """One sign where it is visible, if there is such a place."""
        dice, plan, road = self.dice, self.plan, self.road
        shape = dice.pick(("ban", "warning", "board")) if kind == "traffic sign" else kind
        width = dice.uniform(0.9, 1.4)
        for _ in range(TRIES):
            side = 1 if dice.chance(0.7) else -1
            z = self.ahead(3.5, 15)
            x = road.side(side, dice.uniform(0.5, 2.2))
            wx, wz = road.at(x, z)
            height = dice.uniform(1.9, 2.8)
            if not road.crossing(z) and self.seen(wx, height, wz, -0.03) and self.free(x, z, 0.6, 0.5):
                plan.things.append(roadside.make_pole(plan, wx, wz, height + width * 0.4))
                plan.things.append(roadside.make_sign(plan, shape, wx, height, wz - 0.12, width, text))
                return

    def cones(self) -> None:
        """A row of cones."""
        dice, road = self.dice, self.road
        count = self.number("cone")
        x, z, step = dice.uniform(road.left, road.right), self.ahead(2.6, 5), dice.uniform(1.0, 3.0)
        drift = dice.uniform(-0.4, 0.4)
        for i in range(count):
            cx, cz = x + i * drift, z + i * step
            wx, wz = road.at(cx, cz)
            if self.seen(wx, 0.4, wz) and self.free(cx, cz, 0.3, 0.3):
                self.plan.things.append(roadside.make_cone(self.plan, wx, wz))

    def barriers(self) -> None:
        """A row of barriers, along or across the road."""
        dice, road = self.dice, self.road
        count = self.number("barrier")
        kind, across = dice.pick(("striped barrier", "block barrier")), dice.chance(0.5)
        for _ in range(6):
            x, z = dice.uniform(road.left - 1.5, road.right + 1.5), self.ahead(4.5, 14)
            if self.seen(road.at(x, z)[0], 0.5, z):
                break
        else:
            return
        for i in range(count):
            bx, bz = (x + i * 2.1, z) if across else (x, z + i * 2.1)
            heading = road.heading(bz) + (0.0 if across else math.pi / 2)
            if self.free(bx, bz, 1.1, 0.4 if across else 1.1):
                self.plan.things.append(roadside.make_barrier(self.plan, kind, *road.at(bx, bz), heading))

    # On the road

    def vehicles(self) -> None:
        """Cars, vans, buses and trucks in lanes, parked, and on the crossing road; parked trailers."""
        for category in ("bus", "truck", "van", "trailer", "car"):
            for _ in range(self.number(category)):
                for _ in range(TRIES):
                    if self.vehicle(category):
                        break

    def vehicle(self, category: str) -> bool:
        """Try one place for a vehicle."""
        dice, road = self.dice, self.road
        shape = dice.pick(list(load("shapes")[category]))
        long, wide = LENGTH_AND_WIDTH[category]
        choice = 1.0 if category == "trailer" else dice.random()
        z = self.ahead(long / 2 + (4.0 if category in ("car", "van") else 6.0), 45 if self.camera.height < 3 else 32)
        moving, half_x, half_z = True, wide / 2, long / 2
        if road.junction and choice < 0.3:  # on the crossing road
            way = dice.pick((-1, 1))
            x, z = dice.uniform(-22, 22), road.junction[0] + way * road.junction[1] / 2
            heading = -way * math.pi / 2 + dice.uniform(-0.1, 0.1)
            half_x, half_z = long / 2, wide / 2
        elif road.junction and choice < 0.36:  # turning
            x, z = dice.uniform(road.left, road.right), road.junction[0] + dice.uniform(-2, 2)
            heading = dice.uniform(0, 2 * math.pi)
            half_x = long / 2
        elif (road.parking > 2 and choice < 0.62 and category != "bus") or choice > 0.93:  # parked
            side = dice.pick((-1, 1))
            x = road.side(side, -1.1 if road.parking > 2 else wide * 0.8)
            heading, moving = road.heading(z) + dice.pick((0.0, math.pi)), False
        else:
            lane, way = dice.pick(road.lanes)
            x = lane + dice.uniform(-0.25, 0.25)
            heading = road.heading(z) + (0.0 if way > 0 else math.pi) + dice.uniform(-0.04, 0.04)
            half_z += 0.7
        wx, wz = road.at(x, z)
        if not self.seen(wx, 0.8, wz, 0.05, long / 2 + 1.6):
            return False
        if (not moving and road.crossing(z, long / 2)) or not self.free(x, z, half_x, half_z):
            return False
        self.plan.things.append(make_vehicle(self.plan, category, shape, wx, wz, heading, moving))
        return True

    def cycles(self) -> None:
        """Motorcycles and bicycles, most with riders."""
        for category in ("motorcycle", "bicycle"):
            for _ in range(self.number(category)):
                ridden = self.dice.chance(0.78)
                if place := self.place(0.6, 0.9, self.ride if ridden else self.parked_cycle):
                    self.plan.things += make_cycle(self.plan, category, ridden, *place)

    def ride(self) -> Point3:
        """x, z and heading of a rider in a lane, or across the road."""
        dice, road = self.dice, self.road
        if road.junction and dice.chance(0.3):
            z = road.junction[0] + dice.uniform(-0.5, 0.5) * road.junction[1]
            return dice.uniform(-12, 12), z, dice.pick((0.5, -0.5)) * math.pi
        z = self.ahead(3.2, 14)
        lane, way = dice.pick(road.lanes)
        heading = road.heading(z) + (0.0 if way > 0 else math.pi) + dice.uniform(-0.15, 0.15)
        if dice.chance(0.25):
            heading += dice.pick((0.5, -0.5)) * math.pi
        return lane + dice.uniform(-0.35, 0.35) * road.lane, z, heading

    def parked_cycle(self) -> Point3:
        """x, z and heading beside the road."""
        side = self.dice.pick((-1, 1))
        x = self.road.side(side, self.dice.uniform(0.4, 1.4))
        return x, self.ahead(3.2, 12), self.dice.uniform(0, 2 * math.pi)

    def walkers(self) -> None:
        """Pedestrians on sidewalks, crosswalks and the road; animals beside and on it."""
        dice, plan = self.dice, self.plan
        for _ in range(self.number("pedestrian")):
            if place := self.place(0.3, 0.3, self.walk):
                plan.things.append(make_pedestrian(plan, *place))
        for kind in load("shapes")["animal"]:
            count = self.number(kind)
            if kind != "dog" and plan.setting in ("city", "highway") and dice.chance(0.6):
                continue
            near, span, half = (2.8, 7.0, 0.5) if kind == "dog" else (4.5, 13.0, 1.1)
            for _ in range(count):
                if place := self.place(half, 0.3, functools.partial(self.beside, near, span, 0.6)):
                    plan.things.append(make_animal(plan, kind, *place))

    def walk(self) -> Point2:
        """x and z of a pedestrian."""
        dice, road = self.dice, self.road
        choice = dice.random()
        if self.crosswalks and choice < 0.4:
            return dice.uniform(road.left, road.right), dice.pick(self.crosswalks) + dice.uniform(-1.2, 1.2)
        return self.beside(2.6, 13.0, 0.2, choice)

    def beside(self, nearest: float, span: float, on_road: float, choice: float | None = None) -> Point2:
        """x and z on the road, with a probability, or beside it."""
        dice, road = self.dice, self.road
        choice = dice.random() if choice is None else choice
        z = self.ahead(nearest, span)
        if choice < on_road:
            return dice.uniform(road.left, road.right), z
        side = dice.pick((-1, 1))
        return road.side(side, dice.uniform(0.5, max(road.sidewalk, 3.0))), z

    # Behind it

    def buildings(self) -> None:
        """Rows of buildings on either side."""
        dice, plan, road = self.dice, self.plan, self.road
        density = {"city": 0.95, "suburb": 0.8, "rural": 0.12, "highway": 0.25}[plan.setting]
        city, house = plan.setting == "city", plan.setting in ("suburb", "rural")
        low = self.camera.height < 3
        for side in (-1, 1):
            if not dice.chance(0.95 if city else 0.75):
                continue
            setback = dice.uniform(0.3, 3) if city else dice.uniform(5, 14)
            z = -30.0 if self.camera.height > 3 else dice.uniform(1, 9)
            while z < 95:
                long = dice.uniform(8, 12) if house else dice.uniform(9, 24)
                deep = dice.uniform(8, 12)
                tall = dice.uniform(5.5, 8.5) if house else dice.uniform(8, 30)
                middle = z + long / 2
                gap = dice.uniform(3, 14) if house else dice.pick((0.0, 0.0, 0.4, 6.0))
                if dice.chance(density) and not road.crossing(middle, long / 2 + road.sidewalk + 1):
                    x, wz = road.at(road.side(side, road.sidewalk + setback + deep / 2 + 0.5), middle)
                    if abs(x - self.camera.x) > (deep if low else deep / 2 + 9) or z > 26:
                        size = (deep, tall, long)
                        plan.things.append(scenery.make_building(plan, house, x, wz, size, road.heading(middle)))
                z += long + gap

    def trees(self) -> None:
        """Trees along the road, and far from it in the country."""
        dice, plan, road = self.dice, self.plan, self.road
        kind = dice.pick(TREES[plan.setting])
        if plan.light.weather == "snowy" and kind != "conifer" and dice.chance(0.6):
            kind = "bare"
        for _ in range(dice.pick((1, 6, 12, 18) if plan.setting == "rural" else (0, 2, 5, 9, 14))):
            side = dice.pick((-1, 1))
            near = plan.setting in ("city", "suburb")
            offset = dice.uniform(0.9, max(1.5, road.sidewalk + 0.5)) if near else dice.uniform(3, 40)
            x, z = road.side(side, offset), dice.uniform(9, 80)
            wx, wz = road.at(x, z)
            if self.seen(wx, 3.0, wz, 0.2, 3) and not road.crossing(z, 2) and self.free(x, z, 0.5, 0.5):
                plan.things.append(scenery.make_tree(plan, kind, wx, wz, dice.uniform(4, 11)))

    def street_lamps(self) -> None:
        """A row of street lamps."""
        dice, plan, road = self.dice, self.plan, self.road
        if plan.setting == "rural" or not (dice.chance(0.6) or plan.light.time == "night"):
            return
        side, height, step = dice.pick((-1, 1)), dice.uniform(6.5, 9.5), dice.uniform(16, 28)
        for i in range(5):
            z = 6 + i * step
            if not road.crossing(z):
                x, wz = road.at(road.side(side, 0.6), z)
                plan.things.append(roadside.make_street_lamp(plan, x, wz, -side * 2.0, height))

    def fences(self) -> None:
        """A fence or wall along one side."""
        dice, plan, road = self.dice, self.plan, self.road
        if plan.setting == "city" or not dice.chance(0.45):
            return
        side, kind = dice.pick((-1, 1)), dice.pick(("wall", "rails", "pickets"))
        for i in range(12):
            z = 5.0 + i * 4
            if not road.crossing(z, road.sidewalk + 3):
                x, wz = road.at(road.side(side, road.sidewalk + 1.4), z)
                plan.things.append(roadside.make_fence(plan, kind, x, wz, road.heading(z) + math.pi / 2))

    # Close-ups

    def aim(self) -> None:
        """Turn the camera to a thing, mostly a light or sign, and zoom in on it."""
        dice, plan, camera = self.dice, self.plan, self.camera
        good = [thing for thing in plan.things if thing.category in ("traffic light", *SIGNS)]
        if not good or dice.chance(0.2):
            dull = ("pole", "fence", "tree", "building", "rider")  # a rider comes with what is ridden
            good = [thing for thing in plan.things if thing.category not in dull] or good
        good = [thing for thing in good if not self.hidden(thing)]
        if not good:
            return
        plan.view = None
        thing = dice.pick(good)
        x, y, z = thing.place
        mesh = thing.meshes[0]
        middle = y + (mesh.low[1] + mesh.high[1]) * thing.scale[1] / 2
        width = (mesh.high[0] - mesh.low[0]) * abs(thing.scale[0])
        size = max(width, (mesh.high[1] - mesh.low[1]) * thing.scale[1], 0.5)
        distance = math.hypot(x - camera.x, z)
        focal = max(min(dice.uniform(0.22, 0.7) * distance / size, 9.0), 0.9)
        yaw = camera.bearing(x, z) + dice.uniform(-0.25, 0.25) / focal
        pitch = math.atan2(camera.height - middle, distance) + dice.uniform(-0.25, 0.25) / focal
        lens = (focal * camera.focal[0] / camera.focal[1], focal)
        plan.camera = replace(camera, yaw=yaw, pitch=pitch, roll=dice.uniform(-0.05, 0.05), focal=lens)

    def hidden(self, thing: Thing) -> bool:
        """Whether a big thing is in front of another one."""
        x, _, z = thing.place
        distance, bearing = math.hypot(x - self.camera.x, z), self.camera.bearing(x, z)
        for other in self.plan.things:
            if other.category in BIG and other is not thing:
                ox, _, oz = other.place
                nearer = math.hypot(ox - self.camera.x, oz)
                if nearer < distance and abs(self.camera.bearing(ox, oz) - bearing) < BIG[other.category] / nearer:
                    return True
        return False

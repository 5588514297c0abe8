"""Plans a synthetic scene from a seed: light, road, camera, and what stands and moves where.

Along the road z counts metres ahead of the camera; x counts metres to the right of the line between the directions.
"""

import math

from . import synthetic_things as make
from .scene import LIGHT_STATES, SPEED_LIMITS
from .synthetic_dice import Dice
from .synthetic_drawing import Thing
from .synthetic_ground import lay_ground, skyline
from .synthetic_mesh import Camera, turn
from .synthetic_road import Plan, make_camera, make_road
from .synthetic_weather import make_light


# class: share of the scenes in which some are placed
PRESENCE = {
    "car": 0.74, "van": 0.36, "bus": 0.26, "truck": 0.38, "motorcycle": 0.42, "bicycle": 0.48, "pedestrian": 0.58,
    "traffic light": 0.5, "stop sign": 0.22, "yield sign": 0.28, "speed limit sign": 0.38, "crosswalk sign": 0.22,
    "traffic sign": 0.24, "cone": 0.5, "barrier": 0.34, "dog": 0.19, "cow": 0.24, "horse": 0.26, "deer": 0.32,
}  # fmt: skip
SIGNS = ("stop sign", "yield sign", "speed limit sign", "crosswalk sign", "traffic sign")
# What hides other things, with half its width in metres.
BIG = {"car": 1.5, "van": 1.8, "bus": 3.0, "truck": 2.5, "building": 6.0, "tree": 1.0}
TRIES = 10  # places tried for each thing
ANIMALS = ("dog", "cow", "horse", "deer")


class Planner:
    """Places things in a plan so that they stand apart and most can be seen."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = Dice(f"scene {seed}")
        setting = dice.pick(("city", "city", "city", "suburb", "suburb", "rural", "rural", "highway"))
        view = "driver" if dice.chance(0.52) else "camera"
        self.zoom = dice.chance(0.22)
        light = make_light(dice, view == "driver", setting != "rural")
        road = make_road(dice, setting)
        camera = make_camera(dice, road, view)
        self.plan = Plan(seed, setting, view, light, road, camera)
        self.taken: list[tuple[float, float, float, float]] = []
        self.crosswalks: list[float] = []
        fall = turn(camera.pitch + math.atan(0.5 / camera.focal[1]))
        self.first = camera.height * fall[1] / max(fall[0], 0.05) if camera.height > 3 else 0.0
        self.jam = dice.chance(0.2)
        # from empty to crowded
        self.density = dice.pick((0.0, 0.6, 1.0, 1.0, 1.0, 1.4, 1.8))
        self.wants = {label: dice.chance(share) for label, share in PRESENCE.items()}
        self.crowd = dice.pick(("car", "car", "pedestrian", "van", "truck", "bus", "bicycle", "motorcycle", "cone"))

    def number(self, label: str) -> int:
        """How many of a class to place."""
        dice = self.dice
        if not self.wants[label]:
            return 0
        count = dice.pick((1, 1, 1, 2, 2, 3, 4))
        if label == self.crowd:
            count = dice.count(6, 11) if self.jam else dice.count(2, 8)
        return max(1, round(count * self.density)) if self.density or dice.chance(0.15) else 0

    def free(self, x0: float, x1: float, z0: float, z1: float) -> bool:
        """Takes a rectangle beside the road's middle if nothing is there."""
        if any(x0 < right and left < x1 and z0 < front and back < z1 for left, right, back, front in self.taken):
            return False
        self.taken.append((x0, x1, z0, z1))
        return True

    def ahead(self, nearest: float, span: float) -> float:
        """Metres ahead of the camera, more often near, from where the ground comes into the picture."""
        share = self.dice.random()
        return max(nearest, self.first) + span * share * (0.6 if self.jam else share)

    def seen(self, x: float, y: float, z: float, margin: float = 0.0, nearest: float = 2.0) -> bool:
        """Whether a world point is in the picture."""
        u, v, depth = self.plan.camera.look(x, y, z)
        return depth > nearest and -margin < u < 1 + margin and -margin < v < 1 + margin

    def surroundings(self) -> None:
        """Ground, far hills or roofs, and sometimes the own bonnet."""
        dice, plan = self.dice, self.plan
        self.crosswalks = lay_ground(dice, plan)
        plan.skyline = skyline(dice, plan.setting)
        plan.skyline_color = (112, 112, 116) if plan.setting == "city" else (92, 112, 88)
        if plan.light.weather == "snowy":
            plan.skyline_color = (170, 178, 186)
        if plan.view == "driver" and not self.zoom and dice.chance(0.16):
            plan.hood = dice.pick(((24, 25, 28), (70, 20, 22), (44, 52, 64), (90, 92, 94)))

    # What stands by the road

    def lights(self) -> None:
        """Traffic lights that agree with each other, at the junction or a crosswalk or anywhere."""
        dice, plan, road = self.dice, self.plan, self.plan.road
        if not self.wants["traffic light"]:
            return
        state = dice.pick(LIGHT_STATES)
        z = road.junction[0] - road.junction[1] - 1.5 if road.junction else self.ahead(7, 14)
        sides = [s for s in (1, -1) if dice.chance(0.75)] or [1]
        tall = dice.between(1.1, 1.75)
        sideways = dice.chance(0.12)
        over = dice.chance(0.55)
        for side in sides:
            x, wz = road.at((road.right if side > 0 else road.left) + side * dice.between(0.4, 1.2), z)
            height = dice.between(5.4, 6.4) if over else dice.between(3.0, 3.8)
            arm = -side * dice.between(2.0, 5.0) if over else 0.0
            plan.things.append(make.pole(dice, plan.camera.x, x, wz, height, arm))
            places = [(x, min(height - tall * 0.6, dice.between(2.7, 3.3)))] if not over or dice.chance(0.5) else []
            if over:
                sight = make.toward(plan.camera.x, x, wz)
                places.append((x + round(arm, 1) * round(math.cos(sight), 9), height - tall * 0.45))
            for px, py in places:
                dx = wz - round(math.sin(make.toward(plan.camera.x, x, wz)), 9) * (px - x)
                thing = make.traffic_light(dice, plan.light, plan.camera.x, state, px, py, dx - 0.25, tall, sideways)
                plan.things.append(thing)

    def signs(self) -> None:
        """Signs on poles beside the road, boards above."""
        dice = self.dice
        for kind in SIGNS:
            if not self.wants[kind]:
                continue
            for _ in range(2 if dice.chance(0.15) else 1):
                self.sign(kind, dice.pick(SPEED_LIMITS) if kind == "speed limit sign" else "")

    def sign(self, kind: str, text: str) -> None:
        """One sign where it can be seen, if there is such a place."""
        dice, plan, road = self.dice, self.plan, self.plan.road
        shape = dice.pick(("ban", "warning", "board")) if kind == "traffic sign" else kind
        wide = dice.between(0.9, 1.4)
        for _ in range(TRIES):
            side = 1 if dice.chance(0.7) else -1
            z = self.ahead(3.5, 15)
            x = (road.right if side > 0 else road.left) + side * dice.between(0.5, 2.2)
            wx, wz = road.at(x, z)
            height = dice.between(1.9, 2.8)
            if road.crossing(z) or not self.seen(wx, height, wz, -0.03):
                continue
            if self.free(x - 0.6, x + 0.6, z - 0.5, z + 0.5):
                plan.things.append(make.pole(dice, plan.camera.x, wx, wz, height + wide * 0.4))
                plan.things.append(make.sign(dice, plan.camera.x, shape, wx, height, wz - 0.12, wide, text))
                return

    def obstacles(self) -> None:
        """Cones and barriers, in rows."""
        dice, plan, road = self.dice, self.plan, self.plan.road
        count = self.number("cone")
        x, z, step = dice.between(road.left, road.right), self.ahead(2.6, 5), dice.between(1.0, 3.0)
        drift = dice.between(-0.4, 0.4)
        for i in range(count):
            wx, wz = road.at(x + i * drift, z + i * step)
            if self.seen(wx, 0.4, wz) and self.free(
                x + i * drift - 0.3, x + i * drift + 0.3, z + i * step - 0.3, z + i * step + 0.3
            ):
                plan.things.append(make.cone(dice, plan.camera.x, wx, wz))
        count = self.number("barrier")
        kind = dice.pick(("board", "block"))
        across = dice.chance(0.5)
        for _ in range(6):
            x, z = dice.between(road.left - 1.5, road.right + 1.5), self.ahead(4.5, 14)
            if not self.seen(*road.at(x, z)[:1], 0.5, z):
                continue
            for i in range(count):
                px, pz = (x + i * 2.1, z) if across else (x, z + i * 2.1)
                wx, wz = road.at(px, pz)
                heading = road.heading(pz) + (0.0 if across else math.pi / 2)
                if self.free(
                    px - 1.1, px + 1.1, pz - 1.1 if not across else pz - 0.4, pz + 1.1 if not across else pz + 0.4
                ):
                    plan.things.append(make.barrier(dice, kind, wx, wz, heading))
            break

    # What moves

    def vehicles(self) -> None:
        """Cars, vans, buses and trucks in lanes, at the kerb and on the crossing road."""
        order = ["bus", "truck", "van", "car"]
        for label in order:
            for _ in range(self.number(label)):
                for _ in range(TRIES):
                    if self.vehicle(label):
                        break

    def vehicle(self, label: str) -> bool:
        """Tries one place for a vehicle."""
        dice, plan, road = self.dice, self.plan, self.plan.road
        shape = make.vehicle_shape(dice, label)
        long, wide = {"car": (4.8, 2.0), "van": (5.4, 2.2), "bus": (12.5, 2.8), "truck": (9.0, 2.8)}[label]
        kind = dice.random()
        nearest = long / 2 + (4.0 if label in ("car", "van") else 6.0)
        z = self.ahead(nearest, 45 if plan.camera.height < 3 else 32)
        if road.junction and kind < 0.3:
            lane = dice.pick((-1, 1))
            x, z = dice.between(-22, 22), road.junction[0] + lane * road.junction[1] / 2
            heading, moving = -lane * math.pi / 2 + dice.between(-0.1, 0.1), True
            box = (x - long / 2, x + long / 2, z - wide / 2, z + wide / 2)
        elif road.junction and kind < 0.36:
            x, z = dice.between(road.left, road.right), road.junction[0] + dice.between(-2, 2)
            heading, moving = dice.between(0, 2 * math.pi), True
            box = (x - long / 2, x + long / 2, z - long / 2, z + long / 2)
        elif (road.parking > 2 and kind < 0.62 and label != "bus") or kind > 0.93:
            side = dice.pick((-1, 1))
            x = (road.right - 1.1 if side > 0 else road.left + 1.1) if road.parking > 2 else (
                road.right + wide * 0.8 if side > 0 else road.left - wide * 0.8
            )  # fmt: skip
            heading, moving = road.heading(z) + dice.pick((0.0, math.pi)), False
            box = (x - wide / 2, x + wide / 2, z - long / 2, z + long / 2)
        else:
            lane_x, way = dice.pick(road.lanes)
            x, moving = lane_x + dice.between(-0.25, 0.25), True
            heading = road.heading(z) + (0.0 if way > 0 else math.pi) + dice.between(-0.04, 0.04)
            box = (x - wide / 2, x + wide / 2, z - long / 2 - 0.7, z + long / 2 + 0.7)
        wx, wz = road.at(x, z)
        if not self.seen(wx, 0.8, wz, 0.05, long / 2 + 1.6):
            return False
        if (not moving and road.crossing(z, long / 2)) or not self.free(*box):
            return False
        plan.things.append(make.vehicle(dice, plan.light, label, shape, wx, wz, heading, moving))
        return True

    def cycles(self) -> None:
        """Motorcycles and bicycles, most with riders."""
        dice, plan = self.dice, self.plan
        for label in ("motorcycle", "bicycle"):
            for _ in range(self.number(label)):
                ridden = dice.chance(0.78)
                for _ in range(TRIES):
                    x, z, heading = self.ride() if ridden else self.parked_cycle()
                    wx, wz = plan.road.at(x, z)
                    if self.seen(wx, 0.8, wz) and self.free(x - 0.6, x + 0.6, z - 0.9, z + 0.9):
                        cycle = make.cycle(dice, plan.light, plan.camera.x, label, wx, wz, heading, ridden)
                        plan.things.extend(cycle)
                        break

    def ride(self) -> tuple[float, float, float]:
        """x, z and heading of a rider in a lane, or across."""
        dice, road = self.dice, self.plan.road
        if road.junction and dice.chance(0.3):
            z = road.junction[0] + dice.between(-0.5, 0.5) * road.junction[1]
            return dice.between(-12, 12), z, dice.pick((0.5, -0.5)) * math.pi
        z = self.ahead(3.2, 14)
        lane_x, way = dice.pick(road.lanes)
        heading = road.heading(z) + (0.0 if way > 0 else math.pi) + dice.between(-0.15, 0.15)
        if dice.chance(0.25):
            heading += dice.pick((0.5, -0.5)) * math.pi
        return lane_x + dice.between(-0.35, 0.35) * road.lane, z, heading

    def parked_cycle(self) -> tuple[float, float, float]:
        """x, z and heading beside the road."""
        dice, road = self.dice, self.plan.road
        side = dice.pick((-1, 1))
        x = (road.right if side > 0 else road.left) + side * dice.between(0.4, 1.4)
        return x, self.ahead(3.2, 12), dice.between(0, 2 * math.pi)

    def walkers(self) -> None:
        """Pedestrians on sidewalks, crosswalks and the road; animals beside and on it."""
        dice, plan = self.dice, self.plan
        for label in ("pedestrian", *ANIMALS):
            count = self.number(label)
            if label in ANIMALS and label != "dog" and plan.setting in ("city", "highway") and dice.chance(0.6):
                count = 0
            half = {"pedestrian": 0.3, "dog": 0.5}.get(label, 1.1)
            for _ in range(count):
                for _ in range(TRIES):
                    x, z = self.walk(label)
                    wx, wz = plan.road.at(x, z)
                    if not self.seen(wx, 0.8, wz) or not self.free(x - half, x + half, z - 0.3, z + 0.3):
                        continue
                    if label == "pedestrian":
                        plan.things.append(make.pedestrian(dice, plan.light, plan.camera.x, wx, wz))
                    else:
                        plan.things.append(make.animal(dice, plan.camera.x, label, wx, wz))
                    break

    def walk(self, label: str) -> tuple[float, float]:
        """x and z of somebody on foot or an animal."""
        dice, road = self.dice, self.plan.road
        near, span = {"pedestrian": (2.6, 13), "dog": (2.8, 7)}.get(label, (4.5, 13))
        place = dice.random()
        if self.crosswalks and place < 0.4 and label == "pedestrian":
            return dice.between(road.left, road.right), dice.pick(self.crosswalks) + dice.between(-1.2, 1.2)
        z = self.ahead(near, span)
        if place < (0.6 if label in ANIMALS else 0.2):
            return dice.between(road.left, road.right), z
        side = dice.pick((-1, 1))
        return (road.right if side > 0 else road.left) + side * dice.between(0.5, max(road.sidewalk, 3.0)), z

    # What lies behind

    def buildings(self) -> None:
        """Rows of buildings on either side."""
        dice, plan, road = self.dice, self.plan, self.plan.road
        share = {"city": 0.95, "suburb": 0.8, "rural": 0.12, "highway": 0.25}[plan.setting]
        house = plan.setting in ("suburb", "rural")
        for side in (-1, 1):
            if not dice.chance(0.95 if plan.setting == "city" else 0.75):
                continue
            setback = dice.between(0.3, 3) if plan.setting == "city" else dice.between(5, 14)
            z = -30.0 if plan.camera.height > 3 else dice.between(1, 9)
            while z < 95:
                long = dice.between(8, 12) if house else dice.between(9, 24)
                deep = dice.between(8, 12)
                tall = dice.between(5.5, 8.5) if house else dice.between(8, 30)
                middle = z + long / 2
                gap = dice.between(3, 14) if house else dice.pick((0.0, 0.0, 0.4, 6.0))
                if dice.chance(share) and not road.crossing(middle, long / 2 + road.sidewalk + 1):
                    edge = road.right if side > 0 else road.left
                    x, wz = road.at(edge + side * (road.sidewalk + setback + deep / 2 + 0.5), middle)
                    size = (deep, tall, long)
                    clear = deep if plan.camera.height < 3 else deep / 2 + 9
                    if abs(x - plan.camera.x) > clear or middle - long / 2 > 26:
                        plan.things.append(make.building(dice, plan.light, house, x, wz, size, road.heading(middle)))
                z += long + gap

    def plants(self) -> None:
        """Trees along the road and far from it, fences, street lamps."""
        dice, plan, road = self.dice, self.plan, self.plan.road
        kinds = {
            "city": ("leafy", "leafy", "bare"),
            "suburb": ("leafy", "leafy", "conifer"),
            "rural": ("leafy", "conifer", "leafy"),
        }
        kind = dice.pick(kinds.get(plan.setting, ("leafy", "conifer", "palm")))
        if plan.light.weather == "snowy" and kind != "conifer" and dice.chance(0.6):
            kind = "bare"
        trees = dice.pick((0, 2, 5, 9, 14)) if plan.setting != "rural" else dice.pick((1, 6, 12, 18))
        for _ in range(trees):
            side = dice.pick((-1, 1))
            offset = (
                dice.between(0.9, max(1.5, road.sidewalk + 0.5))
                if plan.setting in ("city", "suburb")
                else dice.between(3, 40)
            )
            x, z = (road.right if side > 0 else road.left) + side * offset, dice.between(9, 80)
            wx, wz = road.at(x, z)
            if (
                self.seen(wx, 3.0, wz, 0.2, 3)
                and not road.crossing(z, 2)
                and self.free(x - 0.5, x + 0.5, z - 0.5, z + 0.5)
            ):
                plan.things.append(make.tree(dice, plan.light, plan.camera.x, kind, wx, wz, dice.between(4, 11)))
        if (plan.setting != "rural" and dice.chance(0.6)) or (plan.light.time == "night" and plan.setting != "rural"):
            side, height, step = dice.pick((-1, 1)), dice.between(6.5, 9.5), dice.between(16, 28)
            for i in range(5):
                z = 6 + i * step
                x, wz = road.at((road.right if side > 0 else road.left) + side * 0.6, z)
                if not road.crossing(z):
                    plan.things.append(
                        make.street_lamp(dice, plan.light, plan.camera.x, x, wz, -side * 2.0, round(height, 1))
                    )
        if plan.setting in ("suburb", "rural", "highway") and dice.chance(0.45):
            side, kind = dice.pick((-1, 1)), dice.pick(("wall", "rails", "pickets"))
            for i in range(12):
                z = 5.0 + i * 4
                x, wz = road.at((road.right if side > 0 else road.left) + side * (road.sidewalk + 1.4), z)
                if not road.crossing(z, road.sidewalk + 3):
                    plan.things.append(make.fence(dice, kind, x, wz, road.heading(z) + math.pi / 2))

    def hidden(self, thing: Thing) -> bool:
        """Whether something big stands before a thing."""
        x, _, z = thing.place
        eye = self.plan.camera.x
        distance, bearing = (x - eye) * (x - eye) + z * z, math.atan2(x - eye, z)
        for other in self.plan.things:
            if other.label in BIG and other is not thing:
                ox, _, oz = other.place
                nearer = (ox - eye) * (ox - eye) + oz * oz
                if nearer < distance and abs(math.atan2(ox - eye, oz) - bearing) < BIG[other.label] / math.sqrt(
                    nearer
                ):
                    return True
        return False

    def aim(self) -> None:
        """Turns the camera to a thing and zooms in on it."""
        dice, plan = self.dice, self.plan
        good = [t for t in plan.things if t.label in ("traffic light", *SIGNS)]
        if not good or dice.chance(0.2):
            dull = ("pole", "fence", "tree", "building", "rider")  # a rider comes with what is ridden
            good = [t for t in plan.things if t.label not in dull] or good
        good = [t for t in good if not self.hidden(t)]
        if not good:
            return
        plan.view = None
        thing = dice.pick(good)
        x, y, z = thing.place
        mesh = thing.meshes[0]
        low = min(0.0, -mesh.height if mesh.footprint[2] > -0.3 and y > 0 else 0.0)
        middle = y + (mesh.height + low) * thing.scale[1] / 2
        wide = max(
            (mesh.footprint[1] - mesh.footprint[0]) * abs(thing.scale[0]), (mesh.height - low) * thing.scale[1], 0.5
        )
        camera = plan.camera
        yaw = math.atan2(x - camera.x, z)
        distance = math.sqrt((x - camera.x) ** 2 + z * z)
        focal = min(dice.between(0.22, 0.7) * distance / wide, 9.0)
        focal = max(focal, 0.9)
        yaw += dice.between(-0.25, 0.25) / focal
        pitch = math.atan2(camera.height - middle, distance) + dice.between(-0.25, 0.25) / focal
        plan.camera = Camera(
            camera.x,
            camera.height,
            yaw,
            pitch,
            dice.between(-0.05, 0.05),
            (focal * camera.focal[0] / camera.focal[1], focal),
        )


def make_plan(seed: int) -> Plan:
    """The plan of a seed."""
    planner = Planner(seed)
    planner.surroundings()
    planner.lights()
    planner.signs()
    planner.obstacles()
    planner.vehicles()
    planner.cycles()
    planner.walkers()
    planner.buildings()
    planner.plants()
    if planner.zoom:
        planner.aim()
    return planner.plan

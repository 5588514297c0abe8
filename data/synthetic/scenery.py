"""Buildings and trees. There are a few variants of each, from fixed seeds, which are then scaled and colored."""

import functools
import itertools
import math
import random

from .camera import Point3
from .dice import load, scaled
from .mesh import Builder, Mesh, make_mesh
from .plan import Plan, Thing, billboard


GLASS = ("lit glass", "glass", "sky glass")


@functools.cache
def building_mesh(variant: int) -> Mesh:
    """A building of 1 × 1 × 1 m, to be scaled. Variants 0..11 are blocks, 12..17 houses with a gable along x."""
    dice, house = random.Random(f"building {variant}"), variant >= 12
    b = Builder()
    rows, columns = (1, 3) if house else (2 + variant % 6, 3 + variant % 4)
    top = 0.62 if house else 1.0
    b.box("wall", (-0.5, 0.5), (0.0, top), (-0.5, 0.5))
    if house:
        b.face("wall", [(-0.5, top, -0.5), (0.5, top, -0.5), (0.0, 1.0, -0.5)], (0, 0, -1))
        for x in (-0.56, 0.56):
            low = top - 0.03
            b.face("roof", [(x, low, -0.55), (0, 1.0, -0.55), (0, 1.0, 0.55), (x, low, 0.55)], (x, 1, 0))
    for (ax, az), (bx, bz) in itertools.pairwise(((0.5, 0.5), (0.5, -0.5), (-0.5, -0.5), (-0.5, 0.5))):
        toward = (ax + bx, 0.0, az + bz)
        quad = [(ax, top, az), (bx, top, bz), (bx, 0.0, bz), (ax, 0.0, az)]
        add_windows(b, quad, toward, rows, columns, dice)
        if house or variant % 3 == 0:
            door = dice.randrange(columns) / columns
            b.pane("edge", quad, (door + 0.1, rows / (rows + 1) + 0.02, door + 0.22, 1.0), toward)
        else:
            b.pane("shop", quad, (0.02, rows / (rows + 1) + 0.01, 0.98, 1.0), toward)
            for left in (0.05, 0.277, 0.504, 0.731):
                b.pane(dice.choice(GLASS), quad, (left, rows / (rows + 1) + 0.06, left + 0.22, 0.97), toward)
        if not house:
            b.pane("edge", quad, (0.0, 0.0, 1.0, 0.035), toward)
    return b.build()


def add_windows(b: Builder, quad: list[Point3], toward: Point3, rows: int, columns: int, dice: random.Random) -> None:
    """Add rows of windows to a wall, above a ground floor without."""
    height, width = (0.45 + 0.3 * dice.random()) / (rows + 1), (0.4 + 0.35 * dice.random()) / columns
    for row, column in itertools.product(range(rows), range(columns)):
        left, top = (column + 0.5) / columns - width / 2, (row + 0.6) / (rows + 1) - height / 2
        b.pane(dice.choice(GLASS), quad, (left, top, left + width, top + height), toward)


def make_building(plan: Plan, x: float, z: float, house: bool, size: Point3, heading: float) -> Thing:
    """A block or house of (width, height, depth) in meters."""
    dice, time = plan.dice, plan.light.time
    palette = dice.palette("building") | dice.palette("shop")
    palette["edge"] = scaled(palette["wall"], 0.75)
    palette |= dice.palette("windows by day" if time == "day" else "windows by night")
    palette |= dice.palette("snowy roof" if plan.light.weather == "snowy" else "roof")
    bright = {"day": (), "dusk": ("lit glass",), "night": ("lit glass", "shop")}[time]
    mesh = building_mesh(dice.randint(12, 17) if house else dice.randint(0, 11))
    return Thing("building", (mesh,), palette, (x, 0.0, z), heading, size, bright, shadow=False)


@functools.cache
def tree_mesh(kind: str, variant: int) -> Mesh:
    """A "leafy" or "bare" tree of 1 m; variants 0..5."""
    dice = random.Random(f"{kind} {variant}")
    b = Builder()
    b.limb("trunk", (0, 0), (0.02, 0.45), 0.06, 0.04)
    for _ in range(7):
        start, length, angle = 0.3 + 0.25 * dice.random(), 0.25 + 0.2 * dice.random(), 2 * dice.random() - 1
        sine, cosine = math.sin(angle), math.cos(angle)
        b.limb("trunk", (0.02, start), (sine * length, start + cosine * length), 0.03, 0.012)
        for way in (-0.7, 0.6) if kind == "bare" else ():
            x, y = sine * length * 0.6, start + cosine * length * 0.6
            b.limb("trunk", (x, y), (x + math.sin(way + sine) * 0.17, y + math.cos(way + sine) * 0.17), 0.016, 0.006)
    crown = (("shade", 8, 0.15, 0.0, 0.28), ("leaf", 12, 0.11, 0.02, 0.26), ("sun", 9, 0.065, 0.05, 0.22))
    for color, count, radius, shift, spread in crown if kind == "leafy" else ():
        for _ in range(count):
            angle, reach = dice.random() * 6.283, spread * (0.3 + 0.7 * dice.random())
            x, y = math.sin(angle) * reach + shift, 0.68 + math.cos(angle) * reach * 0.75 + shift
            b.disc(color, x, y, radius * (0.7 + 0.6 * dice.random()), 9)
    return b.build()


def make_tree(plan: Plan, x: float, z: float, kind: str) -> Thing:
    """A tree of a random height."""
    dice = plan.dice
    palette = dice.palette("tree")
    if plan.light.weather == "snowy":
        palette |= dice.palette("snowy conifer" if kind == "conifer" else "snowy tree")
    palette |= {"shade": scaled(palette["leaf"], 0.7), "sun": scaled(palette["leaf"], 1.25)}
    height = dice.uniform(4, 11)
    width = height * dice.uniform(0.85, 1.25)
    mesh = make_mesh("tree", kind) if kind == "conifer" else tree_mesh(kind, dice.randint(0, 5))
    return billboard(plan, "tree", mesh, palette, x, z, (dice.choice((-width, width)), height, 1.0))


def place_buildings(plan: Plan) -> None:
    """Place rows of buildings on either side, not in front of the camera."""
    dice, road, camera = plan.dice, plan.road, plan.camera
    density = load("scenes.yaml")["buildings"][plan.setting]
    city, house = plan.setting == "city", plan.setting in ("suburb", "rural")
    lengths, heights = ((8, 12), (5.5, 8.5)) if house else ((9, 24), (8, 30))
    for side in (-1, 1):
        setback = dice.uniform(0.3, 3) if city else dice.uniform(5, 14)
        z = -30.0 if camera.height > 3 else dice.uniform(1, 9)
        end = 95 if dice.chance(0.95 if city else 0.75) else z
        while z < end:
            long, tall = dice.uniform(*lengths), dice.uniform(*heights)
            deep, middle = dice.uniform(8, 12), z + long / 2
            z += long + (dice.uniform(3, 14) if house else dice.choice((0.0, 0.0, 0.4, 6.0)))
            if not dice.chance(density) or road.crossing(middle, long / 2 + road.sidewalk + 1):
                continue
            x, wz = road.at(road.side(side, road.sidewalk + setback + deep / 2 + 0.5), middle)
            if abs(x - camera.x) > (deep if camera.height < 3 else deep / 2 + 9) or middle - long / 2 > 26:
                plan.things.append(make_building(plan, x, wz, house, (deep, tall, long), road.heading(middle)))


def place_trees(plan: Plan) -> None:
    """Place trees along the road, and far from it in the country."""
    dice, road = plan.dice, plan.road
    kind = dice.choice(load("scenes.yaml")["trees"][plan.setting])
    for _ in range(dice.choice((1, 6, 12, 18) if plan.setting == "rural" else (0, 2, 5, 9, 14))):
        near = plan.setting in ("city", "suburb")
        offset = dice.uniform(0.9, max(1.5, road.sidewalk + 0.5)) if near else dice.uniform(3, 40)
        x, z = road.side(dice.choice((-1, 1)), offset), dice.uniform(9, 80)
        if not road.crossing(z, 2):
            plan.put(make_tree, (x, z, 0.5, 0.5), kind, height=3.0, margin=0.2, nearest=3.0)

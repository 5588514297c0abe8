"""Buildings and trees. There are a few variants of each, from fixed seeds, which are then scaled and colored."""

import functools
import itertools
import math
import random

from .camera import Point3
from .colors import scaled
from .dice import load
from .mesh import Builder, Mesh, inset
from .plan import Plan, Thing, billboard
from .site import Site, Spot


@functools.cache
def building_mesh(variant: int) -> Mesh:
    """A building of 1 × 1 × 1 m, to be scaled. Variants 0..11 are blocks, 12..17 houses with a gable along x."""
    dice = random.Random(f"building {variant}")
    b = Builder()
    house = variant >= 12
    rows, columns = (1, 3) if house else (2 + variant % 6, 3 + int(dice.random() * 4))
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
        _facade(b, quad, toward, rows, columns, not house and variant % 3 != 0, dice)
        if not house:
            b.face("edge", inset(quad, 0.0, 0.0, 1.0, 0.035), toward)
    return b.build()


def _facade(b: Builder, quad: list, toward: tuple, rows: int, columns: int, shop: bool, dice: random.Random) -> None:
    """Add windows to a wall, and on the ground floor a door or shop fronts."""
    bottom = rows / (rows + 1)
    height, width = (0.45 + 0.3 * dice.random()) * bottom / rows, (0.4 + 0.35 * dice.random()) / columns
    for row, column in itertools.product(range(rows), range(columns)):
        u, v = (column + 0.5) / columns - width / 2, bottom * (row + 0.6) / rows - height / 2
        b.face(dice.choice(("lit glass", "glass", "sky glass")), inset(quad, u, v, u + width, v + height), toward)
    if shop:
        count = max(columns // 2, 1)
        for i in range(count):
            u, width = i / count, 1 / count
            glass = ("lit glass", "glass", "sky glass")[i % 3]
            b.face(glass, inset(quad, u + 0.06 * width, bottom + 0.05, u + 0.94 * width, 0.97), toward)
            b.face("shop", inset(quad, u + 0.02 * width, bottom + 0.01, u + 0.98 * width, bottom + 0.07), toward)
        return
    door = dice.randrange(columns)
    for column in range(columns):
        u = (column + 0.5) / columns - width / 2
        edges = (bottom + 0.02, 1.0) if column == door else (bottom + 0.03, 0.93)
        b.face("edge" if column == door else "glass", inset(quad, u, edges[0], u + width, edges[1]), toward)


def make_building(plan: Plan, x: float, z: float, house: bool, size: Point3, heading: float) -> Thing:
    """A block or house of (width, height, depth) in meters."""
    dice, time = plan.dice, plan.light.time
    palette = dice.palette("building")
    palette["edge"] = scaled(palette["wall"], 0.75)
    palette |= dice.palette("windows by day" if time == "day" else "windows by night")
    palette |= dice.palette("snowy roof" if plan.light.weather == "snowy" else "roof")
    palette |= dice.palette("shop")
    bright = {"day": (), "dusk": ("lit glass",), "night": ("lit glass", "shop")}[time]
    mesh = building_mesh(dice.integer(12, 17) if house else dice.integer(0, 11))
    return Thing("building", (mesh,), palette, (x, 0.0, z), heading, size, bright, shadow=False)


@functools.cache
def tree_mesh(kind: str, variant: int) -> Mesh:
    """A tree of 1 m: "leafy", "conifer", "bare" or "palm"; variants 0..5."""
    dice = random.Random(f"{kind} {variant}")
    b = Builder()
    if kind == "conifer":
        b.limb("trunk", (0, 0.0), (0, 0.3), 0.05, 0.04)
        for i in range(5):
            low, width = 0.1 + i * 0.16, 0.27 - i * 0.045
            b.flat("shade" if i % 2 else "leaf", [(-width, low), (width, low), (0.0, low + 0.32)])
            b.flat("sun", [(0.0, low + 0.03), (width * 0.8, low + 0.03), (0.0, low + 0.3)])
    elif kind == "palm":
        b.limb("trunk", (0, 0), (0.05, 0.75), 0.05, 0.035)
        for i in range(9):
            sine, cosine = math.sin(i * 0.7), math.cos(i * 0.7)
            middle = (0.05 + 0.16 * sine, 0.8 + 0.1 * cosine)
            b.limb("sun" if i % 2 else "leaf", (0.05, 0.75), middle, 0.03, 0.06)
            b.limb("sun" if i % 2 else "leaf", middle, (0.05 + 0.3 * sine, middle[1] - 0.08), 0.06, 0.02)
    else:
        b.limb("trunk", (0, 0), (0.02, 0.45), 0.06, 0.04)
        _crown(b, kind, dice)
    return b.build()


def _crown(b: Builder, kind: str, dice: random.Random) -> None:
    """Add the branches and leaves of a "leafy" or "bare" tree."""
    for _ in range(7):
        start, length, angle = 0.3 + 0.25 * dice.random(), 0.25 + 0.2 * dice.random(), 2 * dice.random() - 1
        sine, cosine = math.sin(angle), math.cos(angle)
        b.limb("trunk", (0.02, start), (sine * length, start + cosine * length), 0.03, 0.012)
        for way in (-0.7, 0.6) if kind == "bare" else ():
            x, y = sine * length * 0.6, start + cosine * length * 0.6
            b.limb("trunk", (x, y), (x + math.sin(way + sine) * 0.17, y + math.cos(way + sine) * 0.17), 0.016, 0.006)
    if kind == "bare":
        return
    for color, count, radius, shift, spread in (
        ("shade", 8, 0.15, 0.0, 0.28),
        ("leaf", 12, 0.11, 0.02, 0.26),
        ("sun", 9, 0.065, 0.05, 0.22),
    ):
        for _ in range(count):
            angle, reach = dice.random() * 6.283, spread * (0.3 + 0.7 * dice.random())
            x, y = math.sin(angle) * reach + shift, 0.68 + math.cos(angle) * reach * 0.75 + shift
            b.disc(color, x, y, radius * (0.7 + 0.6 * dice.random()), 9)


def make_tree(plan: Plan, x: float, z: float, kind: str) -> Thing:
    """A tree of a random height."""
    dice = plan.dice
    height = dice.uniform(4, 11)
    palette = dice.palette("tree")
    if plan.light.weather == "snowy" and kind != "bare":
        palette |= dice.palette("snowy conifer" if kind == "conifer" else "snowy tree")
    palette |= {"shade": scaled(palette["leaf"], 0.7), "sun": scaled(palette["leaf"], 1.25)}
    width = height * dice.uniform(0.85, 1.25) * (-1.0 if dice.chance(0.5) else 1.0)
    mesh = tree_mesh(kind, dice.integer(0, 5))
    return billboard(plan, "tree", mesh, palette, x, z, (width, height, 1.0))


def place_buildings(site: Site) -> None:
    """Place rows of buildings on either side."""
    dice, plan, road = site.dice, site.plan, site.road
    density = load("scenes.yaml")["buildings"][plan.setting]
    city, house = plan.setting == "city", plan.setting in ("suburb", "rural")
    low = site.camera.height < 3
    for side in (-1, 1):
        if not dice.chance(0.95 if city else 0.75):
            continue
        setback = dice.uniform(0.3, 3) if city else dice.uniform(5, 14)
        z = -30.0 if site.camera.height > 3 else dice.uniform(1, 9)
        while z < 95:
            long = dice.uniform(8, 12) if house else dice.uniform(9, 24)
            deep = dice.uniform(8, 12)
            tall = dice.uniform(5.5, 8.5) if house else dice.uniform(8, 30)
            middle = z + long / 2
            gap = dice.uniform(3, 14) if house else dice.pick((0.0, 0.0, 0.4, 6.0))
            if dice.chance(density) and not road.crossing(middle, long / 2 + road.sidewalk + 1):
                x, wz = road.at(road.side(side, road.sidewalk + setback + deep / 2 + 0.5), middle)
                if abs(x - site.camera.x) > (deep if low else deep / 2 + 9) or z > 26:
                    plan.things.append(make_building(plan, x, wz, house, (deep, tall, long), road.heading(middle)))
            z += long + gap


def place_trees(site: Site) -> None:
    """Place trees along the road, and far from it in the country."""
    dice, plan, road = site.dice, site.plan, site.road
    kind = dice.pick(load("scenes.yaml")["trees"][plan.setting])
    if plan.light.weather == "snowy" and kind != "conifer" and dice.chance(0.6):
        kind = "bare"
    for _ in range(dice.pick((1, 6, 12, 18) if plan.setting == "rural" else (0, 2, 5, 9, 14))):
        side = dice.pick((-1, 1))
        near = plan.setting in ("city", "suburb")
        offset = dice.uniform(0.9, max(1.5, road.sidewalk + 0.5)) if near else dice.uniform(3, 40)
        x, z = road.side(side, offset), dice.uniform(9, 80)
        if not road.crossing(z, 2):
            site.add(Spot(x, z, 0.5, 0.5, height=3.0, margin=0.2, nearest=3.0), make_tree, kind)

"""Things beside the road: traffic lights, signs, poles, cones, barriers, fences, buildings, trees."""

import functools
import itertools
import math
import random
from dataclasses import replace

from .geometry import Builder, Mesh, Point2, circle, inset
from .light import Color, colors, scaled, vary
from .plan import Lamp, Plan, Thing


LENS = 0.13  # radius of each lamp of a traffic light of 1 m
STATES = ("red", "yellow", "green")
LIT: dict[str, Color] = {"red": (255, 44, 34), "yellow": (255, 206, 44), "green": (40, 240, 130)}
DARK: dict[str, Color] = {"red": (74, 22, 20), "yellow": (78, 62, 18), "green": (16, 62, 40)}
CASES = colors("1c1e20 282c2a 223028 d4a41e 404244")

TRIANGLE, ROUND = [(-0.56, -0.48), (0.56, -0.48), (0.0, 0.5)], [(0.5 * s, 0.5 * c) for s, c in circle(24)]
SQUARE_SIGN = [(-0.5, 0.5), (0.5, 0.5), (0.5, -0.5), (-0.5, -0.5)]
# outline, size of the field inside the ring, y of its center, colors of field, ring and ink
SIGNS: dict[str, tuple[list[Point2], float, float, tuple[Color, Color, Color]]] = {
    "stop sign": (
        [(0.541 * s, 0.541 * c) for s, c in circle(8)], 0.92, 0.0, ((196, 22, 32), (244, 244, 244), (246, 246, 246)),
    ),
    "yield sign": ([(x, -y) for x, y in TRIANGLE], 0.64, 0.16, ((246, 246, 244), (206, 28, 34), (20, 20, 20))),
    "warning": (TRIANGLE, 0.64, -0.16, ((246, 246, 244), (206, 28, 34), (24, 24, 26))),
    "speed limit sign": (ROUND, 0.78, 0.0, ((248, 248, 246), (210, 24, 32), (18, 18, 20))),
    "crosswalk sign": (SQUARE_SIGN, 0.93, 0.0, ((20, 84, 178), (244, 246, 248), (18, 20, 24))),
    "board": ([(2 * x, y) for x, y in SQUARE_SIGN], 0.94, 0.0, ((20, 104, 66), (240, 242, 242), (240, 242, 242))),
    "ban": (ROUND, 0.78, 0.0, ((24, 78, 170), (206, 26, 34), (206, 26, 34))),
}  # fmt: skip
BOARDS = colors("146842 1854aa 966028")
STEEL = colors("787a7c 545658 969896 3c423e")
BLOCKS = [colors(pair) for pair in ("b0aea8 e6a028", "ce2422 f0f0ee", "f0f0ec ce2422", "ec781e f0f0ec")]
FENCES = {"wall": "a8806a beb4a6", "rails": "78644e 8c765c", "pickets": "e2e0d8 d6d4ce"}
WALLS = colors("c4b8a4 aa6e58 965442 cecac2 8c8c8e b4a082 766c68 d6c496 a0aeb6 e4ded2")
ROOFS = colors("783c2c 545050 644638 464c54")
SHOPS = colors("962828 285082 286446 be9632 463c38")
WINDOWS = colors("fad682 f0e2b4 ffc46e")
TRUNKS = colors("5c4632 6e6050 463a30")
LEAVES = colors("4a702e 3c6432 607c38 325834 70803a 96782e")


@functools.cache
def traffic_light(sideways: bool, board: bool) -> Mesh:
    """A traffic light of 1 m around (0, 0) that faces -z, red at the top or the left."""
    b = Builder()
    half, tall = (0.5, 0.2) if sideways else (0.2, 0.5)
    if board:
        b.plate((-half - 0.1, half + 0.1), (-tall - 0.1, tall + 0.1), 0.0, "dark", 0)
    b.box((-half, half), (-tall, tall), (-0.02, 0.2), "case")
    for color, place in zip(STATES, (0.32, 0.0, -0.32)):
        x, y = (-place, 0.0) if sideways else (0.0, place)
        for slot, radius, lift in (("dark", 0.155, 0.015), (color, LENS, 0.0)):
            ring = [(x + radius * s, y + lift + radius * c, -0.03) for s, c in circle(14)]
            b.face(ring, slot, (0, 0, -1))
    return b.build()


def make_traffic_light(plan: Plan, state: str, x: float, y: float, z: float, height: float, sideways: bool) -> Thing:
    """A traffic light of a height in meters whose center is `y` meters up."""
    dice = plan.dice
    palette = DARK | {state: LIT[state], "case": dice.pick(CASES), "dark": (16, 17, 18)}
    place = 0.32 * (1 - STATES.index(state))
    center = (-place, 0.0, -0.03) if sideways else (0.0, place, -0.03)
    glow = Lamp(center, LIT[state], height * {"day": 0.22, "dusk": 0.35, "night": 0.55}[plan.light.time])
    mesh = traffic_light(sideways, dice.chance(0.35))
    heading = plan.camera.bearing(x, z) * 0.8 + dice.uniform(-0.15, 0.15)
    scale, attributes = (height, height, height), {"state": state}
    return Thing("traffic light", (mesh,), palette, (x, y, z), heading, scale, (state,), attributes, (glow,), True)


@functools.cache
def sign(kind: str, text: str = "") -> Mesh:
    """A sign of 1 m around (0, 0) that faces -z: of a class, or a "ban", "warning" or "board"."""
    outline, size, middle, _ = SIGNS[kind]
    b = Builder()

    def plate(points: list[Point2], color: str, toward: int = -1) -> None:
        b.face([(x, y, 0.0) for x, y in points], color, (0, 0, toward))

    def write(width: float, height: float) -> None:
        corners = [(-width, height, 0), (width, height, 0), (width, -height, 0), (-width, -height, 0)]
        b.face(corners, "ink", (0, 0, -1), text or "STOP")

    plate(outline, "back", 1)
    plate(outline, "ring")
    plate([(x * size, middle + (y - middle) * size) for x, y in outline], "field")
    if kind == "stop sign":
        write(0.42, 0.18)
    elif kind == "speed limit sign":
        write(0.34 if len(text) > 2 else 0.29, 0.2 if len(text) > 2 else 0.24)
    elif kind == "warning":
        b.limb((0, 0.0), (0, -0.2), "ink", 0.09, 0.06)
        b.disc(0, -0.3, 0.045, "ink", 8)
    elif kind == "crosswalk sign":
        plate([(-0.42, -0.4), (0.42, -0.4), (0.0, 0.43)], "ring")
        b.disc(0.02, 0.2, 0.055, "ink")
        b.limb((0.0, 0.12), (-0.02, -0.1), "ink", 0.1)
        for start, end, width in (
            ((-0.02, -0.08), (-0.14, -0.32), 0.06),
            ((-0.01, -0.08), (0.1, -0.32), 0.06),
            ((0.0, 0.1), (-0.13, -0.04), 0.045),
            ((0.0, 0.1), (0.12, -0.02), 0.045),
        ):
            b.limb(start, end, "ink", width)
    elif kind == "ban":
        b.limb((-0.28, 0.28), (0.28, -0.28), "ring", 0.1)
        if text == "parking":
            b.limb((0.28, 0.28), (-0.28, -0.28), "ring", 0.1)
    elif kind == "board":
        for y, right in ((0.22, 0.5), (-0.2, 0.2)):
            b.limb((-0.75, y), (right, y), "ink", 0.16)
        b.limb((0.75, -0.3), (0.75, 0.3), "ink", 0.08)
        b.flat([(0.6, 0.15), (0.9, 0.15), (0.75, 0.4)], "ink")
    return b.build()


def make_sign(plan: Plan, kind: str, x: float, y: float, z: float, width: float, text: str = "") -> Thing:
    """A sign of a width in meters whose center is `y` meters up."""
    dice = plan.dice
    field, ring, ink = SIGNS[kind][3]
    if kind == "board":
        field = dice.pick(BOARDS)
    if kind == "warning" and dice.chance(0.4):
        field = (246, 200, 40)
    palette = {"field": vary(dice, field, 6), "ring": ring, "ink": ink, "back": (136, 138, 140)}
    heading = plan.camera.bearing(x, z) + dice.uniform(-0.3, 0.3)
    category = kind if kind.endswith("sign") else "traffic sign"
    attributes = {"value": text} if text else {}
    second = "parking" if not text and dice.chance(0.5) else ""
    mesh = sign(kind, text or (second if kind == "ban" else ""))
    scale = (width, width, width)
    return Thing(category, (mesh,), palette, (x, y, z), heading, scale, attributes=attributes, carried=True)


@functools.cache
def pole(height: float, arm: float = 0.0, lamp: bool = False) -> Mesh:
    """A pole in meters, with an arm to +x at its top that may carry a street lamp."""
    b = Builder()
    width = 0.05 + height * 0.008
    b.flat([(-width, 0.0), (width, 0.0), (width * 0.7, height), (-width * 0.7, height)], "steel")
    if arm:
        b.flat([(0.0, height - 0.12), (arm, height + 0.02), (arm, height + 0.12), (0.0, height + 0.05)], "steel")
    if lamp:
        b.limb((arm - 0.4, height + 0.04), (arm + 0.3, height + 0.04), "lamp", 0.16)
    return b.build()


def make_pole(plan: Plan, x: float, z: float, height: float, arm: float = 0.0, lamp: bool = False) -> Thing:
    """A pole, with an arm to its right (or left, if negative) that may carry a lamp."""
    mesh = pole(round(height, 1), round(abs(arm), 1), lamp)
    palette = {"steel": plan.dice.pick(STEEL), "lamp": (220, 220, 214)}
    scale = (-1.0 if arm < 0 else 1.0, 1.0, 1.0)
    return Thing("pole", (mesh,), palette, (x, 0.0, z), plan.camera.bearing(x, z), scale)


def make_street_lamp(plan: Plan, x: float, z: float, arm: float, height: float) -> Thing:
    """A street lamp, lit at dusk and night."""
    thing = make_pole(plan, x, z, height, arm, True)
    if plan.light.time == "day":
        return thing
    color = (255, 226, 170) if plan.light.ambient[0] >= plan.light.ambient[2] else (236, 240, 255)
    lamp = Lamp((abs(arm), height - 0.1, 0.0), color, 1.6 if plan.light.time == "night" else 0.7)
    return replace(thing, palette=thing.palette | {"lamp": color}, bright=("lamp",), lamps=(lamp,))


@functools.cache
def cone() -> Mesh:
    """A traffic cone of 0.75 m."""
    b = Builder()
    b.flat([(-0.24, 0.0), (0.24, 0.0), (0.22, 0.06), (-0.22, 0.06)], "foot")
    rings = ((0.17, 0.05), (0.135, 0.25), (0.105, 0.42), (0.085, 0.52), (0.06, 0.65), (0.03, 0.76))
    colors = itertools.cycle(("orange", "white"))
    for ((low, bottom), (high, top)), color in zip(itertools.pairwise(rings), colors):
        b.flat([(-low, bottom), (low, bottom), (high, top), (-high, top)], color)
    return b.build()


def make_cone(plan: Plan, x: float, z: float) -> Thing:
    """A traffic cone."""
    grow = plan.dice.uniform(1.0, 1.5)
    orange = vary(plan.dice, (250, 92, 24), 10)
    palette = {"orange": orange, "white": (246, 246, 244), "foot": plan.dice.pick(((40, 40, 42), (236, 84, 24)))}
    return Thing("cone", (cone(),), palette, (x, 0.0, z), plan.camera.bearing(x, z), (grow, grow, 1.0))


@functools.cache
def barrier(kind: str) -> Mesh:
    """A barrier 2 m wide: a striped "board" on legs, or a "block" of concrete or plastic."""
    b = Builder()
    if kind == "block":
        for low, high, foot, top in ((0.0, 0.2, 0.3, 0.3), (0.2, 0.45, 0.3, 0.12), (0.45, 0.9, 0.12, 0.1)):
            b.prism([(-foot, low), (foot, low), (top, high), (-top, high)], [1.0] * 4, "first")
        for toward, x in itertools.product((-1, 1), (-0.75, 0.15)):
            b.plate((x, x + 0.6), (0.5, 0.72), toward * 0.12, "second", toward)
        return b.build()
    for x, lean in itertools.product((-0.8, 0.8), (-0.12, 0.12)):
        b.limb((x + lean, 0.02), (x, 1.1), "legs", 0.07)
    for low, high in ((0.72, 1.05), (0.32, 0.58)):
        b.plate((-1.0, 1.0), (low, high), 0.0, "second", 0)
        for i in range(5):
            x = -1.0 + i * 0.4
            b.flat([(x, low), (x + 0.2, low), (x + 0.36, high), (x + 0.16, high)], "first")
    return b.build()


def make_barrier(plan: Plan, kind: str, x: float, z: float, heading: float) -> Thing:
    """A barrier of one of two kinds."""
    first, second = ((206, 30, 34), (244, 244, 242)) if kind == "board" else plan.dice.pick(BLOCKS)
    palette = {"first": first, "second": second, "legs": (90, 92, 94)}
    return Thing("barrier", (barrier(kind),), palette, (x, 0.0, z), heading)


@functools.cache
def fence(kind: str) -> Mesh:
    """A fence or wall 4 m long."""
    b = Builder()
    if kind == "wall":
        b.box((-2.0, 2.0), (0.0, 1.5), (-0.1, 0.1), "post")
        b.box((-2.0, 2.0), (1.5, 1.62), (-0.16, 0.16), "rail")
        return b.build()
    for x in (-1.95, -0.65, 0.65, 1.95):
        b.limb((x, 0.0), (x, 1.15), "post", 0.1)
    for y in (0.4, 0.95):
        b.plate((-2.0, 2.0), (y, y + 0.1), 0.0, "rail", 0)
    for i in range(20 if kind == "pickets" else 0):
        b.plate((-1.9 + i * 0.2, -1.81 + i * 0.2), (0.05, 1.1), 0.0, "post", 0)
    return b.build()


def make_fence(plan: Plan, kind: str, x: float, z: float, heading: float) -> Thing:
    """A fence or wall along its own x."""
    post, rail = (vary(plan.dice, color) for color in colors(FENCES[kind]))
    return Thing("fence", (fence(kind),), {"post": post, "rail": rail}, (x, 0.0, z), heading, shadow=False)


@functools.cache
def building(variant: int) -> Mesh:
    """A building of 1 × 1 × 1 m, to be scaled. Variants 0..11 are blocks, 12..17 houses with a gable along x."""
    dice = random.Random(f"building {variant}")
    b = Builder()
    house = variant >= 12
    rows, columns = (1, 3) if house else (2 + variant % 6, 3 + int(dice.random() * 4))
    top = 0.62 if house else 1.0
    b.box((-0.5, 0.5), (0.0, top), (-0.5, 0.5), "wall")
    if house:
        b.face([(-0.5, top, -0.5), (0.5, top, -0.5), (0.0, 1.0, -0.5)], "wall", (0, 0, -1))
        for x in (-0.56, 0.56):
            low = top - 0.03
            b.face([(x, low, -0.55), (0, 1.0, -0.55), (0, 1.0, 0.55), (x, low, 0.55)], "roof", (x, 1, 0))
    for (ax, az), (bx, bz) in itertools.pairwise(((0.5, 0.5), (0.5, -0.5), (-0.5, -0.5), (-0.5, 0.5))):
        toward = (ax + bx, 0.0, az + bz)
        quad = [(ax, top, az), (bx, top, bz), (bx, 0.0, bz), (ax, 0.0, az)]
        _facade(b, quad, toward, rows, columns, not house and variant % 3 != 0, dice)
        if not house:
            b.face(inset(quad, 0.0, 0.0, 1.0, 0.035), "edge", toward)
    return b.build()


def _facade(b: Builder, quad: list, toward: tuple, rows: int, columns: int, shop: bool, dice: random.Random) -> None:
    """Windows, and at the ground a door or shop fronts, on a wall."""
    bottom = rows / (rows + 1)
    height, width = (0.45 + 0.3 * dice.random()) * bottom / rows, (0.4 + 0.35 * dice.random()) / columns
    for row, column in itertools.product(range(rows), range(columns)):
        u, v = (column + 0.5) / columns - width / 2, bottom * (row + 0.6) / rows - height / 2
        b.face(inset(quad, u, v, u + width, v + height), dice.choice(("lit glass", "glass", "sky glass")), toward)
    if shop:
        count = max(columns // 2, 1)
        for i in range(count):
            u, width = i / count, 1 / count
            glass = ("lit glass", "glass", "sky glass")[i % 3]
            b.face(inset(quad, u + 0.06 * width, bottom + 0.05, u + 0.94 * width, 0.97), glass, toward)
            b.face(inset(quad, u + 0.02 * width, bottom + 0.01, u + 0.98 * width, bottom + 0.07), "shop", toward)
        return
    door = dice.randrange(columns)
    for column in range(columns):
        u = (column + 0.5) / columns - width / 2
        edges = (bottom + 0.02, 1.0) if column == door else (bottom + 0.03, 0.93)
        b.face(inset(quad, u, edges[0], u + width, edges[1]), "edge" if column == door else "glass", toward)


def make_building(plan: Plan, house: bool, x: float, z: float, size: tuple, heading: float) -> Thing:
    """A block or house of (width, height, depth) in meters."""
    dice, time = plan.dice, plan.light.time
    wall = vary(dice, dice.pick(WALLS), 10)
    palette = {"wall": wall, "edge": scaled(wall, 0.75)}
    palette |= {"lit glass": (70, 82, 96), "glass": (52, 60, 70), "sky glass": (110, 128, 144)}
    if time != "day":
        palette |= {"lit glass": dice.pick(WINDOWS), "glass": (30, 34, 42), "sky glass": (40, 46, 58)}
    palette["roof"] = (236, 240, 244) if plan.light.weather == "snowy" else dice.pick(ROOFS)
    palette["shop"] = vary(dice, dice.pick(SHOPS))
    bright = {"day": (), "dusk": ("lit glass",), "night": ("lit glass", "shop")}[time]
    mesh = building(dice.integer(12, 17) if house else dice.integer(0, 11))
    return Thing("building", (mesh,), palette, (x, 0.0, z), heading, size, bright, shadow=False)


@functools.cache
def tree(kind: str, variant: int) -> Mesh:
    """A tree of 1 m: "leafy", "conifer", "bare" or "palm"; variants 0..5."""
    dice = random.Random(f"{kind} {variant}")
    b = Builder()
    if kind == "conifer":
        b.limb((0, 0.0), (0, 0.3), "trunk", 0.05, 0.04)
        for i in range(5):
            low, width = 0.1 + i * 0.16, 0.27 - i * 0.045
            b.flat([(-width, low), (width, low), (0.0, low + 0.32)], "shade" if i % 2 else "leaf")
            b.flat([(0.0, low + 0.03), (width * 0.8, low + 0.03), (0.0, low + 0.3)], "sun")
    elif kind == "palm":
        b.limb((0, 0), (0.05, 0.75), "trunk", 0.05, 0.035)
        for i in range(9):
            sine, cosine = math.sin(i * 0.7), math.cos(i * 0.7)
            middle = (0.05 + 0.16 * sine, 0.8 + 0.1 * cosine)
            b.limb((0.05, 0.75), middle, "sun" if i % 2 else "leaf", 0.03, 0.06)
            b.limb(middle, (0.05 + 0.3 * sine, middle[1] - 0.08), "sun" if i % 2 else "leaf", 0.06, 0.02)
    else:
        b.limb((0, 0), (0.02, 0.45), "trunk", 0.06, 0.04)
        _crown(b, kind, dice)
    return b.build()


def _crown(b: Builder, kind: str, dice: random.Random) -> None:
    """Branches and leaves of a "leafy" or "bare" tree."""
    for _ in range(7):
        start, length, angle = 0.3 + 0.25 * dice.random(), 0.25 + 0.2 * dice.random(), 2 * dice.random() - 1
        sine, cosine = math.sin(angle), math.cos(angle)
        b.limb((0.02, start), (sine * length, start + cosine * length), "trunk", 0.03, 0.012)
        for way in (-0.7, 0.6) if kind == "bare" else ():
            x, y = sine * length * 0.6, start + cosine * length * 0.6
            b.limb((x, y), (x + math.sin(way + sine) * 0.17, y + math.cos(way + sine) * 0.17), "trunk", 0.016, 0.006)
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
            b.disc(x, y, radius * (0.7 + 0.6 * dice.random()), color, 9)


def make_tree(plan: Plan, kind: str, x: float, z: float, height: float) -> Thing:
    """A tree of a height in meters."""
    dice = plan.dice
    trunk = dice.pick(TRUNKS)
    leaf = vary(dice, dice.pick(LEAVES), 10)
    if plan.light.weather == "snowy" and kind != "bare":
        leaf = vary(dice, (150, 164, 160) if kind == "conifer" else (190, 198, 202), 10)
    palette = {"trunk": trunk, "shade": scaled(leaf, 0.7), "leaf": leaf, "sun": scaled(leaf, 1.25)}
    width = height * dice.uniform(0.85, 1.25) * (-1.0 if dice.chance(0.5) else 1.0)
    mesh = tree(kind, dice.integer(0, 5))
    return Thing("tree", (mesh,), palette, (x, 0.0, z), plan.camera.bearing(x, z), (width, height, 1.0))

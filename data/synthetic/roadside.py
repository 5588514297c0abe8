"""Things beside the road: traffic lights, signs, poles, cones, barriers, fences, buildings, trees."""

import functools
from dataclasses import replace

from .light import Color, colors, vary
from .mesh import Builder, Mesh
from .plan import Lamp, Plan, Thing
from .shapes import make_mesh


LENS = 0.13  # radius of each lamp of a traffic light of 1 m
STATES = ("red", "yellow", "green")
LIT: dict[str, Color] = {"red": (255, 44, 34), "yellow": (255, 206, 44), "green": (40, 240, 130)}
DARK: dict[str, Color] = {"red": (74, 22, 20), "yellow": (78, 62, 18), "green": (16, 62, 40)}
CASES = colors("1c1e20 282c2a 223028 d4a41e 404244")

# colors of field, ring and ink
SIGNS: dict[str, tuple[Color, Color, Color]] = {
    "stop sign": ((196, 22, 32), (244, 244, 244), (246, 246, 246)),
    "yield sign": ((246, 246, 244), (206, 28, 34), (20, 20, 20)),
    "warning": ((246, 246, 244), (206, 28, 34), (24, 24, 26)),
    "speed limit sign": ((248, 248, 246), (210, 24, 32), (18, 18, 20)),
    "crosswalk sign": ((20, 84, 178), (244, 246, 248), (18, 20, 24)),
    "board": ((20, 104, 66), (240, 242, 242), (240, 242, 242)),
    "ban": ((24, 78, 170), (206, 26, 34), (206, 26, 34)),
}
BOARDS = colors("146842 1854aa 966028")
STEEL = colors("787a7c 545658 969896 3c423e")
BLOCKS = [colors(pair) for pair in ("b0aea8 e6a028", "ce2422 f0f0ee", "f0f0ec ce2422", "ec781e f0f0ec")]
FENCES = {"wall": "a8806a beb4a6", "rails": "78644e 8c765c", "pickets": "e2e0d8 d6d4ce"}


def make_traffic_light(plan: Plan, state: str, x: float, y: float, z: float, height: float, sideways: bool) -> Thing:
    """A traffic light of a height in meters whose center is `y` meters up."""
    dice = plan.dice
    palette = DARK | {state: LIT[state], "case": dice.pick(CASES), "dark": (16, 17, 18)}
    place = 0.32 * (1 - STATES.index(state))
    center = (-place, 0.0, -0.03) if sideways else (0.0, place, -0.03)
    glow = Lamp(center, LIT[state], height * {"day": 0.22, "dusk": 0.35, "night": 0.55}[plan.light.time])
    mesh = make_mesh("traffic light", "sideways" if sideways else "upright", *("board",) * dice.chance(0.35))
    heading = plan.camera.bearing(x, z) * 0.8 + dice.uniform(-0.15, 0.15)
    scale, attributes = (height, height, height), {"state": state}
    return Thing("traffic light", (mesh,), palette, (x, y, z), heading, scale, (state,), attributes, (glow,), True)


def make_sign(plan: Plan, kind: str, x: float, y: float, z: float, width: float, text: str = "") -> Thing:
    """A sign of a width in meters whose center is `y` meters up."""
    dice = plan.dice
    field, ring, ink = SIGNS[kind]
    if kind == "board":
        field = dice.pick(BOARDS)
    if kind == "warning" and dice.chance(0.4):
        field = (246, 200, 40)
    palette = {"field": vary(dice, field, 6), "ring": ring, "ink": ink, "back": (136, 138, 140)}
    heading = plan.camera.bearing(x, z) + dice.uniform(-0.3, 0.3)
    category = kind if kind.endswith("sign") else "traffic sign"
    attributes = {"value": text} if text else {}
    tags = ("parking",) * (not text and dice.chance(0.5)) + ("three digits",) * (len(text) > 2)
    mesh = make_mesh("sign", kind, *tags, text=text)
    scale = (width, width, width)
    return Thing(category, (mesh,), palette, (x, y, z), heading, scale, attributes=attributes, carried=True)


@functools.cache
def pole(height: float, arm: float = 0.0, lamp: bool = False) -> Mesh:
    """A pole in meters, with an arm to +x at its top that may carry a street lamp."""
    b = Builder()
    width = 0.05 + height * 0.008
    b.flat("steel", [(-width, 0.0), (width, 0.0), (width * 0.7, height), (-width * 0.7, height)])
    if arm:
        b.flat("steel", [(0.0, height - 0.12), (arm, height + 0.02), (arm, height + 0.12), (0.0, height + 0.05)])
    if lamp:
        b.limb("lamp", (arm - 0.4, height + 0.04), (arm + 0.3, height + 0.04), 0.16)
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


def make_cone(plan: Plan, x: float, z: float) -> Thing:
    """A traffic cone."""
    grow = plan.dice.uniform(1.0, 1.5)
    orange = vary(plan.dice, (250, 92, 24), 10)
    palette = {"orange": orange, "white": (246, 246, 244), "foot": plan.dice.pick(((40, 40, 42), (236, 84, 24)))}
    mesh, sight = make_mesh("cone", "cone"), plan.camera.bearing(x, z)
    return Thing("cone", (mesh,), palette, (x, 0.0, z), sight, (grow, grow, 1.0))


def make_barrier(plan: Plan, kind: str, x: float, z: float, heading: float) -> Thing:
    """A barrier of one of two kinds."""
    first, second = ((206, 30, 34), (244, 244, 242)) if kind == "board" else plan.dice.pick(BLOCKS)
    palette = {"first": first, "second": second, "legs": (90, 92, 94)}
    return Thing("barrier", (make_mesh("barrier", kind),), palette, (x, 0.0, z), heading)


def make_fence(plan: Plan, kind: str, x: float, z: float, heading: float) -> Thing:
    """A fence or wall along its own x."""
    post, rail = (vary(plan.dice, color) for color in colors(FENCES[kind]))
    palette = {"post": post, "rail": rail}
    return Thing("fence", (make_mesh("fence", kind),), palette, (x, 0.0, z), heading, shadow=False)

"""Things beside the road: traffic lights, signs, poles, cones, barriers and fences."""

import functools
from dataclasses import replace

from ..scene import LIGHT_STATES
from .colors import draw_palette
from .mesh import Builder, Mesh
from .plan import Lamp, Plan, Thing, billboard
from .shapes import make_mesh


LENS = 0.13  # radius of each lamp of a traffic light of 1 m, in meters, and the distance of one lamp from the next
LENS_STEP = 0.32
GLOW = {"day": 0.22, "dusk": 0.35, "night": 0.55}  # radius of the glow of such a lamp


def make_traffic_light(plan: Plan, state: str, x: float, y: float, z: float, height: float, sideways: bool) -> Thing:
    """A traffic light of a height in meters whose center is `y` meters up."""
    dice, lit = plan.dice, draw_palette(plan.dice, "lit lamps")
    palette = draw_palette(dice, "traffic light") | {state: lit[state]}
    place = LENS_STEP * (1 - LIGHT_STATES.index(state))
    center = (-place, 0.0, -0.03) if sideways else (0.0, place, -0.03)
    glow = Lamp(center, lit[state], height * GLOW[plan.light.time])
    mesh = make_mesh("traffic light", "sideways" if sideways else "upright", *("board",) * dice.chance(0.35))
    heading = plan.camera.bearing(x, z) * 0.8 + dice.uniform(-0.15, 0.15)
    scale, attributes = (height, height, height), {"state": state}
    return Thing("traffic light", (mesh,), palette, (x, y, z), heading, scale, (state,), attributes, (glow,), True)


def make_sign(plan: Plan, kind: str, x: float, y: float, z: float, width: float, text: str = "") -> Thing:
    """A sign of a width in meters whose center is `y` meters up."""
    dice = plan.dice
    palette = draw_palette(dice, "yellow warning" if kind == "warning" and dice.chance(0.4) else kind)
    heading = plan.camera.bearing(x, z) + dice.uniform(-0.3, 0.3)
    category = kind if kind.endswith("sign") else "traffic sign"
    attributes = {"value": text} if text else {}
    tags = ("parking",) * (not text and dice.chance(0.5)) + ("three digits",) * (len(text) > 2)
    mesh, scale = make_mesh("sign", kind, *tags, text=text), (width, width, width)
    return Thing(category, (mesh,), palette, (x, y, z), heading, scale, attributes=attributes, carried=True)


@functools.cache
def pole_mesh(height: float, arm: float, lamp: bool) -> Mesh:
    """A pole in meters, with an arm to +x at its top that may carry a street lamp."""
    builder, width = Builder(), 0.05 + height * 0.008
    builder.flat("steel", [(-width, 0.0), (width, 0.0), (width * 0.7, height), (-width * 0.7, height)])
    if arm:
        top = [(0.0, height - 0.12), (arm, height + 0.02), (arm, height + 0.12), (0.0, height + 0.05)]
        builder.flat("steel", top)
    if lamp:
        builder.limb("lamp", (arm - 0.4, height + 0.04), (arm + 0.3, height + 0.04), 0.16)
    return builder.build()


def make_pole(plan: Plan, x: float, z: float, height: float, arm: float = 0.0, lamp: bool = False) -> Thing:
    """A pole, with an arm to its right (or left, if negative) that may carry a lamp."""
    mesh = pole_mesh(round(height, 1), round(abs(arm), 1), lamp)
    palette = draw_palette(plan.dice, "pole")
    return billboard(plan, "pole", mesh, palette, x, z, (-1.0 if arm < 0 else 1.0, 1.0, 1.0))


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
    palette = draw_palette(plan.dice, "cone")
    return billboard(plan, "cone", make_mesh("cone", "cone"), palette, x, z, (grow, grow, 1.0))


def make_barrier(plan: Plan, kind: str, x: float, z: float, heading: float) -> Thing:
    """A barrier across its own z: a "striped barrier" or a "block barrier"."""
    palette = draw_palette(plan.dice, kind)
    return Thing("barrier", (make_mesh("barrier", kind),), palette, (x, 0.0, z), heading)


def make_fence(plan: Plan, kind: str, x: float, z: float, heading: float) -> Thing:
    """A fence along its own x: a "wall", "rails" or "pickets"."""
    palette = draw_palette(plan.dice, kind)
    return Thing("fence", (make_mesh("fence", kind),), palette, (x, 0.0, z), heading, shadow=False)

"""Things along the road: traffic lights, signs, poles, cones, barriers and fences."""

import functools
import math
from dataclasses import replace

from ..scene import LIGHT_STATES, SPEED_LIMITS
from .dice import load
from .mesh import Builder, Mesh
from .plan import Lamp, Plan, Thing, billboard
from .shapes import make_mesh
from .site import Site, Spot


SIGNS = ("stop sign", "yield sign", "speed limit sign", "crosswalk sign", "traffic sign")
LENS, LENS_STEP = 0.13, 0.32  # meters: radius of the lamps of a traffic light of 1 m, and from one lamp to the next
GLOW = {"day": 0.22, "dusk": 0.35, "night": 0.55}  # radius of the glow of such a lamp


def make_traffic_light(plan: Plan, state: str, x: float, y: float, z: float, height: float, sideways: bool) -> Thing:
    """A traffic light of a height in meters whose center is `y` meters up."""
    dice, lit = plan.dice, plan.dice.palette("lit lamps")
    palette = dice.palette("traffic light") | {state: lit[state]}
    place = LENS_STEP * (1 - LIGHT_STATES.index(state))
    center = (-place, 0.0, -0.03) if sideways else (0.0, place, -0.03)
    glow = Lamp(center, lit[state], height * GLOW[plan.light.time])
    mesh = make_mesh("traffic light", "sideways" if sideways else "upright", *("board",) * dice.chance(0.35))
    heading = plan.camera.bearing(x, z) * 0.8 + dice.uniform(-0.15, 0.15)
    scale, attributes = (height, height, height), {"state": state}
    return Thing(
        "traffic light", (mesh,), palette, (x, y, z), heading, scale, (state,), attributes, (glow,), carried=True
    )


def make_sign(plan: Plan, kind: str, x: float, y: float, z: float, width: float, text: str = "") -> Thing:
    """A sign of a width in meters whose center is `y` meters up."""
    dice = plan.dice
    palette = dice.palette("yellow warning" if kind == "warning" and dice.chance(0.4) else kind)
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
    palette = plan.dice.palette("pole")
    return billboard(plan, "pole", mesh, palette, x, z, (-1.0 if arm < 0 else 1.0, 1.0, 1.0))


def make_signpost(plan: Plan, x: float, z: float, height: float, shape: str, width: float, text: str) -> list[Thing]:
    """A pole, and a sign on it whose center is `height` meters up."""
    return [make_pole(plan, x, z, height + width * 0.4), make_sign(plan, shape, x, height, z - 0.12, width, text)]


def make_cone(plan: Plan, x: float, z: float) -> Thing:
    """A cone."""
    grow = plan.dice.uniform(1.0, 1.5)
    return billboard(plan, "cone", make_mesh("cone", "cone"), plan.dice.palette("cone"), x, z, (grow, grow, 1.0))


def place_traffic_lights(site: Site) -> None:
    """Place traffic lights of one state, at the junction, a crosswalk or anywhere."""
    dice, plan, road = site.dice, site.plan, site.road
    if not site.wants["traffic light"]:
        return
    state = dice.pick(LIGHT_STATES)
    z = road.junction[0] - road.junction[1] - 1.5 if road.junction else site.ahead(7, 14)
    sides = [side for side in (1, -1) if dice.chance(0.75)] or [1]
    tall = dice.uniform(1.1, 1.75)
    sideways, over = dice.chance(0.12), dice.chance(0.55)
    for side in sides:
        x, wz = road.at(road.side(side, dice.uniform(0.4, 1.2)), z)
        height = dice.uniform(5.4, 6.4) if over else dice.uniform(3.0, 3.8)
        arm = -side * round(dice.uniform(2.0, 5.0), 1) if over else 0.0
        plan.things.append(make_pole(plan, x, wz, height, arm))
        places = []  # (offset along the arm, height)
        if not over or dice.chance(0.5):
            places.append((0.0, min(height - tall * 0.6, dice.uniform(2.7, 3.3))))
        if over:
            places.append((arm, height - tall * 0.45))
        sight = site.camera.bearing(x, wz)
        for offset, y in places:
            lx, lz = x + offset * math.cos(sight), wz - offset * math.sin(sight) - 0.25
            plan.things.append(make_traffic_light(plan, state, lx, y, lz, tall, sideways))


def place_signs(site: Site) -> None:
    """Place signs on poles beside the road."""
    dice = site.dice
    for kind in SIGNS:
        for _ in range((2 if dice.chance(0.15) else 1) if site.wants[kind] else 0):
            text = dice.pick(SPEED_LIMITS) if kind == "speed limit sign" else ""
            shape = dice.pick(("ban", "warning", "board")) if kind == "traffic sign" else kind
            site.place(functools.partial(_stand, site, shape, dice.uniform(0.9, 1.4), text), make_signpost)


def _stand(site: Site, shape: str, width: float, text: str) -> tuple[Spot, float, str, float, str] | None:
    """A spot for a sign, with its height, shape, width and text; None on a junction."""
    dice = site.dice
    side = 1 if dice.chance(0.7) else -1
    z = site.ahead(3.5, 15)
    x = site.road.side(side, dice.uniform(0.5, 2.2))
    height = dice.uniform(1.9, 2.8)
    return None if site.road.crossing(z) else (Spot(x, z, 0.6, 0.5, height, -0.03), height, shape, width, text)


def place_cones(site: Site) -> None:
    """Place a row of cones."""
    dice, road = site.dice, site.road
    count = site.number("cone")
    x, z, step = dice.uniform(road.left, road.right), site.ahead(2.6, 5), dice.uniform(1.0, 3.0)
    drift = dice.uniform(-0.4, 0.4)
    for i in range(count):
        site.add(Spot(x + i * drift, z + i * step, 0.3, 0.3, height=0.4), make_cone)


def place_barriers(site: Site) -> None:
    """Place a row of barriers, along or across the road."""
    dice, road = site.dice, site.road
    count = site.number("barrier")
    kind, across = dice.pick(("striped barrier", "block barrier")), dice.chance(0.5)
    for _ in range(6):
        x, z = dice.uniform(road.left - 1.5, road.right + 1.5), site.ahead(4.5, 14)
        if site.seen(road.at(x, z)[0], 0.5, z):
            break
    else:
        return
    for i in range(count):
        bx, bz = (x + i * 2.1, z) if across else (x, z + i * 2.1)
        heading = road.heading(bz) + (0.0 if across else math.pi / 2)
        if site.free(bx, bz, 1.1, 0.4 if across else 1.1):
            wx, wz = road.at(bx, bz)
            mesh, palette = make_mesh("barrier", kind), dice.palette(kind)
            site.plan.things.append(Thing("barrier", (mesh,), palette, (wx, 0.0, wz), heading))


def place_street_lamps(site: Site) -> None:
    """Place a row of street lamps, lit at dusk and night."""
    dice, plan, road, light = site.dice, site.plan, site.road, site.plan.light
    if plan.setting == "rural" or not (dice.chance(0.6) or light.time == "night"):
        return
    side, height, step = dice.pick((-1, 1)), dice.uniform(6.5, 9.5), dice.uniform(16, 28)
    warm = light.ambient[0] >= light.ambient[2]
    color = (255, 226, 170) if warm else (236, 240, 255)
    lamp = Lamp((2.0, height - 0.1, 0.0), color, 1.6 if light.time == "night" else 0.7)
    for z in (6 + i * step for i in range(5)):
        if not road.crossing(z):
            pole = make_pole(plan, *road.at(road.side(side, 0.6), z), height, -side * 2.0, lamp=True)
            if light.time != "day":
                pole = replace(pole, palette=pole.palette | {"lamp": color}, bright=("lamp",), lamps=(lamp,))
            plan.things.append(pole)


def place_fences(site: Site) -> None:
    """Place a fence or wall along one side."""
    dice, plan, road = site.dice, site.plan, site.road
    if plan.setting == "city" or not dice.chance(0.45):
        return
    side, kind = dice.pick((-1, 1)), dice.pick(list(load("shapes")["fence"]))
    for z in (5.0 + i * 4 for i in range(12)):
        if not road.crossing(z, road.sidewalk + 3):
            x, wz = road.at(road.side(side, road.sidewalk + 1.4), z)
            mesh, palette, heading = make_mesh("fence", kind), dice.palette(kind), road.heading(z) + math.pi / 2
            plan.things.append(Thing("fence", (mesh,), palette, (x, 0.0, wz), heading, shadow=False))

"""Things along the road: traffic lights, signs, poles, cones, barriers and fences."""

import math

from ..scene import LIGHT_STATES, SPEED_LIMITS
from .camera import Point2
from .dice import load
from .mesh import make_mesh
from .plan import Lamp, Plan, Thing, billboard


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
    looks = (height, height, height), (state,), {"state": state}, (glow,)
    return Thing("traffic light", (mesh,), palette, (x, y, z), heading, *looks, carried=True)


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


def make_pole(plan: Plan, x: float, z: float, shape: str, scale: Point2, lamp: Lamp | None = None) -> Thing:
    """A pole of a shape, scaled in width (negative mirrors it) and height; `lamp` is lit."""
    palette, looks = plan.dice.palette("pole"), {}
    if lamp:
        palette["lamp"], looks = lamp.color, {"bright": ("lamp",), "lamps": (lamp,)}
    return billboard(plan, "pole", make_mesh("pole", shape), palette, x, z, (*scale, 1.0), **looks)


def make_signpost(plan: Plan, x: float, z: float, kind: str, height: float) -> list[Thing]:
    """A pole, and a sign on it whose center is `height` meters up."""
    width = plan.dice.uniform(1.0, 1.5)
    text = plan.dice.choice(SPEED_LIMITS) if kind == "speed limit sign" else ""
    pole = make_pole(plan, x, z, "post", (1.0, height + width * 0.4))
    return [pole, make_sign(plan, kind, x, height, z - 0.12, width, text)]


def make_cone(plan: Plan, x: float, z: float) -> Thing:
    """A cone."""
    grow = plan.dice.uniform(1.0, 1.5)
    return billboard(plan, "cone", make_mesh("cone", "cone"), plan.dice.palette("cone"), x, z, (grow, grow, 1.0))


def make_row_part(plan: Plan, x: float, z: float, category: str, kind: str, heading: float) -> Thing:
    """A barrier or a part of a fence."""
    palette, shadow = plan.dice.palette(kind), category != "fence"
    return Thing(category, (make_mesh(category, kind),), palette, (x, 0.0, z), heading, shadow=shadow)


def place_traffic_lights(plan: Plan, count: int) -> None:
    """Place traffic lights of one state at the junction or anywhere, on one side of the road or both; none if 0."""
    dice, road = plan.dice, plan.road
    if not count:
        return
    state = dice.choice(LIGHT_STATES)
    z = road.junction[0] - road.junction[1] - 1.5 if road.junction else plan.ahead(5, 13)
    tall, sideways, over = dice.uniform(1.1, 1.75), dice.chance(0.12), dice.chance(0.55)
    for side in dice.choice(((1,), (-1,), (1, -1), (1, -1))):
        x, wz = road.at(road.side(side, dice.uniform(0.4, 1.2)), z)
        height = dice.uniform(5.4, 6.4) if over else dice.uniform(3.0, 3.8)
        arm = -side * dice.uniform(2.0, 5.0)
        pole = ("arm", (arm / 3.5, height / 6)) if over else ("post", (1.0, height))
        plan.things.append(make_pole(plan, x, wz, *pole))
        offset, y = (arm, height - tall * 0.45) if over else (0.0, min(height - tall * 0.6, dice.uniform(2.7, 3.3)))
        sight = plan.camera.bearing(x, wz)
        lx, lz = x + offset * math.cos(sight), wz - offset * math.sin(sight) - 0.25
        plan.things.append(make_traffic_light(plan, state, lx, y, lz, tall, sideways))


def place_sign(plan: Plan, category: str) -> bool:
    """Try to place a sign on a pole beside the road."""
    dice, z = plan.dice, plan.ahead(3.0, 11)
    if plan.road.crossing(z):
        return False
    kind = dice.choice(("ban", "warning", "board")) if category == "traffic sign" else category
    x, height = plan.road.side(1 if dice.chance(0.7) else -1, dice.uniform(0.5, 2.2)), dice.uniform(1.9, 2.8)
    return plan.put(make_signpost, (x, z, 0.6, 0.5), kind, height, height=height, margin=-0.03)


def place_cones(plan: Plan, count: int) -> None:
    """Place a row of cones."""
    dice, road = plan.dice, plan.road
    x, z = dice.uniform(road.left, road.right), plan.ahead(2.6, 5)
    drift, step = dice.uniform(-0.4, 0.4), dice.uniform(1.0, 3.0)
    for i in range(count):
        plan.put(make_cone, (x + i * drift, z + i * step, 0.3, 0.3), height=0.4)


def place_barriers(plan: Plan, count: int) -> None:
    """Place a row of barriers, along or across the road."""
    dice, road = plan.dice, plan.road
    kind, across = dice.choice(("striped barrier", "block barrier")), dice.chance(0.5)
    x, z = dice.uniform(road.left - 1.5, road.right + 1.5), plan.ahead(4.5, 14)
    for i in range(count):
        spot = (x + i * 2.1, z, 1.1, 0.4) if across else (x, z + i * 2.1, 1.1, 1.1)
        heading = road.heading(spot[1]) + (0.0 if across else math.pi / 2)
        plan.put(make_row_part, spot, "barrier", kind, heading)


def place_street_lamps(plan: Plan) -> None:
    """Place a row of street lamps, lit at dusk and night."""
    dice, road, light = plan.dice, plan.road, plan.light
    if plan.setting == "rural" or not (dice.chance(0.6) or light.time == "night"):
        return
    side, height, step = dice.choice((-1, 1)), dice.uniform(6.5, 9.5), dice.uniform(16, 28)
    glow = Lamp((2.0, 7.9, 0.0), (255, 226, 170), 1.6 if light.time == "night" else 0.7)
    lamp = None if light.time == "day" else glow
    for z in (6 + i * step for i in range(5)):
        if not road.crossing(z):
            x, wz = road.at(road.side(side, 0.6), z)
            plan.things.append(make_pole(plan, x, wz, "street lamp", (-side, height / 8), lamp))


def place_fences(plan: Plan) -> None:
    """Place a fence or wall along one side."""
    dice, road = plan.dice, plan.road
    if plan.setting == "city" or not dice.chance(0.45):
        return
    side, kind = dice.choice((-1, 1)), dice.choice(list(load("shapes")["fence"]))
    for z in (5.0 + i * 4 for i in range(12)):
        if not road.crossing(z, road.sidewalk + 3):
            x, wz = road.at(road.side(side, road.sidewalk + 1.4), z)
            plan.things.append(make_row_part(plan, x, wz, "fence", kind, road.heading(z) + math.pi / 2))

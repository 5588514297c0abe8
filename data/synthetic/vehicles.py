"""Vehicles: cars, vans, buses and trucks as solids; motorcycles and bicycles as flat figures."""

import math

from .dice import PAINT, load, scaled
from .figures import make_rider
from .mesh import make_mesh
from .plan import Lamp, Plan, Thing, billboard


WARM, RED = (255, 236, 190), (255, 50, 36)  # glow of lamps
# Cosines of the angle to the line of sight: a vehicle is seen from an end above ALONG, from a side below ACROSS.
ALONG, ACROSS = 0.9, 0.25


def make_vehicle(plan: Plan, x: float, z: float, category: str, shape: str, heading: float, moving: bool) -> Thing:
    """A car, van, bus, truck or trailer of a random color at a place in meters."""
    dice, weather, time = plan.dice, plan.light.weather, plan.light.time
    color = dice.choice(tuple(PAINT))
    body = dice.vary(PAINT[color], 6)
    lit = moving and (time != "day" or (weather != "clear" and dice.chance(0.6)) or dice.chance(0.15))
    brake = moving and dice.chance(0.35)
    glowing = category == "bus" and time == "night" and moving
    palette = dice.palette("vehicle") | {
        "body": body,
        "shade": scaled(body, 0.75) if color != "black" else (54, 54, 56),
        "head": (255, 250, 230) if lit else (206, 212, 218),
        "tail": (255, 48, 34) if brake else (226, 30, 28) if lit else (146, 18, 22),
    }
    if glowing:
        palette["glass"] = (188, 174, 126)
    bright = ("head",) * lit + ("tail",) * (brake or lit) + ("glass", "display") * glowing
    meshes = (make_mesh("truck cab", "cab"),) * (category == "truck") + (make_mesh(category, shape),)
    glow = (0.9 if time == "night" else 0.35) * (1.5 if weather in ("rainy", "foggy") else 1.0)
    half, front, back = meshes[0].high[0] * 0.75, meshes[0].high[2], meshes[-1].low[2]
    lamps: list[Lamp] = []
    for side in (-half, half) if lit else ():
        lamps.append(Lamp((side, 0.75, front), WARM, glow, 1))
        lamps.append(Lamp((side, 0.75, back), RED, glow * (0.7 if brake else 0.4), -1))
    grow = dice.uniform(0.94, 1.08)
    scale = (grow * dice.uniform(0.97, 1.03), grow * dice.uniform(0.96, 1.05), grow)
    attributes = {"color": color}
    if category != "trailer":
        attributes |= visible_from(plan, x, z, heading, moving, brake, lit)
    traits = ("parked car",) * (category == "car" and not moving)
    place, lights = (x, 0.0, z), tuple(lamps)
    return Thing(category, meshes, palette, place, heading, scale, bright, attributes, lights, traits=traits)


def visible_from(
    plan: Plan, x: float, z: float, heading: float, moving: bool, brake: bool, lit: bool
) -> dict[str, str]:
    """The attributes of a vehicle that can be seen in its pose and lights: status, facing, brake lights."""
    along = math.cos(heading - plan.camera.bearing(x, z))  # 1 if its back is towards the camera
    attributes = {}
    if not (brake and along > 0):  # it may be about to stop
        attributes["status"] = "moving" if moving else "parked"
    if abs(along) > ALONG or abs(along) < ACROSS:
        attributes["facing"] = "to the side" if abs(along) < ACROSS else "away from us" if along > 0 else "toward us"
    if along > 0.6 and not lit:  # lit tail lights are red, too
        attributes["brake lights"] = "on" if brake else "off"
    return attributes


def make_cycle(plan: Plan, x: float, z: float, category: str, ridden: bool, heading: float) -> list[Thing]:
    """A motorcycle or bicycle and its rider, in side view if it crosses the line of sight."""
    dice = plan.dice
    color = dice.choice(tuple(PAINT))
    sight = plan.camera.bearing(x, z)
    across, along = math.sin(heading - sight), math.cos(heading - sight)
    side_view = abs(across) > 0.6
    facing = "side" if side_view else "back" if along > 0 else "front"
    motor, scooter = category == "motorcycle", dice.chance(0.4)
    body = dice.vary(PAINT[color], 6)
    lit = ridden and motor and plan.light.time != "day" and not side_view
    palette = dice.palette("cycle") | {"body": body}
    palette["tail"] = RED if facing == "back" else (255, 250, 220) if lit else (190, 190, 186)
    grow = dice.uniform(0.95, 1.12)
    scale = ((across if side_view else 1.0) * grow, grow, 1.0)
    lamps = (Lamp((0.0, 0.75, 0.0), *((WARM, 0.7) if facing == "front" else (RED, 0.35))),) * lit
    mesh, bright = make_mesh(category, "side" if side_view else "end", pose=int(motor and scooter)), ("tail",) * lit
    cycle = billboard(
        plan, category, mesh, palette, x, z, scale, bright=bright, attributes={"color": color}, lamps=lamps
    )
    return [cycle, make_rider(plan, cycle, facing)] if ridden else [cycle]


def place_vehicle(plan: Plan, category: str) -> bool:
    """Try to place a car, van, bus or truck in a lane, parked, or on the crossing road; or a parked trailer."""
    dice, road = plan.dice, plan.road
    shape = dice.choice(list(load("shapes")[category]))
    long, wide = load("scenes.yaml")["sizes"][category]
    choice = 1.0 if category == "trailer" else dice.random()
    z = plan.ahead(long / 2 + (4.0 if category in ("car", "van") else 6.0), 45 if plan.camera.height < 3 else 32)
    moving, half_x, half_z = True, wide / 2, long / 2
    if road.junction and choice < 0.3:  # on the crossing road
        way = dice.choice((-1, 1))
        x, z = dice.uniform(-22, 22), road.junction[0] + way * road.junction[1] / 2
        heading = -way * math.pi / 2 + dice.uniform(-0.1, 0.1)
        half_x, half_z = long / 2, wide / 2
    elif (road.parking > 2 and choice < 0.62 and category != "bus") or choice > 0.93:  # parked
        if road.crossing(z, long / 2):
            return False
        x = road.side(dice.choice((-1, 1)), -1.1 if road.parking > 2 else wide * 0.8)
        heading, moving = road.heading(z) + dice.choice((0.0, math.pi)), False
    else:
        x, heading = lane_at(plan, z, 0.25, 0.04)
        half_z += 0.7
    more = category, shape, heading, moving
    return plan.put(make_vehicle, (x, z, half_x, half_z), *more, margin=0.05, nearest=long / 2 + 1.6)


def lane_at(plan: Plan, z: float, shift: float, turn: float) -> tuple[float, float]:
    """x and heading in a random lane, off its middle by up to `shift` meters, and its direction by `turn` radians."""
    dice = plan.dice
    lane, way = dice.choice(plan.road.lanes)
    heading = plan.road.heading(z) + (0.0 if way > 0 else math.pi)
    return lane + dice.uniform(-shift, shift), heading + dice.uniform(-turn, turn)


def place_cycle(plan: Plan, category: str) -> bool:
    """Try to place a motorcycle or bicycle, ridden in a lane or across the road, or parked beside it."""
    dice, road, z = plan.dice, plan.road, plan.ahead(3.2, 14)
    ridden = dice.chance(0.78)
    if not ridden:
        x, heading = road.side(dice.choice((-1, 1)), dice.uniform(0.4, 1.4)), dice.uniform(0, 2 * math.pi)
    elif road.junction and dice.chance(0.3):
        z = road.junction[0] + dice.uniform(-0.5, 0.5) * road.junction[1]
        x, heading = dice.uniform(-12, 12), dice.choice((0.5, -0.5)) * math.pi
    else:
        x, heading = lane_at(plan, z, 1.1, 0.15)
        if dice.chance(0.25):
            heading += dice.choice((0.5, -0.5)) * math.pi
    return plan.put(make_cycle, (x, z, 0.6, 0.9), category, ridden, heading)

"""Vehicles: cars, vans, buses and trucks as solids; motorcycles and bicycles as flat figures."""

import math

from .colors import PAINT, draw_palette, scaled, vary
from .figures import make_rider
from .plan import Lamp, Plan, Thing, billboard
from .shapes import make_mesh


WARM, RED = (255, 236, 190), (255, 50, 36)  # glow of lamps
ALONG, ACROSS = 0.9, 0.25  # cosines from which a vehicle is seen from an end, and up to which from a side


def make_vehicle(plan: Plan, category: str, shape: str, x: float, z: float, heading: float, moving: bool) -> Thing:
    """A car, van, bus, truck or trailer of a random color at a place in meters."""
    dice, weather, time = plan.dice, plan.light.weather, plan.light.time
    color = dice.pick(tuple(PAINT))
    body = vary(dice, PAINT[color], 6)
    lit = moving and (time != "day" or (weather != "clear" and dice.chance(0.6)) or dice.chance(0.15))
    brake = moving and dice.chance(0.35)
    glowing = category == "bus" and time == "night" and moving
    palette = draw_palette(dice, "vehicle") | {
        "body": body,
        "shade": scaled(body, 0.75) if color != "black" else (54, 54, 56),
        "head": (255, 250, 230) if lit else (206, 212, 218),
        "tail": (255, 48, 34) if brake else (226, 30, 28) if lit else (146, 18, 22),
    }
    if glowing:
        palette["glass"] = (188, 174, 126)
    bright = ("head",) * lit + ("tail",) * (brake or lit) + ("glass", "display") * glowing
    meshes = (make_mesh("truck cab", "cab"),) * (category == "truck") + (make_mesh(category, shape),)
    lamps = []
    if lit:
        glow = (0.9 if time == "night" else 0.35) * (1.5 if weather in ("rainy", "foggy") else 1.0)
        half = meshes[0].high[0] * 0.75
        for side in (-half, half):
            lamps.append(Lamp((side, 0.75, meshes[0].high[2]), WARM, glow, 1))
            lamps.append(Lamp((side, 0.75, meshes[-1].low[2]), RED, glow * (0.7 if brake else 0.4), -1))
    grow = dice.uniform(0.94, 1.08)
    scale = (grow * dice.uniform(0.97, 1.03), grow * dice.uniform(0.96, 1.05), grow)
    attributes = {"color": color}
    if category != "trailer":
        attributes |= visible_from(plan, x, z, heading, moving, brake, lit)
    traits = ("parked car",) * (category == "car" and not moving)
    lights = tuple(lamps)
    return Thing(category, meshes, palette, (x, 0.0, z), heading, scale, bright, attributes, lights, traits=traits)


def visible_from(
    plan: Plan, x: float, z: float, heading: float, moving: bool, brake: bool, lit: bool
) -> dict[str, str]:
    """The attributes of a vehicle that its pose and lights tell from the camera: status, facing, brake lights."""
    along = math.cos(heading - plan.camera.bearing(x, z))  # 1 if its back is towards the camera
    attributes = {}
    if not (brake and along > 0):  # it may be about to stop
        attributes["status"] = "moving" if moving else "parked"
    if abs(along) > ALONG or abs(along) < ACROSS:
        attributes["facing"] = "to the side" if abs(along) < ACROSS else "away from us" if along > 0 else "toward us"
    if along > 0.6 and not lit:  # lit tail lights are red, too
        attributes["brake lights"] = "on" if brake else "off"
    return attributes


def make_cycle(plan: Plan, category: str, ridden: bool, x: float, z: float, heading: float) -> list[Thing]:
    """A motorcycle or bicycle and its rider, in side view where it is across the line of sight."""
    dice = plan.dice
    color = dice.pick(tuple(PAINT))
    sight = plan.camera.bearing(x, z)
    across, along = math.sin(heading - sight), math.cos(heading - sight)
    side_view = abs(across) > 0.6
    facing = "side" if side_view else "back" if along > 0 else "front"
    motor, scooter = category == "motorcycle", dice.chance(0.4)
    body = vary(dice, PAINT[color], 6)
    lit = ridden and motor and plan.light.time != "day" and not side_view
    palette = draw_palette(dice, "cycle") | {"body": body}
    palette["tail"] = RED if facing == "back" else (255, 250, 220) if lit else (190, 190, 186)
    grow = dice.uniform(0.95, 1.12)
    scale = ((across if side_view else 1.0) * grow, grow, 1.0)
    lamps = (Lamp((0.0, 0.75, 0.0), *((WARM, 0.7) if facing == "front" else (RED, 0.35))),) * lit
    mesh, bright = make_mesh(category, "side" if side_view else "end", pose=int(motor and scooter)), ("tail",) * lit
    cycle = billboard(
        plan, category, mesh, palette, x, z, scale, bright=bright, attributes={"color": color}, lamps=lamps
    )
    return [cycle, make_rider(plan, cycle, facing)] if ridden else [cycle]

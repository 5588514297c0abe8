"""Vehicles: cars, vans, buses and trucks as solids; motorcycles and bicycles as flat figures."""

import functools
import itertools
import math

from .figures import make_rider
from .geometry import Builder, Mesh, Point2, circle, inset
from .light import PAINT, Color, colors, scaled, vary
from .plan import Lamp, Plan, Thing


FIXED: dict[str, Color] = {"tire": (24, 24, 26), "trim": (38, 39, 42), "display": (255, 190, 60)}
GLASS = colors("343c46 262c34 4c5862")
HUBS = colors("96989c 606266 3c3e40")
PLATES = colors("ecece4 f0d65a ecece4")
WARM, RED = (255, 236, 190), (255, 50, 36)  # glow of lamps
ALONG, ACROSS = 0.9, 0.25  # cosines from which a vehicle is seen from an end, and up to which from a side

SHAPES = {
    "car": ("saloon", "hatchback", "estate", "suv"),
    "van": ("cargo", "minibus"),
    "bus": ("city", "coach", "double"),
    "truck": ("box", "tanker", "dumper"),
    "trailer": ("caravan", "flat"),
}
# length, half width, height of hood and roof, z of the cabin's corners: front foot, roof front, roof back, back foot
CABINS = {
    "saloon": (4.6, 0.90, 0.96, 1.44, (1.00, 0.25, -0.95, -1.60)),
    "hatchback": (3.9, 0.86, 0.98, 1.50, (1.05, 0.40, -1.45, -1.88)),
    "estate": (4.7, 0.90, 0.98, 1.52, (1.05, 0.30, -1.90, -2.25)),
    "suv": (4.6, 0.95, 1.14, 1.78, (1.10, 0.55, -1.85, -2.22)),
    "cargo": (5.2, 1.00, 1.22, 2.15, (2.10, 1.35, -2.50, -2.56)),
    "minibus": (4.9, 0.96, 1.14, 1.98, (1.95, 1.20, -2.25, -2.40)),
}
# height, bottom and top of the windows of each floor
BUSES = {
    "city": (3.05, ((1.2, 2.5),)),
    "coach": (3.4, ((1.45, 2.85),)),
    "double": (4.3, ((1.25, 2.15), (2.8, 3.75))),
}


def _tires(b: Builder, half: float, axles: tuple[float, ...], radius: float) -> None:
    """Tires as visible from the front and the back; to be painted before the body."""
    for z, side in itertools.product(axles, (-1, 1)):
        for toward in (-1, 1):
            b.plate((side * half * 0.98, side * (half - 0.24)), (0, 0.6), z + toward * radius * 0.8, "tire", toward)


def _wheels(b: Builder, half: float, axles: tuple[float, ...], radius: float) -> None:
    """Wheels on the sides; to be painted after the body."""
    for z, x in itertools.product(axles, (-half, half)):
        b.wheel(x, radius, z, radius, "tire")
        b.wheel(x, radius, z, radius * 0.58, "hub")


def _ends(b: Builder, half: float, front: float, back: float, low: float, high: float) -> None:
    """Lamps, license plates, grille and bumpers on flat ends at z = `front` and `back`, between two heights."""

    def part(left: float, right: float, bottom: float, top: float, z: float, color: str) -> None:
        heights = low + bottom * (high - low), low + top * (high - low)
        b.plate((left * half, right * half), heights, z, color, 1 if z == front else -1)

    part(-0.52, 0.52, 0.4, 0.8, front, "trim")
    for side in (-1, 1):
        part(side * 0.95, side * 0.58, 0.48, 0.86, front, "head")
        part(side * 0.95, side * 0.66, 0.48, 0.86, back, "tail")
    for z in (front, back):
        part(-0.97, 0.97, 0.0, 0.22, z, "trim")
        part(-0.28, 0.28, 0.22, 0.4, z, "plate")


@functools.cache
def cabin_car(shape: str) -> Mesh:
    """A car or van: a low body with a narrower cabin on it."""
    length, half, hood, roof, (foot, roof_front, roof_back, back_foot) = CABINS[shape]
    front, back, low = length / 2, -length / 2, 0.28
    van = shape in SHAPES["van"]
    axles, radius = (front - 0.85, back + 0.85), 0.33 if roof < 1.7 else 0.37
    b = Builder()
    _tires(b, half, axles, radius)
    nose = hood - (0.3 if van else 0.2)
    tail = hood - (0.06 if back_foot - back > 0.3 else 0.0)
    profile = [(back, low), (front, low), (front, nose), (front - 0.12, nose + 0.1)]
    profile += [(foot, hood), (back_foot, hood), (back + 0.06, tail), (back, tail - 0.12)]
    waist, top, base = half * 0.94, half * (0.88 if van else 0.70), hood - 0.02
    b.prism(profile, [half, half, half * 0.97, half * 0.93, waist, waist, waist, half * 0.97], "body")
    _ends(b, half, front + 0.01, back - 0.01, low, nose)
    b.prism([(foot, base), (roof_front, roof), (roof_back, roof), (back_foot, base)], [waist, top, top, waist], "body")

    def glass(corners: list[tuple[float, float, float]], edges: tuple, toward: tuple[float, float, float]) -> None:
        b.face(inset(corners, *edges), "glass", toward)

    for z, low_z, bottom, toward in ((roof_front, foot, 0.94, 1), (roof_back, back_foot, 0.55 if van else 0.85, -1)):
        pane = [(-top, roof, z), (top, roof, z), (waist, base, low_z), (-waist, base, low_z)]
        glass(pane, (0.08, 0.1, 0.92, bottom), (0, 0.3, toward))
    panes = {"cargo": 1, "saloon": 2, "hatchback": 2}.get(shape, 3)
    width = (0.28 if shape == "cargo" else 0.95) / panes
    for side in (-1, 1):
        upper = [(side * top, roof, roof_front), (side * top, roof, roof_back)]
        lower = [(side * waist, base, back_foot), (side * waist, base, foot)]
        for i in range(panes):
            glass(upper + lower, (0.04 + i * width, 0.12, (i + 1) * width, 0.92), (side, 0.3, 0))
        mirror = sorted((side * waist, side * (waist + 0.18)))
        b.box((mirror[0], mirror[1]), (base + 0.02, base + 0.16), (foot - 0.35, foot - 0.25), "trim")
    _wheels(b, half + 0.01, axles, radius)
    return b.build()


@functools.cache
def bus(shape: str) -> Mesh:
    """A bus: a box with a band of windows on every floor."""
    roof, floors = BUSES[shape]
    half, low, front = 1.25, 0.35, 5.25 if shape == "double" else 5.75
    axles = (front - 2.4, 2.6 - front)
    b = Builder()
    _tires(b, half, axles, 0.48)
    b.prism([(-front, low), (front, low), (front, roof), (-front, roof)], [half, half, 1.21, 1.21], "body")
    for side in (-1.26, 1.26):
        skirt = [(side, low, -front), (side, low, front), (side, 0.6, front), (side, 0.6, -front)]
        b.face(skirt, "shade", (side, 0, 0))
        for bottom, top in floors:
            quad = [(side, top, front), (side, top, -front), (side, bottom, -front), (side, bottom, front)]
            for i in range(7):
                b.face(inset(quad, 0.02 + i * 0.138, 0, 0.146 + i * 0.138, 1), "glass", (side, 0, 0))
    for z in (front * 0.76, -1.0):  # doors
        for i in (0, 1):
            ends = (z + i * 0.55, z + i * 0.55 + 0.5)
            corners = [(1.27, y, end) for y, end in ((0.45, ends[0]), (0.45, ends[1]), (2.2, ends[1]), (2.2, ends[0]))]
            b.face(corners, "glass", (1, 0, 0))
    for bottom, top in floors:
        b.plate((-1.13, 1.13), (bottom - 0.15, top), front + 0.01, "glass", 1)
        b.plate((-0.82, 0.82), (bottom, top), -front - 0.01, "glass", -1)
    b.plate((-0.75, 0.75), (roof - 0.45, roof - 0.08), front + 0.02, "trim", 1)
    b.plate((-0.5, 0.5), (roof - 0.36, roof - 0.16), front + 0.02, "display", 1)
    _ends(b, half, front + 0.02, -front - 0.02, low, 1.05)
    _wheels(b, half + 0.02, axles, 0.48)
    return b.build()


@functools.cache
def truck_cab() -> Mesh:
    """The cab of a truck, between z = 1.9 and 4.1."""
    half, front, split = 1.22, 4.1, 1.9
    b = Builder()
    _tires(b, half, (2.9,), 0.5)
    profile = [(split, 0.4), (front, 0.4), (front, 1.5), (front - 0.25, 2.75), (split, 2.85)]
    b.prism(profile, [half, half, half, half * 0.92, half * 0.92], "body")
    windshield = [(-1.12, 2.75, 3.86), (1.12, 2.75, 3.86), (half, 1.5, 4.11), (-half, 1.5, 4.11)]
    b.face(inset(windshield, 0.04, 0.12, 0.96, 0.95), "glass", (0, 0.2, 1))
    for side in (-1, 1):
        quad = [(side * 1.13, 2.75, 3.8), (side * 1.13, 2.75, split), (side * 1.23, 1.5, split), (side * 1.23, 1.5, 4)]
        b.face(inset(quad, 0.1, 0.15, 0.65, 0.95), "glass", (side, 0.2, 0))
        mirror = sorted((side * 1.24, side * 1.45))
        b.box((mirror[0], mirror[1]), (1.7, 2.3), (3.85, 3.95), "trim")
    b.plate((-0.8, 0.8), (0.85, 1.4), front + 0.01, "trim", 1)
    _ends(b, half, front + 0.02, split, 0.4, 1.15)
    _wheels(b, half + 0.01, (2.9,), 0.5)
    return b.build()


@functools.cache
def truck_load(shape: str) -> Mesh:
    """The back of a truck: a box, tank or open dump body on wheels, between z = -4.1 and 1.9."""
    half, back, split = 1.22, -4.1, 1.9
    edge, behind = split - 0.15, back - 0.01
    axles = (back + 1.5,) if shape == "box" else (back + 1.1, back + 2.3)
    b = Builder()
    _tires(b, half, axles, 0.5)
    b.box((-half * 0.8, half * 0.8), (0.45, 1.0), (back, split), "trim")
    if shape == "box":
        b.box((-half * 1.03, half * 1.03), (1.0, 3.65), (back, edge), "body")
        for x in (-0.48, -0.02, 0.44):  # bars and slit of the doors
            b.plate((x, x + 0.05), (1.1, 3.55), behind, "shade", -1)
    elif shape == "tanker":
        outline = [(half * s, 2.2 + 1.2 * c) for s, c in circle(10)]
        for (ax, ay), (bx, by) in itertools.pairwise([*outline, outline[0]]):
            wall = [(ax, ay, back), (bx, by, back), (bx, by, edge), (ax, ay, edge)]
            b.face(wall, "body", (ax + bx, ay + by - 4.4, 0))
        b.face([(x, y, edge) for x, y in outline], "body", (0, 0, 1))
        b.face([(x, y, back) for x, y in outline], "body", (0, 0, -1))
        b.face([(x * 0.5, 1.1 + y * 0.5, behind) for x, y in outline], "shade", (0, 0, -1))
    else:
        profile = [(back, 1.0), (edge, 1.0), (edge, 2.4), (back - 0.2, 2.3)]
        b.prism(profile, [half, half, half * 1.05, half * 1.05], "body")
        b.face([(x, 2.42, z) for x, z in ((-1.1, back), (1.1, back), (1.1, edge), (-1.1, edge))], "shade", (0, 1, 0))
        for side, i in itertools.product((-1.29, 1.29), range(5)):  # ribs
            z = back + 0.4 + i * 1.25
            rib = [(side, y, end) for y, end in ((1.0, z), (1.0, z + 0.12), (2.35, z + 0.12), (2.35, z))]
            b.face(rib, "shade", (side, 0, 0))
    for side in (-1, 1):
        b.plate((side * half * 0.95, side * half * 0.62), (0.62, 0.92), back - 0.02, "tail", -1)
    _wheels(b, half + 0.01, axles, 0.5)
    return b.build()


@functools.cache
def trailer(shape: str) -> Mesh:
    """A trailer on one axle, with its drawbar at the front: a caravan or a flat bed with a rim."""
    half, front, back = 1.1, 2.0, -2.0
    b = Builder()
    _tires(b, half, (-0.2,), 0.36)
    b.box((-0.06, 0.06), (0.45, 0.55), (front, front + 1.3), "trim")
    b.box((-half, half), (0.5, 2.5 if shape == "caravan" else 1.1), (back, front), "body")
    if shape == "caravan":
        for z, toward in ((front + 0.01, 1), (back - 0.01, -1)):
            b.plate((-0.75, 0.75), (1.5, 2.15), z, "glass", toward)
        for side in (-1.11, 1.11):
            pane = [(side, y, z) for y, z in ((1.5, -1.5), (1.5, 0.2), (2.15, 0.2), (2.15, -1.5))]
            b.face(pane, "glass", (side, 0, 0))
    else:
        b.face([(x, 1.11, z) for x, z in ((-1, back), (1, back), (1, front), (-1, front))], "shade", (0, 1, 0))
    for side in (-1, 1):
        b.plate((side * half * 0.95, side * half * 0.65), (0.55, 0.8), back - 0.02, "tail", -1)
    b.plate((-0.28, 0.28), (0.55, 0.75), back - 0.02, "plate", -1)
    _wheels(b, half + 0.01, (-0.2,), 0.36)
    return b.build()


def make_vehicle(plan: Plan, category: str, shape: str, x: float, z: float, heading: float, moving: bool) -> Thing:
    """A car, van, bus, truck or trailer of a random color at a place in meters."""
    dice, weather, time = plan.dice, plan.light.weather, plan.light.time
    color = dice.pick(tuple(PAINT))
    body = vary(dice, PAINT[color], 6)
    lit = moving and (time != "day" or (weather != "clear" and dice.chance(0.6)) or dice.chance(0.15))
    brake = moving and dice.chance(0.35)
    glass = dice.pick(GLASS)
    glowing = category == "bus" and time == "night" and moving
    palette = FIXED | {
        "body": body,
        "shade": scaled(body, 0.75) if color != "black" else (54, 54, 56),
        "glass": (188, 174, 126) if glowing else glass,
        "hub": dice.pick(HUBS),
        "head": (255, 250, 230) if lit else (206, 212, 218),
        "tail": (255, 48, 34) if brake else (226, 30, 28) if lit else (146, 18, 22),
        "plate": dice.pick(PLATES),
    }
    bright = ("head",) * lit + ("tail",) * (brake or lit) + ("glass", "display") * glowing
    make_mesh = {"bus": bus, "truck": truck_load, "trailer": trailer}.get(category, cabin_car)
    meshes = (truck_cab(),) * (category == "truck") + (make_mesh(shape),)
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


@functools.cache
def motorcycle(side_view: bool, scooter: bool) -> Mesh:
    """A motorcycle in the plane of its length (x is its front) or, from the front or the back, of its width."""
    b = Builder()
    if not side_view:
        b.limb((0, 0.08), (0, 0.62), "tire", 0.15)
        b.flat([(-0.17, 0.5), (0.17, 0.5), (0.24, 0.8), (0.16, 1.0), (-0.16, 1.0), (-0.24, 0.8)], "body")
        b.flat([(-0.09, 0.68), (0.09, 0.68), (0.09, 0.8), (-0.09, 0.8)], "tail")
        b.limb((-0.38, 1.06), (0.38, 1.06), "trim", 0.05)
        for x in (-0.42, 0.42):
            b.disc(x, 1.2, 0.07, "trim", 8)
        b.flat([(-0.09, 0.4), (0.09, 0.4), (0.09, 0.5), (-0.09, 0.5)], "plate")
        return b.build()
    radius = 0.25 if scooter else 0.31
    for x in (-0.68, 0.72):
        b.disc(x, radius, radius, "tire", 14)
        b.disc(x, radius, radius * 0.58, "hub")
    b.limb((0.72, radius), (0.48, 1.02), "trim", 0.09, 0.07)
    b.flat([(-0.55, 0.3), (0.35, 0.25), (0.4, 0.5), (-0.5, 0.55)], "body" if scooter else "trim")
    b.flat([(-0.1, 0.6), (0.5, 0.62), (0.46, 0.88), (0.2, 0.92), (-0.1, 0.78)], "body")
    b.flat([(-0.85, 0.72), (-0.6, 0.5), (0.0, 0.52), (0.0, 0.78), (-0.7, 0.82)], "body")
    b.flat([(-0.8, 0.78), (0.05, 0.74), (0.05, 0.84), (-0.75, 0.88)], "tire")
    if scooter:
        b.flat([(0.36, 0.25), (0.6, 0.3), (0.52, 1.0), (0.42, 1.0)], "body")
    b.limb((0.5, 1.0), (0.36, 1.12), "trim", 0.05)
    b.flat([(0.5, 0.82), (0.62, 0.84), (0.62, 1.0), (0.5, 1.02)], "head")
    b.flat([(-0.9, 0.7), (-0.82, 0.7), (-0.82, 0.8), (-0.9, 0.8)], "tail")
    b.limb((-0.75, 0.28), (-0.1, 0.3), "hub", 0.09, 0.06)
    return b.build()


@functools.cache
def bicycle(side_view: bool) -> Mesh:
    """A bicycle in the plane of its length (x is its front) or of its width."""
    b = Builder()
    if not side_view:
        b.limb((0, 0.04), (0, 0.66), "tire", 0.06)
        b.limb((0, 0.6), (0, 1.0), "body", 0.06)
        b.limb((-0.28, 1.02), (0.28, 1.02), "trim", 0.05)
        b.limb((-0.1, 0.92), (0.1, 0.92), "tire", 0.07)
        b.disc(0, 0.72, 0.05, "tail", 8)
        return b.build()
    for x in (-0.52, 0.55):  # a ring, so that the street is visible through the wheel
        rim: list[Point2] = [(x + 0.31 * s, 0.34 + 0.31 * c) for s, c in circle(14)]
        for start, end in itertools.pairwise([*rim, rim[0]]):
            b.limb(start, end, "tire", 0.055)
    hub, seat, head, back, front = (-0.05, 0.3), (-0.2, 0.82), (0.38, 0.86), (-0.52, 0.34), (0.55, 0.34)
    for start, end in ((hub, seat), (seat, head), (hub, head), (back, hub), (back, seat), (front, (0.36, 0.96))):
        b.limb(start, end, "body", 0.06)
    b.limb((0.34, 1.0), (0.5, 1.0), "trim", 0.05)
    b.limb((-0.36, 0.9), (-0.08, 0.9), "tire", 0.08, 0.05)
    return b.build()


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
    palette = FIXED | {
        "body": body,
        "hub": (140, 142, 146),
        "head": (255, 250, 230),
        "tail": RED if facing == "back" else (255, 250, 220) if lit else (190, 190, 186),
        "plate": (236, 236, 228),
    }
    grow = dice.uniform(0.95, 1.12)
    scale = ((across if side_view else 1.0) * grow, grow, 1.0)
    color_and_reach = (WARM, 0.7) if facing == "front" else (RED, 0.35)
    lamps = (Lamp((0.0, 0.75, 0.0), *color_and_reach),) * lit
    mesh = motorcycle(side_view, scooter) if motor else bicycle(side_view)
    bright = ("tail",) * lit
    cycle = Thing(category, (mesh,), palette, (x, 0.0, z), sight, scale, bright, {"color": color}, lamps)
    if not ridden:
        return [cycle]
    return [cycle, make_rider(plan, cycle, facing, motor)]

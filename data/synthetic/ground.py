"""The ground of a plan: road, markings, crosswalks, sidewalks, land; and the skyline behind it."""

from .camera import Point2
from .colors import Color, lighten, mix, scaled
from .dice import Dice
from .plan import CROSSWALK, FAR, ROAD, SIDEWALK, STRIPES, Plan
from .road import Road


START = -60.0  # meters: the ground begins behind the camera
# Meters ahead where a curve is cut into straight pieces.
STATIONS = (-40, -25, -15, -9, -5, -2, 0.5, 2, 4, 6, 9, 12, 16, 21, 27, 35, 45, 60, 80, 110, 150, 210)


def strip(road: Road, left: float, right: float, start: float = START, end: float = FAR) -> list[Point2]:
    """Outline of the ground from `left` to `right` of the road's middle line, and from `start` to `end` along it."""
    stations = [start, *(z for z in STATIONS if start < z < end), end] if road.bend else [start, end]
    return [road.at(left, z) for z in stations] + [road.at(right, z) for z in reversed(stations)]


def lay_ground(plan: Plan) -> list[float]:
    """Add all patches of ground to a plan, and return the meters ahead at which crosswalks are."""
    dice, road, weather = plan.dice, plan.road, plan.light.weather
    asphalt = dice.color("asphalt")
    land = dice.color("paved land" if plan.setting == "city" and dice.chance(0.7) else "grass")
    walk = dice.color("sidewalk")
    line: Color = (232, 232, 226)
    if weather == "snowy":
        land, walk = (232, 236, 240), (222, 226, 231)
        asphalt = dice.color("snowy asphalt")
        line = mix(asphalt, line, 0.5)
    elif weather == "rainy":
        asphalt = scaled(asphalt, 0.75)
    plan.land = dice.vary(land)
    if road.sidewalk:
        if road.junction:
            plan.pave(SIDEWALK, walk, crossing_road(road.junction, road.sidewalk))
        for width, color in ((road.sidewalk, walk), (0.18, lighten(walk, 24))):  # paving and curb
            left, right = strip(road, road.left - width, road.left), strip(road, road.right, road.right + width)
            plan.pave(SIDEWALK, color, left, right)
    if road.junction:
        plan.pave(ROAD, asphalt, crossing_road(road.junction))
    plan.pave(ROAD, asphalt, strip(road, road.left, road.right))
    wear(plan, asphalt)
    if plan.setting != "rural" or not dice.chance(0.25):
        markings(plan, line)
        plan.marked = True
    return crosswalks(plan, asphalt, line)


def crossing_road(junction: Point2, margin: float = 0.0) -> list[Point2]:
    """Outline of the road through a junction from left to right, with a margin on either side."""
    middle, half = junction[0], junction[1] + margin
    return [(-150.0, middle - half), (150.0, middle - half), (150.0, middle + half), (-150.0, middle + half)]


def wear(plan: Plan, asphalt: Color) -> None:
    """Add wheel tracks, repaired places and puddles."""
    dice, road, weather = plan.dice, plan.road, plan.light.weather
    track = lighten(asphalt, -14 if weather == "snowy" else dice.pick((-7, 6)))
    wheels = [x + wheel for x, _ in road.lanes for wheel in (-0.8, 0.8)]
    plan.pave(ROAD, track, *(strip(road, x - 0.25, x + 0.25) for x in wheels))
    for _ in range(dice.integer(0, 4)):
        x, z = dice.uniform(road.left, road.right - 1), dice.uniform(3, 30)
        width, length = dice.uniform(0.6, 2), dice.uniform(0.6, 4)
        color = lighten(asphalt, dice.pick((-18, -12, 12)) if weather != "rainy" else 34)
        plan.pave(ROAD, color, road.quad(x, x + width, z, z + length))


def markings(plan: Plan, line: Color) -> None:
    """Add lane lines, edge lines, stop lines and arrows."""
    dice, road = plan.dice, plan.road
    edges = sorted({round(x + side * road.lane / 2, 3) for x, _ in road.lanes for side in (-1, 1)})
    yellow = dice.chance(0.3)
    dash, gap = dice.pick(((3.0, 6.0), (3.0, 3.0), (4.0, 8.0)))
    stretches = [(START, FAR)]
    if road.junction:
        middle, half = road.junction
        stretches = [(START, middle - half), (middle + half, FAR)]
    dashes = []
    for start, end in stretches:
        for x in edges:
            if x in (edges[0], edges[-1]):
                plan.pave(ROAD, line, strip(road, x - 0.07, x + 0.07, start, end))
            elif abs(x) < 0.1:
                offsets = (-0.16, 0.16) if len(edges) > 3 or dice.chance(0.4) else (0.0,)
                pieces = (strip(road, x + offset - 0.07, x + offset + 0.07, start, end) for offset in offsets)
                plan.pave(ROAD, (226, 180, 50) if yellow else line, *pieces)
            else:
                z = start
                while z < min(end - dash, 110):
                    if z > -10:
                        dashes.append(road.quad(x - 0.07, x + 0.07, z, z + dash))
                    z += dash + gap
    if dashes:
        plan.pave(ROAD, line, *dashes)
    if road.junction:
        z, half = road.junction[0] - road.junction[1] - 4.2, road.lane * 0.45
        ahead = [x for x, way in road.lanes if way > 0]
        plan.pave(ROAD, line, *(road.quad(x - half, x + half, z, z + 0.4) for x in ahead))
        for x in ahead:
            if dice.chance(0.5):
                head = [(x - 0.35, z - 3), (x + 0.35, z - 3), (x, z - 1.6)]
                plan.pave(ROAD, line, road.quad(x - 0.1, x + 0.1, z - 5, z - 3), head)


def crosswalks(plan: Plan, asphalt: Color, line: Color) -> list[float]:
    """Add crosswalks at the junction, or one elsewhere, and return the meters ahead at which they are."""
    dice, road = plan.dice, plan.road
    places = []
    if road.junction and dice.chance(0.7):
        places.append(road.junction[0] - road.junction[1] - 1.9)
        if dice.chance(0.5):
            places.append(road.junction[0] + road.junction[1] + 1.9)
    elif plan.setting != "highway" and dice.chance(0.3):
        places.append(dice.uniform(7, 24))
    color = (236, 196, 60) if dice.chance(0.1) else line
    for z in places:
        half, width = dice.uniform(2.6, 3.6) / 2, dice.uniform(0.42, 0.6)
        left, right = road.left + 0.3, road.right - 0.3
        plan.pave(CROSSWALK, asphalt, road.quad(left, right, z - half, z + half))
        count = int((right - left + width + 0.01) / (width * 2))
        stripes = (left + 2 * width * i for i in range(count))
        plan.pave(STRIPES, color, *(road.quad(x, x + width, z - half, z + half) for x in stripes))
    return places


def skyline(dice: Dice, setting: str) -> list[Point2]:
    """Outline of far hills or roofs: (x as a fraction of the width, height above the horizon in image sizes)."""
    if dice.chance(0.15):
        return []
    points = []
    x, level = 0.0, dice.uniform(0.01, 0.05)
    while x < 1.3:
        points.append((x, level))
        if setting == "city":
            x += dice.uniform(0.03, 0.12)
            points.append((x, level))
            level = dice.uniform(0.01, 0.11)
        else:
            x += dice.uniform(0.03, 0.15)
            level = min(max(level + dice.uniform(-0.025, 0.025), 0.005), 0.11)
    return points

"""The ground of the synthetic scenes: road, markings, crosswalks, sidewalks, fields, and hills behind them."""

from .synthetic_dice import Dice
from .synthetic_drawing import FIRST, ROAD, SIDEWALK, Patch
from .synthetic_road import FAR, STATIONS, Plan, Road
from .synthetic_things import vary
from .synthetic_weather import Color, each


CROSSWALK = FIRST  # kind of a patch that gets a number of its own
STRIPES = -1  # kind of a patch that has the number of the patch before it

ASPHALT: tuple[Color, ...] = ((98, 99, 102), (112, 111, 110), (84, 86, 90), (124, 120, 114), (92, 88, 86))
GRASS: tuple[Color, ...] = ((98, 128, 62), (120, 134, 72), (84, 112, 56), (150, 140, 86), (134, 118, 82))
PAVED: tuple[Color, ...] = ((140, 136, 130), (126, 124, 122), (150, 144, 132))


def lighten(color: Color, by: int) -> Color:
    """A colour with `by` levels more of each part, or fewer."""
    return each(color, lambda c: min(max(c + by, 0), 255))


def strip(road: Road, left: float, right: float, start: float = -60.0, end: float = FAR) -> list[tuple[float, float]]:
    """Outline of what lies between two distances from the road's middle line."""
    stations = [start, *(z for z in STATIONS if start < z < end), end] if road.bend else [start, end]
    return [road.at(left, z) for z in stations] + [road.at(right, z) for z in reversed(stations)]


def stretches(road: Road) -> list[tuple[float, float]]:
    """The road's parts before and behind the junction."""
    if road.junction is None:
        return [(-60.0, FAR)]
    middle, half = road.junction
    return [(-60.0, middle - half), (middle + half, FAR)]


def lay_ground(dice: Dice, plan: Plan) -> list[float]:
    """Adds the patches of ground to a plan; returns where crosswalks are, metres ahead."""
    road, light = plan.road, plan.light
    white = light.weather == "snowy"
    asphalt = vary(dice, dice.pick(ASPHALT), 6)
    field = dice.pick(PAVED) if plan.setting == "city" and dice.chance(0.7) else dice.pick(GRASS)
    walk = vary(dice, dice.pick(((176, 170, 160), (158, 154, 150), (186, 174, 156))), 6)
    line: Color = (232, 232, 226)
    if white:
        field, walk = (232, 236, 240), (222, 226, 231)
        asphalt = dice.pick(((150, 153, 158), (186, 190, 195), (206, 210, 215)))
        line = tuple((a + b) // 2 for a, b in zip(asphalt, line))  # type: ignore[assignment]
    elif light.weather == "rainy":
        asphalt = each(asphalt, lambda c: c * 3 // 4)
    plan.land = vary(dice, field)
    if road.junction and road.sidewalk:
        middle, half = road.junction
        kerb = half + road.sidewalk
        plan.patches.append(
            Patch(
                (((-150, middle - kerb), (150, middle - kerb), (150, middle + kerb), (-150, middle + kerb)),),
                walk,
                SIDEWALK,
            )
        )
    if road.sidewalk:
        edges = ((road.left - road.sidewalk, road.left), (road.right, road.right + road.sidewalk))
        plan.patches.append(Patch(tuple(tuple(strip(road, a, b)) for a, b in edges), walk, SIDEWALK))
        edges = ((road.left - 0.18, road.left), (road.right, road.right + 0.18))  # kerbs
        pieces = tuple(tuple(strip(road, a, b)) for a, b in edges)
        plan.patches.append(Patch(pieces, lighten(walk, 24), SIDEWALK))
    if road.junction:
        middle, half = road.junction
        plan.patches.append(
            Patch(
                (((-150, middle - half), (150, middle - half), (150, middle + half), (-150, middle + half)),),
                asphalt,
                ROAD,
            )
        )
    plan.patches.append(Patch((tuple(strip(road, road.left, road.right)),), asphalt, ROAD))
    wear(dice, plan, asphalt)
    markings(dice, plan, line)
    return crosswalks(dice, plan, asphalt, line)


def wear(dice: Dice, plan: Plan, asphalt: Color) -> None:
    """Wheel tracks, patches, manholes and puddles."""
    road = plan.road
    shift = -14 if plan.light.weather == "snowy" else dice.pick((-7, 6))
    track = lighten(asphalt, shift)
    pieces = [tuple(strip(road, x + w - 0.25, x + w + 0.25)) for x, _ in road.lanes for w in (-0.8, 0.8)]
    plan.patches.append(Patch(tuple(pieces), track, ROAD))
    for _ in range(dice.count(0, 4)):
        x, z, wide, long = (
            dice.between(road.left, road.right - 1),
            dice.between(3, 30),
            dice.between(0.6, 2),
            dice.between(0.6, 4),
        )
        by = dice.pick((-18, -12, 12)) if plan.light.weather != "rainy" else 34
        color = lighten(asphalt, by)
        corners = (
            (x, z),
            (x + wide * 0.5, z - 0.2),
            (x + wide, z),
            (x + wide, z + long),
            (x + wide * 0.4, z + long * 1.1),
            (x, z + long),
        )
        plan.patches.append(Patch((tuple(road.at(a, b) for a, b in corners),), color, ROAD))


def markings(dice: Dice, plan: Plan, line: Color) -> None:
    """Lane lines, edge lines, stop lines and arrows."""
    road = plan.road
    lane_edges = sorted({round(x + s * road.lane / 2, 3) for x, _ in road.lanes for s in (-1, 1)})
    if plan.setting == "rural" and dice.chance(0.25):
        return
    yellow = dice.chance(0.3)
    dash, gap = dice.pick(((3.0, 6.0), (3.0, 3.0), (4.0, 8.0)))
    dashes: list[tuple] = []
    for start, end in stretches(road):
        for x in lane_edges:
            outer = x in (lane_edges[0], lane_edges[-1])
            if abs(x) < 0.1 and not outer:
                color = (226, 180, 50) if yellow else line
                offsets = (-0.16, 0.16) if len(lane_edges) > 3 or dice.chance(0.4) else (0.0,)
                pieces = tuple(tuple(strip(road, x + o - 0.07, x + o + 0.07, start, end)) for o in offsets)
                plan.patches.append(Patch(pieces, color, ROAD))
            elif outer:
                plan.patches.append(Patch((tuple(strip(road, x - 0.07, x + 0.07, start, end)),), line, ROAD))
            else:
                z = start
                while z < min(end, 110):
                    if z > -10:
                        corners = ((x - 0.07, z), (x + 0.07, z), (x + 0.07, z + dash), (x - 0.07, z + dash))
                        dashes.append(tuple(road.at(a, b) for a, b in corners if b <= end))
                    z += dash + gap
    dashes = [piece for piece in dashes if len(piece) == 4]
    if dashes:
        plan.patches.append(Patch(tuple(dashes), line, ROAD))
    if road.junction:
        z = road.junction[0] - road.junction[1] - 4.2
        half = road.lane * 0.45
        stops = [
            ((x - half, z), (x + half, z), (x + half, z + 0.4), (x - half, z + 0.4))
            for x, way in road.lanes
            if way > 0
        ]
        plan.patches.append(Patch(tuple(stops), line, ROAD))
        for x, way in road.lanes:
            if way > 0 and dice.chance(0.5):
                a = z - 5
                shaft = ((x - 0.1, a), (x + 0.1, a), (x + 0.1, a + 2), (x - 0.1, a + 2))
                plan.patches.append(Patch((shaft, ((x - 0.35, a + 2), (x + 0.35, a + 2), (x, a + 3.4))), line, ROAD))


def crosswalks(dice: Dice, plan: Plan, asphalt: Color, line: Color) -> list[float]:
    """Crosswalks at the junction, or one somewhere else."""
    road = plan.road
    places = []
    if road.junction and dice.chance(0.7):
        places.append(road.junction[0] - road.junction[1] - 1.9)
        if dice.chance(0.5):
            places.append(road.junction[0] + road.junction[1] + 1.9)
    elif plan.setting != "highway" and dice.chance(0.3):
        places.append(dice.between(7, 24))
    across = line if not dice.chance(0.1) else (236, 196, 60)
    for z in places:
        deep, wide = dice.between(2.6, 3.6), dice.between(0.42, 0.6)
        left, right = road.left + 0.3, road.right - 0.3
        corners = ((left, z - deep / 2), (right, z - deep / 2), (right, z + deep / 2), (left, z + deep / 2))
        plan.patches.append(Patch((tuple(road.at(a, b) for a, b in corners),), asphalt, CROSSWALK))
        pieces, x = [], left
        while x + wide <= right + 0.01:
            corners = ((x, z - deep / 2), (x + wide, z - deep / 2), (x + wide, z + deep / 2), (x, z + deep / 2))
            pieces.append(tuple(road.at(a, b) for a, b in corners))
            x += wide * 2
        plan.patches.append(Patch(tuple(pieces), across, STRIPES))
    return places


def skyline(dice: Dice, setting: str) -> list[tuple[float, float]]:
    """Far hills, woods or roofs: (share of the width, height above the horizon in image sizes), from left to right."""
    if dice.chance(0.15):
        return []
    points = []
    x, level = 0.0, dice.between(0.01, 0.05)
    while x < 1.3:
        points.append((x, level))
        if setting == "city":
            step = dice.between(0.03, 0.12)
            points.append((x + step, level))
            x, level = x + step, dice.between(0.01, 0.11)
        else:
            x += dice.between(0.03, 0.15)
            level = min(max(level + dice.between(-0.025, 0.025), 0.005), 0.11)
    return points

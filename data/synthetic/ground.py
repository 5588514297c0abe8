"""The ground of a plan: road, markings, crosswalks, sidewalks, land; and the skyline behind it."""

from collections.abc import Sequence

from .camera import Point2
from .dice import Color, mix, scaled
from .plan import CROSSWALK, ROAD, SIDEWALK, STRIPES, Plan
from .road import FAR, START


def lay_ground(plan: Plan) -> None:
    """Add all patches of ground to a plan."""
    dice, road, weather = plan.dice, plan.road, plan.light.weather
    colors = dice.palette("snowy ground" if weather == "snowy" else "ground")
    asphalt, walk = colors["asphalt"], colors["sidewalk"]
    plan.land = colors["paved land" if plan.setting == "city" and dice.chance(0.7) else "grass"]
    line: Color = (232, 232, 226)
    if weather == "snowy":
        line = mix(asphalt, line, 0.5)
    elif weather == "rainy":
        asphalt = scaled(asphalt, 0.75)
    if road.sidewalk:
        if road.junction:
            plan.pave(SIDEWALK, walk, crossing_road(road.junction, road.sidewalk))
        for width, color in ((road.sidewalk, walk), (0.18, scaled(walk, 1.14))):  # paving and curb
            left, right = road.strip(road.left - width, road.left), road.strip(road.right, road.right + width)
            plan.pave(SIDEWALK, color, left, right)
    if road.junction:
        plan.pave(ROAD, asphalt, crossing_road(road.junction))
    plan.pave(ROAD, asphalt, road.strip(road.left, road.right))
    track = scaled(asphalt, 0.92 if weather == "snowy" else dice.choice((0.93, 1.06)))
    wheels = [x + wheel for x, _ in road.lanes for wheel in (-0.8, 0.8)]
    plan.pave(ROAD, track, *(road.strip(x - 0.25, x + 0.25) for x in wheels))
    if plan.setting != "rural" or not dice.chance(0.25):
        markings(plan, line)
        plan.marked = True
    add_crosswalks(plan, asphalt, line)


def crossing_road(junction: Point2, margin: float = 0.0) -> list[Point2]:
    """Outline of the road through a junction from left to right, with a margin on either side."""
    middle, half = junction[0], junction[1] + margin
    return [(-150.0, middle - half), (150.0, middle - half), (150.0, middle + half), (-150.0, middle + half)]


def markings(plan: Plan, line: Color) -> None:
    """Add lane lines, edge lines, stop lines and arrows."""
    dice, road = plan.dice, plan.road
    edges = sorted({round(x + side * road.lane / 2, 3) for x, _ in road.lanes for side in (-1, 1)})
    stretches = [(START, FAR)]
    if road.junction:
        z, half = road.junction
        stretches = [(START, z - half), (z + half, FAR)]

    def pave_lines(xs: Sequence[float], color: Color) -> None:
        plan.pave(ROAD, color, *(road.strip(x - 0.07, x + 0.07, *stretch) for x in xs for stretch in stretches))

    pave_lines((edges[0], edges[-1]), line)
    is_double = len(edges) > 3 or dice.chance(0.4)
    pave_lines((-0.16, 0.16) if is_double else (0.0,), (226, 180, 50) if dice.chance(0.3) else line)
    dash, gap = dice.choice(((3, 6), (3, 3), (4, 8)))
    starts = [z for z in range(-9, 110, dash + gap) if not road.crossing(z + dash / 2, dash / 2)]
    dashes = [road.strip(x - 0.07, x + 0.07, z, z + dash) for x in edges[1:-1] if x for z in starts]
    if dashes:
        plan.pave(ROAD, line, *dashes)
    if road.junction:
        z, half = road.junction[0] - road.junction[1] - 4.2, road.lane * 0.45
        ahead = [x for x, way in road.lanes if way > 0]
        plan.pave(ROAD, line, *(road.strip(x - half, x + half, z, z + 0.4) for x in ahead))
        for x in ahead:
            if dice.chance(0.5):
                head = [(x - 0.35, z - 3), (x + 0.35, z - 3), (x, z - 1.6)]
                plan.pave(ROAD, line, road.strip(x - 0.1, x + 0.1, z - 5, z - 3), head)


def add_crosswalks(plan: Plan, asphalt: Color, line: Color) -> None:
    """Add crosswalks at the junction, or one elsewhere."""
    dice, road = plan.dice, plan.road
    if road.junction and dice.chance(0.7):
        middle, half = road.junction
        plan.crosswalks = [middle - half - 1.9, middle + half + 1.9][: dice.randint(1, 2)]
    elif plan.setting != "highway" and dice.chance(0.3):
        plan.crosswalks = [dice.uniform(7, 24)]
    for z in plan.crosswalks:
        half, width = dice.uniform(1.3, 1.8), dice.uniform(0.42, 0.6)
        left, right = road.left + 0.3, road.right - 0.3
        plan.pave(CROSSWALK, asphalt, road.strip(left, right, z - half, z + half))
        count = int((right - left + width + 0.01) / (width * 2))
        stripes = (left + 2 * width * i for i in range(count))
        plan.pave(STRIPES, line, *(road.strip(x, x + width, z - half, z + half) for x in stripes))


def add_skyline(plan: Plan) -> None:
    """Add far hills, or the roofs of a city, to most plans in which one can see far."""
    dice, light, city = plan.dice, plan.light, plan.setting == "city"
    if light.weather not in ("clear", "cloudy") or light.time == "night" or dice.chance(0.15):
        return
    x, level = 0.0, dice.uniform(0.01, 0.05)
    while x < 1.3:
        plan.skyline.append((x, level))
        x += dice.uniform(0.03, 0.13)
        if city:
            plan.skyline.append((x, level))
            level = dice.uniform(0.01, 0.11)
        else:
            level = min(max(level + dice.uniform(-0.025, 0.025), 0.005), 0.11)

"""People and animals: flat jointed figures that turn to the camera."""

from .dice import PAINT, load
from .mesh import make_mesh
from .plan import Plan, Thing, billboard


# Phases of a stride whose status can be seen from the side. From the front, walking looks almost like standing.
STATUS = {0: "standing", 1: "walking", 2: "walking", 5: "walking"}


def make_pedestrian(plan: Plan, x: float, z: float) -> Thing:
    """A walking adult or child."""
    dice = plan.dice
    facing = dice.choice(("side", "side", "front", "back"))
    child = dice.chance(0.3)
    height = dice.uniform(0.55, 0.78) if child else dice.uniform(0.9, 1.1)
    umbrella = not child and dice.chance(0.6 if plan.light.weather == "rainy" else 0.08)
    stride = dice.randint(0, 5)
    outfit = dice.choice(load("scenes.yaml")["outfits"])
    tags = (facing, *outfit, *("umbrella",) * umbrella)
    mesh = make_mesh("pedestrian", "side" if facing == "side" else "front", *tags, pose=stride)
    width = height * dice.uniform(0.92, 1.2) * (1.12 if child else 1.0)
    scale = (dice.choice((-width, width)), height, 1.0)
    attributes = {"status": STATUS[stride]} if facing == "side" and stride in STATUS else {}
    traits = ("child",) * child + ("umbrella",) * umbrella
    palette = dice.palette("person")
    palette["leg"] = palette["skin" if "skirt" in outfit else "legs"]
    palette["sleeve"] = palette["top" if "sleeves" in outfit else "skin"]
    return billboard(plan, "pedestrian", mesh, palette, x, z, scale, attributes=attributes, traits=traits)


def make_rider(plan: Plan, cycle: Thing, facing: str) -> Thing:
    """The rider of a motorcycle or bicycle, in "side", "front" or "back" view."""
    dice, motor = plan.dice, cycle.category == "motorcycle"
    palette = dice.palette("person")
    helmet = motor or dice.chance(0.4)
    palette["extra"] = dice.vary(dice.choice(tuple(PAINT.values()))) if helmet else palette["hair"]
    mesh = make_mesh("rider", "side" if facing == "side" else "front", facing, pose=0 if motor else 1)
    traits = ("helmet",) * helmet
    return Thing("rider", (mesh,), palette, cycle.place, cycle.heading, cycle.scale, carried=True, traits=traits)


def make_animal(plan: Plan, x: float, z: float, kind: str) -> Thing:
    """An animal in side view."""
    dice = plan.dice
    height = dice.uniform(0.85, 1.1) * (1.25 if kind == "dog" else 1.0)
    width = height * dice.uniform(0.8, 1.0)
    mesh = make_mesh("animal", kind, pose=dice.randint(0, 2))
    return billboard(plan, kind, mesh, dice.palette(kind), x, z, (dice.choice((-width, width)), height, 1.0))


def place_pedestrian(plan: Plan, category: str) -> bool:
    """Try to place a pedestrian on a crosswalk, a sidewalk or the road."""
    dice, road = plan.dice, plan.road
    if plan.crosswalks and dice.chance(0.4):
        x, z = dice.uniform(road.left, road.right), dice.choice(plan.crosswalks) + dice.uniform(-1.2, 1.2)
    else:
        x, z = plan.beside(2.6, 13.0, on_road=0.2)
    return plan.put(make_pedestrian, (x, z, 0.3, 0.3))


def place_animal(plan: Plan, kind: str) -> bool:
    """Try to place an animal beside the road or on it."""
    nearest, span, half = (2.8, 7.0, 0.5) if kind == "dog" else (4.5, 13.0, 1.1)
    x, z = plan.beside(nearest, span, on_road=0.6)
    return plan.put(make_animal, (x, z, half, 0.3), kind)

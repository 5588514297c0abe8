"""People and animals: flat jointed figures that turn to the camera."""

import functools

from .dice import PAINT, load
from .plan import Plan, Thing, billboard
from .shapes import make_mesh
from .site import Site, Spot


# Phases of a stride whose status can be seen from the side. From the front, walking looks almost like standing.
STATUS = {0: "standing", 1: "walking", 2: "walking", 5: "walking"}


def make_pedestrian(plan: Plan, x: float, z: float) -> Thing:
    """A walking adult or child."""
    dice = plan.dice
    facing = dice.pick(("side", "side", "front", "back"))
    child = dice.chance(0.3)
    height = dice.uniform(0.55, 0.78) if child else dice.uniform(0.9, 1.1)
    umbrella = not child and dice.chance(0.6 if plan.light.weather == "rainy" else 0.08)
    stride = dice.integer(0, 5)
    tags = (facing, *dice.pick(load("scenes.yaml")["outfits"]), *("umbrella",) * umbrella)
    mesh = make_mesh("pedestrian", "side" if facing == "side" else "front", *tags, pose=stride)
    width = height * dice.uniform(0.92, 1.2) * (1.12 if child else 1.0)
    scale = (-width if dice.chance(0.5) else width, height, 1.0)
    attributes = {"status": STATUS[stride]} if facing == "side" and stride in STATUS else {}
    traits = ("child",) * child + ("umbrella",) * umbrella
    palette = dice.palette("person")
    return billboard(plan, "pedestrian", mesh, palette, x, z, scale, attributes=attributes, traits=traits)


def make_rider(plan: Plan, cycle: Thing, facing: str) -> Thing:
    """The rider of a motorcycle or bicycle, in "side", "front" or "back" view."""
    dice, motor = plan.dice, cycle.category == "motorcycle"
    palette = dice.palette("person")
    helmet = motor or dice.chance(0.4)
    palette["extra"] = dice.vary(dice.pick(tuple(PAINT.values()))) if helmet else palette["hair"]
    mesh = make_mesh("rider", "side" if facing == "side" else "front", facing, pose=0 if motor else 1)
    traits = ("helmet",) * helmet
    return Thing("rider", (mesh,), palette, cycle.place, cycle.heading, cycle.scale, carried=True, traits=traits)


def make_animal(plan: Plan, x: float, z: float, kind: str) -> Thing:
    """An animal in side view."""
    dice = plan.dice
    grow = dice.uniform(0.85, 1.1) * (1.25 if kind == "dog" else 1.0)
    mirror = -1.0 if dice.chance(0.5) else 1.0
    scale = (mirror * grow * dice.uniform(0.8, 1.0), grow, 1.0)
    mesh = make_mesh("animal", kind, pose=dice.integer(0, 2))
    return billboard(plan, kind, mesh, dice.palette(kind), x, z, scale)


def place_pedestrians(site: Site) -> None:
    """Place pedestrians on sidewalks, crosswalks and the road."""
    for _ in range(site.number("pedestrian")):
        site.place(functools.partial(_walk, site), make_pedestrian)


def _walk(site: Site) -> tuple[Spot]:
    """A spot for a pedestrian, as a tuple of one."""
    dice, road = site.dice, site.road
    choice = dice.random()
    if site.crosswalks and choice < 0.4:
        x, z = dice.uniform(road.left, road.right), dice.pick(site.crosswalks) + dice.uniform(-1.2, 1.2)
    else:
        x, z = site.beside(2.6, 13.0, 0.2, choice)
    return (Spot(x, z, 0.3, 0.3),)


def place_animals(site: Site) -> None:
    """Place animals beside the road and on it."""
    for kind in load("shapes")["animal"]:
        count = site.number(kind)
        if kind != "dog" and site.plan.setting in ("city", "highway") and site.dice.chance(0.6):
            continue
        for _ in range(count):
            site.place(functools.partial(_graze, site, kind), make_animal)


def _graze(site: Site, kind: str) -> tuple[Spot, str]:
    """A spot for an animal, and its kind."""
    near, span, half = (2.8, 7.0, 0.5) if kind == "dog" else (4.5, 13.0, 1.1)
    x, z = site.beside(near, span, 0.6)
    return Spot(x, z, half, 0.3), kind

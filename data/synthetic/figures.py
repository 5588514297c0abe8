"""People and animals: flat jointed figures, x to their front in side views."""

from .dice import Dice
from .light import PAINT, Color, colors, vary
from .plan import Plan, Thing
from .shapes import load_shapes, make_mesh


CLOTHES = colors(
    "282c36 46484e c8c8c4 962226 264282 3c6446 be963c 785078 de783c 604632 7896b4 1e1e20 e6e2d6 d65a78 5a5e3c 2c6e78"
)
TROUSERS = colors("282e42 3a4664 1e1e22 5a544a 82745c 424244")
SKINS = colors("eec8ac deb292 b07e5c 865c42 5c3e2e")
HAIRS = colors("221c1a 463022 785632 bea064 969696")
SHOES = colors("1e1c1c dcdad6 5a3c28")
ANIMALS = ("dog", "cow", "horse", "deer")
OUTFITS = tuple(
    ("skirt",) * (i % 4 == 3) + ("bag",) * (i % 3 == 1) + ("hat",) * (i % 5 == 4) + ("sleeves",) * (i % 2)
    for i in range(10)
)


def _person_palette(dice: Dice) -> dict[str, Color]:
    top = vary(dice, dice.pick(CLOTHES))
    legs = vary(dice, dice.pick(TROUSERS + CLOTHES[:6]))
    skin, hair, shoes, extra = (dice.pick(colors) for colors in (SKINS, HAIRS, SHOES, CLOTHES))
    return {"top": top, "legs": legs, "skin": skin, "hair": hair, "shoes": shoes, "extra": extra}


def make_pedestrian(plan: Plan, x: float, z: float) -> Thing:
    """A walking adult or child, always flat towards the camera."""
    dice = plan.dice
    facing = dice.pick(("side", "side", "front", "back"))
    child = dice.chance(0.3)
    height = dice.uniform(0.55, 0.78) if child else dice.uniform(0.9, 1.1)
    umbrella = not child and dice.chance(0.6 if plan.light.weather == "rainy" else 0.08)
    stride = dice.integer(0, 5)
    outfit = OUTFITS[dice.integer(0, 9)] + ("umbrella",) * umbrella
    mesh = make_mesh("pedestrian", "side" if facing == "side" else "front", facing, *outfit, pose=stride)
    width = height * dice.uniform(0.92, 1.2) * (1.12 if child else 1.0)
    scale = (-width if dice.chance(0.5) else width, height, 1.0)
    # From the front, hardly anything tells a stride from standing.
    status = {0: "standing", 1: "walking", 2: "walking", 5: "walking"}.get(stride) if facing == "side" else None
    attributes = {"status": status} if status else {}
    traits = ("child",) * child + ("umbrella",) * umbrella
    place, sight = (x, 0.0, z), plan.camera.bearing(x, z)
    return Thing("pedestrian", (mesh,), _person_palette(dice), place, sight, scale, (), attributes, traits=traits)


def make_rider(plan: Plan, cycle: Thing, facing: str, motor: bool) -> Thing:
    """The rider of a motorcycle or bicycle."""
    palette = _person_palette(plan.dice)
    palette["extra"] = palette["hair"]
    helmet = motor or plan.dice.chance(0.4)
    if helmet:
        palette["extra"] = vary(plan.dice, plan.dice.pick(tuple(PAINT.values())))
    mesh = make_mesh("rider", "side" if facing == "side" else "front", facing, pose=0 if motor else 1)
    traits = ("helmet",) * helmet
    return Thing("rider", (mesh,), palette, cycle.place, cycle.heading, cycle.scale, carried=True, traits=traits)


def make_animal(plan: Plan, kind: str, x: float, z: float) -> Thing:
    """An animal in side view."""
    dice = plan.dice
    grow = dice.uniform(0.85, 1.1) * (1.25 if kind == "dog" else 1.0)
    mirror = -1.0 if dice.chance(0.5) else 1.0
    scale = (mirror * grow * dice.uniform(0.8, 1.0), grow, 1.0)
    mesh = make_mesh("animal", kind, pose=dice.integer(0, 2))
    palette = dict(zip(("coat", "mark", "dark"), colors(dice.pick(load_shapes()["animal"][kind]["coats"]))))
    return Thing(kind, (mesh,), palette, (x, 0.0, z), plan.camera.bearing(x, z), scale)

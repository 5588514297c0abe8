"""People and animals: flat jointed figures, x to their front in side views."""

import functools

from .dice import Dice
from .geometry import Builder, Mesh, Point2, circle
from .light import PAINT, Color, colors, vary
from .plan import Plan, Thing


CLOTHES = colors(
    "282c36 46484e c8c8c4 962226 264282 3c6446 be963c 785078 de783c 604632 7896b4 1e1e20 e6e2d6 d65a78 5a5e3c 2c6e78"
)
TROUSERS = colors("282e42 3a4664 1e1e22 5a544a 82745c 424244")
SKINS = colors("eec8ac deb292 b07e5c 865c42 5c3e2e")
HAIRS = colors("221c1a 463022 785632 bea064 969696")
SHOES = colors("1e1c1c dcdad6 5a3c28")
# colors of coat, marks and dark parts
COATS = {
    "dog": "96683c 6e4828 1e1a18, 2e2a28 5a422e 141212, e2d8c8 b48c64 1e1a18, c4a068 967042 241c18",
    "cow": "e8e4dc d6a896 282424, 8c5432 c49678 683c24, e2dcd0 cea08c 824a2c, 3c3430 967868 282220",
    "horse": "844e2c 683c22 241c1a, 422e24 30221c 181414, dedad2 b4aea8 96928e, b0743c 8c5a2e d6be96",
    "deer": "a47042 dec8aa 342822, 8a603e ceb89a 2c2420",
}


def _cap(b: Builder, x: float, y: float, radius: float, color: str) -> None:
    """The upper half of a head: hair or a helmet."""
    b.flat([(x + radius * s, y + 0.03 + radius * 0.92 * max(c, -0.15)) for s, c in circle(14)], color)


@functools.cache
def pedestrian(facing: str, stride: int, variant: int, umbrella: bool = False) -> Mesh:
    """A person of 1.75 m in "side", "front" or "back" view.

    Args:
        facing: the view.
        stride: phase of the walk, 0..5.
        variant: kind of clothes, 0..9.
        umbrella: whether the person carries one.
    """
    b = Builder()
    side = facing == "side"
    swing = (0.0, 0.14, 0.24, 0.05, -0.1, -0.2)[stride]
    skirt, bag = variant % 4 == 3, variant % 3 == 1
    if side:
        feet = ((-swing * 1.3, 0.06), (swing * 1.3, 0.06))
        knees = ((-swing * 0.3 + 0.05, 0.5), (swing * 0.8 + 0.03, 0.5))
        hands = ((swing * 1.1, 0.92), (-swing * 1.1 + 0.05, 0.92))
        hips, shoulders, width = ((0.0, 0.92), (0.0, 0.92)), ((0.0, 1.38), (0.0, 1.38)), 0.13
    else:
        lift = abs(swing) * 0.25
        feet = ((-0.1, 0.05 + (lift if swing > 0 else 0)), (0.1, 0.05 + (lift if swing < 0 else 0)))
        knees, hands = ((-0.11, 0.5), (0.11, 0.5)), ((-0.29, 0.86), (0.29, 0.86))
        hips, shoulders, width = ((-0.09, 0.92), (0.09, 0.92)), ((-0.2, 1.38), (0.2, 1.38)), 0.22
    if bag and side:
        b.flat([(-0.12, 1.38), (-0.3, 1.34), (-0.32, 1.0), (-0.12, 0.98)], "extra")
    _arm(b, shoulders[0], hands[0], bool(variant % 2))
    for hip, knee, foot in zip(hips, knees, feet):
        b.limb(hip, knee, "skin" if skirt else "legs", 0.19, 0.14)
        b.limb(knee, foot, "skin" if skirt else "legs", 0.14, 0.09)
        b.limb((foot[0] - 0.03, foot[1]), (foot[0] + (0.14 if side else 0.02), foot[1] - 0.02), "shoes", 0.1, 0.07)
    half = [(0.8, 0.88), (0.85, 1.05), (1.0, 1.4), (0.5, 1.5)]
    torso = [(-x * width, y) for x, y in half] + [(x * width, y) for x, y in reversed(half)]
    b.flat(torso, "top")
    if skirt:
        b.flat([(-width * 0.8, 1.02), (width * 0.8, 1.02), (width * 1.25, 0.55), (-width * 1.25, 0.55)], "legs")
    _arm(b, shoulders[1], hands[1], bool(variant % 2))
    if bag and facing == "back":
        b.flat([(-0.16, 1.42), (0.16, 1.42), (0.17, 1.02), (-0.17, 1.02)], "extra")
    elif bag and not side:
        b.limb((-0.17, 1.44), (0.18, 0.98), "extra", 0.05)
    _head(b, 0.03 if side else 0.0, 1.63, facing, variant)
    if umbrella:
        b.limb((0.2, 1.1), (0.2, 2.0), "shoes", 0.03)
        b.flat([(-0.35, 1.86), (-0.18, 2.05), (0.2, 2.16), (0.58, 2.05), (0.75, 1.86), (0.2, 1.92)], "extra")
    return b.build()


def _arm(b: Builder, shoulder: Point2, hand: Point2, long_sleeve: bool) -> None:
    elbow = (shoulder[0] * 0.83 + hand[0] * 0.3, 1.12)
    b.limb(shoulder, elbow, "top", 0.12, 0.1)
    b.limb(elbow, hand, "top" if long_sleeve else "skin", 0.09, 0.07)
    b.disc(*hand, 0.045, "skin", 8)


def _head(b: Builder, x: float, y: float, facing: str, variant: int) -> None:
    b.limb((x, y - 0.2), (x, y - 0.05), "skin", 0.1)
    b.disc(x, y, 0.115, "skin")
    if facing == "back":
        b.disc(x, y + 0.02, 0.118, "hair")
    else:
        _cap(b, x - 0.03 * (facing == "side"), y, 0.122, "hair")
        if facing == "side":
            b.flat([(x - 0.12, y + 0.06), (x - 0.02, y + 0.08), (x - 0.04, y - 0.08), (x - 0.11, y - 0.06)], "hair")
    if variant % 4 == 3 and facing != "side":  # long hair
        for side in (-1, 1):
            b.limb((x + side * 0.1, y + 0.02), (x + side * 0.115, y - 0.2), "hair", 0.05)
    if variant % 5 == 4:  # hat
        b.limb((x - 0.15, y + 0.07), (x + 0.17, y + 0.07), "extra", 0.04)
        b.flat([(x - 0.11, y + 0.07), (x + 0.11, y + 0.07), (x + 0.09, y + 0.17), (x - 0.09, y + 0.17)], "extra")


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
    mesh = pedestrian(facing, stride, dice.integer(0, 9), umbrella)
    width = height * dice.uniform(0.92, 1.2) * (1.12 if child else 1.0)
    scale = (-width if dice.chance(0.5) else width, height, 1.0)
    # From the front, hardly anything tells a stride from standing.
    status = {0: "standing", 1: "walking", 2: "walking", 5: "walking"}.get(stride) if facing == "side" else None
    attributes = {"status": status} if status else {}
    traits = ("child",) * child + ("umbrella",) * umbrella
    place, sight = (x, 0.0, z), plan.camera.bearing(x, z)
    return Thing("pedestrian", (mesh,), _person_palette(dice), place, sight, scale, (), attributes, traits=traits)


@functools.cache
def rider(facing: str, motor: bool) -> Mesh:
    """A person who sits on a motorcycle or bicycle, in "side", "front" or "back" view."""
    b = Builder()
    seat = 0.82 if motor else 0.92
    if facing == "side":
        hip, shoulder, hand = (-0.2, seat), (0.0 if motor else 0.05, seat + 0.52), (0.4, seat + 0.2)
        knee, foot = ((0.18, seat - 0.1), (0.05, 0.32)) if motor else ((0.12, seat - 0.28), (0.0, 0.26))
        elbow = ((shoulder[0] + hand[0]) / 2, (shoulder[1] + hand[1]) / 2 - 0.1)
        b.limb(hip, knee, "legs", 0.2, 0.15)
        b.limb(knee, foot, "legs", 0.14, 0.1)
        b.limb(foot, (foot[0] + 0.15, foot[1] - 0.03), "shoes", 0.09, 0.06)
        b.limb(hip, shoulder, "top", 0.28, 0.26)
        b.limb(shoulder, elbow, "top", 0.12, 0.1)
        b.limb(elbow, hand, "top", 0.1, 0.07)
        x, y = shoulder[0] + 0.07, shoulder[1] + 0.24
    else:
        for side in (-1, 1):
            b.limb((side * 0.1, seat), (side * 0.24, seat - 0.18), "legs", 0.18, 0.15)
            b.limb((side * 0.24, seat - 0.18), (side * 0.2, 0.35), "legs", 0.14, 0.1)
            b.limb((side * 0.2, 0.34), (side * 0.22, 0.27), "shoes", 0.1, 0.09)
            b.limb((side * 0.2, seat + 0.5), (side * 0.34, seat + 0.28), "top", 0.13, 0.11)
        half = [(0.17, seat - 0.04), (0.24, seat + 0.5), (0.1, seat + 0.6)]
        b.flat([(-x, y) for x, y in half] + list(reversed(half)), "top")
        x, y = 0.0, seat + 0.76
    b.limb((x, y - 0.18), (x, y), "skin", 0.1)
    b.disc(x, y, 0.115, "skin")
    if not motor and facing != "back":
        _cap(b, x, y, 0.13, "extra")
        return b.build()
    b.disc(x, y + 0.02, 0.15 if motor else 0.125, "extra")
    if motor and facing != "back":  # visor
        left, right = (-0.1, 0.1) if facing == "front" else (0.03, 0.14)
        b.flat([(x + left, y - 0.04), (x + right, y - 0.04), (x + right, y + 0.07), (x + left, y + 0.07)], "shoes")
    return b.build()


def make_rider(plan: Plan, cycle: Thing, facing: str, motor: bool) -> Thing:
    """The rider of a motorcycle or bicycle."""
    palette = _person_palette(plan.dice)
    palette["extra"] = palette["hair"]
    helmet = motor or plan.dice.chance(0.4)
    if helmet:
        palette["extra"] = vary(plan.dice, plan.dice.pick(tuple(PAINT.values())))
    mesh, traits = rider(facing, motor), ("helmet",) * helmet
    return Thing("rider", (mesh,), palette, cycle.place, cycle.heading, cycle.scale, carried=True, traits=traits)


@functools.cache
def animal(kind: str, pose: int) -> Mesh:
    """A dog of 0.6 m, cow of 1.5 m, horse of 2.1 m or deer of 1.6 m in side view; pose 0..2."""
    b = Builder()
    ANIMALS[kind](b, (0.03, 0.12, 0.2)[pose], pose)
    return b.build()


def _legs(b: Builder, xs: tuple[float, float, float, float], top: float, widths: Point2, swing: float) -> None:
    """Two far legs and two near ones, from their x at the body; the far pair has another color."""
    for x, way, color in zip(xs, (1, -1, -1, 1), ("mark", "mark", "coat", "coat")):
        knee, foot = (x + way * swing * 0.4, top * 0.5), (x + way * swing, 0.04)
        b.limb((x, top), knee, color, *widths)
        b.limb(knee, foot, color, widths[1], widths[1] * 0.8)
        b.limb(foot, (foot[0] + 0.04, 0.03), "dark", widths[1], widths[1] * 0.8)


def _dog(b: Builder, swing: float, pose: int) -> None:
    _legs(b, (-0.26, 0.24, -0.3, 0.28), 0.36, (0.12, 0.07), swing * 0.7)
    b.limb((-0.36, 0.46), (-0.6, 0.62) if pose == 1 else (-0.58, 0.3), "coat", 0.08, 0.03)
    b.flat([(-0.38, 0.36), (-0.3, 0.28), (0.1, 0.26), (0.32, 0.3), (0.36, 0.44), (0.28, 0.52), (-0.32, 0.5)], "coat")
    b.limb((0.28, 0.42), (0.44, 0.6), "coat", 0.22, 0.16)
    b.disc(0.46, 0.62, 0.11, "coat")
    b.limb((0.48, 0.6), (0.64, 0.56), "coat", 0.13, 0.08)
    b.disc(0.66, 0.57, 0.025, "dark", 8)
    b.flat([(0.36, 0.7), (0.44, 0.7), (0.4, 0.5), (0.34, 0.54)], "mark")


def _cow(b: Builder, swing: float, pose: int) -> None:
    _legs(b, (-0.62, 0.5, -0.72, 0.6), 0.72, (0.24, 0.13), swing)
    b.limb((-0.92, 1.2), (-1.0, 0.55), "coat", 0.06, 0.04)
    b.disc(-1.0, 0.52, 0.07, "dark", 8)
    back, belly = [(0.82, 1.1), (0.7, 1.36), (-0.85, 1.38), (-0.95, 1.1)], [(-0.88, 0.75), (-0.5, 0.62), (0.3, 0.58)]
    b.flat([*back, *belly, (0.7, 0.72)], "coat")
    b.disc(-0.45, 0.64, 0.12, "dark" if pose == 2 else "mark", 8)
    b.flat([(-0.5, 1.37), (-0.1, 1.37), (0.0, 1.05), (-0.25, 0.9), (-0.55, 1.05)], "dark")
    b.flat([(0.3, 1.36), (0.6, 1.36), (0.62, 1.1), (0.4, 1.0)], "dark")
    y = 0.84 if pose == 1 else 1.34  # grazing or not
    b.limb((0.66, 1.2), (0.98, y), "coat", 0.46, 0.3)
    b.limb((0.98, y + 0.06), (1.3, y - 0.14), "coat", 0.3, 0.2)
    b.disc(1.32, y - 0.16, 0.11, "mark", 8)
    b.limb((0.92, y + 0.12), (0.78, y + 0.1), "dark", 0.1, 0.05)
    b.limb((0.98, y + 0.18), (1.06, y + 0.32), "mark", 0.06, 0.03)
    b.disc(1.08, y + 0.06, 0.03, "dark", 6)


def _horse(b: Builder, swing: float, pose: int) -> None:
    _legs(b, (-0.6, 0.46, -0.68, 0.54), 0.95, (0.26, 0.11), swing * 1.5)
    b.limb((-0.82, 1.42), (-1.06, 1.2), "dark", 0.12, 0.18)
    b.limb((-1.06, 1.2), (-1.04, 0.7), "dark", 0.18, 0.08)
    back, belly = [(0.7, 1.3), (0.5, 1.52), (-0.7, 1.52), (-0.86, 1.3)], [(-0.8, 1.0), (-0.4, 0.9), (0.3, 0.86)]
    b.flat([*back, *belly, (0.62, 1.0)], "coat")
    y = 1.7 if pose == 2 else 1.95
    b.limb((0.5, 1.3), (0.92, y), "coat", 0.52, 0.26)
    b.limb((0.36, 1.52), (0.82, y + 0.08), "dark", 0.14, 0.12)
    b.limb((0.88, y + 0.02), (1.28, y - 0.3), "coat", 0.28, 0.17)
    b.flat([(0.84, y + 0.1), (0.94, y + 0.08), (0.88, y + 0.24)], "coat")
    b.disc(1.3, y - 0.32, 0.08, "mark", 8)
    b.disc(1.0, y, 0.03, "dark", 6)


def _deer(b: Builder, swing: float, pose: int) -> None:
    _legs(b, (-0.46, 0.36, -0.52, 0.42), 0.72, (0.16, 0.06), swing * 1.2)
    back, belly = [(0.52, 1.0), (0.36, 1.1), (-0.5, 1.1), (-0.66, 1.02)], [(-0.58, 0.74), (-0.2, 0.68), (0.3, 0.66)]
    b.flat([*back, *belly, (0.5, 0.8)], "coat")
    b.limb((-0.64, 1.0), (-0.74, 0.92), "mark", 0.14, 0.1)
    b.limb((0.4, 0.95), (0.64, 1.4), "coat", 0.32, 0.16)
    b.limb((0.6, 1.44), (0.9, 1.32), "coat", 0.2, 0.11)
    b.disc(0.92, 1.32, 0.035, "dark", 8)
    b.flat([(0.56, 1.48), (0.62, 1.42), (0.42, 1.56)], "coat")
    b.limb((-0.1, 0.7), (0.3, 0.68), "mark", 0.08)
    if pose != 1:  # antlers
        for lean in (-0.16, 0.12):
            fork = (0.5 + lean, 1.72)
            b.limb((0.6, 1.5), fork, "mark", 0.05, 0.04)
            b.limb(fork, (0.58 + lean, 1.98), "mark", 0.04, 0.03)
            b.limb(fork, (0.68 + lean, 1.82), "mark", 0.04, 0.03)


ANIMALS = {"dog": _dog, "cow": _cow, "horse": _horse, "deer": _deer}


def make_animal(plan: Plan, kind: str, x: float, z: float) -> Thing:
    """An animal in side view."""
    dice = plan.dice
    grow = dice.uniform(0.85, 1.1) * (1.25 if kind == "dog" else 1.0)
    mirror = -1.0 if dice.chance(0.5) else 1.0
    scale = (mirror * grow * dice.uniform(0.8, 1.0), grow, 1.0)
    mesh = animal(kind, dice.integer(0, 2))
    palette = dict(zip(("coat", "mark", "dark"), colors(dice.pick(COATS[kind].split(", ")))))
    return Thing(kind, (mesh,), palette, (x, 0.0, z), plan.camera.bearing(x, z), scale)

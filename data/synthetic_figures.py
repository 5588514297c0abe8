"""People and animals of the synthetic scenes: flat jointed figures, x to their front in side views."""

import functools

from .synthetic_mesh import Builder, Mesh, circle


# Slots of a person's palette.
SKIN, HAIR, TOP, LEGS, SHOES, EXTRA = range(6)
# Slots of an animal's palette.
COAT, MARK, DARK = range(3)

ANIMALS = ("dog", "cow", "horse", "deer")
Place = tuple[float, float]


def _head(b: Builder, x: float, y: float, facing: str, variant: int) -> None:
    """Head, hair and sometimes a hat; `facing` is "side", "front" or "back"."""
    b.limb((x, y - 0.2), (x, y - 0.05), SKIN, (0.1, 0.1))
    b.disc(x, y, 0.115, SKIN, 12)
    if facing == "back":
        b.disc(x, y + 0.02, 0.118, HAIR, 12)
    else:
        shift = -0.03 if facing == "side" else 0.0
        b.flat([(x + shift + 0.122 * s, y + 0.03 + 0.112 * max(c, -0.15)) for s, c in circle(14)], HAIR)
        if facing == "side":
            b.flat([(x - 0.12, y + 0.06), (x - 0.02, y + 0.08), (x - 0.04, y - 0.08), (x - 0.11, y - 0.06)], HAIR)
    if variant % 4 == 3 and facing != "side":  # long hair
        b.flat([(x - 0.12, y + 0.02), (x - 0.08, y + 0.02), (x - 0.09, y - 0.2), (x - 0.14, y - 0.2)], HAIR)
        b.flat([(x + 0.12, y + 0.02), (x + 0.08, y + 0.02), (x + 0.09, y - 0.2), (x + 0.14, y - 0.2)], HAIR)
    if variant % 5 == 4:  # hat
        b.limb((x - 0.15, y + 0.07), (x + 0.17, y + 0.07), EXTRA, (0.04, 0.04))
        b.flat([(x - 0.11, y + 0.07), (x + 0.11, y + 0.07), (x + 0.09, y + 0.17), (x - 0.09, y + 0.17)], EXTRA)


def _umbrella(b: Builder, x: float) -> None:
    b.limb((x, 1.1), (x, 2.0), SHOES, (0.025, 0.025))
    b.flat([(x - 0.55, 1.86), (x - 0.38, 2.05), (x, 2.16), (x + 0.38, 2.05), (x + 0.55, 1.86), (x, 1.92)], EXTRA)


@functools.cache
def pedestrian(facing: str, stride: int, variant: int, umbrella: bool = False) -> Mesh:
    """A person of 1.75 m; `stride` 0..5 is the phase of the walk, `variant` 0..9 the kind of clothes."""
    b = Builder()
    swing = (0.0, 0.14, 0.24, 0.05, -0.1, -0.2)[stride % 6]
    skirt, bag = variant % 4 == 3, variant % 3 == 1
    hip, shoulder = 0.92, 1.44
    if facing == "side":
        feet = ((-swing * 1.3, 0.06), (swing * 1.3, 0.06))
        knees = ((-swing * 0.3 + 0.05, 0.5), (swing * 0.8 + 0.03, 0.5))
        hands = ((swing * 1.1, 0.92), (-swing * 1.1 + 0.05, 0.92))
        hips, shoulders, wide = ((0.0, hip), (0.0, hip)), ((0.0, 1.38), (0.0, 1.38)), 0.13
    else:
        lift = abs(swing) * 0.25
        feet = ((-0.1, 0.05 + (lift if swing > 0 else 0)), (0.1, 0.05 + (lift if swing < 0 else 0)))
        knees = ((-0.11, 0.5), (0.11, 0.5))
        hands = ((-0.29, 0.86), (0.29, 0.86))
        hips, shoulders, wide = ((-0.09, hip), (0.09, hip)), ((-0.2, 1.38), (0.2, 1.38)), 0.22
    if bag and facing == "side":
        b.flat([(-0.12, 1.38), (-0.3, 1.34), (-0.32, 1.0), (-0.12, 0.98)], EXTRA)

    def arm(i: int) -> None:
        elbow = ((shoulders[i][0] * 1.25 + hands[i][0] * 0.45) / 1.5, 1.12)
        b.limb(shoulders[i], elbow, TOP, (0.12, 0.1))
        b.limb(elbow, hands[i], TOP if variant % 2 else SKIN, (0.09, 0.07))
        b.disc(hands[i][0], hands[i][1], 0.045, SKIN, 8, 8)

    arm(0)
    for i in (0, 1):
        b.limb(hips[i], knees[i], SKIN if skirt else LEGS, (0.19, 0.14))
        b.limb(knees[i], feet[i], SKIN if skirt else LEGS, (0.14, 0.09))
        toe = 0.14 if facing == "side" else 0.02
        b.limb((feet[i][0] - 0.03, feet[i][1] - 0.01), (feet[i][0] + toe, feet[i][1] - 0.02), SHOES, (0.1, 0.07))
    b.flat([(-wide * 0.8, 0.88), (wide * 0.8, 0.88), (wide * 0.85, 1.05), (wide, shoulder - 0.04), (wide * 0.5, 1.5),
            (-wide * 0.5, 1.5), (-wide, shoulder - 0.04), (-wide * 0.85, 1.05)], TOP)  # fmt: skip
    if skirt:
        b.flat([(-wide * 0.8, 1.02), (wide * 0.8, 1.02), (wide * 1.25, 0.55), (-wide * 1.25, 0.55)], LEGS)
    if facing == "side":
        arm(1)
    else:
        arm(1)
        if bag and facing == "back":
            b.flat([(-0.16, 1.42), (0.16, 1.42), (0.17, 1.02), (-0.17, 1.02)], EXTRA)
        elif bag:
            b.limb((-0.17, 1.44), (0.18, 0.98), EXTRA, (0.05, 0.05))
    _head(b, 0.03 if facing == "side" else 0.0, 1.63, facing, variant)
    if umbrella:
        _umbrella(b, 0.2)
    return b.build()


@functools.cache
def rider(side_view: bool, facing: str, motor: bool) -> Mesh:
    """Somebody sitting on a motorcycle or bicycle (slot EXTRA is the helmet)."""
    b = Builder()
    seat = 0.82 if motor else 0.92
    if side_view:
        hip, shoulder, hand = (-0.2, seat), (0.0 if motor else 0.05, seat + 0.52), (0.4, seat + 0.2)
        knee = (0.18, seat - 0.1) if motor else (0.12, seat - 0.28)
        foot = (0.05, 0.32) if motor else (0.0, 0.26)
        b.limb(hip, knee, LEGS, (0.2, 0.15))
        b.limb(knee, foot, LEGS, (0.14, 0.1))
        b.limb(foot, (foot[0] + 0.15, foot[1] - 0.03), SHOES, (0.09, 0.06))
        b.limb(hip, shoulder, TOP, (0.28, 0.26))
        elbow = ((shoulder[0] + hand[0]) / 2, (shoulder[1] + hand[1]) / 2 - 0.1)
        b.limb(shoulder, elbow, TOP, (0.12, 0.1))
        b.limb(elbow, hand, TOP, (0.1, 0.07))
        x, y = shoulder[0] + 0.07, shoulder[1] + 0.24
    else:
        for side in (-1.0, 1.0):
            b.limb((side * 0.1, seat), (side * 0.24, seat - 0.18), LEGS, (0.18, 0.15))
            b.limb((side * 0.24, seat - 0.18), (side * 0.2, 0.35), LEGS, (0.14, 0.1))
            b.limb((side * 0.2, 0.34), (side * 0.22, 0.27), SHOES, (0.1, 0.09))
            b.limb((side * 0.2, seat + 0.5), (side * 0.34, seat + 0.28), TOP, (0.13, 0.11))
        b.flat([(-0.17, seat - 0.04), (0.17, seat - 0.04), (0.24, seat + 0.5), (0.1, seat + 0.6), (-0.1, seat + 0.6),
                (-0.24, seat + 0.5)], TOP)  # fmt: skip
        x, y = 0.0, seat + 0.76
    b.limb((x, y - 0.18), (x, y), SKIN, (0.1, 0.1))
    b.disc(x, y, 0.115, SKIN, 12)
    if motor or facing == "back":
        b.disc(x, y + 0.02, 0.15 if motor else 0.125, EXTRA, 12)
        if motor and facing == "front":
            b.flat([(-0.1, y - 0.04), (0.1, y - 0.04), (0.11, y + 0.07), (-0.11, y + 0.07)], SHOES, 8)
        elif motor and side_view:
            b.flat([(x + 0.03, y - 0.04), (x + 0.14, y - 0.04), (x + 0.14, y + 0.07), (x + 0.03, y + 0.07)], SHOES, 8)
    else:
        b.flat([(x + 0.13 * s, y + 0.03 + 0.12 * max(c, -0.15)) for s, c in circle(14)], EXTRA)
    return b.build()


def _legs(b: Builder, places: tuple[Place, ...], top: float, widths: Place, swing: float) -> None:
    """Four legs: (x at the body, which way it swings); the far pair is painted dark."""
    for index, (x, way) in enumerate(places):
        slot = MARK if index < 2 else COAT
        knee, foot = (x + way * swing * 0.4, top * 0.5), (x + way * swing, 0.04)
        b.limb((x, top), knee, slot, (widths[0], widths[1]))
        b.limb(knee, foot, slot, (widths[1], widths[1] * 0.8))
        b.limb(foot, (foot[0] + 0.04, 0.03), DARK, (widths[1], widths[1] * 0.8), 6)


@functools.cache
def animal(kind: str, pose: int) -> Mesh:
    """A dog of 0.6 m, cow of 1.5 m, horse of 2.1 m or deer of 1.6 m from its side; pose 0..2."""
    b = Builder()
    swing = (0.03, 0.12, 0.2)[pose % 3]
    {"dog": _dog, "cow": _cow, "horse": _horse, "deer": _deer}[kind](b, swing, pose)
    return b.build()


def _dog(b: Builder, swing: float, pose: int) -> None:
    _legs(b, ((-0.26, 1), (0.24, -1), (-0.3, -1), (0.28, 1)), 0.36, (0.12, 0.07), swing * 0.7)
    tail = (-0.6, 0.62) if pose % 2 else (-0.58, 0.3)
    b.limb((-0.36, 0.46), tail, COAT, (0.08, 0.03))
    b.flat([(-0.38, 0.36), (-0.3, 0.28), (0.1, 0.26), (0.32, 0.3), (0.36, 0.44), (0.28, 0.52), (-0.32, 0.5)], COAT)
    b.limb((0.28, 0.42), (0.44, 0.6), COAT, (0.22, 0.16))
    b.disc(0.46, 0.62, 0.11, COAT, 10)
    b.limb((0.48, 0.6), (0.64, 0.56), COAT, (0.13, 0.08))
    b.disc(0.66, 0.57, 0.025, DARK, 8)
    b.flat([(0.36, 0.7), (0.44, 0.7), (0.4, 0.5), (0.34, 0.54)], MARK)
    b.disc(0.5, 0.64, 0.018, DARK, 6, 20)


def _cow(b: Builder, swing: float, pose: int) -> None:
    _legs(b, ((-0.62, 1), (0.5, -1), (-0.72, -1), (0.6, 1)), 0.72, (0.24, 0.13), swing)
    b.limb((-0.92, 1.2), (-1.0, 0.55), COAT, (0.06, 0.04))
    b.disc(-1.0, 0.52, 0.07, DARK, 8)
    b.flat(
        [(-0.95, 1.1), (-0.88, 0.75), (-0.5, 0.62), (0.3, 0.58), (0.7, 0.72), (0.82, 1.1), (0.7, 1.36), (-0.85, 1.38)],
        COAT,
    )
    b.disc(-0.45, 0.64, 0.12, DARK if pose == 2 else MARK, 8)
    b.flat([(-0.5, 1.37), (-0.1, 1.37), (0.0, 1.05), (-0.25, 0.9), (-0.55, 1.05)], DARK)
    b.flat([(0.3, 1.36), (0.6, 1.36), (0.62, 1.1), (0.4, 1.0)], DARK)
    drop = 0.5 if pose == 1 else 0.0  # grazing
    b.limb((0.66, 1.2), (0.98, 1.34 - drop), COAT, (0.46, 0.3))
    b.limb((0.98, 1.4 - drop), (1.3, 1.2 - drop), COAT, (0.3, 0.2))
    b.disc(1.32, 1.18 - drop, 0.11, MARK, 8)
    b.limb((0.92, 1.46 - drop), (0.78, 1.44 - drop), DARK, (0.1, 0.05))
    b.limb((0.98, 1.52 - drop), (1.06, 1.66 - drop), MARK, (0.06, 0.03))
    b.disc(1.08, 1.4 - drop, 0.03, DARK, 6, 12)


def _horse(b: Builder, swing: float, pose: int) -> None:
    _legs(b, ((-0.6, 1), (0.46, -1), (-0.68, -1), (0.54, 1)), 0.95, (0.26, 0.11), swing * 1.5)
    b.limb((-0.82, 1.42), (-1.06, 1.2), DARK, (0.12, 0.18))
    b.limb((-1.06, 1.2), (-1.04, 0.7), DARK, (0.18, 0.08))
    b.flat([(-0.86, 1.3), (-0.8, 1.0), (-0.4, 0.9), (0.3, 0.86), (0.62, 1.0), (0.7, 1.3), (0.5, 1.52), (-0.2, 1.44),
            (-0.7, 1.52)], COAT)  # fmt: skip
    head = 1.95 if pose < 2 else 1.7
    b.limb((0.5, 1.3), (0.92, head), COAT, (0.52, 0.26))
    b.limb((0.36, 1.52), (0.82, head + 0.08), DARK, (0.14, 0.12))
    b.limb((0.88, head + 0.02), (1.28, head - 0.3), COAT, (0.28, 0.17))
    b.flat([(0.84, head + 0.1), (0.94, head + 0.08), (0.88, head + 0.24)], COAT)
    b.disc(1.3, head - 0.32, 0.08, MARK, 8)
    b.disc(1.0, head, 0.03, DARK, 6, 12)


def _deer(b: Builder, swing: float, pose: int) -> None:
    _legs(b, ((-0.46, 1), (0.36, -1), (-0.52, -1), (0.42, 1)), 0.72, (0.16, 0.06), swing * 1.2)
    b.flat(
        [(-0.66, 1.02), (-0.58, 0.74), (-0.2, 0.68), (0.3, 0.66), (0.5, 0.8), (0.52, 1.0), (0.36, 1.1), (-0.5, 1.1)],
        COAT,
    )
    b.limb((-0.64, 1.0), (-0.74, 0.92), MARK, (0.14, 0.1))
    b.limb((0.4, 0.95), (0.64, 1.4), COAT, (0.32, 0.16))
    b.limb((0.6, 1.44), (0.9, 1.32), COAT, (0.2, 0.11))
    b.disc(0.92, 1.32, 0.035, DARK, 8)
    b.flat([(0.56, 1.48), (0.62, 1.42), (0.42, 1.56)], COAT)
    b.disc(0.68, 1.44, 0.02, DARK, 6, 15)
    b.limb((-0.1, 0.7), (0.3, 0.68), MARK, (0.08, 0.08), 6)
    if pose != 1:  # a stag's antlers
        for lean in (-0.16, 0.12):
            tip = (0.58 + lean, 1.98)
            b.limb((0.6, 1.5), (0.5 + lean, 1.72), MARK, (0.05, 0.04))
            b.limb((0.5 + lean, 1.72), tip, MARK, (0.04, 0.03))
            b.limb((0.5 + lean, 1.72), (0.68 + lean, 1.82), MARK, (0.04, 0.03))
            b.limb((0.54 + lean, 1.62), (0.72 + lean, 1.66), MARK, (0.035, 0.03))

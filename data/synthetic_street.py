"""What stands beside the road in the synthetic scenes: lights, signs, cones, barriers, poles, buildings, trees."""

import functools
import itertools
import random

from .synthetic_mesh import Builder, Mesh, Point, circle, inset, turn


# Slots of a sign: its ground, ring or border, ink, and the back of it.
FIELD, RING, INK, BACK = range(4)
# Slots of a traffic light: its case, a board behind, the lamps from red to green.
CASE, BOARD, RED, YELLOW, GREEN = range(5)
# Slots of a building: wall, darker parts, glass of three kinds (some lit at night), roof, shop front.
WALL, EDGE, GLASS_A, GLASS_B, GLASS_C, ROOF, SHOP = range(7)
# Slots of a tree: trunk, leaves from dark to light.
TRUNK, LEAF_DARK, LEAF, LEAF_LIGHT = range(4)
LENS = 0.13  # radius of each lamp of a traffic light that is 1 m high

Stroke = list[tuple[float, float]]


def _arc(x: float, y: float, rx: float, ry: float, start: int, end: int) -> Stroke:
    """Points of an ellipse; angles in twelfths of a turn, 0 at the right, counter-clockwise."""
    step = 1 if end > start else -1
    points = []
    for i in range(start, end + step, step):
        sine, cosine = turn(i * 3.14159265358979 / 6)
        points.append((x + rx * cosine, y + ry * sine))
    return points


# Glyphs in a cell of width 0.6 and height 1.
GLYPHS: dict[str, list[Stroke]] = {
    "0": [_arc(0.3, 0.5, 0.25, 0.47, 0, 12)],
    "1": [[(0.1, 0.74), (0.34, 0.97), (0.34, 0.03)]],
    "2": [[*_arc(0.3, 0.7, 0.24, 0.26, 5, -1), (0.06, 0.03), (0.56, 0.03)]],
    "3": [[*_arc(0.28, 0.74, 0.23, 0.23, 5, -3), *_arc(0.28, 0.27, 0.26, 0.25, 3, -5)]],
    "4": [[(0.58, 0.28), (0.03, 0.28), (0.4, 0.97), (0.4, 0.03)]],
    "5": [[(0.52, 0.97), (0.12, 0.97), (0.08, 0.54), *_arc(0.28, 0.32, 0.26, 0.29, 4, -5)]],
    "6": [_arc(0.3, 0.3, 0.25, 0.27, 0, 12), [(0.06, 0.36), (0.16, 0.72), (0.42, 0.97)]],
    "7": [[(0.05, 0.97), (0.56, 0.97), (0.22, 0.03)]],
    "8": [_arc(0.3, 0.74, 0.21, 0.22, 0, 12), _arc(0.3, 0.28, 0.26, 0.26, 0, 12)],
    "9": [_arc(0.3, 0.7, 0.25, 0.27, 0, 12), [(0.54, 0.64), (0.44, 0.28), (0.18, 0.03)]],
    "S": [[*_arc(0.3, 0.74, 0.23, 0.23, 1, 9), *_arc(0.3, 0.27, 0.25, 0.25, 3, -5)]],
    "T": [[(0.02, 0.95), (0.58, 0.95)], [(0.3, 0.95), (0.3, 0.03)]],
    "O": [_arc(0.3, 0.5, 0.25, 0.47, 0, 12)],
    "P": [[(0.08, 0.03), (0.08, 0.95), (0.3, 0.95), *_arc(0.3, 0.71, 0.24, 0.24, 3, -3), (0.08, 0.47)]],
}


def _write(b: Builder, text: str, y: float, width: float, height: float, weight: float) -> None:
    """Text in strokes, centred at (0, y), at most `width` by `height`; `weight` is a share of the height."""
    cell = min(height * 0.66, width / len(text))
    left = -cell * len(text) / 2
    for i, letter in enumerate(text):
        x0, sx = left + (i + 0.5) * cell - cell * 0.43, cell * 0.86 / 0.6
        for stroke in GLYPHS[letter]:
            points = [(x0 + px * sx, y + (py - 0.5) * height) for px, py in stroke]
            for start, end in itertools.pairwise(points):
                b.limb(start, end, INK, (height * weight, height * weight))


def _plate(b: Builder, points: list[tuple[float, float]], slot: int, grow: float = 1.0, y: float = 0.0) -> None:
    """A face of a sign, seen from before (-z) only; with slot BACK from behind."""
    toward = (0.0, 0.0, 1.0) if slot == BACK else (0.0, 0.0, -1.0)
    b.face([(px * grow, y + (py - y) * grow, 0.0) for px, py in points], slot, toward)


def _walker(b: Builder) -> None:
    """The walking figure of a crosswalk sign."""
    b.disc(0.02, 0.2, 0.055, INK, 10)
    for start, end, width in (
        ((0.0, 0.12), (-0.02, -0.1), 0.1),
        ((-0.02, -0.08), (-0.14, -0.32), 0.06),
        ((-0.01, -0.08), (0.1, -0.32), 0.06),
        ((0.0, 0.1), (-0.13, -0.04), 0.045),
        ((0.0, 0.1), (0.12, -0.02), 0.045),
    ):
        b.limb(start, end, INK, (width, width))


@functools.cache
def sign(kind: str, text: str = "") -> Mesh:
    """A sign of 1 m around (0, 0) that looks to -z: of a class, or another kind ("ban", "warning", "board")."""
    b = Builder()
    round_points = [(0.5 * s, 0.5 * c) for s, c in circle(24)]
    if kind == "stop sign":
        points = [(0.541 * s, 0.541 * c) for s, c in circle(8)]
        _plate(b, points, BACK)
        _plate(b, points, RING)
        _plate(b, points, FIELD, 0.92)
        _write(b, "STOP", 0.0, 0.82, 0.34, 0.2)
    elif kind == "yield sign" or kind == "warning":
        points = (
            [(-0.56, 0.48), (0.56, 0.48), (0.0, -0.5)]
            if kind == "yield sign"
            else [(-0.56, -0.48), (0.56, -0.48), (0, 0.5)]
        )
        middle = 0.16 if kind == "yield sign" else -0.16
        _plate(b, points, BACK)
        _plate(b, points, RING)
        _plate(b, points, FIELD, 0.64, middle)
        if kind == "warning":
            b.limb((0, 0.0), (0, -0.2), INK, (0.09, 0.06))
            b.disc(0, -0.3, 0.045, INK, 8)
    elif kind == "speed limit sign":
        _plate(b, round_points, BACK)
        _plate(b, round_points, RING)
        _plate(b, round_points, FIELD, 0.78)
        _write(b, text, 0.0, 0.66 if len(text) > 2 else 0.58, 0.46 if len(text) < 3 else 0.4, 0.2)
    elif kind == "crosswalk sign":
        points = [(-0.5, 0.5), (0.5, 0.5), (0.5, -0.5), (-0.5, -0.5)]
        _plate(b, points, BACK)
        _plate(b, points, RING)
        _plate(b, points, FIELD, 0.93)
        _plate(b, [(-0.42, -0.4), (0.42, -0.4), (0.0, 0.43)], RING)
        _walker(b)
    elif kind == "ban":
        _plate(b, round_points, BACK)
        _plate(b, round_points, RING)
        _plate(b, round_points, FIELD, 0.78)
        b.limb((-0.28, 0.28), (0.28, -0.28), RING, (0.1, 0.1))
        if text == "parking":
            b.limb((0.28, 0.28), (-0.28, -0.28), RING, (0.1, 0.1))
    else:
        points = [(-1.0, 0.5), (1.0, 0.5), (1.0, -0.5), (-1.0, -0.5)]
        _plate(b, points, BACK)
        _plate(b, points, RING)
        _plate(b, points, FIELD, 0.94)
        for y, right in ((0.22, 0.5), (-0.2, 0.2)):
            b.limb((-0.75, y), (right, y), INK, (0.16, 0.16))
        b.limb((0.75, -0.3), (0.75, 0.3), INK, (0.08, 0.08))
        b.flat([(0.6, 0.15), (0.9, 0.15), (0.75, 0.4)], INK)
    return b.build()


@functools.cache
def traffic_light(sideways: bool, board: bool) -> Mesh:
    """A traffic light 1 m high (or wide) around (0, 0) that looks to -z, red above or at the left."""
    b = Builder()
    half, tall = (0.5, 0.2) if sideways else (0.2, 0.5)
    if board:
        b.flat(
            [
                (-half - 0.1, -tall - 0.1),
                (half + 0.1, -tall - 0.1),
                (half + 0.1, tall + 0.1),
                (-half - 0.1, tall + 0.1),
            ],
            BOARD,
        )
    b.box((-half, half), (-tall, tall), (-0.02, 0.2), CASE)
    for slot, place in ((RED, 0.32), (YELLOW, 0.0), (GREEN, -0.32)):
        x, y = (-place, 0.0) if sideways else (0.0, place)
        ring = [(x + 0.15 * s, y + 0.15 * c) for s, c in circle(14)]
        b.face([(px, py, -0.03) for px, py in ring], BOARD, (0, 0, -1), 6)
        ring = [(x + LENS * s, y + LENS * c) for s, c in circle(14)]
        b.face([(px, py, -0.035) for px, py in ring], slot, (0, 0, -1))
        shade = [
            (x - 0.16, y + 0.05),
            (x - 0.12, y + 0.14),
            (x, y + 0.18),
            (x + 0.12, y + 0.14),
            (x + 0.16, y + 0.05),
            (x, y + 0.13),
        ]
        b.face([(px, py, -0.04) for px, py in [*shade[:3], shade[5]]], CASE, (0, 0, -1), 8)
        b.face([(px, py, -0.04) for px, py in [shade[5], *shade[2:5]]], CASE, (0, 0, -1), 8)
    return b.build()


@functools.cache
def cone() -> Mesh:
    """A traffic cone of 0.75 m; slots: orange, white, dark."""
    b = Builder()
    b.flat([(-0.24, 0.0), (0.24, 0.0), (0.22, 0.06), (-0.22, 0.06)], 2)
    edges = [(0.17, 0.05), (0.135, 0.25), (0.105, 0.42), (0.085, 0.52), (0.06, 0.65), (0.03, 0.76)]
    for i, ((wa, ya), (wb, yb)) in enumerate(itertools.pairwise(edges)):
        b.flat([(-wa, ya), (wa, ya), (wb, yb), (-wb, yb)], 1 if i in (1, 3) else 0)
    return b.build()


@functools.cache
def barrier(kind: str) -> Mesh:
    """A barrier 2 m wide: a striped "board" on legs, or a "block" of concrete or plastic; slots: two colours, dark."""
    b = Builder()
    if kind == "block":
        profile = [
            (-0.3, 0.0),
            (0.3, 0.0),
            (0.3, 0.2),
            (0.12, 0.45),
            (0.1, 0.9),
            (-0.1, 0.9),
            (-0.12, 0.45),
            (-0.3, 0.2),
        ]
        for part in (profile[:3] + profile[7:], [profile[2], profile[3], profile[6], profile[7]], profile[3:7]):
            b.prism(part, [1.0] * len(part), 0)
        for z, toward in ((-0.115, -1.0), (0.115, 1.0)):
            for x in (-0.75, 0.15):
                b.face([(x, 0.5, z), (x + 0.6, 0.5, z), (x + 0.6, 0.72, z), (x, 0.72, z)], 1, (0, 0, toward), 4)
        return b.build()
    for x in (-0.8, 0.8):
        b.limb((x - 0.12, 0.02), (x, 1.1), 2, (0.07, 0.06))
        b.limb((x + 0.12, 0.02), (x, 1.1), 2, (0.07, 0.06))
    for low, high in ((0.72, 1.05), (0.32, 0.58)):
        b.flat([(-1.0, low), (1.0, low), (1.0, high), (-1.0, high)], 1)
        for i in range(5):
            x = -1.0 + i * 0.4
            b.flat([(x, low), (x + 0.2, low), (x + 0.36, high), (x + 0.16, high)], 0)
    return b.build()


@functools.cache
def pole(height: float, arm: float = 0.0, lamp: bool = False) -> Mesh:
    """A pole in metres, with an arm to +x at its top that may carry a street lamp (slot 1)."""
    b = Builder()
    wide = 0.05 + height * 0.008
    b.flat([(-wide, 0.0), (wide, 0.0), (wide * 0.7, height), (-wide * 0.7, height)], 0)
    if arm:
        b.flat([(0.0, height - 0.12), (arm, height + 0.02), (arm, height + 0.12), (0.0, height + 0.05)], 0)
    if lamp:
        b.flat(
            [
                (arm - 0.5, height - 0.04),
                (arm + 0.35, height - 0.04),
                (arm + 0.3, height + 0.12),
                (arm - 0.45, height + 0.12),
            ],
            1,
        )
    return b.build()


@functools.cache
def fence(kind: str) -> Mesh:
    """A fence or hedge 4 m long across x; slots: posts, rails."""
    b = Builder()
    if kind == "wall":
        b.box((-2.0, 2.0), (0.0, 1.5), (-0.1, 0.1), 0)
        b.box((-2.0, 2.0), (1.5, 1.62), (-0.16, 0.16), 1)
        return b.build()
    for x in (-1.95, -0.65, 0.65, 1.95):
        b.limb((x, 0.0), (x, 1.15), 0, (0.1, 0.1))
    for y in (0.4, 0.95):
        b.flat([(-2.0, y), (2.0, y), (2.0, y + 0.1), (-2.0, y + 0.1)], 1)
    if kind == "pickets":
        for i in range(20):
            x = -1.9 + i * 0.2
            b.flat([(x, 0.05), (x + 0.09, 0.05), (x + 0.09, 1.1), (x, 1.1)], 0, 5)
    return b.build()


def _facade(
    b: Builder, quad: list[Point], toward: Point, rows: int, columns: int, shop: bool, dice: random.Random
) -> None:
    """Windows, and at the ground a door or shop fronts, over a wall given as top left … bottom left."""
    bottom = (rows - 0.0) / (rows + 1)
    tall = 0.45 + 0.3 * dice.random()
    wide = 0.4 + 0.35 * dice.random()
    for row in range(rows):
        for column in range(columns):
            u, v = (column + 0.5 - wide / 2) / columns, bottom * (row + 0.6 - tall / 2) / rows
            part = inset(quad, u, v, u + wide / columns, v + tall * bottom / rows)
            b.face(part, GLASS_A + int(dice.random() * 3), toward, 1.2)
            b.face(
                [part[3], part[2], *inset(quad, u, v, u + wide / columns, v + (tall + 0.07) * bottom / rows)[2:]],
                EDGE,
                toward,
                9,
            )
    if shop:
        for column in range(max(columns // 2, 1)):
            u = column / max(columns // 2, 1)
            width = 1 / max(columns // 2, 1)
            b.face(inset(quad, u + 0.06 * width, bottom + 0.05, u + 0.94 * width, 0.97), GLASS_A + column % 3, toward)
            b.face(inset(quad, u + 0.02 * width, bottom + 0.01, u + 0.98 * width, bottom + 0.07), SHOP, toward)
    else:
        middle = 0.2 + 0.5 * dice.random()
        b.face(inset(quad, middle, bottom + 0.02, middle + 0.4 / columns, 1.0), EDGE, toward, 1.5)
        for column in range(columns):
            if abs((column + 0.5) / columns - middle) > 0.6 / columns:
                u = (column + 0.5 - wide / 2) / columns
                b.face(inset(quad, u, bottom + 0.03, u + wide / columns, 0.93), GLASS_B, toward, 1.2)


@functools.cache
def building(variant: int) -> Mesh:
    """A building of 1 × 1 × 1: to be stretched. Variants 0..11 are blocks, 12..17 houses with a gable along x."""
    dice = random.Random(f"building {variant}")
    b = Builder()
    house = variant >= 12
    rows, columns = (1, 3) if house else (2 + variant % 6, 3 + int(dice.random() * 4))
    shop = not house and variant % 3 != 0
    top = 0.62 if house else 1.0
    b.box((-0.5, 0.5), (0.0, top), (-0.5, 0.5), WALL)
    if house:
        b.face([(-0.5, top, -0.5), (0.5, top, -0.5), (0.0, 1.0, -0.5)], WALL, (0, 0, -1))
        for side in (-1.0, 1.0):
            x = side * 0.56
            b.face(
                [(x, top - 0.03, -0.55), (0, 1.0, -0.55), (0, 1.0, 0.55), (x, top - 0.03, 0.55)], ROOF, (side, 1, 0)
            )
    sides = [
        ([(0.5, top, -0.5), (-0.5, top, -0.5), (-0.5, 0, -0.5), (0.5, 0, -0.5)], (0.0, 0.0, -1.0)),
        ([(-0.5, top, -0.5), (-0.5, top, 0.5), (-0.5, 0, 0.5), (-0.5, 0, -0.5)], (-1.0, 0.0, 0.0)),
        ([(0.5, top, 0.5), (0.5, top, -0.5), (0.5, 0, -0.5), (0.5, 0, 0.5)], (1.0, 0.0, 0.0)),
    ]
    for quad, toward in sides:
        _facade(b, quad, toward, rows, columns, shop, dice)
        if not house:
            b.face(inset(quad, 0.0, 0.0, 1.0, 0.035), EDGE, toward)
    return b.build()


@functools.cache
def tree(kind: str, variant: int) -> Mesh:
    """A tree 1 m high: "leafy", "conifer", "bare" or "palm"; variants 0..5."""
    dice = random.Random(f"{kind} {variant}")
    b = Builder()
    if kind == "conifer":
        b.limb((0, 0.0), (0, 0.3), TRUNK, (0.05, 0.04))
        for i in range(5):
            low, wide = 0.1 + i * 0.16, 0.27 - i * 0.045
            b.flat([(-wide, low), (wide, low), (0.0, low + 0.32)], LEAF_DARK if i % 2 else LEAF)
            b.flat([(0.0, low + 0.03), (wide * 0.8, low + 0.03), (0.0, low + 0.3)], LEAF_LIGHT)
        return b.build()
    if kind == "palm":
        b.limb((0, 0), (0.05, 0.75), TRUNK, (0.05, 0.035))
        for i in range(9):
            sine, cosine = turn(i * 0.7)
            b.limb((0.05, 0.75), (0.05 + 0.16 * sine, 0.8 + 0.1 * cosine), LEAF + i % 2, (0.03, 0.06))
            b.limb(
                (0.05 + 0.16 * sine, 0.8 + 0.1 * cosine),
                (0.05 + 0.3 * sine, 0.72 + 0.1 * cosine),
                LEAF + i % 2,
                (0.06, 0.02),
            )
        return b.build()
    b.limb((0, 0), (0.02, 0.45), TRUNK, (0.06, 0.04))
    tips = []
    for _ in range(7):
        start, length = 0.3 + 0.25 * dice.random(), 0.25 + 0.2 * dice.random()
        sine, cosine = turn((dice.random() - 0.5) * 2.0)
        tip = (sine * length, start + cosine * length)
        b.limb((0.02, start), tip, TRUNK, (0.03, 0.012))
        tips.append(tip)
        if kind == "bare":
            for way in (-0.7, 0.6):
                s, c = turn(way + sine)
                x, y = tip[0] * 0.6, start + cosine * length * 0.6
                b.limb((x, y), (x + s * 0.17, y + c * 0.17), TRUNK, (0.016, 0.006))
    if kind == "bare":
        return b.build()
    for slot, count, shift, spread in ((LEAF_DARK, 8, 0.0, 0.28), (LEAF, 12, 0.02, 0.26), (LEAF_LIGHT, 9, 0.05, 0.22)):
        for _ in range(count):
            sine, cosine = turn(dice.random() * 6.283)
            reach = spread * (0.3 + 0.7 * dice.random())
            radius = (0.15 if slot == LEAF_DARK else 0.11 if slot == LEAF else 0.065) * (0.7 + 0.6 * dice.random())
            b.disc(sine * reach + shift, 0.68 + cosine * reach * 0.75 + shift, radius, slot, 9)
    return b.build()

"""Vehicles of the synthetic scenes: cars, vans, buses, trucks as solids; motorcycles and bicycles as flat figures."""

import functools
import itertools

from .synthetic_mesh import Builder, Mesh, Point, circle, inset


# Slots of a vehicle's palette.
BODY, SHADE, GLASS, TYRE, HUB, HEAD, TAIL, PLATE, TRIM, LIGHT = range(10)

CAR_SHAPES = ("saloon", "hatchback", "estate", "suv")
VAN_SHAPES = ("cargo", "minibus")
BUS_SHAPES = ("city", "coach", "double")
TRUCK_SHAPES = ("box", "tanker", "dumper")

# shape: (length, half width, bonnet height, roof height, cabin's z: windscreen foot, roof front, roof back, back foot)
_TWO_BOX = {
    "saloon": (4.6, 0.90, 0.96, 1.44, (1.00, 0.25, -0.95, -1.60)),
    "hatchback": (3.9, 0.86, 0.98, 1.50, (1.05, 0.40, -1.45, -1.88)),
    "estate": (4.7, 0.90, 0.98, 1.52, (1.05, 0.30, -1.90, -2.25)),
    "suv": (4.6, 0.95, 1.14, 1.78, (1.10, 0.55, -1.85, -2.22)),
    "cargo": (5.2, 1.00, 1.22, 2.15, (2.10, 1.35, -2.50, -2.56)),
    "minibus": (4.9, 0.96, 1.14, 1.98, (1.95, 1.20, -2.25, -2.40)),
}


def _wheels(b: Builder, half: float, axles: tuple[float, ...], radius: float) -> None:
    """Tyres as seen from before and behind, painted before the body."""
    for z in axles:
        for side in (-1.0, 1.0):
            x0, x1 = side * half * 0.98, side * (half - 0.24)
            for face, toward in ((z - radius * 0.8, -1.0), (z + radius * 0.8, 1.0)):
                b.face([(x0, 0.0, face), (x1, 0.0, face), (x1, 0.6, face), (x0, 0.6, face)], TYRE, (0, 0, toward))


def _discs(b: Builder, half: float, axles: tuple[float, ...], radius: float) -> None:
    """Wheels on the sides, painted after the body."""
    for z in axles:
        for side in (-half, half):
            b.wheel(side, radius, z, radius, TYRE)
            b.wheel(side, radius, z, radius * 0.58, HUB, 5.0)


def _ends(b: Builder, half: float, front: float, back: float, low: float, high: float) -> None:
    """Lamps, plates and grille on flat ends at z = `front` and `back`, between two heights."""
    tall = high - low
    for side in (-1.0, 1.0):
        x0, x1 = side * half * 0.95, side * half * 0.58
        y0, y1 = low + tall * 0.48, low + tall * 0.86
        b.face([(x0, y0, front), (x1, y0, front), (x1, y1, front), (x0, y1, front)], HEAD, (0, 0, 1), 2.0)
        x1 = side * half * 0.66
        b.face([(x0, y0, back), (x1, y0, back), (x1, y1, back), (x0, y1, back)], TAIL, (0, 0, -1))
    x, y0, y1 = half * 0.52, low + tall * 0.4, low + tall * 0.8
    b.face([(-x, y0, front), (x, y0, front), (x, y1, front), (-x, y1, front)], TRIM, (0, 0, 1), 4.0)
    for z, toward in ((front, 1.0), (back, -1.0)):
        x, y0, y1 = half * 0.97, low, low + tall * 0.22
        b.face([(-x, y0, z), (x, y0, z), (x, y1, z), (-x, y1, z)], TRIM, (0, 0, toward), 3.0)
        x, y0, y1 = 0.26, low + tall * 0.22, low + tall * 0.4
        b.face([(-x, y0, z), (x, y0, z), (x, y1, z), (-x, y1, z)], PLATE, (0, 0, toward), 8.0)


def _side_windows(b: Builder, quad: list[Point], side: float, panes: int, glass: tuple[float, float]) -> None:
    """`panes` windows over a share of a side's quad (top left, top right, bottom right, bottom left)."""
    gap = 0.04
    for i in range(panes):
        u0 = glass[0] + (glass[1] - glass[0]) * i / panes + gap / 2
        u1 = glass[0] + (glass[1] - glass[0]) * (i + 1) / panes - gap / 2
        b.face(inset(quad, u0, 0.12, u1, 0.92), GLASS, (side, 0.3, 0))


@functools.cache
def two_box(shape: str) -> Mesh:
    """A car or van: a low body with a narrower cabin on it."""
    length, half, bonnet, roof, cabin = _TWO_BOX[shape]
    front, back, low = length / 2, -length / 2, 0.28
    foot, roof_front, roof_back, back_foot = cabin
    radius = 0.33 if roof < 1.7 else 0.37
    axles = (front - 0.85, back + 0.85)
    van = shape in VAN_SHAPES
    b = Builder()
    _wheels(b, half, axles, radius)
    nose = bonnet - (0.3 if van else 0.2)
    profile = [
        (back, low),
        (front, low),
        (front, nose),
        (front - 0.12, nose + 0.1),
        (foot, bonnet),
        (back_foot, bonnet),
    ]
    tail = bonnet - 0.06 if back_foot - back > 0.3 else bonnet
    profile += [(back + 0.06, tail), (back, tail - 0.12)]
    waist = half * 0.94
    b.prism(profile, [half, half, half * 0.97, half * 0.93, waist, waist, waist, half * 0.97], BODY)
    for side in (-half, half):  # sill, belt line and doors
        b.face(
            [(side, low, back), (side, low, front), (side, low + 0.1, front), (side, low + 0.1, back)],
            TRIM,
            (side, 0, 0),
        )
        for z in (foot - 0.25, (roof_front + roof_back) / 2):
            b.face(
                [(side, low, z), (side, low, z + 0.03), (side, bonnet, z + 0.03), (side, bonnet, z)],
                SHADE,
                (side, 0, 0),
                14,
            )
    _ends(b, half, front + 0.01, back - 0.01, low, nose)
    top = half * (0.88 if van else 0.70)
    base = bonnet - 0.02
    b.prism([(foot, base), (roof_front, roof), (roof_back, roof), (back_foot, base)], [waist, top, top, waist], BODY)
    windscreen = [(-top, roof, roof_front), (top, roof, roof_front), (waist, base, foot), (-waist, base, foot)]
    b.face(inset(windscreen, 0.06, 0.08, 0.94, 0.94), GLASS, (0, 0.3, 1))
    rear = [(-top, roof, roof_back), (top, roof, roof_back), (waist, base, back_foot), (-waist, base, back_foot)]
    b.face(inset(rear, 0.1, 0.12, 0.9, 0.55 if van else 0.85), GLASS, (0, 0.3, -1))
    for side in (-1.0, 1.0):
        quad = [
            (side * top, roof, roof_front),
            (side * top, roof, roof_back),
            (side * waist, base, back_foot),
            (side * waist, base, foot),
        ]
        if shape == "cargo":
            _side_windows(b, quad, side, 1, (0.02, 0.3))
        else:
            _side_windows(b, quad, side, 3 if shape in ("estate", "suv", "minibus") else 2, (0.02, 0.97))
        b.box((side * waist, side * (waist + 0.18)) if side > 0 else (side * (waist + 0.18), side * waist),
              (base + 0.02, base + 0.16), (foot - 0.35, foot - 0.25), TRIM)  # fmt: skip
    _discs(b, half + 0.01, axles, radius)
    return b.build()


@functools.cache
def bus(shape: str) -> Mesh:
    """A bus: a box with a band of windows on every floor."""
    half, roof, length = 1.25, {"city": 3.05, "coach": 3.4, "double": 4.3}[shape], 10.5 if shape == "double" else 11.5
    front, back, low = length / 2, -length / 2, 0.35
    axles = (front - 2.4, back + 2.6)
    b = Builder()
    _wheels(b, half, axles, 0.48)
    b.prism([(back, low), (front, low), (front, roof), (back, roof)], [half, half, half * 0.97, half * 0.97], BODY)
    floors = [(1.25, 2.15), (2.8, 3.75)] if shape == "double" else [(1.45 if shape == "coach" else 1.2, roof - 0.55)]
    for side in (-half - 0.01, half + 0.01):
        quad = [(side, roof, front), (side, roof, back), (side, low, back), (side, low, front)]
        b.face(inset(quad, 0.0, 0.9, 1.0, 1.0), SHADE, (side, 0, 0))
        for bottom, top in floors:
            v0, v1 = (roof - top) / (roof - low), (roof - bottom) / (roof - low)
            for i in range(7):
                b.face(inset(quad, 0.02 + i * 0.138, v0, 0.146 + i * 0.138, v1), GLASS, (side, 0, 0))
        if side > 0:
            v0 = (roof - 2.2) / (roof - low)
            for u in (0.03, 0.5):
                b.face(inset(quad, u, v0, u + 0.09, 0.97), GLASS, (side, 0, 0))
                b.face(inset(quad, u + 0.04, v0, u + 0.05, 0.97), TRIM, (side, 0, 0), 8)
    for z, toward in ((front + 0.01, 1.0), (back - 0.01, -1.0)):
        quad = [(-half, roof, z), (half, roof, z), (half, low, z), (-half, low, z)]
        for i, (bottom, top) in enumerate(floors):
            low_edge = bottom if toward < 0 or i else bottom - 0.15
            edges = ((roof - top) / (roof - low), (roof - low_edge) / (roof - low))
            aside = 0.05 if toward > 0 else 0.17
            b.face(inset(quad, aside, edges[0], 1 - aside, edges[1]), GLASS, (0, 0, toward))
        if toward > 0:
            b.face(inset(quad, 0.2, 0.03, 0.8, 0.45 / (roof - low)), TRIM, (0, 0, 1), 3)
            b.face(inset(quad, 0.3, 0.06, 0.7, 0.36 / (roof - low)), LIGHT, (0, 0, 1), 6)
    _ends(b, half, front + 0.02, back - 0.02, low, 1.05)
    _discs(b, half + 0.02, axles, 0.48)
    return b.build()


@functools.cache
def truck(shape: str) -> tuple[Mesh, Mesh]:
    """A truck: the cab, and what it carries behind."""
    return _cab(1.22, 4.1, 1.9), _load(shape, 1.22, 1.9, -4.1)


def _cab(half: float, front: float, split: float) -> Mesh:
    """A truck's cab between z = `split` and `front`."""
    cab = Builder()
    _wheels(cab, half, (front - 1.2,), 0.5)
    nose = [(split, 0.4), (front, 0.4), (front, 1.5), (front - 0.25, 2.75), (split, 2.85)]
    cab.prism(nose, [half, half, half, half * 0.92, half * 0.92], BODY)
    windscreen = [
        (-1.12, 2.75, front - 0.24),
        (1.12, 2.75, front - 0.24),
        (1.22, 1.5, front + 0.01),
        (-1.22, 1.5, front + 0.01),
    ]
    cab.face(inset(windscreen, 0.04, 0.12, 0.96, 0.95), GLASS, (0, 0.2, 1))
    for side in (-1.0, 1.0):
        quad = [
            (side * 1.13, 2.75, front - 0.3),
            (side * 1.13, 2.75, split),
            (side * 1.23, 1.5, split),
            (side * 1.23, 1.5, front - 0.1),
        ]
        cab.face(inset(quad, 0.1, 0.15, 0.65, 0.95), GLASS, (side, 0.2, 0))
        x = (1.24, 1.45) if side > 0 else (-1.45, -1.24)
        cab.box(x, (1.7, 2.3), (front - 0.25, front - 0.15), TRIM)
    grille = [
        (-0.8, 1.4, front + 0.01),
        (0.8, 1.4, front + 0.01),
        (0.8, 0.85, front + 0.01),
        (-0.8, 0.85, front + 0.01),
    ]
    cab.face(grille, TRIM, (0, 0, 1), 2)
    _ends(cab, half, front + 0.02, split, 0.4, 1.15)
    _discs(cab, half + 0.01, (front - 1.2,), 0.5)
    return cab.build()


def _load(shape: str, half: float, split: float, back: float) -> Mesh:
    """A box, tank or open skip on wheels between z = `back` and `split`."""
    load = Builder()
    axles = (back + 1.1, back + 2.3) if shape != "box" else (back + 1.5,)
    _wheels(load, half, axles, 0.5)
    load.box((-half * 0.8, half * 0.8), (0.45, 1.0), (back, split), TRIM)
    edge = split - 0.15
    {"box": _box, "tanker": _tank, "dumper": _skip}[shape](load, half, edge, back)
    for side in (-1.0, 1.0):
        x0, x1 = side * half * 0.95, side * half * 0.62
        quad = [(x0, 0.62, back - 0.02), (x1, 0.62, back - 0.02), (x1, 0.92, back - 0.02), (x0, 0.92, back - 0.02)]
        load.face(quad, TAIL, (0, 0, -1))
    _discs(load, half + 0.01, axles, 0.5)
    return load.build()


def _box(load: Builder, half: float, edge: float, back: float) -> None:
    load.box((-half * 1.03, half * 1.03), (1.0, 3.65), (back, edge), BODY)
    door = [
        (-half, 3.6, back - 0.01),
        (half, 3.6, back - 0.01),
        (half, 1.05, back - 0.01),
        (-half, 1.05, back - 0.01),
    ]
    load.face(inset(door, 0.49, 0.0, 0.51, 1.0), SHADE, (0, 0, -1), 4)
    for u in (0.3, 0.7):
        load.face(inset(door, u, 0.03, u + 0.02, 0.97), SHADE, (0, 0, -1), 10)


def _tank(load: Builder, half: float, edge: float, back: float) -> None:
    points = [(half * s * 1.0, 2.2 + 1.2 * c) for s, c in ((0.38, 1), (0.92, 0.5), (1, -0.2), (0.6, -0.95))]
    outline = points + [(-x, y) for x, y in reversed(points)]
    ring = [*outline, outline[0]]
    for (ax, ay), (bx, by) in itertools.pairwise(ring):
        load.face([(ax, ay, back), (bx, by, back), (bx, by, edge), (ax, ay, edge)], BODY, (ax + bx, ay + by - 4.4, 0))
    load.face([(x, y, back) for x, y in outline], BODY, (0, 0, -1))
    load.face([(x, y, edge) for x, y in outline], BODY, (0, 0, 1))
    load.face([(x * 0.5, 2.2 + (y - 2.2) * 0.5, back - 0.01) for x, y in outline], SHADE, (0, 0, -1), 3)


def _skip(load: Builder, half: float, edge: float, back: float) -> None:
    load.prism(
        [(back, 1.0), (edge, 1.0), (edge, 2.4), (back - 0.2, 2.3)], [half, half, half * 1.05, half * 1.05], BODY
    )
    load.face([(-1.1, 2.35, back), (1.1, 2.35, back), (1.1, 2.42, edge), (-1.1, 2.42, edge)], SHADE, (0, 1, 0))
    for side in (-1.28, 1.28):
        for i in range(5):
            z = back + 0.4 + i * 1.25
            load.face(
                [(side, 1.0, z), (side, 1.0, z + 0.12), (side, 2.35, z + 0.12), (side, 2.35, z)],
                SHADE,
                (side, 0, 0),
                3,
            )


@functools.cache
def motorcycle(side_view: bool, scooter: bool) -> Mesh:
    """A motorcycle in the plane of its length (x is its front) or, seen from before or behind, of its width."""
    b = Builder()
    if not side_view:
        b.limb((0, 0.08), (0, 0.62), TYRE, (0.15, 0.15))
        b.flat([(-0.17, 0.5), (0.17, 0.5), (0.24, 0.8), (0.16, 1.0), (-0.16, 1.0), (-0.24, 0.8)], BODY)
        b.flat([(-0.09, 0.68), (0.09, 0.68), (0.09, 0.8), (-0.09, 0.8)], TAIL)
        b.limb((-0.38, 1.06), (0.38, 1.06), TRIM, (0.05, 0.05))
        for x in (-0.42, 0.42):
            b.disc(x, 1.2, 0.07, TRIM, 8, 8)
        b.flat([(-0.09, 0.4), (0.09, 0.4), (0.09, 0.5), (-0.09, 0.5)], PLATE, 12)
        return b.build()
    radius = 0.25 if scooter else 0.31
    for x in (-0.68, 0.72):
        b.disc(x, radius, radius, TYRE, 14)
        b.disc(x, radius, radius * 0.58, HUB, 12, 6)
    b.limb((0.72, radius), (0.48, 1.02), TRIM, (0.09, 0.07))
    b.flat([(-0.55, 0.3), (0.35, 0.25), (0.4, 0.5), (-0.5, 0.55)], TRIM if not scooter else BODY)
    b.flat([(-0.1, 0.6), (0.5, 0.62), (0.46, 0.88), (0.2, 0.92), (-0.1, 0.78)], BODY)
    b.flat([(-0.85, 0.72), (-0.6, 0.5), (0.0, 0.52), (0.0, 0.78), (-0.7, 0.82)], BODY)
    b.flat([(-0.8, 0.78), (0.05, 0.74), (0.05, 0.84), (-0.75, 0.88)], TYRE)
    if scooter:
        b.flat([(0.36, 0.25), (0.6, 0.3), (0.52, 1.0), (0.42, 1.0)], BODY)
    b.limb((0.5, 1.0), (0.36, 1.12), TRIM, (0.05, 0.05))
    b.flat([(0.5, 0.82), (0.62, 0.84), (0.62, 1.0), (0.5, 1.02)], HEAD)
    b.flat([(-0.9, 0.7), (-0.82, 0.7), (-0.82, 0.8), (-0.9, 0.8)], TAIL)
    b.limb((-0.75, 0.28), (-0.1, 0.3), HUB, (0.09, 0.06), 8)
    return b.build()


@functools.cache
def bicycle(side_view: bool) -> Mesh:
    """A bicycle in the plane of its length (x is its front) or of its width."""
    b = Builder()
    if not side_view:
        b.limb((0, 0.04), (0, 0.66), TYRE, (0.06, 0.06))
        b.limb((0, 0.6), (0, 1.0), BODY, (0.06, 0.06))
        b.limb((-0.28, 1.02), (0.28, 1.02), TRIM, (0.05, 0.05))
        b.flat([(-0.1, 0.88), (0.1, 0.88), (0.1, 0.95), (-0.1, 0.95)], TYRE)
        b.disc(0, 0.72, 0.05, TAIL, 8)
        return b.build()
    for x in (-0.52, 0.55):  # tyres as rings, so that the street shows through
        ring = [(0.34 * s, 0.34 * c) for s, c in circle(14)]
        for (ax, ay), (bx, by) in zip(ring, [*ring[1:], ring[0]]):
            b.flat([(x + ax, 0.34 + ay), (x + bx, 0.34 + by), (x + bx * 0.84, 0.34 + by * 0.84),
                    (x + ax * 0.84, 0.34 + ay * 0.84)], TYRE)  # fmt: skip
        for ax, ay in ring[:7]:
            b.limb((x + ax * 0.9, 0.34 + ay * 0.9), (x - ax * 0.9, 0.34 - ay * 0.9), HUB, (0.012, 0.012), 40)
    hub, seat, head = (-0.05, 0.3), (-0.2, 0.82), (0.38, 0.86)
    for start, end in ((hub, seat), (seat, head), (hub, head), ((-0.52, 0.34), hub), ((-0.52, 0.34), (-0.17, 0.74))):
        b.limb(start, end, BODY, (0.06, 0.06))
    b.limb((0.55, 0.34), (0.36, 0.96), BODY, (0.06, 0.05))
    b.limb((0.34, 1.0), (0.5, 1.0), TRIM, (0.05, 0.05))
    b.flat([(-0.36, 0.86), (-0.08, 0.88), (-0.08, 0.93), (-0.36, 0.94)], TYRE)
    b.limb((-0.13, 0.22), (0.03, 0.38), TRIM, (0.04, 0.04), 12)
    return b.build()

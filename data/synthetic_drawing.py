"""Paints a planned scene on a canvas of colours and object numbers, from the farthest to the nearest.

The canvas has twice the image's size and four channels, red, green, blue and the number of the object that is seen:
every polygon writes both at once, so truth and picture cannot differ.
"""

import itertools
from dataclasses import dataclass, field

import cv2
import numpy as np

from .synthetic_mesh import NEAR, Camera, Mesh, turn
from .synthetic_weather import Color, Light


cv2.setNumThreads(0)

SCALE = 2  # canvas pixels per image pixel
# Numbers of what has no instances; instances count from FIRST.
SKY, TERRAIN, ROAD, SIDEWALK, BUILDING, TREE, POLE, FENCE, OTHER = range(9)
FIRST = 16


@dataclass(frozen=True)
class Lamp:
    """A light that shines into the lens: place in its thing's own metres, colour, radius of its glow in metres.

    `front` is the z direction in which it shines (1 to the front, -1 to the back), 0 for all.
    """

    place: tuple[float, float, float]
    color: Color
    radius: float
    front: int = 0


@dataclass(frozen=True)
class Thing:
    """One object of a scene: meshes with colours at a place.

    Attributes:
        label: its class, or None for what is not named.
        meshes: its parts; those of several are sorted by depth one by one.
        palette: colours of the meshes' slots.
        place: x, y, z in metres.
        heading: radians to the right of +z.
        scale: factors of its own x, y, z.
        bright: slots that shine by themselves.
        carried: whether it is painted together with the thing before it.
    """

    label: str | None
    meshes: tuple[Mesh, ...]
    palette: tuple[Color, ...]
    place: tuple[float, float, float]
    heading: float
    scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    bright: tuple[int, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)
    lamps: tuple[Lamp, ...] = ()
    carried: bool = False
    shadow: bool = True


@dataclass(frozen=True)
class Patch:
    """A coloured piece of ground: polygons of (x, z) in metres; `kind` is a number of what has no instances, or says
    where a crosswalk begins and what belongs to it."""

    polygons: tuple[tuple[tuple[float, float], ...], ...]
    color: Color
    kind: int


@dataclass
class Unit:
    """A part of a thing, with what is painted together with it."""

    thing: int
    corners: np.ndarray
    depth: float
    parts: list[tuple[int, Mesh]]


def clip_near(points: np.ndarray) -> np.ndarray:
    """The part of a polygon [N, 3] in view coordinates that lies before the camera."""
    inside = points[:, 2] >= NEAR
    if inside.all():
        return points
    kept: list[np.ndarray] = []
    for i in range(len(points)):
        a, b = points[i - 1], points[i]
        if inside[i - 1] != inside[i]:
            kept.append(a + (b - a) * ((NEAR - a[2]) / (b[2] - a[2])))
        if inside[i]:
            kept.append(b)
    return np.array(kept).reshape(-1, 3)


def draw_ground(canvas: np.ndarray, patches: list[tuple[Patch, int]], camera: Camera, light: Light) -> None:
    """Patches with their numbers, one over the other."""
    polygons = [polygon for patch, _ in patches for polygon in patch.polygons]
    if not polygons:
        return
    ends = list(itertools.accumulate(len(polygon) for polygon in polygons))
    flat = np.zeros((ends[-1], 3))
    flat[:, ::2] = [point for polygon in polygons for point in polygon]
    view = camera.view(flat)
    pixels = camera.pixels(view, canvas.shape[0])
    starts = [0, *ends[:-1]]
    behind = np.minimum.reduceat(view[:, 2], starts) < NEAR
    gone = np.maximum.reduceat(view[:, 2], starts) < NEAR
    spans = iter(zip(starts, ends, behind.tolist(), gone.tolist()))
    for patch, number in patches:
        color = (*light.shine(patch.color), number)
        for start, end, cut, out in itertools.islice(spans, len(patch.polygons)):
            if out:
                continue
            piece = camera.pixels(clip_near(view[start:end]), canvas.shape[0]) if cut else pixels[start:end]
            cv2.fillPoly(canvas, [piece], color, cv2.LINE_8, 4)


def light_ground(canvas: np.ndarray, camera: Camera, light: Light) -> None:
    """Headlights and haze over the ground, row by row, before anything stands on it."""
    size = canvas.shape[0]
    first = min(max(int(camera.horizon() * size) - size // 30, 0), size - 1)
    slope = ((np.arange(first, size) + 0.5) / size - 0.5) / camera.focal[1]
    _, _, sine, cosine, _, _ = camera.turns
    fall = slope * cosine + sine
    depth = np.where(fall > 1e-4, camera.height / np.maximum(fall, 1e-4), 1e4)
    # 16 bits are enough unless headlights make the ground brighter than it was
    kind = np.uint32 if light.headlights else np.uint16
    hidden = np.rint(light.hidden(depth) * 256).astype(kind)[:, None]
    planes = list(cv2.split(canvas[first:]))
    ground = cv2.bitwise_or(cv2.inRange(planes[3], TERRAIN, OTHER - 1), cv2.inRange(planes[3], FIRST, 255))
    for channel in range(3):
        keep, add = 256 - hidden, hidden * kind(light.haze_color[channel])
        if light.headlights:
            keep = (
                np.rint((light.headlight(depth) / light.ambient[channel] + 1) * 64).astype(kind)[:, None] * keep >> 6
            )
        plane = (planes[channel] * keep + add) >> 8
        planes[channel] = np.minimum(plane, 255).astype(np.uint8)
    cv2.copyTo(cv2.merge(planes), ground, canvas[first:])


def place_parts(things: list[Thing], owners: list[int], counts: list[int], points: np.ndarray) -> np.ndarray:
    """Own points of many parts one after the other, `counts` of each → world [N, 3]."""
    each = np.array([(*things[i].scale, *things[i].place, *turn(things[i].heading)) for i in owners])
    each = np.repeat(each, counts, axis=0)
    x, z, sine, cosine = points[:, 0] * each[:, 0], points[:, 2] * each[:, 2], each[:, 6], each[:, 7]
    world = np.empty_like(points)
    world[:, 0] = x * cosine + z * sine + each[:, 3]
    world[:, 1] = points[:, 1] * each[:, 1] + each[:, 4]
    world[:, 2] = z * cosine - x * sine + each[:, 5]
    return world


def gather(things: list[Thing], camera: Camera) -> list[Unit]:
    """Units before the camera; a thing with a part that is too near is left out, with what it carries."""
    parts = [(index, mesh) for index, thing in enumerate(things) for mesh in thing.meshes]
    if not parts:
        return []
    box = []
    for _, mesh in parts:
        left, right, back, front = mesh.footprint
        for y in (0.0, mesh.height):
            box += [(left, y, back), (right, y, back), (right, y, front), (left, y, front)]
    world = place_parts(things, [index for index, _ in parts], [8] * len(parts), np.array(box))
    nearest = camera.view(world)[:, 2].reshape(-1, 8).min(axis=1).tolist()
    corners = world[:, ::2].reshape(-1, 8, 2)[:, :4]
    units: list[Unit] = []
    near = {index for (index, _), depth in zip(parts, nearest) if depth < NEAR}
    carrier_near = False
    for row, (index, mesh) in enumerate(parts):
        if things[index].carried:
            if not carrier_near and index not in near:
                units[-1].parts.append((index, mesh))
            continue
        carrier_near = index in near
        if not carrier_near:
            (ax, az), (cx, cz) = corners[row, 0].tolist(), corners[row, 2].tolist()
            x, z = (ax + cx) / 2 - camera.x, (az + cz) / 2
            units.append(Unit(index, corners[row], x * x + z * z, [(index, mesh)]))
    return units


def painting_order(units: list[Unit], camera: Camera) -> list[int]:
    """Units from the hindmost to the foremost: of two, the one on the camera's side of an edge between them is before.

    Edges of both footprints are tried; where none parts them, or they go round in circles, distance decides.
    """
    count = len(units)
    corners = np.array([unit.corners for unit in units])  # [U, 4, 2]
    distance = np.array([unit.depth for unit in units])
    first = np.zeros((count, count), dtype=bool)  # [i, j]: i is painted before j
    eye = np.array([camera.x, 0.0])
    for a, b in ((0, 1), (1, 2), (2, 3), (3, 0)):
        edge = corners[:, b] - corners[:, a]  # [U, 2]
        normal = np.stack([edge[:, 1], -edge[:, 0]], axis=1)
        other = corners[:, (a + 2) % 4] - corners[:, a]
        inward = other[:, 0] * normal[:, 0] + other[:, 1] * normal[:, 1] > 0
        normal[inward] *= -1  # outwards
        offset = corners[None, :] - corners[:, None, None, a]  # [U, U, 4, 2]: corner of j from a's edge
        height = offset[..., 0] * normal[:, None, None, 0] + offset[..., 1] * normal[:, None, None, 1]
        outside = height.min(axis=2) >= -1e-6  # all of j lies outside of this edge of i
        sight = eye - corners[:, a]
        eye_outside = sight[:, 0] * normal[:, 0] + sight[:, 1] * normal[:, 1] > 0
        first |= outside & eye_outside[:, None]  # j between the eye and i
        first |= (outside & ~eye_outside[:, None]).T  # i between the eye and j
    both = first & first.T
    unknown = both | ~(first | first.T)
    farther = distance[:, None] > distance[None, :]
    first = np.where(unknown, farther & both, first)
    np.fill_diagonal(first, False)
    waiting = first.sum(axis=0)
    rank = distance.copy()
    order = []
    for _ in range(count):
        free = np.where(waiting == 0, rank, -1.0)
        pick = int(free.argmax())
        if free[pick] < 0:
            pick = int(rank.argmax())
        order.append(pick)
        rank[pick] = -2.0
        waiting = waiting - first[pick]
    return order


@dataclass
class Faces:
    """Every face of the units in painting order: where its corners are, its colour, its thing."""

    pixels: np.ndarray  # [V, 2] in 1/16 canvas pixels
    starts: list[int]
    ends: list[int]
    colors: list[list[int]]
    things: list[int]
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # thing: (start, end) of its faces

    def __post_init__(self) -> None:
        for start, end, thing in zip(self.starts, self.ends, self.things):
            self.spans.setdefault(thing, []).append((start, end))


def prepare(things: list[Thing], units: list[Unit], camera: Camera, light: Light, size: int) -> Faces:
    """All faces that look at the camera and are large enough, lit and hazed, for a canvas of `size`."""
    parts = [part for unit in units for part in unit.parts]
    owners = [index for index, _ in parts]
    palettes: list[tuple[int, int, int, bool]] = []
    palette_starts = []
    for index, _ in parts:
        thing = things[index]
        palette_starts.append(len(palettes))
        palettes.extend((*color, slot in thing.bright) for slot, color in enumerate(thing.palette))
    vertices = [len(mesh.vertices) for _, mesh in parts]
    points = place_parts(things, owners, vertices, np.concatenate([mesh.vertices for _, mesh in parts]))
    view = camera.view(points)
    faces = [len(mesh.starts) for _, mesh in parts]
    base = np.repeat(np.cumsum([0, *vertices[:-1]]), faces)
    starts = np.concatenate([mesh.starts for _, mesh in parts]) + base
    ends = np.concatenate([mesh.ends for _, mesh in parts]) + base
    slots = np.concatenate([mesh.slots for _, mesh in parts]) + np.repeat(palette_starts, faces)
    detail = np.concatenate([mesh.detail for _, mesh in parts])
    owner = np.repeat(owners, faces)
    normal = turn_normals(things, owners, faces, np.concatenate([mesh.normals for _, mesh in parts]))
    corner = points[starts]
    looks = (
        normal[:, 0] * (corner[:, 0] - camera.x)
        + normal[:, 1] * (corner[:, 1] - camera.height)
        + normal[:, 2] * corner[:, 2]
    )
    flat = (normal == 0).all(axis=1)
    depth = np.maximum(view[starts, 2], NEAR)
    per_metre = camera.focal[1] * (size // SCALE) / depth
    kept = np.flatnonzero((flat | (looks < 0)) & (detail <= per_metre))
    normal, flat, depth = normal[kept], flat[kept], depth[kept]
    colors = shade(np.array(palettes)[slots[kept]], normal, flat, depth, light)
    return Faces(
        camera.pixels(view, size), starts[kept].tolist(), ends[kept].tolist(), colors.tolist(), owner[kept].tolist()
    )


def turn_normals(things: list[Thing], owners: list[int], counts: list[int], normals: np.ndarray) -> np.ndarray:
    """Own normals of many parts one after the other → world, of any length [N, 3]."""
    each = np.array([(*things[i].scale, *turn(things[i].heading)) for i in owners])
    each = np.repeat(each, counts, axis=0)
    x, z, sine, cosine = normals[:, 0] / each[:, 0], normals[:, 2] / each[:, 2], each[:, 3], each[:, 4]
    return np.stack([x * cosine + z * sine, normals[:, 1] / each[:, 1], z * cosine - x * sine], axis=1)


def shade(base: np.ndarray, normal: np.ndarray, flat: np.ndarray, depth: np.ndarray, light: Light) -> np.ndarray:
    """Palette rows (red, green, blue, shines) [F, 4] → colours as seen [F, 3]."""
    length = np.sqrt(normal[:, 0] * normal[:, 0] + normal[:, 1] * normal[:, 1] + normal[:, 2] * normal[:, 2])
    unit = normal / np.maximum(length, 1e-9)[:, None]
    sx, sy, sz = light.sun_direction
    facing = np.where(flat, 0.6, np.maximum(unit[:, 0] * sx + unit[:, 1] * sy + unit[:, 2] * sz, 0))
    # the sky is brighter than the ground, and no two sides of a box look alike
    sides = np.where(flat, 0.95, 0.92 + 0.1 * unit[:, 1] + 0.06 * unit[:, 0])
    bright = base[:, 3:] > 0
    level = light.sun * facing + light.headlight(depth)
    lit = base[:, :3] * (np.array(light.ambient) * sides[:, None] + level[:, None])
    lit = np.where(bright, base[:, :3], np.minimum(lit, 255))
    hidden = light.hidden(depth)[:, None] * np.where(bright, 0.6, 1.0)
    return np.rint(lit + (np.array(light.haze_color) - lit) * hidden).astype(np.int64)


def cast_shadows(canvas: np.ndarray, things: list[Thing], units: list[Unit], camera: Camera, light: Light) -> None:
    """Darkens the ground beneath things, and away from the sun where it shines."""
    mask = np.zeros(canvas.shape[:2], dtype=np.uint8)
    sx, sy, sz = light.sun_direction
    sunny = light.sun > 0.2
    chosen = [unit for unit in units if things[unit.thing].shadow and (sunny or things[unit.thing].place[1] < 0.1)]
    if not chosen:
        return
    if sunny:
        parts = [
            (row, index, mesh.vertices[:: max(len(mesh.vertices) // 120, 1)])
            for row, unit in enumerate(chosen)
            for index, mesh in unit.parts
        ]
        world = place_parts(
            things, [i for _, i, _ in parts], [len(v) for _, _, v in parts], np.concatenate([v for _, _, v in parts])
        )
        shift = world[:, 1] / sy
        world[:, 0] -= sx * shift
        world[:, 2] -= sz * shift
        world[:, 1] = 0.0
        lengths = [0] * len(chosen)
        for row, _, vertices in parts:
            lengths[row] += len(vertices)
    else:
        world = np.zeros((4 * len(chosen), 3))
        world[:, ::2] = np.concatenate([unit.corners for unit in chosen])
        lengths = [4] * len(chosen)
    view = camera.view(world)
    pixels = camera.pixels(view, canvas.shape[0])
    ends = list(itertools.accumulate(lengths))
    near = (np.minimum.reduceat(view[:, 2], [0, *ends[:-1]]) < NEAR).tolist()
    for start, end, cut in zip([0, *ends[:-1]], ends, near):
        if not cut:
            cv2.fillConvexPoly(mask, cv2.convexHull(pixels[start:end]), 255, cv2.LINE_8, 4)
    first = min(max(int(camera.horizon() * canvas.shape[0]) - canvas.shape[0] // 30, 0), canvas.shape[0] - 1)
    strength = 128 if sunny else 172
    dark = np.empty((1, 256, 4), dtype=np.uint8)
    dark[0] = (np.arange(256) * strength >> 8)[:, None]
    dark[0, :, 3] = np.arange(256)
    cv2.copyTo(cv2.LUT(canvas[first:], dark), mask[first:], canvas[first:])


def paint(canvas: np.ndarray, faces: Faces, numbers: list[int]) -> None:
    """All faces, in order, with the number of each one's thing."""
    pixels, fill = faces.pixels, cv2.fillConvexPoly
    for start, end, color, thing in zip(faces.starts, faces.ends, faces.colors, faces.things):
        color.append(numbers[thing])
        fill(canvas, pixels[start:end], color, cv2.LINE_8, 4)


def silhouette(faces: Faces, thing: int) -> tuple[float, tuple[int, int, int, int]]:
    """(canvas pixels that a thing covers with nothing in the way and no border, its box in canvas pixels)."""
    spans = faces.spans.get(thing)
    if not spans:
        return 0.0, (0, 0, 0, 0)
    points = np.concatenate([faces.pixels[start:end] for start, end in spans])
    low, high = points.min(axis=0) >> 4, (points.max(axis=0) >> 4) + 2
    shrink = max(1, -(-int((high - low).max()) // 512))  # at most 512 pixels a side
    width, height = ((high - low) // shrink + 2).tolist()
    mask = np.zeros((height, width), dtype=np.uint8)
    start = 0
    moved = (points - low * 16) // shrink
    for first, last in spans:
        end = start + last - first
        cv2.fillConvexPoly(mask, moved[start:end], 1, cv2.LINE_8, 4)
        start = end
    (left, top), (right, bottom) = low.tolist(), high.tolist()
    return float(cv2.countNonZero(mask) * shrink * shrink), (left, top, right, bottom)

"""Meshes: convex faces in meters, put together from the parts that `shapes/*.yaml` list.

Axes as in the world: x to the right, y up, z ahead, to the front of a vehicle. Flat figures are in the plane z = 0.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .camera import Point2, Point3
from .dice import load


Points = Sequence[Point3]
Edges = tuple[float, float, float, float]
SQUARE = ((0, 0), (1, 0), (1, 1), (0, 1))


@dataclass(frozen=True)
class Mesh:
    """Convex faces in painting order.

    Attributes:
        vertices: [V, 3] in meters, face after face.
        starts, ends: [F] first vertex of each face, and the one after its last.
        names: names of the colors in use.
        colors: [F] indices into `names`.
        normals: [F, 3] outward, as long as the area in m².
        two_sided: [F] whether a face is visible from both sides.
        texts: [F] text on each face, mostly empty.
        low, high: corners of the bounding box.
    """

    vertices: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    names: tuple[str, ...]
    colors: np.ndarray
    normals: np.ndarray
    two_sided: np.ndarray
    texts: list[str]
    low: Point3
    high: Point3


@functools.cache
def make_mesh(group: str, name: str, *tags: str, pose: int = 0, text: str = "") -> Mesh:
    """The mesh of a shape.

    Args:
        group, name: of the shape in `shapes/*.yaml`.
        tags: values of `with` and `without` that hold, such as "bag" or "back".
        pose: index into `pose` lists.
        text: what is written in place of "TEXT".
    """
    shape = load("shapes")[group][name]
    builder = Builder((*tags, f"pose {pose}"), pose, {"TEXT": text})
    if isinstance(shape, dict):
        for joint, value in shape.get("joints", {}).items():
            builder.values[joint] = builder.evaluate(value)
        shape = shape["parts"]
    builder.add(shape)
    return builder.build()


class Builder:
    """Builds a mesh from parts, in painting order. A color is a key of a palette.

    `shapes/*.yaml` name the methods for parts; `shapes/README.md` explains them.

    Attributes:
        tags, pose: what `evaluate` and `add` choose from a shape.
        values: of the names in a shape: points, numbers, texts and colors.
        side: -1 mirrors further parts to the left, 1 does not.
        shift: meters in x, y, z by which further parts are moved.
    """

    def __init__(self, tags: Sequence[str] = (), pose: int = 0, values: dict[str, Any] | None = None) -> None:
        self.tags, self.pose, self.values = tags, pose, values or {}
        self.side = 1
        self.shift: Sequence[float] = (0.0, 0.0, 0.0)
        self._vertices: list[Sequence[float]] = []
        self._faces: list[tuple[int, str, Point3, str]] = []

    def build(self) -> Mesh:
        """The mesh of all faces so far."""
        vertices = np.array(self._vertices, dtype=np.float64)
        firsts, colors, towards, texts = zip(*self._faces)
        starts = np.array(firsts)
        ends = np.append(starts[1:], len(vertices))
        following = np.arange(1, len(vertices) + 1)
        following[ends - 1] = starts
        normals = np.add.reduceat(np.cross(vertices, vertices[following]), starts) / 2  # Newell's method
        fronts = np.sign((normals * np.array(towards)).sum(axis=1))  # 0: both sides
        normals[fronts < 0] *= -1
        names = tuple(dict.fromkeys(colors))
        indices = np.array([names.index(color) for color in colors])
        low, high = tuple(vertices.min(axis=0).tolist()), tuple(vertices.max(axis=0).tolist())
        return Mesh(vertices, starts, ends, names, indices, normals, fronts == 0, list(texts), low, high)

    # Shapes of files

    def add(self, parts: Sequence[Any]) -> None:
        """Add parts and groups of parts of a shape."""
        for part in parts:
            if isinstance(part, list):
                kind, *arguments = part
                getattr(self, kind)(*map(self.evaluate, arguments))
            elif part.get("with", "") in {"", *self.tags} and part.get("without") not in self.tags:
                outer_side, outer_shift = self.side, self.shift
                sides = (-1, 1) if part.get("mirrored") else (1,)
                for side, i in itertools.product(sides, range(part.get("repeated", 1))):
                    self.side = outer_side * side
                    self.shift = [x + i * step for x, step in zip(outer_shift, part.get("step", (0, 0, 0)))]
                    self.add(part["parts"])
                self.side, self.shift = outer_side, outer_shift

    def evaluate(self, value: Any) -> Any:
        """The value of an argument of a part: of the name of a joint its place, of [joint, dx, dy] a place near it."""
        match value:
            case {"pose": choices}:
                return self.evaluate(choices[self.pose])
            case str():
                return self.values.get(value, value)
            case [str(joint), float() | int() as dx, float() | int() as dy] if joint in self.values:
                x, y = self.values[joint]
                return [x + dx, y + dy]
            case list():
                return [self.evaluate(item) for item in value]
        return value

    # Simple parts

    def face(self, color: str, points: Points, toward: Point3 = (0, 0, 0), text: str = "") -> None:
        """A convex face; `toward` is the rough direction of its front, (0, 0, 0) for both sides."""
        (dx, dy, dz), side = self.shift, self.side
        self._faces.append((len(self._vertices), color, (side * toward[0], toward[1], toward[2]), text))
        self._vertices.extend((side * x + dx, y + dy, z + dz) for x, y, z in points)

    def flat(self, color: str, points: Sequence[Point2], toward: float = 0, z: float = 0.0) -> None:
        """A convex polygon of (x, y) whose front faces -z (`toward` = -1), +z (1), or both (0)."""
        self.face(color, [(x, y, z) for x, y in points], (0, 0, toward))

    def plate(self, color: str, x: Point2, y: Point2, z: float = 0.0, toward: float = 0) -> None:
        """A rectangle between two x and two y, in the plane at z."""
        self.flat(color, [(x[i], y[j]) for i, j in SQUARE], toward, z)

    def wall(self, color: str, x: float, y: Point2, z: Point2) -> None:
        """A rectangle between two y and two z that faces away from x = 0."""
        self.face(color, [(x, y[i], z[j]) for j, i in SQUARE], (x, 0, 0))

    def disc(
        self, color: str, x: float, y: float, radius: float, sides: int = 12, toward: float = 0, z: float = 0.0
    ) -> None:
        """A regular polygon."""
        self.flat(color, [(x + radius * s, y + radius * c) for s, c in circle(sides)], toward, z)

    def limb(self, color: str, start: Point2, end: Point2, width: float, tip: float | None = None) -> None:
        """A stroke from one width to another, its ends slightly pointed."""
        (ax, ay), (bx, by) = start, end
        length = math.hypot(bx - ax, by - ay) or 1.0
        dx, dy = (bx - ax) / length, (by - ay) / length
        wide, thin = width / 2, (width if tip is None else tip) / 2
        across = ((-dy, dx), (-dx, -dy), (dy, -dx))
        points = [(ax + x * wide, ay + y * wide) for x, y in across]
        self.flat(color, points + [(bx - x * thin, by - y * thin) for x, y in across])

    def ring(self, color: str, x: float, y: float, radius: float, width: float) -> None:
        """A circle of strokes, through which one can see."""
        rim = [(x + radius * s, y + radius * c) for s, c in circle(14)]
        for start, end in itertools.pairwise([*rim, rim[0]]):
            self.limb(color, start, end, width)

    def text(self, color: str, half_width: float, half_height: float, text: str) -> None:
        """A text around (0, 0) that faces -z."""
        x, y = half_width, half_height
        self.face(color, [(-x, y, 0), (x, y, 0), (x, -y, 0), (-x, -y, 0)], (0, 0, -1), text)

    def pane(self, color: str, quad: Points, edges: Edges, toward: Point3) -> None:
        """A pane in a quad of corners from the top left to the bottom left, clockwise.

        Args:
            edges: left, top, right and bottom edge of the pane, as fractions of the quad's sides.
        """
        left, top, right, bottom = edges
        u, v = np.array([left, right, right, left]), np.array([top, top, bottom, bottom])
        weights = np.stack([(1 - u) * (1 - v), u * (1 - v), u * v, (1 - u) * v], axis=1)
        self.face(color, (weights @ np.array(quad)).tolist(), toward)

    def box(self, color: str, x: Point2, y: Point2, z: Point2) -> None:
        """A box without its bottom."""
        x = (x[0], x[1]) if self.side > 0 else (x[1], x[0])  # the left side is painted first, even if mirrored
        for end, toward in ((0, -1), (1, 1)):
            self.plate(color, x, y, z[end], toward)
            self.face(color, [(x[end], y[i], z[j]) for i, j in SQUARE], (toward * self.side, 0, 0))
        self.face(color, [(x[i], y[1], z[j]) for i, j in SQUARE], (0, 1, 0))

    def prism(self, color: str, profile: Sequence[Point2], half_widths: Sequence[float]) -> None:
        """A convex profile of (z, y) extruded along x, with one half width per corner."""
        middle_z, middle_y = (sum(values) / len(profile) for values in zip(*profile))
        corners = [((-w, y, z), (w, y, z)) for (z, y), w in zip(profile, half_widths)]
        for (left, right), (next_left, next_right) in itertools.pairwise([*corners, corners[0]]):
            toward = (0.0, (left[1] + next_left[1]) / 2 - middle_y, (left[2] + next_left[2]) / 2 - middle_z)
            self.face(color, [left, right, next_right, next_left], toward)
        for side, outside in ((0, -1), (1, 1)):
            self.face(color, [corner[side] for corner in corners], (outside, 0, 0))

    # Parts of animals and vehicles. `half` is half a vehicle's width, `axles` are z in meters.

    def legs(self, xs: Sequence[float], top: float, widths: Point2, swing: float) -> None:
        """Four legs of an animal from their x at the body: the far two in the color "mark", the near two in "coat"."""
        for x, way, color in zip(xs, (1, -1, -1, 1), ("mark", "mark", "coat", "coat")):
            knee, foot = (x + way * swing * 0.4, top * 0.5), (x + way * swing, 0.04)
            self.limb(color, (x, top), knee, *widths)
            self.limb(color, knee, foot, widths[1], widths[1] * 0.8)
            self.limb("dark", foot, (foot[0] + 0.04, 0.03), widths[1], widths[1] * 0.8)

    def tires(self, half: float, axles: Sequence[float], radius: float) -> None:
        """Tires as seen from the front and the back, to be painted before the body."""
        for z, side, toward in itertools.product(axles, (-1, 1), (-1, 1)):
            edges = (side * half * 0.98, side * (half - 0.24))
            self.plate("tire", edges, (0, 0.6), z + toward * radius * 0.8, toward)

    def wheels(self, half: float, axles: Sequence[float], radius: float) -> None:
        """Wheels on the sides, to be painted after the body."""
        for z, x in itertools.product(axles, (-half, half)):
            for color, r in (("tire", radius), ("hub", radius * 0.58)):
                self.face(color, [(x, radius + r * c, z + r * s) for s, c in circle(12)], (x, 0, 0))

    def ends(self, half: float, front: float, back: float, low: float, high: float) -> None:
        """Lamps, license plates, grille and bumpers on flat ends at z = `front` and `back`, from `low` to `high`."""

        def part(color: str, left: float, right: float, bottom: float, top: float, z: float) -> None:
            heights = low + bottom * (high - low), low + top * (high - low)
            self.plate(color, (left * half, right * half), heights, z, 1 if z == front else -1)

        part("trim", -0.52, 0.52, 0.4, 0.8, front)
        for side in (-1, 1):
            part("head", side * 0.95, side * 0.58, 0.48, 0.86, front)
            part("tail", side * 0.95, side * 0.66, 0.48, 0.86, back)
        for z in (front, back):
            part("trim", -0.97, 0.97, 0.0, 0.22, z)
            part("plate", -0.28, 0.28, 0.22, 0.4, z)

    def cabin(self, outline: Sequence[Point2], waist: float, roof: float, panes: int, glazed: float = 0.95) -> None:
        """The upper part of a car or van, with windows and mirrors.

        Args:
            outline: (z, y) of the front foot, roof front, roof back and back foot.
            waist, roof: half the width at the feet and at the roof.
            panes: number of panes on each side.
            glazed: fraction of each side up to which they reach.
        """
        (foot, low), (front, high), (back, _), (back_foot, _) = outline
        self.prism("body", outline, [waist, roof, roof, waist])
        for top_z, low_z, toward in ((front, foot, 1), (back, back_foot, -1)):
            window = [(-roof, high, top_z), (roof, high, top_z), (waist, low, low_z), (-waist, low, low_z)]
            self.pane("glass", window, (0.08, 0.1, 0.92, 0.9), (0, 0.3, toward))
        side = [(roof, high, front), (roof, high, back), (waist, low, back_foot), (waist, low, foot)]
        width = glazed / panes
        for self.side in (-1, 1):  # afterwards it is 1 again
            for i in range(panes):
                self.pane("glass", side, (i * width + 0.04, 0.12, (i + 1) * width, 0.92), (1, 0.3, 0))
            self.box("trim", (waist, waist + 0.18), (low + 0.04, low + 0.18), (foot - 0.35, foot - 0.25))


@functools.cache
def circle(sides: int) -> list[Point2]:
    """Sines and cosines of the corners of a regular polygon with a flat bottom."""
    angles = [math.pi * (2 * i + 1) / sides for i in range(sides)]
    return [(math.sin(angle), math.cos(angle)) for angle in angles]

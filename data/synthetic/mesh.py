"""Meshes: convex faces in meters, put together from simple parts.

Axes as in the world: x to the right, y up, z ahead, to the front of a vehicle. Flat figures are in the plane z = 0.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .camera import Point2, Point3


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


class Builder:
    """Builds a mesh from faces, added part by part in painting order. A color is a key of a palette.

    Attributes:
        side: -1 mirrors further parts to the left, 1 does not.
        shift: meters in x, y, z by which further parts are moved.
    """

    def __init__(self) -> None:
        self.side = 1
        self.shift: Sequence[float] = (0.0, 0.0, 0.0)
        self._vertices: list[Sequence[float]] = []
        self._faces: list[tuple[int, str, Point3, str]] = []

    def flat(self, color: str, points: Sequence[Point2], toward: float = 0, z: float = 0.0) -> None:
        """A convex polygon of (x, y) whose front faces -z (`toward` = -1), +z (1), or both (0)."""
        self.face(color, [(x, y, z) for x, y in points], (0, 0, toward))

    def plate(self, color: str, x: Point2, y: Point2, z: float = 0.0, toward: float = 0) -> None:
        """A rectangle between two x and two y, in the plane at z."""
        self.flat(color, [(x[i], y[j]) for i, j in SQUARE], toward, z)

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

    def face(self, color: str, points: Sequence[Point3], toward: Point3 = (0, 0, 0), text: str = "") -> None:
        """A convex face; `toward` is the rough direction of its front, (0, 0, 0) for both sides."""
        (dx, dy, dz), side = self.shift, self.side
        self._faces.append((len(self._vertices), color, (side * toward[0], toward[1], toward[2]), text))
        self._vertices.extend((side * x + dx, y + dy, z + dz) for x, y, z in points)

    def pane(
        self,
        color: str,
        quad: Sequence[Point3],
        edges: Sequence[float],
        toward: Point3,
        count: int = 1,
        step: float = 0.0,
    ) -> None:
        """Panes in a quad: left, top, right and bottom edge of the first; the next one is `step` farther right."""
        left, top, right, bottom = edges
        for i in range(count):
            self.face(color, inset(quad, left + i * step, top, right + i * step, bottom), toward)

    def wall(self, color: str, x: float, y: Point2, z: Point2) -> None:
        """A rectangle between two y and two z that faces away from x = 0."""
        self.face(color, [(x, y[i], z[j]) for j, i in SQUARE], (x, 0, 0))

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


def inset(quad: Sequence[Point3], left: float, top: float, right: float, bottom: float) -> list[Point3]:
    """Part of a quad (top left, top right, bottom right, bottom left), its edges as fractions of the quad's sides."""
    corners = np.array(quad)

    def at(u: float, v: float) -> Point3:
        return tuple(np.array([(1 - u) * (1 - v), u * (1 - v), u * v, (1 - u) * v]) @ corners)

    return [at(left, top), at(right, top), at(right, bottom), at(left, bottom)]


@functools.cache
def circle(sides: int) -> list[Point2]:
    """Sines and cosines of the corners of a regular polygon with a flat bottom."""
    angles = [math.pi * (2 * i + 1) / sides for i in range(sides)]
    return [(math.sin(angle), math.cos(angle)) for angle in angles]

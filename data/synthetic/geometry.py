"""Shapes and the camera: convex polygons in meters, and a pinhole camera above flat ground.

World axes: x to the right, y up, z ahead; the ground is at y = 0. A mesh has the same axes, its front towards +z.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


Point2 = tuple[float, float]
Point3 = tuple[float, float, float]
NEAR = 0.6  # meters: nothing nearer to the camera is drawn
SCALE = 2  # canvas pixels per image pixel
SQUARE = ((0, 0), (1, 0), (1, 1), (0, 1))


@dataclass(frozen=True)
class Camera:
    """A pinhole at (`x`, `height`, 0) meters.

    Attributes:
        yaw: radians to the right of +z.
        pitch: radians down.
        roll: radians, clockwise.
        focal: horizontal and vertical focal length in image sizes.
    """

    x: float
    height: float
    yaw: float
    pitch: float
    roll: float
    focal: Point2

    @functools.cached_property
    def axes(self) -> np.ndarray:
        """The directions right, up and ahead of the camera in the world, [3, 3], one per column."""
        sin_yaw, cos_yaw = math.sin(self.yaw), math.cos(self.yaw)
        sin_pitch, cos_pitch = math.sin(self.pitch), math.cos(self.pitch)
        right = (cos_yaw, 0.0, -sin_yaw)
        up = (sin_yaw * sin_pitch, cos_pitch, cos_yaw * sin_pitch)
        ahead = (sin_yaw * cos_pitch, -sin_pitch, cos_yaw * cos_pitch)
        return np.array([right, up, ahead]).T

    def view(self, points: np.ndarray) -> np.ndarray:
        """World points [N, 3] → (right, up, depth) [N, 3], all in meters."""
        return (points - (self.x, self.height, 0.0)) @ self.axes

    def pixels(self, view: np.ndarray, size: int) -> np.ndarray:
        """(right, up, depth) [N, 3] → int32 (column, row) [N, 2] in 1/16 pixels of an image of `size` × `size`."""
        plane = view[:, :2] / np.maximum(view[:, 2:], 0.05) * (self.focal[0], -self.focal[1])
        sine, cosine = math.sin(self.roll), math.cos(self.roll)
        rolled = plane @ np.array([(cosine, sine), (-sine, cosine)])
        return np.clip(np.rint((rolled + 0.5) * (16 * size)), -(2**24), 2**24).astype(np.int32)

    def look(self, x: float, y: float, z: float) -> Point3:
        """(column, row, depth) of a world point, without roll: in image sizes and meters; depth ≤ 0 is behind."""
        right, up, depth = ((x - self.x, y - self.height, z) @ self.axes).tolist()
        scale = 1 / max(depth, 1e-3)
        return 0.5 + right * scale * self.focal[0], 0.5 - up * scale * self.focal[1], depth

    def horizon(self) -> float:
        """Row of the horizon at the center column, in image sizes."""
        return 0.5 - self.focal[1] * math.tan(self.pitch)

    def first_ground_row(self, size: int) -> int:
        """A row above all ground in an image of `size` pixels, however the camera is rolled."""
        return min(max(int(self.horizon() * size) - size // 30, 0), size - 1)

    def bearing(self, x: float, z: float) -> float:
        """Heading of the line from the camera to a place on the ground, radians to the right of +z."""
        return math.atan2(x - self.x, z)


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
    """Collects faces; `build` makes the mesh. A color is a key of a palette."""

    def __init__(self) -> None:
        self.vertices: list[Sequence[float]] = []
        self.faces: list[tuple[int, str, Point3, str]] = []

    def face(self, points: Sequence, color: str, toward: Point3 = (0, 0, 0), text: str = "") -> None:
        """A convex face; `toward` is the rough direction of its front, (0, 0, 0) for both sides."""
        self.faces.append((len(self.vertices), color, toward, text))
        self.vertices.extend(points)

    def plate(self, x: Point2, y: Point2, z: float, color: str, toward: float) -> None:
        """A rectangle whose front faces -z or +z."""
        self.face([(x[i], y[j], z) for i, j in SQUARE], color, (0, 0, toward))

    def box(self, x: Point2, y: Point2, z: Point2, color: str) -> None:
        """A box without its bottom."""
        for side, toward in ((0, -1), (1, 1)):
            self.plate(x, y, z[side], color, toward)
            self.face([(x[side], y[i], z[j]) for i, j in SQUARE], color, (toward, 0, 0))
        self.face([(x[i], y[1], z[j]) for i, j in SQUARE], color, (0, 1, 0))

    def prism(self, profile: Sequence[Point2], half_widths: Sequence[float], color: str) -> None:
        """A convex profile of (z, y) extruded along x, with one half width per corner."""
        middle_z, middle_y = (sum(values) / len(profile) for values in zip(*profile))
        corners = [((-w, y, z), (w, y, z)) for (z, y), w in zip(profile, half_widths)]
        for (left, right), (next_left, next_right) in itertools.pairwise([*corners, corners[0]]):
            toward = (0.0, (left[1] + next_left[1]) / 2 - middle_y, (left[2] + next_left[2]) / 2 - middle_z)
            self.face([left, right, next_right, next_left], color, toward)
        for side, outside in ((0, -1), (1, 1)):
            self.face([corner[side] for corner in corners], color, (outside, 0, 0))

    def wheel(self, x: float, y: float, z: float, radius: float, color: str) -> None:
        """A disc that faces away from x = 0."""
        self.face([(x, y + radius * c, z + radius * s) for s, c in circle(12)], color, (x, 0, 0))

    def flat(self, points: Sequence[Point2], color: str) -> None:
        """A face in the plane z = 0, visible from both sides."""
        self.face([(x, y, 0.0) for x, y in points], color)

    def disc(self, x: float, y: float, radius: float, color: str, sides: int = 12) -> None:
        """A regular polygon in the plane z = 0."""
        self.flat([(x + radius * s, y + radius * c) for s, c in circle(sides)], color)

    def limb(self, start: Point2, end: Point2, color: str, width: float, tip: float | None = None) -> None:
        """A stroke in the plane z = 0 from one width to another, its ends slightly pointed."""
        (ax, ay), (bx, by) = start, end
        length = math.hypot(bx - ax, by - ay) or 1.0
        dx, dy = (bx - ax) / length, (by - ay) / length
        wide, thin = width / 2, (width if tip is None else tip) / 2
        across = ((-dy, dx), (-dx, -dy), (dy, -dx))
        points = [(ax + x * wide, ay + y * wide) for x, y in across]
        self.flat(points + [(bx - x * thin, by - y * thin) for x, y in across], color)

    def build(self) -> Mesh:
        """The mesh of all faces so far."""
        vertices = np.array(self.vertices, dtype=np.float64)
        firsts, colors, towards, texts = zip(*self.faces)
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


def inset(quad: Sequence, left: float, top: float, right: float, bottom: float) -> list[Point3]:
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

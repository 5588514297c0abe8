"""Shapes and the camera that sees them: convex polygons in metres, and a pinhole above a flat ground.

World: x to the right, y up, z ahead, the ground at y = 0. A shape's own axes are the same, its front towards +z.
Only the four basic operations and square roots, which IEEE 754 rounds exactly, touch the coordinates, and sines are
rounded: the pixels are the same on every machine.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


Point = tuple[float, float, float]
NEAR = 0.6  # metres in front of the camera where the picture begins


def turn(angle: float) -> tuple[float, float]:
    """Sine and cosine of an angle in radians, free of a libm's last digit."""
    return round(math.sin(angle), 9), round(math.cos(angle), 9)


@dataclass(frozen=True)
class Camera:
    """A pinhole at (`x`, `height`, 0) metres.

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
    focal: tuple[float, float]

    @functools.cached_property
    def turns(self) -> tuple[float, float, float, float, float, float]:
        """Sines and cosines of yaw, pitch and roll."""
        return (*turn(self.yaw), *turn(self.pitch), *turn(self.roll))

    def view(self, points: np.ndarray) -> np.ndarray:
        """World points [N, 3] in metres → (right, up, depth) [N, 3] in metres."""
        sin_yaw, cos_yaw, sin_pitch, cos_pitch, _, _ = self.turns
        x, y, z = points[:, 0] - self.x, points[:, 1] - self.height, points[:, 2]
        ahead = x * sin_yaw + z * cos_yaw
        seen = np.empty_like(points)
        seen[:, 0] = x * cos_yaw - z * sin_yaw
        seen[:, 1] = y * cos_pitch + ahead * sin_pitch
        seen[:, 2] = ahead * cos_pitch - y * sin_pitch
        return seen

    def pixels(self, view: np.ndarray, size: int) -> np.ndarray:
        """(right, up, depth) [N, 3] → int32 (column, row) [N, 2] in 1/16 pixels of an image of `size` × `size`."""
        sin_roll, cos_roll = self.turns[4:]
        depth = np.maximum(view[:, 2], 0.05)
        right = view[:, 0] / depth * self.focal[0]
        down = view[:, 1] / depth * -self.focal[1]
        places = np.empty((len(view), 2))
        places[:, 0] = right * cos_roll - down * sin_roll
        places[:, 1] = right * sin_roll + down * cos_roll
        return np.clip(np.rint((places + 0.5) * (16 * size)), -(2**24), 2**24).astype(np.int32)

    def look(self, x: float, y: float, z: float) -> tuple[float, float, float]:
        """(column, row, depth) of one point: in image sizes, and metres; depth ≤ 0 is behind."""
        sin_yaw, cos_yaw, sin_pitch, cos_pitch, _, _ = self.turns
        x, y = x - self.x, y - self.height
        ahead = x * sin_yaw + z * cos_yaw
        depth = ahead * cos_pitch - y * sin_pitch
        scale = 1 / max(depth, 1e-3)
        column = 0.5 + (x * cos_yaw - z * sin_yaw) * scale * self.focal[0]
        return column, 0.5 - (y * cos_pitch + ahead * sin_pitch) * scale * self.focal[1], depth

    def horizon(self) -> float:
        """Row of the horizon in image sizes at the centre column."""
        _, _, sine, cosine, _, _ = self.turns
        return 0.5 - self.focal[1] * sine / cosine


@dataclass(frozen=True)
class Mesh:
    """Convex faces in the order in which they are painted; of those with a normal only the front is seen.

    Attributes:
        vertices: [V, 3] in metres.
        starts, ends: [F] the vertices of each face.
        slots: [F] which colour of a palette.
        normals: [F, 3], zero for a face that is seen from both sides.
        detail: [F] pixels per metre from which a face is worth painting.
        footprint: (left, right, back, front) in metres.
        height: metres.
    """

    vertices: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    slots: np.ndarray
    normals: np.ndarray
    detail: np.ndarray
    footprint: tuple[float, float, float, float]
    height: float


def inset(quad: Sequence[Point], left: float, top: float, right: float, bottom: float) -> list[Point]:
    """Part of a quad given as top left, top right, bottom right, bottom left; places are shares of its sides."""

    def at(u: float, v: float) -> Point:
        weights = ((1 - u) * (1 - v), u * (1 - v), u * v, (1 - u) * v)
        x, y, z = (sum(w * p[axis] for w, p in zip(weights, quad)) for axis in range(3))
        return x, y, z

    return [at(left, top), at(right, top), at(right, bottom), at(left, bottom)]


class Builder:
    """Collects faces; `build` makes the mesh."""

    def __init__(self) -> None:
        self.vertices: list[Point] = []
        self.faces: list[tuple[int, int, int, Point, float]] = []

    def face(self, points: Sequence[Point], slot: int, toward: Point | None = None, detail: float = 0.0) -> None:
        """A convex face; `toward` is roughly where its front looks, None for both sides."""
        normal = (0.0, 0.0, 0.0)
        if toward is not None:
            (ax, ay, az), (bx, by, bz), (cx, cy, cz) = points[0], points[1], points[2]
            ux, uy, uz, vx, vy, vz = bx - ax, by - ay, bz - az, cx - ax, cy - ay, cz - az
            normal = (uy * vz - uz * vy, uz * vx - ux * vz, ux * vy - uy * vx)
            length = math.sqrt(sum(n * n for n in normal))
            sign = 1 if sum(n * t for n, t in zip(normal, toward)) >= 0 else -1
            normal = (normal[0] * sign / length, normal[1] * sign / length, normal[2] * sign / length)
        start = len(self.vertices)
        self.vertices.extend(points)
        self.faces.append((start, len(self.vertices), slot, normal, detail))

    def prism(self, profile: Sequence[tuple[float, float]], widths: Sequence[float], slot: int) -> None:
        """A convex profile of (z, y) drawn out to ±width, one half width per corner, in metres."""
        middle_z = sum(z for z, _ in profile) / len(profile)
        middle_y = sum(y for _, y in profile) / len(profile)
        ring = [*range(len(profile)), 0]
        for a, b in itertools.pairwise(ring):
            (az, ay), (bz, by), wa, wb = profile[a], profile[b], widths[a], widths[b]
            toward = (0.0, (ay + by) / 2 - middle_y, (az + bz) / 2 - middle_z)
            self.face([(-wa, ay, az), (wa, ay, az), (wb, by, bz), (-wb, by, bz)], slot, toward)
        for side in (-1.0, 1.0):
            self.face([(side * w, y, z) for (z, y), w in zip(profile, widths)], slot, (side, 0.0, 0.0))

    def box(self, x: tuple[float, float], y: tuple[float, float], z: tuple[float, float], slot: int) -> None:
        """A box of five faces; nobody sees it from below."""
        (x0, x1), (y0, y1), (z0, z1) = x, y, z
        self.face([(x0, y0, z0), (x1, y0, z0), (x1, y1, z0), (x0, y1, z0)], slot, (0.0, 0.0, -1.0))
        self.face([(x0, y0, z1), (x1, y0, z1), (x1, y1, z1), (x0, y1, z1)], slot, (0.0, 0.0, 1.0))
        self.face([(x0, y0, z0), (x0, y0, z1), (x0, y1, z1), (x0, y1, z0)], slot, (-1.0, 0.0, 0.0))
        self.face([(x1, y0, z0), (x1, y0, z1), (x1, y1, z1), (x1, y1, z0)], slot, (1.0, 0.0, 0.0))
        self.face([(x0, y1, z0), (x1, y1, z0), (x1, y1, z1), (x0, y1, z1)], slot, (0.0, 1.0, 0.0))

    def flat(self, points: Sequence[tuple[float, float]], slot: int, detail: float = 0.0, z: float = 0.0) -> None:
        """A face of the upright plane of x and y, seen from both sides."""
        self.face([(x, y, z) for x, y in points], slot, None, detail)

    def disc(self, x: float, y: float, radius: float, slot: int, sides: int = 12, detail: float = 0.0) -> None:
        """A regular polygon in the plane of x and y, flat at its bottom."""
        self.flat([(x + radius * s, y + radius * c) for s, c in circle(sides)], slot, detail)

    def wheel(self, side: float, y: float, z: float, radius: float, slot: int, detail: float = 0.0) -> None:
        """A disc at x = `side` that looks outwards."""
        points = [(side, y + radius * c, z + radius * s) for s, c in circle(12)]
        self.face(points, slot, (1.0 if side > 0 else -1.0, 0.0, 0.0), detail)

    def limb(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        slot: int,
        widths: tuple[float, float],
        detail: float = 0.0,
    ) -> None:
        """A stroke in the plane of x and y from one width to another, its ends pointed a little."""
        (ax, ay), (bx, by) = start, end
        length = math.sqrt((bx - ax) * (bx - ax) + (by - ay) * (by - ay)) or 1.0
        dx, dy, wa, wb = (bx - ax) / length, (by - ay) / length, widths[0] / 2, widths[1] / 2
        points = [
            (ax - dy * wa, ay + dx * wa),
            (ax - dx * wa, ay - dy * wa),
            (ax + dy * wa, ay - dx * wa),
            (bx + dy * wb, by - dx * wb),
            (bx + dx * wb, by + dy * wb),
            (bx - dy * wb, by + dx * wb),
        ]
        self.flat(points, slot, detail)

    def build(self) -> Mesh:
        """The mesh, its footprint and height those of its vertices."""
        vertices = np.array(self.vertices, dtype=np.float64)
        starts, ends, slots, normals, detail = zip(*self.faces)
        low, high = vertices.min(axis=0).tolist(), vertices.max(axis=0).tolist()
        return Mesh(
            vertices,
            np.array(starts),
            np.array(ends),
            np.array(slots),
            np.array(normals, dtype=np.float64),
            np.array(detail, dtype=np.float64),
            (low[0], high[0], low[2], high[2]),
            high[1],
        )


def circle(sides: int) -> list[tuple[float, float]]:
    """Sines and cosines of a regular polygon, flat at its bottom."""
    return [turn(math.pi * (2 * i + 1) / sides) for i in range(sides)]

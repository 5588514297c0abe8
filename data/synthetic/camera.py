"""A pinhole camera above flat ground.

World axes in meters: x to the right, y up, z ahead; the ground is at y = 0.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np


Point2 = tuple[float, float]
Point3 = tuple[float, float, float]
NEAR = 0.6  # meters: nothing nearer to the camera is drawn
SCALE = 2  # canvas pixels per image pixel


@dataclass(frozen=True)
class Camera:
    """A pinhole at (`x`, `height`, 0) meters.

    Attributes:
        yaw: radians to the right of +z.
        pitch: radians down.
        focal: horizontal and vertical focal length in image sizes.
    """

    x: float
    height: float
    yaw: float
    pitch: float
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
        """(right, up, depth) [N, 3] of world points [N, 3], all in meters."""
        return (points - (self.x, self.height, 0.0)) @ self.axes

    def project(self, view: np.ndarray) -> np.ndarray:
        """(column, row) [N, 2] in image sizes of (right, up, depth) [N, 3]."""
        return 0.5 + view[:, :2] / np.maximum(view[:, 2:], 0.05) * (self.focal[0], -self.focal[1])

    def pixels(self, view: np.ndarray, size: int) -> np.ndarray:
        """(column, row) in 1/16 pixels of an image of `size` × `size`, int32 [N, 2], of (right, up, depth) [N, 3]."""
        return np.clip(np.rint(self.project(view) * (16 * size)), -(2**24), 2**24).astype(np.int32)

    def look(self, x: float, y: float, z: float) -> Point3:
        """(column, row, depth) of a world point, in image sizes and meters; depth ≤ 0 is behind."""
        view = self.view(np.array([(x, y, z)]))
        column, row = self.project(view)[0].tolist()
        return column, row, float(view[0, 2])

    def horizon(self, size: int) -> int:
        """Row of the horizon in an image of `size` pixels; 0 if it is above the image."""
        return min(max(round((0.5 - self.focal[1] * math.tan(self.pitch)) * size), 0), size)

    @functools.cached_property
    def nearest_ground(self) -> float:
        """Meters from which the ground comes into the picture; 0 for a driver's camera, which sees it from nearby."""
        down = self.pitch + math.atan(0.5 / self.focal[1])
        return self.height * math.cos(down) / max(math.sin(down), 0.05) if self.height > 3 else 0.0

    def bearing(self, x: float, z: float) -> float:
        """Heading of the line from the camera to a place on the ground, radians to the right of +z."""
        return math.atan2(x - self.x, z)

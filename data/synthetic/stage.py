"""Paints the things of a plan on a canvas, back to front.

The canvas has twice the image's size and four channels: red, green, blue, and the number of the visible object. Every
polygon writes all four at once, so annotations and image cannot differ.
"""

import functools
from collections import defaultdict

import cv2
import numpy as np

from .camera import NEAR, SCALE
from .light import Light
from .plan import Plan


cv2.setNumThreads(0)

SMALL = 0.7  # image pixels: smaller faces (root of their area) are not drawn
# Corners of a box, the four on the ground first: True is the higher value of x, y, z.
CORNERS = np.array([(x, y, z) for y in (0, 1) for x, z in ((0, 0), (1, 0), (1, 1), (0, 1))], dtype=bool)


class Stage:
    """The parts of all things, placed in the world and on a canvas of `size` pixels.

    A thing with a part nearer than NEAR is left out, together with what it carries.

    Attributes:
        parts: (index of the thing, mesh) in painting order, [P].
        footprints: corners (x, z) of each thing's parts on the ground, {thing: [[4, 2], ...]}.
        world: vertices of all parts, [V, 3] in meters.
        bounds: first vertex of each part, and the end, [P + 1].
        faces: (thing, corners in 1/16 canvas pixels, color, text) of each visible face in painting order.
        outlines: the corners of these faces for each thing, {thing: [[N, 2], ...]}.
    """

    def __init__(self, plan: Plan, size: int):
        self.plan, self.size = plan, size
        self.parts = [(index, mesh) for index, thing in enumerate(plan.things) for mesh in thing.meshes]
        self.footprints: dict[int, list[np.ndarray]] = defaultdict(list)
        self.faces: list[tuple[int, np.ndarray, list[int], str]] = []
        self.outlines: dict[int, list[np.ndarray]] = defaultdict(list)
        if self.parts:
            self._sort_parts()
        if self.parts:
            self._place_faces()

    def _matrices_and_places(self) -> tuple[np.ndarray, np.ndarray]:
        """Rotation and scale [P, 3, 3], and place [P, 3], of the thing of each part."""
        things = [self.plan.things[index] for index, _ in self.parts]
        return np.array([thing.matrix for thing in things]), np.array([thing.place for thing in things])

    def _sort_parts(self) -> None:
        """Drop parts that are too near, and sort the others back to front."""
        things, camera = self.plan.things, self.plan.camera
        low, high = (np.array([getattr(mesh, end) for _, mesh in self.parts]) for end in ("low", "high"))
        boxes = np.where(CORNERS, high[:, None], low[:, None]).reshape(-1, 3)
        matrices, places = self._matrices_and_places()
        world = multiply(matrices, 8, boxes) + np.repeat(places, 8, axis=0)
        depth = camera.view(world)[:, 2].reshape(-1, 8).min(axis=1)
        footprints = world.reshape(-1, 8, 3)[:, :4, ::2]
        group = np.cumsum([not thing.carried for thing in things])[[index for index, _ in self.parts]]
        too_near = np.isin(group, group[depth < NEAR])
        units: list[list[int]] = []  # rows of the parts that are painted together
        for row in np.flatnonzero(~too_near).tolist():
            if things[self.parts[row][0]].carried:
                units[-1].append(row)
            else:
                units.append([row])
        order = painting_order(footprints[[unit[0] for unit in units]], np.array([camera.x, 0.0]))
        rows = [row for i in order for row in units[i]]
        self.parts = [self.parts[row] for row in rows]
        for row, (index, _) in zip(rows, self.parts):
            self.footprints[index].append(footprints[row])

    def _place_faces(self) -> None:
        """Find the faces that are towards the camera and large enough, with their colors after light and haze."""
        camera, meshes = self.plan.camera, [mesh for _, mesh in self.parts]
        matrices, places = self._matrices_and_places()
        vertices, faces = [len(mesh.vertices) for mesh in meshes], [len(mesh.starts) for mesh in meshes]

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(mesh, name) for mesh in meshes])

        self.bounds = np.cumsum([0, *vertices])
        self.world = multiply(matrices, vertices, joined("vertices")) + np.repeat(places, vertices, axis=0)
        view = camera.view(self.world)
        shift = np.repeat(self.bounds[:-1], faces)
        start, end = joined("starts") + shift, joined("ends") + shift

        # Normals are transformed by the cofactors of the matrix, and stay as long as the area.
        cofactors = np.linalg.det(matrices)[:, None, None] * np.linalg.inv(matrices).transpose(0, 2, 1)
        normal = multiply(cofactors, faces, joined("normals"))
        area = np.linalg.norm(normal, axis=1)
        depth, two_sided = np.maximum(view[start, 2], NEAR), joined("two_sided")
        towards_camera = ((self.world[start] - (camera.x, camera.height, 0.0)) * normal).sum(axis=1) < 0
        large = np.sqrt(area) * (camera.focal[1] * self.size / SCALE) > SMALL * depth
        kept = np.flatnonzero((two_sided | towards_camera) & large)

        unit = normal[kept] / np.maximum(area[kept], 1e-9)[:, None]
        colors = shade(self._base_colors(faces, kept), unit, two_sided[kept], depth[kept], self.plan.light)
        pixels = camera.pixels(view, self.size)
        texts = [text for mesh in meshes for text in mesh.texts]
        owners = np.repeat([index for index, _ in self.parts], faces)[kept].tolist()
        rows = zip(kept.tolist(), owners, start[kept].tolist(), end[kept].tolist(), colors.tolist())
        for face, index, first, last, color in rows:
            corners = pixels[first:last]
            self.faces.append((index, corners, color, texts[face]))
            self.outlines[index].append(corners)

    def _base_colors(self, faces: list[int], kept: np.ndarray) -> np.ndarray:
        """Color of each kept face, and whether it shines by itself, [K, 4]; `faces` counts the faces of each part."""
        palette: list[tuple[int, int, int, bool]] = []
        firsts = []  # rows of the palette at which the colors of each part begin
        for index, mesh in self.parts:
            thing = self.plan.things[index]
            firsts.append(len(palette))
            palette += [(*thing.palette[name], name in thing.bright) for name in mesh.names]
        rows = np.concatenate([mesh.colors for _, mesh in self.parts]) + np.repeat(firsts, faces)
        return np.array(palette)[rows[kept]]

    def cast_shadows(self, canvas: np.ndarray) -> None:
        """Darken the ground away from the sun, or straight below things if the sun does not shine."""
        if not self.parts:
            return
        camera, light, mask = self.plan.camera, self.plan.light, np.zeros(canvas.shape[:2], dtype=np.uint8)
        sunny = light.sun > 0.2
        x, y, z = light.sun_direction
        view = camera.view(self.world - self.world[:, 1:2] * ((x / y, 1.0, z / y) if sunny else (0.0, 1.0, 0.0)))
        pixels, near = camera.pixels(view, self.size), np.minimum.reduceat(view[:, 2], self.bounds[:-1]) < NEAR
        for (index, _), cut, start, end in zip(self.parts, near, self.bounds, self.bounds[1:]):
            thing = self.plan.things[index]
            if thing.shadow and not cut and (sunny or thing.place[1] < 0.1):
                cv2.fillConvexPoly(mask, cv2.convexHull(pixels[start:end]), 255, cv2.LINE_8, 4)
        first, factor = camera.first_ground_row(self.size), 0.5 if sunny else 0.67
        dark = cv2.multiply(canvas[first:], np.array((factor, factor, factor, 1.0)))
        cv2.copyTo(dark, mask[first:], canvas[first:])

    def paint(self, canvas: np.ndarray, numbers: list[int]) -> None:
        """Paint all faces in order, each with the number of its thing."""
        for index, corners, color, text in self.faces:
            if text:
                write(canvas, corners, text, color)
            else:
                cv2.fillConvexPoly(canvas, corners, (*color, numbers[index]), cv2.LINE_8, 4)

    def silhouette(self, index: int) -> tuple[float, tuple[slice, slice]]:
        """Canvas pixels of a thing as if nothing hid or cut it, and the rows and columns that hold it."""
        polygons = self.outlines[index]
        if not polygons:
            return 0.0, (slice(0), slice(0))
        points = np.concatenate(polygons)
        low, high = points.min(axis=0) >> 4, (points.max(axis=0) >> 4) + 2
        shrink = max(1, -(-int((high - low).max()) // 512))  # at most 512 pixels a side
        width, height = ((high - low) // shrink + 2).tolist()
        mask = np.zeros((height, width), dtype=np.uint8)
        for polygon in polygons:
            cv2.fillConvexPoly(mask, (polygon - low * 16) // shrink, 1, cv2.LINE_8, 4)
        columns, rows = (slice(max(start, 0), max(stop, 0)) for start, stop in zip(low.tolist(), high.tolist()))
        return float(cv2.countNonZero(mask) * shrink * shrink), (rows, columns)


def multiply(matrices: np.ndarray, counts: int | list[int], points: np.ndarray) -> np.ndarray:
    """Points [N, 3], `counts` of them for each part, multiplied by the matrix of their part [P, 3, 3]."""
    return np.einsum("nij,nj->ni", np.repeat(matrices, counts, axis=0), points)


def painting_order(footprints: np.ndarray, eye: np.ndarray) -> list[int]:
    """Indices of footprints [U, 4, 2], back to front.

    Of two footprints, the one on the camera's side of an edge between them is in front. All edges of both are tried;
    where no edge separates them, or in a cycle, distance decides.
    """
    count = len(footprints)
    distance = np.linalg.norm((footprints[:, 0] + footprints[:, 2]) / 2 - eye, axis=1)
    first = np.zeros((count, count), dtype=bool)  # [i, j]: i is painted before j
    for side in range(4):
        corner = footprints[:, side]
        edge = footprints[:, (side + 1) % 4] - corner
        normal = np.stack([edge[:, 1], -edge[:, 0]], axis=1)
        inward = ((footprints[:, (side + 2) % 4] - corner) * normal).sum(axis=1) > 0
        normal[inward] *= -1
        offset = (footprints @ normal.T).min(axis=1).T  # [i, j]: lowest corner of j in the direction of i's normal
        own = (corner * normal).sum(axis=1)
        outside = offset >= own[:, None] - 1e-6
        faces_eye = normal @ eye > own
        first |= outside & faces_eye[:, None]
        first |= (outside & ~faces_eye[:, None]).T
    farther = distance[:, None] > distance[None, :]
    first = np.where(first == first.T, farther & first, first)  # both ways: by distance; neither: any order
    waiting, rank, order = first.sum(axis=0), distance.copy(), []
    for _ in range(count):
        free = np.where(waiting == 0, rank, -1.0)
        pick = int(free.argmax() if free.max() >= 0 else rank.argmax())
        order.append(pick)
        rank[pick] = -2.0
        waiting = waiting - first[pick]
    return order


def shade(base: np.ndarray, unit: np.ndarray, flat: np.ndarray, depth: np.ndarray, light: Light) -> np.ndarray:
    """Visible colors [F, 3] of palette rows (red, green, blue, shines by itself) [F, 4] with unit normals [F, 3]."""
    facing = np.where(flat, 0.6, np.maximum(unit @ light.sun_direction, 0))
    # The sky is brighter than the ground, and no two sides of a box look alike.
    sides = np.where(flat, 0.95, 0.92 + 0.1 * unit[:, 1] + 0.06 * unit[:, 0])
    shines = base[:, 3:] > 0
    level = light.sun * facing + light.headlight(depth)
    lit = np.minimum(base[:, :3] * (np.array(light.ambient) * sides[:, None] + level[:, None]), 255)
    lit = np.where(shines, base[:, :3], lit)
    hidden = light.hidden(depth)[:, None] * np.where(shines, 0.6, 1.0)
    return np.rint(lit + (np.array(light.haze_color) - lit) * hidden).astype(np.int64)


@functools.cache
def lettering(text: str) -> np.ndarray:
    """Image of white text on black, cropped to the text, uint8 [height, width]."""
    font, thickness = cv2.FONT_HERSHEY_DUPLEX, 5
    (width, height), _ = cv2.getTextSize(text, font, 1.5, thickness)
    image = np.zeros((height + 2 * thickness, width + 2 * thickness), dtype=np.uint8)
    cv2.putText(image, text, (thickness, height + thickness), font, 1.5, 255, thickness, cv2.LINE_AA)
    left, top, width, height = cv2.boundingRect(image)
    return image[top : top + height, left : left + width]


def write(canvas: np.ndarray, quad: np.ndarray, text: str, color: list[int]) -> None:
    """Stretch text over a quad in 1/16 canvas pixels: top left, top right, bottom right, bottom left."""
    left, top = np.maximum(quad.min(axis=0) >> 4, 0).tolist()
    right, bottom = np.minimum((quad.max(axis=0) >> 4) + 2, len(canvas)).tolist()
    if left >= right or top >= bottom:
        return
    letters = lettering(text)
    height, width = letters.shape
    source = np.array([(0, 0), (width, 0), (width, height), (0, height)], dtype=np.float32)
    matrix = cv2.getPerspectiveTransform(source, (quad / 16 - (left, top)).astype(np.float32))
    cover = cv2.warpPerspective(letters, matrix, (right - left, bottom - top))[..., None] / np.float32(255)
    part = canvas[top:bottom, left:right, :3]
    part[:] = part + (np.array(color, dtype=np.float32) - part) * cover

"""The canvas of a plan: ground and sky, and on them the things, painted back to front.

The canvas has twice the image's size and four channels: red, green, blue, and the number of the visible object. Every
polygon writes all four at once, so annotations and image cannot differ.
"""

import functools
from collections import defaultdict

import cv2
import numpy as np

from .backdrop import draw_backdrop
from .camera import NEAR, SCALE
from .light import Light
from .mesh import Mesh
from .plan import FIRST, STUFF, Plan


cv2.setNumThreads(0)

SMALL = 0.7  # image pixels: smaller faces (root of their area) are not drawn
# Corners of a box, the four on the ground first: True stands for the higher x, y or z.
CORNERS = np.array([(x, y, z) for y in (0, 1) for x, z in ((0, 0), (1, 0), (1, 1), (0, 1))], dtype=bool)


class Stage:
    """A drawn plan.

    A thing with a part nearer than NEAR is left out, together with what it carries.

    Attributes:
        plan: what is drawn.
        size: width and height of the image; the canvas is twice as large.
        canvas: colors and object numbers, uint8 [2 · size, 2 · size, 4].
        ids: the object numbers alone, uint8 [2 · size, 2 · size].
        numbers: object number of each thing of the plan; things of a class without instances share one.
        crosswalks: canvas pixels of each crosswalk, by object number, as in `draw_backdrop`.
        footprints: corners (x, z) of each thing's parts on the ground, {thing: [[4, 2], ...]}.
        outlines: corners of each thing's visible faces in 1/16 canvas pixels, {thing: [[N, 2], ...]}.
    """

    def __init__(self, plan: Plan, size: int, rng: np.random.Generator):
        self.plan, self.size = plan, size
        self.canvas, self.crosswalks = draw_backdrop(plan, size, rng)
        self.numbers, free = [], FIRST + 2 * len(self.crosswalks)
        for thing in plan.things:
            self.numbers.append(STUFF.get(thing.category, min(free, 255)))
            free += thing.category not in STUFF
        self.footprints: dict[int, list[np.ndarray]] = defaultdict(list)
        self.outlines: dict[int, list[np.ndarray]] = defaultdict(list)
        if plan.things and (parts := self._sorted_parts()):
            self._paint(parts)
        self.ids = self.canvas[..., 3].copy()

    def _sorted_parts(self) -> list[tuple[int, Mesh]]:
        """(index of the thing, mesh) of each part, back to front, without those that are too near."""
        things, camera = self.plan.things, self.plan.camera
        parts = [(index, mesh) for index, thing in enumerate(things) for mesh in thing.meshes]
        owners = [index for index, _ in parts]
        low, high = (np.array([getattr(mesh, end) for _, mesh in parts]) for end in ("low", "high"))
        boxes = np.where(CORNERS, high[:, None], low[:, None])  # [P, 8, 3]
        world = self._to_world(owners, 8, boxes.reshape(-1, 3))
        depth = camera.view(world)[:, 2].reshape(-1, 8).min(axis=1)
        footprints = world.reshape(-1, 8, 3)[:, :4, ::2]
        leads = np.array([not thing.carried for thing in things])
        group = np.cumsum(leads)[owners]
        kept = np.flatnonzero(~np.isin(group, group[depth < NEAR]))
        first = np.flatnonzero(leads[owners][kept])  # each begins a unit: parts that are painted together
        order = painting_order(footprints[kept[first]], np.array([camera.x, 0.0]))
        units = np.split(kept, first[1:])
        rows = [row for unit in order for row in units[unit].tolist()]
        for row in rows:
            self.footprints[owners[row]].append(footprints[row])
        return [parts[row] for row in rows]

    def _to_world(self, owners: list[int], counts: int | list[int], points: np.ndarray) -> np.ndarray:
        """World coordinates of points [N, 3], `counts` of them for each part; `owners` has the thing of each part."""
        things = [self.plan.things[index] for index in owners]
        matrices, places = np.array([thing.matrix for thing in things]), np.array([thing.place for thing in things])
        return multiply(matrices, counts, points) + np.repeat(places, counts, axis=0)

    def _paint(self, parts: list[tuple[int, Mesh]]) -> None:
        """Paint the shadows of sorted parts, then their faces that are towards the camera and large enough."""
        camera, things = self.plan.camera, self.plan.things
        owners, meshes = [index for index, _ in parts], [mesh for _, mesh in parts]
        vertices, faces = [len(mesh.vertices) for mesh in meshes], [len(mesh.starts) for mesh in meshes]

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(mesh, name) for mesh in meshes])

        bounds = np.cumsum([0, *vertices])  # first vertex of each part, and the end
        world = self._to_world(owners, vertices, joined("vertices"))
        self._cast_shadows(owners, world, bounds)
        view = camera.view(world)
        shift = np.repeat(bounds[:-1], faces)
        start, end = joined("starts") + shift, joined("ends") + shift

        # Normals are transformed by the cofactors of the matrix, and stay as long as the area.
        matrices = np.array([things[index].matrix for index in owners])
        cofactors = np.linalg.det(matrices)[:, None, None] * np.linalg.inv(matrices).transpose(0, 2, 1)
        normal = multiply(cofactors, faces, joined("normals"))
        area = np.linalg.norm(normal, axis=1)
        depth, two_sided = np.maximum(view[start, 2], NEAR), joined("two_sided")
        towards_camera = ((world[start] - (camera.x, camera.height, 0.0)) * normal).sum(axis=1) < 0
        large = np.sqrt(area) * (camera.focal[1] * self.size) > SMALL * depth
        kept = np.flatnonzero((two_sided | towards_camera) & large)

        unit = normal[kept] / np.maximum(area[kept], 1e-9)[:, None]
        used = [(things[index], name) for index, mesh in parts for name in mesh.names]
        palette = np.array([(*thing.palette[name], name in thing.bright) for thing, name in used])
        first_colors = np.cumsum([0, *(len(mesh.names) for mesh in meshes[:-1])])
        base = palette[(joined("colors") + np.repeat(first_colors, faces))[kept]]
        colors = shade(base, unit, two_sided[kept], depth[kept], self.plan.light)
        pixels, texts = camera.pixels(view, len(self.canvas)), [text for mesh in meshes for text in mesh.texts]
        owners = np.repeat(owners, faces)[kept].tolist()
        visible = zip(kept.tolist(), owners, start[kept].tolist(), end[kept].tolist(), colors.tolist())
        for face, index, first, last, color in visible:
            corners = pixels[first:last]
            self.outlines[index].append(corners)
            if texts[face]:
                write(self.canvas, corners, texts[face], color)
            else:
                cv2.fillConvexPoly(self.canvas, corners, (*color, self.numbers[index]), cv2.LINE_8, 4)

    def _cast_shadows(self, owners: list[int], world: np.ndarray, bounds: np.ndarray) -> None:
        """Darken the ground away from the sun."""
        camera, light, canvas = self.plan.camera, self.plan.light, self.canvas
        mask = np.zeros(canvas.shape[:2], dtype=np.uint8)
        x, y, z = light.sun_direction
        view = camera.view(world - world[:, 1:2] * (x / y, 1.0, z / y))
        pixels, near = camera.pixels(view, len(canvas)), np.minimum.reduceat(view[:, 2], bounds[:-1]) < NEAR
        for index, cut, start, end in zip(owners, near, bounds, bounds[1:]):
            thing = self.plan.things[index]
            if thing.shadow and not cut and (y < 1 or thing.place[1] < 0.1):
                cv2.fillConvexPoly(mask, cv2.convexHull(pixels[start:end]), 255, cv2.LINE_8, 4)
        first, factor = SCALE * camera.horizon(self.size), 0.5 if light.sun > 0.2 else 0.67
        dark = cv2.multiply(canvas[first:], np.array((factor, factor, factor, 1.0)))
        cv2.copyTo(dark, mask[first:], canvas[first:])

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


def shade(base: np.ndarray, unit: np.ndarray, two_sided: np.ndarray, depth: np.ndarray, light: Light) -> np.ndarray:
    """Visible colors [F, 3] of faces with palette rows (red, green, blue, shines by itself) [F, 4] and unit normal."""
    facing = np.where(two_sided, 0.6, np.maximum(unit @ light.sun_direction, 0))
    # The sky is brighter than the ground, and no two sides of a box look alike.
    sides = np.where(two_sided, 0.95, 0.92 + 0.1 * unit[:, 1] + 0.06 * unit[:, 0])
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

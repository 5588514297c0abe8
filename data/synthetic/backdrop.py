"""Draws the ground, the sky with clouds and stars, and the skyline, which are behind all things."""

import functools
import math

import cv2
import numpy as np

from .camera import NEAR, SCALE, Camera
from .dice import mix
from .light import Light
from .plan import BUILDING, CROSSWALK, FIRST, OTHER, SKY, STRIPES, TERRAIN, Patch, Plan


def draw_backdrop(plan: Plan, size: int, rng: np.random.Generator) -> tuple[np.ndarray, dict[int, int]]:
    """The canvas of an image of `size` pixels, as in `stage`, with ground, sky and skyline; areas of crosswalks.

    A crosswalk is named by its object number; its stripes have the next one. Its area is in canvas pixels, with
    nothing in front of it, and 0 if a part is behind the camera.
    """
    camera, light, side = plan.camera, plan.light, size * SCALE
    layers = np.zeros((side, side), dtype=np.uint8)  # 0: land, from 1: patches
    crosswalks: dict[int, int] = {}
    numbers = [TERRAIN]
    for layer, patch in enumerate(plan.patches, 1):
        pieces, area = project(patch, camera, side)
        cv2.fillPoly(layers, pieces, layer, cv2.LINE_8, 4)
        if patch.kind == CROSSWALK:
            crosswalks[FIRST + 2 * len(crosswalks)] = area
        number = FIRST + 2 * len(crosswalks) - 2  # of the last crosswalk
        numbers.append({CROSSWALK: number, STRIPES: number + 1}.get(patch.kind, patch.kind))
    horizon = camera.horizon(size)
    canvas = light_ground(plan, layers, numbers, SCALE * horizon)
    if horizon:
        above = cv2.resize(sky(horizon, size, light, rng), None, fx=SCALE, fy=SCALE, interpolation=cv2.INTER_NEAREST)
        canvas[: len(above), :, :3] = above
        canvas[: len(above), :, 3] = SKY
    if plan.skyline:
        x, y = np.array([(0.0, 0.0), *plan.skyline, (1.4, 0.0)]).T
        far = np.stack([(x - 0.65) * 1.2 * max(1.0, 1 / camera.focal[0]), y + math.tan(camera.pitch), np.ones_like(x)])
        color, kind = ((112, 112, 116), BUILDING) if plan.setting == "city" else ((92, 112, 88), OTHER)
        color = mix(light.on_ground(color, 0.5), light.haze_color, 0.25 + float(light.hidden(220.0)))
        cv2.fillPoly(canvas, [camera.pixels(far.T, side)], (*color, kind), cv2.LINE_8, 4)
    return canvas, crosswalks


def project(patch: Patch, camera: Camera, size: int) -> tuple[list[np.ndarray], int]:
    """Polygons of a patch in 1/16 canvas pixels, and their area in canvas pixels, 0 if a part is behind the camera."""
    view = camera.view(np.array([(x, 0.0, z) for polygon in patch.polygons for x, z in polygon]))
    pixels, pieces = camera.pixels(view, size), []
    bounds = np.cumsum([0, *map(len, patch.polygons)])
    whole = np.minimum.reduceat(view[:, 2], bounds[:-1]) >= NEAR
    for start, end, is_whole in zip(bounds, bounds[1:], whole):
        pieces.append(pixels[start:end] if is_whole else camera.pixels(clip_near(view[start:end]), size))
    area = round(sum(map(cv2.contourArea, pieces)) / 256) if whole.all() else 0
    return [piece for piece in pieces if len(piece)], area


def clip_near(points: np.ndarray) -> np.ndarray:
    """The part of a polygon [N, 3] in view coordinates that is in front of the camera."""
    step = np.roll(points, -1, axis=0) - points
    in_front = points[:, 2] >= NEAR
    is_cut = in_front != np.roll(in_front, -1)
    cuts = points + step * ((NEAR - points[:, 2]) / np.where(is_cut, step[:, 2], 1.0))[:, None]
    return np.stack([points, cuts], axis=1)[np.stack([in_front, is_cut], axis=1)]


def light_ground(plan: Plan, layers: np.ndarray, numbers: list[int], first: int) -> np.ndarray:
    """The canvas [size, size, 4] of layers [size, size]: their colors in the light of each row, and their numbers.

    Args:
        first: row of the horizon; the rows above it stay empty.
    """
    camera, light, size = plan.camera, plan.light, len(layers)
    slope = ((np.arange(first, size) + 0.5) / size - 0.5) / camera.focal[1]
    _, up, ahead = camera.axes.T
    depth = camera.height / np.maximum(slope * up[1] - ahead[1], 1e-4)[:, None]  # [R, 1] in meters
    hidden = light.hidden(depth)
    gain = (1 + light.headlight(depth) / np.array(light.ambient)) * (1 - hidden)  # [R, 3]
    colors = np.array([light.on_ground(color) for color in [plan.land, *(p.color for p in plan.patches)]])
    table = np.empty((size - first, len(colors), 4), dtype=np.uint8)
    table[..., :3] = np.minimum(colors * gain[:, None] + (hidden * light.haze_color)[:, None], 255)
    table[..., 3] = numbers
    rows = np.arange(size - first)[:, None] * len(colors)
    canvas = np.zeros((size, size, 4), dtype=np.uint8)
    pixels = table.view(np.uint32).take(layers[first:] + rows)
    canvas[first:] = pixels.view(np.uint8).reshape(-1, size, 4)
    return canvas


@functools.cache
def clouds() -> np.ndarray:
    """Smooth noise of several octaves that tiles, 0..255, float32 [512, 512]."""
    rng = np.random.default_rng(11)
    total = np.zeros((512, 512), dtype=np.float32)
    for count, weight in ((4, 16), (8, 8), (16, 4), (32, 2), (64, 1)):
        cells = np.pad(rng.random((count, count), np.float32), 2, mode="wrap")
        step = 512 // count
        layer = cv2.resize(cells, None, fx=step, fy=step, interpolation=cv2.INTER_CUBIC)
        total += weight * layer[2 * step : 2 * step + 512, 2 * step : 2 * step + 512]
    return cv2.normalize(total, total, 0, 255, cv2.NORM_MINMAX)


def tile(texture: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The pixels of an endlessly repeated texture at rows × columns."""
    return texture.take(rows % len(texture), axis=0).take(columns % len(texture), axis=1)


def sky(horizon: int, size: int, light: Light, rng: np.random.Generator) -> np.ndarray:
    """The sky above the row of the horizon, uint8 [horizon, size, 3]."""
    rows = np.arange(horizon)
    low = np.array(light.haze_color, dtype=np.float32)
    fraction = (rows / horizon)[:, None, None]
    image = np.array(light.zenith) * (1 - fraction) + low * fraction  # [rows, 1, 3]
    x, y = rng.integers(512, size=2)
    cloud = tile(clouds(), rows * 2 + y, np.arange(size) + x)[..., None]
    if light.weather == "clear" and light.time != "night":
        color = np.minimum(low + 25, 255) if light.time == "day" else low
        cover = rng.integers(145, 190)
        image = image + (color - image) * np.clip((cloud - cover) * rng.integers(2, 7), 0, 200) / 256
    elif light.weather in ("cloudy", "rainy", "snowy"):
        image = image + (cloud - 128) * (0.11 if light.time == "night" else 0.31)
    pixels = np.clip(np.broadcast_to(image, (len(rows), size, 3)), 0, 255).astype(np.uint8)
    if light.time == "night" and light.weather == "clear":
        stars = rng.integers((0, 0, 90), (len(rows), size, 220), (int(rng.integers(25, 60)), 3))
        pixels[stars[:, 0], stars[:, 1]] = stars[:, 2:]
    return pixels

"""The photograph of a canvas: wet roads, glow, rain and snow, texture, and the flaws of a camera."""

import cv2
import numpy as np

from ..augment import add_rain, change_light
from .backdrop import clouds, tile
from .camera import SCALE
from .plan import BUILDING, FENCE, OTHER, POLE, ROAD, SIDEWALK, SKY, TERRAIN, TREE
from .stage import Stage


# Strength of the texture of each surface, 2 for all others.
ROUGHNESS = {SKY: 0, TERRAIN: 12, ROAD: 6, SIDEWALK: 5, BUILDING: 4, TREE: 14, POLE: 1, FENCE: 3, OTHER: 5}


def develop(stage: Stage, rng: np.random.Generator) -> np.ndarray:
    """The photograph of a stage, uint8 [size, size, 3]."""
    light, ids = stage.plan.light, stage.ids[::SCALE, ::SCALE]
    image = cv2.cvtColor(cv2.resize(stage.canvas, ids.shape, interpolation=cv2.INTER_AREA), cv2.COLOR_RGBA2RGB)
    if light.weather == "rainy":
        image = wet(image, ids == ROAD)
    add_glows(image, stage)
    image = np.clip(image + texture(ids, rng)[..., None], 0, 255).astype(np.uint8)
    if light.weather == "rainy":
        image = add_rain(image, rng)
    elif light.weather == "snowy":
        image = add_snow(image, rng)
    return change_light(image, rng, light.flaws) if light.flaws else image


def wet(image: np.ndarray, road: np.ndarray) -> np.ndarray:
    """The image with a wet road (mask [size, size]), which mirrors the mean of the pixels above."""
    reach = max(len(image) // 6, 2)
    above = cv2.blur(image, (1, reach), anchor=(0, reach - 1), borderType=cv2.BORDER_REPLICATE)
    return np.where(road[..., None], cv2.addWeighted(image, 0.5, above, 0.5, 0), image)


def add_glows(image: np.ndarray, stage: Stage) -> None:
    """Add soft light to an image around all lamps that are visible and shine towards the camera."""
    camera, size = stage.plan.camera, stage.size
    for thing, number in zip(stage.plan.things, stage.numbers):
        for lamp in thing.lamps:
            x, y, z = thing.world(lamp.place)
            ahead = np.sin(thing.heading) * (camera.x - x) - np.cos(thing.heading) * z
            u, v, depth = camera.look(x, y, z)
            column, row = int(u * size), int(v * size)
            if lamp.front * ahead < 0 or depth < 1 or not (0 <= column < size and 0 <= row < size):
                continue
            radius = int(min(lamp.radius * camera.focal[1] * size / depth, size / 6))
            if radius < 1 or stage.ids[SCALE * row, SCALE * column] != number:
                continue
            reach = radius * 3 // 2 + 1
            x0, y0 = max(column - reach, 0), max(row - reach, 0)
            part = image[y0 : row + reach + 1, x0 : column + reach + 1]
            dy, dx = np.ogrid[y0 - row : y0 - row + part.shape[0], x0 - column : x0 - column + part.shape[1]]
            fall = np.maximum(1 - (dx * dx + dy * dy) / reach**2, 0) ** 3
            part[:] = cv2.add(part, (fall[..., None] * lamp.color * 0.75).astype(np.uint8))


def texture(ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Levels to add to the pixels of surfaces with these object numbers, float32 [size, size]."""
    rough = np.full(256, 2, dtype=np.float32)
    rough[list(ROUGHNESS)] = list(ROUGHNESS.values())
    pixels, (x, y) = np.arange(len(ids)), rng.integers(512, size=2)
    coarse = tile(clouds(), (pixels + y) * 3, pixels * 2 + x) - 128
    fine = 37 * rng.standard_normal(ids.shape, np.float32)
    return (fine + coarse) * rough[ids] / 128


def add_snow(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image with flakes of snow, which reflect its light."""
    size, layer, light = len(image), np.zeros_like(image), image.mean()
    for x, y, radius, tone in rng.uniform((0, 0, 0.012, 0.8), (16, 16, 0.1, 2.0), (int(rng.integers(60, 220)), 4)):
        center = round(x * size), round(y * size)
        cv2.circle(layer, center, max(round(radius * size), 6), (min(tone * light, 255),) * 3, -1, cv2.LINE_AA, 4)
    return cv2.max(image, layer)

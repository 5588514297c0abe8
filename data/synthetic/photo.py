"""The photograph of a canvas: glow, rain and snow in front of a scene, and the flaws of a camera."""

import functools

import cv2
import numpy as np

from .backdrop import clouds, tile
from .camera import SCALE
from .dice import Dice
from .light import Light
from .plan import BUILDING, FENCE, OTHER, POLE, ROAD, SIDEWALK, SKY, TERRAIN, TREE
from .stage import Stage


# Strength of the texture of each surface, 2 for all others.
ROUGHNESS = {SKY: 0, TERRAIN: 12, ROAD: 6, SIDEWALK: 5, BUILDING: 4, TREE: 14, POLE: 1, FENCE: 3, OTHER: 5}


def develop(stage: Stage, dice: Dice) -> np.ndarray:
    """The photograph of a stage, uint8 [size, size, 3]."""
    light, ids = stage.plan.light, stage.ids[::SCALE, ::SCALE]
    image = cv2.cvtColor(cv2.resize(stage.canvas, ids.shape, interpolation=cv2.INTER_AREA), cv2.COLOR_RGBA2RGB)
    if light.weather == "rainy":
        image = wet(image, ids == ROAD)
    add_glows(image, stage)
    if light.weather == "rainy":
        image = rain(image, light, dice)
    elif light.weather == "snowy":
        image = snow(image, light, dice)
    rough = np.full(256, 2, dtype=np.float32)
    rough[list(ROUGHNESS)] = list(ROUGHNESS.values())
    return photograph(image, rough[ids], light, dice)


@functools.cache
def grain() -> np.ndarray:
    """White noise of mean 0 and standard deviation 37, float32 [1024, 1024]."""
    return np.random.default_rng(7).normal(0, 37, (1024, 1024)).astype(np.float32)


def add_glows(image: np.ndarray, stage: Stage) -> None:
    """Add soft light around all lamps that are visible and shine towards the camera, to an image."""
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


def wet(image: np.ndarray, road: np.ndarray) -> np.ndarray:
    """An image with a wet road (mask [size, size]), which mirrors the mean of the pixels above."""
    reach = max(len(image) // 6, 2)
    above = cv2.blur(image, (1, reach), anchor=(0, reach - 1), borderType=cv2.BORDER_REPLICATE)
    return np.where(road[..., None], cv2.addWeighted(image, 0.5, above, 0.5, 0), image)


def rain(image: np.ndarray, light: Light, dice: Dice) -> np.ndarray:
    """An image [size, size, 3] with streaks of rain."""
    size, layer = len(image), np.zeros_like(image)
    lean, length = dice.uniform(-0.3, 0.3), dice.uniform(0.05, 0.13)
    for _ in range(dice.integer(60, 150)):
        x, y, part = dice.uniform(-0.1, 1.1), dice.uniform(-0.1, 1.0), dice.uniform(0.5, 1.0) * length
        start, end = (round(x * size), round(y * size)), (round((x + lean * part) * size), round((y + part) * size))
        tone = dice.integer(10, 30) if light.time == "night" else dice.integer(20, 60)
        cv2.line(layer, start, end, (tone, tone, tone), 1, cv2.LINE_AA)
    return cv2.add(image, layer)


def snow(image: np.ndarray, light: Light, dice: Dice) -> np.ndarray:
    """An image [size, size, 3] with flakes of snow."""
    size, layer = len(image), np.zeros_like(image)
    for _ in range(dice.integer(60, 220)):
        center = (round(dice.uniform(0, size) * 16), round(dice.uniform(0, size) * 16))
        radius = max(round(dice.uniform(0.4, 1.0) * dice.uniform(0.4, 1.6) * size / 14), 6)
        tone = dice.integer(75, 160) if light.time == "night" else dice.integer(120, 255)
        cv2.circle(layer, center, radius, (tone, tone, tone), -1, cv2.LINE_AA, 4)
    return cv2.max(image, layer)


def photograph(image: np.ndarray, rough: np.ndarray, light: Light, dice: Dice) -> np.ndarray:
    """An image with the flaws of a camera: blur, exposure, noise and JPEG.

    Args:
        image: uint8 [size, size, 3].
        rough: strength of the texture of each pixel's surface, [size, size].
        light: the strengths.
        dice: draws the place in the noise.
    """
    if light.blur:
        image = cv2.GaussianBlur(image, (2 * light.blur + 1, 2 * light.blur + 1), 0)
    pixels = np.arange(len(image))
    x, y = dice.integer(0, 511), dice.integer(0, 511)
    fine = tile(grain(), pixels + y, pixels + x)
    coarse = tile(clouds(), (pixels + y) * 3, pixels * 2 + x) - 128
    texture = (fine * (rough + light.noise) + coarse * rough) / 128
    factors = np.array(light.tint, dtype=np.float32) * np.float32(light.exposure)
    image = np.clip(np.minimum(image * factors, 255) + texture[..., None], 0, 255).astype(np.uint8)
    if light.jpeg:  # OpenCV takes red for blue, which only swaps how much detail they lose
        _, coded = cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, 80 - 15 * light.jpeg))
        image = np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR))
    return image

"""The sky with clouds, stars and the moon."""

import functools

import cv2
import numpy as np

from .dice import Dice
from .light import Light


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


def sky(size: int, horizon: float, light: Light, dice: Dice) -> np.ndarray:
    """The sky, down to a little below the row of the horizon (in image sizes), uint8 [rows, size, 3]."""
    bottom = max(int(horizon * size), 1)
    rows = np.arange(min(bottom + size // 8, size))
    low = np.array(light.haze_color, dtype=np.float32)
    fraction = np.minimum(rows / bottom, 1)[:, None, None]
    image = np.array(light.zenith) * (1 - fraction) + low * fraction  # [rows, 1, 3]
    x, y = dice.integer(0, 511), dice.integer(0, 511)
    cloud = tile(clouds(), rows * 2 + y, np.arange(size) + x)[..., None]
    if light.weather == "clear" and light.time != "night":
        color = np.minimum(low + 25, 255) if light.time == "day" else low
        cover = dice.integer(145, 190)
        image = image + (color - image) * np.clip((cloud - cover) * dice.integer(2, 6), 0, 200) / 256
    elif light.weather in ("cloudy", "rainy", "snowy"):
        image = image + (cloud - 128) * (0.11 if light.time == "night" else 0.31)
    pixels = np.clip(np.broadcast_to(image, (len(rows), size, 3)), 0, 255).astype(np.uint8)
    if light.time == "night" and light.weather == "clear":
        for _ in range(dice.integer(25, 60)):
            pixels[dice.integer(0, len(rows) - 1), dice.integer(0, size - 1)] = dice.integer(90, 220)
        if dice.chance(0.5):
            moon = (dice.integer(0, size), dice.integer(0, bottom))
            cv2.circle(pixels, moon, max(size // 40, 2), (235, 232, 210), -1, cv2.LINE_AA)
    return pixels

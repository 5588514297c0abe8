"""Sky, rain, snow and glow, and the flaws of a camera."""

import functools

import cv2
import numpy as np

from .colors import Color
from .dice import Dice
from .light import Light


@functools.cache
def grain() -> np.ndarray:
    """White noise of mean 0 and standard deviation 37, float32 [1024, 1024]."""
    return np.random.default_rng(7).normal(0, 37, (1024, 1024)).astype(np.float32)


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
    sky = np.clip(np.broadcast_to(image, (len(rows), size, 3)), 0, 255).astype(np.uint8)
    if light.time == "night" and light.weather == "clear":
        for _ in range(dice.integer(25, 60)):
            sky[dice.integer(0, len(rows) - 1), dice.integer(0, size - 1)] = dice.integer(90, 220)
        if dice.chance(0.5):
            moon = (dice.integer(0, size), dice.integer(0, bottom))
            cv2.circle(sky, moon, max(size // 40, 2), (235, 232, 210), -1, cv2.LINE_AA)
    return sky


def add_glow(image: np.ndarray, column: int, row: int, radius: int, color: Color) -> None:
    """Add soft light around a lamp to an image, uint8 [size, size, 3]."""
    reach = radius * 3 // 2 + 1
    x0, y0 = max(column - reach, 0), max(row - reach, 0)
    part = image[y0 : row + reach + 1, x0 : column + reach + 1]
    y, x = np.ogrid[y0 - row : y0 - row + part.shape[0], x0 - column : x0 - column + part.shape[1]]
    fall = np.maximum(1 - (x * x + y * y) / reach**2, 0) ** 3
    part[:] = cv2.add(part, (fall[..., None] * color * 0.75).astype(np.uint8))


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

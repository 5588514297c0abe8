"""Light, sky, haze, rain and snow of the synthetic scenes, and what a lens and a codec do to them.

All of it is integer arithmetic, lookup tables and float operations that IEEE 754 rounds exactly.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import cv2
import numpy as np

from .synthetic_dice import Dice
from .synthetic_mesh import turn


Color = tuple[int, int, int]
Triple = tuple[float, float, float]
Depth = TypeVar("Depth", float, np.ndarray)


def each(color: Color, change: Callable[[int], int]) -> Color:
    """A colour whose red, green and blue are changed alike."""
    red, green, blue = color
    return change(red), change(green), change(blue)


@dataclass(frozen=True)
class Light:
    """How a scene is lit, and how it is photographed.

    Attributes:
        weather, time: values of the facts "weather" and "time of day".
        ambient: what reaches every face, of red, green, blue.
        sun: what the sun adds to a face that looks at it; casts shadows above 0.2.
        sun_direction: towards the sun, of length 1.
        haze: share of light lost per metre, roughly.
        haze_color, sky: colours; the sky's are (top, horizon).
        headlights: what the own headlights add at night close by.
        exposure, tint: factors; blur, noise, codec: strengths from 0.
    """

    weather: str
    time: str
    ambient: Triple
    sun: float
    sun_direction: Triple
    haze: float
    haze_color: Color
    sky: tuple[Color, Color]
    headlights: float
    exposure: float
    tint: Triple
    blur: int
    noise: int
    codec: int

    def hidden(self, depth: Depth) -> Depth:
        """Share of the haze's colour at a depth in metres, 0..1: 1 − 1/(1 + x + x²/2 + x³/6), nearly 1 − exp(−x)."""
        x = depth * self.haze
        return 1 - 1 / (1 + x + x * x / 2 + x * x * x / 6)

    def headlight(self, depth: Depth) -> Depth:
        """What the own headlights add at a depth in metres."""
        return self.headlights / (1 + depth * depth / 300)

    def shine(self, base: Color, up: float = 1.0) -> Color:
        """Colour of ground of a base colour."""
        sun = self.sun * self.sun_direction[1] * up
        return tuple(min(255, round(c * (a + sun))) for c, a in zip(base, self.ambient))  # type: ignore[return-value]


def _mix(a: Color, b: Color, share: float) -> Color:
    return tuple(round(x + (y - x) * share) for x, y in zip(a, b))  # type: ignore[return-value]


def make_light(dice: Dice, driving: bool, lit: bool) -> Light:
    """Weather and time of day; `lit`: whether the street has lamps."""
    weather = dice.pick(
        ("clear", "clear", "clear", "cloudy", "cloudy", "cloudy", "rainy", "rainy", "snowy", "snowy", "foggy", "foggy")
    )
    time = dice.pick(("day", "day", "day", "day", "dusk", "dusk", "dusk", "night", "night", "night"))
    gray = {"clear": 0.0, "cloudy": 0.75, "rainy": 0.9, "snowy": 0.9, "foggy": 1.0}[weather]
    level = {"clear": 0.66, "cloudy": 0.82, "rainy": 0.66, "snowy": 0.84, "foggy": 0.78}[weather] * dice.between(
        0.92, 1.1
    )
    if time == "day":
        top = _mix((70 + dice.count(0, 40), 130 + dice.count(0, 30), 220), (168, 175, 184), gray)
        low = _mix((190, 212, 236), (205, 208, 212), gray)
        ambient, sun = (level, level, level * 1.02), 0.5 if weather == "clear" else 0.06
    elif time == "dusk":
        level *= dice.between(0.72, 0.84)
        warm = dice.pick(((245, 150, 80), (250, 175, 110), (225, 130, 130)))
        top, low = _mix((58, 70, 128), (92, 94, 116), gray), _mix(warm, (158, 146, 152), gray * 0.9)
        warmth = 0.09 * (1.1 - gray)
        ambient, sun = (level * (1 + warmth), level * (1 - warmth / 2), level), 0.1 if weather == "clear" else 0.0
    else:
        level = (0.42 if lit else 0.34) * dice.between(0.85, 1.25)
        top, low = _mix((8, 10, 28), (26, 26, 34), gray), _mix((30, 32, 56), (62, 56, 56), gray if lit else gray * 0.3)
        ambient, sun = (level, level * 0.96, level * (0.95 if lit else 1.2)), 0.0
    if weather == "rainy":
        top, low = _mix(top, (0, 0, 0), 0.15), _mix(low, (0, 0, 0), 0.12)
    haze = {"clear": 0.0008, "cloudy": 0.0014, "rainy": 0.006, "snowy": 0.008}.get(weather, dice.between(0.016, 0.045))
    if weather == "foggy" and time == "night":
        haze *= 0.6
    sine, cosine = turn(dice.between(0, 6.283))
    height, flat = turn(dice.between(0.6, 1.1))
    return Light(
        weather=weather,
        time=time,
        ambient=ambient,
        sun=sun,
        sun_direction=(sine * flat, height, cosine * flat),
        haze=haze,
        haze_color=low,
        sky=(low if weather == "foggy" else top, low),
        headlights=dice.between(0.5, 0.75) if driving and time == "night" else 0.0,
        exposure=dice.between(0.88, 1.14),
        tint=(dice.between(0.95, 1.05), dice.between(0.97, 1.03), dice.between(0.95, 1.05)),
        blur=dice.pick((0, 0, 0, 1, 2)),
        noise=dice.pick((0, 1, 2, 4, 7)) + (4 if time == "night" else 0),
        codec=dice.pick((0, 0, 1, 2, 3)),
    )


@functools.cache
def grain() -> np.ndarray:
    """White noise of mean 0 and deviation about 37, int16 [1024, 1024]."""
    raw = np.random.Generator(np.random.PCG64(7)).integers(0, 64, (4, 1024, 1024), dtype=np.int16)
    return raw[0] + raw[1] + raw[2] + raw[3] - 126


@functools.cache
def clouds() -> np.ndarray:
    """Smooth noise of several octaves that tiles, 0..255, int16 [512, 512]."""
    generator = np.random.Generator(np.random.PCG64(11))
    total = np.zeros((512, 512), dtype=np.int64)
    for octave, weight in ((128, 16), (64, 8), (32, 4), (16, 2), (8, 1)):
        cells = generator.integers(0, 256, (512 // octave, 512 // octave))
        layer = np.repeat(np.repeat(cells, octave, axis=0), octave, axis=1)
        for axis in (0, 1):
            for _ in range(2):  # box filters as wide as a cell, twice
                sums = np.cumsum(np.concatenate([layer, layer, layer], axis=axis), axis=axis)
                ahead = np.take(sums, np.arange(512) + 512 + octave // 2, axis=axis)
                layer = (ahead - np.take(sums, np.arange(512) + 512 - octave + octave // 2, axis=axis)) // octave
        total += layer * weight
    low, high = int(total.min()), int(total.max())
    return ((total - low) * 255 // (high - low)).astype(np.int16)


def sky(size: int, horizon: float, light: Light, dice: Dice) -> np.ndarray:
    """Sky over the whole image, uint8 [size, size, 3]; `horizon` is its row in image sizes."""
    bottom = max(int(horizon * size), 1)
    rows = np.arange(
        min(bottom + size // 8, size), dtype=np.int32
    )  # the ground hides the rest, however the lens rolls
    share = np.minimum(rows * 256 // bottom, 256)[:, None]
    top, low = np.array(light.sky[0], dtype=np.int32), np.array(light.sky[1], dtype=np.int32)
    gradient = (top * (256 - share) + low * share) >> 8  # [rows, 3]
    painted = np.repeat(gradient[:, None], size, axis=1)
    x, y = dice.count(0, 511), dice.count(0, 511)
    cover, softness = dice.count(120, 165), dice.count(2, 6)
    tile = np.take(np.take(clouds(), (rows * 2 + y) % 512, axis=0), (np.arange(size) + x) % 512, axis=1)
    if light.weather == "clear" and light.time != "night":
        alpha = np.clip((tile - cover - 25) * softness, 0, 200)
        color = np.minimum(low + 25, 255) if light.time == "day" else low
        painted += ((color - painted) * alpha[..., None]) >> 8
    elif light.weather not in ("clear", "foggy"):
        painted += ((tile - 128) * (14 if light.time == "night" else 40) >> 7)[..., None]
    whole = np.zeros((size, size, 3), dtype=np.uint8)
    whole[: len(rows)] = np.clip(painted, 0, 255)
    painted = whole
    if light.time == "night" and light.weather == "clear":
        for _ in range(dice.count(25, 60)):
            value = dice.count(90, 220)
            painted[min(max(dice.count(0, bottom), 0), size - 1), dice.count(0, size - 1)] = value
        if dice.chance(0.5):
            place = (dice.count(0, size), dice.count(0, bottom))
            cv2.circle(painted, place, max(size // 40, 2), (235, 232, 210), -1)
    return painted


def add_glow(image: np.ndarray, lamps: list[tuple[int, int, int, Color]]) -> np.ndarray:
    """Adds soft light around lamps (column, row, radius in pixels, colour) to uint8 [size, size, 3]."""
    size = image.shape[0]
    for x, y, radius, color in lamps:
        reach = radius + radius // 2 + 1
        x0, x1, y0, y1 = max(x - reach, 0), min(x + reach + 1, size), max(y - reach, 0), min(y + reach + 1, size)
        across, down = np.arange(x0 - x, x1 - x), np.arange(y0 - y, y1 - y)
        share = 256 - (across * across + down[:, None] * down[:, None]) * 256 // (reach * reach)
        share = np.maximum(share, 0)
        share = share * share * share >> 16  # 0..256, falling smoothly
        spot = (share[..., None] * np.array(color) * 3 >> 10).astype(np.uint8)
        image[y0:y1, x0:x1] = cv2.add(image[y0:y1, x0:x1], spot)
    return image


def wet(image: np.ndarray, road: np.ndarray) -> np.ndarray:
    """What stands above a wet road runs down on it: road pixels (mask [size, size]) take half of a tall mean."""
    size = image.shape[0]
    reach = max(size // 6, 2)
    sums = np.cumsum(np.pad(image.astype(np.int32), ((reach + 1, 0), (0, 0), (0, 0)), mode="edge"), axis=0)
    mean = (sums[reach + 1 :] - sums[: -reach - 1]) // (reach + 1)
    blended = ((image.astype(np.int32) + mean) >> 1).astype(np.uint8)
    return np.where(road[..., None], blended, image)


def rain(image: np.ndarray, light: Light, dice: Dice) -> np.ndarray:
    """Streaks of rain over uint8 [size, size, 3]."""
    size = image.shape[0]
    streaks = np.zeros((size, size), dtype=np.uint8)
    lean, length = dice.between(-0.3, 0.3), dice.between(0.05, 0.13)
    for _ in range(dice.count(60, 150)):
        x, y, part = dice.between(-0.1, 1.1), dice.between(-0.1, 1.0), dice.between(0.5, 1.0) * length
        start = (round(x * size * 16), round(y * size * 16))
        end = (round((x + lean * part) * size * 16), round((y + part) * size * 16))
        cv2.line(streaks, start, end, dice.count(20, 60), 1, cv2.LINE_AA, 4)
    if light.time == "night":
        streaks >>= 1
    return cv2.add(image, cv2.merge([streaks, streaks, streaks]))


def snow(image: np.ndarray, light: Light, dice: Dice) -> np.ndarray:
    """Flakes over uint8 [size, size, 3]."""
    size = image.shape[0]
    flakes = np.zeros((size, size), dtype=np.uint8)
    for _ in range(dice.count(60, 220)):
        place = (round(dice.between(0, size) * 16), round(dice.between(0, size) * 16))
        radius = round(dice.between(0.4, 1.0) * dice.between(0.4, 1.6) * size / 224 * 16)
        cv2.circle(flakes, place, max(radius, 6), dice.count(120, 255), -1, cv2.LINE_AA, 4)
    if light.time == "night":
        flakes = (flakes.astype(np.uint16) * 5 >> 3).astype(np.uint8)
    return cv2.max(image, cv2.merge([flakes, flakes, flakes]))


# How often the rows of the Hadamard matrix change sign: their frequency.
_SEQUENCY = np.array([0, 7, 3, 4, 1, 6, 2, 5])


def _hadamard(blocks: np.ndarray) -> np.ndarray:
    """The first two axes of [8, 8, N] transformed; twice gives 64 times the blocks."""
    for inner in (8 * blocks.shape[2], blocks.shape[2]):
        for step in (1, 2, 4):
            pairs = blocks.reshape(-1, 2, step * inner)
            blocks = np.empty_like(pairs)
            np.add(pairs[:, 0], pairs[:, 1], out=blocks[:, 0])
            np.subtract(pairs[:, 0], pairs[:, 1], out=blocks[:, 1])
    return blocks.reshape(8, 8, -1)


def codec(image: np.ndarray, strength: int) -> np.ndarray:
    """Something like JPEG: 8 × 8 blocks of green lose high frequencies, the other colours half their pixels."""
    count = image.shape[0] // 8
    size = count * 8
    part = image[:size, :size].astype(np.int16)
    green = part[..., 1]
    blocks = green.reshape(count, 8, count, 8).transpose(1, 3, 0, 2).astype(np.int32).reshape(8, 8, -1)
    steps = (_SEQUENCY[:, None] + _SEQUENCY[None, :] + 1)[..., None].astype(np.int32) * (16 * strength)
    blocks = (_hadamard(blocks) + (steps >> 1)) // steps * steps
    squares = ((_hadamard(blocks) + 32) >> 6).astype(np.int16).reshape(8, 8, count, count)
    coded = squares.transpose(2, 0, 3, 1).reshape(size, size)
    result = image.copy()
    result[:size, :size, 1] = np.clip(coded, 0, 255)
    for channel in (0, 2):
        difference = part[..., channel] - green
        small = (difference[::2, ::2] + difference[1::2, ::2] + difference[::2, 1::2] + difference[1::2, 1::2]) >> 2
        small = cv2.resize(small, (size, size), interpolation=cv2.INTER_NEAREST)
        result[:size, :size, channel] = np.clip(coded + small, 0, 255)
    return result


def photograph(image: np.ndarray, rough: np.ndarray, light: Light, dice: Dice) -> np.ndarray:
    """Exposure, tint, surface texture (strength `rough` of each pixel, int16 [size, size]), blur, noise and codec."""
    size = image.shape[0]
    if light.blur:
        image = cv2.GaussianBlur(image, (3, 3), 0) if light.blur == 1 else cv2.GaussianBlur(image, (5, 5), 0)
    x, y = dice.count(0, 511), dice.count(0, 511)
    rows = (np.arange(size) + y) % 1024
    fine = np.take(np.take(grain(), rows, axis=0), (np.arange(size) + x) % 1024, axis=1)
    coarse = np.take(np.take(clouds(), rows * 3 % 512, axis=0), (np.arange(size) * 2 + x) % 512, axis=1) - 128
    texture = (fine * (rough + light.noise) + coarse * rough) >> 7
    tables = np.empty((1, 256, 3), dtype=np.uint8)
    for channel in range(3):
        factor = round(light.exposure * light.tint[channel] * 256)
        tables[0, :, channel] = np.minimum(np.arange(256) * factor >> 8, 255)
    image = cv2.LUT(image, tables)
    image = np.clip(image.astype(np.int16) + texture[..., None], 0, 255).astype(np.uint8)
    return codec(image, light.codec) if light.codec else image

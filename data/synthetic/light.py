"""Weather, time of day, and the light that follows from them."""

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .camera import Point3
from .dice import Color, Dice, load, mix, parse, scaled


Depth = TypeVar("Depth", float, np.ndarray)


@dataclass(frozen=True)
class Light:
    """The light of a scene, and the quality of its photograph.

    Attributes:
        weather, time: values of the scene attributes "weather" and "time of day".
        ambient: light that reaches every face, as factors of red, green, blue.
        sun: light that the sun adds to a face towards it.
        sun_direction: unit vector towards the sun, straight up if it hardly shines.
        haze: fraction of light lost per meter.
        haze_color: color of the sky at the horizon and of far things.
        zenith: color of the sky at the top.
        headlights: light that the headlights of the camera's vehicle add at depth 0.
        flaws: chance of blur, the same of noise and of JPEG artifacts; 0 is an ideal camera.
    """

    weather: str
    time: str
    ambient: Point3
    sun: float
    sun_direction: Point3
    haze: float
    haze_color: Color
    zenith: Color
    headlights: float = 0.0
    flaws: float = 0.0

    def hidden(self, depth: Depth) -> Depth:
        """Fraction of a thing's light that haze replaces with its own color, at a depth in meters, 0..1."""
        return 1 - np.exp(-self.haze * depth)

    def headlight(self, depth: Depth) -> Depth:
        """Light that the headlights add at a depth in meters."""
        return self.headlights / (1 + depth * depth / 300)

    def on_ground(self, color: Color, slope: float = 1.0) -> Color:
        """A ground color as lit; `slope` is the fraction of the sun that reaches it."""
        sun = self.sun * self.sun_direction[1] * slope
        return tuple(min(255, round(c * (a + sun))) for c, a in zip(color, self.ambient))  # type: ignore[return-value]


def make_light(dice: Dice, driving: bool, has_lamps: bool) -> Light:
    """A random light, for a camera in a driving vehicle or not, and a street with or without lamps."""
    tables = load("scenes.yaml")
    weather, time = dice.choice(tables["weathers"]), dice.choice(tables["times"])
    gray, level, haze = tables["light"][weather]
    sky = tables["skies"]["unlit night" if time == "night" and not has_lamps else time]
    (top, gray_top), lows, (gray_low,) = map(parse, (sky["top"], sky["low"], sky["gray low"]))
    top, low = mix(dice.vary(top, 15), gray_top, gray), mix(dice.choice(lows), gray_low, gray * sky["cover"])
    if weather == "rainy":
        top, low = scaled(top, 0.86), scaled(low, 0.88)
    if weather == "foggy":
        haze = dice.uniform(0.016, 0.045) * (0.6 if time == "night" else 1.0)
    level *= dice.uniform(*sky["level"])
    sun = sky["sun"][weather != "clear"]
    azimuth, elevation = dice.uniform(0, 6.283), dice.uniform(0.6, 1.1) if sun > 0.2 else math.pi / 2
    flat = math.cos(elevation)
    return Light(
        weather=weather,
        time=time,
        ambient=tuple(level * tone * dice.uniform(0.96, 1.04) for tone in sky["tones"]),
        sun=sun,
        sun_direction=(math.sin(azimuth) * flat, math.sin(elevation), math.cos(azimuth) * flat),
        haze=haze,
        haze_color=low,
        zenith=low if weather == "foggy" else top,
        headlights=dice.uniform(0.5, 0.75) if driving and time == "night" else 0.0,
        flaws=0.4,
    )

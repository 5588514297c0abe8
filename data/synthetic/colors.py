"""Colors: arithmetic, and random ones from the palettes of `colors.yaml`."""

import functools
from typing import Any

from .dice import Dice
from .tables import load


Color = tuple[int, int, int]


def parse(text: str) -> tuple[Color, ...]:
    """Colors in hexadecimal notation, separated by spaces."""
    return tuple((code[0], code[1], code[2]) for code in map(bytes.fromhex, text.split()))


PAINT = {name: parse(code)[0] for name, code in load("colors.yaml")["paint"].items()}  # of vehicles, by name


def scaled(color: Color, factor: float) -> Color:
    """A darker or brighter color."""
    return tuple(min(int(c * factor), 255) for c in color)  # type: ignore[return-value]


def lighten(color: Color, levels: int) -> Color:
    """A color with a constant added to each channel."""
    return tuple(min(max(c + levels, 0), 255) for c in color)  # type: ignore[return-value]


def mix(a: Color, b: Color, fraction: float) -> Color:
    """The color at a fraction of the way from a to b."""
    return tuple(round(x + (y - x) * fraction) for x, y in zip(a, b))  # type: ignore[return-value]


def vary(dice: Dice, color: Color, levels: int = 8) -> Color:
    """A random color near another one."""
    return tuple(min(max(c + dice.integer(-levels, levels), 0), 255) for c in color)  # type: ignore[return-value]


def draw_palette(dice: Dice, name: str) -> dict[str, Color]:
    """Random colors of a palette of `colors.yaml`, {color's name: RGB}."""
    palette: dict[str, Color] = {}
    for names, options, levels in _recipes(name):
        drawn = dice.pick(options) if len(options) > 1 else options[0]
        palette |= zip(names, (vary(dice, color, levels) if levels else color for color in drawn))
    return palette


def draw_color(dice: Dice, name: str) -> Color:
    """The random color of a palette of one."""
    [color] = draw_palette(dice, name).values()
    return color


@functools.cache
def _recipes(name: str) -> list[tuple[list[str], list[tuple[Color, ...]], int]]:
    """For each entry of a palette: names, the choices of colors for them, and how much these vary."""
    recipes = []
    for names, choice in load("colors.yaml")[name].items():
        levels: int = choice["vary"] if isinstance(choice, dict) else 0
        options: Any = choice["of"] if isinstance(choice, dict) else choice
        parsed = [parse(item) for item in options] if isinstance(options, list) else [(c,) for c in parse(options)]
        recipes.append((names.split(", "), parsed, levels))
    return recipes

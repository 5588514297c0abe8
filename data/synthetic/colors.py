"""Colors: arithmetic, and random ones from the palettes of `colors.yaml`."""

import functools

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
    fixed, choices = _recipe(name)
    palette = dict(fixed)
    for names, options, levels in choices:
        drawn = dice.pick(options) if len(options) > 1 else options[0]
        palette.update(zip(names, (vary(dice, color, levels) for color in drawn) if levels else drawn))
    return palette


def draw_color(dice: Dice, name: str) -> Color:
    """The random color of a palette of one."""
    [color] = draw_palette(dice, name).values()
    return color


Choice = tuple[list[str], list[tuple[Color, ...]], int]  # names, options of colors for them, how much these vary


@functools.cache
def _recipe(name: str) -> tuple[dict[str, Color], list[Choice]]:
    """The fixed colors of a palette, and the choices of the others."""
    fixed: dict[str, Color] = {}
    choices: list[Choice] = []
    for names, entry in load("colors.yaml")[name].items():
        levels, entry = (entry["vary"], entry["of"]) if isinstance(entry, dict) else (0, entry)
        options = [parse(item) for item in (entry if isinstance(entry, list) else entry.split())]
        if len(options) == 1 and not levels:
            fixed[names] = options[0][0]
        else:
            choices.append((names.split(", "), options, levels))
    return fixed, choices

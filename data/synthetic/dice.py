"""Random choices of a scene, colors, and the tables to choose from, which people can edit."""

import functools
import random
from pathlib import Path
from typing import Any

import yaml


FOLDER = Path(__file__).parent
Color = tuple[int, int, int]


@functools.cache
def load(name: str) -> dict[str, Any]:
    """The content of a YAML file of this folder, or of all files of a subfolder."""
    table: dict[str, Any] = {}
    for path in [FOLDER / name] if name.endswith(".yaml") else sorted((FOLDER / name).glob("*.yaml")):
        # For all tables, PyYAML's parser in C, which most installations have, takes 20 ms; the one in Python, 300.
        table |= yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return table


def parse(text: str) -> tuple[Color, ...]:
    """The colors of a text: hexadecimal codes such as "ff0000", separated by spaces."""
    return tuple((code[0], code[1], code[2]) for code in map(bytes.fromhex, text.split()))


def scaled(color: Color, factor: float) -> Color:
    """A darker or brighter color."""
    red, green, blue = (min(int(level * factor), 255) for level in color)
    return red, green, blue


def mix(a: Color, b: Color, fraction: float) -> Color:
    """The color at a fraction of the way from a to b."""
    red, green, blue = (round(x + (y - x) * fraction) for x, y in zip(a, b))
    return red, green, blue


PAINT = {name: parse(code)[0] for name, code in load("colors.yaml")["paint"].items()}  # of vehicles, by name


class Dice(random.Random):
    """`random.Random` that also draws colors."""

    def chance(self, probability: float) -> bool:
        """True with a probability."""
        return self.random() < probability

    def vary(self, color: Color, levels: int = 8) -> Color:
        """The color with each channel moved by up to `levels` at random."""
        red, green, blue = (min(max(level + self.randint(-levels, levels), 0), 255) for level in color)
        return red, green, blue

    def palette(self, name: str) -> dict[str, Color]:
        """Colors of a palette of `colors.yaml`, {color's name: RGB}, slightly varied."""
        palette: dict[str, Color] = {}
        for names, options in load("colors.yaml")[name].items():
            colors = parse(self.choice(options if isinstance(options, list) else options.split()))
            palette.update(zip(names.split(", "), map(self.vary, colors)))
        return palette

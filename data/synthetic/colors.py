"""Arithmetic of colors."""

Color = tuple[int, int, int]


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

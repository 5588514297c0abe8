"""Meshes of the shapes in `shapes/*.yaml`; `shapes/README.md` explains the files."""

import functools
import itertools
from typing import Any

from .bodies import BodyBuilder
from .dice import load
from .mesh import Mesh


@functools.cache
def make_mesh(group: str, name: str, *tags: str, pose: int = 0, text: str = "") -> Mesh:
    """The mesh of a shape.

    Args:
        group, name: of the shape in `shapes/*.yaml`.
        tags: values of `with`, `without` and `if` that hold, such as "bag" or "back".
        pose: index into `pose` lists.
        text: what is written in place of "TEXT".
    """
    shape = load("shapes")[group][name]
    return Reader(shape if isinstance(shape, dict) else {"parts": shape}, {*tags, f"pose {pose}"}, pose, text).mesh


class Reader:
    """Builds `mesh` from the parts of one shape."""

    def __init__(self, shape: dict[str, Any], tags: set[str], pose: int, text: str):
        self.tags, self.pose = tags, pose
        self.values: dict[str, Any] = {"TEXT": text}
        for name, value in shape.get("joints", {}).items():
            self.values[name] = self.evaluate(value)
        self.builder = BodyBuilder()
        self.add(shape["parts"])
        self.mesh = self.builder.build()

    def add(self, parts: list[Any]) -> None:
        """Add parts and groups of parts."""
        builder = self.builder
        for part in parts:
            if isinstance(part, list):
                kind, *arguments = part
                if not hasattr(BodyBuilder, kind):
                    raise ValueError(f"{kind!r} is not a kind of part: shapes/README.md lists them")
                named = arguments.pop() if kind in ("car", "bus") else {}
                getattr(builder, kind)(*map(self.evaluate, arguments), **named)
                continue
            if part.get("with", "") not in {"", *self.tags} or part.get("without") in self.tags:
                continue
            outer = builder.side, builder.shift
            sides = (-1, 1) if part.get("mirrored") else (1,)
            for side, i in itertools.product(sides, range(part.get("repeated", 1))):
                builder.side = outer[0] * side
                builder.shift = [start + i * step for start, step in zip(outer[1], part.get("step", (0, 0, 0)))]
                self.add(part["parts"])
            builder.side, builder.shift = outer

    def evaluate(self, value: Any) -> Any:
        """The value of an argument of a part: of the name of a joint its place, of [joint, dx, dy] a place near it."""
        match value:
            case {"pose": choices}:
                return self.evaluate(choices[self.pose])
            case {"if": tag, "then": one, "else": other}:
                return one if tag in self.tags else other
            case str():
                return self.values.get(value, value)
            case [str(joint), float() | int() as dx, float() | int() as dy] if joint in self.values:
                x, y = self.values[joint]
                return [x + dx, y + dy]
            case list():
                return [self.evaluate(item) for item in value]
        return value

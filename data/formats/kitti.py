"""KITTI: a text file of boxes beside each image.

A DontCare region is not labeled: its mapping is null, with "maybe" all categories that it may contain.
"""

import math
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from .base import ImageEntry, SceneBuilder, Source, to_number


# "occluded": fully visible, partly hidden, largely hidden, unknown
VISIBLE = {0: 1.0, 1: 0.7, 2: 0.25, 3: 0.0}


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Images; the annotation is the path of the text file."""
    return source.pairs("labels", ".txt")


def add_labels(scene: SceneBuilder, path: Path, where: str) -> None:
    """Add lines of type, truncated, occluded, alpha, left, top, right, bottom; the rest of a line is ignored.

    A type may be of several words, as "traffic light": it ends before the first number.
    """
    for line_where, line in scene.source.read_lines(path):
        fields = line.split()
        name = " ".join(takewhile(lambda field: math.isnan(to_number(field)), fields))
        values = [to_number(value) for value in fields[len(name.split()) :][:7]]
        if not name or len(values) < 7 or not all(map(math.isfinite, values)):
            message = f"{line[:80]!r} is not a KITTI label: a type, then 7 numbers or more, with decimal points"
            scene.reject("bad record", line_where, message)
            continue
        visible = VISIBLE.get(int(values[1]), 1.0) * (1.0 - max(values[0], 0.0))
        scene.add(name, values[3:], line_where, visible)

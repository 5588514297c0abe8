"""KITTI: a text file of boxes beside each image.

A DontCare region is not labeled: its mapping is null, with "maybe" all categories that it may contain.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from .base import ImageEntry, SceneBuilder, Source, to_number


# "occluded": fully visible, partly hidden, largely hidden, unknown
VISIBLE = {0: 1.0, 1: 0.7, 2: 0.25, 3: 0.0}


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Yield the images; the annotation is the path of the text file."""
    return source.pairs("labels", ".txt")


def add_labels(scene: SceneBuilder, path: Path, where: str) -> None:
    """Add lines of type, truncated, occluded, alpha, left, top, right, bottom; the rest of a line is ignored."""
    for line_where, fields in scene.source.read_lines(path):
        values = [to_number(value) for value in fields[1:8]]
        if len(values) < 7 or not all(math.isfinite(value) for value in values):
            scene.reject("bad record", line_where, f"{' '.join(fields)[:80]!r} is not a KITTI label")
            continue
        visible = VISIBLE.get(int(values[1]), 1.0) * (1.0 - max(values[0], 0.0))
        scene.add(fields[0], values[3:], line_where, visible)

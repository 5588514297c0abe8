"""KITTI: a text file of boxes for each image. DontCare is mapped to null, with "maybe" all that it may contain."""

import math
from collections.abc import Iterator
from pathlib import Path

from .reading import to_number
from .scene_builder import SceneBuilder
from .split import ImageEntry, Split


VISIBLE = {0: 1.0, 1: 0.7, 2: 0.25, 3: 0.0}  # "occluded": fully visible, partly hidden, largely hidden, unknown


def list_images(split: Split) -> Iterator[ImageEntry]:
    """Images; the annotation is the path of the text file."""
    return split.pairs("labels", ".txt")


def add_labels(scene: SceneBuilder, path: Path) -> None:
    """Add lines of type, truncated, occluded, alpha, left, top, right, bottom; the rest of a line is ignored."""
    for where, line in scene.split.folder.lines(path):
        name, *written = line.split()[:8]
        values = list(map(to_number, written))
        if len(values) == 7 and all(map(math.isfinite, values)):
            visible = VISIBLE.get(int(values[1]), 1.0) * (1.0 - max(values[0], 0.0))
            scene.add(name, values[3:], where, " ".join(written[3:]), visible=visible)
        else:
            scene.reject("bad record", where, f"{line[:80]!r} is not a type of one word and 7 numbers or more")

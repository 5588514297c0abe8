"""YOLO: a text file for each image, and a file with class names.

What can follow the class id of a line; numbers are fractions of the image's width and height:

    x y w h                       a box by its center
    x1 y1 x2 y2 x3 y3 ...         an outline, or the corners of an oriented box
    x y w h and K × D keypoints   if data.yaml has "kpt_shape: [K, D]"

Lines with another count are errors.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from .reading import Box, Folder, parse_text, to_number
from .scene_builder import SceneBuilder
from .split import ImageEntry, Split


DATA_FILES = ("data.yaml", "data.yml", "dataset.yaml")
NAME_FILES = (*DATA_FILES, "classes.txt", "obj.names")


def list_images(split: Split) -> Iterator[ImageEntry]:
    """Images; the annotation is (path of the text file, data of `read_data`)."""
    # LabelImg writes classes.txt into the folder of the labels.
    files = [split.folder.root / name for name in NAME_FILES] + [split.paths["labels"] / "classes.txt"]
    path = next((path for path in files if path.is_file()), files[0])
    data = read_data(path, split.folder)
    for name, where, labels in split.pairs("labels", ".txt"):
        yield name, where, (labels, data)


def add_labels(scene: SceneBuilder, annotation: tuple[Path, dict[str, Any]]) -> None:
    """Add the box of each line."""
    path, data = annotation
    keypoints = data["keypoints"]
    needed = f"or 4 + {keypoints}, by kpt_shape" if keypoints else "or an even count for an outline without kpt_shape"
    scene.scale = scene.width, scene.height
    for where, line in scene.split.folder.lines(path):
        class_id, *values = map(to_number, line.split())
        fits = len(values) in (4, 4 + keypoints) if keypoints else len(values) > 3 and len(values) % 2 == 0
        if not (fits and class_id.is_integer() and all(map(math.isfinite, values))):
            message = f"{line[:80]!r} is not a class id and 4 numbers of a box, {needed} of data.yaml"
            scene.reject("bad record", where, message)
            continue
        box = box_of(values[:4] if keypoints else values)
        scene.add(data["names"].get(int(class_id), f"id {class_id:g}"), box, where, line[:80])


def read_data(path: Path, folder: Folder, keep: bool = False) -> dict[str, Any]:
    """Keys of a data.yaml, with {id: class name} as "names"; "keypoints" is how many numbers of a line are keypoints.

    The lines of a text file are the names. A blank name is left out.
    """
    return folder.read(path, partial(_parse_data, is_yaml=path.suffix in (".yaml", ".yml")), keep)


def _parse_data(file: BinaryIO, is_yaml: bool) -> dict[str, Any]:
    text = parse_text(file)
    # The loader keeps every value as text: a class may be named "no" or "050".
    data = yaml.load(text, yaml.BaseLoader) if is_yaml else {"names": text.splitlines()}
    written = data.get("names") if isinstance(data, dict) else None
    names = dict(enumerate(written)) if isinstance(written, list) else written
    if not names or not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"names must be a list, or {{id: name}}, got {written!r}")
    shape = data.get("kpt_shape", [0, 0])
    if not isinstance(shape, list) or len(shape) != 2:
        raise ValueError(f"kpt_shape must be [number of keypoints, 2 or 3], got {shape!r}")
    found = {int(class_id): name.strip() for class_id, name in names.items() if name.strip()}
    return data | {"names": found, "keypoints": int(shape[0]) * int(shape[1])}


def box_of(values: list[float]) -> Box:
    """The box of four numbers (its center and size), or of the points of an outline."""
    if len(values) > 4:
        return min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])
    x, y, width, height = values
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2

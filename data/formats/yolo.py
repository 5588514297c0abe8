"""YOLO: a text file for each image, and a file with class names.

What can follow the class id of a line; numbers are fractions of the image's width and height:

    x y w h                       a box by its center
    x1 y1 x2 y2 x3 y3 ...         an outline, or the corners of an oriented box
    x y w h and K × D keypoints   if data.yaml has "kpt_shape: [K, D]"

Another count and numbers that are not fractions are bad boxes.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from .reading import UNREADABLE, Box, Folder, parse_text, to_number
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
    scene.scale = scene.width, scene.height
    for where, line in scene.split.folder.lines(path):
        first, *numbers = line.split()
        class_id = to_number(first)
        if not class_id.is_integer() or len(numbers) < 4:
            scene.reject("bad record", where, f"{line[:80]!r} is not a class id with a box or an outline")
            continue
        box, wrong = box_of(list(map(to_number, numbers)), data["keypoints"])
        scene.add(data["names"].get(int(class_id), f"id {class_id:g}"), box, where, line[:80], wrong=wrong)


def read_data(path: Path, folder: Folder, keep: bool = False) -> dict[str, Any]:
    """Keys of a data.yaml, with {id: class name} as "names"; "keypoints" is how many numbers of a line are keypoints.

    The lines of a text file are the names. A blank name is left out.
    """
    parse = partial(_parse_data, is_yaml=path.suffix in (".yaml", ".yml"))
    return folder.read(path, parse, keep, message="class names cannot be read")


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


def box_of(values: list[float], keypoints: int) -> tuple[Box, str]:
    """(box in fractions of the numbers after a class id, why they cannot be one or "")."""
    count = len(values)
    if not all(map(math.isfinite, values)):
        return UNREADABLE, ""
    fits = count in (4, 4 + keypoints) if keypoints else count % 2 == 0
    if not fits:
        needed = f"4 + {keypoints}, by kpt_shape" if keypoints else "an even count for an outline without kpt_shape"
        return UNREADABLE, f"has {count} numbers; it needs 4 for a box, or {needed} of data.yaml"
    x, y, width, height = values[:4]
    box = x - width / 2, y - height / 2, x + width / 2, y + height / 2
    if count > 4 and not keypoints:
        box = min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])
    if min(box) < -0.5 or max(box) > 1.5:  # corners of an oriented box may lie outside
        return UNREADABLE, "is not in fractions of the image, 0 to 1"
    return box, ""

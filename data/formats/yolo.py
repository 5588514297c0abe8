"""YOLO: a text file of boxes, outlines, oriented boxes or keypoints for each image, and a file with class names.

What can follow the class id of a line; numbers are fractions of the image's width and height:

    x y w h                       a box by its center
    x1 y1 x2 y2 x3 y3 ...         an outline, or the corners of an oriented box
    x y w h and K × D keypoints   if data.yaml has "kpt_shape: [K, D]"

A line with another count of numbers, or with numbers that are not fractions, is a bad box.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .reading import Folder, decode_text, reading, to_number
from .scene_builder import SceneBuilder
from .source import ImageEntry, Source


DATA_FILES = ("data.yaml", "data.yml", "dataset.yaml")
NAME_FILES = (*DATA_FILES, "classes.txt", "obj.names")
UNKNOWN = (math.nan,) * 4


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Images; the annotation is (path of the text file, {id: class name}, numbers of keypoints)."""
    # LabelImg writes classes.txt into the folder of the labels.
    files = [*NAME_FILES, f"{source.layout['labels']}/classes.txt"]
    files = [source.layout["classes"]] if "classes" in source.layout else files
    options = [source.folder.root / name for name in files]
    path = next((path for path in options if path.is_file()), options[0])
    given = {"names": dict(enumerate(source.mapping.names))}
    data = read_data(path, source.folder) if path.is_file() or not source.mapping.names else given
    names, keypoints = data["names"], data.get("keypoints", 0)
    for name, where, labels in source.pairs("labels", ".txt"):
        yield name, where, (labels, names, keypoints)


def add_labels(scene: SceneBuilder, annotation: tuple[Path, dict[int, str], int]) -> None:
    """Add the box of each line."""
    path, names, keypoints = annotation
    scene.scale = scene.width, scene.height
    for where, line in scene.source.folder.lines(path):
        first, *numbers = line.split()
        class_id = to_number(first)
        if not class_id.is_integer() or len(numbers) < 4:
            scene.reject("bad record", where, f"{line[:80]!r} is not a class id with a box or an outline")
            continue
        box, wrong = UNKNOWN, ""
        try:
            box = box_of(numbers, keypoints)
        except ValueError as error:
            wrong = str(error)
        scene.add(names.get(int(class_id), f"id {class_id:g}"), box, where, line[:80], wrong=wrong)


def read_data(path: Path, folder: Folder, keep: bool = False) -> dict[str, Any]:
    """Keys of a data.yaml, with {id: class name} as "names"; "keypoints" is how many numbers of a line are keypoints.

    The lines of a text file are the names. An id without a name, or with a blank one, is left out.

    Raises:
        Unusable: it cannot be read, has no names, or its "kpt_shape" is not [number of keypoints, 2 or 3].
    """
    text = folder.parse(path, decode_text, keep)
    with reading(path, "class names cannot be read"):
        # The loader keeps every value as text: a class may be named "no" or "050".
        is_yaml = path.suffix in (".yaml", ".yml")
        data = yaml.load(text, yaml.BaseLoader) if is_yaml else {"names": text.splitlines()}
        data = data if isinstance(data, dict) else {}
        names = data.get("names") or {}
        names = dict(enumerate(names)) if isinstance(names, list) else names
        data["names"] = {int(class_id): name.strip() for class_id, name in names.items() if name.strip()}
        if not data["names"]:
            raise ValueError("it has none")
    if shape := data.get("kpt_shape"):
        with reading(path, "kpt_shape is not [number of keypoints, 2 or 3]"):
            if not isinstance(shape, list):
                raise ValueError(shape)
            data["keypoints"] = int(shape[0]) * int(shape[1])
    return data


def box_of(numbers: list[str], keypoints: int) -> tuple[float, float, float, float]:
    """Left, top, right and bottom from the numbers after a class id; the docstring of this module has the rule.

    Args:
        keypoints: how many numbers of a line are keypoints; 0 if data.yaml has no "kpt_shape".

    Returns:
        fractions of the image; NaN if one of the numbers cannot be read.

    Raises:
        ValueError: the numbers cannot be a box.
    """
    values = [to_number(number) for number in numbers]
    count = len(values)
    if not all(map(math.isfinite, values)):
        return UNKNOWN
    if keypoints and count not in (4, 4 + keypoints):
        raise ValueError(f"has {count} numbers; by kpt_shape of data.yaml it needs 4 + {keypoints}")
    if count % 2 and not keypoints:
        raise ValueError(
            f"has {count} numbers; it needs 4 for a box, or an even count for an outline: remove confidences and "
            'ids of tracks; keypoints need "kpt_shape" in data.yaml'
        )
    is_box = bool(keypoints) or count == 4
    low, high = (-2, 2) if is_box else (-0.5, 1.5)  # corners of an oriented box may lie outside
    values = values[:4] if is_box else values
    if min(values) < low or max(values) > high:
        raise ValueError("is not in fractions of the image, 0 to 1")
    if not is_box:
        return min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])
    x, y, width, height = values
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2

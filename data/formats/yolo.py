"""YOLO: a text file of boxes, outlines, oriented boxes or keypoints for each image, and a file with class names.

What can follow the class id of a line; numbers are fractions of the image's width and height:

    x y w h                       a box by its center
    x1 y1 x2 y2 x3 y3 ...         an outline, or the corners of an oriented box
    ... confidence, id or both    after a box or an outline, written by detectors and trackers
    x y w h and K × D keypoints   if data.yaml has "kpt_shape: [K, D]", or each third number is a visibility, 0 to 2

A last "0" or "1" may be a coordinate or an id: it is an id if other lines of the split have higher ones. If no line
does, and the two boxes differ much, the line is a bad box. So is a line whose numbers are not fractions.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .reading import Unusable, read_lines, read_text, reading, to_number
from .scene_builder import SceneBuilder
from .source import ImageEntry, Source


DATA_FILES = ("data.yaml", "data.yml", "dataset.yaml")
NAME_FILES = (*DATA_FILES, "classes.txt", "obj.names")
Box = tuple[float, float, float, float]
UNKNOWN = (math.nan,) * 4


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Images; the annotation is (path of the text file, {id: class name}, numbers of keypoints, ids are written)."""
    # LabelImg writes classes.txt into the folder of the labels.
    files = [*NAME_FILES, f"{source.layout['labels']}/classes.txt"]
    options = [source.root / name for name in ([source.layout["classes"]] if "classes" in source.layout else files)]
    path = next((path for path in options if path.is_file()), options[0])
    is_needed = path.is_file() or not source.mapping.names
    data = read_data(path, source.root) if is_needed else {"names": {}}
    names, keypoints = source.class_names(data["names"], path), data.get("keypoints")
    pairs = list(source.pairs("labels", ".txt"))

    @cache
    def has_ids() -> bool:
        for _, _, labels in pairs:
            with suppress(Unusable):  # a problem for `add_labels`
                if any(_ends_in_id(line.split()[1:]) for _, line in read_lines(labels, source.root)):
                    return True
        return False

    for name, where, labels in pairs:
        yield name, where, (labels, names, keypoints, has_ids)


def add_labels(scene: SceneBuilder, annotation: tuple[Path, dict[int, str], int | None, Callable[[], bool]]) -> None:
    """Add the box of each line."""
    path, names, keypoints, has_ids = annotation
    scene.scale = scene.width, scene.height
    for where, line in read_lines(path, scene.source.root):
        first, *numbers = line.split()
        class_id = to_number(first)
        if not class_id.is_integer() or len(numbers) < 4:
            scene.reject("bad record", where, f"{line[:80]!r} is not a class id with a box or an outline")
            continue
        box, wrong = UNKNOWN, ""
        try:
            box = box_of(numbers, keypoints, has_ids)
        except ValueError as error:
            wrong = str(error)
        scene.add(names.get(int(class_id), f"id {class_id:g}"), box, where, line[:80], wrong=wrong)


def read_data(path: Path, root: Path) -> dict[str, Any]:
    """Keys of a data.yaml, with {id: class name} as "names"; "keypoints" is how many numbers of a line are keypoints.

    The lines of a text file are the names. An id without a name, or with a blank one, is left out.

    Raises:
        Unusable: it cannot be read, has no names, or its "kpt_shape" is not [number of keypoints, 2 or 3].
    """
    text = read_text(path, root)
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


def box_of(numbers: list[str], keypoints: int | None, has_ids: Callable[[], bool]) -> Box:
    """Left, top, right and bottom from the numbers after a class id; the docstring of this module has the rule.

    Args:
        keypoints: how many numbers of a line are keypoints; None if data.yaml has no "kpt_shape".
        has_ids: whether lines of the split end in ids of tracks.

    Returns:
        fractions of the image; NaN if one of the numbers cannot be read.

    Raises:
        ValueError: the numbers cannot be a box, or can be different ones.
    """
    values = [to_number(number) for number in numbers]
    count = len(values)
    if not all(map(math.isfinite, values)):
        return UNKNOWN
    if keypoints is not None and count != 4 and not 0 <= count - 4 - keypoints <= 2:
        raise ValueError(f"has {count} numbers; by kpt_shape of data.yaml it needs 4 + {keypoints}")
    if keypoints is not None or _has_visibilities(values):
        return _around(values[:4])
    return _around(values[: count - _extra(numbers, values, has_ids)])


def _extra(numbers: list[str], values: list[float], has_ids: Callable[[], bool]) -> int:
    """How many of the last numbers of a line are not coordinates: 1 for a confidence or an id, 2 for both, or 0."""
    count, last = len(values), values[-1]
    if count % 2:
        if count % 3 == 1 and _may_be_keypoints(values):
            readings = "an outline and one more number, or a box and keypoints"
            raise ValueError(f"may be {readings}: data.yaml has no kpt_shape")
        if not 0 <= last <= 1 and not numbers[-1].isdigit():  # for example, an angle
            raise ValueError(f"has {count} numbers, of which the last is neither a confidence nor an id")
        return 1
    ends_in_id = _ends_in_id(numbers)
    if ends_in_id is None:
        differs = _is_inside(values) if count == 6 else _area(_around(values)) > 2 * _area(_around(values[:-2]))
        ends_in_id = has_ids()
        if differs and not ends_in_id:
            raise ValueError("may be an outline, or end in a confidence and an id")
    return 2 if ends_in_id else 0


def _around(values: list[float]) -> Box:
    """The box given by its center and size, if there are four numbers, otherwise the box around points."""
    low, high = (-2, 2) if len(values) == 4 else (-0.5, 1.5)  # corners of an oriented box may lie outside
    if min(values) < low or max(values) > high:
        raise ValueError("is not in fractions of the image, 0 to 1")
    if len(values) > 4:
        return min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])
    x, y, width, height = values
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _is_inside(values: list[float]) -> bool:
    """Whether the first four numbers can be a box in the image."""
    x, y, width, height = values[:4]
    sides = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    return min(width, height) > 0 and all(-0.01 <= side <= 1.01 for side in sides)


def _has_visibilities(values: list[float]) -> bool:
    """Whether the numbers can only be a box and at least two keypoints of x, y and visibility."""
    flags = values[6::3]
    return len(flags) > 1 and len(values) % 3 == 1 and all(flag in (0, 1, 2) for flag in flags) and _is_inside(values)


def _may_be_keypoints(values: list[float]) -> bool:
    """Whether the first four numbers can be a box, and the others points in it, each with a visibility."""
    x, y, width, height = values[:4]
    points = [point for point in zip(values[4::3], values[5::3], values[6::3]) if point[:2] != (0, 0)]
    are_near = (abs(left - x) <= width / 2 + 0.02 and abs(top - y) <= height / 2 + 0.02 for left, top, _ in points)
    return _is_inside(values) and all(are_near) and all(0 <= flag <= 2 for _, _, flag in points)


def _ends_in_id(numbers: list[str]) -> bool | None:
    """Whether the last two of an even number of numbers are a confidence and the id of a track, such as "0.9 12".

    None if they may also be coordinates, such as "0.9 1".
    """
    values = [to_number(number) for number in numbers]
    if len(values) < 6 or len(values) % 2 or _has_visibilities(values) or not 0 <= values[-2] <= 1:
        return False
    if values[-1] > 1:  # not a coordinate
        return values[-1] % 1 == 0
    return None if numbers[-1].isdigit() else False

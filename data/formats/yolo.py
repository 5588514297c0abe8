"""YOLO: a text file of boxes, outlines, oriented boxes or keypoints beside each image, and a file with class names.

The box of a line, by what stands behind its class id; numbers are fractions of the image's width and height:

    x y w h                       a box by its center
    ... confidence, id or both    written by detectors and trackers behind a box or an outline
    x y w h and K × D keypoints   if data.yaml has "kpt_shape: [K, D]", or each third number is a visibility, 0 to 2
    x1 y1 x2 y2 x3 y3 ...         otherwise: an outline, or the corners of an oriented box

A last "0" or "1" may be a coordinate or an id: it is an id if other lines of the split have higher ones. Where that
does not tell and the boxes differ much, and where numbers are no fractions, the line is a bad box.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from .base import ImageEntry, SceneBuilder, SkippedImage, Source, to_number


DATA_FILES = ("data.yaml", "data.yml", "dataset.yaml")
READ_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, yaml.YAMLError)
Box = tuple[float, float, float, float]


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Images; the annotation is (path of the text file, {id: class name}, numbers of keypoints, ids are written)."""
    names = _read_names(source)
    keypoints = _read_keypoints(source) if names else None

    @cache
    def has_ids() -> bool:
        lines = (_lines(source, path) for _, _, path in pairs)
        return keypoints is None and any(_ends_in_id(line.split()[1:]) for line in chain.from_iterable(lines))

    pairs = list(source.pairs("labels", ".txt"))
    for name, where, path in pairs:
        yield name, where, (path, names, keypoints, has_ids)


def add_labels(scene: SceneBuilder, annotation: Any, where: str) -> None:
    """Add the box of each line."""
    path, names, keypoints, has_ids = annotation
    for line_where, line in scene.source.read_lines(path):
        first, *numbers = line.split()
        class_id = to_number(first)
        if not class_id.is_integer() or len(numbers) < 4:
            scene.reject("bad record", line_where, f"{line[:80]!r} is not a class id with a box or an outline")
            continue
        name = names.get(int(class_id), f"id {class_id:g}")
        try:
            left, top, right, bottom = box_of(numbers, keypoints, has_ids)
        except ValueError as error:
            scene.add(name, (), line_where, written=line[:80], wrong=str(error))
        else:
            box = (left * scene.width, top * scene.height, right * scene.width, bottom * scene.height)
            scene.add(name, box, line_where, written=line[:80])


def box_of(numbers: list[str], keypoints: int | None, has_ids: Callable[[], bool]) -> Box:
    """Left, top, right and bottom by the numbers behind a class id; the docstring of this module has the rule.

    Args:
        keypoints: how many numbers all keypoints of a line have; None if data.yaml has no "kpt_shape".
        has_ids: whether lines of the split end in ids of tracks.

    Raises:
        ValueError: the numbers can be no box, or different ones.
    """
    values = [to_number(number) for number in numbers]
    count, last = len(values), values[-1]
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan, math.nan, math.nan
    if keypoints is not None:
        if count != 4 and not 0 <= count - 4 - keypoints <= 2:
            raise ValueError(f"has {count} numbers; by kpt_shape of data.yaml it needs 4 + {keypoints}")
        return _centered(values)
    if count == 4 or _has_visibilities(values):
        return _centered(values)
    if count % 2 and count % 3 == 1 and _may_be_keypoints(values):
        raise ValueError("may be an outline and one more number, or a box and keypoints: data.yaml has no kpt_shape")
    if count % 2:
        if not _is_fraction(last) and not numbers[-1].isdigit():  # for example, an angle
            raise ValueError(f"has {count} numbers, of which the last is neither a confidence nor an id")
        return _centered(values) if count == 5 else _around(values[:-1])
    tracked = _centered if count == 6 else _around
    if _ends_in_id(numbers) or (_may_end_in_id(numbers) and has_ids()):
        return tracked(values[:-2])
    box = _around(values)
    differ = _is_inside(values) if count == 6 else _area(box) > 2 * _area(_around(values[:-2]))
    if _may_end_in_id(numbers) and differ:
        raise ValueError("may be an outline, or end in a confidence and an id")
    return box


def _centered(values: list[float]) -> Box:
    x, y, width, height = values[:4]
    if max(map(abs, values[:4])) > 2:
        raise ValueError("is not in fractions of the image, 0 to 1")
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _around(values: list[float]) -> Box:
    if min(values) < -0.5 or max(values) > 1.5:  # corners of an oriented box may lie outside
        raise ValueError("is not in fractions of the image, 0 to 1")
    return min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _is_fraction(value: float) -> bool:
    return 0 <= value <= 1


def _is_inside(values: list[float]) -> bool:
    """Whether the first four numbers can be a box in the image."""
    x, y, width, height = values[:4]
    return min(width, height) > 0 and all(
        -0.01 <= side <= 1.01 for side in (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    )


def _has_visibilities(values: list[float]) -> bool:
    """Whether the numbers can only be a box and at least two keypoints of x, y and visibility."""
    flags = values[6::3]
    return len(flags) > 1 and len(values) % 3 == 1 and all(flag in (0, 1, 2) for flag in flags) and _is_inside(values)


def _may_be_keypoints(values: list[float]) -> bool:
    """Whether the first four numbers can be a box, and those behind it points in it, each with a visibility."""
    x, y, width, height = values[:4]
    points = [point for point in zip(values[4::3], values[5::3], values[6::3]) if point[:2] != (0, 0)]
    are_near = (abs(left - x) <= width / 2 + 0.02 and abs(top - y) <= height / 2 + 0.02 for left, top, _ in points)
    return _is_inside(values) and all(are_near) and all(0 <= flag <= 2 for _, _, flag in points)


def _may_end_in_id(numbers: list[str]) -> bool:
    """Whether the last two of an even number of numbers can be a confidence and the id of a track, as "0.9 1"."""
    values = [to_number(number) for number in numbers]
    is_even = len(values) >= 6 and len(values) % 2 == 0 and not _has_visibilities(values)
    return is_even and _is_fraction(values[-2]) and (numbers[-1].isdigit() or (values[-1] > 1 and values[-1] % 1 == 0))


def _ends_in_id(numbers: list[str]) -> bool:
    return _may_end_in_id(numbers) and to_number(numbers[-1]) > 1  # no coordinate


def _lines(source: Source, path: Path) -> list[str]:
    try:
        return [line for _, line in source.read_lines(path)]
    except SkippedImage:  # a problem for `add_labels`
        return []


def parse_data(text: str) -> dict[str, Any]:
    """Content of a data.yaml.

    Raises:
        ValueError, yaml.YAMLError, RecursionError: it cannot be read.
    """
    data = yaml.load(text, yaml.BaseLoader)  # which keeps every value as text: a class may be named "no" or "050"
    if not isinstance(data, dict):
        raise ValueError("it has no 'names'")
    return data


def parse_names(names: Any) -> dict[int, str]:
    """Names {id: class name} from a list or {id: name}. An id without a name, or with a blank one, is left out."""
    if not names:
        raise ValueError("it has no 'names'")
    names = dict(enumerate(names) if isinstance(names, list) else names)
    if not (found := {int(class_id): name.strip() for class_id, name in names.items() if name.strip()}):
        raise ValueError("there are no class names")
    return found


def _read_names(source: Source) -> dict[int, str]:
    """Class names by id of a file of the source; without one, those of the mapping."""
    # LabelImg writes classes.txt beside the labels.
    options = [*DATA_FILES, "classes.txt", "obj.names", f"{source.layout['labels']}/classes.txt"]
    options = [source.layout["classes"]] if "classes" in source.layout else options
    path = next((source.root / name for name in options if (source.root / name).is_file()), source.root / options[0])
    if source.mapping.names and not path.is_file():
        return source.class_names({}, path)
    try:
        text = source.read_text(path)
        is_yaml = path.suffix in (".yaml", ".yml")
        found = parse_names(parse_data(text).get("names") if is_yaml else text.splitlines())
    except READ_ERRORS as error:
        source.problems.add("bad file", path, f"class names cannot be read: {' '.join(str(error).split())}")
        return {}
    return source.class_names(found, path)


def _read_keypoints(source: Source) -> int | None:
    """Numbers that all keypoints of a line have, by "kpt_shape" of data.yaml; None if there is none."""
    for path in (source.root / name for name in DATA_FILES if (source.root / name).is_file()):
        try:
            shape = parse_data(source.read_text(path)).get("kpt_shape")
            if shape is not None and not isinstance(shape, list):
                raise ValueError(f"expected [number of keypoints, 2 or 3], got {shape!r}")
            return None if shape is None else int(shape[0]) * int(shape[1])
        except READ_ERRORS as error:
            source.problems.add("bad file", path, f"kpt_shape cannot be read: {' '.join(str(error).split())}")
    return None

"""What each cell of an image shows, and where each asked word should look: labels for learning from few images.

    Scene → cell targets [P,T] of 1 (it is there), 0 (it is not) and -1 (nobody knows)
    Question → its object's word in the packed row → the cells of these objects

A yes or no about a whole image says little about where; from a few thousand images a model hardly learns to look. The
annotations know more, for each of the 196 cells.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .questions import Question
from .scene import ATTRIBUTES, CLASSES, FACTS, Scene, SceneObject
from .truths import MIN_VISIBLE


OBJECT_TARGETS = (*CLASSES, *(f"{name} {value}" for name, values in ATTRIBUTES.items() for value in values))
FACT_TARGETS = tuple(f"{name} {value}" for name, values in FACTS.items() for value in values)
TARGETS: tuple[str, ...] = OBJECT_TARGETS + FACT_TARGETS
CLEAR = 0.5  # of a cell: less is not called an object's cell, nor free of it
TRACE = 0.03


def coverage(box: tuple[float, float, float, float], size: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """The part of each cell [rows, columns] of an image of (width, height) that a box covers."""
    parts = []
    for low, high, length, count in ((box[1], box[3], size[1], grid[0]), (box[0], box[2], size[0], grid[1])):
        edges = np.arange(count + 1) * (length / count)
        overlap = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
        parts.append(np.clip(overlap, 0, None) * (count / length))
    return np.outer(*parts)


def object_cells(item: SceneObject, scene: Scene, grid: tuple[int, int]) -> np.ndarray:
    """The part of each cell [rows, columns] that an object fills; 1 in the cell of its centre, however small it is."""
    size = (scene.width, scene.height)
    if item.cells is not None:
        return resample(np.asarray(item.cells), grid)
    parts = coverage(item.box, size, grid)
    row = min(int((item.box[1] + item.box[3]) / 2 / size[1] * grid[0]), grid[0] - 1)
    column = min(int((item.box[0] + item.box[2]) / 2 / size[0] * grid[1]), grid[1] - 1)
    parts[row, column] = 1.0
    return parts


def resample(cells: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Coverage [h,w] as coverage of another grid: means of the old cells, weighted by their shares."""
    if cells.shape == grid:
        return cells
    return _weights(cells.shape[0], grid[0]) @ cells @ _weights(cells.shape[1], grid[1]).T


@lru_cache(maxsize=64)
def _weights(old: int, new: int) -> np.ndarray:
    edges, cells = np.arange(new + 1) * (old / new), np.arange(old)
    overlap = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return np.clip(overlap, 0, None) * (new / old)


def cell_targets(scene: Scene, grid: tuple[int, int]) -> np.ndarray:
    """For each cell and each of TARGETS whether it is there: int8 [rows·columns, T] of 1, 0 and -1 for unknown."""
    targets = np.full((len(TARGETS), *grid), -1, np.int8)
    for index, label in enumerate(CLASSES):
        if label in scene.exhaustive:
            targets[index] = 0
    for item in scene.objects:
        parts = object_cells(item, scene, grid)
        wider = CLASSES[item.label][2]
        for label in (item.label, wider) if wider else (item.label,):
            channel = targets[list(CLASSES).index(label)]
            channel[(parts > TRACE) & (channel == 0)] = -1
            if item.visible >= MIN_VISIBLE:
                channel[parts >= CLEAR] = 1
        for name, known in item.attributes.items() if item.visible >= MIN_VISIBLE else ():
            for value in ATTRIBUTES[name]:
                targets[TARGETS.index(f"{name} {value}")][parts >= CLEAR] = value == known
    for name, known in scene.facts.items():  # of the whole image, so every cell shows it
        for value in FACTS[name]:
            targets[TARGETS.index(f"{name} {value}")] = value == known
    return targets.reshape(len(TARGETS), -1).T


def word_cells(
    questions: Sequence[Question], scene: Scene, grid: tuple[int, int]
) -> Iterable[tuple[int, str, np.ndarray]]:
    """For each question about objects that are there: its number, their class, and the cells [P] that they fill.

    Whatever the answer: to tell that the car is not on the left one has to look at it. These are all objects of the
    class, as a word is read before what limits it ("... on the left?"); of "a red car" those that make it a yes.
    """
    for number, question in enumerate(questions):
        label = question.label
        if label not in CLASSES:
            continue
        limited_before = question.fact.split("/")[2:3] == ["any"]
        items = [SceneObject(label, box) for box in question.boxes if limited_before]
        items = items or [item for item in scene.of(label) if item.visible >= MIN_VISIBLE]
        cells = np.max([object_cells(item, scene, grid) for item in items], axis=0, initial=0) >= CLEAR / 2
        if cells.any():
            yield number, label, cells.ravel()


def class_words(label: str) -> tuple[str, str]:
    """The words that tell a class in a question: the last of its name, singular and plural."""
    singular, plural, _ = CLASSES[label]
    return singular.rsplit(" ", 1)[-1], plural.rsplit(" ", 1)[-1]


def find_word(processor: Any, input_ids: Sequence[int], label: str) -> int | None:
    """The first place in a question that holds a word of a class; None if there is none."""
    if label not in CLASSES:
        return None
    wanted = set(processor.tokenizer.convert_tokens_to_ids(list(class_words(label))))
    return next((place for place, token in enumerate(input_ids) if token in wanted), None)

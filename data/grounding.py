"""Grounding targets: the patches that the words of a question should attend to.

    question → position of the word that names an object → patches [P] of these objects

A yes or no about a whole image carries little information about location. From a few thousand images a model hardly
learns where to attend; boxes and masks teach it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .ground_truth import MIN_VISIBLE
from .patches import box_coverage, resampling
from .questions import Question
from .scene import CLASSES, Scene, SceneObject


MIN_COVERAGE = 0.25  # fraction of a patch that an object must cover


def object_patches(item: SceneObject, scene: Scene, grid: tuple[int, int]) -> np.ndarray:
    """Fraction [rows,columns] of each patch that an object's mask or box covers."""
    if item.coverage is not None:
        mask = np.asarray(item.coverage)
        return resampling(0, 1, grid[0], len(mask)) @ mask @ resampling(0, 1, grid[1], len(mask[0])).T
    size = np.array([scene.width, scene.height] * 2)
    return box_coverage(np.array([item.box]) / size, grid)[0]


def word_patches(
    questions: Sequence[Question], scene: Scene, grid: tuple[int, int]
) -> Iterable[tuple[int, str, np.ndarray]]:
    """For each question about objects in the scene: its index, their category, and bool patches [P] that they cover.

    The answer does not matter: to answer "Is the car on the left?" with no, a model must see the car. The patches are
    those of all objects of the category, because the noun is read before the words that limit it ("... on the
    left?"). Only colors come before the noun: "a red car" marks red cars.
    """
    for index, question in enumerate(questions):
        category = question.category
        if category not in CLASSES:
            continue
        limited_before = question.question_id.split("/")[2:3] == ["any"]
        items = [SceneObject(category, box) for box in question.boxes if limited_before]
        items = items or [item for item in scene.of(category) if item.visible >= MIN_VISIBLE]
        patches = np.max([object_patches(item, scene, grid) for item in items], axis=0, initial=0) >= MIN_COVERAGE
        if patches.any():
            yield index, category, patches.ravel()


def class_words(category: str) -> tuple[str, str]:
    """The singular and plural word that names a category in a question: the last word of its name."""
    singular, plural, _ = CLASSES[category]
    return singular.rsplit(" ", 1)[-1], plural.rsplit(" ", 1)[-1]


def find_word(processor: Any, input_ids: Sequence[int], category: str) -> int | None:
    """The position of the first token in a question that names a category; None if there is none."""
    if category not in CLASSES:
        return None
    wanted = set(processor.tokenizer.convert_tokens_to_ids(list(class_words(category))))
    return next((position for position, token in enumerate(input_ids) if token in wanted), None)

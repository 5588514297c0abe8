"""Grounding loss: the words of a question should attend to the patches of the objects that they name.

    question → position of the word that names an object → patches [P] of these objects ↔ cross-attention [P]

A yes or no about a whole image carries little information about location. From a few thousand images a model hardly
learns where to attend; boxes and masks teach it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...configuration_traffic_vlm import token_grid
from ...data.questions import Question
from ...data.scene import Scene, class_words, is_a, mask_patches
from ...data.truth import MIN_VISIBLE, Box
from ..collator import Prepared


MIN_COVERAGE = 0.25  # fraction of a patch that an object must cover


def interval_coverage(low: np.ndarray, high: np.ndarray, count: int) -> np.ndarray:
    """Fraction [N,count] of each of `count` equal parts of 0..1 that the intervals low..high, each [N], cover."""
    edges = np.arange(count + 1) / count
    overlap = np.minimum(edges[1:], high[:, None]) - np.maximum(edges[:-1], low[:, None])
    return overlap.clip(0) * count


def box_patches(boxes: Sequence[Box], scene: Scene, grid: tuple[int, int]) -> np.ndarray:
    """Fraction [N,rows,columns] of each patch that N boxes, in pixels of the scene, cover.

    The patch of a box's center counts as covered, however small the box is: small objects would vanish otherwise.
    """
    left, top, right, bottom = (np.array(boxes).reshape(-1, 4) / np.array([scene.width, scene.height] * 2)).T
    rows, columns = interval_coverage(top, bottom, grid[0]), interval_coverage(left, right, grid[1])
    covered = rows[:, :, None] * columns[:, None, :]
    row = ((top + bottom) / 2 * grid[0]).astype(int).clip(0, grid[0] - 1)
    column = ((left + right) / 2 * grid[1]).astype(int).clip(0, grid[1] - 1)
    covered[np.arange(len(boxes)), row, column] = 1
    return covered


def object_patches(scene: Scene, grid: tuple[int, int]) -> np.ndarray:
    """Fraction [N,rows,columns] of each patch that the mask or box of each of the scene's N objects covers."""
    covered = box_patches([item.box for item in scene.objects], scene, grid)
    for index, item in enumerate(scene.objects):
        if item.coverage is not None:
            covered[index] = mask_patches(item.coverage, grid)
    return covered


def named_patches(question: Question, scene: Scene, covered: np.ndarray) -> np.ndarray:
    """The patches, bool [P], of the objects that a question names, whatever its answer is.

    To answer "Is the car on the left?" with no, a model must see the car. They are those of all objects of the
    category, because the noun is read before the words that limit it ("... on the left?"). Only colors come before
    the noun: "a red car" marks red cars.

    Args:
        covered: the `object_patches` [N,rows,columns] of the scene.
    """
    if question.boxes and question.key[2:3] == ("any",):
        named = box_patches(question.boxes, scene, covered.shape[1:])
    else:
        alike = [is_a(item.category, question.category) and item.visible >= MIN_VISIBLE for item in scene.objects]
        named = covered[np.array(alike, bool)]
    return named.max(0, initial=0).ravel() >= MIN_COVERAGE


def targets(
    images: Sequence[Prepared], batch: Mapping[str, Any], vision_config: Any, processor: Any
) -> dict[str, torch.Tensor]:
    """Words that name objects in the image; their places are found on the CPU, which would wait for a GPU.

    Returns:
        words: [K,2], row and column of each word. patches: bool [K,P], those of its objects.
    """
    grid = token_grid(vision_config, *batch["pixel_values"].shape[-2:])
    words, patches, tokenizer = [], [], processor.tokenizer
    for item in images:
        if item.truth is None:
            continue
        covered = object_patches(item.truth.scene, grid)
        for question, (row, start, end) in zip(item.questions, item.spans):
            named = named_patches(question, item.truth.scene, covered)
            if not named.any():
                continue
            nouns = {*tokenizer.convert_tokens_to_ids(list(class_words(question.category)))} - {tokenizer.unk_token_id}
            column = next((i for i in range(start, end + 1) if int(batch["input_ids"][row, i]) in nouns), None)
            if column is not None:
                words.append((row, column))
                patches.append(named)
    found = torch.tensor(np.array(patches), dtype=torch.bool).reshape(len(words), grid[0] * grid[1])
    return {"words": torch.tensor(words, dtype=torch.long).reshape(-1, 2), "patches": found}


def loss(passed: Any, words: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """Mean of -log(attention of a word on the patches of its objects); 0 without words."""
    maps = passed.attention_maps(*words.unbind(-1))[:, -patches.shape[-1] :]  # drops tokens of objects, a class token
    if not len(maps):
        return maps.sum()
    return -(maps * patches).sum(-1).clamp(min=1e-6).log().mean()

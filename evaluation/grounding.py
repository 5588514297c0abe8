"""Pointing accuracy: does the cross-attention of an object's word peak inside the object? (arxiv.org/abs/1608.00507)

    yes questions → boxes of the scene → patch with the highest attention → inside a box or not

Two baselines see no image: the central patch and a random patch.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..data.grounding import find_word
from ..data.questions import enumerate_questions
from ..data.scene import CLASSES, scene_of
from ..data.truth import Box, GroundTruth
from ..pipeline_traffic_vlm import TrafficVLMPipeline
from .metrics import Metric, mean
from .predict import with_questions


POINTING: dict[str, Metric] = {
    "pointing accuracy": lambda rows: mean(rows["highest"]),
    "central patch": lambda rows: mean(rows["center"]),
    "random patch": lambda rows: mean(rows["random"]),
    "questions": len,
}


def score_pointing(model: Any, processor: Any, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Table with a row for each question of `grounded_questions` that has a word for the objects in the boxes.

    Returns:
        columns "source", "category" and those of `score_map`. The columns of POINTING are its metrics.
    """
    pipe, scores = TrafficVLMPipeline(model=model, processor=processor, device=model.device), []
    for row in with_questions(rows):
        asked = list(grounded_questions(row))
        encoded = pipe.encode(row["image"]) if asked else None
        for question, category, boxes in asked:
            weights = word_map(pipe, encoded, question, category)
            if weights is not None:
                scores.append({"source": row["source"], "category": category, **score_map(weights, boxes)})
    return pd.DataFrame(scores, columns=["source", "category", "highest", "center", "random"])


def grounded_questions(row: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Box]]]:
    """Questions of a row that its scene answers with yes because of objects in boxes; none without a scene.

    Yields:
        question, category, and the boxes (left, top, right, bottom in 0..1).
    """
    scene = scene_of(row)
    if scene is None:
        return
    true = enumerate_questions(GroundTruth(scene))
    boxes = {one.question_id: one.boxes for one in true if one.answer == "yes" and one.boxes}
    for question, category, question_id in zip(row["questions"], row["categories"], row["question_ids"]):
        if question_id in boxes and category in CLASSES:
            size = (scene.width, scene.height) * 2
            yield question, category, [tuple(np.divide(box, size).tolist()) for box in boxes[question_id]]


@torch.no_grad()
def word_map(pipe: TrafficVLMPipeline, encoded: Any, question: str, category: str) -> torch.Tensor | None:
    """Attention map [rows,columns] of the word that names the category in a question, on the CPU.

    It is the mean over layers and heads. None without such a word ("Is it raining?").

    Args:
        encoded: one encoded image.
    """
    ids = pipe.read_question(question).input_ids
    position = find_word(pipe.processor, ids, category)
    if position is None:
        return None
    maps = pipe.model.attention_maps(torch.tensor([ids], device=pipe.device), encoded_images=encoded)
    return maps[0, position].cpu()


def score_map(weights: torch.Tensor, boxes: Iterable[Box]) -> dict[str, float]:
    """How an attention map [rows,columns] points at boxes.

    Returns:
        "highest": 1 if the patch with the highest attention is in a box, else 0, and the mean over equally high ones;
        "center": the same for the central patch, the mean of four on an even grid; "random": the fraction of patches
        that are in a box.
    """
    rows, columns = weights.shape
    inside = patches_in_boxes(boxes, (rows, columns)).float()
    center = inside[(rows - 1) // 2 : rows // 2 + 1, (columns - 1) // 2 : columns // 2 + 1]
    scores = {"highest": inside[weights == weights.max()], "center": center, "random": inside}
    return {name: patches.mean().item() for name, patches in scores.items()}


def patches_in_boxes(boxes: Iterable[Box], grid: tuple[int, int]) -> torch.Tensor:
    """Patches [rows,columns] whose center is in a box; along a side shorter than a patch, those that it overlaps."""
    patches = torch.zeros(grid, dtype=torch.bool)
    for left, top, right, bottom in boxes:
        patches |= _inside(top, bottom, grid[0])[:, None] & _inside(left, right, grid[1])
    return patches


def _inside(low: float, high: float, count: int) -> torch.Tensor:
    low, high, start = low * count, high * count, torch.arange(count)
    if high - low < 1:
        return (start < high) & (start + 1 > low)
    return (start + 0.5 >= low) & (start + 0.5 <= high)

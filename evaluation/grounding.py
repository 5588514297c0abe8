"""Pointing accuracy: does the cross-attention of an object's word peak inside the object? (arxiv.org/abs/1608.00507)

    yes questions → boxes of the scene → patch with the highest attention → inside a box or not

Two baselines see no image: the central patch and a random patch.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..data.questions import enumerate_questions
from ..data.scene import CLASSES, class_words, scene_of
from ..data.truth import Box, GroundTruth
from ..pipeline_traffic_vlm import TrafficVLMPipeline
from .metrics import Metric, by_group, mean
from .predict import Row, with_questions


POINTING: dict[str, Metric] = {
    "pointing accuracy": lambda rows: mean(rows["highest"]),
    "central patch": lambda rows: mean(rows["center"]),
    "random patch": lambda rows: mean(rows["random"]),
    "questions": len,
}


@torch.no_grad()
def pointing_accuracy(model: Any, processor: Any, rows: Iterable[Row]) -> pd.DataFrame:
    """Table with a row for each source and the columns of POINTING.

    The attention map of a word is the mean over layers and heads. Questions without a word for the objects in the
    boxes are left out.
    """
    pipe, scores = TrafficVLMPipeline(model=model, processor=processor, device=model.device), []
    for row in with_questions(rows):
        asked = list(grounded_questions(row))
        encoded = pipe.encode(row["image"]) if asked else None
        for question, category, boxes in asked:
            ids = pipe.read_question(question).input_ids
            position = find_word(processor, ids, category)
            if position is not None:
                maps = model.attention_maps(torch.tensor([ids], device=model.device), encoded_images=encoded)
                scores.append({"source": row["source"], **score_map(maps[0, position].cpu(), boxes)})
    return by_group(pd.DataFrame(scores, columns=["source", "highest", "center", "random"]), POINTING, "source")


def grounded_questions(row: Row) -> Iterator[tuple[str, str, list[Box]]]:
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


def score_map(weights: torch.Tensor, boxes: Iterable[Box]) -> dict[str, float]:
    """Scores in 0..1 of an attention map [rows,columns]: the fraction of some patches that are in one of the boxes.

    Returns:
        "highest": of the patch with the highest attention (of all, if several are equally high); "center": of the
        central patch; "random": of all patches.
    """
    rows, columns = weights.shape
    inside = patches_in_boxes(boxes, (rows, columns)).float()
    scores = {"highest": inside[weights == weights.max()], "center": inside[rows // 2, columns // 2], "random": inside}
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


def find_word(processor: Any, input_ids: Sequence[int], category: str) -> int | None:
    """The position of the first token in a question that names a category; None if there is none."""
    if category not in CLASSES:
        return None
    wanted = set(processor.tokenizer.convert_tokens_to_ids(list(class_words(category))))
    return next((position for position, token in enumerate(input_ids) if token in wanted), None)

"""Pointing accuracy: does the cross-attention of an object's word peak inside the object? (arxiv.org/abs/1608.00507)

    yes questions → boxes of the scene → patch with the highest attention → inside a box or not

Two baselines see no image: the central patch and a random patch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from ..data.ground_truth import Box, GroundTruth
from ..data.grounding import find_word
from ..data.questions import enumerate_questions
from ..data.scene import CLASSES, scene_of
from ..images_traffic_vlm import to_rgb
from .metrics import Metric, mean
from .predict import batches, encode


POINTING: dict[str, Metric] = {
    "pointing accuracy": lambda rows: mean(rows["highest"]),
    "central patch": lambda rows: mean(rows["center"]),
    "random patch": lambda rows: mean(rows["random"]),
    "questions": len,
}


@dataclass(frozen=True, slots=True)
class GroundedQuestion:
    """A question with the answer yes, and the boxes that make it a yes, in pixels of an image of `size`."""

    source: str
    category: str
    question: str
    boxes: tuple[Box, ...]
    size: tuple[int, int]  # width, height


def grounded_questions(row: Mapping[str, Any]) -> Iterator[GroundedQuestion]:
    """Questions of a row that the scene answers with yes because of objects in boxes; none without a scene."""
    scene = scene_of(row)
    if scene is None:
        return
    true = enumerate_questions(GroundTruth(scene))
    boxes = {one.question_id: one.boxes for one in true if one.answer == "yes" and one.boxes}
    for question, answer, category, question_id in zip(
        row["questions"], row["answers"], row["categories"], row["question_ids"]
    ):
        if answer == "yes" and question_id in boxes and category in CLASSES:
            yield GroundedQuestion(
                str(row["source"]), category, question, boxes[question_id], (scene.width, scene.height)
            )


def patches_in_boxes(boxes: Iterable[Box], size: tuple[int, int], grid: tuple[int, int]) -> torch.Tensor:
    """Patches [rows, columns] whose center is in a box; along a side shorter than a patch, those that it overlaps.

    Args:
        boxes: (left, top, right, bottom) in pixels.
        size: width and height of the image in pixels.
        grid: number of rows and columns of patches.
    """
    patches = torch.zeros(grid, dtype=torch.bool)
    for left, top, right, bottom in boxes:
        patches |= _inside(top, bottom, size[1], grid[0])[:, None] & _inside(left, right, size[0], grid[1])
    return patches


def _inside(low: float, high: float, length: int, count: int) -> torch.Tensor:
    low, high = low * count / length, high * count / length
    start = torch.arange(count)
    if high - low < 1:
        return (start < high) & (start + 1 > low)
    return (start + 0.5 >= low) & (start + 0.5 <= high)


def score_map(asked: GroundedQuestion, weights: torch.Tensor) -> dict[str, Any]:
    """How an attention map [rows, columns] points at the boxes of a question.

    Returns:
        "source", "category"; "highest": 1 if the patch with the highest attention is in a box, else 0, and the mean
        over equally high ones; "center": the same for the central patch, the mean of four on an even grid; "random":
        the fraction of patches that are in a box.
    """
    rows, columns = weights.shape
    inside = patches_in_boxes(asked.boxes, asked.size, (rows, columns)).float()
    center = inside[(rows - 1) // 2 : rows // 2 + 1, (columns - 1) // 2 : columns // 2 + 1]
    scores = {"highest": inside[weights == weights.max()], "center": center, "random": inside}
    return {
        "source": asked.source,
        "category": asked.category,
        **{name: patches.mean().item() for name, patches in scores.items()},
    }


@torch.no_grad()
def word_maps(
    model: Any, processor: Any, encoded: Any, questions: Sequence[Sequence[tuple[str, str]]]
) -> list[list[torch.Tensor | None]]:
    """Attention maps of the word that names the category of each question, averaged over layers and heads.

    Args:
        encoded: I encoded images.
        questions: for each image a list of (text, category).

    Returns:
        for each image and question a map [rows, columns] on the CPU; None without such a word ("Is it raining?").
    """
    text = [[question for question, _ in row] for row in questions]
    inputs = processor(text=text, packed=True, on_unknown="ignore", return_tensors="pt")
    on_device = {name: value.to(model.device) for name, value in inputs.items()}
    weights = model.attention_maps(**on_device, encoded_images=encoded)  # [R,L,rows,columns]
    maps: list[list[torch.Tensor | None]] = [[] for _ in questions]
    # An image with many questions has several rows.
    for row, image in enumerate(inputs.get("image_index", torch.arange(len(questions))).tolist()):
        for segment in range(1, int(inputs["segment_ids"][row].max()) + 1):
            columns = (inputs["segment_ids"][row] == segment).nonzero()[:, 0]
            _, category = questions[image][len(maps[image])]
            position = find_word(processor, inputs["input_ids"][row, columns].tolist(), category)
            maps[image].append(None if position is None else weights[row, columns[position]].cpu())
    return maps


def score_pointing(
    model: Any, processor: Any, rows: Iterable[Mapping[str, Any]], batch_size: int = 16
) -> pd.DataFrame:
    """Table of `score_map`: a row for each question of `rows` that has boxes and a word for the objects in them.

    The columns of POINTING are its metrics.
    """
    scores: list[dict[str, Any]] = []
    for batch in batches(rows, batch_size):
        asked = [(row, questions) for row in batch if (questions := list(grounded_questions(row)))]
        if not asked:
            continue
        encoded = encode(model, processor, [to_rgb(row["image"]) for row, _ in asked])
        texts = [[(one.question, one.category) for one in questions] for _, questions in asked]
        for (_, questions), maps in zip(asked, word_maps(model, processor, encoded, texts)):
            scores += [score_map(one, weights) for one, weights in zip(questions, maps) if weights is not None]
    return pd.DataFrame(scores, columns=["source", "category", "highest", "center", "random"])

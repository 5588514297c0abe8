"""The pointing game: does the word for an object look at that object? (https://arxiv.org/abs/1608.00507)

    questions whose answer is a yes → boxes from the scene → strongest cell of the asked word → inside a box or not

Beside it stand two that do not look: the central cell, which many objects cover, and a cell taken at random.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from ..data.grounding import find_word
from ..data.questions import enumerate_questions
from ..data.scene import CLASSES, Scene
from ..data.truths import Box
from ..images_traffic_vlm import to_rgb
from .predict import batches, encode, pack


@dataclass(frozen=True, slots=True)
class Target:
    """A question whose answer is a yes because of objects in boxes, in pixels of an image of `size`."""

    source: str
    label: str
    question: str
    boxes: tuple[Box, ...]
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pointed:
    """Whether a map points at the object: 1 or 0, or a part of 1 where several cells are equally strong.

    Attributes:
        source, label: what was asked about.
        hit: of the strongest cell.
        centre: of the central cell, the mean of four on an even grid.
        random: of a cell taken at random, the share of cells that would be a hit.
    """

    source: str
    label: str
    hit: float
    centre: float
    random: float


def find_targets(row: Mapping[str, Any]) -> Iterator[Target]:
    """The questions of a row that point at objects. Facts that the scene does not confirm are left out."""
    if not row.get("scene"):
        return
    scene = Scene.from_json(row["scene"])
    boxes = {truth.fact: truth.boxes for truth in enumerate_questions(scene) if truth.answer == "yes" and truth.boxes}
    asked = zip(row["questions"], row["answers"], row["labels"], row["facts"])
    for question, answer, label, fact in asked:
        if answer == "yes" and fact in boxes and label in CLASSES:
            yield Target(str(row["source"]), label, question, boxes[fact], (scene.width, scene.height))


def hit_cells(boxes: Iterable[Box], size: tuple[int, int], grid: tuple[int, int]) -> torch.Tensor:
    """The cells [rows, columns] that count as being in one of the boxes.

    Those whose centre is inside. Where a box is narrower (or lower) than a cell, those that it overlaps.
    """
    cells = torch.zeros(grid, dtype=torch.bool)
    for left, top, right, bottom in boxes:
        down = _inside(top, bottom, size[1], grid[0])
        across = _inside(left, right, size[0], grid[1])
        cells |= down[:, None] & across
    return cells


def _inside(low: float, high: float, length: int, count: int) -> torch.Tensor:
    """Which of `count` cells along a side of `length` pixels are in [low, high]."""
    low, high = low * count / length, high * count / length
    start = torch.arange(count)
    if high - low < 1:
        return (start < high) & (start + 1 > low)
    return (start + 0.5 >= low) & (start + 0.5 <= high)


def judge(target: Target, weights: torch.Tensor) -> Pointed:
    """Score an attention map [rows, columns]."""
    rows, columns = weights.shape
    cells = hit_cells(target.boxes, target.size, (rows, columns)).float()
    centre = cells[(rows - 1) // 2 : rows // 2 + 1, (columns - 1) // 2 : columns // 2 + 1]
    strongest = cells[weights == weights.max()]
    return Pointed(target.source, target.label, strongest.mean().item(), centre.mean().item(), cells.mean().item())


@torch.no_grad()
def word_maps(
    model: Any,
    processor: Any,
    encoded: Any,
    images: Sequence[int],
    questions: Sequence[str],
    labels: Sequence[str],
    or_last: bool = False,
) -> list[torch.Tensor | None]:
    """Where the asked word of each question looks, all layers and heads together.

    Args:
        encoded: encoded images.
        images: for each question the number of its image there.
        questions, labels: their texts, and the class that each asks about.
        or_last: give the map of the last token, where the answer is decided, for a question without such a word.

    Returns:
        maps [rows, columns] on the CPU; None for a question that does not name its class ("Is the speed limit 50?").
    """
    maps: list[torch.Tensor | None] = [None] * len(questions)
    packs = pack(images)
    if not packs:
        return maps
    text = [[questions[number] for number in numbers] for _, numbers in packs]
    inputs = processor(text=text, packed=True, on_unknown="ignore", return_tensors="pt")
    image_index = torch.tensor([image for image, _ in packs], device=model.device)
    weights = model.attention_maps(
        **{name: value.to(model.device) for name, value in inputs.items()},
        encoded_images=encoded,
        image_index=image_index,
    )
    for row, (_, numbers) in enumerate(packs):
        segments, ids = inputs["segment_ids"][row], inputs["input_ids"][row]
        for segment, number in enumerate(numbers, start=1):
            columns = (segments == segment).nonzero()[:, 0]
            place = find_word(processor, ids[columns].tolist(), labels[number])
            if place is None and or_last:
                place = len(columns) - 1
            if place is not None:
                maps[number] = weights[row, columns[place]].cpu()
    return maps


def point(
    model: Any, processor: Any, rows: Iterable[Mapping[str, Any]], batch_size: int = 16, progress: bool = True
) -> list[Pointed]:
    """Play the game with all questions of the rows that have an object to point at and a word for it."""
    results: list[Pointed] = []
    for batch in tqdm(batches(rows, batch_size), desc="pointing", unit="batch", disable=not progress):
        found = [(row, target) for row in batch for target in find_targets(row)]
        if not found:
            continue
        asked_about = list({id(row): row for row, _ in found}.values())
        encoded, index = encode(model, processor, [to_rgb(row["image"]) for row in asked_about])
        numbers = {id(row): number for row, number in zip(asked_about, index)}
        targets = [target for _, target in found]
        maps = word_maps(
            model,
            processor,
            encoded,
            [numbers[id(row)] for row, _ in found],
            [target.question for target in targets],
            [target.label for target in targets],
        )
        results += [judge(target, weights) for target, weights in zip(targets, maps) if weights is not None]
    return results

"""The collator of training: packed batches with what each cell shows and where each asked word should look.

a row for each image, of 20 to 230 tokens → rows of one width, several for an image, with hardly any padding
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..data.collator import Prepared, TrafficCollator, augment
from ..data.phrases import phrasings
from ..data.questions import Question, ask
from ..data.scene import Scene
from ..data.targets import TARGETS, cell_targets, find_word, word_cells
from ..data.truths import View
from ..images_traffic_vlm import to_rgb
from ..processing_traffic_vlm import IGNORED_LABEL


@dataclass
class SupervisedCollator(TrafficCollator):
    """A `TrafficCollator` whose batches also hold, for a vision tower of `grid` rows and columns,

    - `cell_targets` int8 [I,P,T]: 1, 0, or -1 for unknown, of each of TARGETS in each cell;
    - `attention_targets` bool [R,L,P]: for the words that name an object that is there, its cells; else all False;
    - `value_targets` [R,L]: at the end of a question that compares ("Is the light red?") the word for what is there
      ("green"); else 0;
    - `wording_pairs` [R,L]: at the ends of two wordings of a yes/no question their number, from 1 on; else 0.

    Of the questions about an image, up to `rewordings` are others in other words. They stand in as many of the R rows
    as they need, see `fold`.

    Raises:
        ValueError: not fewer `rewordings` than questions.
    """

    grid: tuple[int, int] = (14, 14)
    rewordings: int = 0

    def __post_init__(self) -> None:
        if self.rewordings and self.rewordings >= self.questions_per_image:
            raise ValueError(
                f"rewordings must be fewer than questions_per_image={self.questions_per_image}, got {self.rewordings}"
            )

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """With `questions_per_image=0` pixels, cell targets, and as input_ids the one token that starts a text."""
        if self.questions_per_image:
            return super().__call__(rows)
        rng = self.generator()
        pairs = [augment(to_rgb(row["image"]), Scene.from_json(row["scene"]), rng) for row in rows]
        processor: Any = self.processor
        pixels = processor(images=[image for image, _ in pairs], return_tensors="pt")
        cells = np.stack([cell_targets(scene, self.grid) for _, scene in pairs])
        start = torch.full((len(rows), 1), processor.tokenizer.bos_token_id)
        return {"pixel_values": pixels["pixel_values"], "input_ids": start, "cell_targets": torch.from_numpy(cells)}

    def finish(self, batch: dict[str, torch.Tensor], prepared: list[Prepared]) -> dict[str, torch.Tensor]:
        cells = np.full((len(prepared), self.grid[0] * self.grid[1], len(TARGETS)), -1, np.int8)
        look_at = torch.zeros(*batch["input_ids"].shape, cells.shape[1], dtype=torch.bool)
        values, pairs = torch.zeros_like(batch["input_ids"]), torch.zeros_like(batch["input_ids"])
        for row, item in enumerate(prepared):
            if item.scene is None:
                continue
            cells[row] = cell_targets(item.scene, self.grid)
            for number, label, filled in word_cells(item.questions, item.scene, self.grid):
                end = int(batch["question_ends"][row, number])
                inside = (batch["segment_ids"][row, : end + 1] == batch["segment_ids"][row, end]).nonzero().flatten()
                place = find_word(self.processor, batch["input_ids"][row, inside].tolist(), label)
                if place is not None:
                    look_at[row, inside[place]] = torch.from_numpy(filled)
            view, tokenizer = View(item.scene), cast(Any, self.processor).tokenizer
            ends: dict[str, int] = {}
            for number, question in enumerate(item.questions):
                if question.answer not in ("yes", "no"):
                    continue
                end = int(batch["question_ends"][row, number])
                value = view.compared(tuple(question.fact.split("/")))
                if value is not None:
                    values[row, end] = tokenizer.convert_tokens_to_ids(value)
                if question.fact and question.fact in ends:
                    pairs[row, [ends[question.fact], end]] = pairs.max() + 1
                ends[question.fact] = end
        batch |= {"attention_targets": look_at, "value_targets": values, "wording_pairs": pairs}
        return fold(batch) | {"cell_targets": torch.from_numpy(cells)}

    def ask(self, scene: Scene, rng: random.Random) -> list[Question]:
        """As without `rewordings`, but some in two wordings; both count for the balance of yes and no."""
        balancer = self.balancers[scene.source]
        asked = ask(scene, rng, self.questions_per_image - self.rewordings, balancer, self.kinds)
        again: list[Question] = []
        for question in asked:
            others = [text for text in phrasings(question.fact) if text != question.text]
            if len(again) == self.rewordings or not others or question.answer not in ("yes", "no"):
                continue
            if balancer.accepts(tuple(question.fact.split("/")), question.answer, rng):
                again.append(replace(question, text=rng.choice(others)))
        return asked + again


def fold(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A packed batch, a row for each image, as rows of one width that hardly need padding; the questions stay alike.

    Of some images much can be asked and of others little: three in ten tokens of such rows are padding, which a model
    computes, too. Here rows end between two questions, at the width that takes the fewest tokens in all.

    Args:
        batch: pixel_values [I,...], segment_ids [I,L], and anything else of one number or more for each of these
            tokens: [I,L] or [I,L,...].

    Returns:
        pixel_values as they are, all others with R rows, and image_index [R], the image that each asks about.
        question_ends, which scoring reads and training does not, is left out.
    """
    questions = [  # of each image: the columns of each question
        [(row == number).nonzero()[:, 0] for number in range(1, int(row.max()) + 1)] for row in batch["segment_ids"]
    ]
    sizes = [list(map(len, columns)) for columns in questions]
    widths = range(max(map(max, sizes)), max(map(sum, sizes)) + 1, 4)
    layouts = ([_first_fit(lengths, width) for lengths in sizes] for width in widths)
    layout = min(zip(widths, layouts), key=lambda pair: pair[0] * sum(map(len, pair[1])))[1]
    rows = [
        (image, torch.cat([questions[image][number] for number in row]))
        for image, rows_of_image in enumerate(layout)
        for row in rows_of_image
    ]
    folded = {
        name: pad_sequence(
            [values[image][columns] for image, columns in rows],
            batch_first=True,
            padding_value=IGNORED_LABEL if name == "labels" else 0,
        )
        for name, values in batch.items()
        if name not in ("pixel_values", "question_ends")
    }
    images = torch.tensor([image for image, _ in rows])
    return folded | {"pixel_values": batch["pixel_values"], "image_index": images}


def _first_fit(lengths: list[int], width: int) -> list[list[int]]:
    """Numbers of questions in rows of at most `width` tokens: the longest first, each where there is room for it."""
    rows: list[list[int]] = []
    room: list[int] = []
    for question in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[question]
        row = next((row for row, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(question)
        room[row] -= length
    return rows

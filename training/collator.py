"""The collator of training: packed batches with targets for the losses beside that of the answers.

a row for each image, of 20 to 230 tokens → rows of one width, several for an image, with hardly any padding
"""

import random
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..data.collator import Prepared, TrafficCollator
from ..data.grounding import find_word, word_patches
from ..data.patches import GRID
from ..data.phrases import phrasings
from ..data.presence import CATEGORIES, REGIONS, image_labels, targets
from ..data.questions import Question, ask
from ..data.scene import Scene
from ..data.truths import View
from ..processing_traffic_vlm import IGNORED_LABEL


@dataclass
class SupervisedCollator(TrafficCollator):
    """A `TrafficCollator` whose batches also hold, for a vision tower of `grid` rows and columns of patches:

    - `region_targets` int8 [I,C,4] and `patch_targets` int8 [I,C,rows,columns]: presence of each category of
      `data/presence.py`: 1, 0, or -1 for unknown;
    - `grounding_targets` bool [R,L,P]: for words that name an object in the image, its patches; else all False;
    - `intermediate_targets` [R,L]: at the end of a question that compares ("Is the light red?") the word for what is
      there ("green"); else 0;
    - `paraphrase_pairs` [R,L]: at the ends of two paraphrases of a yes/no question the number of their pair, from 1;
      else 0.

    Of the questions about an image, up to `paraphrases` repeat another one in other words. The questions of an image
    fill as many of the R rows as they need, see `fold`.

    Raises:
        ValueError: `paraphrases` is not smaller than `questions_per_image`.
    """

    grid: tuple[int, int] = (GRID, GRID)
    paraphrases: int = 0

    def __post_init__(self) -> None:
        if self.paraphrases and self.paraphrases >= self.questions_per_image:
            raise ValueError(
                f"paraphrases must be fewer than questions_per_image={self.questions_per_image}, got "
                f"{self.paraphrases}"
            )

    def finish(self, batch: dict[str, torch.Tensor], prepared: list[Prepared]) -> dict[str, torch.Tensor]:
        region = np.full((len(prepared), len(CATEGORIES), len(REGIONS)), -1, np.int8)
        patch = np.full((len(prepared), len(CATEGORIES), *self.grid), -1, np.int8)
        shape = batch["input_ids"].shape
        grounding = torch.zeros(*shape, self.grid[0] * self.grid[1], dtype=torch.bool)
        words, pairs = torch.zeros_like(batch["input_ids"]), torch.zeros_like(batch["input_ids"])
        for row, item in enumerate(prepared):
            if item.scene is None:
                continue
            region[row], patch[row] = targets(image_labels(item.scene), grid=self.grid)
            ends = batch["question_ends"][row].tolist()
            for index, category, patches in word_patches(item.questions, item.scene, self.grid):
                segments = batch["segment_ids"][row, : ends[index] + 1]
                inside = (segments == segments[-1]).nonzero().flatten()
                position = find_word(self.processor, batch["input_ids"][row, inside].tolist(), category)
                if position is not None:
                    grounding[row, inside[position]] = torch.from_numpy(patches)
            self._add_words_and_pairs(row, item, ends, words, pairs)
        batch |= {"grounding_targets": grounding, "intermediate_targets": words, "paraphrase_pairs": pairs}
        return fold(batch) | {"region_targets": torch.from_numpy(region), "patch_targets": torch.from_numpy(patch)}

    def _add_words_and_pairs(
        self, row: int, item: Prepared, ends: list[int], words: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        """Fill one row of `intermediate_targets` and of `paraphrase_pairs`."""
        view, tokenizer = View(cast(Scene, item.scene)), cast(Any, self.processor).tokenizer
        end_of: dict[str, int] = {}  # of the last question about each fact
        for question, end in zip(item.questions, ends):
            if question.answer not in ("yes", "no"):
                continue
            word = view.compared(tuple(question.fact.split("/")))
            if word is not None:
                words[row, end] = tokenizer.convert_tokens_to_ids(word)
            if question.fact and question.fact in end_of:
                pairs[row, [end_of[question.fact], end]] = pairs.max() + 1
            end_of[question.fact] = end

    def ask(self, scene: Scene, rng: random.Random) -> list[Question]:
        """Questions of which some are paraphrases; all count for the balance of yes and no."""
        balancer = self.balancers[scene.source]
        asked = ask(scene, rng, self.questions_per_image - self.paraphrases, balancer, self.kinds)
        repeated: list[Question] = []
        for question in asked:
            others = [text for text in phrasings(question.fact) if text != question.text]
            if len(repeated) == self.paraphrases or not others or question.answer not in ("yes", "no"):
                continue
            if balancer.accepts(tuple(question.fact.split("/")), question.answer, rng):
                repeated.append(replace(question, text=rng.choice(others)))
        return asked + repeated


def fold(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fold a packed batch with one row per image into rows of one width with hardly any padding.

    Some images have many questions, others few: three in ten tokens of one row per image are padding, which a model
    computes as well. Folded rows end between two questions, at the width that needs the fewest tokens in total.

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

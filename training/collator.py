"""The collator of training: packed batches with targets for the losses beside that of the answers.

a row for each image, of 20 to 230 tokens → rows of one width, several for an image, with hardly any padding
"""

import random
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from ..data.collator import Prepared, TrafficCollator
from ..data.grounding import find_word, word_patches
from ..data.patches import GRID
from ..data.phrases import phrasings
from ..data.presence import CATEGORIES, REGIONS, image_labels, targets
from ..data.questions import Question, ask
from ..data.scene import Scene
from ..data.truths import View


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

    Of the questions about an image, up to `paraphrases` repeat another one in other words. Rows are packed with
    hardly any padding (`row_tokens="fit"`): three in ten tokens of one row per image would be padding.

    Raises:
        ValueError: `paraphrases` is not smaller than `questions_per_image`.
    """

    grid: tuple[int, int] = (GRID, GRID)
    paraphrases: int = 0
    row_tokens: int | str = "fit"

    def __post_init__(self) -> None:
        if self.paraphrases and self.paraphrases >= self.questions_per_image:
            raise ValueError(
                f"paraphrases must be fewer than questions_per_image={self.questions_per_image}, got "
                f"{self.paraphrases}"
            )

    def finish(self, batch: dict[str, torch.Tensor], prepared: list[Prepared]) -> dict[str, torch.Tensor]:
        region = np.full((len(prepared), len(CATEGORIES), len(REGIONS)), -1, np.int8)
        patch = np.full((len(prepared), len(CATEGORIES), *self.grid), -1, np.int8)
        grounding = torch.zeros(*batch["input_ids"].shape, self.grid[0] * self.grid[1], dtype=torch.bool)
        words, pairs = torch.zeros_like(batch["input_ids"]), torch.zeros_like(batch["input_ids"])
        images, questions, ends = (batch[name] for name in ("image_index", "question_index", "question_ends"))
        place = {  # (image, question) → (row, column of the prompt's last token)
            (int(images[row]), int(questions[row, q])): (row, int(ends[row, q]))
            for row, q in (questions >= 0).nonzero().tolist()
        }
        for image, item in enumerate(prepared):
            if item.scene is None:
                continue
            region[image], patch[image] = targets(image_labels(item.scene), grid=self.grid)
            for index, category, patches in word_patches(item.questions, item.scene, self.grid):
                row, end = place[image, index]
                segments = batch["segment_ids"][row, : end + 1]
                inside = (segments == segments[-1]).nonzero().flatten()
                position = find_word(self.processor, batch["input_ids"][row, inside].tolist(), category)
                if position is not None:
                    grounding[row, inside[position]] = torch.from_numpy(patches)
            self._add_words_and_pairs(item, [place[image, i] for i in range(len(item.questions))], words, pairs)
        extra = {"grounding_targets": grounding, "intermediate_targets": words, "paraphrase_pairs": pairs}
        extra |= {"region_targets": torch.from_numpy(region), "patch_targets": torch.from_numpy(patch)}
        unused = ("question_ends", "question_index")  # for scoring
        return {name: value for name, value in batch.items() if name not in unused} | extra

    def _add_words_and_pairs(
        self, item: Prepared, ends: list[tuple[int, int]], words: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        """Fill `intermediate_targets` and `paraphrase_pairs` at the ends (row, column) of an image's questions."""
        view, tokenizer = View(cast(Scene, item.scene)), cast(Any, self.processor).tokenizer
        end_of: dict[str, tuple[int, int]] = {}  # of the last question about each fact
        for question, end in zip(item.questions, ends):
            if question.answer not in ("yes", "no"):
                continue
            word = view.compared(tuple(question.fact.split("/")))
            if word is not None:
                words[end] = tokenizer.convert_tokens_to_ids(word)
            if question.fact and question.fact in end_of:
                pairs[end_of[question.fact]] = pairs[end] = pairs.max() + 1
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

"""The collator for training: packed batches with targets for the auxiliary losses.

images with 20 to 230 tokens of questions each → packed rows of equal length, with hardly any padding
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..data.agreement import exclusions, implications
from ..data.collator import Prepared, TrafficCollator
from ..data.grammar import paraphrases_of
from ..data.grounding import find_word, object_patches, word_patches
from ..data.presence import CATEGORIES, REGIONS, patch_targets, region_targets
from ..data.questions import Question, ask
from ..data.targets import Targets
from ..data.truth import GroundTruth


Span = tuple[int, int, int]  # row, first and last column of a question


@dataclass
class SupervisedCollator(TrafficCollator):
    """A `TrafficCollator` whose batches also hold `targets`, for a vision tower of `grid` rows and columns of patches.

    They are of the class `Targets`; the index of a source is its position in `sources`, 0 for other sources.

    Up to `paraphrases` of the questions about an image are paraphrases of another one. Rows are packed with hardly any
    padding (`row_tokens="fit"`): with one row per image, 30 % of the tokens would be padding.

    Raises:
        ValueError: `paraphrases` are not fewer than `questions_per_image`.
    """

    grid: tuple[int, int] = (16, 16)
    paraphrases: int = 0
    sources: Sequence[str] = ()
    row_tokens: int | str = "fit"

    def __post_init__(self) -> None:
        if self.paraphrases and self.paraphrases >= self.questions_per_image:
            raise ValueError(
                f"paraphrases must be fewer than questions_per_image={self.questions_per_image}, "
                f"got {self.paraphrases}"
            )

    def finish(self, batch: dict[str, Any], prepared: list[Prepared]) -> dict[str, Any]:
        spans = iter([tuple(span) for span in batch.pop("question_spans").tolist()])
        del batch["question_ends"]  # the model needs them only for scoring
        shape = (len(prepared), len(CATEGORIES))
        region, patch = np.full((*shape, len(REGIONS)), -1, np.int8), np.full((*shape, *self.grid), -1, np.int8)
        lists: defaultdict[str, list[Any]] = defaultdict(list)  # the targets that are lists, by name
        for image, item in enumerate(prepared):
            asked = list(zip(item.questions, spans))
            if item.truth is not None:
                covered = object_patches(item.truth.scene, self.grid)
                region[image], patch[image] = region_targets(item.truth), patch_targets(item.truth.scene, covered)
                self._find_words(asked, item.truth, covered, batch, lists)
                self._find_answers(asked, item.truth, lists)
        index_of = {source: index for index, source in enumerate(self.sources)}

        def tensor(name: str, width: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.tensor(np.array(lists[name]), dtype=dtype).reshape(-1, width)

        targets = Targets(
            region=torch.from_numpy(region),
            patch=torch.from_numpy(patch),
            source=torch.tensor([index_of.get(item.source, 0) for item in prepared]),
            grounding=tensor("grounding", math.prod(self.grid), torch.bool),
            grounding_words=tensor("grounding_words", 2),
            intermediate=tensor("intermediate", 3),
            paraphrases=tensor("paraphrases", 4),
            agreement=tensor("agreement", 5),
        )
        return batch | {"targets": targets}

    def _find_words(
        self,
        asked: list[tuple[Question, Span]],
        truth: GroundTruth,
        covered: np.ndarray,
        batch: dict[str, Any],
        lists: dict[str, list[Any]],
    ) -> None:
        """Append the words that name objects of the image, and the patches of these objects."""
        for index, category, patches in word_patches([question for question, _ in asked], truth.scene, covered):
            row, start, end = asked[index][1]
            position = find_word(self.processor, batch["input_ids"][row, start : end + 1].tolist(), category)
            if position is not None:
                lists["grounding"].append(patches)
                lists["grounding_words"].append((row, start + position))

    def _find_answers(
        self, asked: list[tuple[Question, Span]], truth: GroundTruth, lists: dict[str, list[Any]]
    ) -> None:
        """Append what is compared at the places (row, column) where the answers about an image are read."""
        tokenizer = self.processor.tokenizer
        places = [(row, end) for _, (row, _, end) in asked]
        place_of: dict[str, tuple[int, int]] = {}  # of the last question with each question id
        for (question, _), place in zip(asked, places):
            if question.answer not in ("yes", "no"):
                continue
            word = truth.compared(question.key)
            token = None if word is None else tokenizer.convert_tokens_to_ids(word)
            if token not in (None, tokenizer.unk_token_id):  # values of several words, such as "city street"
                lists["intermediate"].append((*place, token))
            if question.question_id and question.question_id in place_of:
                lists["paraphrases"].append((*place_of[question.question_id], *place))
            place_of[question.question_id] = place
        ids = [question.question_id for question, _ in asked]
        lists["agreement"] += [(*places[i], *places[j], 0) for i, j in implications(ids)]
        lists["agreement"] += [(*places[i], *places[j], 1) for i, j in exclusions(ids)]

    def ask(self, truth: GroundTruth, rng: random.Random) -> list[Question]:
        """Questions, some of which are paraphrases of others. All count for the balance of yes and no."""
        balancer = self.balancers[truth.scene.source]
        count = self.questions_per_image - self.paraphrases
        asked = ask(truth, rng, count, balancer, self.question_types, self.knows_none)
        repeated: list[Question] = []
        for question in asked:
            others = [text for text in paraphrases_of(question.question_id) if text != question.text]
            if len(repeated) == self.paraphrases or not others or question.answer not in ("yes", "no"):
                continue
            if balancer.accepts(question.key, question.answer, rng):
                repeated.append(replace(question, text=rng.choice(others)))
        return asked + repeated

"""The collator for training: packed batches with targets for the auxiliary losses.

images with 20 to 230 tokens of questions each → packed rows of equal length, with hardly any padding
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from ..data.agreement import exclusions, implications
from ..data.collator import Prepared, TrafficCollator
from ..data.ground_truth import GroundTruth
from ..data.grounding import find_word, object_patches, word_patches
from ..data.presence import CATEGORIES, HEAD_QUESTIONS, KEYS, REGIONS, patch_targets, region_targets
from ..data.questions import Question, ask
from ..data.scene import SYNTHETIC
from ..data.targets import Targets
from ..data.templates import paraphrases_of, random_paraphrase
from ..processing_traffic_vlm import IGNORED_LABEL
from ..tokenization_traffic_vlm import ANSWER_TOKENS


# The targets that are lists, with the numbers of their columns; grounding has one for each patch.
TARGET_LISTS = {
    "grounding": 0,
    "grounding_words": 2,
    "intermediate": 3,
    "paraphrases": 4,
    "agreement": 5,
    "distillation": 5,
}


@dataclass
class SupervisedCollator(TrafficCollator):
    """A `TrafficCollator` whose batches also hold, for a vision tower of `grid` rows and columns of patches:

    - `targets`, of the class `Targets`; the index of a source is its position in `sources`, 0 for other sources;
    - `word_counts` [V,2,3], an array, which stays on the CPU: the number of labeled questions in which each word
      stands, about photographs or rendered scenes, with the answer yes, no or words.

    Up to `paraphrases` of the questions about an image are paraphrases of another one, and `unlabeled` are questions
    for the query head whose true answer is unknown; their labels are ignored. Rows are packed with hardly
    any padding (`row_tokens="fit"`): with one row per image, 30 % of the tokens would be padding.

    Raises:
        ValueError: `paraphrases` and `unlabeled` together are not fewer than `questions_per_image`.
    """

    grid: tuple[int, int] = (16, 16)
    paraphrases: int = 0
    unlabeled: int = 0
    sources: Sequence[str] = ()
    row_tokens: int | str = "fit"

    def __post_init__(self) -> None:
        extra = self.paraphrases + self.unlabeled
        if extra and extra >= self.questions_per_image:
            raise ValueError(
                f"paraphrases and unlabeled questions must be fewer than questions_per_image="
                f"{self.questions_per_image}, got {self.paraphrases} and {self.unlabeled}"
            )

    def finish(self, batch: dict[str, Any], prepared: list[Prepared]) -> dict[str, Any]:
        spans = iter(batch.pop("question_spans").tolist())
        lists: dict[str, list[Any]] = {name: [] for name in TARGET_LISTS}
        targets = self._unknown(prepared)
        counts = np.zeros((len(self.processor.tokenizer), 2, 3), np.int64)
        for image, item in enumerate(prepared):
            spans_of_item = list(islice(spans, len(item.questions)))
            if item.truth is not None:
                covered = object_patches(item.truth.scene, self.grid)
                targets.region[image] = torch.from_numpy(region_targets(item.truth))
                targets.patch[image] = torch.from_numpy(patch_targets(item.truth.scene, covered))
                self._add_words(item, spans_of_item, covered, batch, lists)
                self._add_answers(item, image, [(row, end) for row, _, end in spans_of_item], batch, lists)
            self._count_words(item, spans_of_item, batch, counts)
        for name, width in TARGET_LISTS.items():
            is_mask = name == "grounding"
            width, dtype = (math.prod(self.grid), torch.bool) if is_mask else (width, torch.long)
            setattr(targets, name, torch.tensor(np.array(lists[name]), dtype=dtype).reshape(-1, width))
        del batch["question_ends"]  # the model needs them only for scoring
        return batch | {"targets": targets, "word_counts": counts}

    def _count_words(self, item: Prepared, spans: list[list[int]], batch: dict[str, Any], counts: np.ndarray) -> None:
        """Count the words of the labeled questions about an image; a word that stands twice in one counts once."""
        yes_no = self.processor.tokenizer.convert_tokens_to_ids(list(ANSWER_TOKENS))
        for question, (row, start, end) in zip(item.questions, spans):
            if question.is_labeled:
                words = batch["input_ids"][row, start : end + 1].unique().numpy()
                answer = int(batch["labels"][row, end + 1])
                counts[words, int(item.source == SYNTHETIC), yes_no.index(answer) if answer in yes_no else 2] += 1

    def _unknown(self, prepared: list[Prepared]) -> Targets:
        """Targets of images of which nothing but the source is known."""
        index_of = {source: index for index, source in enumerate(self.sources)}
        size = (len(prepared), len(CATEGORIES))
        return Targets(
            region=torch.full((*size, len(REGIONS)), -1, dtype=torch.int8),
            patch=torch.full((*size, *self.grid), -1, dtype=torch.int8),
            source=torch.tensor([index_of.get(item.source, 0) for item in prepared]),
        )

    def _add_words(
        self,
        item: Prepared,
        spans: list[list[int]],
        covered: np.ndarray,
        batch: dict[str, Any],
        lists: dict[str, list],
    ) -> None:
        """Append the words that name objects of the image, and the patches of these objects."""
        assert item.truth is not None
        for index, category, patches in word_patches(item.questions, item.truth.scene, covered):
            row, start, end = spans[index]
            position = find_word(self.processor, batch["input_ids"][row, start : end + 1].tolist(), category)
            if position is not None:
                lists["grounding"].append(patches)
                lists["grounding_words"].append((row, start + position))

    def _add_answers(
        self, item: Prepared, image: int, places: list[tuple[int, int]], batch: dict[str, Any], lists: dict[str, list]
    ) -> None:
        """Append the targets at the places (row, column) where the answers about an image are read."""
        assert item.truth is not None
        tokenizer = self.processor.tokenizer
        place_of: dict[str, tuple[int, int]] = {}  # of the last question with each question id
        for question, (row, end) in zip(item.questions, places):
            if question.question_id in HEAD_QUESTIONS:
                lists["distillation"].append((row, end, image, *HEAD_QUESTIONS[question.question_id]))
            if not question.is_labeled:
                segments = batch["segment_ids"][row]
                batch["labels"][row, segments == segments[end]] = IGNORED_LABEL
            if question.answer not in ("yes", "no") or not question.is_labeled:
                continue
            word = item.truth.compared(question.key)
            token = None if word is None else tokenizer.convert_tokens_to_ids(word)
            if token not in (None, tokenizer.unk_token_id):  # values of several words, such as "city street"
                lists["intermediate"].append((row, end, token))
            if question.question_id and question.question_id in place_of:
                lists["paraphrases"].append((*place_of[question.question_id], row, end))
            place_of[question.question_id] = (row, end)
        ids = [question.question_id for question in item.questions]
        lists["agreement"] += [(*places[i], *places[j], 0) for i, j in implications(ids)]
        lists["agreement"] += [(*places[i], *places[j], 1) for i, j in exclusions(ids)]

    def ask(self, truth: GroundTruth, rng: random.Random) -> list[Question]:
        """Questions, some of which are paraphrases of others or unlabeled.

        All but the unlabeled ones count for the balance of yes and no.
        """
        balancer = self.balancers[truth.scene.source]
        count = self.questions_per_image - self.paraphrases - self.unlabeled
        asked = ask(truth, rng, count, balancer, self.question_types, self.knows_none)
        repeated: list[Question] = []
        for question in asked:
            others = [text for text in paraphrases_of(question.question_id) if text != question.text]
            if len(repeated) == self.paraphrases or not others or question.answer not in ("yes", "no"):
                continue
            if balancer.accepts(question.key, question.answer, rng):
                repeated.append(replace(question, text=rng.choice(others)))
        return asked + repeated + (self._unlabeled(truth, rng) if asked else [])

    def _unlabeled(self, truth: GroundTruth, rng: random.Random) -> list[Question]:
        """Random questions for the query head whose true answer is unknown."""
        found: list[Question] = []
        for key in rng.sample(list(KEYS), len(KEYS)):
            if len(found) == self.unlabeled:
                break
            if key[0] in self.question_types and truth.find(key) is None:
                question_id = "/".join(key)
                text = random_paraphrase(question_id, rng)
                found.append(Question(text, "no", key[0], key[1], question_id, is_labeled=False))
        return found

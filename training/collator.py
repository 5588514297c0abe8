"""The collator for training: packed batches with targets for the auxiliary losses.

images with 20 to 230 tokens of questions each → packed rows of equal length, with hardly any padding
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from ..data.agreement import exclusions, implications
from ..data.collator import Prepared, TrafficCollator
from ..data.ground_truth import GroundTruth
from ..data.grounding import find_word, word_patches
from ..data.patches import GRID
from ..data.presence import CATEGORIES, HEAD_QUESTIONS, REGIONS, targets
from ..data.questions import Question, ask
from ..data.scene import SYNTHETIC, Scene
from ..data.templates import paraphrases_of, random_paraphrase
from ..processing_traffic_vlm import IGNORED_LABEL
from .word_counts import word_counts


@dataclass
class SupervisedCollator(TrafficCollator):
    """A `TrafficCollator` whose batches also hold, for a vision tower of `grid` rows and columns of patches:

    - `region_targets` int8 [I,C,4] and `patch_targets` int8 [I,C,rows,columns]: presence of each category of
      `data/presence.py`: 1, 0, or -1 for unknown;
    - `grounding_targets` bool [R,L,P]: for words that name an object in the image, its patches; else all False;
    - `intermediate_targets` [R,L]: at the last token of a question about a value ("Is the light red?") the id of the
      word for the true value ("green"); else 0;
    - `agreement_pairs` [K,5]: row and column of the last tokens of two questions about an image whose answers must
      agree, and 1 if they exclude each other, 0 if the first implies the second;
    - `head_questions` [K,5]: row and column of the last token of each yes/no question that the query head answers,
      too, its image, and the category and region of the head's output;
    - `word_counts` [V,2,3], of the words of the questions (see `word_counts.py`);
    - `source_index` [I], the position of each image's source in `sources`; 0 for other sources;
    - `paraphrase_pairs` [R,L]: at the last tokens of two paraphrases of a yes/no question the id of their pair, from
      1; else 0.

    Up to `paraphrases` of the questions about an image are paraphrases of another one, and `unlabeled` are questions
    for the query head whose true answer is unknown; their labels are ignored. Rows are packed with hardly
    any padding (`row_tokens="fit"`): with one row per image, 30 % of the tokens would be padding.

    Raises:
        ValueError: `paraphrases` and `unlabeled` together are not fewer than `questions_per_image`.
    """

    grid: tuple[int, int] = (GRID, GRID)
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

    def finish(self, batch: dict[str, torch.Tensor], prepared: list[Prepared]) -> dict[str, torch.Tensor]:
        region = np.full((len(prepared), len(CATEGORIES), len(REGIONS)), -1, np.int8)
        patch = np.full((len(prepared), len(CATEGORIES), *self.grid), -1, np.int8)
        grounding = torch.zeros(*batch["input_ids"].shape, self.grid[0] * self.grid[1], dtype=torch.bool)
        words, pairs = torch.zeros_like(batch["input_ids"]), torch.zeros_like(batch["input_ids"])
        related: list[tuple[int, ...]] = []
        of_head: list[tuple[int, ...]] = []
        images, questions, ends = (batch[name] for name in ("image_index", "question_index", "question_ends"))
        position_of = {  # (image, question) → (row, column of the prompt's last token)
            (int(images[row]), int(questions[row, q])): (row, int(ends[row, q]))
            for row, q in (questions >= 0).nonzero().tolist()
        }
        for image, item in enumerate(prepared):
            if item.scene is None:
                continue
            region[image], patch[image] = targets(item.scene, self.grid)
            for index, category, patches in word_patches(item.questions, item.scene, self.grid):
                row, end = position_of[image, index]
                segments = batch["segment_ids"][row, : end + 1]
                inside = (segments == segments[-1]).nonzero().flatten()
                position = find_word(self.processor, batch["input_ids"][row, inside].tolist(), category)
                if position is not None:
                    grounding[row, inside[position]] = torch.from_numpy(patches)
            ends_of_item = [position_of[image, i] for i in range(len(item.questions))]
            self._add_words_and_pairs(item, ends_of_item, words, pairs)
            ids = [question.question_id for question in item.questions]
            of_head += [
                (*end, image, *HEAD_QUESTIONS[one]) for one, end in zip(ids, ends_of_item) if one in HEAD_QUESTIONS
            ]
            for question, (row, end) in zip(item.questions, ends_of_item):
                if not question.is_labeled:
                    batch["labels"][row, batch["segment_ids"][row] == batch["segment_ids"][row, end]] = IGNORED_LABEL
            related += [(*ends_of_item[i], *ends_of_item[j], 0) for i, j in implications(ids)]
            related += [(*ends_of_item[i], *ends_of_item[j], 1) for i, j in exclusions(ids)]
        is_rendered = torch.tensor([item.source == SYNTHETIC for item in prepared])
        index_of = {source: index for index, source in enumerate(self.sources)}
        extra = {
            "region_targets": torch.from_numpy(region),
            "patch_targets": torch.from_numpy(patch),
            "grounding_targets": grounding,
            "intermediate_targets": words,
            "paraphrase_pairs": pairs,
            "agreement_pairs": torch.tensor(related, dtype=torch.long).reshape(-1, 5),
            "head_questions": torch.tensor(of_head, dtype=torch.long).reshape(-1, 5),
            "word_counts": word_counts(batch, is_rendered, cast(Any, self.processor).tokenizer),
            "source_index": torch.tensor([index_of.get(item.source, 0) for item in prepared]),
        }
        unused = ("question_ends", "question_index")  # the model needs them only for scoring
        return {name: value for name, value in batch.items() if name not in unused} | extra

    def _add_words_and_pairs(
        self, item: Prepared, ends: list[tuple[int, int]], words: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        """Fill `intermediate_targets` and `paraphrase_pairs` at the ends (row, column) of an image's questions."""
        truth, tokenizer = GroundTruth(cast(Scene, item.scene)), cast(Any, self.processor).tokenizer
        end_of: dict[str, tuple[int, int]] = {}  # of the last question with each question id
        for question, end in zip(item.questions, ends):
            if question.answer not in ("yes", "no") or not question.is_labeled:
                continue
            word = truth.compared(tuple(question.question_id.split("/")))
            token = None if word is None else tokenizer.convert_tokens_to_ids(word)
            if token not in (None, tokenizer.unk_token_id):  # values of several words, such as "city street"
                words[end] = token
            if question.question_id and question.question_id in end_of:
                pairs[end_of[question.question_id]] = pairs[end] = pairs.max() + 1
            end_of[question.question_id] = end

    def ask(self, scene: Scene, rng: random.Random) -> list[Question]:
        """Questions, some of which are paraphrases of others or unlabeled.

        All but the unlabeled ones count for the balance of yes and no.
        """
        balancer = self.balancers[scene.source]
        count = self.questions_per_image - self.paraphrases - self.unlabeled
        asked = ask(scene, rng, count, balancer, self.question_types, self.knows_none)
        repeated: list[Question] = []
        for question in asked:
            others = [text for text in paraphrases_of(question.question_id) if text != question.text]
            if len(repeated) == self.paraphrases or not others or question.answer not in ("yes", "no"):
                continue
            if balancer.accepts(tuple(question.question_id.split("/")), question.answer, rng):
                repeated.append(replace(question, text=rng.choice(others)))
        return asked + repeated + (self._unlabeled(scene, rng) if asked else [])

    def _unlabeled(self, scene: Scene, rng: random.Random) -> list[Question]:
        """Random questions for the query head whose true answer is unknown."""
        truth = GroundTruth(scene)
        found: list[Question] = []
        for question_id in rng.sample(list(HEAD_QUESTIONS), len(HEAD_QUESTIONS)):
            key = tuple(question_id.split("/"))
            if len(found) == self.unlabeled:
                break
            if key[0] in self.question_types and truth.find(key) is None:
                text = random_paraphrase(question_id, rng)
                found.append(Question(text, "no", key[0], key[1], question_id, is_labeled=False))
        return found

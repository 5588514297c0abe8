"""From rows of a dataset to packed batches: augmentation, questions, labels.

    row {image, scene, questions, answers} → augmented image and scene → GroundTruth → questions
        → processor(packed=True, suffix=...)

Image and scene are mirrored and cropped together, and questions are generated afterwards. So left, right, near and
counts match the image that the model sees. Changes of light keep the names of colors: "red" stays red.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..images_traffic_vlm import to_rgb
from ..processing_traffic_vlm import ROW_TOKENS
from .augment import augment, change_light
from .questions import QUESTION_TYPES, Balancer, Question, ask
from .scene import Scene, scene_of
from .truth import NONE, GroundTruth


@dataclass
class Prepared:
    """An image as the model will see it, its questions, and the truth about it (None for hand-written questions)."""

    image: np.ndarray | Image.Image
    questions: list[Question]
    truth: GroundTruth | None
    source: str


@dataclass
class TrafficCollator:
    """Turns rows of a dataset into one packed batch, for `Trainer` and `DataLoader`.

    Args:
        processor: a `TrafficVLMProcessor`.
        questions_per_image: maximum number of questions about each image.
        question_types: question types to ask.
        training: augment the image and generate new questions each time it is drawn; otherwise use the unchanged
            image and the row's own questions.
        seed: seed of all random choices, together with the seed of the worker.
        row_tokens: maximum length of packed rows, as in the processor.
        uint8_pixels: leave pixels as uint8, to be normalized on the device that they are trained on: a quarter of the
            bytes between processes and devices.
        balancers: one for each source. It balances yes and no for each question type and class over all rows that a
            worker collates. With a single balancer for all sources, the style of a source with many cars would be
            evidence for a yes, and the style of a source with few cars for a no.

    A row without `scene` (hand-written questions) is never mirrored or cropped, as its answers could change. A row
    without questions (of `SyntheticRows`) gets questions from its scene. Rows without any possible question are left
    out; in training, others of the batch are repeated in their place. If no row of a batch is left, whole images with
    the rows' own questions are used, or questions about their scenes that are not balanced.

    Balancers live as long as their worker.
    """

    processor: Any
    questions_per_image: int = 16
    question_types: Sequence[str] = QUESTION_TYPES
    training: bool = True
    seed: int = 0
    row_tokens: int | str = ROW_TOKENS
    uint8_pixels: bool = False
    epoch: int = field(default=0, repr=False)
    rng: random.Random | None = field(default=None, repr=False)
    balancers: defaultdict[str, Balancer] = field(default_factory=lambda: defaultdict(Balancer), repr=False)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The processor's packed batch for the images [I] with their questions and answers, with labels.

        Raises:
            ValueError: no row has a possible question.
        """
        rng = self.generator()
        prepared = [self._prepare(row, rng) for row in rows] if self.training else []
        if not any(item.questions for item in prepared):
            prepared = [self._with_stored_questions(row, scene_of(row), rng) for row in rows]
        prepared = [item for item in prepared if item.questions]
        if not prepared:
            raise ValueError("no image of this batch has a question or a scene to ask about")
        if self.training:  # batches of one size: cuDNN plans the convolutions anew for each number of images
            prepared = list(islice(cycle(prepared), len(rows)))
        batch = self.processor(
            images=[item.image for item in prepared],
            text=[[question.text for question in item.questions] for item in prepared],
            suffix=[[question.answer for question in item.questions] for item in prepared],
            packed=True,
            row_tokens=self.row_tokens,
            on_unknown="raise",
            return_tensors="pt",
            **({"do_rescale": False, "do_normalize": False} if self.uint8_pixels else {}),
        )
        return self.finish(dict(batch), prepared)

    def start_epoch(self, epoch: int) -> None:
        """Reset random numbers and balancers, so that an epoch does not depend on the epochs before it."""
        self.epoch, self.rng = epoch, None
        self.balancers.clear()

    def generator(self) -> random.Random:
        """The random number generator of this worker and epoch."""
        if self.rng is None:
            worker = torch.utils.data.get_worker_info()
            self.rng = random.Random(f"{self.seed}/{self.epoch}/{0 if worker is None else worker.seed}")
        return self.rng

    @property
    def knows_none(self) -> bool:
        """Whether the vocabulary has the word "none", the answer to questions about objects that are not there."""
        tokenizer = self.processor.tokenizer
        return tokenizer.convert_tokens_to_ids(NONE) != tokenizer.unk_token_id

    def finish(self, batch: dict[str, Any], prepared: list[Prepared]) -> dict[str, Any]:
        """Hook for subclasses that add tensors to the batch."""
        return batch

    def _prepare(self, row: dict[str, Any], rng: random.Random) -> Prepared:
        """An augmented image with new questions; not cropped if the crop has no possible question."""
        known = scene_of(row)
        if known is None:
            return self._with_stored_questions(row, None, rng)
        whole = np.asarray(to_rgb(row["image"]))
        for crops in (True, False):
            image, scene = augment(whole, known, np.random.default_rng(rng.getrandbits(64)), crops)
            truth = GroundTruth(scene)
            questions = self.ask(truth, rng)
            if questions:
                break
        return Prepared(image, questions, truth, str(row.get("source", "")))

    def ask(self, truth: GroundTruth, rng: random.Random) -> list[Question]:
        """At most `questions_per_image` questions, balanced within the source."""
        balancer = self.balancers[truth.scene.source]
        return ask(truth, rng, self.questions_per_image, balancer, self.question_types, self.knows_none)

    def _with_stored_questions(self, row: dict[str, Any], scene: Scene | None, rng: random.Random) -> Prepared:
        """An image with its row's questions, or else with questions about its scene; in training, in new light."""
        image: np.ndarray | Image.Image = to_rgb(row["image"])
        truth = None if scene is None else GroundTruth(scene)
        pairs = zip(row.get("questions") or (), row.get("answers") or (), strict=True)
        known = (pair for pair in pairs if pair[1] != NONE or self.knows_none)
        if scene is None:  # a user's own
            known = ((self.processor.rules.as_asked(text), answer) for text, answer in known)
        questions = [Question(text, answer, "", "", "") for text, answer in known]
        count = self.questions_per_image
        if self.training and len(questions) > count:
            questions = rng.sample(questions, count)
        questions = questions[:count]
        if not questions and truth is not None:
            # Without training the questions depend only on the row, so that they are the same each time.
            row_rng = rng if self.training else random.Random(f"{self.seed}/{truth.scene.to_json()}")
            questions = ask(truth, row_rng, count, None, self.question_types, self.knows_none)
        if self.training:
            image = change_light(np.asarray(image), np.random.default_rng(rng.getrandbits(64)))
        return Prepared(image, questions, truth, str(row.get("source", "")))

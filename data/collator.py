"""From rows of a dataset to packed batches: augmentation, questions, labels.

    row {image, scene, questions, answers} → augmented image and scene → questions → processor(packed=True, suffix=...)

Image and scene are mirrored and cropped together, and questions are generated afterwards. So left, right, near and
counts match the image that the model sees. Changes of light keep the names of colors: "red" stays red.
"""

import io
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

from ..images_traffic_vlm import to_rgb
from ..processing_traffic_vlm import ROW_TOKENS
from .ground_truth import NONE
from .questions import QUESTION_TYPES, Balancer, Question, ask
from .scene import SYNTHETIC, Scene


TONE = 1.18  # maximum gamma: it changes a middle gray by 12 %
CONTRAST = 0.15  # maximum increase of the slope at middle gray
DARK = 0.1  # fraction of images that are darkened
# Fraction of photographs, and of rendered scenes, that are cropped: a crop hides the number of lanes and the shape of
# the road, which only rendered scenes label.
CROPPED, CROPPED_RENDERED = 0.5, 0.3
MIRRORED, MIRRORED_NUMBERS = 0.5, 0.2  # fraction of images that are mirrored; of those with numbers to be read


def cropped_fraction(scene: Scene) -> float:
    """The fraction of images like this one that are cropped."""
    return CROPPED_RENDERED if scene.source == SYNTHETIC else CROPPED


def mirrored_fraction(scene: Scene) -> float:
    """The fraction of images like this one that are mirrored."""
    return MIRRORED_NUMBERS if any("value" in item.attributes for item in scene.objects) else MIRRORED


def random_window(scene: Scene, rng: random.Random, min_fraction: float = 0.6) -> tuple[int, int, int, int]:
    """A window (left, top, right, bottom) in pixels of at least `min_fraction` of the width and of the height."""
    width = max(1, round(scene.width * rng.uniform(min_fraction, 1.0)))
    height = max(1, round(scene.height * rng.uniform(min_fraction, 1.0)))
    left, top = rng.randint(0, scene.width - width), rng.randint(0, scene.height - height)
    return left, top, left + width, top + height


def change_light(image: Image.Image, rng: random.Random) -> Image.Image:
    """Change tones, blur, noise and JPEG quality, as if by another camera.

    No tone changes by more than a tenth of the range, none is clipped, and hues are preserved. So white, silver, gray
    and black keep their names, and so do orange and yellow.
    """
    image = _with_tones(image, TONE ** rng.uniform(-1, 1), rng.uniform(-CONTRAST, CONTRAST))
    if rng.random() < 0.25:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.5)))
    if rng.random() < 0.25:
        noise = np.random.default_rng(rng.getrandbits(32)).standard_normal((image.height, image.width, 3), np.float32)
        noisy = np.asarray(image) + rng.uniform(2, 12) * noise
        image = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    if rng.random() < 0.25:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(30, 90))
        image = Image.open(buffer).convert("RGB")
    return image


def darken(image: Image.Image, scene: Scene, rng: random.Random) -> tuple[Image.Image, Scene]:
    """Darken an image strongly. Colors, weather, time of day and wetness become unknown: they are hard to see."""
    hidden = ("color", "weather", "time of day", "road surface")
    return _with_tones(image, rng.uniform(1.4, 2.4), 0.0), scene.without(*hidden)


def _with_tones(image: Image.Image, gamma: float, contrast: float) -> Image.Image:
    """Apply `gamma`, then change the slope at middle gray by `contrast`; black and white stay the same."""
    tones = np.linspace(0, 1, 256) ** gamma
    tones -= contrast * np.sin(2 * np.pi * tones) / (2 * np.pi)
    return image.point(np.rint(255 * tones).astype(int).tolist() * 3)


def augment(image: Image.Image, scene: Scene, rng: random.Random, cropped: float) -> tuple[Image.Image, Scene]:
    """Randomly mirror, crop (with probability `cropped`), darken and relight an image together with its scene."""
    if rng.random() < mirrored_fraction(scene):
        image, scene = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), scene.flipped()
    if rng.random() < cropped:
        window = random_window(scene, rng)
        image, scene = image.crop(window), scene.cropped(*window)
    if rng.random() < DARK:
        image, scene = darken(image, scene, rng)
    return change_light(image, rng), scene


@dataclass
class Prepared:
    """An image as the model will see it, its questions, and its scene (None for hand-written questions)."""

    image: Image.Image
    questions: list[Question]
    scene: Scene | None
    source: str = ""


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
        balancers: one for each source. It balances yes and no for each question type and class over all rows that a
            worker collates. With a single balancer for all sources, the style of a source with many cars would be
            evidence for a yes, and the style of a source with few cars for a no.

    A row without `scene` (hand-written questions) is never mirrored or cropped, as its answers could change. A row
    without questions (of `SyntheticRows`) gets questions from its scene. Rows without any possible question are
    left out. If no row of a batch is left, the batch is made as without `training`, without balancing.

    Balancers exist as long as their worker.
    """

    processor: Any
    questions_per_image: int = 16
    question_types: Sequence[str] = QUESTION_TYPES
    training: bool = True
    seed: int = 0
    row_tokens: int | str = ROW_TOKENS
    epoch: int = field(default=0, repr=False)
    rng: random.Random | None = field(default=None, repr=False)
    balancers: defaultdict[str, Balancer] = field(default_factory=lambda: defaultdict(Balancer), repr=False)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The processor's packed batch for the images [I] with their questions and answers, with labels.

        Raises:
            ValueError: no row has a possible question.
        """
        rng = self.generator()
        prepared = [self._with_new_questions(row, rng) for row in rows] if self.training else []
        if not any(item.questions for item in prepared):
            prepared = [self._with_stored_questions(row, rng) for row in rows]
        named = zip(rows, prepared)
        prepared = [replace(item, source=str(row.get("source", ""))) for row, item in named if item.questions]
        if not prepared:
            raise ValueError(f"none of the {len(rows)} images of this batch has a question or a scene to ask about")
        batch = self.processor(
            images=[item.image for item in prepared],
            text=[[question.text for question in item.questions] for item in prepared],
            suffix=[[question.answer for question in item.questions] for item in prepared],
            packed=True,
            row_tokens=self.row_tokens,
            on_unknown="raise",
            return_tensors="pt",
        )
        return self.finish(dict(batch), prepared)

    def start_epoch(self, epoch: int) -> None:
        """Reset random numbers and balancers, so that an epoch does not depend on the epochs before it."""
        self.epoch, self.rng = epoch, None
        self.balancers.clear()

    def generator(self) -> random.Random:
        """The random number generator of this worker."""
        if self.rng is None:
            worker = torch.utils.data.get_worker_info()
            self.rng = random.Random(f"{self.seed}/{self.epoch}/{0 if worker is None else worker.seed}")
        return self.rng

    @property
    def knows_none(self) -> bool:
        """Whether the vocabulary has the word "none", the answer to questions about objects that are not there."""
        tokenizer = self.processor.tokenizer
        return tokenizer.convert_tokens_to_ids(NONE) != tokenizer.unk_token_id

    def finish(self, batch: dict[str, torch.Tensor], prepared: list[Prepared]) -> dict[str, torch.Tensor]:
        """Hook for subclasses that add tensors to the batch."""
        return batch

    def _with_new_questions(self, row: dict[str, Any], rng: random.Random) -> Prepared:
        """An augmented image with new questions; it is not cropped if a crop has no possible question."""
        if not row.get("scene"):
            return self._with_stored_questions(row, rng)
        whole, known = to_rgb(row["image"]), Scene.from_json(row["scene"])
        for cropped in (cropped_fraction(known), 0.0):
            image, scene = augment(whole, known, rng, cropped)
            questions = self.ask(scene, rng)
            if questions:
                break
        return Prepared(image, questions, scene)

    def ask(self, scene: Scene, rng: random.Random) -> list[Question]:
        """At most `questions_per_image` questions, balanced within the source."""
        balancer = self.balancers[scene.source]
        return ask(scene, rng, self.questions_per_image, balancer, self.question_types, self.knows_none)

    def _with_stored_questions(self, row: dict[str, Any], rng: random.Random) -> Prepared:
        """An image with the questions of its row, or else with questions from its scene; in training, in new light."""
        image, count = to_rgb(row["image"]), self.questions_per_image
        scene = Scene.from_json(row["scene"]) if row.get("scene") else None
        pairs = zip(row.get("questions") or (), row.get("answers") or (), strict=True)
        known = (pair for pair in pairs if pair[1] != NONE or self.knows_none)
        questions = [Question(text, answer, "", "", "") for text, answer in known]
        if self.training and len(questions) > count:
            questions = rng.sample(questions, count)
        questions = questions[:count]
        if not questions and scene is not None:
            # Without training the questions depend only on the row, so that they are the same each time.
            row_rng = rng if self.training else random.Random(f"{self.seed}/{row['scene']}")
            questions = ask(scene, row_rng, count, None, self.question_types, self.knows_none)
        return Prepared(change_light(image, rng) if self.training else image, questions, scene)

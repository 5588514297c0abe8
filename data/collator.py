"""From rows of a dataset to packed batches: augmentation that keeps the truth, questions, labels.

    row {image, scene, questions, answers} → augmented image and scene → questions → processor(packed=True, suffix=...)

Geometry is done to image and scene together and the questions are asked afterwards, so that left, right, near and
counts are those of the image that the model sees. Light is changed, colours keep their names: "red" stays red.
"""

import io
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

from ..images_traffic_vlm import to_rgb
from ..processing_traffic_vlm import ROW_TOKENS
from .questions import KINDS, Balancer, Question, ask
from .scene import Scene


TONE = 1.18  # the strongest gamma: it moves a middle gray by 12 %
CONTRAST = 0.15  # the most by which the middle gets steeper
DARK = 0.1  # the share of images that are darkened
CROPPED = 0.7  # the share of images of which a part is taken


def random_window(scene: Scene, rng: random.Random, least: float = 0.6) -> tuple[int, int, int, int]:
    """A window (left, top, right, bottom) that holds `least` to all of the width and of the height."""
    width = max(1, round(scene.width * rng.uniform(least, 1.0)))
    height = max(1, round(scene.height * rng.uniform(least, 1.0)))
    left, top = rng.randint(0, scene.width - width), rng.randint(0, scene.height - height)
    return left, top, left + width, top + height


def change_light(image: Image.Image, rng: random.Random) -> Image.Image:
    """Tones, blur, noise and JPEG traces of another camera.

    No tone moves by more than a tenth of the range, none is clipped, and hues stay: white, silver, gray and black keep
    their names, and so do orange and yellow.
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
    """An exposure so short that nobody can be sure of colours, weather and time of day: they are not known then."""
    return _with_tones(image, rng.uniform(1.4, 2.4), 0.0), scene.without("color", "weather", "time of day")


def _with_tones(image: Image.Image, gamma: float, contrast: float) -> Image.Image:
    """Brighter or darker by `gamma`, more or less steep in the middle by `contrast`; black and white stay."""
    tones = np.linspace(0, 1, 256) ** gamma
    tones -= contrast * np.sin(2 * np.pi * tones) / (2 * np.pi)
    return image.point(np.rint(255 * tones).astype(int).tolist() * 3)


def augment(
    image: Image.Image, scene: Scene, rng: random.Random, cropped: float = CROPPED
) -> tuple[Image.Image, Scene]:
    """Mirror, crop (in a share of the cases), darken and relight an image together with what is known about it."""
    if rng.random() < 0.5:
        image, scene = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), scene.flipped()
    if rng.random() < cropped:
        window = random_window(scene, rng)
        image, scene = image.crop(window), scene.cropped(*window)
    if rng.random() < DARK:
        image, scene = darken(image, scene, rng)
    return change_light(image, rng), scene


@dataclass
class Prepared:
    """An image as the model will see it, its questions, and what is known about it (None: nothing but the answers)."""

    image: Image.Image
    questions: list[Question]
    scene: Scene | None


@dataclass
class TrafficCollator:
    """Rows of a dataset → one packed batch, for `Trainer` and `DataLoader`.

    Args:
        processor: a `TrafficVLMProcessor`.
        questions_per_image: at most so many questions are asked of each image.
        kinds: of the question grammar, that are asked.
        training: augment, and ask anew each time the image comes up; else ask the row's own questions, as they stand.
        seed: with the number of the worker it decides what is drawn.
        row_tokens: of packed rows, as in the processor.
        balancers: one for each source, keeps as many yes as no for each kind and class, over all that a worker
            collates. Were it one for all, a source full of cars and one with few would teach that the look of a
            source is an answer.

    A row without `scene` (questions written by people) is never mirrored or cropped, as its answers could change; one
    without questions (of `SyntheticRows`) is asked what its scene allows. Rows of which nothing may be asked are
    left out; if that is the whole batch, it is asked as without `training`, whatever the balance.

    Balancers live as long as their worker.
    """

    processor: Callable[..., Any]
    questions_per_image: int = 16
    kinds: Sequence[str] = KINDS
    training: bool = True
    seed: int = 0
    row_tokens: int | str = ROW_TOKENS
    epoch: int = field(default=0, repr=False)
    rng: random.Random | None = field(default=None, repr=False)
    balancers: defaultdict[str, Balancer] = field(default_factory=lambda: defaultdict(Balancer), repr=False)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A packed batch: what the processor gives for images [I] with questions and answers, labels among it.

        Raises:
            ValueError: no row has anything that can be asked.
        """
        rng = self.generator()
        prepared = [self._asked_anew(row, rng) for row in rows] if self.training else []
        if not any(item.questions for item in prepared):
            prepared = [self._as_stored(row, rng) for row in rows]
        prepared = [item for item in prepared if item.questions]
        if not prepared:
            raise ValueError(f"nothing can be asked about any of the {len(rows)} images of this batch")
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
        """Forget what was drawn and asked so far: an epoch is the same whether or not others went before it."""
        self.epoch, self.rng = epoch, None
        self.balancers.clear()

    def generator(self) -> random.Random:
        """The random numbers of this worker."""
        if self.rng is None:
            worker = torch.utils.data.get_worker_info()
            self.rng = random.Random(f"{self.seed}/{self.epoch}/{0 if worker is None else worker.seed}")
        return self.rng

    def finish(self, batch: dict[str, torch.Tensor], prepared: list[Prepared]) -> dict[str, torch.Tensor]:
        """The batch of what was prepared, to which a subclass may add."""
        return batch

    def _asked_anew(self, row: dict[str, Any], rng: random.Random) -> Prepared:
        """The augmented image and questions about it; whole if nothing may be asked of a part of it."""
        if not row.get("scene"):
            return self._as_stored(row, rng)
        whole, known = to_rgb(row["image"]), Scene.from_json(row["scene"])
        for cropped in (CROPPED, 0.0):
            image, scene = augment(whole, known, rng, cropped)
            questions = self.ask(scene, rng)
            if questions:
                break
        return Prepared(image, questions, scene)

    def ask(self, scene: Scene, rng: random.Random) -> list[Question]:
        """At most `questions_per_image` questions, as many yes as no within each source."""
        return ask(scene, rng, self.questions_per_image, self.balancers[scene.source], self.kinds)

    def _as_stored(self, row: dict[str, Any], rng: random.Random) -> Prepared:
        """The image as it stands and its own questions, or else what its scene allows by itself."""
        image, count = to_rgb(row["image"]), self.questions_per_image
        scene = Scene.from_json(row["scene"]) if row.get("scene") else None
        pairs = zip(row.get("questions") or (), row.get("answers") or ())
        questions = [Question(text, answer, "", "", "") for text, answer in pairs]
        if self.training and len(questions) > count:
            questions = rng.sample(questions, count)
        questions = questions[:count]
        if not questions and scene is not None:
            # When training is off, the same each time: by the row alone.
            dice = rng if self.training else random.Random(f"{self.seed}/{row['scene']}")
            questions = ask(scene, dice, count, kinds=self.kinds)
        return Prepared(change_light(image, rng) if self.training else image, questions, scene)

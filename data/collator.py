"""From rows of a dataset to packed batches: augmentation that keeps the truth, questions, labels.

    row {image, scene, questions, answers} → augmented image and scene → questions → processor(packed=True, suffix=...)

Geometry is done to image and scene together and the questions are asked afterwards, so that left, right, near and
counts are those of the image that the model sees. Light is changed, hue is not: "red" stays red.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter

from .questions import Balancer, ask
from .scene import Scene


def random_window(scene: Scene, rng: random.Random, least: float = 0.6) -> tuple[int, int, int, int]:
    """A window (left, top, right, bottom) that holds `least` to all of the width and of the height."""
    width = max(1, round(scene.width * rng.uniform(least, 1.0)))
    height = max(1, round(scene.height * rng.uniform(least, 1.0)))
    left, top = rng.randint(0, scene.width - width), rng.randint(0, scene.height - height)
    return left, top, left + width, top + height


def change_light(image: Image.Image, rng: random.Random) -> Image.Image:
    """Brightness, contrast, blur and noise of another camera. Hue and saturation stay: colours are asked about."""
    image = ImageEnhance.Brightness(image).enhance(rng.uniform(0.7, 1.3))
    image = ImageEnhance.Contrast(image).enhance(rng.uniform(0.7, 1.3))
    if rng.random() < 0.2:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.2)))
    if rng.random() < 0.2:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(
            0, rng.uniform(3, 12), (image.height, image.width, 1)
        )
        image = Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    return image


def augment(image: Image.Image, scene: Scene, rng: random.Random) -> tuple[Image.Image, Scene]:
    """Mirror, crop and relight an image together with what is known about it."""
    if rng.random() < 0.5:
        image, scene = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), scene.flipped()
    if rng.random() < 0.7:
        window = random_window(scene, rng)
        image, scene = image.crop(window), scene.cropped(*window)
    return change_light(image, rng), scene


@dataclass
class TrafficCollator:
    """Rows of a dataset → one packed batch, for `Trainer` and `DataLoader`.

    Args:
        processor: a `TrafficVLMProcessor`.
        questions_per_image: at most so many questions are asked of each image.
        training: augment, and ask anew each time the image comes up; else ask the row's own questions, as they stand.
        seed: with the number of the worker it decides what is drawn.
        balancer: keeps as many yes as no for each kind and class; one for each worker, made on first use.

    A row without `scene` (questions written by people) is never mirrored or cropped, as its answers could change.
    """

    processor: Callable[..., Any]
    questions_per_image: int = 16
    training: bool = True
    seed: int = 0
    rng: random.Random | None = field(default=None, repr=False)
    balancer: Balancer | None = field(default=None, repr=False)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A packed batch: what the processor gives for images [I] with questions and answers, labels among it.

        Raises:
            ValueError: no row has anything that can be asked.
        """
        if self.rng is None or self.balancer is None:
            worker = torch.utils.data.get_worker_info()
            seed = f"{self.seed}/{0 if worker is None else worker.seed}"
            self.rng, self.balancer = random.Random(seed), Balancer()
        images, text, suffix = [], [], []
        for row in rows:
            image, questions, answers = self._prepare(row, self.rng, self.balancer)
            if questions:
                images.append(image)
                text.append(questions)
                suffix.append(answers)
        if not images:
            raise ValueError(f"nothing can be asked about any of the {len(rows)} images of this batch")
        batch = self.processor(
            images=images, text=text, suffix=suffix, packed=True, on_unknown="raise", return_tensors="pt"
        )
        return dict(batch)

    def _prepare(
        self, row: dict[str, Any], rng: random.Random, balancer: Balancer
    ) -> tuple[Image.Image, list[str], list[str]]:
        image = row["image"].convert("RGB")
        if not self.training or not row.get("scene"):
            image = change_light(image, rng) if self.training else image
            count = self.questions_per_image
            return image, list(row["questions"])[:count], list(row["answers"])[:count]
        image, scene = augment(image, Scene.from_json(row["scene"]), rng)
        questions = ask(scene, rng, self.questions_per_image, balancer)
        return image, [question.text for question in questions], [question.answer for question in questions]

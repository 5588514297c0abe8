"""The same question in other words, and the same image in worse conditions.

yes/no questions → up to four wordings each → how often the answers agree
images → blurred, noisy, dark, compressed → balanced accuracy
"""

import io
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from ..data.phrases import phrasings
from .metrics import Agreement, agreement, group
from .predict import Prediction, Transform, predict


WORDINGS = 4
BLUR = 2.0  # radius in pixels of the image as the model sees it
NOISE = 25.0  # standard deviation, of 255
DARK = 0.35  # of the light
QUALITY = 15  # of JPEG


def reword(row: Mapping[str, Any], number: int, wordings: int = WORDINGS) -> dict[str, Any]:
    """The row with its yes/no questions in up to `wordings` ways each, and `number` for an image_id.

    Facts that are not of the question grammar are left out: nobody knows other words for them.
    """
    lists: dict[str, list[str]] = {name: [] for name in ("questions", "answers", "kinds", "labels", "facts")}
    seen = set()  # a row may ask a fact twice
    for kind, label, fact, answer in zip(row["kinds"], row["labels"], row["facts"], row["answers"]):
        if answer not in ("yes", "no") or fact in seen:
            continue
        seen.add(fact)
        try:
            texts = phrasings(fact)
        except ValueError:
            continue
        for text in random.Random(f"{number}/{fact}").sample(texts, min(wordings, len(texts))):
            for name, value in zip(lists, (text, answer, kind, label, fact)):
                lists[name].append(value)
    return {"image": row["image"], "source": row["source"], "image_id": str(number), **lists}


def phrasing_agreement(
    model: Any,
    processor: Any,
    rows: Iterable[Mapping[str, Any]],
    batch_size: int = 16,
    wordings: int = WORDINGS,
    progress: bool = True,
) -> dict[str, Agreement]:
    """Agreement between wordings of the same question about the same image, by kind, and of "all"."""
    asked = (reword(row, number, wordings) for number, row in enumerate(rows))
    how: dict[str, Any] = {"generate_words": False, "progress": progress, "description": "other wordings"}
    predictions = predict(model, processor, asked, batch_size, **how)
    results = {"all": agree(predictions)}
    return results | {kind: agree(members) for kind, members in group(predictions, "kind").items()}


def agree(predictions: Iterable[Prediction]) -> Agreement:
    """Agreement of predictions about the same image and fact."""
    wordings = group((one for one in predictions if one.is_yes_no), "source", "image_id", "fact")
    return agreement([[p for one in members if (p := one.probability) is not None] for members in wordings.values()])


def corruptions(processor: Any) -> dict[str, Transform]:
    """Ways to worsen an image, by a name that says how much. They are the same each time.

    Each first brings the image to the size that the model sees, so that a large photograph suffers as much as a small
    one.
    """
    size, resample = processor.image_processor.size, processor.image_processor.resample

    def prepared(worsen: Transform) -> Transform:
        return lambda image: worsen(image.resize((size["width"], size["height"]), resample))

    return {
        f"gaussian blur, radius {BLUR:g} pixels": prepared(blur),
        f"gaussian noise, deviation {NOISE:g} of 255": prepared(add_noise),
        f"darkness, {DARK:.0%} of the light": prepared(darken),
        f"JPEG, quality {QUALITY}": prepared(compress),
    }


def blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(BLUR))


def add_noise(image: Image.Image) -> Image.Image:
    noise = np.random.default_rng(0).standard_normal((image.height, image.width, 3))
    return Image.fromarray(np.clip(np.asarray(image) + NOISE * noise, 0, 255).astype(np.uint8))


def darken(image: Image.Image) -> Image.Image:
    return image.point([round(DARK * value) for value in range(256)] * 3)


def compress(image: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return Image.open(buffer).convert("RGB")

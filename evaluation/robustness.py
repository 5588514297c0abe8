"""Robustness: agreement between paraphrases of a question, and accuracy on corrupted images."""

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
from PIL import Image

from ..data.augment import add_noise, blur, compress, darken
from ..data.folders import LISTS
from ..data.templates import paraphrases_of
from .metrics import group, mean
from .predict import Prediction, Transform, predict


PARAPHRASES = 4  # of each question
BLUR_RADIUS = 2.0  # pixels of the model's input
NOISE_DEVIATION = 25.0  # of 255
BRIGHTNESS = 0.35
JPEG_QUALITY = 15


def paraphrase(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Copy a row with its yes/no questions in up to PARAPHRASES paraphrases each, and `index` as image_id.

    Hand-written questions have no paraphrases and are left out.
    """
    lists: dict[str, list[str]] = {name: [] for name in LISTS}
    for question_type, category, question_id, answer in zip(
        row["question_types"], row["categories"], row["question_ids"], row["answers"]
    ):
        if answer not in ("yes", "no") or question_id in lists["question_ids"]:
            continue
        try:
            texts = paraphrases_of(question_id)
        except ValueError:  # not a question id of the templates
            continue
        for text in random.Random(f"{index}/{question_id}").sample(texts, min(PARAPHRASES, len(texts))):
            for name, value in zip(lists, (text, answer, question_type, category, question_id)):
                lists[name].append(value)
    return {"image": row["image"], "source": row["source"], "image_id": str(index), **lists}


def paraphrase_agreement(
    model: Any, processor: Any, rows: Iterable[Mapping[str, Any]], batch_size: int = 16, progress: str | None = None
) -> dict[str, dict[str, Any]]:
    """Agreement between the paraphrases of each question about an image, of "all" and of each question type."""
    asked = (paraphrase(row, index) for index, row in enumerate(rows))
    predictions = predict(model, processor, asked, batch_size, generate_words=False, progress=progress)
    groups = {"all": predictions} | group(predictions, "question_type")
    return {name: found for name, members in groups.items() if (found := agreement(members))["pairs"]}


def agreement(predictions: Iterable[Prediction]) -> dict[str, Any]:
    """Compare all pairs of predictions of the same image and question id.

    Returns:
        "same": fraction of pairs on the same side of P(yes) = 0.5; "change": mean absolute difference of P(yes);
        "pairs"; "questions": those with at least two paraphrases.
    """
    asked = group(predictions, "source", "image_id", "question_id").values()
    paraphrased = [[one.p_yes for one in members if one.p_yes is not None] for members in asked if len(members) > 1]
    pairs = [pair for values in paraphrased for pair in combinations(values, 2)]
    return {
        "same": mean(float((one >= 0.5) == (other >= 0.5)) for one, other in pairs),
        "change": mean(abs(one - other) for one, other in pairs),
        "pairs": len(pairs),
        "questions": len(paraphrased),
    }


def corruptions(processor: Any) -> dict[str, Transform]:
    """Image corruptions by name, the same each time. Each first resizes the image to the model's input size."""
    size, resample = processor.image_processor.size, processor.image_processor.resample

    def resized(corrupt: Callable[..., np.ndarray], *strength: float) -> Transform:
        def transform(image: Image.Image) -> Image.Image:
            pixels = np.asarray(image.resize((size["width"], size["height"]), resample))
            noise = (np.random.default_rng(0),) if corrupt is add_noise else ()
            return Image.fromarray(corrupt(pixels, *strength, *noise))

        return transform

    return {
        f"gaussian blur, radius {BLUR_RADIUS:g} pixels": resized(blur, BLUR_RADIUS),
        f"gaussian noise, deviation {NOISE_DEVIATION:g} of 255": resized(add_noise, NOISE_DEVIATION),
        f"darkness, {BRIGHTNESS:.0%} of the light": resized(darken, BRIGHTNESS),
        f"JPEG, quality {JPEG_QUALITY}": resized(compress, JPEG_QUALITY),
    }

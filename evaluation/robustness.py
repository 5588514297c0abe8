"""Robustness: answers to paraphrases, answers that contradict each other, and answers about corrupted images.

The questions of the first two are made here, for the images of a dataset; they have no truth or keep the given one.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from ..data.agreement import exclusions, implications
from ..data.augment import add_noise, blur, compress, darken
from ..data.folders import LISTS
from ..data.templates import paraphrases_of
from .metrics import balanced_accuracy, mean
from .predict import Transform, predict


PARAPHRASES = 4  # of each question
TOLERANCE = 0.1  # of a probability, beyond which two answers contradict each other
BLUR_RADIUS = 2.0  # pixels of the model's input
NOISE_DEVIATION = 25.0  # of 255
BRIGHTNESS = 0.35
JPEG_QUALITY = 15
# Ids of questions that are asked together about each image.
PROBES = (
    *(f"presence/{name}" for name in ("vehicle", "car", "bus", "truck", "motorcycle", "person", "pedestrian")),
    *("presence/traffic light", "light_state/traffic light/any/red", "presence/traffic sign"),
    *(f"place/{name}/{side}" for name in ("car", "pedestrian") for side in ("left", "center", "right")),
    *(f"count/car/over/{limit}" for limit in (1, 2, 3)),
    *(f"road_surface/road surface/is/{value}" for value in ("dry", "wet", "snowy")),
    *(f"time_of_day/time of day/is/{value}" for value in ("day", "night")),
    *(f"weather/weather/is/{value}" for value in ("clear", "cloudy", "rainy", "snowy", "foggy")),
    *(f"traffic_density/traffic density/is/{value}" for value in ("empty", "light", "busy", "jam")),
)

Row = Mapping[str, Any]


def paraphrase(row: Row, index: int) -> dict[str, Any]:
    """A row with up to 4 paraphrases of each of its yes/no questions, and `index` as image_id.

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


def paraphrase_agreement(model: Any, processor: Any, rows: Iterable[Row], batch_size: int = 16) -> pd.DataFrame:
    """Agreement of paraphrases about each image, see `agreement`: a row for "all" and one for each question type."""
    asked = (paraphrase(row, index) for index, row in enumerate(rows))
    answers = predict(model, processor, asked, generate_words=False, batch_size=batch_size)
    groups = {"all": answers} | {str(name): members for name, members in answers.groupby("question_type")}
    found = pd.DataFrame.from_dict({name: agreement(members) for name, members in groups.items()}, orient="index")
    return found[found["pairs"] > 0]


def agreement(answers: pd.DataFrame) -> dict[str, float | int | None]:
    """How alike the answers are to all pairs of questions with one image and question id.

    Returns:
        "same answer": fraction of pairs on the same side of P(yes) = 0.5; "mean change": mean absolute difference of
        P(yes); "pairs": their number.
    """
    groups = answers.dropna(subset="p_yes").groupby(["source", "image_id", "question_id"])["p_yes"]
    pairs = [pair for _, values in groups for pair in combinations(values, 2)]
    return {
        "same answer": mean([(one >= 0.5) == (other >= 0.5) for one, other in pairs]),
        "mean change": mean([abs(one - other) for one, other in pairs]),
        "pairs": len(pairs),
    }


def contradictions(model: Any, processor: Any, rows: Iterable[Row], batch_size: int = 16) -> pd.DataFrame:
    """How often pairs of answers about an image contradict each other by more than 0.1 of a probability.

    Returns:
        a row for each pair of PROBES, the worst first ("Is there a red car? → Is there a car?" for a yes that implies
        another, "Is it day? ≠ Is it night?" for two that exclude each other): "contradict", the fraction of images.
        No rows without images.
    """
    texts = [paraphrases_of(question_id)[0] for question_id in PROBES]
    lists = {name: [""] * len(texts) for name in LISTS} | {"questions": texts}
    asked = ({**lists, "image": row["image"], "source": "", "image_id": str(i)} for i, row in enumerate(rows))
    answers = predict(model, processor, asked, generate_words=False, batch_size=batch_size)
    p = answers["p_yes"].to_numpy().reshape(-1, len(texts))  # [images, probes]
    if not len(p):
        return pd.DataFrame({"contradict": []})
    excess = {f"{texts[i]} → {texts[j]}": p[:, i] - p[:, j] for i, j in implications(PROBES)}
    excess |= {f"{texts[i]} ≠ {texts[j]}": p[:, i] + p[:, j] - 1 for i, j in exclusions(PROBES)}
    found = pd.Series({name: float((values > TOLERANCE).mean()) for name, values in excess.items()})
    return found.sort_values(ascending=False, kind="stable").to_frame("contradict")


def corruptions(processor: Any) -> dict[str, Transform]:
    """Corruptions by name, the same each time. Each resizes an image to the model's input size first."""
    size, resample = processor.image_processor.size, processor.image_processor.resample
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        f"blur, radius {BLUR_RADIUS:g} pixels": lambda pixels: blur(pixels, BLUR_RADIUS),
        f"noise, deviation {NOISE_DEVIATION:g} of 255": lambda pixels: add_noise(
            pixels, NOISE_DEVIATION, np.random.default_rng(0)
        ),
        f"darkness, {BRIGHTNESS:.0%} of the light": lambda pixels: darken(pixels, BRIGHTNESS),
        f"JPEG, quality {JPEG_QUALITY}": lambda pixels: compress(pixels, JPEG_QUALITY),
    }

    def corrupt(image: Image.Image, change: Callable[[np.ndarray], np.ndarray]) -> Image.Image:
        return Image.fromarray(change(np.asarray(image.resize((size["width"], size["height"]), resample))))

    return {name: partial(corrupt, change=change) for name, change in changes.items()}


def corrupted_accuracy(
    model: Any, processor: Any, rows: Iterable[Row], answers: pd.DataFrame, batch_size: int = 16
) -> pd.DataFrame:
    """Balanced accuracy on images as they are and after each corruption.

    Args:
        answers: table of `predict` that holds those about the images as they are.

    Returns:
        a row for each condition: "balanced accuracy", and its "difference" to "as it is".
    """
    found = {
        name: predict(model, processor, rows, generate_words=False, transform=corrupt, batch_size=batch_size)
        for name, corrupt in corruptions(processor).items()
    }
    images = {pair for table in found.values() for pair in zip(table["source"], table["image_id"])}
    original = answers[[pair in images for pair in zip(answers["source"], answers["image_id"])]]
    values = pd.Series({name: balanced_accuracy(table) for name, table in {"as it is": original, **found}.items()})
    values = values.astype(float)
    return pd.DataFrame({"balanced accuracy": values, "difference": values - values["as it is"]})

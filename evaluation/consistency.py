"""Consistency: answers to paraphrases of a question, and answers that contradict each other.

The questions are made here, for the images of a dataset; they have no truth or keep the given one.
"""

import random
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pandas as pd

from ..data.agreement import exclusions, implications
from ..data.datasets import LISTS
from ..data.grammar import TYPES, paraphrases_of
from .predict import Row


PARAPHRASES = 4  # of each question
MAX_EXCESS = 0.1  # of a probability, beyond which two answers contradict each other
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


def paraphrase(row: Row) -> dict[str, Any]:
    """A row with up to 4 paraphrases of each of its yes/no questions.

    Hand-written questions have no paraphrases and are left out.
    """
    asked = {values[-1]: values for values in zip(*(row[name] for name in LISTS))}  # by question id
    found: list[tuple[str, ...]] = []
    for question_id, (_, answer, *others) in asked.items():
        if answer in ("yes", "no") and question_id.split("/")[0] in TYPES:
            texts, rng = paraphrases_of(question_id), random.Random(f"{row['image_id']}/{question_id}")
            some = rng.sample(texts, min(PARAPHRASES, len(texts)))
            found += [(text, answer, *others) for text in some]
    return {**row, **{name: [values[i] for values in found] for i, name in enumerate(LISTS)}}


def agreement(answers: pd.DataFrame) -> pd.DataFrame:
    """Table of pairs of paraphrases in a table of `predict`: a row for "all" questions, and one for each type.

    A pair has one question id, and is about one image. "same answer" is the fraction of pairs on the same side of
    P(yes) = 0.5, "mean change" the mean absolute difference of P(yes).
    """
    keys = ["question_type", "source", "image_id", "question_id"]
    found = [
        (name, (one >= 0.5) == (other >= 0.5), abs(one - other))
        for (question_type, *_), p_yes in answers.dropna(subset="p_yes").groupby(keys)["p_yes"]
        for one, other in combinations(p_yes, 2)
        for name in ("all", question_type)
    ]
    pairs = pd.DataFrame(found, columns=["type", "same", "change"]).groupby("type", sort=False)
    columns = {"same answer": ("same", "mean"), "mean change": ("change", "mean"), "pairs": ("change", "size")}
    return pairs.agg(**columns)


def contradictions(ask: Callable[[Iterable[Row]], pd.DataFrame], rows: Iterable[Row]) -> pd.DataFrame:
    """Table with a row for each pair of PROBES that depend on each other, the worst first.

    "Is there a bus? → Is there a vehicle?" is a yes that implies another; "Is it day? ≠ Is it night?" exclude each
    other. The column "contradict" is the fraction of images whose answers contradict each other by more than 0.1.

    Args:
        ask: `predict` with a model.
    """
    texts = [paraphrases_of(question_id)[0] for question_id in PROBES]
    lists = {name: [""] * len(texts) for name in LISTS} | {"questions": texts}
    p = ask({**row, **lists} for row in rows)["p_yes"].to_numpy().reshape(-1, len(texts))  # [images, probes]
    excess = {f"{texts[i]} → {texts[j]}": p[:, i] - p[:, j] for i, j in implications(PROBES)}
    excess |= {f"{texts[i]} ≠ {texts[j]}": p[:, i] + p[:, j] - 1 for i, j in exclusions(PROBES)}
    found = pd.Series({name: float((values > MAX_EXCESS).mean()) for name, values in excess.items()})
    return found.sort_values(ascending=False, kind="stable").to_frame("contradict")

"""Consistency: answers to paraphrases of a question, and answers that contradict each other.

The questions are made here, for the images of a dataset; they have no truth or keep the given one.
"""

import random
from collections.abc import Iterable
from itertools import chain, combinations
from typing import Any

import pandas as pd

from ..data.agreement import exclusions, implications
from ..data.datasets import LISTS
from ..data.grammar import TYPES, paraphrases_of
from .metrics import Metric, by_group, mean
from .predict import Row, predict


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
AGREEMENT: dict[str, Metric] = {
    "same answer": lambda pairs: mean(pairs["same answer"]),
    "mean change": lambda pairs: mean(pairs["change"]),
    "pairs": len,
}


def paraphrase(row: Row, index: int) -> dict[str, Any]:
    """A row with up to 4 paraphrases of each of its yes/no questions, and `index` as image_id.

    Hand-written questions have no paraphrases and are left out.
    """
    found: dict[str, list[tuple[str, ...]]] = {}  # by question id
    for _, answer, question_type, category, question_id in zip(*(row[name] for name in LISTS)):
        if answer not in ("yes", "no") or question_id in found or question_id.split("/")[0] not in TYPES:
            continue
        texts = paraphrases_of(question_id)
        some = random.Random(f"{index}/{question_id}").sample(texts, min(PARAPHRASES, len(texts)))
        found[question_id] = [(text, answer, question_type, category, question_id) for text in some]
    columns = zip(*chain(*found.values())) if found else [()] * len(LISTS)
    return {**row, "image_id": str(index), **dict(zip(LISTS, map(list, columns)))}


def paraphrase_agreement(model: Any, processor: Any, rows: Iterable[Row], batch_size: int = 16) -> pd.DataFrame:
    """Table with a row for "all" questions and one for each type; AGREEMENT are the columns.

    "same answer" is the fraction of pairs on the same side of P(yes) = 0.5, "mean change" the mean absolute difference
    of P(yes).
    """
    asked = (paraphrase(row, index) for index, row in enumerate(rows))
    pairs = paraphrase_pairs(predict(model, processor, asked, batch_size))
    tables = [by_group(some, AGREEMENT, "question_type") for some in (pairs.assign(question_type="all"), pairs)]
    return pd.concat(tables)


def paraphrase_pairs(answers: pd.DataFrame) -> pd.DataFrame:
    """Table with a row for each pair of answers about one image with one question id."""
    keys = ["source", "image_id", "question_type", "question_id"]
    pairs = [
        (names[2], (one >= 0.5) == (other >= 0.5), abs(one - other))
        for names, p_yes in answers.dropna(subset="p_yes").groupby(keys)["p_yes"]
        for one, other in combinations(p_yes, 2)
    ]
    return pd.DataFrame(pairs, columns=["question_type", "same answer", "change"])


def contradictions(model: Any, processor: Any, rows: Iterable[Row], batch_size: int = 16) -> pd.DataFrame:
    """Table with a row for each pair of PROBES that depend on each other, the worst first.

    "Is there a bus? → Is there a vehicle?" is a yes that implies another; "Is it day? ≠ Is it night?" exclude each
    other. The column "contradict" is the fraction of images whose answers contradict each other by more than 0.1.
    """
    texts = [paraphrases_of(question_id)[0] for question_id in PROBES]
    lists = {name: [""] * len(texts) for name in LISTS} | {"questions": texts}
    asked = ({**lists, "image": row["image"], "source": "", "image_id": str(i)} for i, row in enumerate(rows))
    answers = predict(model, processor, asked, batch_size)
    p = answers["p_yes"].to_numpy().reshape(-1, len(texts))  # [images, probes]
    excess = {f"{texts[i]} → {texts[j]}": p[:, i] - p[:, j] for i, j in implications(PROBES)}
    excess |= {f"{texts[i]} ≠ {texts[j]}": p[:, i] + p[:, j] - 1 for i, j in exclusions(PROBES)}
    found = pd.Series({name: float((values > MAX_EXCESS).mean()) for name, values in excess.items()})
    return found.sort_values(ascending=False, kind="stable").to_frame("contradict")

"""Baselines that see no image: the mean image, and the most frequent answer to each question."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from ..images_traffic_vlm import to_rgb
from .metrics import mean
from .predict import Prediction, normalize


def mean_image(rows: Iterable[Mapping[str, Any]], processor: Any) -> Image.Image:
    """Average images, each resized to the model's input size.

    Raises:
        ValueError: no rows.
    """
    size = processor.image_processor.size
    total, count = np.zeros((size["height"], size["width"], 3)), 0
    for row in rows:
        total += np.asarray(to_rgb(row["image"]).resize((size["width"], size["height"])), dtype=np.float64)
        count += 1
    if not count:
        raise ValueError("mean_image needs at least one row")
    return Image.fromarray(np.rint(total / count).astype(np.uint8))


class Majority:
    """The most frequent answer to each question in `rows`.

    Counted within the source; for a question id that the source lacks over all sources, then over all questions of
    the same type, then over all questions; always among yes and no, or among words, whichever the ground truth is.

    Args:
        rows: rows of a dataset; images are not read.
        processor: normalizes the answers as those of predictions are.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], processor: Any):
        self.counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        normalized: dict[str, str] = {}
        for row in rows:
            if new := [answer for answer in row["answers"] if answer not in normalized]:
                normalized |= zip(new, normalize(processor, new))
            for raw, question_id, question_type in zip(row["answers"], row["question_ids"], row["question_types"]):
                answer = normalized[raw]
                for key in self._keys(str(row["source"]), question_id, question_type, answer in ("yes", "no")):
                    self.counts[key][answer] += 1

    def answer(self, one: Prediction) -> str:
        """The most frequent answer, the first in the alphabet among equals; "" if there is none."""
        for key in self._keys(one.source, one.question_id, one.question_type, one.is_yes_no):
            if key in self.counts:
                return min(self.counts[key].items(), key=lambda item: (-item[1], item[0]))[0]
        return ""

    def accuracy(self, predictions: Iterable[Prediction]) -> float | None:
        """Fraction of questions that the most frequent answer answers right."""
        return mean(float(self.answer(one) == one.ground_truth) for one in predictions)

    @staticmethod
    def _keys(source: str, question_id: str, question_type: str, is_yes_no: bool) -> list[tuple[str, ...]]:
        form = "yes or no" if is_yes_no else "words"
        return [
            ("source", source, question_id),
            ("question_id", question_id),
            ("question_type", question_type, form),
            ("form", form),
        ]

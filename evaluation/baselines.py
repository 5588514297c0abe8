"""What can be answered without looking: the model shown the mean image, and each question's most frequent answer."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from ..images_traffic_vlm import to_rgb
from .metrics import mean
from .predict import Prediction, normalise


def mean_image(rows: Iterable[Mapping[str, Any]], processor: Any) -> Image.Image:
    """The mean of images, each brought to the size that the model sees.

    Raises:
        ValueError: no rows.
    """
    size = processor.image_processor.size
    total, count = np.zeros((size["height"], size["width"], 3)), 0
    for row in rows:
        total += np.asarray(to_rgb(row["image"]).resize((size["width"], size["height"])), dtype=np.float64)
        count += 1
    if not count:
        raise ValueError("the mean image needs at least one image")
    return Image.fromarray(np.rint(total / count).astype(np.uint8))


class Majority:
    """The most frequent answer to each question in training.

    Of its source; where that has not asked it, of any source, else of all questions of its kind, else of all.

    Args:
        rows: rows of a dataset; only their texts are read.
        processor: writes their answers as those of predictions are written.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], processor: Any):
        self.counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        written: dict[str, str] = {}
        for row in rows:
            new = [answer for answer in row["answers"] if answer not in written]
            if new:
                written |= zip(new, normalise(processor, new)[0])
            for given, fact, kind in zip(row["answers"], row["facts"], row["kinds"]):
                answer = written[given]
                for key in self._keys(str(row["source"]), fact, kind, answer in ("yes", "no")):
                    self.counts[key][answer] += 1

    def answer(self, one: Prediction) -> str:
        """The guess, of equal ones the first in the alphabet; "" where nothing of its form ever came up."""
        for key in self._keys(one.source, one.fact, one.kind, one.is_yes_no):
            if key in self.counts:
                return min(self.counts[key].items(), key=lambda item: (-item[1], item[0]))[0]
        return ""

    def share_right(self, predictions: Iterable[Prediction]) -> float | None:
        """The share of questions that the guess answers right."""
        return mean(float(self.answer(one) == one.answer) for one in predictions)

    @staticmethod
    def _keys(source: str, fact: str, kind: str, is_yes_no: bool) -> Sequence[tuple[str, ...]]:
        form = "yes or no" if is_yes_no else "words"
        return ("source", source, fact), ("fact", fact), ("kind", kind, form), ("form", form)

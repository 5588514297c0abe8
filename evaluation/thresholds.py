"""Thresholds: the P(yes) from which an answer is yes, and where it is not sure. Evaluation fits, serving uses them.

thresholds.json → thresholds ─┐
question → question type ─────┴→ threshold and band ── P(yes) → yes or no, sure or not

- Threshold: of 0.01, 0.02, ..., 0.99, all within one standard error of the best balanced accuracy are candidates, and
  the one closest to 0.5 is taken. With few questions the best one is chance.
- Band: the answers below and above it reach a target accuracy, which counts one more right and one more wrong answer
  than there are: a few right answers are not enough.
- The accuracy is for the rate of yes in the questions of the fit. Where yes is rarer, fewer answers yes are right.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..common.files import DataError
from ..data.grammar import question_type_of
from ..question_traffic_vlm import Rules
from . import MIN_ANSWERS


TARGET_ACCURACY = 0.9  # of answers outside the band
GRID = np.arange(1, 100) / 100


@dataclass(frozen=True)
class Threshold:
    """How P(yes) becomes an answer.

    Attributes:
        threshold: P(yes) from which the answer is yes.
        band: [low, high] with low <= threshold <= high: answers with P(yes) in it are not sure. None: all are sure.
    """

    threshold: float
    band: list[float] | None = None

    def is_unsure(self, p_yes: float) -> bool:
        """Whether P(yes) lies in the band."""
        return self.band is not None and self.band[0] <= p_yes <= self.band[1]


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of a model: the content of thresholds.json.

    Attributes:
        default: for questions of all other types, and for those that no template produces.
        question_types: one for each of some question types.
    """

    default: Threshold
    question_types: Mapping[str, Threshold] = field(default_factory=dict)

    def for_question(self, question: str) -> Threshold:
        """The threshold of a question, by its words."""
        return self.question_types.get(question_type_of(question) or "", self.default)


def load_thresholds(path: str | Path) -> Thresholds:
    """The thresholds of a file of scripts/evaluate.py, or of one written by hand: only thresholds are required.

    Raises:
        OSError: the file cannot be read.
        DataError: it is not valid JSON, or a field is missing or unknown. Values are not checked.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        types = {name: Threshold(**one) for name, one in content.pop("question_types", {}).items()}
        return Thresholds(Threshold(**content.pop("default")), types, **content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} has no valid thresholds: {error!r}") from error


def fit_thresholds(answers: Any) -> Thresholds | None:
    """A threshold for all yes/no questions, and one for each question type with enough of them.

    The type of a question is that of its words, as in serving, whatever the dataset calls it.

    Args:
        answers: the `DataFrame` of `predict`, best about unseen sources (see `report.rows_to_fit`).

    Returns:
        the thresholds; None with fewer than 10 yes or no in all.
    """
    answers = answers[answers["truth"].isin(["yes", "no"]) & answers["p_yes"].notna()]
    forms = answers["question"].map(Rules().form)  # "Is the road dry?" is asked as "Is the road wet?"
    is_turned = forms.map(lambda form: form.is_negated).astype(bool)
    p_yes, is_yes = answers["p_yes"].where(~is_turned, 1 - answers["p_yes"]), (answers["truth"] == "yes") ^ is_turned
    default = fit_threshold(p_yes, is_yes)
    if default is None:
        return None
    types = forms.map(lambda form: question_type_of(form.asked))
    fitted = {str(name): fit_threshold(members, is_yes[members.index]) for name, members in p_yes.groupby(types)}
    return Thresholds(default, {name: one for name, one in fitted.items() if one})


def fit_threshold(p_yes: Any, is_yes: Any, target_accuracy: float = TARGET_ACCURACY) -> Threshold | None:
    """The threshold of questions with these P(yes) and truths; None with fewer than 10 yes or no."""
    p, truth = np.asarray(p_yes, float), np.asarray(is_yes, bool)
    if min(truth.sum(), (~truth).sum()) < MIN_ANSWERS:
        return None
    threshold = _choose_threshold(np.sort(p[truth]), np.sort(p[~truth]))
    says_yes = p >= threshold
    below = _band_width(threshold - p[~says_yes], ~truth[~says_yes], target_accuracy)
    above = _band_width(p[says_yes] - threshold, truth[says_yes], target_accuracy)
    band = [round(max(0.0, threshold - below), 2), round(min(1.0, threshold + above), 2)]
    return Threshold(threshold, band if below or above else None)


def _choose_threshold(yes: np.ndarray, no: np.ndarray) -> float:
    """The threshold of GRID closest to 0.5 within one standard error of the best balanced accuracy."""
    sensitivity = 1 - np.searchsorted(yes, GRID) / len(yes)  # [99]
    specificity = np.searchsorted(no, GRID) / len(no)
    accuracy = (sensitivity + specificity) / 2
    best = int(accuracy.argmax())
    # One more right and one more wrong answer: otherwise the error of a perfect score would be 0.
    rates = [(rate[best] * len(x) + 1) / (len(x) + 2) for rate, x in ((sensitivity, yes), (specificity, no))]
    error = np.sqrt(sum(rate * (1 - rate) / len(x) for rate, x in zip(rates, (yes, no)))) / 2
    candidates = GRID[accuracy >= accuracy[best] - error]
    return float(candidates[np.abs(candidates - 0.5).argmin()])


def _band_width(distances: np.ndarray, is_right: np.ndarray, target_accuracy: float) -> float:
    """Width of the band on one side, in steps of 0.01; 1 if the target is never reached.

    Args:
        distances: of each answer on this side to the threshold.
        is_right: whether each answer is right.
    """
    for width in np.arange(100) / 100:
        # Answers at the end of a band belong to it; the tolerance is for rounding.
        outside = is_right[distances > width + 1e-9] if width else is_right
        if (outside.sum() + 1) / (len(outside) + 2) >= target_accuracy:
            return float(width)
    return 1.0

"""Thresholds: the P(yes) from which an answer is yes, and where it is not sure. Evaluation fits, serving uses them.

thresholds.json → thresholds ─┐
question → question type ─────┴→ threshold and band ── P(yes) → yes or no, sure or not

Threshold: balanced accuracy (the mean of the fractions of yes and of no that are answered right) is computed at 0.01,
0.02, ..., 0.99. Of all thresholds within one standard error of the best, the one closest to 0.5 is taken: with few
questions the best one is chance.

Band: below it the answers no, and above it the answers yes, reach a target accuracy. Each of the two accuracies counts
one more right and one more wrong answer than there are, so that a few right answers are not enough.

Precision and both accuracies hold where yes is as frequent as in the questions of the fit; where it is rarer, they are
lower for yes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.files import DataError
from ..data.grammar import question_type_of
from ..data.questions import QUESTION_TYPES
from . import MIN_ANSWERS


if TYPE_CHECKING:
    import pandas as pd  # serving only loads thresholds, without pandas


TARGET_ACCURACY = 0.9  # of answers outside the band
GRID = np.arange(1, 100) / 100


@dataclass(frozen=True, slots=True)
class Threshold:
    """How P(yes) becomes an answer, and what was measured of it on development questions.

    Attributes:
        threshold: P(yes) from which the answer is yes.
        band: (low, high) with low <= threshold <= high: answers with P(yes) in it are not sure. None: all are sure.
        precision: fraction of the answers yes that are right; None without such an answer, or if not measured.
        recall: fraction of the questions with the truth yes that are answered yes; None if not measured.
        yes, no: number of questions with this truth; None if not measured.

    Raises:
        ValueError: a value has the wrong type or is outside its range.
    """

    threshold: float
    band: tuple[float, float] | None = None
    precision: float | None = None
    recall: float | None = None
    yes: int | None = None
    no: int | None = None

    def __post_init__(self) -> None:
        _check_fraction("threshold", self.threshold)
        for name in ("precision", "recall"):
            if (value := getattr(self, name)) is not None:
                _check_fraction(name, value)
        if self.band is None:
            return
        if not isinstance(self.band, list | tuple) or len(self.band) != 2:
            raise ValueError(f"band must be [low, high] or null, got {self.band!r:.80}")
        for limit in self.band:
            _check_fraction("band", limit)
        if not self.band[0] <= self.threshold <= self.band[1]:
            raise ValueError(f"band must include the threshold {self.threshold}, got {self.band!r}")

    def is_unsure(self, p_yes: float) -> bool:
        """Whether P(yes) lies in the band."""
        return self.band is not None and self.band[0] <= p_yes <= self.band[1]


def _check_fraction(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:  # NaN too
        raise ValueError(f"{name} must be a number in 0..1, got {value!r:.80}")


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of a model: the content of thresholds.json.

    Attributes:
        default: for questions of all other types, and for those that no template produces.
        question_types: one for each of some question types.
        target_accuracy: that answers outside the bands have reached; None if not measured.
    """

    default: Threshold
    question_types: Mapping[str, Threshold] = field(default_factory=dict)
    target_accuracy: float | None = None

    def for_question(self, question: str) -> Threshold:
        """The threshold of a question, by its words."""
        return self.question_types.get(question_type_of(question) or "", self.default)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self)


def load_thresholds(path: str | Path) -> Thresholds:
    """The thresholds of a file of scripts/evaluate.py, or of one written by hand: only thresholds are required.

    Raises:
        DataError: the file cannot be read or is not valid JSON; a field or question type is missing or unknown; a
            value is outside its range. The message names the file and the value.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not valid JSON: {error}") from error
    try:
        known = _fields("the file", content)
        types = _fields("question_types", known.pop("question_types", {}))
        if unknown := [name for name in types if name not in QUESTION_TYPES]:
            raise ValueError(f"unknown question type {unknown[0]!r:.80}; known are {', '.join(QUESTION_TYPES)}")
        default = _read_threshold("default", known.pop("default", {}))
        return Thresholds(default, {name: _read_threshold(name, one) for name, one in types.items()}, **known)
    except (ValueError, TypeError) as error:  # TypeError: a field is missing or unknown
        raise DataError(f"{path}: {error}") from error


def _fields(name: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{name} must be an object, got {content!r:.80}")
    return dict(content)


def _read_threshold(name: str, content: Any) -> Threshold:
    fields = _fields(name, content)
    try:
        if isinstance(fields.get("band"), list):
            fields["band"] = tuple(fields["band"])
        return Threshold(**fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error


def fit_thresholds(answers: "pd.DataFrame", target_accuracy: float = TARGET_ACCURACY) -> Thresholds | None:
    """A threshold for all yes/no questions, and one for each question type that has enough of them.

    Questions count for the type that their words have, as in serving, whatever the dataset calls it.

    Args:
        answers: table of `predict`, of sources that the weights never saw: on those that they know, bands would be
            too narrow for the cameras of a user.

    Returns:
        the thresholds; None with fewer than 10 yes or no in all.
    """
    answers = answers[answers["truth"].isin(["yes", "no"]) & answers["p_yes"].notna()]
    default = fit_threshold(answers["p_yes"], answers["truth"] == "yes", target_accuracy)
    if default is None:
        return None
    types = answers["question"].map(question_type_of)
    fitted = {
        str(name): fit_threshold(members["p_yes"], members["truth"] == "yes", target_accuracy)
        for name, members in answers.groupby(types)
    }
    return Thresholds(default, {name: one for name, one in fitted.items() if one}, target_accuracy)


def fit_threshold(p_yes: Any, is_yes: Any, target_accuracy: float = TARGET_ACCURACY) -> Threshold | None:
    """The threshold of some questions; None with fewer than 10 yes or no.

    Args:
        p_yes, is_yes: P(yes) and truth of each question.
    """
    p, truth = np.asarray(p_yes, float), np.asarray(is_yes, bool)
    if min(truth.sum(), (~truth).sum()) < MIN_ANSWERS:
        return None
    threshold = _choose_threshold(np.sort(p[truth]), np.sort(p[~truth]))
    says_yes = p >= threshold
    below = _band_width(threshold - p[~says_yes], ~truth[~says_yes], target_accuracy)
    above = _band_width(p[says_yes] - threshold, truth[says_yes], target_accuracy)
    band = (round(max(0.0, threshold - below), 2), round(min(1.0, threshold + above), 2))
    return Threshold(
        threshold,
        band if below or above else None,
        precision=round(float(truth[says_yes].mean()), 4) if says_yes.any() else None,
        recall=round(float(says_yes[truth].mean()), 4),
        yes=int(truth.sum()),
        no=int((~truth).sum()),
    )


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
    """How far the band must reach to one side, in steps of 0.01; 1 if the target is never reached.

    Args:
        distances: of the answers on this side to the threshold.
        is_right: whether each of them is right.
    """
    for width in np.arange(100) / 100:
        # Answers at the end of a band belong to it; the tolerance is for rounding.
        outside = is_right[distances > width + 1e-9] if width else is_right
        if (outside.sum() + 1) / (len(outside) + 2) >= target_accuracy:
            return float(width)
    return 1.0

"""Fit operating points: for each question type a threshold on P(yes), and a band of answers that are not sure.

P(yes) and ground truth of a question type → threshold → band around it

Threshold: balanced accuracy (the mean of the fractions of yes and of no that are answered right) is computed at 0.01,
0.02, ..., 0.99. Of all thresholds within one standard error of the best, the one closest to 0.5 is taken: with few
questions the best one is chance.

Band: below it the answers no, and above it the answers yes, reach a target accuracy. Each of the two accuracies counts
one more right and one more wrong answer than there are, so that a few right answers are not enough.

Accuracies and precision depend on how often yes is true. The questions of scripts/make_dataset.py have about as many
yes as no; where yes is rarer, precision is lower.
"""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from ..data.question_types import question_type_of
from ..operating_points import OperatingPoint, OperatingPoints
from .predict import Prediction


MIN_ANSWERS = 10  # yes, and no, to fit an operating point
TARGET_ACCURACY = 0.9  # of answers outside the band
GRID = np.arange(1, 100) / 100


def fit_operating_points(
    predictions: Iterable[Prediction], target_accuracy: float = TARGET_ACCURACY
) -> OperatingPoints | None:
    """Fit an operating point to all yes/no questions, and one to each question type that has enough of them.

    Questions count for the type that their words have, as in serving, whatever the dataset calls it.

    Returns:
        the operating points; None with fewer than MIN_ANSWERS yes or no in all.
    """
    groups: dict[str | None, list[tuple[float, bool]]] = defaultdict(list)
    pairs = []
    for one in predictions:
        if one.is_yes_no:
            pairs.append((one.probability, one.answer == "yes"))
            groups[question_type_of(one.question)].append(pairs[-1])
    default = fit_operating_point(pairs, target_accuracy)
    if default is None:
        return None
    fitted = {name: fit_operating_point(groups[name], target_accuracy) for name in sorted(filter(None, groups))}
    return OperatingPoints(default, {name: point for name, point in fitted.items() if point}, target_accuracy)


def fit_operating_point(
    pairs: Iterable[tuple[float, bool]], target_accuracy: float = TARGET_ACCURACY
) -> OperatingPoint | None:
    """Fit an operating point to P(yes) and ground truth of some questions.

    Returns:
        the operating point; None with fewer than MIN_ANSWERS yes or no.
    """
    array = np.array(list(pairs), float).reshape(-1, 2)  # [N,2]
    p, is_yes = array[:, 0], array[:, 1] > 0
    yes, no = np.sort(p[is_yes]), np.sort(p[~is_yes])
    if min(len(yes), len(no)) < MIN_ANSWERS:
        return None
    threshold = _choose_threshold(yes, no)
    right, wrong = int((yes >= threshold).sum()), int((no >= threshold).sum())
    return OperatingPoint(
        threshold,
        _choose_band(yes, no, threshold, target_accuracy),
        precision=round(right / (right + wrong), 4) if right + wrong else None,
        recall=round(right / len(yes), 4),
        yes=len(yes),
        no=len(no),
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


def _choose_band(
    yes: np.ndarray, no: np.ndarray, threshold: float, target_accuracy: float
) -> tuple[float, float] | None:
    """The smallest band, in steps of 0.01; a side that never reaches the target reaches to 0 or 1."""
    below = _band_width(threshold - no[no < threshold], threshold - yes[yes < threshold], target_accuracy)
    above = _band_width(yes[yes >= threshold] - threshold, no[no >= threshold] - threshold, target_accuracy)
    if below == above == 0:
        return None
    return round(max(0.0, threshold - below), 2), round(min(1.0, threshold + above), 2)


def _band_width(right: np.ndarray, wrong: np.ndarray, target_accuracy: float) -> float:
    """How far the band reaches to one side; `right` and `wrong` are distances of its answers to the threshold."""
    for width in np.arange(100) / 100:
        # Answers at the end of a band belong to it; the tolerance is for rounding.
        counts = [int((values > width + 1e-9).sum()) if width else len(values) for values in (right, wrong)]
        if (counts[0] + 1) / (sum(counts) + 2) >= target_accuracy:
            return float(width)
    return 1.0

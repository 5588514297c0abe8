"""Metrics of predictions. Nothing here knows models or images.

predictions → balanced accuracy, accuracy, precision and recall of yes, exact match, mean recall, by group
P(yes) and ground truth → reliability, expected calibration error, best temperature
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import expit

from .predict import Prediction


BINS = 15  # of P(yes), for the calibration error
MIN_QUESTIONS = 10  # with an answer, for metrics of single questions or values that are not mere noise
TEMPERATURES = (0.05, 20.0)  # range of the search

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Score:
    """A metric and what it was computed from.

    Attributes:
        value: 0..1; None without anything to count.
        questions: number of questions counted.
        question_ids: number of different question ids counted, within a source; 0 for plain means over questions.
        left_out: number of question ids with too few of one of the two answers.
        error: standard error, as if question ids (or questions) were independent; None below two.
    """

    value: float | None
    questions: int
    question_ids: int = 0
    left_out: int = 0
    error: float | None = None


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def group(items: Iterable[T], *names: str) -> dict[str, list[T]]:
    """Group items by attributes; keys are their values ("camvid / presence"), sorted."""
    groups: dict[str, list[T]] = defaultdict(list)
    for item in items:
        groups[" / ".join(str(getattr(item, name)) for name in names)].append(item)
    return dict(sorted(groups.items()))


def balanced_accuracy(predictions: Iterable[Prediction], min_questions: int = 1) -> Score:
    """Mean over question ids of (accuracy where the truth is yes + accuracy where it is no) / 2.

    A question id covers all paraphrases of a question within a source. Question ids with fewer than `min_questions` of
    one of the two answers are left out, and so are questions with a ground truth in words. A model that sees no image
    scores 0.5, whatever the fraction of yes is.
    """
    ids: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: {"yes": [], "no": []})
    for one in predictions:
        if one.is_yes_no:
            ids[one.source, one.question_id][one.ground_truth].append(one.is_right)
    counted = [answers for answers in ids.values() if min(map(len, answers.values())) >= min_questions]
    rates = [sum(sum(right) / len(right) for right in answers.values()) / 2 for answers in counted]
    questions = sum(len(right) for answers in counted for right in answers.values())
    return Score(mean(rates), questions, len(counted), len(ids) - len(counted), _standard_error(rates))


def accuracy(predictions: Iterable[Prediction]) -> Score:
    """Fraction of predictions that are right."""
    right = [float(one.is_right) for one in predictions]
    return Score(mean(right), len(right), error=_standard_error(right))


def precision(predictions: Iterable[Prediction]) -> Score:
    """Fraction of the questions answered with yes whose ground truth is yes. It depends on the rate of yes."""
    return accuracy(one for one in predictions if one.is_yes_no and one.answer == "yes")


def recall(predictions: Iterable[Prediction]) -> Score:
    """Fraction of the questions with the ground truth yes that are answered with yes."""
    return accuracy(one for one in predictions if one.is_yes_no and one.ground_truth == "yes")


def exact_match(predictions: Iterable[Prediction]) -> Score:
    """Fraction of questions with a ground truth in words that are answered with exactly these words."""
    return accuracy(one for one in predictions if not one.is_yes_no)


def mean_recall(predictions: Iterable[Prediction]) -> Score:
    """Mean over question types of the mean recall of their values, of questions with a ground truth in words.

    The recall of a value ("rainy") is the fraction of the questions with this ground truth that are answered with it.
    So rare values count as much as frequent ones. Values with fewer than MIN_QUESTIONS questions are left out.
    """
    in_words = [one for one in predictions if not one.is_yes_no]
    recalls: dict[str, list[float | None]] = defaultdict(list)
    questions = 0
    for members in group(in_words, "question_type", "ground_truth").values():
        if len(members) >= MIN_QUESTIONS:
            recalls[members[0].question_type].append(exact_match(members).value)
            questions += len(members)
    return Score(mean(map(mean, recalls.values())), questions)


def _standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def by_group(
    metric: Callable[[list[Prediction]], Score], predictions: Iterable[Prediction], *names: str
) -> dict[str, Score]:
    """Compute a metric for each group; groups without a question for it are dropped."""
    scores = {name: metric(members) for name, members in group(predictions, *names).items()}
    return {name: score for name, score in scores.items() if score.value is not None or score.left_out}


def reliability(probabilities: Sequence[float], truths: Sequence[bool], bins: int = BINS) -> list[dict[str, Any]]:
    """Bin answers by P(yes). The last bin includes 1.

    Returns:
        for each bin "low", "high", "questions", "p_yes" (its mean) and "yes_rate" (fraction with the ground
        truth yes); the last two are None for an empty bin.
    """
    p, is_yes = np.asarray(probabilities, float), np.asarray(truths, float)
    indices = np.minimum((p * bins).astype(int), bins - 1)
    found = []
    for index in range(bins):
        inside = indices == index
        row: dict[str, Any] = {"low": index / bins, "high": (index + 1) / bins, "questions": int(inside.sum())}
        row |= {"p_yes": mean(p[inside].tolist()), "yes_rate": mean(is_yes[inside].tolist())}
        found.append(row)
    return found


def calibration_error(probabilities: Sequence[float], truths: Sequence[bool], bins: int = BINS) -> float | None:
    """Expected calibration error: mean over bins of |mean P(yes) - yes rate|, weighted by their questions."""
    if not len(probabilities):
        return None
    rows = [row for row in reliability(probabilities, truths, bins) if row["questions"]]
    return sum(row["questions"] * abs(row["p_yes"] - row["yes_rate"]) for row in rows) / len(probabilities)


def fit_temperature(margins: Sequence[float], truths: Sequence[bool]) -> float:
    """Fit the temperature in TEMPERATURES with the highest likelihood (https://arxiv.org/abs/1706.04599).

    The likelihood has one peak in 1/T. It lies at the lower limit if all answers are right, and at the upper limit if
    answers and ground truth are unrelated.

    Raises:
        ValueError: no margins, or another number of truths.
    """
    if not len(margins) or len(margins) != len(truths):
        raise ValueError(f"fit_temperature needs as many margins as truths, got {len(margins)} and {len(truths)}")
    signed = np.where(truths, margins, np.negative(margins))  # of the true answer

    def loss(log_temperature: float) -> float:
        return float(np.logaddexp(0, -signed / np.exp(log_temperature)).mean())

    found = minimize_scalar(loss, bounds=np.log(TEMPERATURES), method="bounded", options={"xatol": 1e-6})
    return float(np.exp(found.x))


def calibration_half(source: str, image_id: str) -> int:
    """Assign an image to half 0 or 1, the same in every run."""
    return hashlib.sha256(f"{source}/{image_id}".encode()).digest()[0] % 2


def calibration(predictions: Iterable[Prediction], temperature: float) -> dict[str, Any]:
    """Calibration of P(yes) at the model's temperature and at a fitted one; empty without yes/no questions.

    "fitted_temperature" is fitted on all images. "half_temperature" is fitted on one half and tested on the other:
    "ece_before" and "bins_before" are those of the other half at the model's temperature, "..._after" at the fitted.
    """
    yes_no = [one for one in predictions if one.is_yes_no and one.margin is not None]
    if not yes_no:
        return {}
    halves: tuple[list[Prediction], list[Prediction]] = ([], [])
    for one in yes_no:
        halves[calibration_half(one.source, one.image_id)].append(one)
    fitted, tested = halves
    best = fit_temperature(*_margins(yes_no))
    result: dict[str, Any] = {
        "temperature": temperature,
        "ece": calibration_error(*probabilities(yes_no)),
        "ece_by_source": {
            name: calibration_error(*probabilities(members)) for name, members in group(yes_no, "source").items()
        },
        "bins": reliability(*probabilities(yes_no)),
        "fitted_temperature": best,
        "at_limit": min(abs(best / limit - 1) for limit in TEMPERATURES) < 0.01,
        "half_temperature": None,
        "questions_fitted": len(fitted),
        "questions_judged": len(tested),
    }
    before: tuple[list[float], list[bool]] = ([], [])
    after = before
    if fitted and tested:
        result["half_temperature"] = fit_temperature(*_margins(fitted))
        margins, truths = _margins(tested)
        before, after = probabilities(tested), (expit(np.divide(margins, result["half_temperature"])).tolist(), truths)
    for name, pair in (("before", before), ("after", after)):
        result |= {f"ece_{name}": calibration_error(*pair), f"bins_{name}": reliability(*pair) if pair[0] else []}
    return result


def probabilities(predictions: Iterable[Prediction]) -> tuple[list[float], list[bool]]:
    """P(yes) and ground truth of the yes/no questions that were asked."""
    return _pairs(predictions, "p_yes")


def _margins(predictions: Iterable[Prediction]) -> tuple[list[float], list[bool]]:
    return _pairs(predictions, "margin")


def _pairs(predictions: Iterable[Prediction], name: str) -> tuple[list[float], list[bool]]:
    asked = [one for one in predictions if one.is_yes_no and one.margin is not None]
    return [getattr(one, name) for one in asked], [one.ground_truth == "yes" for one in asked]

"""Figures of predictions, each of which can be checked by hand on a few numbers.

    predictions → groups → balanced accuracy, exact match, calibration error
    margins and truths → temperature
    P(yes) of the wordings of a question → agreement

Nothing here knows of models or images.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import stdev
from typing import TypeVar

from .predict import Prediction


BINS = 15  # of P(yes), for the calibration error
TEMPERATURES = (0.05, 20.0)  # the range that a temperature is looked for in

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Score:
    """A figure and what it rests on.

    Attributes:
        value: 0..1; None where nothing could be counted.
        questions: that it was counted over.
        facts: different questions among them, within a source; 0 where it is not a mean over facts.
        left_out: facts that it cannot be counted for.
        error: standard error of the value, as if facts (or questions) were drawn independently; None below two.
    """

    value: float | None
    questions: int
    facts: int = 0
    left_out: int = 0
    error: float | None = None


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those values that are there."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def group(items: Iterable[T], *names: str) -> dict[str, list[T]]:
    """Items by the values of some of their attributes ("camvid / presence"), in alphabetical order."""
    groups: dict[str, list[T]] = defaultdict(list)
    for item in items:
        groups[" / ".join(str(getattr(item, name)) for name in names)].append(item)
    return dict(sorted(groups.items()))


def balanced_accuracy(predictions: Iterable[Prediction]) -> Score:
    """The mean over facts of (share right where the truth is yes + share right where it is no) / 2; words are ignored.

    A fact is one question in all its wordings, within a source. Those that have only one of the two truths are left
    out. Whoever knows the question but not the image stands at 0.5, whatever the share of yes is.
    """
    facts: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: {"yes": [], "no": []})
    for one in predictions:
        if one.is_yes_no:
            facts[one.source, one.fact][one.answer].append(one.is_right)
    counted = [truths for truths in facts.values() if all(truths.values())]
    rates = [sum(sum(right) / len(right) for right in truths.values()) / 2 for truths in counted]
    questions = sum(len(right) for truths in counted for right in truths.values())
    return Score(mean(rates), questions, len(counted), len(facts) - len(counted), standard_error(rates))


def accuracy(predictions: Iterable[Prediction]) -> Score:
    """The share of yes/no questions that are answered right."""
    return _share_right(one for one in predictions if one.is_yes_no)


def exact_match(predictions: Iterable[Prediction]) -> Score:
    """The share of questions with an answer in words that are answered with exactly these."""
    return _share_right(one for one in predictions if one.text is not None)


def _share_right(predictions: Iterable[Prediction]) -> Score:
    right = [float(one.is_right) for one in predictions]
    return Score(mean(right), len(right), error=standard_error(right))


def by_group(
    metric: Callable[[list[Prediction]], Score], predictions: Iterable[Prediction], *names: str
) -> dict[str, Score]:
    """A metric of each group of predictions, without groups that it cannot be counted for."""
    scores = {name: metric(members) for name, members in group(predictions, *names).items()}
    return {name: score for name, score in scores.items() if score.value is not None or score.left_out}


# Calibration


def yes_probability(margin: float, temperature: float) -> float:
    """P(yes) of a margin l_yes - l_no, as the model gives it at this temperature: the sigmoid of their ratio."""
    ratio = margin / temperature
    return 1 / (1 + math.exp(-ratio)) if ratio >= 0 else math.exp(ratio) / (1 + math.exp(ratio))


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers whose P(yes) lies in [low, high), or with high=1 in [low, 1]."""

    low: float
    high: float
    questions: int
    probability: float | None  # their mean P(yes)
    yes_rate: float | None  # the share whose truth is yes


def reliability(probabilities: Sequence[float], truths: Sequence[bool], bins: int = BINS) -> list[Bin]:
    """Answers by their P(yes), in bins of equal width."""
    members: list[list[int]] = [[] for _ in range(bins)]
    for i, probability in enumerate(probabilities):
        members[min(int(probability * bins), bins - 1)].append(i)
    return [
        Bin(
            number / bins,
            (number + 1) / bins,
            len(inside),
            mean(probabilities[i] for i in inside),
            mean(float(truths[i]) for i in inside),
        )
        for number, inside in enumerate(members)
    ]


def calibration_error(probabilities: Sequence[float], truths: Sequence[bool], bins: int = BINS) -> float | None:
    """Expected calibration error: |mean P(yes) - share of yes| of each bin, weighted by its share of the answers."""
    if not probabilities:
        return None
    gaps = [
        one.questions * abs(one.probability - one.yes_rate)
        for one in reliability(probabilities, truths, bins)
        if one.probability is not None and one.yes_rate is not None
    ]
    return sum(gaps) / len(probabilities)


def negative_log_likelihood(margins: Sequence[float], truths: Sequence[bool], temperature: float) -> float:
    """The mean of -log P(truth) at a temperature."""
    losses = []
    for margin, truth in zip(margins, truths):
        against = -margin / temperature if truth else margin / temperature
        losses.append(max(against, 0.0) + math.log1p(math.exp(-abs(against))))
    return sum(losses) / len(losses)


def fit_temperature(margins: Sequence[float], truths: Sequence[bool], tolerance: float = 1e-4) -> float:
    """The temperature in TEMPERATURES under which the truths are most likely (https://arxiv.org/abs/1706.04599).

    The likelihood has one peak in 1/T, so a golden section finds it. It lies at the lower end where every answer is
    right, and at the upper end where answers and truths have nothing to do with each other.

    Raises:
        ValueError: no margins, or another number of truths.
    """
    if not margins or len(margins) != len(truths):
        raise ValueError(f"a temperature is fitted to margins with truths, got {len(margins)} and {len(truths)}")
    ratio = (math.sqrt(5) - 1) / 2
    low, high = map(math.log, TEMPERATURES)

    def loss(point: float) -> float:
        return negative_log_likelihood(margins, truths, math.exp(point))

    left, right = high - ratio * (high - low), low + ratio * (high - low)
    left_loss, right_loss = loss(left), loss(right)
    while high - low > tolerance:
        if left_loss <= right_loss:
            high, right, right_loss = right, left, left_loss
            left = high - ratio * (high - low)
            left_loss = loss(left)
        else:
            low, left, left_loss = left, right, right_loss
            right = low + ratio * (high - low)
            right_loss = loss(right)
    return math.exp((low + high) / 2)


def half(source: str, image_id: str) -> int:
    """0 or 1: which half of the images this one belongs to, in every run the same."""
    return hashlib.sha256(f"{source}/{image_id}".encode()).digest()[0] % 2


# Agreement


@dataclass(frozen=True, slots=True)
class Agreement:
    """How alike answers are that should be equal.

    Attributes:
        same: share of pairs with the same answer, yes or no.
        change: mean absolute difference of P(yes) of a pair.
        pairs, questions: of wordings, and different questions that they are wordings of.
    """

    same: float | None
    change: float | None
    pairs: int
    questions: int


def agreement(wordings: Iterable[Sequence[float]]) -> Agreement:
    """Of P(yes) of the wordings of each question: pairs within a question compared with each other."""
    several = [probabilities for probabilities in wordings if len(probabilities) > 1]
    pairs = [pair for probabilities in several for pair in combinations(probabilities, 2)]
    return Agreement(
        mean(float((one >= 0.5) == (other >= 0.5)) for one, other in pairs),
        mean(abs(one - other) for one, other in pairs),
        len(pairs),
        len(several),
    )

"""Metrics of hand-made tables against closed forms and naive references, and the verdict on a training."""

import math
import random

import numpy as np
import pandas as pd
import pytest

from traffic_vlm.evaluation.compare import compare
from traffic_vlm.evaluation.metrics import (
    YES_NO,
    at_temperature,
    auc,
    balanced_accuracy,
    balanced_error,
    calibration_error,
    exact_match,
    mean_recall,
    none_if,
    of_small_objects,
    question_ids,
    reliability,
    right_if_there,
)
from traffic_vlm.evaluation.predict import kind_of_source
from traffic_vlm.evaluation.report import calibrate


COMMON = {"source": "a", "question_type": "presence", "question_id": "x", "question": "?", "answer": "yes"}
COMMON |= {"p_yes": math.nan, "margin": math.nan, "side": math.nan}


def table(rows: list[dict]) -> pd.DataFrame:
    """The columns of `predict` that metrics read; each question has an image of its own, unless it names one."""
    made = pd.DataFrame([COMMON | {"image_id": str(index)} | row for index, row in enumerate(rows)])
    return made.assign(kind=made["source"].map(kind_of_source), is_right=made["answer"] == made["truth"])


def asked(truth: str, right: int, count: int, question_id: str = "x", source: str = "a") -> list[dict]:
    """`count` yes/no questions with this truth, of which `right` are answered right."""
    wrong = {"yes": "no", "no": "yes"}[truth]
    row = {"source": source, "question_id": question_id, "truth": truth}
    return [row | {"answer": truth if i < right else wrong} for i in range(count)]


def in_words(question_type: str, truth: str, answer: str, count: int = 1) -> list[dict]:
    return [{"question_type": question_type, "truth": truth, "answer": answer}] * count


# Yes or no


def test_balanced_accuracy_by_hand():
    # Source a: x (15/20 + 8/10) / 2 = 0.775 and y (5/10 + 10/10) / 2 = 0.75, mean 0.7625; z has only 9 no.
    one = asked("yes", 15, 20) + asked("no", 8, 10) + asked("yes", 5, 10, "y") + asked("no", 10, 10, "y")
    one += asked("yes", 0, 30, "z") + asked("no", 0, 9, "z")
    # No question id of source b has 10 of each. All together: (9/12 + 6/10) / 2 = 0.675.
    other = asked("yes", 3, 6, "x", "b") + asked("yes", 6, 6, "y", "b")
    other += asked("no", 1, 5, "x", "b") + asked("no", 5, 5, "y", "b")
    both = table(one + other + in_words("color", "red", "blue", 30))
    assert balanced_accuracy(table(one)) == pytest.approx(0.7625)
    assert balanced_accuracy(both) == pytest.approx((0.7625 + 0.675) / 2) and question_ids(both) == 3
    assert right_if_there(both) == 29 / 72

    few = table(asked("yes", 2, 4) + asked("no", 1, 1, "y", "b"))
    assert balanced_accuracy(few) is balanced_error(few) is auc(few) is right_if_there(few) is None
    assert balanced_accuracy(few, even_few=True) == 0.75
    assert balanced_accuracy(few[few["truth"] == "yes"], even_few=True) is None


def test_the_error_of_the_balanced_accuracy_has_images_as_clusters():
    """20 yes and 20 no, half of each right: each of the two rates has a variance of 0.25 / 20."""
    rows = asked("yes", 10, 20) + asked("no", 10, 20)
    alone = balanced_error(table(rows))
    assert alone == pytest.approx(math.sqrt(2 * 0.25 / 20) / 2 * math.sqrt(40 / 39))
    pairs = [{**row, "image_id": str(i // 2)} for i, row in enumerate(rows)]  # two equal answers an image
    assert balanced_error(table(pairs)) == pytest.approx(alone * math.sqrt(2 * (20 / 19) / (40 / 39)))


@pytest.mark.parametrize("seed", range(5))
def test_a_model_without_the_image_scores_one_half(seed):
    """Its P(yes) is the same for all questions with one id, however many of these have the truth yes."""
    rng, rows = random.Random(seed), []
    for source, question_id in ("ax", "ay", "bx", "bz"):
        p_yes, share = rng.random(), rng.uniform(0.2, 0.8)
        row = {"source": source, "question_id": question_id, "p_yes": p_yes, "answer": "yes" if p_yes > 0.5 else "no"}
        rows += [row | {"truth": "yes" if rng.random() < share else "no"} for _ in range(100)]
    rows = table(rows)
    assert balanced_accuracy(rows) == pytest.approx(0.5) and auc(rows) == pytest.approx(0.5)


def test_auc_is_the_fraction_of_pairs_in_order():
    rng = random.Random(0)
    yes, no = ([rng.randrange(low, low + 8) / 16 for _ in range(30)] for low in (4, 0))  # with ties
    rows = [{"truth": truth, "p_yes": p} for truth, some in (("yes", yes), ("no", no)) for p in some]
    assert auc(table(rows)) == pytest.approx(np.mean([(a > b) + (a == b) / 2 for a in yes for b in no]))


def test_small_objects_have_an_auc_of_their_own():
    """10 small cars are less sure than the images without a car, 10 large ones are surer."""
    cars = [{"truth": "yes", "side": side, "p_yes": p} for side, p in ((0.04, 0.4), (0.5, 0.9)) for _ in range(10)]
    none = [{"truth": "no", "p_yes": 0.5}] * 10
    place = [{"truth": "yes", "side": 0.04, "p_yes": 0.9, "question_type": "place"}] * 10
    rows = table(cars + none + place)
    assert auc(of_small_objects(rows)) == YES_NO["AUC of small objects"](rows) == 0.0
    assert YES_NO["AUC of small objects"](rows[1:]) is None and auc(rows) == pytest.approx(2 / 3)


# Words


def test_metrics_of_words_by_hand():
    """red: 9 of 12 and blue: 5 of 10, mean 5/8. Left out: "gray" with 9 questions, and counts, of which one has 10."""
    red = in_words("color", "red", "red", 9) + in_words("color", "red", "left", 3)
    blue = in_words("color", "blue", "blue", 5) + in_words("color", "blue", "red", 5)
    gray, two = in_words("color", "gray", "none", 9), in_words("count", "2", "2", 10)
    rows = table(red + blue + gray + two + asked("yes", 0, 1))
    assert mean_recall(rows) == pytest.approx(5 / 8) and exact_match(rows) == 24 / 41
    assert none_if(rows, is_there=True) == 9 / 31  # a count is never "none"
    assert none_if(rows, is_there=False) is None
    absent = table(in_words("light_state", "none", "none") + in_words("light_state", "none", "red"))
    assert none_if(absent, is_there=False) == 0.5 and none_if(absent, is_there=True) is None
    assert mean_recall(absent) is None


@pytest.mark.parametrize(("blue", "recall"), [(0, None), (9, None), (10, pytest.approx(2 / 3))])
def test_a_mean_recall_needs_two_answers_besides_none(blue, recall):
    """A model that always answers "none" is right about 10 of 10 things that are not there, and about no red one."""
    rows = in_words("color", "none", "none", 10) + in_words("color", "red", "none", 10)
    assert mean_recall(table(rows + in_words("color", "blue", "blue", blue))) == recall


def test_a_table_has_no_balanced_accuracy_of_two_question_ids():
    rows = [row for name in "xyz" for row in asked("yes", 8, 10, name) + asked("no", 8, 10, name)]
    three, two = (table(some).assign(p_yes=0.5, is_right_without_image=True) for some in (rows, rows[:40]))
    for name in ("balanced accuracy", "±", "mean image", "AUC"):
        assert YES_NO[name](three) is not None and YES_NO[name](two) is None, name
    assert balanced_accuracy(two) == pytest.approx(YES_NO["balanced accuracy"](three)) == pytest.approx(0.8)


# Calibration


def probable(p_yes: list[float], truths: list[str]) -> pd.DataFrame:
    return table([{"truth": truth, "p_yes": p} for p, truth in zip(p_yes, truths)])


def test_calibration_error_by_hand():
    assert calibration_error(probable([0.25] * 4, ["yes", "no", "no", "no"])) == 0
    assert calibration_error(probable([1.0] * 4, ["yes", "yes", "no", "no"])) == 0.5
    # Two answers in the first of two bins, mean 0.2, none of them yes; one in the second, 0.9, a yes.
    assert calibration_error(probable([0.1, 0.3, 0.9], ["no", "no", "yes"]), bins=2) == pytest.approx(0.5 / 3)
    assert calibration_error(probable([0.9, math.nan], ["red", "yes"])) is None  # words, and a question with a problem
    assert list(reliability(probable([0.0, 0.5, 1.0], ["no"] * 3), bins=2)["questions"]) == [1, 2]  # 0.5 opens a bin


def drawn(temperature: float, source: str = "a") -> list[dict]:
    """Questions whose truth is yes as often as P(yes) at this temperature says."""
    rng = np.random.default_rng(0)
    logits = rng.uniform(-4, 4, 4000)
    truths = np.where(rng.random(4000) < 1 / (1 + np.exp(-logits)), "yes", "no")
    row = {"source": source, "p_yes": 0.5}
    return [row | {"truth": truth, "margin": temperature * x} for truth, x in zip(truths, logits)]


def test_a_temperature_is_fitted_to_unseen_sources():
    """Margins are four times too large on the unseen source, and right on the known one."""
    rows = at_temperature(table(drawn(1) + drawn(4, "unseen_city")), 1.0)
    found = calibrate(rows, 1.0)
    assert found["fitted_temperature"] == pytest.approx(4, rel=0.1)
    assert found["ece_before"] > 0.1 > 0.05 > found["ece_after"]
    assert sum(one["questions"] for one in found["bins_before"]) == 4000
    assert calibrate(rows[:4000], 1.0)["fitted_temperature"] == pytest.approx(1, rel=0.1)  # no unseen ones
    assert calibrate(rows.assign(truth="red"), 1.0) == {}


def test_kinds_of_sources():
    names = "synthetic camvid unseen/val runs/mine_too unseen_camera runs/unseen_city mine runs/mine".split()
    assert [kind_of_source(name, ["mine"]) for name in names] == ["rendered"] + ["known"] * 3 + ["unseen"] * 4


# The verdict


def after(right: int) -> pd.DataFrame:
    """40 yes and 40 no about 80 images: `right` of the yes and 30 of the no are answered right."""
    return table(asked("yes", right, 40) + asked("no", 30, 40))


def test_the_error_of_a_difference_is_that_of_the_questions_that_changed():
    share = 2 / 40
    error = math.sqrt(share * (1 - share) / 40) / 2 * math.sqrt(80 / 79)
    for right, words in ((22, f"+0.025 ± {error:.3f}"), (20, "+0.000 ± 0.000")):
        assert f"(difference {words}, 80 questions about 80 images)." in compare(after(20), after(right))


COLORS = table(in_words("color", "red", "red", 10) + in_words("color", "red", "blue", 40))
GUESS = table(asked("yes", 22, 40) + asked("no", 20, 40))
FEW = [table(asked("yes", right, 9) + asked("no", 9, 9)) for right in (0, 9)]


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (after(20), after(22), "No difference shown for the model: balanced accuracy 0.625 before, 0.650 after"),
        (after(20), after(20), "No difference shown for the model: "),
        (after(20), after(32), "Training made the model better: balanced accuracy 0.625 before, 0.775 after"),
        (after(20), after(8), "Training made the model WORSE: balanced accuracy 0.625 before, 0.475 after"),
        (GUESS, GUESS, "The answers of the model are no better than a guess: balanced accuracy 0.525 before"),
        (*FEW, "No difference shown for the model: balanced accuracy 0.500 before, 1.000 after, on too few questions"),
    ],
)
def test_a_verdict_needs_two_standard_errors(before, now, words):
    assert compare(before, now).startswith(words)


@pytest.mark.parametrize("other", [GUESS[:3], GUESS.assign(question="!")])
def test_only_answers_to_the_same_questions_are_compared(other):
    with pytest.raises(ValueError, match="the same questions"):
        compare(GUESS, other)
    assert compare(GUESS[:0], GUESS[:0]) is compare(COLORS, COLORS) is None  # nothing is yes or no

"""Metrics of tables of answers against closed forms and naive references, and the verdict on made-up tables."""

import math
import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traffic_vlm.data.ground_truth import NONE
from traffic_vlm.evaluation.compare import compare
from traffic_vlm.evaluation.metrics import (
    at_temperature,
    auc,
    balanced_accuracy,
    balanced_error,
    calibration_error,
    exact_match,
    fit_temperature,
    mean_recall,
    none_if,
    question_ids,
    reliability,
)
from traffic_vlm.evaluation.predict import kind_of_source
from traffic_vlm.evaluation.report import calibrate


def table(rows: list[dict]) -> pd.DataFrame:
    """A table as `predict` gives it; an answer yes has P(yes) 0.9, an answer no 0.1."""
    common = {"source": "a", "question_type": "presence", "category": "car", "question_id": "x", "question": "?"}
    made = []
    for index, row in enumerate(rows):
        margin = row.get("margin", {"yes": 2.2, "no": -2.2}.get(row["answer"], math.nan))
        row = {**common, "image_id": str(index), "margin": margin, "p_yes": 1 / (1 + math.exp(-margin)), **row}
        kind = kind_of_source(row["source"])
        made.append({**row, "kind": kind, "score": math.nan, "is_right": row["answer"] == row["truth"]})
    return pd.DataFrame(made)


def yes_no(question_id: str, truth: str, right: int, count: int, source: str = "a") -> list[dict]:
    """`count` questions with this truth, of which `right` are answered right."""
    other = {"yes": "no", "no": "yes"}[truth]
    asked = {"source": source, "question_id": question_id, "truth": truth}
    return [{**asked, "answer": truth if i < right else other} for i in range(count)]


def words(question_type: str, truth: str, answer: str, count: int = 1) -> list[dict]:
    return [{"question_type": question_type, "truth": truth, "answer": answer}] * count


# Balanced accuracy


BY_HAND = [  # source a: x (15/20 + 8/10) / 2 = 0.775, y (5/10 + 10/10) / 2 = 0.75, mean 0.7625
    *yes_no("x", "yes", 15, 20) + yes_no("x", "no", 8, 10),
    *yes_no("y", "yes", 5, 10) + yes_no("y", "no", 10, 10),
    *yes_no("few", "yes", 0, 30) + yes_no("few", "no", 0, 9),  # 9 no: left out
]
OTHER = [  # source b has no question id with 10 of each: a single question, (9/12 + 6/10) / 2 = 0.675
    *yes_no("x", "yes", 3, 6, "b") + yes_no("y", "yes", 6, 6, "b"),
    *yes_no("x", "no", 1, 5, "b") + yes_no("y", "no", 5, 5, "b"),
]


def test_balanced_accuracy_by_hand():
    assert balanced_accuracy(table(BY_HAND)) == pytest.approx(0.7625)
    both = table([*BY_HAND, *OTHER, *words("color", "red", "blue", 30)])
    assert balanced_accuracy(both) == pytest.approx((0.7625 + 0.675) / 2)
    assert question_ids(both) == 3
    small = table(yes_no("x", "yes", 2, 4, "b") + yes_no("y", "no", 1, 1, "c"))
    assert balanced_accuracy(small) is None and auc(small) is None and balanced_error(small) is None
    assert balanced_accuracy(small, even_few=True) == 0.75
    assert balanced_accuracy(small[:4], even_few=True) is None  # no no


def test_the_error_of_the_balanced_accuracy_has_images_as_clusters():
    """20 yes and 20 no, half of each right: independent, each rate has a variance of 0.25 / 20."""
    rows = yes_no("x", "yes", 10, 20) + yes_no("x", "no", 10, 20)
    alone = balanced_error(table(rows))
    assert alone == pytest.approx(math.sqrt(2 * 0.25 / 20) / 2 * math.sqrt(40 / 39))
    pairs = [{**row, "image_id": str(i // 2)} for i, row in enumerate(rows)]  # equal answers share an image
    assert balanced_error(table(pairs)) == pytest.approx(alone * math.sqrt(2 * (20 / 19) / (40 / 39)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.booleans()), max_size=200), st.data())
def test_a_model_without_the_image_scores_one_half(asked, data):
    guess = {(s, q): data.draw(st.sampled_from(["yes", "no"])) for s in "ab" for q in "xyz"}
    rows = [
        {"source": s, "question_id": q, "truth": "yes" if is_yes else "no", "answer": guess[s, q]}
        for s, q, is_yes in asked + [("a", "x", True), ("a", "x", False), ("b", "y", True), ("b", "y", False)] * 10
    ]
    rows = table(rows)
    counts = rows.groupby(["source", "question_id"])["truth"].agg(lambda x: min((x == "yes").sum(), (x == "no").sum()))
    enough = counts[counts >= 10].index
    kept = rows[[pair in enough for pair in zip(rows["source"], rows["question_id"])]]
    assert balanced_accuracy(kept) == pytest.approx(0.5) and auc(kept) == pytest.approx(0.5)


def test_auc_against_all_pairs():
    rng = random.Random(0)
    p, is_yes = [rng.randrange(8) / 8 for _ in range(60)], [rng.random() < 0.4 for _ in range(60)]
    pairs = [(a > b) + (a == b) / 2 for a, yes in zip(p, is_yes) if yes for b, other in zip(p, is_yes) if not other]
    rows = [{"truth": "yes" if yes else "no", "answer": "yes", "p_yes": x} for x, yes in zip(p, is_yes)]
    assert auc(table(rows)) == pytest.approx(np.mean(pairs))  # one question id of one source


# Words


def test_metrics_of_words_by_hand():
    """red: 9 of 12 and blue: 5 of 10, mean 5/8; "2": 10 of 10; mean 13/16. "gray" has 9 questions."""
    rows = words("color", "red", "red", 9) + words("color", "red", "left", 3) + words("color", "blue", "blue", 5)
    rows += words("color", "blue", "red", 5) + words("color", "gray", "none", 9) + words("count", "2", "2", 10)
    rows = table([*rows, *yes_no("x", "yes", 0, 1)])
    assert mean_recall(rows) == pytest.approx(13 / 16) and exact_match(rows) == 24 / 41
    assert none_if(rows, is_there=True) == 9 / 31  # a count is never "none"
    assert none_if(rows, is_there=False) is None
    absent = table(
        words("light_state", NONE, NONE) + words("light_state", NONE, "red") + words("weather", "dry", "dry")
    )
    assert (none_if(absent, is_there=False), none_if(absent, is_there=True)) == (0.5, None)
    assert mean_recall(absent) is None


# Calibration


def probable(p_yes: list[float], is_yes: list[bool], **fields: str) -> pd.DataFrame:
    rows = [{"truth": "yes" if yes else "no", "answer": "yes", "p_yes": p, **fields} for p, yes in zip(p_yes, is_yes)]
    return table(rows)


def test_calibration_error_by_hand():
    assert calibration_error(probable([0.25] * 4, [True, False, False, False])) == 0
    assert calibration_error(probable([1.0] * 4, [True, True, False, False])) == 0.5
    # Two answers in the first of two bins, mean 0.2, none of them yes; one in the second, 0.9, a yes.
    assert calibration_error(probable([0.1, 0.3, 0.9], [False, False, True]), bins=2) == pytest.approx(0.5 / 3)
    assert calibration_error(table(words("color", "red", "red"))) is None
    bins = reliability(probable([0.0, 0.5, 1.0], [False, True, True]), bins=2)
    assert list(bins["questions"]) == [1, 2]  # 0.5 opens a bin, 1.0 belongs to the last
    assert bins["yes_rate"][1] == 1.0


def with_margins(margins: list[float], is_yes: list[bool], source: str = "a") -> pd.DataFrame:
    truths = ["yes" if yes else "no" for yes in is_yes]
    return table([{"truth": t, "answer": "yes", "margin": m, "source": source} for m, t in zip(margins, truths)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_a_planted_temperature_is_found(temperature):
    margins, truths = [], []
    for margin in np.linspace(-4, 4, 17):
        count = round(400 / (1 + math.exp(-margin / temperature)))
        margins += [float(margin)] * 400
        truths += [True] * count + [False] * (400 - count)
    rows = with_margins(margins, truths)
    assert fit_temperature(rows) == pytest.approx(temperature, rel=0.01)
    assert calibration_error(at_temperature(rows, temperature)) < 0.01


def test_a_temperature_is_fitted_to_unseen_sources_and_tested_on_other_images():
    """Margins are four times too large on the unseen source, and right on the known one."""
    rng = random.Random(0)
    parts = []
    for source, factor in (("known", 1), ("unseen_city", 4)):
        margins = [rng.uniform(-3, 3) for _ in range(2000)]
        is_yes = [rng.random() < 1 / (1 + math.exp(-margin)) for margin in margins]
        parts.append(with_margins([factor * margin for margin in margins], is_yes, source))
    rows = pd.concat(parts, ignore_index=True)
    found = calibrate(rows, 1.0)
    assert found["fitted_on"] == ["unseen_city"] and found["half_temperature"] == pytest.approx(4, rel=0.2)
    assert found["ece_before"] > 0.1 > 0.05 > found["ece_after"]
    assert found["questions_fitted"] + found["questions_tested"] == 2000
    assert calibrate(parts[0], 1.0)["fitted_temperature"] == pytest.approx(1, rel=0.1)
    assert calibrate(rows[:1], 1.0)["half_temperature"] is None
    assert calibrate(table(words("color", "red", "red")), 1.0) == {}


def test_kinds_of_sources():
    names = ["synthetic", "camvid", "unseen_camera", "runs/unseen_city", "mine", "unseen/val"]
    assert [kind_of_source(name) for name in names] == ["rendered", "known", "unseen", "unseen", "known", "known"]
    assert kind_of_source("mine", ["mine"]) == kind_of_source("runs/mine", ["mine"]) == "unseen"


# The verdict


def changed(rows: list[dict], truth: str, right: int) -> pd.DataFrame:
    """The table of `rows`, of which the first `right` with this truth are answered right, and the others wrong."""
    others = iter(range(len(rows)))
    flipped = {"yes": "no", "no": "yes"}[truth]
    return table(
        [{**r, "answer": truth if next(others) < right else flipped} if r["truth"] == truth else r for r in rows]
    )


def test_a_difference_within_two_standard_errors_is_not_shown():
    """40 yes and 40 no about 80 images: d answers more right change the balanced accuracy by d / 80."""
    rows = yes_no("x", "yes", 20, 40) + yes_no("x", "no", 30, 40)
    few, many, worse = (compare(table(rows), changed(rows, "yes", 20 + d)) for d in (2, 12, -12))
    assert few.after - few.before == pytest.approx(2 / 80) and (few.questions, few.images) == (80, 80)
    share = 2 / 40  # of the yes that changed: the variance of a yes is share × (1 - share)
    assert few.error == pytest.approx(math.sqrt(share * (1 - share) / 40) / 2 * math.sqrt(80 / 79))
    assert few.verdict().startswith(
        "No difference shown for the model: balanced accuracy 0.625 before, 0.650 after (difference +0.025 ± 0.017, 80"
    )
    assert many.verdict("it").startswith("Training made it better: balanced accuracy 0.625 before, 0.775 after")
    assert "WORSE" in worse.verdict() and "started from are better" in worse.verdict()
    assert not compare(table(rows), table(rows)).is_shown  # error and difference are 0
    guess = table(yes_no("x", "yes", 22, 40) + yes_no("x", "no", 20, 40))
    assert "no better than a guess: balanced accuracy 0.525 before, 0.525 after" in compare(guess, guess).verdict()


def test_few_questions_tell_nothing():
    rows = yes_no("x", "yes", 0, 9) + yes_no("x", "no", 9, 9)
    found = compare(table(rows), changed(rows, "yes", 9))
    assert not found.is_shown and "0.500 before, 1.000 after, on too few questions to tell (18)" in found.verdict()
    assert compare(table(rows)[:0], table(rows)[:0]) is None


def test_answers_in_words_are_compared_without_yes_or_no():
    before = table(words("color", "red", "blue", 40) + words("color", "red", "red", 10))
    after = table(words("color", "red", "red", 50))
    found = compare(before, after)
    assert (found.metric, found.before, found.after, found.is_shown) == ("exact match", pytest.approx(0.2), 1.0, True)
    with pytest.raises(ValueError, match="the same questions"):
        compare(before, after[:3])
    with pytest.raises(ValueError, match="the same questions"):
        compare(before, after.assign(question="!"))

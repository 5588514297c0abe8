"""Thresholds: the question type of a text, thresholds.json, the fit against closed forms, and answers."""

import json
import pickle
import random
from dataclasses import replace

import pandas as pd
import pytest
from PIL import Image

from tiny import yes_no_model
from traffic_vlm.data.ground_truth import GroundTruth
from traffic_vlm.data.question_types import question_type_of
from traffic_vlm.data.questions import QUESTION_TYPES, enumerate_questions
from traffic_vlm.data.scene import SCENE_ATTRIBUTES
from traffic_vlm.data.synthetic import render
from traffic_vlm.data.templates import paraphrases_of
from traffic_vlm.evaluation.thresholds import Threshold, Thresholds, fit_threshold, fit_thresholds, load_thresholds
from traffic_vlm.files import DataError
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline, answer_text


def test_every_question_of_the_grammar_has_its_type():
    """Two paraphrases of each question that may be asked about some scenes."""
    seen = set()
    for seed in range(16):
        scene = render(seed)[1]
        more = {name: random.Random(seed).choice(values) for name, values in SCENE_ATTRIBUTES.items()}
        for truth in enumerate_questions(GroundTruth(replace(scene, scene_attributes=more | scene.scene_attributes))):
            seen.add(truth.question_type)
            for text in random.Random(seed).sample(paraphrases_of(truth.question_id), 2):
                assert question_type_of(text) == truth.question_type, (text, truth.question_id)
    assert seen == set(QUESTION_TYPES)


def test_the_type_of_a_free_question():
    for question in ("Is the bus late?", "Is there a bus and a car?", ""):
        assert question_type_of(question) is None
    assert question_type_of("Are there more than 7 cars?") == "count"


# The file


THRESHOLDS = Thresholds(
    Threshold(0.5),
    {"presence": Threshold(0.3, (0.2, 0.6), 0.8, 0.9, 50, 60), "count": Threshold(1)},
    0.9,
)


def test_a_file_is_read_as_it_was_written(tmp_path):
    assert pickle.loads(pickle.dumps(THRESHOLDS)) == THRESHOLDS  # Ray sends it to other machines
    (tmp_path / "a.json").write_text(json.dumps(THRESHOLDS.to_dict()))
    thresholds = load_thresholds(tmp_path / "a.json")
    assert thresholds == THRESHOLDS
    assert thresholds.for_question("Is there a bus?").threshold == 0.3
    assert (
        thresholds.for_question("Is there a bus on the left?")
        is thresholds.for_question("Will it rain?")
        is thresholds.default
    )
    (tmp_path / "a.json").write_text('{"default": {"threshold": 0.4}}')
    assert load_thresholds(tmp_path / "a.json") == Thresholds(Threshold(0.4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not valid JSON"),
        ([1], "the file must be an object, got [1]"),
        ({}, "default: Threshold.__init__() missing 1 required positional argument: 'threshold'"),
        ({"default": {"threshold": 1.5}}, "default: threshold must be a number in 0..1, got 1.5"),
        ('{"default": {"threshold": NaN}}', "got nan"),
        ({"default": {"threshold": 0.5, "recall": 2}}, "recall must be a number in 0..1, got 2"),
        ({"default": {"threshold": 0.5, "band": 0.5}}, "band must be [low, high] or null, got 0.5"),
        ({"default": {"threshold": 0.5, "band": [0.6, 0.7]}}, "band must include the threshold 0.5, got (0.6, 0.7)"),
        (
            {"default": {"threshold": 0.5, "margin": 1}},
            "default: Threshold.__init__() got an unexpected keyword argument 'margin'",
        ),
        ({"default": {"threshold": 0.5}, "question_types": {"smell": {}}}, "unknown question type 'smell'; known are"),
        ({"default": {"threshold": 0.5}, "question_types": {"count": {"threshold": 7}}}, "count: threshold must be"),
    ],
)
def test_an_invalid_file_is_an_error_with_file_and_value(tmp_path, content, message):
    path = tmp_path / "thresholds.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError) as caught:
        load_thresholds(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


# The fit


def fit(yes: list[float], no: list[float], target_accuracy: float = 0.9) -> Threshold | None:
    return fit_threshold(yes + no, [True] * len(yes) + [False] * len(no), target_accuracy)


def test_separate_answers_have_no_band():
    assert fit([0.9] * 20, [0.1] * 30) == Threshold(0.5, None, 1.0, 1.0, 20, 30)
    # The threshold closest to 0.5 that separates them.
    assert fit([0.9] * 20, [0.7] * 20).threshold == 0.71
    assert fit([0.3] * 20, [0.1] * 20).threshold == 0.3


def test_precision_recall_and_band_by_hand():
    """Half of the answers between 0.4 and 0.6 are wrong, all others are right."""
    yes, no = [0.9] * 60 + [0.55] * 20 + [0.45] * 20, [0.1] * 60 + [0.55] * 20 + [0.45] * 20
    fitted = fit(yes, no)
    assert fitted.threshold == 0.5
    assert (fitted.precision, fitted.recall) == (0.8, 0.8)  # 80 right of 100, and 80 of 100 found
    assert fitted.band == (0.45, 0.55)  # the smallest one that includes these answers
    assert fitted.is_unsure(0.45) and fitted.is_unsure(0.55) and not fitted.is_unsure(0.56)
    assert fit(yes, no, target_accuracy=0.75).band is None
    # 60 of 60 counts as 61 of 62.
    assert fit(yes, no, target_accuracy=61 / 62).band == (0.45, 0.55)
    assert fit(yes, no, target_accuracy=0.99).band == (0.0, 1.0)


def test_a_band_can_be_on_one_side():
    """Answers no are right, answers yes are right from 0.8."""
    fitted = fit([0.9] * 30 + [0.6] * 10, [0.1] * 100 + [0.6] * 10)
    assert fitted.band == (fitted.threshold, 0.6)


def test_few_questions_move_no_threshold_and_prove_no_accuracy():
    assert fit([0.9] * 9, [0.1] * 100) is None and fit([], []) is None
    # 0.9 is the best threshold, by one question of ten: within one standard error of 0.5.
    few = fit([0.95] * 10, [0.1] * 9 + [0.8])
    many = fit([0.95] * 1000, [0.1] * 900 + [0.8] * 100)
    assert (few.threshold, many.threshold) == (0.5, 0.81)
    # Random answers: nothing is sure.
    rng = random.Random(0)
    assert fit(*([rng.random() for _ in range(200)] for _ in range(2))).band == (0.0, 1.0)


def test_thresholds_are_fitted_by_the_words_of_the_questions():
    bus, red, other = "Is there a bus?", "Is the traffic light red?", "Will it rain?"
    asked = [(bus, "yes" if i % 2 else "no", 0.4 if i % 2 else 0.2) for i in range(40)]
    asked += [(red, "yes" if i % 2 else "no", 0.9) for i in range(18)]  # 9 of each
    asked += [(other, "yes" if i % 2 else "no", 0.9 if i % 2 else 0.1) for i in range(40)]
    asked += [("What is ahead?", "a bus", 0.1), (bus, "yes", None)]  # in words, and a question with a problem
    answers = pd.DataFrame(asked, columns=["question", "truth", "p_yes"])
    thresholds = fit_thresholds(answers)
    assert list(thresholds.question_types) == ["presence"] and thresholds.question_types["presence"].threshold == 0.4
    assert (thresholds.default.yes, thresholds.default.no, thresholds.target_accuracy) == (49, 49, 0.9)
    assert thresholds.for_question(red) is thresholds.for_question(other) is thresholds.default
    assert fit_thresholds(answers[-2:]) is None


# Answers


def test_the_pipeline_uses_the_threshold_of_the_type(processor):
    pipe = TrafficVLMPipeline(model=yes_no_model(), processor=processor, device="cpu")
    image, questions = Image.new("RGB", (64, 48), "gray"), ["Is there a car?", "Is it raining?"]
    plain = pipe(image, questions)
    p = plain[0]["p_yes"]
    assert 0 < p < 1 and all("not_sure" not in item for item in plain)
    for threshold, band, text, not_sure in ((p, None, "yes", False), (1.0, (p, 1.0), "no", True)):
        thresholds = Thresholds(Threshold(0.5), {"presence": Threshold(threshold, band)})
        car, raining = pipe(image, questions, thresholds=thresholds)
        score = p if text == "yes" else 1 - p
        assert car == plain[0] | {"answer": text, "score": score, "not_sure": not_sure}
        assert answer_text(car).endswith("not sure") == not_sure
        assert raining == plain[1] | {"not_sure": False}  # the default is 0.5

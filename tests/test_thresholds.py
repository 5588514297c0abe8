"""Thresholds: question types of texts, thresholds.json, the fit by hand, and what the pipeline makes of them."""

import json
import pickle
import random
from dataclasses import asdict, replace

import pandas as pd
import pytest
from PIL import Image
from truths import enumerate_questions

from tiny import yes_no_model
from traffic_vlm.common.answers import answer_text
from traffic_vlm.common.files import DataError
from traffic_vlm.data.grammar import TYPES, paraphrases_of, question_type_of
from traffic_vlm.data.scene import SCENE_ATTRIBUTES
from traffic_vlm.data.synthetic import render
from traffic_vlm.data.truth import GroundTruth
from traffic_vlm.evaluation.thresholds import Threshold, Thresholds, fit_threshold, fit_thresholds, load_thresholds
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline


def test_every_question_of_the_grammar_has_its_type():
    """Two paraphrases of each question that may be asked about some scenes."""
    seen = set()
    for seed in range(12):
        scene, rng = render(seed)[1], random.Random(seed)
        more = {name: rng.choice(values) for name, values in SCENE_ATTRIBUTES.items()}
        for truth in enumerate_questions(GroundTruth(replace(scene, scene_attributes=more | scene.scene_attributes))):
            seen.add(truth.question_type)
            for text in rng.sample(paraphrases_of(truth.question_id), 2):
                assert question_type_of(text) == truth.question_type, (text, truth.question_id)
    assert seen == set(TYPES)
    assert question_type_of("Are there more than 7 cars?") == "count"
    assert not any(map(question_type_of, ("Is the bus late?", "Is there a bus and a car?", "")))


# thresholds.json


def test_a_file_is_read_as_it_was_written(tmp_path):
    presence = Threshold(0.3, [0.2, 0.6])
    written, path = Thresholds(Threshold(0.5), {"presence": presence}), tmp_path / "a.json"
    path.write_text(json.dumps(asdict(written)))
    read = load_thresholds(path)
    assert read == written == pickle.loads(pickle.dumps(written))  # Ray sends it to other machines
    assert read.for_question("Is there a bus?") == presence
    assert read.for_question("Is there a bus on the left?") is read.for_question("Will it rain?") is read.default
    path.write_text('{"default": {"threshold": 0.4}}')  # as people write it
    assert load_thresholds(path) == Thresholds(Threshold(0.4))


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"question_types": {}}', '{"default": {"threshold": 0.5, "margin": 1}}']
)
def test_an_invalid_file_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "thresholds.json"
    path.write_text(content)
    with pytest.raises(DataError, match=f"{path} has no valid thresholds"):
        load_thresholds(path)


# The fit


def fit(yes: list[float], no: list[float], target_accuracy: float = 0.9) -> Threshold | None:
    return fit_threshold(yes + no, [True] * len(yes) + [False] * len(no), target_accuracy)


def test_the_threshold_that_separates_answers_is_the_one_closest_to_one_half():
    assert fit([0.9] * 20, [0.1] * 30) == Threshold(0.5)
    assert fit([0.9] * 20, [0.7] * 20).threshold == 0.71
    assert fit([0.3] * 20, [0.1] * 20).threshold == 0.3


def test_a_threshold_that_is_better_by_chance_is_not_taken():
    """0.81 is better than 0.5 by one no of ten, which is within a standard error; by 100 of 1,000, it is not."""
    assert fit([0.95] * 10, [0.1] * 9 + [0.8]).threshold == 0.5
    assert fit([0.95] * 1000, [0.1] * 900 + [0.8] * 100).threshold == 0.81
    assert fit([0.9] * 9, [0.1] * 100) is fit([0.9] * 100, [0.1] * 9) is None


def test_a_band_by_hand():
    """Half of the answers between 0.4 and 0.6 are wrong, all others are right."""
    yes, no = [0.9] * 60 + [0.55] * 20 + [0.45] * 20, [0.1] * 60 + [0.55] * 20 + [0.45] * 20
    fitted = fit(yes, no)
    assert fitted == Threshold(0.5, [0.45, 0.55])  # the smallest band that includes these answers
    assert [fitted.is_unsure(p) for p in (0.44, 0.45, 0.55, 0.56)] == [False, True, True, False]
    assert fit(yes, no, target_accuracy=0.75).band is None
    assert fit(yes, no, target_accuracy=61 / 62).band == [0.45, 0.55]  # 60 right of 60 count as 61 of 62
    assert fit(yes, no, target_accuracy=0.99).band == [0.0, 1.0]
    one_sided = fit([0.9] * 30 + [0.6] * 10, [0.1] * 100 + [0.6] * 10)  # all answers no are right
    assert one_sided.band == [one_sided.threshold, 0.6]


def test_thresholds_are_fitted_by_the_words_of_the_questions():
    bus, red, other = "Is there a bus?", "Is the traffic light red?", "Will it rain?"
    asked = [(bus, "yes", 0.4), (bus, "no", 0.2)] * 20 + [(red, "yes", 0.9), (red, "no", 0.9)] * 9
    asked += [(other, "yes", 0.9), (other, "no", 0.1)] * 20
    asked += [("What is ahead?", "a bus", 0.1), (bus, "yes", None)]  # in words, and a question with a problem
    answers = pd.DataFrame(asked, columns=["question", "truth", "p_yes"])
    thresholds = fit_thresholds(answers)
    assert thresholds.question_types == {"presence": fit([0.4] * 20, [0.2] * 20)}
    assert thresholds.default == fit([0.4] * 20 + [0.9] * 29, [0.2] * 20 + [0.9] * 9 + [0.1] * 20)
    assert fit_thresholds(answers[-2:]) is None
    dry = pd.DataFrame({"question": "Is the road dry?", "p_yes": [0.9, 0.65] * 20, "truth": ["yes", "no"] * 20})
    assert 0.1 < fit_thresholds(dry).for_question("Is the road wet?").threshold <= 0.35  # this is asked


# Answers


def test_the_pipeline_uses_the_threshold_of_the_type(processor):
    pipe = TrafficVLMPipeline(model=yes_no_model(), processor=processor, device="cpu")
    image, questions = Image.new("RGB", (64, 48), "gray"), ["Is there a car?", "Is it raining?"]
    plain = pipe(image, questions)
    p = plain[0]["p_yes"]
    assert 0 < p < 1 and all("not_sure" not in item for item in plain)
    for threshold, answer, score in ((Threshold(p), "yes", p), (Threshold(1.0, band=[p, 1.0]), "no", 1 - p)):
        car, raining = pipe(image, questions, thresholds=Thresholds(Threshold(0.5), {"presence": threshold}))
        assert car == plain[0] | {"answer": answer, "score": score, "not_sure": threshold.band is not None}
        assert answer_text(car).endswith("not sure") == car["not_sure"]
        assert raining == plain[1] | {"not_sure": False}  # the default is 0.5

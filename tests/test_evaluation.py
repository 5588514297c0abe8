"""Evaluation: metrics against closed forms, predictions against the pipeline, the script from end to end."""

import json
import math
import random
import shutil
import types
from dataclasses import replace

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tiny import ROOT, save_folder, tiny_model, yes_no_model
from traffic_vlm.data.dataset import FEATURES, make_row, synthetic_rows
from traffic_vlm.data.folders import load_rows
from traffic_vlm.data.questions import Question
from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.data.templates import paraphrases_of
from traffic_vlm.evaluation.baselines import Majority, mean_image
from traffic_vlm.evaluation.grounding import (
    GroundedQuestion,
    grounded_questions,
    patches_in_boxes,
    score_map,
    score_pointing,
    word_maps,
)
from traffic_vlm.evaluation.markdown import to_markdown
from traffic_vlm.evaluation.metrics import (
    TEMPERATURES,
    accuracy,
    balanced_accuracy,
    by_group,
    calibration,
    calibration_error,
    calibration_half,
    exact_match,
    fit_temperature,
    mean_recall,
    precision,
    recall,
    reliability,
)
from traffic_vlm.evaluation.predict import Prediction, normalize, perplexity, predict
from traffic_vlm.evaluation.report import Options, evaluate_model, quick_metrics
from traffic_vlm.evaluation.robustness import agreement, corruptions, paraphrase, paraphrase_agreement
from traffic_vlm.evaluation.thresholds import load_thresholds
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline


LISTS = ("questions", "answers", "question_types", "categories", "question_ids")
FEW = Options(progress=False, corrupted_images=2, paraphrased_images=2)


@pytest.fixture(scope="module")
def model():
    """A tiny model; tests must not change it."""
    return tiny_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of six synthetic images."""
    path = tmp_path_factory.mktemp("dataset")
    (path / "data").mkdir()
    made = synthetic_rows(first_seed=900, num_images=6, questions_per_image=24)
    columns = {name: [row[name] for row in made] for name in FEATURES}
    Dataset.from_dict(columns, features=FEATURES).to_parquet(str(path / "data" / "val-00000.parquet"))
    return path


@pytest.fixture(scope="module")
def rows(folder):
    return load_rows([folder])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, model):
    return save_folder(model, tmp_path_factory.mktemp("model"))


def p_yes(margin: float, temperature: float = 1.0) -> float:
    return 1 / (1 + math.exp(-margin / temperature))


def yes_no(
    question_id: str, truth: str, answer: str, source: str = "a", question_type: str = "presence"
) -> Prediction:
    margin = 2.0 if answer == "yes" else -2.0
    asked = (source, "1", question_type, "car", question_id, "?")
    return Prediction(*asked, truth, answer, p_yes=p_yes(margin), margin=margin)


def words(truth: str, answer: str, question_type: str = "color") -> Prediction:
    return Prediction("a", "1", question_type, "car", "color/car/what", "?", truth, answer)


def own_row(row: dict, questions: list[str], answers: list[str]) -> dict:
    return {**row, **{name: ["own"] * len(questions) for name in LISTS}, "questions": questions, "answers": answers}


TRUTHS = [("x", "yes"), ("x", "yes"), ("x", "yes"), ("x", "no"), ("y", "yes"), ("y", "no"), ("z", "yes")]
OTHER = {"yes": "no", "no": "yes"}


# Metrics


@pytest.mark.parametrize(
    ("answer", "value"),
    [(lambda truth: truth, 1.0), (OTHER.get, 0.0), (lambda _: "yes", 0.5), (lambda _: "no", 0.5)],
    ids=["perfect", "inverted", "always yes", "always no"],
)
def test_balanced_accuracy_of_simple_models(answer, value):
    score = balanced_accuracy([yes_no(question_id, truth, answer(truth)) for question_id, truth in TRUTHS])
    assert (score.value, score.question_ids, score.questions, score.left_out) == (value, 2, 6, 1)
    assert score.error == 0.0  # all question ids are alike


def test_balanced_accuracy_by_hand():
    """x: 2 of 3 yes and its no are right, (2/3 + 1) / 2 = 5/6; y: its yes is wrong, its no right, 1/2; mean 2/3."""
    answers = ["yes", "yes", "no", "no", "no", "no", "no"]
    predictions = [yes_no(question_id, truth, answer) for (question_id, truth), answer in zip(TRUTHS, answers)]
    score = balanced_accuracy([*predictions, words("red", "blue")])
    assert score.value == pytest.approx(2 / 3)
    assert score.error == pytest.approx((5 / 6 - 1 / 2) / 2)  # of two values: half their difference
    assert accuracy(predictions).value == pytest.approx(4 / 7)
    assert balanced_accuracy(predictions, min_questions=2).value is None
    assert balanced_accuracy(2 * predictions, min_questions=2).value == pytest.approx(2 / 3)
    assert balanced_accuracy(2 * predictions, min_questions=3).left_out == 3


def test_precision_and_recall_of_yes_by_hand():
    """Of three answers yes one is right, and one of two true yes is found; answers in words do not count."""
    pairs = [("yes", "yes"), ("yes", "no"), ("no", "yes"), ("no", "yes"), ("no", "no")]
    predictions = [*(yes_no("x", *pair) for pair in pairs), words("red", "yes")]
    assert precision(predictions).value == pytest.approx(1 / 3)
    assert recall(predictions).value == 1 / 2
    assert precision([yes_no("x", "yes", "no")]).value is None and recall([yes_no("x", "no", "no")]).value is None


def test_mean_recall_by_hand():
    """red: 9 of 12 and blue: 5 of 10, mean 5/8; "2": 10 of 10; mean 13/16. "gray" and "3" have 9 questions."""
    asked = [("red", "color", 9, 12), ("blue", "color", 5, 10), ("gray", "color", 0, 9)]
    asked += [("2", "count", 10, 10), ("3", "count", 0, 9)]
    predictions = [
        words(answer, answer if index < right else "other", question_type)
        for answer, question_type, right, count in asked
        for index in range(count)
    ]
    score = mean_recall([*predictions, yes_no("x", "yes", "no")])
    assert (score.value, score.questions) == (pytest.approx(13 / 16), 32)
    assert mean_recall(predictions[:9]).value is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from(["yes", "no"]))), st.data())
def test_a_model_without_the_image_scores_one_half(asked, data):
    guesses = {
        (source, question_id): data.draw(st.sampled_from(["yes", "no"])) for source in "ab" for question_id in "xyz"
    }
    score = balanced_accuracy(
        [yes_no(question_id, truth, guesses[source, question_id], source) for source, question_id, truth in asked]
    )
    assert score.value is None if score.question_ids == 0 else score.value == pytest.approx(0.5)


def test_question_ids_are_counted_within_their_source():
    """The same id is always yes in one source and always no in the other: neither can be counted."""
    predictions = [yes_no("x", "yes", "yes", "a"), yes_no("x", "no", "no", "b")]
    score = balanced_accuracy(predictions)
    assert (score.value, score.left_out) == (None, 2)
    assert [name for name, one in by_group(balanced_accuracy, predictions, "source").items()] == ["a", "b"]
    assert list(by_group(accuracy, predictions, "source", "question_type")) == ["a / presence", "b / presence"]


def test_exact_match_counts_words_only():
    predictions = [words("red", "red"), words("red", "red red"), words("2", "2", "count"), words("a", "")]
    predictions.append(yes_no("x", "yes", "yes"))
    assert exact_match(predictions).value == 0.5
    by_question_type = {
        question_type: score.value
        for question_type, score in by_group(exact_match, predictions, "question_type").items()
    }
    assert by_question_type == {"color": pytest.approx(1 / 3), "count": 1.0}
    assert exact_match([]).value is None


def test_calibration_error_by_hand():
    assert calibration_error([0.25] * 4, [True, False, False, False]) == 0
    assert calibration_error([1.0] * 4, [True, True, False, False]) == 0.5
    # Two answers in the first of two bins, mean 0.2, none of them yes; one in the second, 0.9, a yes.
    assert calibration_error([0.1, 0.3, 0.9], [False, False, True], bins=2) == pytest.approx((2 * 0.2 + 0.1) / 3)
    assert calibration_error([], []) is None
    bins = reliability([0.0, 0.5, 1.0], [False, True, True], bins=2)
    assert [one["questions"] for one in bins] == [1, 2]  # 0.5 opens a bin, 1.0 belongs to the last
    assert bins[1]["yes_rate"] == 1.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_a_planted_temperature_is_found(temperature):
    margins, truths = [], []
    for margin in np.linspace(-4, 4, 17):
        count = round(400 * p_yes(margin, temperature))
        margins += [float(margin)] * 400
        truths += [True] * count + [False] * (400 - count)
    assert fit_temperature(margins, truths) == pytest.approx(temperature, rel=0.01)


def test_temperatures_without_an_optimum_are_at_the_limits():
    assert fit_temperature([3.0, -3.0], [True, False]) == pytest.approx(TEMPERATURES[0], rel=1e-3)
    assert fit_temperature([3.0, -3.0], [False, True]) == pytest.approx(TEMPERATURES[1], rel=1e-3)
    with pytest.raises(ValueError, match="2 and 1"):
        fit_temperature([1.0, 2.0], [True])


def test_the_halves_of_the_images_are_fixed():
    assert [calibration_half("camvid", str(i)) for i in range(8)] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert 400 < sum(calibration_half("camvid", str(i)) for i in range(1000)) < 600


def test_calibration_is_tested_on_the_other_half():
    """Margins four times too large on both halves: the fitted temperature corrects them."""
    rng, predictions = random.Random(0), []
    for index in range(4000):
        margin = rng.uniform(-3, 3)
        truth, answer = "yes" if rng.random() < p_yes(margin) else "no", "yes" if margin >= 0 else "no"
        question = ("a", str(index), "k", "l", "f", "?", truth, answer)
        predictions.append(Prediction(*question, p_yes=p_yes(4 * margin), margin=4 * margin))
    found = calibration(predictions, 1.0)
    assert found["half_temperature"] == pytest.approx(4, rel=0.15)
    assert found["ece_before"] > 0.1 > 0.04 > found["ece_after"]
    assert found["questions_fitted"] + found["questions_judged"] == 4000 and not found["at_limit"]
    alone = calibration(predictions[:1], 1.0)
    assert alone["half_temperature"] is None and alone["at_limit"]


# Baselines


def test_the_majority_falls_back_from_the_source_to_all_questions(processor):
    def row(source: str, question_id: str, *answers: str) -> dict:
        count = len(answers)
        return {
            "source": source,
            "answers": list(answers),
            "question_ids": [question_id] * count,
            "question_types": ["presence"] * count,
        }

    rows = [row("a", "x", "Yes", "yes", "no"), row("b", "x", "no", "no", "no"), row("b", "w", "grey")]
    majority = Majority(rows, processor)
    asked = [yes_no("x", "yes", "no", "a"), yes_no("x", "yes", "no", "c"), yes_no("new", "no", "no", "a")]
    assert [majority.answer(one) for one in asked] == ["yes", "no", "no"]
    assert majority.accuracy(asked) == pytest.approx(2 / 3)
    assert majority.answer(words("blue", "")) == "gray"  # the only words there are
    assert Majority([], processor).answer(asked[0]) == ""


def test_mean_image(processor):
    pictures = [{"image": Image.new("RGB", size, (value, 0, 90))} for size, value in (((9, 5), 10), ((300, 300), 30))]
    assert mean_image(pictures, processor).getcolors() == [(256 * 256, (20, 0, 90))]
    with pytest.raises(ValueError, match="at least one"):
        mean_image([], processor)


def test_the_mean_image_is_encoded_once_and_scores_one_half(monkeypatch, processor, rows):
    model, sizes = yes_no_model(), []
    encode_images = model.encode_images
    monkeypatch.setattr(model, "encode_images", lambda pixels: sizes.append(len(pixels)) or encode_images(pixels))
    question = ["Is there a car?", "Is it raining?"]
    asked = [own_row(row, question, ["yes", "no"] if i % 2 else ["no", "yes"]) for i, row in enumerate(rows)]
    asked = [{**row, "question_ids": question} for row in asked]
    found = predict(model, processor, asked, batch_size=4, image=Image.new("RGB", (224, 224), "gray"))
    assert sizes == [1]
    assert len({(one.question, one.answer) for one in found}) == 2
    assert balanced_accuracy(found).value == 0.5


# Predictions


def test_evaluation_measures_what_the_pipeline_answers(model, processor, rows):
    found = predict(model, processor, rows, batch_size=4)
    pipe = TrafficVLMPipeline(model=model, processor=processor, device="cpu")
    answers = [item for row in rows for item in pipe(row["image"], list(row["questions"]))]
    asked = [(row, i) for row in rows for i in range(len(row["questions"]))]
    for one, (row, i), item in zip(found, asked, answers, strict=True):
        assert (one.question, [one.ground_truth]) == (row["questions"][i], normalize(processor, [row["answers"][i]]))
        assert (one.question_type, one.category, one.question_id) == tuple(row[name][i] for name in LISTS[2:])
        assert (one.source, one.image_id) == (row["source"], row["image_id"])
        assert (one.answer, one.score) == (item["answer"], item["score"] and pytest.approx(item["score"], abs=1e-5))
        assert one.p_yes == pytest.approx(item["p_yes"] or one.p_yes, abs=1e-5)
    assert 5 < sum(one.answer in ("yes", "no") for one in found) < len(found) - 5


def test_a_question_with_a_problem_counts_as_wrong_and_has_no_probability(model, processor, rows):
    asked = ["Isn't there a car?", "Is there no car?", "Is there any car?", "Who is driving?"]
    problem, negated, positive, untaught = found = predict(
        model, processor, [own_row(rows[0], asked, ["yes", "no", "yes", "a person"])]
    )
    for one in (problem, untaught):
        assert (one.answer, one.score, one.p_yes, one.margin, one.is_right) == (None, None, None, None, False)
    assert negated.margin == -positive.margin and negated.p_yes == pytest.approx(1 - positive.p_yes, abs=1e-6)
    assert negated.is_right == positive.is_right
    assert calibration(found, 1.0)["questions_judged"] + calibration(found, 1.0)["questions_fitted"] == 2
    assert calibration([problem], 1.0) == {} and accuracy([problem]).value == 0


def test_the_ground_truth_does_not_decide_how_a_question_is_asked(model, processor, rows):
    changed = [{**row, "answers": ["red" if answer in OTHER else "yes" for answer in row["answers"]]} for row in rows]
    for one, other in zip(predict(model, processor, rows), predict(model, processor, changed)):
        assert replace(one, ground_truth=other.ground_truth) == other


def test_margins_ignore_the_temperature(processor, rows):
    plain = predict(yes_no_model(), processor, [rows[0]])
    for one, other in zip(plain, predict(yes_no_model(yes_no_temperature=4.0), processor, [rows[0]])):
        assert one.margin == other.margin
        assert one.p_yes == pytest.approx(p_yes(one.margin), abs=1e-6)
        assert other.p_yes == pytest.approx(p_yes(one.margin, 4.0), abs=1e-6)
        assert other == replace(one.at_temperature(4.0), score=other.score)


def test_answers_are_compared_as_the_tokenizer_writes_them(model, processor, rows):
    row = own_row(rows[0], ["What color is it?", "Is it a car?", "What is ahead?"], ["Grey", " YES", "red zebra"])
    found = predict(model, processor, [row], generate_words=False)
    assert [one.ground_truth for one in found] == ["gray", "yes", "red [UNK]"]
    assert replace(found[0], answer="gray").is_right and not replace(found[2], answer="red").is_right


def test_words_can_be_left_out(model, processor, rows):
    for one, other in zip(predict(model, processor, rows), predict(model, processor, rows, generate_words=False)):
        assert other.answer == (one.answer if one.answer in OTHER else None)


def test_many_questions_of_an_image_and_images_without_any(model, processor, rows):
    none, three, many = ({name: rows[0][name][:3] * count for name in LISTS} for count in (0, 1, 25))
    found = predict(model, processor, [{**rows[0], **lists} for lists in (none, many, none)])
    margins = [one.margin for one in found]
    assert margins == pytest.approx(margins[:3] * 25, abs=1e-4)
    once, often = (perplexity(model, processor, [{**rows[0], **lists}])["all"] for lists in (three, many))
    assert often["tokens"] == 25 * once["tokens"]
    assert often["cross_entropy"] == pytest.approx(once["cross_entropy"], rel=1e-5)
    assert predict(model, processor, [{**rows[0], **none}]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [({"answers": ["yes"]}, "unequal lengths.*'answers': 1"), ({"question_ids": None}, "no question_ids")],
)
def test_bad_rows_are_refused(model, processor, rows, change, message):
    row = {name: value for name, value in {**rows[0], **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        predict(model, processor, [row])


def test_bad_models_are_refused(processor, rows):
    broken = tiny_model()
    with pytest.raises(ValueError, match="batch_size must be a number of images, at least 1, got 0"):
        predict(broken, processor, rows, batch_size=0)
    with pytest.raises(ValueError, match=r"model\.eval"):
        predict(broken.train(), processor, rows)
    torch.nn.init.constant_(broken.eval().model.text_model.norm.weight, math.nan)
    with pytest.raises(FloatingPointError, match="nan"):
        predict(broken, processor, [rows[0]])


def test_perplexity_is_exp_of_the_loss(model, processor, rows):
    row = rows[1]
    inputs = processor(
        images=row["image"], text=[row["questions"]], suffix=[row["answers"]], packed=True, return_tensors="pt"
    )
    with torch.no_grad():
        loss = model(**inputs).loss.item()
    found = perplexity(model, processor, [row])
    assert found["all"] == found["synthetic"]
    assert found["all"]["cross_entropy"] == pytest.approx(loss, rel=1e-5)
    assert found["all"]["words"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["all"]["tokens"] == int((inputs["labels"] >= 0).sum())
    uniform = tiny_model()
    torch.nn.init.zeros_(uniform.lm_head.weight)
    assert perplexity(uniform, processor, [row])["all"]["words"] == pytest.approx(499, rel=1e-5)  # without [PAD]
    assert perplexity(uniform, processor, []) == {}


# Robustness


def test_paraphrases_keep_the_question_id(rows):
    row = paraphrase(rows[0], 7)
    assert row["image_id"] == "7" and set(row["answers"]) <= {"yes", "no"}
    for question_id in set(row["question_ids"]):
        texts = [text for text, other in zip(row["questions"], row["question_ids"]) if other == question_id]
        assert 1 < len(texts) == len(set(texts)) <= 4
        assert set(texts) <= set(paraphrases_of(question_id))
    assert paraphrase(rows[0], 7) == row
    assert paraphrase({**rows[0], "question_ids": ["mine"] * len(rows[0]["question_ids"])}, 7)["questions"] == []


def test_agreement_by_hand(model, processor, rows):
    """Pairs of x: 0.6-0.4 differ, 0.6-0.9 agree, 0.4-0.9 differ; of y, both no. The second image has no pair."""

    def one(image_id: str, question_id: str, probability: float) -> Prediction:
        return Prediction("a", image_id, "k", "l", question_id, "?", "yes", None, p_yes=probability)

    asked = [("1", "x", 0.6), ("1", "x", 0.4), ("1", "x", 0.9), ("1", "y", 0.1), ("1", "y", 0.3), ("2", "x", 0.7)]
    found = agreement([one(*question) for question in asked])
    assert found == {"same": 0.5, "change": pytest.approx((0.2 + 0.3 + 0.5 + 0.2) / 4), "pairs": 4, "questions": 2}
    by_question_type = paraphrase_agreement(model, processor, [rows[0], rows[3]])
    assert (
        by_question_type["all"]["pairs"]
        == sum(one["pairs"] for question_type, one in by_question_type.items() if question_type != "all")
        > 30
    )


def test_corruptions_are_repeatable_and_change_the_image(processor, rows):
    image = rows[0]["image"].resize((640, 480))
    for name, corrupt in corruptions(processor).items():
        once = corrupt(image)
        assert once.size == (256, 256) and once.tobytes() == corrupt(image).tobytes(), name
        difference = np.asarray(once, float) - np.asarray(image.resize((256, 256)), float)
        assert np.abs(difference).mean() > 1, name
    dark = corruptions(processor)["darkness, 35% of the light"](Image.new("RGB", (9, 9), (200, 100, 0)))
    assert dark.getpixel((0, 0)) == (70, 35, 0)


# Grounding


def test_patches_in_boxes():
    size, grid = (140, 280), (14, 14)  # a patch has 10 × 20 pixels
    assert patches_in_boxes([(0, 0, 140, 280)], size, grid).all()
    left = patches_in_boxes([(0, 0, 70, 280)], size, grid)
    assert left[:, :7].all() and not left[:, 7:].any()
    assert patches_in_boxes([(12, 41, 13, 44)], size, grid).nonzero().tolist() == [[2, 1]]
    pole = patches_in_boxes([(38, 0, 42, 280)], size, grid)  # narrower than a patch, over two
    assert pole[:, 3:5].all() and pole.sum() == 28
    both = patches_in_boxes([(0, 0, 10, 20), (130, 260, 140, 280)], size, grid)
    assert both.nonzero().tolist() == [[0, 0], [13, 13]]


def test_maps_are_scored_by_their_highest_patch():
    asked = GroundedQuestion("a", "car", "?", ((0, 0, 70, 70),), (140, 140))  # a quarter of the image
    planted = torch.zeros(14, 14)
    planted[3, 5] = 1.0
    found = score_map(asked, planted)
    assert (found.highest, found.center, found.random) == (
        1.0,
        0.25,
        0.25,
    )  # one of four central patches is inside
    assert score_map(asked, planted.flip(1)).highest == 0.0
    assert score_map(asked, torch.full((14, 14), 1 / 196)).highest == 0.25  # an even map is as good as chance


def street() -> dict:
    """An image with a car on the left and none elsewhere; one of the answers is wrong."""
    car = SceneObject("car", (10, 40, 45, 80))
    known = frozenset({"car", "bus"})
    scene = Scene(200, 100, (car,), {"view": "driver"}, known, source="mine", image_id="1")
    questions = [
        Question("Is there a car?", "yes", "presence", "car", "presence/car"),
        Question("Is there a car on the left?", "yes", "place", "car", "place/car/left"),
        Question("Is there a bus?", "no", "presence", "bus", "presence/bus"),
        Question("Is there a car on the right?", "yes", "place", "car", "place/car/right"),
        Question("Is this the view of a driver?", "yes", "view", "view", "view/view/is/driver"),
        Question("How many cars are there?", "1", "count", "car", "count/car/what"),
    ]
    return make_row(b"", scene, questions) | {"image": Image.new("RGB", (200, 100), "gray")}


def test_grounded_questions_come_from_the_scene():
    found = list(grounded_questions(street()))
    assert [one.question for one in found] == ["Is there a car?", "Is there a car on the left?"]
    assert all(one.boxes == ((10, 40, 45, 80),) and one.size == (200, 100) for one in found)
    assert list(grounded_questions({**street(), "scene": None})) == []


def test_word_maps_are_those_of_questions_asked_alone(model, processor, rows):
    image = rows[0]["image"]
    encoded = model.encode_images(processor(images=image, return_tensors="pt")["pixel_values"])
    positions = {
        ("Is there a car left of the bus?", "car"): 4,  # after [SOS] is there a
        ("Can you see any traffic lights?", "traffic light"): 6,
        ("Are any people visible?", "person"): 3,
        ("Is the speed limit 50?", "speed limit sign"): None,
        ("Is it raining?", "weather"): None,
    }
    [found] = word_maps(model, processor, encoded, [list(positions)])
    [or_last] = word_maps(model, processor, encoded, [list(positions)], or_last=True)
    [many] = word_maps(model, processor, encoded, [list(positions) * 20])  # in several rows
    assert [one is None for one in many] == [one is None for one in found] * 20
    torch.testing.assert_close(many[-4], found[1], atol=1e-5, rtol=1e-4)
    for ((question, _), position), one, last in zip(positions.items(), found, or_last, strict=True):
        alone = model.attention_maps(**processor(images=image, text=question, return_tensors="pt"))[0]
        assert (one is None) == (position is None)
        torch.testing.assert_close(last, alone[-1 if position is None else position], atol=1e-5, rtol=1e-4)
        assert one is None or torch.equal(one, last)


@pytest.mark.parametrize(("patch", "accuracy"), [((8, 2), 1.0), ((8, 12), 0.0)])
def test_a_planted_map_decides_the_pointing_accuracy(model, processor, patch, accuracy):
    """The car fills rows 6 to 10 and columns 1 to 2 of the patches; only its word attends to `patch`."""

    def attention_maps(input_ids, **inputs):
        maps = torch.zeros(*input_ids.shape, 14, 14)
        maps[..., 0, 0] = 0.5
        planted = torch.zeros(14, 14)
        planted[patch] = 1.0
        maps[input_ids == processor.tokenizer.convert_tokens_to_ids("car")] = planted
        return maps

    stand_in = types.SimpleNamespace(
        attention_maps=attention_maps, encode_images=model.encode_images, device=model.device
    )
    results = score_pointing(stand_in, processor, [street()])
    assert [(one.source, one.category, one.highest) for one in results] == [("mine", "car", accuracy)] * 2
    assert results[0].random == pytest.approx(10 / 196)


# The report


def test_a_report_holds_what_the_metrics_give(model, processor, rows):
    report = evaluate_model(model, processor, rows, FEW)
    json.dumps(report, allow_nan=False)
    predictions = predict(model, processor, rows)
    found = balanced_accuracy(predictions)
    assert report["yes_no"]["all"]["balanced_accuracy"] == found.value
    assert report["yes_no"]["all"]["question_ids"] == found.question_ids
    assert report["yes_no"]["by_source"] == {"synthetic": report["yes_no"]["all"]}
    assert (
        sum(row["all_questions"] for row in report["yes_no"]["by_question_type"].values())
        == report["questions"]["yes_no"]
    )
    assert report["words"]["all"]["exact_match"] == exact_match(predictions).value
    assert report["images_by_source"] == {"synthetic": 6} and report["baselines"] == "evaluated"
    assert report["robustness"]["images"] == 2 and len(report["robustness"]["conditions"]) == 5
    by_category = report["pointing"]["by_category"].values()
    assert sum(row["questions"] for row in by_category) == report["pointing"]["all"]["questions"] > 0
    examples = report["examples"]
    assert len({one["row"] for one in examples}) == len(examples) > 0
    assert all(one["question"] in rows[one["row"]]["questions"] for one in examples)
    metrics = quick_metrics(model, processor, rows, batch_size=4)
    assert all(isinstance(value, float) for value in metrics.values())
    assert metrics["balanced_accuracy"] == metrics["balanced_accuracy_synthetic"] == pytest.approx(found.value)
    assert metrics.keys() >= {"balanced_accuracy_all", "exact_match", "accuracy"}
    assert metrics["ece"] == pytest.approx(report["calibration"]["ece"], abs=1e-4)
    assert metrics["answer_loss"] == pytest.approx(report["perplexity"]["all"]["cross_entropy"])
    assert metrics["words"] == pytest.approx(report["perplexity"]["all"]["words"])


def test_the_mean_is_over_sources(model, processor, rows):
    """Five images of one source count as much as one of another."""
    mixed = [{**row, "source": "synthetic" if index else "a"} for index, row in enumerate(rows)]
    report = evaluate_model(model, processor, mixed, Options(16, 0, 0, 0, perplexity=False, progress=False))
    found = report["yes_no"]
    values = [row["accuracy"] for row in found["by_source"].values()]
    assert list(found["by_source"]) == ["a", "synthetic"]
    assert found["mean_over_photographs"] == found["by_source"]["a"]
    assert found["mean_over_sources"]["accuracy"] == pytest.approx(sum(values) / 2)
    assert (
        found["by_source"]["a"]["question_ids"] == 0 and found["mean_over_sources"]["error"] == found["all"]["error"]
    )
    assert found["mean_over_sources"]["all_questions"] == found["all"]["all_questions"]
    assert report["robustness"] == report["paraphrases"] == report["pointing"] == report["perplexity"] == {}
    text = to_markdown(report)
    assert "| mean over sources of photographs |" in text and "| 10 of each |" in text and "| mean recall |" in text
    assert all(f"| {name} |" in text for name in found["by_source_and_question_type"])


def test_yes_no_questions_alone_and_words_alone(model, processor, rows):
    for in_words, missing in ((False, "words"), (True, "yes_no")):
        kept = [i for i, answer in enumerate(rows[0]["answers"]) if (answer not in OTHER) == in_words]
        row = rows[0] | {name: [rows[0][name][i] for i in kept] for name in LISTS}
        report = evaluate_model(model, processor, [row], FEW, train_rows=rows)
        assert report[missing] == {} and report["baselines"] == "training"
        assert "## Perplexity" in to_markdown(report)
        assert ("exact_match" in quick_metrics(model, processor, [row])) == in_words


def test_nothing_to_evaluate(model, processor, rows):
    with pytest.raises(ValueError, match="no images"):
        evaluate_model(model, processor, [])
    row = {**rows[0], **{name: [] for name in LISTS}}
    with pytest.raises(ValueError, match="none of the 1 images"):
        evaluate_model(model, processor, [row], FEW)
    assert quick_metrics(model, processor, [row]) == {}


# The script


def test_the_script_writes_a_report_plots_and_the_temperature(folder, model_folder, tmp_path, run_script, capsys):
    model, output = tmp_path / "model", tmp_path / "report"
    shutil.copytree(model_folder, model)
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    options = ("--model", model, "--dataset", folder, "--train_dataset", folder, "--output_dir", output)
    sizes = ("--batch_size", 3, "--corrupted_images", 2, "--paraphrased_images", 2, "--no_progress")
    run_script("evaluate.py", *options, *sizes, "--bf16", "--write_temperature")
    names = {"report.json", "report.md", "reliability.png", "question_types.png", "examples.png"}
    names |= {"predictions.parquet", "thresholds.json"}
    assert {file.name for file in output.iterdir()} == names
    report, text = json.loads((output / "report.json").read_text()), (output / "report.md").read_text()
    assert report["datasets"] == [str(folder)] and report["images"] == 6
    assert {name for name in names if name in text} == {"reliability.png", "question_types.png", "examples.png"}
    for path in output.glob("*.png"):
        with Image.open(path) as plot:
            assert min(plot.size) > 200
    assert "balanced accuracy" in capsys.readouterr().out
    table = parquet.read_table(output / "predictions.parquet").to_pylist()
    rows = load_rows([folder])
    assert [row["question"] for row in table] == [question for row in rows for question in row["questions"]]
    yes_no = [row for row in table if row["ground_truth"] in OTHER]
    right = [row["is_right"] for row in yes_no]
    assert report["yes_no"]["all"]["accuracy"] == pytest.approx(sum(right) / len(right))
    assert [row["answer"] == row["ground_truth"] for row in yes_no] == right
    # The fitted temperature was written, so the thresholds are for P(yes) at this temperature.
    thresholds = load_thresholds(output / "thresholds.json")
    scale = 1 / report["calibration"]["fitted_temperature"]  # the model's own temperature is 1
    truth, p = [row["ground_truth"] for row in yes_no], [row["p_yes"] for row in yes_no]
    margins = [math.log(max(x, 1e-9) / max(1 - x, 1e-9)) for x in p]  # P(yes) may be rounded to 0 or 1
    answers = [thresholds.default.answer(p_yes(scale * margin)) for margin in margins]
    found = sum(answer == "yes" == true for answer, true in zip(answers, truth))
    assert thresholds.default.recall == pytest.approx(found / truth.count("yes"), abs=1e-4)
    assert (thresholds.default.yes, thresholds.default.no) == (truth.count("yes"), truth.count("no"))
    temperature = report["calibration"]["fitted_temperature"]
    after = {file.name: file.read_bytes() for file in model.iterdir()}
    assert after.keys() == before.keys() | {"decision.json"}
    assert {name for name in after if after[name] != before.get(name)} <= {"config.json", "decision.json"}
    config = json.loads(before["config.json"])
    assert json.loads(after["config.json"]) == config | {"yes_no_temperature": temperature}
    assert json.loads(after["decision.json"])["temperature"] == {"noul": temperature}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--dataset": "/nowhere"}, "no such dataset folder"),
        ({"--model": ROOT / "docs"}, "no file named model.safetensors"),
        ({"--model": "/nowhere"}, "/nowhere"),
        ({"--max_images": 0}, "--max_images must be at least 1, got 0"),
        ({"--batch_size": 0}, "--batch_size must be at least 1, got 0"),
        ({"--int8": "true"}, "--int8 needs --exported"),
    ],
)
def test_the_script_refuses_bad_options_in_one_line(folder, model_folder, tmp_path, run_script, change, message):
    options = {"--model": model_folder, "--dataset": folder, "--output_dir": tmp_path / "report"} | change
    with pytest.raises(SystemExit) as caught:
        run_script("evaluate.py", *[part for pair in options.items() for part in pair])
    assert message in str(caught.value) and "\n" not in str(caught.value)

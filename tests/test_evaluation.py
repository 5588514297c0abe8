"""Evaluation: figures against closed forms, predictions against the model asked alone, the script from end to end."""

import json
import math
import random
import runpy
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tiny import ROOT, tiny_model
from traffic_vlm.data.dataset import FEATURES, load_item, make_row
from traffic_vlm.data.phrases import phrasings
from traffic_vlm.data.questions import Balancer, Question, ask
from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.data.targets import find_word
from traffic_vlm.evaluation.baselines import Majority, mean_image
from traffic_vlm.evaluation.folders import load_model, load_rows, source_names, write_temperature
from traffic_vlm.evaluation.metrics import (
    TEMPERATURES,
    accuracy,
    agreement,
    balanced_accuracy,
    by_group,
    calibration_error,
    exact_match,
    fit_temperature,
    half,
    reliability,
    yes_probability,
)
from traffic_vlm.evaluation.perplexity import perplexity
from traffic_vlm.evaluation.pointing import Target, find_targets, hit_cells, judge, point, word_maps
from traffic_vlm.evaluation.predict import Prediction, predict
from traffic_vlm.evaluation.report import Options, calibration, evaluate_model, quick_metrics, spread
from traffic_vlm.evaluation.robustness import agree, corruptions, phrasing_agreement, reword
from traffic_vlm.evaluation.tables import to_markdown
from traffic_vlm.utils import DataError


QUIET = {"progress": False}
LISTS = ("questions", "answers", "kinds", "labels", "facts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of six synthetic images."""
    path = tmp_path_factory.mktemp("dataset") / "set"
    (path / "data").mkdir(parents=True)
    rng, balancer, made = random.Random(0), Balancer(), []
    for item in map(load_item, range(900, 906)):
        made.append(make_row(*item, ask(item[1], rng, 16, balancer)))
    columns = {name: [row[name] for row in made] for name in FEATURES}
    Dataset.from_dict(columns, features=FEATURES).to_parquet(str(path / "data" / "val-00000.parquet"))
    return path


@pytest.fixture(scope="module")
def rows(folder):
    return load_rows([folder])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, processor):
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    processor.save_pretrained(path)
    return path


def decided(fact: str, answer: str, says: str, source: str = "a", kind: str = "presence") -> Prediction:
    """A yes/no prediction."""
    margin = 2.0 if says == "yes" else -2.0
    return Prediction(source, "1", kind, "car", fact, "?", answer, yes_probability(margin, 1.0), margin)


def worded(answer: str, text: str, source: str = "a", kind: str = "color") -> Prediction:
    return Prediction(source, "1", kind, "car", "color/car/what", "?", answer, text=text)


TRUTHS = [("x", "yes"), ("x", "yes"), ("x", "yes"), ("x", "no"), ("y", "yes"), ("y", "no"), ("z", "yes")]
OTHER = {"yes": "no", "no": "yes"}


# Figures


@pytest.mark.parametrize(
    "says, value",
    [(lambda t: t, 1.0), (lambda t: OTHER[t], 0.0), (lambda t: "yes", 0.5), (lambda t: "no", 0.5)],
    ids=["perfect", "inverted", "always yes", "always no"],
)
def test_balanced_accuracy_of_those_who_know_all_nothing_or_the_contrary(says, value):
    score = balanced_accuracy([decided(fact, truth, says(truth)) for fact, truth in TRUTHS])
    assert (score.value, score.facts, score.questions, score.left_out) == (value, 2, 6, 1)
    assert score.error == 0.0  # all facts are alike


def test_balanced_accuracy_by_hand():
    """x: 2 of 3 yes and its no are right, (2/3 + 1) / 2 = 5/6; y: its yes is wrong, its no right, 1/2; mean 2/3."""
    says = ["yes", "yes", "no", "no", "no", "no", "no"]
    predictions = [decided(fact, truth, said) for (fact, truth), said in zip(TRUTHS, says)]
    score = balanced_accuracy([*predictions, worded("red", "blue")])
    assert score.value == pytest.approx(2 / 3)
    assert score.error == pytest.approx((5 / 6 - 1 / 2) / 2)  # of two values: half their difference
    assert accuracy(predictions).value == pytest.approx(4 / 7)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from(["yes", "no"]))), st.data())
def test_whoever_knows_the_question_but_not_the_image_stands_at_one_half(asked, data):
    guesses = {(source, fact): data.draw(st.sampled_from(["yes", "no"])) for source in "ab" for fact in "xyz"}
    score = balanced_accuracy([decided(f, truth, guesses[s, f], s) for s, f, truth in asked])
    assert score.value is None if score.facts == 0 else score.value == pytest.approx(0.5)


def test_a_fact_counts_within_its_source():
    """The same fact is always yes in one source and always no in the other: neither can be counted."""
    predictions = [decided("x", "yes", "yes", "a"), decided("x", "no", "no", "b")]
    score = balanced_accuracy(predictions)
    assert (score.value, score.left_out) == (None, 2)
    by_source = by_group(balanced_accuracy, predictions, "source")
    assert [(name, one.left_out) for name, one in by_source.items()] == [("a", 1), ("b", 1)]


def test_groups_have_names_of_their_attributes():
    predictions = [decided("x", "yes", "yes", kind=kind, source=source) for kind in "mn" for source in "ba"]
    assert list(by_group(accuracy, predictions, "source", "kind")) == ["a / m", "a / n", "b / m", "b / n"]


def test_exact_match_counts_words_only():
    predictions = [worded("red", "red"), worded("red", "red red"), worded("2", "2", kind="count"), worded("a", "")]
    predictions.append(decided("x", "yes", "yes"))
    assert exact_match(predictions).value == 0.5
    by_kind = {kind: score.value for kind, score in by_group(exact_match, predictions, "kind").items()}
    assert by_kind == {"color": pytest.approx(1 / 3), "count": 1.0}
    assert exact_match([]).value is None


def test_calibration_error_by_hand():
    assert calibration_error([0.25] * 4, [True, False, False, False]) == 0
    assert calibration_error([1.0] * 4, [True, True, False, False]) == 0.5
    # Two answers in the first of two bins, mean 0.2, none of them yes; one in the second, 0.9, a yes.
    assert calibration_error([0.1, 0.3, 0.9], [False, False, True], bins=2) == pytest.approx((2 * 0.2 + 0.1) / 3)
    assert calibration_error([], []) is None
    bins = reliability([0.0, 0.5, 1.0], [False, True, True], bins=2)
    assert [one.questions for one in bins] == [1, 2]  # 0.5 opens a bin, 1.0 belongs to the last
    assert bins[1].yes_rate == 1.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_a_planted_temperature_is_found(temperature):
    """Truths in exactly the shares that margins have at a temperature."""
    margins, truths = [], []
    for margin in np.linspace(-4, 4, 17):
        yes = round(400 * yes_probability(margin, temperature))
        margins += [float(margin)] * 400
        truths += [True] * yes + [False] * (400 - yes)
    assert fit_temperature(margins, truths) == pytest.approx(temperature, rel=0.01)


def test_temperatures_without_a_best_one_lie_at_the_limits():
    assert fit_temperature([3.0, -3.0], [True, False]) == pytest.approx(TEMPERATURES[0], rel=1e-3)
    assert fit_temperature([3.0, -3.0], [False, True]) == pytest.approx(TEMPERATURES[1], rel=1e-3)
    with pytest.raises(ValueError, match="2 and 1"):
        fit_temperature([1.0, 2.0], [True])


def test_probability_of_a_margin_is_that_of_the_model():
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(0)) * 30
    ours = [yes_probability(float(row[4] - row[5]), 2.5) for row in logits]
    theirs = tiny_model(yes_no_temperature=2.5).yes_probability(logits).tolist()
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert (yes_probability(-1e5, 1.0), yes_probability(1e5, 1.0)) == (0.0, 1.0)


def test_halves_are_fixed_and_even():
    halves = [half("camvid", str(i)) for i in range(1000)]
    assert halves == [half("camvid", str(i)) for i in range(1000)]
    assert 400 < sum(halves) < 600


def test_calibration_is_judged_on_the_other_half():
    """Margins four times too large on both halves: the fitted temperature mends them."""
    rng, predictions = random.Random(0), []
    for number in range(4000):
        margin = rng.uniform(-3, 3)
        answer = "yes" if rng.random() < yes_probability(margin, 1.0) else "no"
        probability = yes_probability(4 * margin, 1.0)
        predictions.append(Prediction("a", str(number), "k", "l", "f", "?", answer, probability, 4 * margin))
    found = calibration(predictions, 1.0)
    assert found["half_temperature"] == pytest.approx(4, rel=0.15)
    assert found["ece_before"] > 0.1 > 0.04 > found["ece_after"]
    assert found["questions_fitted"] + found["questions_judged"] == 4000
    assert not found["at_limit"]
    alone = calibration(predictions[:1], 1.0)
    assert alone["half_temperature"] is None
    assert alone["at_limit"]


def test_agreement_by_hand():
    """Pairs of the first: 0.6-0.4 differ, 0.6-0.9 agree, 0.4-0.9 differ; of the second, both no."""
    found = agreement([[0.6, 0.4, 0.9], [0.1, 0.3], [0.7]])
    assert (found.same, found.pairs, found.questions) == (0.5, 4, 2)
    assert found.change == pytest.approx((0.2 + 0.3 + 0.5 + 0.2) / 4)


def test_majority_of_the_source_then_wider_and_wider(processor):
    def row(source: str, fact: str, *answers: str) -> dict:
        count = len(answers)
        return {"source": source, "answers": list(answers), "facts": [fact] * count, "kinds": ["presence"] * count}

    rows = [row("a", "x", "Yes", "yes", "no"), row("b", "x", "no", "no", "no"), row("b", "w", "grey")]
    majority = Majority(rows, processor)
    asked = [decided("x", "yes", "no", "a"), decided("x", "yes", "no", "c"), decided("new", "no", "no", "a")]
    assert [majority.answer(one) for one in asked] == ["yes", "no", "no"]
    assert majority.share_right(asked) == pytest.approx(2 / 3)
    assert majority.answer(worded("blue", "", kind="color")) == "gray"  # the only words there are
    assert Majority([], processor).answer(asked[0]) == ""


# Predictions


def test_predictions_are_those_of_questions_asked_alone(model, processor, rows):
    predictions = predict(model, processor, rows, batch_size=4, **QUIET)
    asked = [(row, i) for row in rows for i in range(len(row["questions"]))]
    assert len(predictions) == len(asked)
    words = 0
    for one, (row, i) in zip(predictions, asked):
        names = ("kind", "label", "fact", "question", "answer")
        assert [getattr(one, name) for name in names] == [row[name + "s"][i] for name in names]
        assert (one.source, one.image_id) == (row["source"], row["image_id"])
        assert (one.text is None) == (one.answer in ("yes", "no")) == (one.probability is not None)
        inputs = processor(images=row["image"], text=one.question, return_tensors="pt")
        if one.is_yes_no:
            [[alone]] = model.score_yes_no(**inputs)
            assert one.probability == pytest.approx(alone.item(), abs=1e-5)
            assert one.said == ("yes" if one.probability >= 0.5 else "no")
        elif words < 5:
            words += 1
            length = len(processor.tokenizer(one.answer, add_special_tokens=False)["input_ids"]) + 1
            ids = model.generate(**inputs, max_new_tokens=length, do_sample=False)
            [alone] = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            assert one.text.startswith(alone)  # those of a batch are cut where the longest truth ends
    assert words > 2


def test_an_answer_with_a_word_that_is_not_known_is_never_right(model, processor, rows):
    lists = {name: ["own"] for name in LISTS} | {"questions": ["What is ahead?"], "answers": ["red zebra"]}
    [one] = predict(model, processor, [{**rows[0], **lists}], **QUIET)
    assert one.answer == "red [UNK]"
    assert not replace(one, text="red").is_right


def test_long_questions_do_not_cut_the_answers_to_others(model, processor, rows):
    def said(*questions):
        lists = {name: ["own"] * len(questions) for name in LISTS} | {"questions": list(questions)}
        lists["answers"] = ["a car and a bus and a truck"] * len(questions)
        return [one.text for one in predict(model, processor, [{**rows[0], **lists}], **QUIET)]

    long, full = "car " * 123, "car " * 126  # with two tokens more there is room for 3 and for none
    [alone] = said("What is ahead?")
    assert len(alone.split()) > 4
    assert said(full, "What is ahead?", long) == ["", alone, *said(long)]
    assert 0 < len(processor.tokenizer(*said(long), add_special_tokens=False)["input_ids"]) <= 3


def test_many_questions_of_an_image_and_images_without_any(model, processor, rows):
    first = dict(rows[0])
    lists = {name: first[name][:3] * 25 for name in LISTS}
    none = {name: [] for name in lists}
    predictions = predict(model, processor, [{**first, **none}, {**first, **lists}, {**first, **none}], **QUIET)
    assert len(predictions) == 75
    margins = [one.logit_margin for one in predictions if one.is_yes_no]
    assert margins == pytest.approx(margins[: len(margins) // 25] * 25, abs=1e-4)
    assert predict(model, processor, [{**first, **none}], **QUIET) == []


def test_margins_do_not_know_the_temperature(processor, rows):
    few = [rows[0]]
    plain = predict(tiny_model(), processor, few, **QUIET)
    soft = predict(tiny_model(yes_no_temperature=4.0), processor, few, **QUIET)
    for one, other in zip(plain, soft):
        assert one.logit_margin == other.logit_margin
        if one.is_yes_no:
            assert other.probability == pytest.approx(yes_probability(one.logit_margin, 4.0), abs=1e-6)


def test_a_blind_model_gives_all_images_the_same_answers(model, processor, rows):
    gray, sizes = Image.new("RGB", (224, 224), "gray"), []
    encode = model.encode_images

    def count(pixels, *args):
        sizes.append(len(pixels))
        return encode(pixels, *args)

    asked = {name: rows[0][name] for name in LISTS}
    same = [{**row, **asked} for row in rows]
    model.encode_images = count
    try:
        blind = predict(model, processor, same, transform=lambda _: gray, batch_size=4, **QUIET)
    finally:
        del model.encode_images
    assert sizes == [1, 1]  # one look a batch
    questions = len(rows[0]["questions"])
    for one, other in zip(blind, blind[questions:]):
        assert (one.said, one.question) == (other.said, other.question)
    assert balanced_accuracy(blind).value in (0.5, None)
    seeing = predict(model, processor, same, **QUIET)
    assert any(one.logit_margin != other.logit_margin for one, other in zip(seeing, blind))


def test_truths_are_written_as_the_tokenizer_writes_them(model, processor, rows):
    row = {**rows[0], "questions": ["What color is it?", "Is it a car?"], "answers": ["Grey", " YES"]}
    row |= {name: ["x", "x"] for name in ("kinds", "labels", "facts")}
    words, decision = predict(model, processor, [row], **QUIET)
    assert (words.answer, decision.answer) == ("gray", "yes")
    [skipped, _] = predict(model, processor, [row], generate_words=False, **QUIET)
    assert (skipped.text, skipped.said, skipped.is_right) == (None, None, False)


@pytest.mark.parametrize(
    "change, message", [({"answers": ["yes"]}, "unequal lengths.*'answers': 1"), ({"facts": None}, "no facts")]
)
def test_rows_that_do_not_fit_are_named(model, processor, rows, change, message):
    row = {name: value for name, value in {**rows[0], **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        predict(model, processor, [row], **QUIET)


def test_models_that_cannot_be_asked(processor, rows):
    broken = tiny_model()
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        predict(broken, processor, rows, batch_size=0, **QUIET)
    with pytest.raises(ValueError, match=r"model\.eval"):
        predict(broken.train(), processor, rows, **QUIET)
    torch.nn.init.constant_(broken.eval().model.text_model.norm.weight, math.nan)
    with pytest.raises(FloatingPointError, match="nan"):
        predict(broken, processor, [rows[0]], **QUIET)


# Perplexity


def test_perplexity_is_exp_of_the_loss(model, processor, rows):
    [row] = [rows[1]]
    inputs = processor(
        images=row["image"], text=[row["questions"]], suffix=[row["answers"]], packed=True, return_tensors="pt"
    )
    with torch.no_grad():
        loss = model(**inputs).loss.item()
    found = perplexity(model, processor, [row], **QUIET)
    assert set(found) == {"all", "synthetic"}
    assert found["all"].cross_entropy == pytest.approx(loss, rel=1e-5)
    assert found["all"].words == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["all"].tokens == int((inputs["labels"] >= 0).sum())


def test_who_knows_nothing_chooses_between_all_words(processor, rows):
    model = tiny_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    assert perplexity(model, processor, [rows[0]], **QUIET)["all"].words == pytest.approx(499, rel=1e-5)  # not [PAD]
    assert perplexity(model, processor, [], **QUIET) == {}


# Other wordings, worse images


def test_rewording_keeps_the_fact(rows):
    row = reword(rows[0], 7)
    assert row["image_id"] == "7"
    assert set(row["answers"]) <= {"yes", "no"}
    for fact in set(row["facts"]):
        texts = [text for text, its in zip(row["questions"], row["facts"]) if its == fact]
        assert 1 < len(texts) == len(set(texts)) <= 4
        assert set(texts) <= set(phrasings(fact))
        assert len({answer for answer, its in zip(row["answers"], row["facts"]) if its == fact}) == 1
    assert reword(rows[0], 7) == row
    assert reword({**rows[0], "facts": ["mine"] * len(rows[0]["facts"])}, 7)["questions"] == []


def test_agreement_compares_wordings_within_an_image(model, processor, rows):
    def said(image_id: str, fact: str, margin: float) -> Prediction:
        return Prediction("a", image_id, "k", "l", fact, "?", "yes", yes_probability(margin, 1.0), margin)

    found = agree([said("1", "x", 3.0), said("2", "x", -3.0), said("1", "x", 3.0), said("1", "y", -1.0)])
    assert (found.same, found.pairs, found.change) == (1.0, 1, 0.0)
    found = phrasing_agreement(model, processor, spread(rows, 2), **QUIET)
    assert found["all"].pairs == sum(one.pairs for kind, one in found.items() if kind != "all") > 50


def test_corruptions_are_repeatable_and_change_the_image(processor, rows):
    image = rows[0]["image"].resize((640, 480))
    for name, worsen in corruptions(processor).items():
        once = worsen(image)
        assert once.size == (224, 224)
        assert once.tobytes() == worsen(image).tobytes(), name
        difference = np.asarray(once, float) - np.asarray(image.resize((224, 224)), float)
        assert np.abs(difference).mean() > 1, name
    dark = corruptions(processor)["darkness, 35% of the light"](Image.new("RGB", (9, 9), (200, 100, 0)))
    assert dark.getpixel((0, 0)) == (70, 35, 0)


def test_mean_image(processor):
    pictures = [{"image": Image.new("RGB", size, (value, 0, 90))} for size, value in (((9, 5), 10), ((300, 300), 30))]
    assert mean_image(pictures, processor).getcolors() == [(224 * 224, (20, 0, 90))]
    with pytest.raises(ValueError, match="at least one"):
        mean_image([], processor)


# Pointing


def test_cells_of_boxes():
    whole, grid = (0, 0, 140, 280), (14, 14)
    assert hit_cells([whole], (140, 280), grid).all()
    left = hit_cells([(0, 0, 70, 280)], (140, 280), grid)
    assert left[:, :7].all() and not left[:, 7:].any()
    tiny = hit_cells([(12, 41, 13, 44)], (140, 280), grid).nonzero().tolist()
    assert tiny == [[2, 1]]  # a cell is 10 × 20 pixels
    pole = hit_cells([(38, 0, 42, 280)], (140, 280), grid)  # narrower than a cell, over two
    assert pole[:, 3:5].all() and pole.sum() == 28
    both = hit_cells([(0, 0, 10, 20), (130, 260, 140, 280)], (140, 280), grid)
    assert both.nonzero().tolist() == [[0, 0], [13, 13]]


def test_maps_are_judged_by_their_strongest_cell():
    target = Target("a", "car", "?", ((0, 0, 70, 70),), (140, 140))  # a quarter of the image
    planted = torch.zeros(14, 14)
    planted[3, 5] = 1.0
    found = judge(target, planted)
    assert (found.hit, found.centre, found.random) == (1.0, 0.25, 0.25)  # of the four cells in the middle one is in
    assert judge(target, planted.flip(1)).hit == 0.0
    assert judge(target, torch.full((14, 14), 1 / 196)).hit == 0.25  # an even map is as good as chance
    assert judge(Target("a", "car", "?", ((40, 40, 100, 100),), (140, 140)), planted).centre == 1.0


def test_words_of_classes_are_found(processor):
    def place(question: str, label: str) -> int | None:
        return find_word(processor, processor(text=question)["input_ids"][0], label)

    assert place("Is there a car left of the bus?", "car") == 4  # after [SOS] is there a
    assert place("Can you see any traffic lights?", "traffic light") == 6
    assert place("Are any people visible?", "person") == 3
    assert place("Is the speed limit 50?", "speed limit sign") is None
    assert place("Is it raining?", "weather") is None


def street() -> dict:
    """An image with a car on the left and none elsewhere."""
    scene = Scene(
        200,
        100,
        (SceneObject("car", (10, 40, 45, 80)),),
        {"view": "driver"},
        frozenset({"car", "bus"}),
        source="mine",
        image_id="1",
    )
    questions = [
        Question("Is there a car?", "yes", "presence", "car", "presence/car"),
        Question("Is there a car on the left?", "yes", "place", "car", "place/car/left"),
        Question("Is there a bus?", "no", "presence", "bus", "presence/bus"),
        Question("Is there a car on the right?", "yes", "place", "car", "place/car/right"),  # a wrong label
        Question("Is this the view of a driver?", "yes", "view", "view", "view/view/is/driver"),
        Question("How many cars are there?", "1", "count", "car", "count/car/what"),
    ]
    return make_row(b"", scene, questions) | {"image": Image.new("RGB", (200, 100), "gray")}


def test_targets_come_from_the_scene():
    targets = list(find_targets(street()))
    assert [target.question for target in targets] == ["Is there a car?", "Is there a car on the left?"]
    assert all(target.boxes == ((10, 40, 45, 80),) and target.size == (200, 100) for target in targets)
    assert list(find_targets({**street(), "scene": None})) == []


def test_word_maps_are_those_of_questions_asked_alone(model, processor, rows):
    image = rows[0]["image"]
    questions, labels = ["Is there a car?", "Is it raining?", "Are there trucks?"], ["car", "weather", "truck"]
    encoded = model.encode_images(processor(images=image, return_tensors="pt")["pixel_values"])
    maps = word_maps(model, processor, encoded, [0, 0, 0], questions, labels)
    assert maps[1] is None
    for question, label, found in zip(questions, labels, maps):
        inputs = processor(images=image, text=question, return_tensors="pt")
        place = find_word(processor, inputs["input_ids"][0].tolist(), label)
        if place is not None:
            torch.testing.assert_close(found, model.attention_maps(**inputs)[0, place], atol=1e-5, rtol=1e-4)
    last = word_maps(model, processor, encoded, [0], ["Is it raining?"], ["weather"], or_last=True)
    inputs = processor(images=image, text="Is it raining?", return_tensors="pt")
    torch.testing.assert_close(last[0], model.attention_maps(**inputs)[0, -1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cell, hit", [((8, 2), 1.0), ((8, 12), 0.0)])
def test_the_game_with_a_planted_map(model, processor, cell, hit):
    """The car stands in rows 6 to 10 and columns 1 to 2 of the grid; only its word looks at `cell`."""

    def attention_maps(input_ids, **inputs):
        maps = torch.zeros(*input_ids.shape, 14, 14)
        maps[..., 0, 0] = 0.5
        maps[input_ids == processor.tokenizer.convert_tokens_to_ids("car")] = torch.zeros(14, 14).index_put(
            tuple(torch.tensor([place]) for place in cell), torch.tensor(1.0)
        )
        return maps

    planted = types.SimpleNamespace(
        attention_maps=attention_maps, encode_images=model.encode_images, device=model.device
    )
    results = point(planted, processor, [street()], **QUIET)
    assert [(one.source, one.label, one.hit) for one in results] == [("mine", "car", hit)] * 2
    assert results[0].random == pytest.approx(10 / 196)


# The report


def test_a_report_holds_what_the_metrics_say(model, processor, rows):
    report = evaluate_model(model, processor, rows, Options(progress=False, corrupted_images=3, reworded_images=2))
    json.dumps(report, allow_nan=False)
    predictions = predict(model, processor, rows, **QUIET)
    found = balanced_accuracy(predictions)
    assert report["yes_no"]["all"]["balanced_accuracy"] == found.value
    assert report["yes_no"]["all"]["facts"] == found.facts
    assert report["yes_no"]["by_source"] == {"synthetic": report["yes_no"]["all"]}
    assert sum(row["all_questions"] for row in report["yes_no"]["by_kind"].values()) == report["questions"]["yes_no"]
    assert report["words"]["all"]["exact_match"] == exact_match(predictions).value
    assert report["images_by_source"] == {"synthetic": 6}
    assert report["baselines"] == "evaluated"
    assert report["robustness"]["images"] == 3
    assert len(report["robustness"]["conditions"]) == 5
    assert (
        sum(report["pointing"]["by_class"][name]["questions"] for name in report["pointing"]["by_class"])
        == (report["pointing"]["all"]["questions"])
    )
    shown = report["examples"]
    assert len({one["row"] for one in shown}) == len(shown)
    assert all(one["question"] in rows[one["row"]]["questions"] for one in shown)
    figures = quick_metrics(model, processor, rows, batch_size=4)
    assert all(isinstance(value, float) for value in figures.values())
    assert figures["balanced_accuracy"] == figures["balanced_accuracy_synthetic"] == pytest.approx(found.value)
    assert figures["ece"] == pytest.approx(report["calibration"]["ece"], abs=1e-4)


def test_the_mean_is_over_sources(model, processor, rows):
    """Five images of one source count as much as one of another."""
    mixed = [{**row, "source": "b" if number else "a"} for number, row in enumerate(rows)]
    report = evaluate_model(model, processor, mixed, Options(progress=False, corrupted_images=0, reworded_images=0))
    found = report["yes_no"]
    values = [row["accuracy"] for row in found["by_source"].values()]
    assert list(found["by_source"]) == ["a", "b"]
    assert found["mean_over_sources"]["accuracy"] == pytest.approx(sum(values) / 2)
    assert found["by_source"]["a"]["facts"] == 0 and found["mean_over_sources"]["error"] == found["all"]["error"]
    assert found["mean_over_sources"]["all_questions"] == found["all"]["all_questions"]
    assert report["robustness"] == report["phrasings"] == {}
    text = to_markdown(report)
    assert "mean over sources" in text and "| b / presence |" in text


def test_words_alone_and_decisions_alone(model, processor, rows):
    options = Options(progress=False, corrupted_images=1, reworded_images=1, mean_images=1)
    for keep, without in ((lambda a: a in ("yes", "no"), "words"), (lambda a: a not in ("yes", "no"), "yes_no")):
        row = dict(rows[0])
        kept = [i for i, answer in enumerate(row["answers"]) if keep(answer)]
        row |= {name: [row[name][i] for i in kept] for name in LISTS}
        report = evaluate_model(model, processor, [row], options, train_rows=rows)
        assert report[without] == {}
        assert report["baselines"] == "training"
        assert "## Perplexity" in to_markdown(report)
        quick_metrics(model, processor, [row])


def test_nothing_to_evaluate(model, processor, rows):
    with pytest.raises(ValueError, match="no images"):
        evaluate_model(model, processor, [])
    row = {**rows[0], **{name: [] for name in LISTS}}
    with pytest.raises(ValueError, match="none of the 1 images"):
        evaluate_model(model, processor, [row], Options(progress=False))
    assert quick_metrics(model, processor, [row]) == {}


def test_rows_are_spread_evenly(rows):
    assert spread(list("abcdef"), 3) == ["a", "c", "e"]
    assert spread("abc", 5) == "abc"
    assert [row["image_id"] for row in spread(rows, 2)] == [rows[0]["image_id"], rows[3]["image_id"]]


# Folders and the script


def test_rows_of_folders(folder, rows):
    assert load_rows([folder])["image_id"] == rows["image_id"]
    assert len(load_rows([folder, folder], split="val")) == 12
    some = load_rows([folder], max_images=3)["image_id"]
    assert len(set(some)) == 3
    assert some == load_rows([folder], max_images=3)["image_id"]


def broken_folder(tmp_path, what: str):
    path = tmp_path / "broken"
    if what == "missing":
        return path
    (path / "data").mkdir(parents=True)
    item, rng = load_item(900), random.Random(0)
    row = make_row(*item, ask(item[1], rng, 4, Balancer()))
    columns = {name: [value] for name, value in row.items() if name != "image"}
    if what == "no column":
        Dataset.from_dict(columns).to_parquet(str(path / "data" / "val-00000.parquet"))
    elif what == "no rows":
        Dataset.from_dict({name: [] for name in columns}).to_parquet(str(path / "data" / "val-00000.parquet"))
    elif what == "two splits":
        for split in ("train", "val"):
            Dataset.from_dict(columns).to_parquet(str(path / "data" / f"{split}-00000.parquet"))
    elif what == "torn":
        (path / "data" / "val-00000.parquet").write_bytes(b"PAR1 and then nothing")
    return path


@pytest.mark.parametrize(
    "what, message",
    [
        ("missing", "no such dataset folder"),
        ("empty", "has neither data/"),
        ("torn", "the dataset cannot be read"),
        ("no rows", "the dataset (has no rows|cannot be read: .*no data)"),
        ("no column", "has no column image"),
        ("two splits", "has the splits train, val; --split"),
    ],
)
def test_dataset_folders_that_cannot_be_used(tmp_path, what, message):
    with pytest.raises(DataError, match=message) as caught:
        load_rows([broken_folder(tmp_path, what)])
    assert "\n" not in str(caught.value)


def test_of_several_splits_training_takes_its_own(tmp_path, folder):
    rows = load_rows([folder])
    (tmp_path / "mine/data").mkdir(parents=True)
    for split, count in (("train", 4), ("val", 2)):
        rows.select(range(count)).to_parquet(str(tmp_path / f"mine/data/{split}-00000.parquet"))
    assert len(load_rows([tmp_path / "mine"], prefer="train")) == 4
    assert len(load_rows([tmp_path / "mine"], split="val", prefer="train")) == 2
    assert load_rows([folder], prefer="train")["image_id"] == rows["image_id"]  # it has no train


def test_folders_of_one_name_are_told_apart(tmp_path):
    for drive in ("drive1", "drive2"):
        (tmp_path / drive / "val").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / drive / "val/1.png")
        line = {"file_name": "1.png", "questions": ["Is there a car?"], "answers": ["yes"]}
        (tmp_path / drive / "val/metadata.jsonl").write_text(json.dumps(line))
    folders = [tmp_path / "drive1/val", tmp_path / "drive2/val"]
    assert load_rows(folders)["source"] == ["drive1/val", "drive2/val"]
    assert load_rows(folders[:1] * 2)["source"] == ["val", "val"]  # twice the same
    deep = [tmp_path / name for name in ("drive1/frames/val", "drive2/frames/val", "other")]
    assert source_names(deep) == ["drive1/frames/val", "drive2/frames/val", "other"]


def test_model_folders_that_cannot_be_used(model_folder, tmp_path):
    for path, message in ((tmp_path / "none", "no such model folder"), (tmp_path, r"no config\.json")):
        with pytest.raises(DataError, match=message):
            load_model(path)
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    with pytest.raises(DataError, match="has no weights"):
        load_model(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(DataError, match="cannot be loaded"):  # there is no tokenizer
        load_model(tmp_path)
    config = json.loads((model_folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 3
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"the weights have no .*layers\.2"):
        load_model(tmp_path)


def test_only_the_temperature_is_written(model_folder, tmp_path):
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    write_temperature(tmp_path, 2.5)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {"config.json", "decision.json"}
    assert after.keys() == before.keys()
    config = json.loads(before["config.json"])
    assert json.loads(after["config.json"]) == config | {"yes_no_temperature": 2.5}
    assert json.loads(after["decision.json"])["temperature"] == {"noul": 2.5}
    assert load_model(tmp_path)[0].config.yes_no_temperature == 2.5


def run_script(monkeypatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, options)])
    runpy.run_path(str(ROOT / "scripts" / "evaluate.py"), run_name="__main__")


def test_the_script_from_end_to_end(folder, model_folder, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for file in model_folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    output = tmp_path / "report"
    options = ("--model", model, "--dataset", folder, "--train_dataset", folder, "--output_dir", output)
    sizes = ("--batch_size", 3, "--corrupted_images", 2, "--reworded_images", 2)
    run_script(monkeypatch, *options, *sizes, "--bf16", "--write_temperature")
    names = {"report.json", "report.md", "reliability.png", "kinds.png", "examples.png"}
    assert {file.name for file in output.iterdir()} == names
    report, text = json.loads((output / "report.json").read_text()), (output / "report.md").read_text()
    assert report["datasets"] == [str(folder)]
    assert report["images"] == 6
    assert {name for name in names if name in text} == {"reliability.png", "kinds.png", "examples.png"}
    for name in names - {"report.json", "report.md"}:
        with Image.open(output / name) as picture:
            assert min(picture.size) > 300
    printed = capsys.readouterr().out
    temperature = json.loads((model / "config.json").read_text())["yes_no_temperature"]
    assert temperature == report["calibration"]["fitted_temperature"]
    assert f"{temperature:.3f}" in printed and "balanced accuracy" in printed


@pytest.mark.parametrize(
    "change, message",
    [
        ({"--dataset": "/nowhere"}, "no such dataset folder"),
        ({"--model": ROOT / "docs"}, "no config.json"),
        ({"--split": "test"}, "no split 'test', only"),
        ({"--max_images": 0}, "--max_images must be at least 1, got 0"),
        ({"--batch_size": 0}, "--batch_size must be at least 1, got 0"),
    ],
)
def test_the_script_says_in_one_line_what_is_wrong(folder, model_folder, tmp_path, monkeypatch, change, message):
    options = {"--model": model_folder, "--dataset": folder, "--output_dir": tmp_path / "report"} | change
    with pytest.raises(SystemExit) as caught:
        run_script(monkeypatch, *[str(part) for pair in options.items() for part in pair])
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.code not in (0, None)

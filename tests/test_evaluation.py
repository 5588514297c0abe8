"""Evaluation: predictions against the pipeline, questions that are made for it, the report, and the script."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from PIL import Image

from tiny import save_folder, tiny_model, yes_no_model
from traffic_vlm.data.dataset import FEATURES, make_row, synthetic_rows
from traffic_vlm.data.folders import LISTS, load_rows
from traffic_vlm.data.questions import Question
from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.data.templates import paraphrases_of
from traffic_vlm.evaluation.grounding import patches_in_boxes, score_pointing, word_map
from traffic_vlm.evaluation.markdown import to_markdown
from traffic_vlm.evaluation.metrics import accuracy, balanced_accuracy, by_group, exact_match
from traffic_vlm.evaluation.predict import ANSWERS, answer_loss, mean_image, normalize, predict
from traffic_vlm.evaluation.report import Options, evaluate_model, quick_metrics
from traffic_vlm.evaluation.robustness import (
    AGREEMENT,
    CORRUPTIONS,
    contradictions,
    corrupted_accuracy,
    corruption,
    paraphrase,
    paraphrase_pairs,
)
from traffic_vlm.evaluation.thresholds import load_thresholds
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline


@pytest.fixture(scope="module")
def model():
    """A tiny model; tests must not change it."""
    return tiny_model(yes_no_temperature=2.0)


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


def own_row(row: dict, questions: list[str], answers: list[str]) -> dict:
    return {**row, **{name: ["own"] * len(questions) for name in LISTS}, "questions": questions, "answers": answers}


# Predictions


def test_evaluation_measures_what_the_pipeline_answers(model, processor, rows):
    found = predict(model, processor, rows, batch_size=4)
    assert list(found.columns) == list(ANSWERS) and list(found.index) == list(range(len(found)))
    pipe = TrafficVLMPipeline(model=model, processor=processor, device="cpu")
    answers = [item for row in rows for item in pipe(row["image"], list(row["questions"]))]
    asked = [(row, i) for row in rows for i in range(len(row["questions"]))]
    for one, (row, i), item in zip(found.itertuples(), asked, answers, strict=True):
        assert (one.question, [one.truth]) == (row["questions"][i], normalize(processor, [row["answers"][i]]))
        assert (one.question_type, one.category, one.question_id) == tuple(row[name][i] for name in LISTS[2:])
        assert (one.source, one.kind, one.image_id) == ("synthetic", "rendered", row["image_id"])
        score = item["score"] or math.nan
        assert one.answer == item["answer"] and one.score == pytest.approx(score, nan_ok=True, abs=1e-5)
        assert item["p_yes"] is None or one.p_yes == pytest.approx(item["p_yes"], abs=1e-5)
        assert one.is_right == (one.answer == one.truth)
    assert 5 < found["answer"].isin(["yes", "no"]).sum() < len(found) - 5


def test_a_question_with_a_problem_counts_as_wrong_and_has_no_probability(model, processor, rows):
    asked = ["Isn't there a car?", "Is there no car?", "Is there any car?", "Who is driving?"]
    row = own_row(rows[0], asked, ["yes", "no", "yes", "a person"])
    problem, negated, positive, untaught = predict(model, processor, [row]).itertuples()
    for one in (problem, untaught):
        assert one.answer is None and not one.is_right and all(map(math.isnan, (one.score, one.p_yes, one.margin)))
    assert negated.margin == -positive.margin and negated.p_yes == pytest.approx(1 - positive.p_yes, abs=1e-6)
    assert negated.is_right == positive.is_right


def test_the_truth_does_not_decide_how_a_question_is_asked(model, processor, rows):
    changed = [{**row, "answers": ["red" if a in ("yes", "no") else "yes" for a in row["answers"]]} for row in rows]
    one, other = (predict(model, processor, some).drop(columns=["truth", "is_right"]) for some in (rows, changed))
    pd.testing.assert_frame_equal(one, other)


def test_answers_are_compared_as_the_tokenizer_writes_them(model, processor, rows):
    row = own_row(rows[0], ["What color is it?", "Is it a car?", "What is ahead?"], ["Grey", " YES", "red zebra"])
    found = predict(model, processor, [row], generate_words=False)
    assert list(found["truth"]) == ["gray", "yes", "red [UNK]"]
    assert found["answer"][0] is None and found["answer"][1] in ("yes", "no")  # words were left out


def test_many_questions_of_an_image_and_images_without_any(model, processor, rows):
    none, three, many = ({**rows[0], **{name: rows[0][name][:3] * n for name in LISTS}} for n in (0, 1, 25))
    margins = list(predict(model, processor, [none, many, none])["margin"])
    assert margins == pytest.approx(margins[:3] * 25, abs=1e-4)
    once, often = (answer_loss(model, processor, [row]) for row in (three, many))
    assert often == pytest.approx(once, rel=1e-5)
    assert predict(model, processor, [none]).empty and answer_loss(model, processor, [none]) is None


def test_the_mean_image_is_encoded_once_and_scores_one_half(monkeypatch, processor, rows):
    pictures = [{"image": Image.new("RGB", size, (value, 0, 90))} for size, value in (((9, 5), 10), ((300, 300), 30))]
    average = mean_image(pictures, processor)
    assert average.getcolors() == [(256 * 256, (20, 0, 90))]
    with pytest.raises(ValueError, match="at least one"):
        mean_image([], processor)
    model, sizes = yes_no_model(), []
    encode_images = model.encode_images
    monkeypatch.setattr(model, "encode_images", lambda pixels: sizes.append(len(pixels)) or encode_images(pixels))
    question = ["Is there a car?", "Is it raining?"]
    asked = [own_row(row, question, ["yes", "no"] if i % 2 else ["no", "yes"]) for i, row in enumerate(list(rows) * 4)]
    found = predict(model, processor, [{**row, "question_ids": question} for row in asked], image=average)
    assert sizes == [1] and found.groupby("question")["answer"].nunique().tolist() == [1, 1]
    assert balanced_accuracy(found) == 0.5


def test_lists_of_unequal_lengths_are_refused(model, processor, rows):
    with pytest.raises(ValueError, match="is shorter than"):
        predict(model, processor, [{**rows[0], "answers": ["yes"]}])


def test_the_loss_of_answers_is_a_mean_over_tokens(model, processor, rows):
    """Batches of different sizes give the same mean; equal logits give the logarithm of all words but [PAD]."""
    assert answer_loss(model, processor, rows, 2) == pytest.approx(answer_loss(model, processor, rows, 5), rel=1e-5)
    uniform = tiny_model()
    torch.nn.init.zeros_(uniform.lm_head.weight)
    assert answer_loss(uniform, processor, rows) == pytest.approx(math.log(499), rel=1e-5)


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


def test_agreement_by_hand():
    """Pairs of x: 0.6-0.4 differ, 0.6-0.9 agree, 0.4-0.9 differ; of y, both no. The second image has no pair."""
    asked = [("1", "x", 0.6), ("1", "x", 0.4), ("1", "x", 0.9), ("1", "y", 0.1), ("1", "y", 0.3), ("2", "x", 0.7)]
    answers = pd.DataFrame(asked, columns=["image_id", "question_id", "p_yes"]).assign(source="a", question_type="z")
    found = by_group(paraphrase_pairs(answers), AGREEMENT, "question_type").loc["z"]
    assert found.to_list() == [0.5, pytest.approx((0.2 + 0.3 + 0.5 + 0.2) / 4), 4]


def test_contradictions_in_closed_form(monkeypatch, rows):
    """Whoever says yes to everything denies nothing that a yes implies, and affirms all that exclude each other."""

    def say_yes(model, processor, asked, **settings):
        return pd.DataFrame({"p_yes": [0.9 for row in asked for _ in row["questions"]]})

    monkeypatch.setattr("traffic_vlm.evaluation.robustness.predict", say_yes)
    found = contradictions(None, None, rows)["contradict"]
    assert len(found) == 41 and found.to_dict() == {name: float("≠" in name) for name in found.index}


def test_corruptions_are_repeatable_and_change_the_image(model, processor, rows):
    image = rows[0]["image"].resize((640, 480))
    for name, change in CORRUPTIONS.items():
        corrupt = corruption(change, processor)
        once = corrupt(image)
        assert once.size == (256, 256) and once.tobytes() == corrupt(image).tobytes(), name
        difference = np.asarray(once, float) - np.asarray(image.resize((256, 256)), float)
        assert np.abs(difference).mean() > 1, name
    answers = predict(model, processor, rows)
    few = [row for row in rows if row["image_id"] != rows[0]["image_id"]]
    found = corrupted_accuracy(model, processor, few, answers)["balanced accuracy"]
    kept = answers[answers["image_id"] != rows[0]["image_id"]]
    assert list(found.index) == ["as it is", *CORRUPTIONS] and found["as it is"] == balanced_accuracy(kept)


# Grounding


def test_patches_in_boxes():
    grid = (14, 14)
    assert patches_in_boxes([(0, 0, 1, 1)], grid).all()
    left = patches_in_boxes([(0, 0, 0.5, 1)], grid)
    assert left[:, :7].all() and not left[:, 7:].any()
    assert patches_in_boxes([(1.2 / 14, 2.1 / 14, 1.3 / 14, 2.2 / 14)], grid).nonzero().tolist() == [[2, 1]]
    pole = patches_in_boxes([(3.8 / 14, 0, 4.2 / 14, 1)], grid)  # narrower than a patch, over two
    assert pole[:, 3:5].all() and pole.sum() == 28
    both = patches_in_boxes([(0, 0, 1 / 14, 1 / 14), (13 / 14, 13 / 14, 1, 1)], grid)
    assert both.nonzero().tolist() == [[0, 0], [13, 13]]


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


def test_the_map_of_a_word_is_that_of_its_category(model, processor, rows):
    pipe, image = TrafficVLMPipeline(model=model, processor=processor, device="cpu"), rows[0]["image"]
    for question, category, position in (
        ("Is there a car left of the bus?", "car", 4),  # after [SOS] is there a
        ("Can you see any traffic lights?", "traffic light", 6),
        ("Is the speed limit 50?", "speed limit sign", None),
        ("Is it raining?", "weather", None),
    ):
        found = word_map(pipe, pipe.encode(image), question, category)
        maps = model.attention_maps(**processor(images=image, text=question, return_tensors="pt"))[0]
        assert found is None if position is None else torch.allclose(found, maps[position], atol=1e-5)


def test_a_planted_map_decides_the_pointing_accuracy(model, processor, monkeypatch):
    """The car fills rows 6 to 10 and columns 1 to 2 of the patches; only its word attends to the planted patch."""
    for patch, share in (((8, 2), 1.0), ((8, 12), 0.0)):

        def attention_maps(input_ids, patch=patch, **inputs):
            maps = torch.zeros(*input_ids.shape, 14, 14)
            maps[..., 0, 0] = 0.5
            planted = torch.zeros(14, 14)
            planted[patch] = 1.0
            maps[input_ids == processor.tokenizer.convert_tokens_to_ids("car")] = planted
            return maps

        monkeypatch.setattr(model, "attention_maps", attention_maps)
        results = score_pointing(model, processor, [street()])
        assert results[["source", "category", "highest"]].to_numpy().tolist() == [["mine", "car", share]] * 2
        assert results["random"][0] == pytest.approx(10 / 196)


# The report


def test_a_report_holds_what_the_metrics_give(model, processor, rows):
    mixed = [{**row, "source": ["a", "unseen_b", "synthetic"][i % 3]} for i, row in enumerate(rows)]
    answers = predict(model, processor, mixed)
    report = evaluate_model(model, processor, mixed, answers, Options(corrupted_images=2, paraphrased_images=2))
    tables = report["tables"]
    assert report["images_by_source"] == {"a": 2, "synthetic": 2, "unseen_b": 2}
    assert report["questions"]["yes_no"] + report["questions"]["words"] == len(answers)
    assert list(tables["yes_no_by_kind"]) == ["known", "unseen", "rendered"]
    for kind, row in tables["yes_no_by_kind"].items():
        some = answers[(answers["kind"] == kind) & answers["truth"].isin(["yes", "no"])]
        assert row["balanced accuracy"] == balanced_accuracy(some) and row["accuracy"] == accuracy(some)
        assert row["questions"] == len(some)
    assert tables["yes_no_by_source"]["a"] == tables["yes_no_by_kind"]["known"]
    words = tables["words_by_source"]["synthetic"]
    assert words["exact match"] == exact_match(answers[answers["source"] == "synthetic"])
    assert report["calibration"]["fitted_on"] == ["unseen_b"] and len(tables["robustness"]) == 5
    assert sum(row["questions"] for row in tables["pointing_by_category"].values()) > 0
    read = json.loads(json.dumps(report, allow_nan=False))
    assert read == report and to_markdown(read) == to_markdown(report)
    text = to_markdown(report)
    assert all(f"| {name} |" in text for name in (*tables["yes_no_by_kind"], *tables["yes_no_by_category"]))


def test_training_follows_the_metrics_of_the_report(model, processor, rows):
    answers = predict(model, processor, rows)
    metrics = quick_metrics(model, processor, rows, batch_size=4)
    assert all(isinstance(value, float) for value in metrics.values())
    assert metrics == pytest.approx(quick_metrics(model, processor, rows, answers=answers), rel=1e-5)
    assert metrics["balanced_accuracy"] == metrics["balanced_accuracy_synthetic"] == balanced_accuracy(answers)
    assert math.log(metrics["words"]) == pytest.approx(metrics["answer_loss"])
    assert metrics.keys() >= {"exact_match", "accuracy", "ece"}
    one = quick_metrics(model, processor, [own_row(rows[0], ["Is it a car?"] * 2, ["yes", "no"])])
    assert one["balanced_accuracy"] == 0.5 and "exact_match" not in one  # a figure even for two questions


# The script


def test_the_script_writes_a_report_plots_thresholds_and_the_temperature(folder, model, tmp_path, run_script, capsys):
    model, output = save_folder(model, tmp_path / "model"), tmp_path / "report"
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    options = ("--model", model, "--dataset", folder, "--train_dataset", folder, "--output_dir", output)
    sizes = ("--batch_size", 3, "--corrupted_images", 2, "--paraphrased_images", 2)
    run_script("evaluate.py", *options, *sizes, "--bf16", "--write_temperature")
    names = {"report.json", "report.md", "reliability.png", "question_types.png"}
    assert {file.name for file in output.iterdir()} == names | {"predictions.parquet", "thresholds.json"}
    report, text = json.loads((output / "report.json").read_text()), (output / "report.md").read_text()
    assert report["datasets"] == [str(folder)] and report["images"] == 6
    assert report["repeated"] == {"synthetic": 6} and "whose figures are too high: {'synthetic': 6}" in text
    assert {name for name in names if name in text} == {"reliability.png", "question_types.png"}
    for path in output.glob("*.png"):
        with Image.open(path) as plot:
            assert min(plot.size) > 200
    assert "| rendered | " in capsys.readouterr().out
    answers = pd.read_parquet(output / "predictions.parquet")
    assert list(answers["question"]) == [question for row in load_rows([folder]) for question in row["questions"]]
    yes_no = answers[answers["truth"].isin(["yes", "no"])]
    assert report["tables"]["yes_no_by_kind"]["rendered"]["balanced accuracy"] == balanced_accuracy(yes_no)
    # The fitted temperature was written, so the thresholds are for P(yes) at this temperature.
    temperature = report["calibration"]["fitted_temperature"]
    default = load_thresholds(output / "thresholds.json").default
    said_yes = 1 / (1 + np.exp(-yes_no["margin"] / temperature)) >= default.threshold
    assert default.recall == pytest.approx(said_yes[yes_no["truth"] == "yes"].mean(), abs=1e-4)
    assert (default.yes, default.no) == tuple((yes_no["truth"] == truth).sum() for truth in ("yes", "no"))
    after = {file.name: file.read_bytes() for file in model.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} <= {"config.json", "decision.json"}
    config = json.loads(before["config.json"])
    assert json.loads(after["config.json"]) == config | {"yes_no_temperature": temperature}
    assert json.loads(after["decision.json"])["temperature"] == {"noul": temperature}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--unseen sythetic", "--unseen sythetic: none of the 1 images is of this source, only of synthetic"),
        ("--write_temperature", "--write_temperature needs at least 10 questions with the answer yes"),
    ],
)
def test_the_script_fits_no_temperature_to_other_sources_or_few_questions(
    folder, model, tmp_path, run_script, capsys, option, message
):
    model = save_folder(model, tmp_path / "model")
    before = (model / "config.json").read_bytes()
    options = ("--model", model, "--dataset", folder, "--output_dir", tmp_path / "out", "--max_images", 1)
    sizes = ("--corrupted_images", 0, "--paraphrased_images", 0, "--grounding_images", 0)
    run_script("evaluate.py", *options, *sizes, *option.split(), status=2)
    assert message in capsys.readouterr().err and (model / "config.json").read_bytes() == before

"""Evaluation: the table of answers, consistency, the report, and scripts/evaluate.py."""

import json
import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from PIL import Image

from tiny import any_size_model, count_calls, save_folder, tiny_model, yes_no_model
from traffic_vlm.data.datasets import FEATURES, LISTS, load_rows, synthetic_rows
from traffic_vlm.data.grammar import paraphrases_of
from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.evaluation.consistency import agreement, contradictions, paraphrase
from traffic_vlm.evaluation.markdown import headline
from traffic_vlm.evaluation.metrics import at_temperature, balanced_accuracy, calibration_error, exact_match, is_yes_no
from traffic_vlm.evaluation.predict import ANSWERS, loss_metrics, mean_image, normalize, predict
from traffic_vlm.evaluation.report import answer_metrics
from traffic_vlm.evaluation.thresholds import fit_thresholds, load_thresholds
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline


KINDS = {"a": "known", "unseen_b": "unseen", "synthetic": "rendered"}


@pytest.fixture(scope="module")
def model():
    """A tiny model; tests must not change it."""
    return tiny_model(yes_no_temperature=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of six rendered images, two of each kind of source."""
    path = tmp_path_factory.mktemp("dataset")
    (path / "data").mkdir()
    made = synthetic_rows(first_seed=900, num_images=6, questions_per_image=48)
    columns = {name: [row[name] for row in made] for name in FEATURES} | {"source": [*KINDS] * 2}
    Dataset.from_dict(columns, features=FEATURES).to_parquet(str(path / "data" / "val-00000.parquet"))
    return path


@pytest.fixture(scope="module")
def rows(folder):
    return list(load_rows([folder]))


@pytest.fixture(scope="module")
def answers(model, processor, rows):
    return predict(model, processor, rows, batch_size=4)


def load(model, processor) -> TrafficVLMPipeline:
    return TrafficVLMPipeline(model=model, processor=processor, device="cpu")


def asking(row: dict, questions: list[str], truths: list[str]) -> dict:
    """The row with these questions, each with a question id of its own."""
    lists = {name: ["own"] * len(questions) for name in LISTS}
    return row | lists | {"questions": questions, "answers": truths, "question_ids": questions}


# The table of answers


def test_what_is_measured_is_what_the_pipeline_answers(model, processor, rows, answers):
    asked, pipe = [(row, i) for row in rows for i in range(len(row["questions"]))], load(model, processor)
    items = [item for row in rows for item in pipe(row["image"], list(row["questions"]), answer_untaught=True)]
    assert list(answers.columns) == list(ANSWERS) and list(answers.index) == list(range(len(asked)))
    for one, (row, i), item in zip(answers.itertuples(), asked, items, strict=True):
        assert (one.question, [one.truth]) == (row["questions"][i], normalize(processor, [row["answers"][i]]))
        assert (one.question_type, one.category, one.question_id) == tuple(row[name][i] for name in LISTS[2:])
        assert (one.source, one.kind, one.image_id) == (row["source"], KINDS[row["source"]], row["image_id"])
        assert (one.answer, one.is_right) == (item["answer"], item["answer"] == one.truth)
        assert one.score == pytest.approx(item["score"] or math.nan, nan_ok=True, abs=1e-5)
        assert one.p_yes == pytest.approx(item["p_yes"] or math.nan, nan_ok=True, abs=1e-5)
        assert math.isfinite(one.margin)  # also of a question in words
    assert 5 < answers["answer"].isin(["yes", "no"]).sum() < len(answers) - 5


def test_a_question_with_a_problem_counts_as_wrong_and_has_no_probability(model, processor, rows):
    asked = ["Isn't there a car?", "Who is driving?", "Is there no car?", "Is there any car?"]
    row = asking(rows[0], asked, ["yes", "a person", "no", "yes"])
    problem, untaught, negated, positive = predict(model, processor, [row]).itertuples()
    for one in (problem, untaught):
        assert one.answer is None and not one.is_right and all(map(math.isnan, (one.score, one.p_yes, one.margin)))
    assert negated.margin == pytest.approx(-positive.margin, abs=1e-5)
    assert negated.p_yes == pytest.approx(1 - positive.p_yes, abs=1e-6)
    assert negated.is_right == positive.is_right


def test_the_truth_does_not_decide_how_a_question_is_asked(model, processor, rows, answers):
    changed = [row | {"answers": ["red" if a in ("yes", "no") else "yes" for a in row["answers"]]} for row in rows]
    one, other = (some.drop(columns=["truth", "is_right"]) for some in (answers, predict(model, processor, changed)))
    pd.testing.assert_frame_equal(one, other, atol=1e-5)


def test_truths_are_written_as_answers_and_refused_questions_are_answered(model, processor, rows):
    row = asking(rows[0], ["What color is it?", "Is there a zebra?", "What is ahead?"], ["Grey", " YES", "red zebra"])
    found = predict(model, processor, [row])
    assert list(found["truth"]) == ["gray", "yes", "red [UNK]"]
    assert found["answer"][1] in ("yes", "no")


def test_rows_without_questions_are_left_out_and_torn_ones_refused(model, processor, rows):
    none = asking(rows[0], [], [])
    assert predict(model, processor, [none]).empty and loss_metrics(model, processor, [none]) == {}
    assert list(predict(model, processor, [none, rows[0], none])["question"]) == rows[0]["questions"]
    with pytest.raises(ValueError, match="is shorter than"):
        predict(model, processor, [rows[0] | {"answers": ["yes"]}])


def test_a_model_that_is_shown_the_mean_image_scores_one_half(processor, rows):
    pictures = [{"image": Image.new("RGB", size, (value, 0, 90))} for size, value in (((9, 5), 10), ((300, 300), 30))]
    average = mean_image(pictures, processor)
    assert average.getcolors() == [(256 * 256, (20, 0, 90))]
    model, truths = yes_no_model(), [["yes", "no"], ["no", "yes"]] * 10
    encoded = count_calls(model.model.vision_tower)
    asked = [asking(rows[0], ["Is there a car?", "Is it raining?"], some) for some in truths]
    found = predict(model, processor, asked, image=average)
    assert len(encoded) == 1 and balanced_accuracy(found) == pytest.approx(0.5)


def test_the_loss_of_answers_is_a_mean_over_tokens(model, processor, rows):
    """Batches of different sizes give the same mean; equal logits give the logarithm of all words but [PAD]."""
    assert loss_metrics(model, processor, rows, 2) == pytest.approx(loss_metrics(model, processor, rows, 5), rel=1e-5)
    night = [asking(rows[0], [f"Is it night?{more}"], ["no"]) for more in ("", " Answer yes or no.")]
    assert loss_metrics(model, processor, night[:1]) == loss_metrics(model, processor, night[1:])  # as it is asked
    uniform = tiny_model()
    torch.nn.init.zeros_(uniform.lm_head.weight)
    assert loss_metrics(uniform, processor, rows)["perplexity"] == pytest.approx(499, rel=1e-4)


# Consistency


def test_paraphrases_keep_the_question_id(rows):
    row = paraphrase(rows[0])
    assert row == paraphrase(rows[0]) and set(row["answers"]) <= {"yes", "no"}
    for question_id in set(row["question_ids"]):
        texts = [text for text, other in zip(row["questions"], row["question_ids"]) if other == question_id]
        assert 1 < len(texts) == len(set(texts)) <= 4 and set(texts) <= set(paraphrases_of(question_id))
    assert paraphrase(asking(rows[0], ["Is it a car?"], ["yes"]))["questions"] == []


def test_agreement_of_paraphrases_by_hand():
    """Pairs of x: 0.6-0.4 differ, 0.6-0.9 agree, 0.4-0.9 differ; of y, both no. The second image has no pair."""
    asked = [("1", "x", 0.6), ("1", "x", 0.4), ("1", "x", 0.9), ("1", "y", 0.1), ("1", "y", 0.3), ("2", "x", 0.7)]
    answers = pd.DataFrame(asked, columns=["image_id", "question_id", "p_yes"]).assign(source="a", question_type="z")
    found = agreement(answers)
    assert list(found.index) == ["all", "z"]
    assert found.loc["z"].to_list() == [0.5, pytest.approx((0.2 + 0.3 + 0.5 + 0.2) / 4), 4]
    assert agreement(answers[:0]).empty


def test_contradictions_are_those_of_the_two_answers(processor, rows):
    """Each row names its two questions: "A → B" if a yes to A implies one to B, "A ≠ B" if both exclude each other."""
    model = tiny_model(seed=5, yes_no_temperature=0.05)  # sure of its random answers
    found = contradictions(partial(predict, model, processor), rows)["contradict"]
    pipe = load(model, processor)
    questions = sorted({text for name in found.index for text in name.replace("≠", "→").split(" → ")})
    items = [item for row in rows for item in pipe(row["image"], questions)]
    p = {text: np.array([item["p_yes"] for item in items if item["question"] == text]) for text in questions}
    for name, fraction in found.items():
        one, sign, other = name.partition(" ≠ " if "≠" in name else " → ")
        excess = p[one] - p[other] if sign == " → " else p[one] + p[other] - 1
        assert fraction == np.mean(excess > 0.1), name
    assert found.is_monotonic_decreasing


# The report


def test_training_follows_the_metrics_of_the_report(model, processor, rows, answers):
    metrics = answer_metrics(answers)
    assert metrics["balanced_accuracy"] == balanced_accuracy(answers)
    assert metrics["balanced_accuracy_a"] == balanced_accuracy(answers[answers["source"] == "a"])
    two = predict(model, processor, [asking(rows[0], ["Is it a car?", "Is it a car?"], ["yes", "no"])])
    metrics = answer_metrics(two)
    figures = dict.fromkeys(("balanced_accuracy", "balanced_accuracy_a"), 0.5)  # even for two questions
    figures["ece"] = pytest.approx(abs(two["p_yes"][0] - 0.5))
    assert {name: metrics[name] for name in figures} == figures and "exact_match" not in metrics


def contents(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_script_writes_report_answers_thresholds_and_temperature(
    folder, model, processor, rows, answers, tmp_path, run_script, capsys
):
    path, output = save_folder(model, tmp_path / "model"), tmp_path / "report"
    before = contents(path)
    options = ("--model", path, "--dataset", folder, "--train_dataset", folder, "--output_dir", output)
    run_script("evaluate.py", *options, "--batch_size", 4, "--paraphrased_images", 1, "--write_temperature")
    names = ["report.json", "report.md", "predictions.parquet", "thresholds.json", "reliability.png"]
    assert contents(output).keys() == {*names, "question_types.png"}
    found = pd.read_parquet(output / "predictions.parquet")
    pd.testing.assert_frame_equal(found.fillna({"answer": ""}), answers.fillna({"answer": ""}), check_dtype=False)

    text, report = (output / "report.md").read_text(), json.loads((output / "report.json").read_text())
    tables = report["tables"]
    assert report["datasets"] == [str(folder)] and report["images_by_source"] == dict.fromkeys(sorted(KINDS), 2)
    assert report["repeated"] == dict.fromkeys(sorted(KINDS), 2)  # the same images are in --train_dataset
    assert list(tables["yes_no_by_kind"]) == ["known", "unseen", "rendered"]
    for kind, row in tables["yes_no_by_kind"].items():
        chosen = (answers["kind"] == kind) & is_yes_no(answers)
        assert row["questions"] == sum(chosen) and row["balanced accuracy"] is None  # too few to tell
        assert row["calibration error"] == pytest.approx(calibration_error(answers[chosen]))
    assert tables["words_by_source"]["a"]["exact match"] == exact_match(answers[answers["source"] == "a"])
    assert tables["contradictions"] and tables["paraphrases"]
    assert headline(report) in capsys.readouterr().out
    assert all(f"| {name} |" in text for some in tables.values() for name in some)
    assert "reliability.png" in text and "question_types.png" in text

    # The temperature of unseen sources was written, and the thresholds are for their P(yes) at this temperature.
    temperature, fitted = report["calibration"]["fitted_temperature"], answers[answers["source"] == "unseen_b"]
    default = load_thresholds(output / "thresholds.json").default
    assert default == fit_thresholds(at_temperature(fitted, temperature)).default
    after = contents(path)
    assert {name for name in after if after[name] != before.get(name)} == {"config.json"}
    assert json.loads(after["config.json"]) == json.loads(before["config.json"]) | {"yes_no_temperature": temperature}


def test_another_size_of_images_gets_its_own_temperature(folder, processor, rows, tmp_path, run_script):
    path, output = save_folder(any_size_model(), tmp_path / "model"), tmp_path / "report"
    before = json.loads((path / "config.json").read_text())
    options = ("--model", path, "--dataset", folder, "--output_dir", output, "--paraphrased_images", 0)
    run_script("evaluate.py", *options, "--image_size", "224,320", "--write_temperature")
    report, found = json.loads((output / "report.json").read_text()), pd.read_parquet(output / "predictions.parquet")
    assert report["image_size"] == [224, 320]
    pipe = TrafficVLMPipeline(any_size_model(), processor=processor, image_size=(224, 320), answer_untaught=True)
    margins = [item["margin"] for row in rows for item in pipe(row["image"], list(row["questions"]), margins=True)]
    assert found["margin"].to_numpy() == pytest.approx(margins, abs=1e-4)
    changed = before | {"size_temperatures": {"268": report["calibration"]["fitted_temperature"]}}
    assert json.loads((path / "config.json").read_text()) == changed


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--unseen sythetic", "--unseen sythetic: no image is of this source, only of a"),
        ("--write_temperature", "--write_temperature needs 10 questions with the answer yes"),
    ],
)
def test_what_cannot_be_fitted_changes_no_model(folder, model, tmp_path, run_script, capsys, option, message):
    model = save_folder(model, tmp_path / "model")
    before = contents(model)
    options = ("--model", model, "--dataset", folder, "--output_dir", tmp_path / "out", "--max_images", 1)
    run_script("evaluate.py", *options, "--paraphrased_images", 0, *option.split(), status=2)
    assert message in capsys.readouterr().err and contents(model) == before


def test_the_largest_object_of_the_asked_class_has_a_side(model, processor, rows):
    """Its shorter one, as a fraction of the image."""
    scene = Scene(100, 200, (SceneObject("car", (0, 0, 4, 100)), SceneObject("car", (0, 0, 3, 3))))
    row = asking(rows[0], ["Is there a vehicle?", "Is there a bus?"], ["yes", "no"]) | {"scene": scene.to_json()}
    found = predict(model, processor, [row | {"categories": ["vehicle", "bus"]}])
    assert found["side"].tolist() == [0.04, pytest.approx(math.nan, nan_ok=True)]

"""Taught words: counted in training, judged by evaluation, saved in processor_config.json."""

import json

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tiny import ROOT, load_script
from traffic_vlm.evaluation.taught import asked_often, update_taught, word_gains
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.training.collator import SupervisedCollator


def taught(photographs: str = "", rendered: str = "") -> dict[str, list[str]]:
    return {"photographs": photographs.split(), "rendered": rendered.split()}


def test_untaught_words_are_reported_like_unknown_ones(tmp_path):
    processor = TrafficVLMProcessor.from_pretrained(ROOT)
    processor.taught = taught("car", "cone")
    processor.save_pretrained(tmp_path)
    processor = TrafficVLMProcessor.from_pretrained(tmp_path)
    assert processor.untaught_words(["Is there a car or a cone?", "Where is the bus?"]) == ["bus"]
    with pytest.warns(UserWarning, match="words that the model was not taught, or not reliably: 'bus'"):
        processor(text="Is there a bus?")
    with pytest.raises(ValueError, match="words that the model was not taught, or not reliably: 'bus'"):
        processor(text="Is there a bus?", on_unknown="raise")
    processor(text="Is there a bus?", suffix="no", on_unknown="raise")  # the word is being taught
    processor.taught = None
    assert processor.untaught_words("Is there a bus?") == []
    for lists, message in (
        (taught("unicorn car"), "words that are not in the vocabulary: unicorn"),
        ({"photographs": []}, "taught must be a dictionary with the lists"),
    ):
        with pytest.raises(ValueError, match=message):
            TrafficVLMProcessor(processor.image_processor, processor.tokenizer, taught=lists)


def test_words_are_counted_once_a_question_by_source_and_answer(processor):
    questions = {"x": ["Is there a car or a car?", "What color is the bus?"], "synthetic": ["A car?"]}
    answers = {"x": ["yes", "red"], "synthetic": ["no"]}
    image = Image.new("RGB", (40, 40))
    rows = [{"image": image, "source": x, "questions": questions[x], "answers": answers[x]} for x in questions]
    counts = SupervisedCollator(processor, training=False)(rows)["word_counts"]
    of = dict(zip(processor.tokenizer.convert_ids_to_tokens(range(500)), counts.tolist()))
    assert of["car"] == [[1, 0, 0], [0, 1, 0]] and of["bus"] == of["color"] == [[0, 0, 1], [0, 0, 0]]
    assert of["?"] == [[1, 0, 1], [0, 1, 0]]
    assert not any(map(any, of["red"] + of["[YES]"]))  # words of answers


def test_words_asked_often_had_different_answers(processor):
    counts = np.zeros((500, 2, 3), int)
    entries = {
        "car": [[100, 100, 0], [0, 0, 0]],
        "bus": [[100, 99, 0], [0, 1, 0]],
        "van": [[0, 0, 0], [0, 0, 300]],
        "truck": [[0, 900, 0], [0, 0, 0]],
        "road": [[100, 99, 0], [0, 0, 0]],
        "the": [[300, 300, 0], [0, 0, 0]],
    }
    for word, entry in entries.items():
        counts[processor.tokenizer.convert_tokens_to_ids(word)] = entry
    assert asked_often(counts, processor.tokenizer) == {"car": "photographs", "bus": "rendered", "van": "rendered"}


@pytest.mark.parametrize(
    ("before", "kind", "gain", "after"),
    [
        (None, "rendered", None, "rendered"),  # None: too few questions to tell
        (None, "rendered", 0.05, None),
        (None, "rendered", 0.11, "rendered"),  # more than two standard errors of 0.05
        (None, "photographs", 0.11, "photographs"),
        ("rendered", "rendered", None, "rendered"),
        ("rendered", "rendered", 0.05, "rendered"),
        ("rendered", "rendered", 0.0, None),
        ("rendered", "photographs", 0.05, "photographs"),
        ("photographs", "rendered", 0.05, "photographs"),  # they count more than rendered scenes
        ("photographs", "rendered", 0.0, None),
        ("photographs", None, 0.0, "photographs"),  # it was not asked often
    ],
)
def test_a_word_that_was_asked_often_has_a_new_standing(before, kind, gain, after):
    def lists(standing):  # of "bus"; "car" is not asked
        words = {"photographs": ["car"], "rendered": []}
        return {name: ["bus", *known] if name == standing else known for name, known in words.items()}

    asked = {"bus": kind} if kind else {}
    gains = {} if gain is None else {"bus": {"gain": gain, "error": 0.05}}
    assert update_taught(lists(before), asked, gains) == lists(after)
    assert update_taught({}, {"car": "photographs"}, {}) == taught("car")


def test_gains_of_words_in_closed_form(processor):
    truths, sources = ["red", "red", "blue", "blue"] * 10, ["a", "a", "synthetic", "a"] * 10
    answers = pd.DataFrame({"source": sources, "question": "What color is the car?", "truth": truths})
    answers["is_right"] = [True, True, True, False] * 10
    without_image = pd.Series([True, False, False, False] * 10)
    gains = word_gains(answers, without_image, processor)
    assert gains.keys() == {"color", "car"} and gains["car"]["photographs"] == 30
    assert gains["car"]["gain"] == 0.5 and gains["car"]["error"] == pytest.approx((0.25 / 39) ** 0.5)
    assert word_gains(answers[:29], without_image[:29], processor) == {}  # too few
    assert word_gains(answers.assign(truth="red"), without_image, processor) == {}  # the same answer to all


def test_a_larger_evaluation_renews_the_standing_and_nothing_else(tmp_path):
    before = json.loads((ROOT / "processor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps(before))
    gain = {"error": 0.01, "photographs": 30}
    gains = {"bus": gain | {"gain": 0.0}, "pothole": gain | {"gain": 0.3}, "bird": gain | {"gain": 0.3}}
    gains["bird"]["photographs"] = 29
    load_script("evaluate").write_taught_words(tmp_path, before["taught"], gains)
    after = json.loads((tmp_path / "processor_config.json").read_text())
    assert set(after["taught"]["photographs"]) == {*before["taught"]["photographs"], "pothole"} - {"bus"}
    assert set(after["taught"]["rendered"]) == {*before["taught"]["rendered"], "bird"}
    assert after | {"taught": 0} == before | {"taught": 0}


def test_known_words_stay_known_after_a_short_training(start, tmp_path, run_script, monkeypatch):
    """README's own flow: a dataset of one's own, here in YOLO's format, a training, a question."""
    monkeypatch.setattr("traffic_vlm.evaluation.taught.MIN_ASKED", 5)
    city, mine, out = tmp_path / "city", tmp_path / "mine", tmp_path / "out"
    images, labels = city / "images/train", city / "labels/train"
    images.mkdir(parents=True)
    labels.mkdir(parents=True)
    (city / "data.yaml").write_text("train: images/train\nnames: [bus, car]\n")
    for index in range(20):
        Image.new("RGB", (80, 60), (10 * index, 0, 0)).save(images / f"{index}.png")
        (labels / f"{index}.txt").write_text(f"{index % 2} 0.5 0.5 0.3 0.4\n")
    run_script("make_dataset.py", "--source", city, "--output_dir", mine, "--num_workers", "1")
    options = ("--model_name_or_path", start, "--train_dataset", mine, "--output_dir", out)
    run_script("train.py", *options, *"--num_train_epochs 1 --images_per_epoch 32 --report_to none --use_cpu".split())
    processor = TrafficVLMProcessor.from_pretrained(out)
    pipe = TrafficVLMPipeline(TrafficVLMForConditionalGeneration.from_pretrained(out), processor=processor)
    questions = ["Is there a bus?", "Is the light red?", "Is there a pothole?"]
    bus, light, pothole = pipe(Image.new("RGB", (80, 60)), questions)
    assert "untaught_words" not in bus | light and pothole["untaught_words"] == ["pothole"]
    assert not processor.own_questions

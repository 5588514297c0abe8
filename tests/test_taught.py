"""Taught words: counted in training, judged by evaluation, saved in processor_config.json."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tiny import ROOT, TINY_TEXT, TINY_TOWER, load_script, save_folder
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.evaluation.taught import asked_often, update_taught, word_gains
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.training.collator import SupervisedCollator


def taught(photographs: str = "", rendered: str = "") -> dict[str, list[str]]:
    return {"photographs": photographs.split(), "rendered": rendered.split()}


# --- the lists in the processor ---


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
    [[car, bus]] = processor.post_process_yes_no([torch.tensor([0.9, 0.8])], [["Is there a car?", "Is there a bus?"]])
    assert "untaught_words" not in car and bus["untaught_words"] == ["bus"]
    processor.taught = None
    assert processor.untaught_words("Is there a bus?") == []
    for lists, message in (
        (taught("unicorn car"), "words that are not in the vocabulary: unicorn"),
        ({"photographs": []}, "taught must be a dictionary with the lists"),
    ):
        with pytest.raises(ValueError, match=message):
            TrafficVLMProcessor(processor.image_processor, processor.tokenizer, taught=lists)


# --- counts of training ---


def test_words_are_counted_once_a_question_by_source_and_answer(processor):
    image = Image.new("RGB", (40, 40))
    asked = {"x": {"Is there a car or a car?": "yes", "What color is the bus?": "red"}, "synthetic": {"A car?": "no"}}
    rows = [
        {"image": image, "source": name, "questions": [*some], "answers": [*some.values()]}
        for name, some in asked.items()
    ]
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


# --- the rule ---


@pytest.mark.parametrize(
    ("gain", "was_taught", "is_taught"),
    [
        (None, True, True),  # too few questions to tell
        (None, False, True),
        (0.11, False, True),
        (0.05, False, False),
        (0.05, True, True),
        (0.0, True, False),
    ],
)
def test_a_word_that_was_asked_often_has_a_new_standing(gain, was_taught, is_taught):
    gains = {} if gain is None else {"bus": {"gain": gain, "error": 0.05}}
    before = taught("car bus" if was_taught else "car")
    assert update_taught(before, {"bus": "photographs"}, gains)["photographs"] == ["bus", "car"][not is_taught :]
    assert update_taught(before, {}, gains) == {kind: sorted(words) for kind, words in before.items()}


def test_photographs_count_more_than_rendered_scenes():
    before = taught("car", "cone dog")
    asked = {"car": "rendered", "cone": "photographs", "dog": "rendered", "cow": "rendered"}
    assert update_taught(before, asked, {}) == taught("car cone", "cow dog")
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


# --- training ---


def yolo_folder(folder: Path) -> Path:
    """A folder of 20 images with boxes of buses and cars, as somebody might have one."""
    for index in range(20):
        image, label = folder / f"images/train/{index}.png", folder / f"labels/train/{index}.txt"
        for path in (image, label):
            path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 60), (10 * index, 0, 0)).save(image)
        label.write_text(f"{index % 2} 0.5 0.5 0.3 0.4\n")
    (folder / "data.yaml").write_text("train: images/train\nnames: [bus, car]\n")
    return folder


def test_known_words_stay_known_after_a_short_training(tmp_path, run_script, monkeypatch):
    """README's own flow: a dataset of one's own, a training from the shipped weights, a question."""
    monkeypatch.setattr("traffic_vlm.evaluation.taught.MIN_ASKED", 5)
    torch.manual_seed(0)
    model = TrafficVLMForConditionalGeneration(TrafficVLMConfig(TINY_TOWER | {"image_size": 64}, TINY_TEXT))
    start, mine = save_folder(model, tmp_path / "start"), tmp_path / "mine"
    source = yolo_folder(tmp_path / "city")
    run_script("make_dataset.py", "--source", source, "--output_dir", mine, "--num_workers", "1")
    options = ("--model_name_or_path", start, "--train_dataset", mine, "--output_dir", tmp_path / "out")
    run_script("train.py", *options, *"--num_train_epochs 1 --images_per_epoch 32 --report_to none --use_cpu".split())
    pipe = TrafficVLMPipeline(
        model=TrafficVLMForConditionalGeneration.from_pretrained(tmp_path / "out"),
        processor=TrafficVLMProcessor.from_pretrained(tmp_path / "out"),
    )
    questions = ["Is there a bus?", "Is the light red?", "Is there a pothole?"]
    bus, light, pothole = pipe(Image.new("RGB", (80, 60)), questions)
    assert "untaught_words" not in bus | light and pothole["untaught_words"] == ["pothole"]
    assert not pipe.processor.own_questions

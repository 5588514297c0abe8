"""Taught words: counted in training, judged by evaluation, saved and loaded with the processor."""

import json
import shutil

import pytest
import torch

from tiny import ROOT
from traffic_vlm import processing_traffic_vlm as processing
from traffic_vlm.files import DataError
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.taught_traffic_vlm import TAUGHT_FILE, TaughtWords, is_content_word
from traffic_vlm.training.word_counts import WordCounter


COUNTED = {"questions": 200, "images": 50, "yes": 100, "no": 100}
FILES = ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja")


def with_words(words: dict) -> TrafficVLMProcessor:
    processor = TrafficVLMProcessor.from_pretrained(ROOT)
    processor.taught_words = TaughtWords(words)
    return processor


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        (COUNTED | {"gain": 0.11, "error": 0.05}, "taught"),
        (COUNTED | {"gain": 0.09, "error": 0.05}, "unreliable"),
        (COUNTED, "unreliable"),
        (COUNTED | {"questions": 199, "gain": 0.5, "error": 0.0}, "untaught"),
        (COUNTED | {"images": 49, "gain": 0.5, "error": 0.0}, "untaught"),
        (COUNTED | {"yes": 0, "no": 200, "gain": 0.5, "error": 0.0}, "untaught"),
        (COUNTED | {"yes": 0, "no": 0, "words": 200, "gain": 0.5, "error": 0.0}, "taught"),
        ({}, "untaught"),
    ],
)
def test_a_word_is_taught_if_it_was_asked_often_and_answered_better_than_blind(entry, status):
    taught = TaughtWords({"car": entry})
    assert taught.status("car") == status
    assert taught.status("truck") == "untaught" and taught.status("the") == taught.status("50") == "taught"
    assert taught.is_real("car") == (entry.get("questions", 0) >= 200)
    assert not TaughtWords({"car": entry | {"synthetic": 1}}).is_real("car") or entry["questions"] > 200


def test_untaught_words_are_reported_like_unknown_ones():
    processor = with_words({"car": COUNTED | {"gain": 0.3, "error": 0.01}})
    assert processor.untaught_words("Is there a car on the road?") == ["road"]
    assert processor.untaught_words(["Is there a car?", "Where is the bus?"]) == ["bus"]
    with pytest.warns(UserWarning, match="words that the model was not taught, or not reliably: 'bus'"):
        processor(text="Is there a bus?")
    with pytest.raises(ValueError, match="words that the model was not taught, or not reliably: 'bus'"):
        processor(text="Is there a bus?", on_unknown="raise")
    processor(text="Is there a bus?", suffix="no", on_unknown="raise")  # the word is being taught
    questions = [["Is there a car?", "Is there a bus?"]]
    [[car, bus]] = processor.post_process_yes_no([torch.tensor([0.9, 0.8])], questions)
    assert "untaught_words" not in car and bus["untaught_words"] == ["bus"]


def test_the_file_is_saved_and_loaded_with_the_processor(tmp_path):
    processor = with_words({"car": COUNTED})
    processor.save_pretrained(tmp_path)
    assert "taught" not in (tmp_path / "processor_config.json").read_text()
    assert TrafficVLMProcessor.from_pretrained(tmp_path).taught_words.words == {"car": COUNTED}
    for content, message in (
        ({"words": {"unicorn": COUNTED}}, "counts words that are not in the vocabulary: unicorn"),
        ({"words": {"car": {"questions": -1}}}, "'car': questions = -1"),
        ({"car": 3}, "is not a file of taught words"),
    ):
        (tmp_path / TAUGHT_FILE).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            TrafficVLMProcessor.from_pretrained(tmp_path)


def test_a_folder_without_the_file_loads_and_says_so(tmp_path, monkeypatch):
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    said = []
    monkeypatch.setattr(processing.logger, "warning_once", said.append)
    processor = TrafficVLMProcessor.from_pretrained(tmp_path)
    assert processor.taught_words is None and processor.untaught_words("Is there a bus?") == []
    assert len(said) == 1 and f"{tmp_path} has no {TAUGHT_FILE}" in said[0]


def test_words_are_counted_once_a_question_by_answer_and_image(tmp_path):
    processor = TrafficVLMProcessor.from_pretrained(ROOT)
    texts = [["Is there a car or a car?", "What color is the bus?"], ["Is there a car?"]]
    batch = dict(
        processor(text=texts, suffix=[["yes", "red"], ["no"]], packed=True, row_tokens="fit", return_tensors="pt")
    )
    batch |= {"image_keys": torch.tensor([7, 8]), "is_synthetic": torch.tensor([False, True])}
    counter = WordCounter(processor.tokenizer, TaughtWords({"car": {"questions": 5, "images": 2, "yes": 5}}))
    counter.add(batch)
    counter.save(tmp_path / "counts.json")
    resumed = WordCounter(processor.tokenizer, TaughtWords({"car": {"questions": 5, "images": 2, "yes": 5}}))
    resumed.load(tmp_path / "counts.json")
    for one in (counter, resumed):
        words = one.taught_words().words
        assert words["car"] == {"questions": 7, "images": 4, "yes": 6, "no": 1, "synthetic": 1, "words": 0}
        assert words["bus"] == {"questions": 1, "images": 1, "yes": 0, "no": 0, "synthetic": 0, "words": 1}
        assert "red" not in words  # an answer, not a word of a question
    resumed.add(batch)
    assert resumed.taught_words().words["car"]["questions"] == 9 and resumed.taught_words().words["car"]["images"] == 4


def test_evaluation_writes_how_much_better_than_blind_each_word_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import evaluate

    (tmp_path / TAUGHT_FILE).write_text(TaughtWords({"car": COUNTED, "bus": COUNTED}).to_json())
    taught = TaughtWords.load(tmp_path / TAUGHT_FILE, ["car", "bus"])
    evaluate.write_word_gains(
        tmp_path, taught, {"car": {"gain": 0.2, "error": 0.05}, "van": {"gain": 0.1, "error": 0.1}}
    )
    after = TaughtWords.load(tmp_path / TAUGHT_FILE, ["car", "bus"])
    assert (after.status("car"), after.status("bus"), after.status("van")) == ("taught", "unreliable", "untaught")
    with pytest.raises(DataError, match=r"--write_taught_words: .* has no taught_words\.json"):
        evaluate.write_word_gains(tmp_path, None, {})


def test_content_words():
    assert all(map(is_content_word, ("car", "wet", "roundabout")))
    assert not any(map(is_content_word, ("the", "50", "?", "[YES]", "'s")))

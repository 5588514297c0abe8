"""The words of a training: a user's own ones, from the tokenizer to the weights, and those that it teaches."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import GenerationConfig

from runs import NO_EVAL, learn, own_folder, refuse
from tiny import ROOT, random_ids, random_pixels, tiny_model, tiny_processor
from traffic_vlm.configuration_traffic_vlm import TrafficVLMTextConfig
from traffic_vlm.export.onnx import export_settings
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.tokenization_traffic_vlm import RESERVED_TOKENS, TrafficVLMTokenizer
from traffic_vlm.training.words import AskedWords, add_words, related_words


TOKENIZER = TrafficVLMTokenizer.from_pretrained(ROOT)
RESERVED = TOKENIZER.reserved_ids
EMBEDDINGS = "model.text_model.embed_tokens.weight"
PLENTY = ["".join(chr(ord("a") + int(digit)) for digit in f"99{number}") for number in range(10, 32)]  # "jjba", ...


def test_twenty_entries_are_reserved_and_no_text_becomes_one(processor):
    assert len(RESERVED) == 20 and TOKENIZER.convert_ids_to_tokens(RESERVED) == RESERVED_TOKENS
    assert TOKENIZER.tokenize("Is it a [RESERVED_0]?") == ["is", "it", "a", "[UNK]", "0", "?"]
    assert processor.unknown_words("[RESERVED_0] [reserved_19]") == ["RESERVED", "reserved"]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_reserved_entries_are_never_generated(processor, options):
    model, ids, pixels = tiny_model(tie_word_embeddings=False), random_ids(1, 5), random_pixels(1)
    state = model.model(ids, pixels).last_hidden_state[0, -1].detach()
    model.lm_head.weight.data[RESERVED] = 10 * state  # by far the likeliest
    options = {"pixel_values": pixels, "max_new_tokens": 1} | options
    assert int(model.generate(ids, **options)[0, -1]) in RESERVED
    model.generation_config = GenerationConfig.from_pretrained(ROOT)
    assert set(RESERVED) < set(export_settings(model, processor)["never"])  # of export.json, which the browser reads
    assert int(model.generate(ids, **options)[0, -1]) not in RESERVED
    changed = add_words(model, TOKENIZER, ["zebra:animal"])
    model.lm_head.weight.data[RESERVED[0]] = 10 * state
    assert changed.decode(model.generate(ids, **options)[0, -1]) == "zebra"


@pytest.mark.parametrize(
    ("words", "text", "tokens"),
    [
        ("forklift tow", "Two FORKLIFTS tow a car", "2 forklift tow a car"),
        ("bu", "bu bus buses", "bu bus buses"),  # "bus" is known: it is no plural of "bu"
        ("scooter pickup", "scooters pickup truck", "scooter pickup truck"),  # no longer synonyms
        ("scooter pickup", "mopeds, lorries", "motorcycles , trucks"),
        ("congestion coach", "Is there congestion?", "is there congestion ?"),  # within a phrase
        ("congestion coach", "Is there gridlock?", "is there a traffic jam ?"),
    ],
)
def test_new_words_have_reserved_entries_and_no_other_word_changes(tmp_path, words, text, tokens):
    words = words.split()
    changed, stepwise = TOKENIZER.with_words(words), TOKENIZER
    for word in words:
        stepwise = stepwise.with_words([word])
    changed.save_pretrained(tmp_path)
    built = TrafficVLMTokenizer.from_pretrained(tmp_path)  # the library builds it from the vocabulary
    for tokenizer in (changed, stepwise, built):
        assert tokenizer.tokenize(text) == tokens.split()
        assert tokenizer.convert_tokens_to_ids(words) == RESERVED[: len(words)]
        assert tokenizer.added_words == words and tokenizer.reserved_ids == RESERVED[len(words) :]
        assert len(tokenizer) == 500
    by_file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert by_file.encode(text, add_special_tokens=False).tokens == tokens.split()
    assert not TOKENIZER.added_words and TOKENIZER.reserved_ids == RESERVED  # unchanged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["forklift", "Forklift:vehicle"], "'forklift' is in the vocabulary already"),
        (["bus"], "'bus' is in the vocabulary already"),
        (["fork-lift"], "'fork-lift' is not a single word of lower-case letters"),
        (["forklift:tractor"], "--add_words forklift:tractor: 'tractor' is neither a category nor a word"),
        (PLENTY[:21], "21 words cannot be added: the limit is 20, 0 were added before"),
    ],
)
def test_words_that_cannot_be_added_are_refused(model, options, message):
    with pytest.raises(ValueError) as error:
        add_words(model, TOKENIZER, options)
    assert message in str(error.value)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_start_from_the_mean_of_related_words(tied):
    model = tiny_model(tie_word_embeddings=tied)
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    before = [table.detach().clone() for table in tables]
    changed = add_words(model, TOKENIZER, ["forklift:vehicle", "Dusty:sunny", "gate"])
    assert changed.added_words == ["forklift", "dusty", "gate"]
    for old, new in zip(before, tables):
        expected = old.clone()
        for entry, kin in zip(RESERVED, ("vehicle", "sunny", "")):
            expected[entry] = old[TOKENIZER.convert_tokens_to_ids(related_words(kin))].mean(0)
        torch.testing.assert_close(new, expected)
    assert model.generation_config.suppress_tokens == RESERVED[3:]
    assert {"vehicle", "car", "rickshaw"} <= set(related_words("vehicle")) < set(related_words(""))
    assert related_words("traffic light") == ["light"] and related_words("sunny") == ["sunny"]


def test_a_run_teaches_a_new_word(start, tmp_path, capsys):
    mine, out = own_folder(tmp_path / "mine", "zebra"), tmp_path / "out"
    options = f"--train_dataset {mine} {NO_EVAL} --num_train_epochs"
    assert "--add_words zebra teaches" in refuse(start, tmp_path / "not", f"{options} 1")
    learn(start, out, f"{options} 1 --add_words zebra:animal")
    learn(start, out, f"{options} 2 --add_words zebra:animal")
    assert "resuming from" in capsys.readouterr().out
    known, processor = (TrafficVLMProcessor.from_pretrained(folder) for folder in (start, out))
    assert processor.tokenizer.added_words == ["zebra"] and processor.unknown_words("zebras, gnu") == ["gnu"]
    assert processor.taught == sorted({*known.taught, "zebra", "blue"})  # the words of the user's own questions
    assert processor.own_questions  # of any kind, answered in words
    assert json.loads((out / "generation_config.json").read_text())["suppress_tokens"] == RESERVED[1:]
    before, after = (load_file(folder / "model.safetensors")[EMBEDDINGS] for folder in (start, out))
    kin = before[TOKENIZER.convert_tokens_to_ids(related_words("animal"))].mean(0)
    assert before.shape == after.shape
    assert (after[RESERVED[0]] - kin).norm() < 0.3 * (before[RESERVED[0]] - kin).norm()  # trained from there on


# --- taught words ---


def test_untaught_words_are_reported_like_unknown_ones(tmp_path):
    processor = tiny_processor()
    processor.taught = ["car", "cone"]
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


def test_words_asked_often_had_different_answers(processor):
    image, asked = Image.new("RGB", (40, 40)), AskedWords(TrafficVLMTextConfig())
    questions = ["Is there a car or a van?", "A car?", "What color is the bus?", "Is it a bicycle?"]
    texts, answers = [questions, ["A car?"]], [["yes", "no", "red", "no"], ["no"]]
    batch = processor([image, image], texts, answers, packed=True, return_tensors="pt")
    for _ in range(67):
        asked(batch["input_ids"], batch["labels"], batch["segment_ids"])
    counts = dict(zip(processor.tokenizer.convert_ids_to_tokens(range(500)), asked.counts.tolist()))
    assert counts["car"] == [67, 134, 0] and counts["bus"] == counts["color"] == [0, 0, 67]
    assert counts["van"] == [67, 0, 0] and counts["bicycle"] == [0, 67, 0]
    assert not any(counts["red"] + counts["[YES]"] + counts["[PAD]"])  # words of answers, and padding
    assert asked.taught(processor.tokenizer) == {"car"}  # 201 times
    asked.counts *= 3
    taught = asked.taught(processor.tokenizer, ["Is it a van?"])
    assert taught == {"car", "bus", "color", "van"}  # of the others, all answers are the same


def test_a_run_teaches_the_words_of_its_questions(start, tmp_path, monkeypatch):
    monkeypatch.setattr("traffic_vlm.training.words.MIN_ASKED", 3)
    for known in (["cow"], None):
        folder, out = tmp_path / f"{known}", tmp_path / f"{known}_out"
        shutil.copytree(start, folder)
        processor = TrafficVLMProcessor.from_pretrained(folder)
        processor.taught = known
        processor.save_pretrained(folder)
        learn(folder, out, f"--max_steps 2 {NO_EVAL}")
        taught = TrafficVLMProcessor.from_pretrained(out).taught
        assert taught is None if known is None else "cow" in taught and len(taught) > 3

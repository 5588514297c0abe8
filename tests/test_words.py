"""A user's own words: their entries in the tokenizer, their rows in the weights, and a training run with them."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from runs import NO_EVAL, learn, own_folder, refuse
from tiny import ROOT, save_folder, tiny_model
from traffic_vlm.data.ground_truth import GroundTruth
from traffic_vlm.data.questions import ask
from traffic_vlm.data.synthetic import render
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.tokenization_traffic_vlm import TrafficVLMTokenizer, is_content_word, plural_of
from traffic_vlm.training.words import add_words, entries_to_replace, kin_words, parse_words, template_words


TOKENIZER = TrafficVLMTokenizer.from_pretrained(ROOT)
EMBEDDINGS = "model.text_model.embed_tokens.weight"


def ids(tokenizer: TrafficVLMTokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# --- the tokenizer ---


def test_new_words_have_the_entries_of_old_ones_also_when_saved(tmp_path):
    changed = TOKENIZER.replace_words({"forklift": "overturned", "tow": "stroller"})
    assert len(changed) == len(TOKENIZER) == 500
    assert ids(changed, "Forklift tow") == ids(TOKENIZER, "overturned stroller")
    assert changed.unknown_words("an overturned stroller") == ["overturned", "stroller"]
    assert changed.added_words == {"forklift": "overturned", "tow": "stroller"}
    assert TOKENIZER.unknown_words("a forklift") == ["forklift"] and not TOKENIZER.added_words  # unchanged
    changed.save_pretrained(tmp_path)
    by_file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    built = TrafficVLMTokenizer.from_pretrained(tmp_path)  # the library builds it from the vocabulary
    text = "two forklifts tow a pram, upside down"
    assert built.added_words == changed.added_words
    assert ids(built, text) == ids(changed, text) == by_file.encode(text, add_special_tokens=False).ids
    assert ids(built.replace_words({"gate": "wrong"}), text) == ids(changed, text)


def test_synonyms_of_a_removed_word_are_unknown():
    removed = {"stroller": "tow", "fire": "rail", "cause": "gate", "bicycles": "kart", "overturned": "drone"}
    assert TOKENIZER.unknown_words("prams fire engine reason bikes bike upside down") == ["prams"]  # has no plural
    changed = TOKENIZER.replace_words({new: old for old, new in removed.items()})
    state = json.loads(changed.backend_tokenizer.to_str())
    words = {word for rule in state["normalizer"]["normalizers"] for word in rule.get("content", "").split()}
    assert not words & removed.keys()
    unknown = changed.unknown_words("pram fire engine reason bikes bike upside down")
    assert unknown == ["pram", "fire", "engine", "reason", "bikes", "upside"]


def test_the_plural_is_the_word_or_a_word_of_its_own():
    one = TOKENIZER.replace_words({"forklift": "overturned"})
    assert ids(one, "FORKLIFTS") == ids(one, "forklift")
    both = TOKENIZER.replace_words({"forklift": "overturned", "forklifts": "broken"})
    assert ids(both, "forklift forklifts") == ids(TOKENIZER, "overturned broken")
    later = one.replace_words({"forklifts": "broken"})
    assert ids(later, "forklift forklifts") == ids(both, "forklift forklifts")
    assert ids(TOKENIZER.replace_words({"bu": "broken"}), "bus") == ids(TOKENIZER, "bus")  # known: no plural of "bu"
    plurals = ["cars", "boxes", "benches", "ferries", "trays"]
    assert [plural_of(word) for word in ("car", "box", "bench", "ferry", "tray")] == plurals


def test_a_synonym_can_become_a_word():
    changed = TOKENIZER.replace_words({"scooter": "overturned", "pickup": "broken"})
    assert ids(changed, "scooter scooters") == 2 * ids(TOKENIZER, "overturned")
    assert ids(changed, "mopeds") == ids(TOKENIZER, "motorcycles")  # by the same rule
    assert ids(changed, "pickup truck, lorries") == ids(TOKENIZER, "broken truck, trucks")


# --- the choice of entries ---


# --- the choice of entries ---


def test_words_of_our_own_questions_are_never_given_away():
    rng, protected = random.Random(0), template_words(TOKENIZER)
    for seed in range(6):
        for question in ask(GroundTruth(render(seed)[1]), rng, 64):
            tokens = TOKENIZER.tokenize(f"{question.text} {question.answer}")
            assert {token for token in tokens if token.isalpha()} <= protected, question


def test_the_last_unused_words_of_the_vocabulary_go_first():
    assert entries_to_replace(TOKENIZER, 3) == ["wrong", "future", "small"]
    assert entries_to_replace(TOKENIZER, 2, keep={"wrong"}) == ["future", "small"]
    with pytest.raises(ValueError, match=r"has 500 words, but only [1-3]\d\d entries can be given away"):
        entries_to_replace(TOKENIZER, 500)
    changed = TOKENIZER.replace_words({"forklift": "wrong"})
    assert entries_to_replace(changed, 2) == ["future", "small"]  # an added word stays


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["forklift", "Forklift:vehicle"], "'forklift' is given twice"),
        (["bus"], "'bus' is in the vocabulary already"),
        (["fork-lift"], "'fork-lift' is not a single word of letters"),
        (["forklift:tractor"], "'tractor' is neither a category nor a word of the vocabulary"),
        (["forklift:[PAD]"], "neither a category"),
        ({"car": "broken"}, "'car' is in the vocabulary already"),
        ({"fork lift": "broken"}, "'fork lift' is not a single word of lower-case letters"),
        ({"Forklift": "broken"}, "'Forklift' is not a single word"),
        ({"forklift": "zebra"}, "'zebra' has no entry"),
        ({"forklift": "[YES]"}, "'[YES]' has no entry"),
        ({"forklift": "broken", "tow": "broken"}, "'broken' has no entry"),
        ({"isnt": "broken"}, "'isnt' is split or rewritten"),
    ],
)
def test_invalid_words_and_replacements_are_refused(options, message):
    """Lists are the values of --add_words, dictionaries are replacements in the tokenizer."""
    with pytest.raises(ValueError) as error:
        TOKENIZER.replace_words(options) if isinstance(options, dict) else parse_words(options, TOKENIZER)
    assert message in str(error.value)


# --- the weights ---


@pytest.mark.parametrize("tied", [True, False])
def test_rows_start_from_the_mean_of_their_kin(tied):
    model = tiny_model(tie_word_embeddings=tied)
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert (tables[0] is tables[1]) == tied
    before = [table.detach().clone() for table in tables]
    changed = add_words(model, TOKENIZER, ["forklift:vehicle", "dusty:sunny", "gate"], texts=["Is it clearly wrong?"])
    assert list(changed.added_words.values()) == ["future", "small", "large"]  # "clearly", "wrong" are asked about
    for old, new in zip(before, tables):
        for word, kin in (("forklift", "vehicle"), ("dusty", "sunny"), ("gate", None)):
            expected = old[TOKENIZER.convert_tokens_to_ids(kin_words(kin))].mean(0)
            torch.testing.assert_close(new[changed.convert_tokens_to_ids(word)], expected)
        different = (old != new).any(-1).nonzero().flatten().tolist()
        assert sorted(different) == sorted(TOKENIZER.convert_tokens_to_ids(["future", "small", "large"]))
    assert {"vehicle", "car", "rickshaw"} <= set(kin_words("vehicle")) < set(kin_words(None))
    assert kin_words("traffic light") == ["light"]
    taught = add_words(model, TOKENIZER, ["forklift"], taught=["wrong", "future"])
    assert taught.added_words == {"forklift": "small"}


# --- training ---


@pytest.fixture
def start(tmp_path):
    """A folder with a tiny model and the project's processor, whose words are taught but for two."""
    folder = save_folder(tiny_model(vision={"image_size": 64}), tmp_path / "start")
    processor = TrafficVLMProcessor.from_pretrained(folder)
    taught = [word for word in TOKENIZER.get_vocab() if is_content_word(word) and word not in ("wrong", "smoke")]
    processor.taught = {"photographs": taught, "rendered": []}
    processor.save_pretrained(folder)
    return folder


def test_a_run_teaches_a_new_word(start, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("traffic_vlm.evaluation.taught.MIN_ASKED", 15)
    mine, out = own_folder(tmp_path / "mine", "zebra"), tmp_path / "out"
    options = f"--train_dataset {mine} {NO_EVAL} --num_train_epochs"
    assert "zebra. --add_words zebra teaches" in refuse(start, tmp_path / "not", f"{options} 1")
    message = refuse(start, tmp_path / "not", f"{options} 1 --add_words okapi emu gnu")
    assert "--add_words has 3 words, but only 2 entries can be given away" in message
    learn(start, out, f"{options} 1 --add_words zebra:animal")
    message = refuse(start, out, f"{options} 2 --add_words zebra")
    assert "(add_words: ['zebra:animal'] before, ['zebra'] now)" in message
    learn(start, out, f"{options} 2 --add_words zebra:animal")
    assert "resuming from" in capsys.readouterr().out
    processor, entry = TrafficVLMProcessor.from_pretrained(out), TOKENIZER.convert_tokens_to_ids("wrong")
    assert processor.tokenizer.added_words == {"zebra": "wrong"}
    assert processor.unknown_words("zebras, wrong") == ["wrong"]
    taught = processor.taught["photographs"]
    assert "bus" in taught and "zebra" not in taught  # it stood in answers, not in questions
    assert processor.own_questions  # of any kind, answered in words
    before, after = (load_file(folder / "model.safetensors")[EMBEDDINGS] for folder in (start, out))
    kin = before[TOKENIZER.convert_tokens_to_ids(kin_words("animal"))].mean(0)
    assert before.shape == after.shape
    assert (after[entry] - kin).norm() < 0.3 * (before[entry] - kin).norm()  # trained from there on

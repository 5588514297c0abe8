"""A user's own words: their entries in the tokenizer, their rows in the weights, and a training run with them."""

import random
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from runs import NO_EVAL, learn, own_folder, refuse
from tiny import ROOT, tiny_model
from traffic_vlm.data.questions import ask
from traffic_vlm.data.synthetic import render
from traffic_vlm.data.truth import GroundTruth
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.question_traffic_vlm import is_content_word
from traffic_vlm.tokenization_traffic_vlm import TrafficVLMTokenizer
from traffic_vlm.training.words import add_words, entries_to_replace, kin_words, parse_words, template_words


TOKENIZER = TrafficVLMTokenizer.from_pretrained(ROOT)
EMBEDDINGS = "model.text_model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("words", "text", "same"),
    [
        ({"forklift": "overturned", "tow": "stroller"}, "Two FORKLIFTS tow a car", "two overturned stroller a car"),
        ({"forklift": "overturned", "forklifts": "broken"}, "forklift forklifts", "overturned broken"),
        ({"hatch": "overturned", "quarry": "broken"}, "hatches quarries", "overturned broken"),
        ({"bu": "broken"}, "bu bus buses", "broken bus buses"),  # "bus" is known: it is no plural of "bu"
        ({"scooter": "overturned", "pickup": "broken"}, "scooters pickup truck", "overturned broken truck"),
        ({"scooter": "overturned", "pickup": "broken"}, "mopeds, lorries", "motorcycles, trucks"),  # by the same rules
    ],
)
def test_new_words_have_the_entries_of_old_ones_and_no_other_word_changes(tmp_path, words, text, same):
    changed, stepwise = TOKENIZER.replace_words(words), TOKENIZER
    for word, entry in words.items():
        stepwise = stepwise.replace_words({word: entry})
    changed.save_pretrained(tmp_path)
    built = TrafficVLMTokenizer.from_pretrained(tmp_path)  # the library builds it from the vocabulary
    expected = TOKENIZER(same, add_special_tokens=False)["input_ids"]
    for tokenizer in (changed, stepwise, built):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected
        assert tokenizer.unknown_words(" ".join(words.values())) == [*words.values()]
        assert tokenizer.added_words == words and len(tokenizer) == 500
    by_file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert by_file.encode(text, add_special_tokens=False).ids == expected
    assert not TOKENIZER.added_words and TOKENIZER.unknown_words(same) == []  # unchanged


def test_synonyms_of_a_removed_word_are_unknown():
    removed = {"stroller": "tow", "fire": "rail", "cause": "gate", "bicycles": "kart", "overturned": "drone"}
    assert TOKENIZER.unknown_words("prams fire engine reason bikes bike upside down") == ["prams"]  # has no plural
    changed = TOKENIZER.replace_words({new: old for old, new in removed.items()})
    unknown = changed.unknown_words("pram fire engine reason bikes bike upside down")
    assert unknown == ["pram", "fire", "engine", "reason", "bikes", "upside"]


def test_a_new_word_stays_within_the_phrases_that_held_it():
    changed = TOKENIZER.replace_words({"congestion": "pothole", "coach": "glare"})
    assert changed.tokenize("Is there congestion?") == ["is", "there", "congestion", "?"]
    assert changed.tokenize("Is there gridlock?") == TOKENIZER.tokenize("Is there congestion?")
    assert changed.tokenize("coaches, shuttles") == ["coach", ",", "buses"]


def test_words_of_our_own_questions_are_never_given_away():
    rng, protected = random.Random(0), template_words(TOKENIZER)
    for seed in range(6):
        for question in ask(GroundTruth(render(seed)[1]), rng, 64):
            tokens = TOKENIZER.tokenize(f"{question.text} {question.answer}")
            assert {token for token in tokens if token.isalpha()} <= protected, question


def test_the_last_unused_words_of_the_vocabulary_go_first():
    assert entries_to_replace(TOKENIZER, 3) == ["wrong", "future", "small"]
    changed = TOKENIZER.replace_words({"forklift": "wrong"})
    assert entries_to_replace(changed, 1, keep={"future"}) == ["small"]  # an added word stays
    with pytest.raises(ValueError, match=r"has 500 words, but only [1-3]\d\d entries can be given away"):
        entries_to_replace(TOKENIZER, 500)


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


@pytest.mark.parametrize("tied", [True, False])
def test_rows_start_from_the_mean_of_their_kin(tied):
    model, new_words = tiny_model(tie_word_embeddings=tied), ["forklift:vehicle", "dusty:sunny", "gate"]
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    before = [table.detach().clone() for table in tables]
    changed = add_words(model, TOKENIZER, new_words, taught=["future"], texts=["Is it clearly wrong?"])
    kept = ["future", "wrong", "clearly"]  # taught, and asked about
    assert list(changed.added_words.values()) == entries_to_replace(TOKENIZER, 3, kept)
    for old, new in zip(before, tables):
        expected = old.clone()
        for word, kin in (("forklift", "vehicle"), ("dusty", "sunny"), ("gate", None)):
            entry = changed.convert_tokens_to_ids(word)
            expected[entry] = old[TOKENIZER.convert_tokens_to_ids(kin_words(kin))].mean(0)
        torch.testing.assert_close(new, expected)
    assert {"vehicle", "car", "rickshaw"} <= set(kin_words("vehicle")) < set(kin_words(None))
    assert kin_words("traffic light") == ["light"] and kin_words("sunny") == ["sunny"]


def test_a_run_teaches_a_new_word(start, tmp_path, capsys, monkeypatch):
    """All words of the start but two are taught."""
    monkeypatch.setattr("traffic_vlm.evaluation.taught.MIN_ASKED", 15)
    processor = TrafficVLMProcessor.from_pretrained(start)
    taught = [word for word in TOKENIZER.get_vocab() if is_content_word(word) and word not in ("wrong", "smoke")]
    processor.taught = {"photographs": taught, "rendered": []}
    start = shutil.copytree(start, tmp_path / "start")
    processor.save_pretrained(start)
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
    assert {"bus", "zebra"} <= set(taught)  # words of one's own are taught from then on
    assert processor.own_questions  # of any kind, answered in words
    before, after = (load_file(folder / "model.safetensors")[EMBEDDINGS] for folder in (start, out))
    kin = before[TOKENIZER.convert_tokens_to_ids(kin_words("animal"))].mean(0)
    assert before.shape == after.shape
    assert (after[entry] - kin).norm() < 0.3 * (before[entry] - kin).norm()  # trained from there on

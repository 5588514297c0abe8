"""The tokenizer: ids, rewriting to words of the vocabulary, unknown words, files, saving and loading."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_question import FORMS, templates

from tiny import ROOT
from traffic_vlm.data.scene import CLASSES
from traffic_vlm.tokenization_traffic_vlm import RESERVED_TOKENS, TrafficVLMTokenizer, _rewrites


SPECIAL_IDS = {"[PAD]": 0, "[UNK]": 1, "[SOS]": 2, "[EOS]": 3, "[YES]": 4, "[NO]": 5}
QUESTIONS = (ROOT / "tests" / "data" / "questions.txt").read_text("utf-8").splitlines()
TOKENIZER = TrafficVLMTokenizer.from_pretrained(ROOT)
WORDS = TOKENIZER.get_vocab().keys() - SPECIAL_IDS.keys() - set(RESERVED_TOKENS)


# --- ids ---


def test_phrases_of_people_do_not_change_taught_questions(monkeypatch):
    """The simplest questions have the ids that they had without these rules; classes and values alike."""
    texts = sorted({text for _, _, text in templates(1)} | {name for noun in CLASSES.values() for name in noun[:2]})
    monkeypatch.setattr("traffic_vlm.tokenization_traffic_vlm._PHRASES", {})
    assert TOKENIZER(texts)["input_ids"] == TrafficVLMTokenizer(TOKENIZER.get_vocab())(texts)["input_ids"]


def test_special_tokens_and_answers():
    assert len(TOKENIZER) == TOKENIZER.vocab_size == 500
    assert {token: TOKENIZER.convert_tokens_to_ids(token) for token in SPECIAL_IDS} == SPECIAL_IDS
    ids = (TOKENIZER.pad_token_id, TOKENIZER.unk_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id)
    assert ids == (0, 1, 2, 3)
    assert set(TOKENIZER.all_special_ids) == {0, 1, 2, 3}  # skip_special_tokens must keep yes and no
    assert TrafficVLMTokenizer().get_vocab() == SPECIAL_IDS


def test_every_word_of_the_vocabulary_has_a_text():
    for word in WORDS:
        before = "car" * word.startswith("'")  # "'s" exists only after a word
        assert TOKENIZER.tokenize(before + word) == [*filter(None, [before, word])]


def test_text_is_between_sos_and_eos():
    words = ["is", "there", "a", "car", "?"]
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("Is there a car?")) == ["[SOS]", *words, "[EOS]"]
    assert TOKENIZER.tokenize("Is there a car?") == words
    pair = TOKENIZER("Is it red?", "no")["input_ids"]
    assert TOKENIZER.convert_ids_to_tokens(pair) == ["[SOS]", "is", "it", "red", "?", "[NO]", "[EOS]"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [("yes", [4]), ("Yes", [4]), ("NO", [5]), ("[YES]", [4]), ("'no'", [5]), ("nope", [5]), ("yes no", [4, 5])],
)
def test_yes_and_no_have_tokens_that_are_decoded_as_words(text, ids):
    assert TOKENIZER.encode(text) == [2, *ids, 3]
    assert TOKENIZER.decode([0, 2, *ids, 3], skip_special_tokens=True).split() == [["yes", "no"][i - 4] for i in ids]


# --- rewriting ---


SPELLINGS = [line.split(" = ") for line in FORMS["spellings"].splitlines()]


@pytest.mark.parametrize(("text", "same"), [*SPELLINGS, ("\uff23\uff21\uff32 \u200bcar\ufeff", "car car")])
def test_other_spellings_have_the_same_ids(text, same):
    assert TOKENIZER.encode(text) == TOKENIZER.encode(same)
    assert TOKENIZER.unk_token_id not in TOKENIZER.encode(text)


def test_the_rules_write_words_of_the_vocabulary():
    for _, replacement in _rewrites(TOKENIZER.get_vocab(), []):
        words = {word for word, _ in TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str(replacement)}
        assert words <= {*WORDS, "[YES]", "[NO]", "minus"}, replacement  # negative numbers are unknown


def test_decoded_questions_read_well_and_have_the_same_ids():
    text = "there is a car; what's the driver's speed: 1 2 7 meters, or a no entry sign?"
    assert TOKENIZER.decode(TOKENIZER.encode(text.upper()), skip_special_tokens=True) == text
    for question in QUESTIONS:
        ids = TOKENIZER.encode(question)
        if TOKENIZER.unk_token_id not in ids:
            assert TOKENIZER.encode(TOKENIZER.decode(ids, skip_special_tokens=True)) == ids, question


# --- unknown words ---


def test_unknown_words_are_listed_as_written(processor):
    assert processor.unknown_words("\ufdfa can't a\u0301b") == ["\ufdfa", "a\u0301b"]  # one letter, many tokens
    text = "Is the Balloon\U0001f642 next to the lorry a balloon or a Zeppelin?"
    assert processor.unknown_words(text) == ["Balloon", "\U0001f642", "balloon", "Zeppelin"]
    assert processor.unknown_words(["Is there a car?", "Where are their positions?"]) == ["positions"]


PIECES = st.sampled_from([*SPECIAL_IDS, RESERVED_TOKENS[0], "[pad]", "[ PAD ]", "car", " ", "[", "]", "'s", "\u200b"])


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=80) | st.lists(PIECES, max_size=8).map("".join))
def test_any_text_has_valid_ids_and_lists_its_unknown_words(processor, text):
    ids = TOKENIZER.encode(text, split_special_tokens=True)
    assert ids[0] == 2 and ids[-1] == 3
    # Text of users never gives [PAD], [SOS], [EOS] or a reserved entry.
    assert set(ids[1:-1]) <= {1, *range(4, 500)} - {*TOKENIZER.reserved_ids}
    unknown = processor.unknown_words(text)
    assert bool(unknown) == (1 in ids)
    assert "" not in unknown and all(word in text for word in unknown)

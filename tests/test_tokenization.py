"""Tests of the tokenizer: ids, normalization, coverage of questions, files, saving and loading."""

import copy
import json
import os
import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny import ROOT, load_script
from traffic_vlm import tokenization_traffic_vlm as module
from traffic_vlm.data.coverage import measure_coverage, read_questions
from traffic_vlm.tokenization_traffic_vlm import TrafficVLMTokenizer
from traffic_vlm.training.words import template_words


SPECIAL_IDS = {"[PAD]": 0, "[UNK]": 1, "[SOS]": 2, "[EOS]": 3, "[YES]": 4, "[NO]": 5}


build_files = load_script("build_files")
VOCABULARY = ROOT / "scripts" / "vocabulary.txt"
QUESTIONS = read_questions(ROOT / "tests" / "data" / "questions.txt")
TOKENIZER = TrafficVLMTokenizer.from_pretrained(ROOT)
WORDS = [word for word in TOKENIZER.get_vocab() if word not in SPECIAL_IDS]


def normalize(text):
    """Encode and decode a text."""
    return TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True)


# Ids


def test_ids_of_special_and_answer_tokens():
    assert len(TOKENIZER) == TOKENIZER.vocab_size == 500
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(500))
    assert {token: TOKENIZER.convert_tokens_to_ids(token) for token in SPECIAL_IDS} == SPECIAL_IDS
    ids = (TOKENIZER.pad_token_id, TOKENIZER.unk_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id)
    assert ids == (0, 1, 2, 3)
    assert set(TOKENIZER.all_special_ids) == {0, 1, 2, 3}  # skip_special_tokens must keep yes and no


def test_text_is_between_sos_and_eos():
    words = ["is", "there", "a", "car", "?"]
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("Is there a car?")) == ["[SOS]", *words, "[EOS]"]
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("Is there a car?", add_special_tokens=False)) == words


def test_pair_of_question_and_answer():
    pair = TOKENIZER("Is it red?", "no")["input_ids"]
    assert TOKENIZER.convert_ids_to_tokens(pair) == ["[SOS]", "is", "it", "red", "?", "[NO]", "[EOS]"]


def test_default_vocabulary_has_six_tokens():
    tokenizer = TrafficVLMTokenizer()
    assert tokenizer.get_vocab() == SPECIAL_IDS
    assert tokenizer.encode("yes, 12") == [2, 4, 1, 1, 1, 3]


@pytest.mark.parametrize(
    "vocab",
    [{"car": 0}, {**SPECIAL_IDS, "car": 7}, {**SPECIAL_IDS, "[PAD]": 1, "[UNK]": 0}, {**SPECIAL_IDS, "car": 5}],
)
def test_invalid_vocabulary_raises(vocab):
    with pytest.raises(ValueError, match="contiguous ids"):
        TrafficVLMTokenizer(vocab)


# Batches


def test_padding_is_on_the_left():
    assert (TOKENIZER.padding_side, TOKENIZER.model_max_length) == ("left", 128)
    batch = TOKENIZER(["Is there a car?", "yes"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"][1] == [0, 0, 0, 0, 2, 4, 3]
    assert batch["attention_mask"][1] == [0, 0, 0, 0, 1, 1, 1]


def test_truncation_keeps_the_end_token():
    ids = TOKENIZER("car " * 200, truncation=True)["input_ids"]
    assert len(ids) == 128 and ids[0] == 2 and ids[-1] == 3


# Yes and no


@pytest.mark.parametrize(
    ("text", "ids"),
    [("yes", [4]), ("Yes", [4]), ("NO", [5]), ("[YES]", [4]), ("'no'", [5]), ("nope", [5]), ("yes no", [4, 5])],
)
def test_yes_and_no_have_their_own_tokens(text, ids):
    assert TOKENIZER.encode(text) == [2, *ids, 3]


def test_yes_and_no_are_decoded_as_words():
    assert TOKENIZER.decode([2, 4, 3], skip_special_tokens=True) == "yes"
    assert TOKENIZER.decode([0, 0, 2, 5, 3], skip_special_tokens=True) == "no"
    assert normalize("There is a no-entry sign, yes.") == "there is a no entry sign, yes."


# Normalization


@pytest.mark.parametrize(
    "question",
    [
        "is there a car?",
        "what color is the traffic light?",
        "a red car and a bus on the left.",
        "there is a car; what is it: a truck, or a bus?",
        "what's the driver's speed?",
        "how many cars are there in 1 2 7 meters?",
    ],
)
def test_encoding_and_decoding_keeps_a_known_question(question):
    assert normalize(question.upper()) == question


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("What colour is the grey lorry?", "What color is the gray truck?"),
        ("lorries, bikes and motorbikes", "trucks, bicycles and motorcycles"),
        ("a motor", "a motorcycle"),
        ("the kerb and the pavement", "the curb and the sidewalk"),
        ("Is anyone on the zebra crossing?", "Is a person on the crosswalk?"),
        ("a crossroads", "an intersection"),
        ("a policeman in a fire engine", "a police in a fire truck"),
        ("number plate", "license plate"),
        ("a lamp post and a street lamp", "a lamppost and a street light"),
        ("the posts", "the poles"),
        ("the centre of the picture", "the center of the image"),
        ("Did the cars collide?", "Did the cars crash?"),
        ("towards the junctions", "toward the intersection"),
        ("<obj> is an OBJ", "object is an object"),
        ("Tell me whether it is overcast", "Say if it is cloudy"),
        ("a drivable area", "a road"),
        ("zero, Two, ten, nineteen", "0, 2, 10, 19"),
        ("thirty-five or sixty one", "35 or 61"),
    ],
)
def test_synonyms_and_spellings_have_the_same_ids(text, same):
    assert TOKENIZER.encode(text) == TOKENIZER.encode(same)
    assert TOKENIZER.unk_token_id not in TOKENIZER.encode(text)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("isn't aren't don't doesn't", "is not are not do not does not"),
        ("can't cannot won't", "can not can not will not"),
        ("it isn’t, it wasnt", "it is not, it was not"),
        ("they're I'm I'll we've", "they are I am I will we have"),
        ("what’s", "what's"),
        ("vehicle(s) bus(es)", "vehicles buses"),
        ("top-left, one–way", "top left, one way"),
        ("“stop” (here) *now* [car] <bus>", "stop here now car bus"),
        ("stop!", "stop."),
        ("50km/h 50 kmh", "50 kph 50 kph"),
        ("\uff23\uff21\uff32 \u200bcar\ufeff", "car car"),
        ("traffic_light", "traffic light"),
        ("the drivers' cars", "the drivers cars"),
    ],
)
def test_contractions_and_punctuation(text, same):
    assert TOKENIZER.encode(text) == TOKENIZER.encode(same)
    assert TOKENIZER.unk_token_id not in TOKENIZER.encode(text)


def test_replacements_are_words_of_the_vocabulary():
    for word in [*module._SYNONYMS, *module._WHOLE_WORDS]:
        assert TOKENIZER.unk_token_id not in TOKENIZER.encode(word), word


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("50mph", ["50", "mph"]), ("not now normal yesterday", ["not", "now", "normal", "[UNK]"])],
)
def test_words_begin_and_end_where_they_should(text, tokens):
    assert TOKENIZER.tokenize(text) == tokens


def test_words_of_different_meaning_have_different_ids():
    for one, other in [("motor vehicle", "motorcycle vehicle"), ("red", "yellow"), ("left", "right"), ("car", "van")]:
        assert TOKENIZER.encode(one) != TOKENIZER.encode(other)


# Numbers, singular and plural


def test_no_number_is_unknown():
    whole = {int(word) for word in WORDS if word.isdecimal()}
    assert whole >= {*range(21), *range(20, 131, 10), 25, 35, 45}
    for number in range(201):
        tokens = TOKENIZER.tokenize(str(number))
        assert tokens == ([str(number)] if number in whole else list(str(number)))
    assert "[UNK]" not in TOKENIZER.tokenize("3.75 1,000 007 987654321")


@pytest.mark.parametrize(
    "plural",
    "cars trucks buses vans trailers motorcycles bicycles pedestrians cyclists riders drivers people children workers "
    "animals dogs cows birds trains taxis ambulances cones barriers poles signs lights lanes roads lines crosswalks "
    "buildings trees vehicles objects helmets".split(),
)
def test_counted_nouns_have_a_plural(plural):
    singular = {"buses": "bus", "people": "person", "children": "child"}.get(plural, plural.removesuffix("s"))
    ids = TOKENIZER.encode(f"{singular} {plural}", add_special_tokens=False)
    assert len(set(ids)) == 2 and TOKENIZER.unk_token_id not in ids


# Unknown words and control tokens


@pytest.mark.parametrize("text", ["\U0001f642", "❤️", "xyzzy", "\x00", "日", "٣", "½"])
def test_unknown_words_become_unk(text):
    assert TOKENIZER.unk_token_id in TOKENIZER.encode(f"a {text} car")


def test_unknown_words_are_listed_as_written():
    text = "Is the Balloon\U0001f642 next to the lorry a balloon or a Zeppelin?"
    assert TOKENIZER.unknown_words(text) == ["Balloon", "\U0001f642", "balloon", "Zeppelin"]
    assert TOKENIZER.unknown_words(["Is there a car?", "Where are their positions?"]) == ["positions"]
    assert TOKENIZER.unknown_words([]) == []


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("car ", []),
        ("a", ["a" * 20_000]),
        ("\ufdfa", ["\ufdfa" * 20_000]),
        ("\ufdfa ", ["\ufdfa"]),
        ("can't ", []),
        ("-", []),
        ("a\u0301", ["a\u0301" * 9_999 + "a"]),  # a word ends with its last letter
    ],
)
def test_unknown_words_take_linear_time(letters, expected):
    """Quadratic time was 52 s for U+FDFA, one letter that becomes four words: now a fraction of a second."""
    text = letters * (20_000 // len(letters))
    begin = time.monotonic()
    unknown = TOKENIZER.unknown_words(text)
    assert time.monotonic() - begin < 10
    assert unknown == expected


def test_split_special_tokens_reads_control_tokens_as_words():
    text = "[PAD] [SOS] car [EOS] [UNK]"
    assert TOKENIZER.encode(text, add_special_tokens=False)[0] == 0
    ids = TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ids == [1, 1, TOKENIZER.convert_tokens_to_ids("car"), 1, 1]
    assert TOKENIZER.encode("[YES]", split_special_tokens=True) == [2, 4, 3]


# The word list and the files


def test_saved_files_have_no_state_and_no_paths():
    config = json.loads((ROOT / "tokenizer_config.json").read_text())
    assert config["auto_map"]["AutoTokenizer"] == ["tokenization_traffic_vlm.TrafficVLMTokenizer", None]
    assert not [value for value in config.values() if isinstance(value, str) and os.sep in value]
    backend = json.loads((ROOT / "tokenizer.json").read_text())
    assert backend["padding"] is None and backend["truncation"] is None


def test_every_word_of_the_vocabulary_is_reachable():
    assert build_files.unreachable_words(TOKENIZER) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stroller", "road", "more than once: \\['road'\\]"),
        ("stroller", "stroller extra", "500 words, it has 501"),
        ("[PAD] [UNK]", "[UNK] [PAD]", "begin with"),
        ("stroller", "pavement", "rewrites or splits: \\['pavement'\\]"),
        ("stroller", "side-walk", "rewrites or splits: \\['side-walk'\\]"),
    ],
)
def test_invalid_word_list_raises_and_names_the_word(tmp_path, old, new, message):
    wrong = tmp_path / "vocabulary.txt"
    wrong.write_text(VOCABULARY.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        build_files.make_tokenizer(wrong)


def test_vocabulary_covers_the_questions():
    coverage = measure_coverage(TOKENIZER, QUESTIONS, TOKENIZER.get_vocab())
    assert len(QUESTIONS) >= 150
    assert coverage.known_words >= 0.97 * coverage.words
    assert coverage.known_questions >= 0.85 * coverage.questions


def test_our_own_questions_can_teach_most_words_of_people():
    ours = template_words(TOKENIZER)
    coverage = measure_coverage(TOKENIZER, QUESTIONS, ours)
    assert coverage.known_words >= 0.9 * coverage.words
    assert coverage.known_questions >= 0.55 * coverage.questions
    accident = measure_coverage(TOKENIZER, ["Is there an accident?"], ours)
    assert accident.known_questions == 0 and accident.unknown == {"accident": 1}


def test_coverage_counts_words_and_questions():
    coverage = measure_coverage(TOKENIZER, ["Is there a Zeppelin?", "Is there a car?"], TOKENIZER.get_vocab())
    assert (coverage.words, coverage.known_words) == (8, 7)
    assert (coverage.questions, coverage.known_questions) == (2, 1)
    assert coverage.unknown == {"zeppelin": 1}
    assert "50.00%" in str(coverage) and "zeppelin (1)" in str(coverage)


def test_build_files_script_reports_coverage(tmp_path, run_script, capsys):
    (tmp_path / "questions.txt").write_text("one set\tIs there a car?\n\n")
    run_script("build_files.py", "--output_dir", tmp_path, "--questions", tmp_path / "questions.txt")
    printed = capsys.readouterr().out
    assert printed.count("1 questions, all words known: 100.00%") == 3  # tokenizer, our own questions, weights


# Saving, loading, copying


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda tokenizer: pickle.loads(pickle.dumps(tokenizer))])
def test_copies_behave_the_same(clone):
    other = clone(TOKENIZER)
    assert other.get_vocab() == TOKENIZER.get_vocab()
    assert other(QUESTIONS, padding=True) == TOKENIZER(QUESTIONS, padding=True)
    assert other.decode([2, 4, 3], skip_special_tokens=True) == "yes"


def test_added_tokens_are_saved(tmp_path):
    tokenizer = copy.deepcopy(TOKENIZER)
    assert tokenizer.add_tokens(["<one>", "<two>"], special_tokens=True) == 2
    assert len(tokenizer) == 502 and tokenizer.vocab_size == 500
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.encode("a <one> car <two>")
    assert ids[2] == 500 and ids[4] == 501
    assert TrafficVLMTokenizer.from_pretrained(tmp_path).encode("a <one> car <two>") == ids


# Properties


PIECES = st.sampled_from([*SPECIAL_IDS, "[pad]", "[ PAD ]", "car", " ", "[", "]", "'s", "\u200b"])


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=80) | st.lists(PIECES, max_size=8).map("".join))
def test_any_text_has_valid_ids_and_lists_its_unknown_words(text):
    ids = TOKENIZER.encode(text, split_special_tokens=True)
    assert ids[0] == 2 and ids[-1] == 3
    assert set(ids[1:-1]) <= {1, *range(4, 500)}  # user text never gives [PAD], [SOS] or [EOS]
    unknown = TOKENIZER.unknown_words(text)
    assert bool(unknown) == (1 in ids)
    assert "" not in unknown and all(word in text for word in unknown)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([word for word in WORDS if not word.startswith("'")]), max_size=20))
def test_encoding_of_decoded_text_is_stable(words):
    ids = TOKENIZER.encode(" ".join(words))
    again = TOKENIZER.encode(TOKENIZER.decode(ids, skip_special_tokens=True))
    assert TOKENIZER.encode(TOKENIZER.decode(again, skip_special_tokens=True)) == again


def test_decoded_questions_have_the_same_ids():
    for question in QUESTIONS:
        ids = TOKENIZER.encode(question)
        if TOKENIZER.unk_token_id not in ids:
            assert TOKENIZER.encode(TOKENIZER.decode(ids, skip_special_tokens=True)) == ids, question

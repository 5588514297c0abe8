"""What questions ask for: yes or no, or a kind of words; two questions in one, and negations."""

import random
import re
from functools import partial
from itertools import product

import numpy as np
import pytest
import yaml

from tiny import ROOT
from traffic_vlm.data.grammar import FILLINGS, TYPES, in_other_words, paraphrases_of, question_rules, question_type_of
from traffic_vlm.data.scene import ATTRIBUTES, CLASSES, SCENE_ATTRIBUTES, is_a
from traffic_vlm.data.truth import MAX_COUNT, NONE
from traffic_vlm.question_traffic_vlm import END, Rules, question_words
from traffic_vlm.tokenization_traffic_vlm import TrafficVLMTokenizer


RULES = Rules(**question_rules())
KINDS = {kind.name: kind for kind, _ in RULES.kinds}
# Answers to open questions, by question type.
VALUES = {"light_state": "a color of a traffic light", "color": "a color", "status": "a status", "side": "a side"}
VALUES |= {"sign_value": "a traffic sign", "closest": "a vehicle", "count": "a number", "facing": "a direction"}
VALUES = {name: set(KINDS[kind].values) for name, kind in VALUES.items()}
SCENE_ATTRIBUTE_OF = {kind.name: kind.attribute for kind in TYPES.values() if kind.rule == "scene_attribute"}
VALUES |= {name: set(SCENE_ATTRIBUTES[attribute]) for name, attribute in SCENE_ATTRIBUTE_OF.items()}


FORMS = yaml.safe_load((ROOT / "tests" / "data" / "forms.yaml").read_text("utf-8"))


def split(text):
    return [question.strip() for question in text.replace("\n", "|").split("|")]


def prompt_of(processor, question):
    return processor.tokenizer.decode(RULES.read(question, processor.prompt, limit=128).input_ids)


@pytest.mark.parametrize(("kind", "expected"), [("yes or no", True), ("open", False)])
def test_yes_no_and_open_questions_by_their_words(kind, expected):
    for question in split(FORMS[kind]):
        assert RULES.form(question).is_yes_no == expected, question


def templates(most=None):
    """Questions of every template and place, each with its question type and whether it asks for words.

    `most` of each question id are yielded, the simplest first.
    """
    for kind in TYPES.values():
        examples = {"CLASS": ["car"], "OTHER": ["bus"], "RELATION": ["left"], "PLACE": FILLINGS["place"]}
        examples["VALUE"] = kind.values_of("car")[:1]
        for pattern in kind.templates:
            parts = pattern.split("/")
            is_open = kind.name == "objects" or parts[1:2] in (["what"], ["what_all"], ["which"])
            for key in product(*(examples.get(part, [part]) for part in parts)):
                for text in paraphrases_of("/".join([kind.name, *key]))[:most]:
                    yield kind.name, is_open, text


@pytest.mark.parametrize("line", FORMS["wordings"].splitlines())
def test_other_wordings_are_asked_as_taught(processor, line):
    taught, *others = line.split("|")
    for text in others:
        assert prompt_of(processor, text) == prompt_of(processor, taught), text
        assert RULES.form(text).is_yes_no == RULES.form(taught).is_yes_no, text


def test_questions_in_words_of_a_kind_are_asked_in_one_wording(processor):
    asked = {"weather/weather/what": "how is the weather?", "count/bus/what": "how many buses are there?"}
    for question_id, text in asked.items():
        assert {prompt_of(processor, one) for one in paraphrases_of(question_id)} == {f"[SOS] {text}"}


@pytest.mark.parametrize("line", FORMS["other meanings"].splitlines())
def test_words_of_another_meaning_stay(processor, line, monkeypatch):
    monkeypatch.setattr("traffic_vlm.tokenization_traffic_vlm._PHRASES", {})
    without_phrases = TrafficVLMTokenizer(processor.tokenizer.get_vocab())
    for text in line.split("|"):
        asked, typed = question_words(RULES.read(text, processor.prompt, 128).asked), question_words(text)
        assert processor.tokenizer.tokenize(asked) == without_phrases.tokenize(typed), text


def test_words_around_a_question_change_neither_its_form_nor_its_kind(processor):
    """Of all templates; a filler in the middle of a question in words can hide its kind."""
    rng, found, changed = random.Random(0), [], []
    for _, is_open, text in templates():
        around, question = in_other_words(text, rng), RULES.form(text)
        form = RULES.form(around)
        found.append((form.is_yes_no, form.is_negated, form.problem) == (not is_open, question.is_negated, None))
        changed.append(around != text)
        assert question_type_of(text) is not None
    assert np.mean(found) > 0.99
    assert np.mean(changed) == pytest.approx(1 - 0.8 * 0.7 * 0.7, abs=0.03)  # a filler, a prefix, a suffix


def test_every_template_is_one_question_that_is_asked_as_it_stands():
    for _, is_open, text in templates():
        form, is_dry = RULES.form(text), not is_open and "dry" in text.lower()
        asked = re.sub("^Dry|dry", "wet", text) if is_dry else text  # not wet
        assert (form.is_yes_no, form.is_negated, form.problem) == (not is_open, is_dry, None)
        assert form.asked == asked
    for question_type, attribute in SCENE_ATTRIBUTE_OF.items():  # a value may be two: "bridge or tunnel"
        for value in set(SCENE_ATTRIBUTES[attribute]) - {"other"}:
            for text in paraphrases_of(f"{question_type}/{attribute}/is/{value}"):
                assert RULES.form(text).is_yes_no, text


def test_the_kind_of_every_template_accepts_the_answers_of_its_question_type(processor):
    for question_type, is_open, text in templates():
        if is_open:
            kind = RULES.read(text, processor.prompt, limit=128).kind
            assert kind is not None, text
            values = VALUES.get(question_type, {"a car and 2 trucks"}) - {"other", "bridge or tunnel"}
            if question_type == "sign_value":  # "What is the speed limit?" and "Which traffic sign is there?"
                values = {value for value in values if value.isdecimal() or value == NONE}
            assert all(map(kind.accepts, values)), (text, kind.name)


OBJECTS = KINDS["a list of objects"]


def test_kinds_know_the_classes_of_scenes():
    nouns = {noun for singular, plural, _ in CLASSES.values() for noun in (singular, plural)}
    assert set(OBJECTS.nouns) == nouns and RULES.nouns == {one: many for one, many, _ in CLASSES.values()}
    signs = {name for name in CLASSES if is_a(name, "traffic sign")}
    assert set(KINDS["a traffic sign"].values) == {*ATTRIBUTES["value"], *signs, NONE}
    assert set(KINDS["a vehicle"].values) == {name for name in CLASSES if is_a(name, "vehicle")} - {"vehicle"} | {NONE}
    assert {str(MAX_COUNT), *ATTRIBUTES["color"]} <= OBJECTS.next_words([])
    assert RULES.known_nouns({"car", "traffic", "light"}) == ["car", "traffic light"]


def test_the_color_of_a_vehicle_needs_a_sure_answer(processor):
    least, read = KINDS["a color"].min_score, partial(RULES.read, "What color is the car?", processor.prompt, 50)
    assert read().answer_in_words("red", least) == {"answer": "red", "score": least}
    assert "'red', has a score of" in read().answer_in_words("red", least - 0.01)["problem"]
    assert read(answer_untaught=True).answer_in_words("red", least - 0.01)["answer"] == "red"


@pytest.mark.parametrize("line", FORMS["kinds"].splitlines())
def test_kinds_of_other_wordings(processor, line):
    name, *texts = line.split("|")
    for text in texts:
        question = RULES.read(text, processor.prompt, limit=128)
        assert question.kind.name == name if name else question.problem.startswith("the model was not taught"), text


@pytest.mark.parametrize(
    ("words", "right", "wrong"),
    [
        ("how many lanes are there", ["3"], ["dry", "", "3 cars"]),
        (
            "what is ahead",
            ["2 cars and a bus", "a red car on the left, people", "road construction"],
            ["7", "emergency"],
        ),
        ("describe the road", ["a road"], ["emergency road", "green", "fences the left, a car", "none"]),
        ("what vehicles are there", ["a car and 2 trucks"], ["a stop sign", "8", "people"]),
        ("is the light red or green", ["red", "none"], ["yellow", "light"]),
        ("what color is the light , red or another", ["red", "green"], ["light"]),  # no two to choose from
    ],
)
def test_answers_of_a_kind(words, right, wrong):
    kind = RULES.answer_kind(words)
    assert all(map(kind.accepts, right)) and not any(map(kind.accepts, wrong))


def test_the_next_words_of_an_answer():
    road = RULES.answer_kind("what type of road is this")
    assert road.next_words([]) == {"city", "residential", "highway", "rural", "intersection", "parking"}
    assert road.next_words(["city"]) == {"street"} and road.next_words(["city", "street"]) == {END}
    assert road.next_words(["city", "street", END]) == {END}  # while the answers to other questions go on
    assert OBJECTS.next_words(["2", "red", "traffic"]) == {"light", "lights", "sign", "signs", "cone", "cones"} | {
        *("island", "islands")
    }
    assert OBJECTS.next_words(["a", "car"]) == {"on", "in", "and", ",", END}
    assert OBJECTS.next_words("a car on the left and a bus on the".split()) == {"left", "right"}
    assert OBJECTS.next_words(["dry"]) == set()


# --- what is asked instead of the text, and what cannot be asked ---


@pytest.mark.parametrize("asked", FORMS["asked"])
def test_the_question_within_a_text(asked):
    for question in split(FORMS["asked"][asked]):
        form = RULES.form(question)
        found = (question_words(form.asked).lower(), form.is_yes_no, form.is_negated, form.problem)
        assert found == (asked, True, False, None), question


@pytest.mark.parametrize("line", FORMS["negated"].splitlines())
def test_the_opposite_of_a_question_is_asked(line):
    question, asked = line.split("|")
    form = RULES.form(question)
    assert (form.asked, form.is_negated, form.problem) == (asked, True, None)
    assert RULES.as_asked(question, "Yes") == (asked, "no") and RULES.as_asked(question, "two") == (question, "two")


def test_each_question_of_a_training_needs_an_answer():
    assert RULES.all_as_asked(["Is it dry?", "Weather?"], ["no", "clear"])[0] == ("Is it wet?", "yes")
    with pytest.raises(ValueError, match="shorter"):
        RULES.all_as_asked(["Is it dry?", "Weather?"], ["no"])


@pytest.mark.parametrize("problem", FORMS["problems"])
def test_what_cannot_be_asked(problem):
    for question in split(FORMS["problems"][problem]):
        assert problem in (RULES.form(question).problem or ""), question
    assert "contains 2 questions" in RULES.form("Is there a car\nIs there a bus").problem


def test_one_question_of_several_clauses():
    for question in split(FORMS["one question"]):
        assert RULES.form(question).problem is None, question

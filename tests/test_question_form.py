"""What questions ask for: yes or no, or a kind of words; two questions in one, and negations."""

from itertools import product

import pytest

from traffic_vlm.answer_kind_traffic_vlm import END, OBJECTS, SIGN_NAMES, VEHICLE_NOUNS, VEHICLES, answer_kind
from traffic_vlm.data import scene
from traffic_vlm.data.ground_truth import MAX_COUNT, NONE
from traffic_vlm.data.questions import SCENE_ATTRIBUTE_OF_TYPE
from traffic_vlm.data.scene import CLASSES, SCENE_ATTRIBUTES, is_a
from traffic_vlm.data.templates import FILLINGS, TYPES, paraphrases_of
from traffic_vlm.evaluation.metrics import VALUES
from traffic_vlm.question_form_traffic_vlm import is_yes_no_question, question_form, question_words


def kind_of(processor, question):
    [ids] = processor.prompt_ids([question_words(question_form(question).text)])
    kind = processor.answer_kind(ids)
    return kind and kind.name


@pytest.mark.parametrize(
    "questions",
    [
        ("is there a car", "ARE THERE KIDS?", "any pedestrians?", "a red car", "Isn\u2019t it wet?", "isnt it wet?"),
        ("Can you see a dog?", "Please say if it is night.", "tell me whether there's a bus", "What about buses?"),
        ("Can you tell me if there is a bus?", "Please answer: are there any cars?", "So, is it safe to cross?"),
        ("When it is dark, are the lights on?", "If the light is red, may we go?", "In this image is there a bus?"),
        ("Is there a car or a bus?", "Are there 2 or more cars?", "Is a car or truck stuck in traffic or smoke?"),
        ("Answer yes or no: how about a car?", "There is a car; is it red?", "Is the car where it should be?"),
        ("", " ", "?", ";;", "when, now", "please", "can you", "tell me", "on", "\u00bf?"),
    ],
)
def test_yes_no_questions_by_their_words(questions):
    for question in questions:
        assert is_yes_no_question(question), question


@pytest.mark.parametrize(
    "questions",
    [
        ("How busy is it?", "what's ahead", "Whats the weather", "WHERE\u2019S the bus?", "Which lane are we in?"),
        ("On which side is the car?", "In this picture how many cars are there?", "When was this taken?", "Why?"),
        ("Describe the scene.", "Could you please describe it?", "Can you tell me what color it is?", "When?"),
        ("Please say where the car is.", "tell me on which side it is", "Count the cars.", "Number of cars?"),
        ("Is it day or night?", "Is the light red, yellow or green?", "Is the car on the left or on the right?"),
        ("The parked car is what?", "There is a car; what is it doing?", "Based on this scene, what should we do?"),
    ],
)
def test_open_questions_by_their_words(questions):
    for question in questions:
        assert not is_yes_no_question(question), question


def templates():
    """Questions of every template and place, each with its question type and whether it asks for words."""
    for kind in TYPES.values():
        examples = {"CLASS": ["car"], "OTHER": ["bus"], "RELATION": ["left"], "PLACE": FILLINGS["place"]}
        examples["VALUE"] = kind.values_of("car")[:1]
        for pattern in kind.templates:
            parts = pattern.split("/")
            is_open = kind.name == "objects" or parts[1:2] in (["what"], ["what_all"], ["which"])
            for key in product(*(examples.get(part, [part]) for part in parts)):
                for text in paraphrases_of("/".join([kind.name, *key])):
                    yield kind.name, is_open, text


def test_every_template_is_one_question_that_is_asked_as_it_stands():
    for _, is_open, text in templates():
        form = question_form(text)
        assert (form.is_yes_no, form.is_negated, form.problem, form.text) == (not is_open, False, None, text)
    for question_type, attribute in SCENE_ATTRIBUTE_OF_TYPE.items():  # a value may be two: "bridge or tunnel"
        for value in set(SCENE_ATTRIBUTES[attribute]) - {"other"}:
            for text in paraphrases_of(f"{question_type}/{attribute}/is/{value}"):
                assert question_form(text).is_yes_no, text


def test_the_kind_of_every_template_accepts_the_answers_of_its_question_type(processor):
    for question_type, is_open, text in templates():
        if is_open:
            kind = processor.answer_kind(processor.prompt_ids([question_words(text)])[0])
            assert kind is not None, text
            values = VALUES.get(question_type, {"a car and 2 trucks"}) - {"other", "bridge or tunnel"}
            if question_type == "sign_value":  # "What is the speed limit?" and "Which traffic sign is there?"
                values = {value for value in values if value.isdecimal() or value == NONE}
            assert all(map(kind.accepts, values)), (text, kind.name)


@pytest.mark.parametrize("sign", [*SIGN_NAMES, "traffic light"])
def test_where_a_sign_is_asks_for_a_side(processor, sign):
    for text in paraphrases_of(f"side/{sign}/what"):
        assert kind_of(processor, text) == "a side", text


def test_kinds_know_the_classes_of_scenes():
    nouns = {noun for singular, plural, _ in CLASSES.values() for noun in (singular, plural)}
    assert set(OBJECTS.nouns) == nouns
    of_vehicles = {noun for name in CLASSES if is_a(name, "vehicle") for noun in CLASSES[name][:2]}
    assert set(VEHICLE_NOUNS) == of_vehicles | {"parked car", "parked cars"}
    assert set(SIGN_NAMES) == {name for name in CLASSES if is_a(name, "traffic sign")}
    vehicles = {name for name in CLASSES if is_a(name, "vehicle")} - {"vehicle", "parked car", "emergency vehicle"}
    assert set(VEHICLES) == vehicles
    assert {str(MAX_COUNT), *scene.COLORS} <= OBJECTS.next_words([])


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("How many lanes does the road have?", "a number of lanes"),
        ("how many people", "a number"),
        ("What vehicles are there?", "a list of vehicles"),
        ("What is on the road?", "a list of objects"),
        ("What does the sign say?", "a traffic sign"),
        ("Whats the colour of the signal", "a color of a traffic light"),
        ("what colour is the car", "a color"),
        ("How's the weather?", "a kind of weather"),
        ("Where's the bus?", "a side"),
        ("What sign is on the right side of the road?", "a traffic sign"),
        ("Is the traffic heavy or light?", "a density of traffic"),
        ("Day or night?", "a time of day"),
        ("Tell me the number of cars.", "a number"),
        ("Could you please count the cars?", "a number"),
        ("Weather?", "a kind of weather"),
        ("How fast are we allowed to drive?", "a speed limit"),
        *((text, None) for text in ("Who is driving?", "Where are we?", "What brand is the car?", "Why?")),
        *((text, None) for text in ("Is it a bus or a truck?", "is this a car or truck?", "Should I stop or go?")),
        *((text, None) for text in ("What is the meaning of life?", "How far is the car?", "What is the car doing?")),
    ],
)
def test_kinds_of_other_wordings(processor, question, kind):
    assert kind_of(processor, question) == kind


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
    ],
)
def test_answers_of_a_kind(words, right, wrong):
    kind = answer_kind(words)
    assert all(map(kind.accepts, right)) and not any(map(kind.accepts, wrong))


def test_the_next_words_of_an_answer():
    road = answer_kind("what type of road is this")
    assert road.next_words([]) == {"city", "residential", "highway", "rural", "intersection", "parking"}
    assert road.next_words(["city"]) == {"street"} and road.next_words(["city", "street"]) == {END}
    assert road.next_words(["city", "street", END]) == {END}  # while the answers to other questions go on
    assert OBJECTS.next_words(["2", "red", "traffic"]) == {"light", "lights", "sign", "signs", "cone", "cones"} | {
        *("island", "islands")
    }
    assert OBJECTS.next_words(["a", "car"]) == {"on", "in", "and", ",", END}
    assert OBJECTS.next_words("a car on the left and a bus on the".split()) == {"left", "right"}
    assert OBJECTS.next_words(["dry"]) == set()


@pytest.mark.parametrize(
    "question",
    [
        *("Is there a bus? Please answer yes or no.", "Yes or no: is there a bus?", "Is there a bus (yes/no)?"),
        *("Answer only with yes or no: is there a bus?", "Is there a bus, yes or no?", "is there a bus - yes or no"),
        *("Respond with yes/no. Is there a bus?", "Is there a bus? Your answer should be yes or no only."),
        "Please answer the following question with yes or no: Is there a bus?",
        'Is there a bus? Answer with a single word: "yes" or "no".',
        *("Is there a bus or not?", "Is there a bus? Answer in one word, yes or no."),
        *("Is there a bus? Respond only yes or no, nothing else.", "Please don't explain, yes or no: is there a bus?"),
    ],
)
def test_a_request_for_yes_or_no_is_not_a_part_of_the_question(question):
    form = question_form(question)
    assert (question_words(form.text).lower(), form.is_yes_no, form.problem) == ("is there a bus", True, None)


@pytest.mark.parametrize(
    ("question", "count"),
    [
        ("Is there a car? Is it snowing?", 2),
        ("Is there a car, is it snowing?", 2),
        ("Is there a car,Is there a bus", 2),
        ("Is there a car\nIs there a bus", 2),
        ("Is there a car and is it red?", 2),
        ("Is there a bus? How many cars are there? What is ahead?", 3),
        ("Is there a car? Where?", 2),
        ("Is there a car, and where?", 2),
        ("Are there cars? How many?", 2),
    ],
)
def test_two_questions_in_one_text_are_a_problem(question, count):
    problem = question_form(question).problem
    assert f"contains {count} questions" in problem and "list of questions" in problem


@pytest.mark.parametrize(
    "question",
    [
        *("When it is dark, are the lights on?", "Hello, is there a car?", "Could you tell me, is there a car?"),
        *("There is a motorcycle; is its status the same as that of the car?", "Is there a car, a bus or a truck?"),
        *("Is there a bus, is it?", "Which way does the road turn, if it turns?", "In this image, is there a car?"),
        *("is there a vehicle moving, colliding, or crashing?", "Is there a car, which is red?"),
        *("May I ask: is there a bus?", "Is there a bus? Can you confirm?", "Can you help me: is there a bus?"),
    ],
)
def test_one_question_of_several_clauses(question):
    assert question_form(question).problem is None


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("Is there no car?", "Is there any car?"),
        ("Are there zero cars on the left?", "Are there any cars on the left?"),
        ("Can you see no bus?", "Can you see any bus?"),
        ("Are no people visible?", "Are any people visible?"),
        ("Does the image show no bus?", "Does the image show any bus?"),
        ("Is there no passing car?", "Is there any passing car?"),
        ("Does this road have no sidewalk?", "Does this road have any sidewalk?"),
    ],
)
def test_a_question_with_no_is_asked_without_it(question, text):
    form = question_form(question)
    assert (form.text, form.is_negated, form.problem) == (text, True, None)


@pytest.mark.parametrize(
    "question",
    [
        *("Isn't there a car?", "Is it not raining?", "Is nobody on the road?", "Isnt it wet?", "Is nothing ahead?"),
        *("Is'nt there a car?", "Is there hardly any traffic?"),
        *("Could it be avoided if no car was there?", "How many cars are not parked?", "Is the bus without windows?"),
    ],
)
def test_other_negations_are_not_understood(question):
    assert "does not understand" in question_form(question).problem


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("It's raining, isn't it?", "It's raining"),
        ("There is a car, isn't there?", "There is a car"),
        ("It is dark, is it not?", "It is dark"),
    ],
)
def test_a_question_tag_is_not_a_negation(question, text):
    form = question_form(question)
    assert (form.text, form.is_yes_no, form.is_negated, form.problem) == (text, True, False, None)


@pytest.mark.parametrize("question", ["Is there a no parking sign?", "Is the bicycle without a rider?"])
def test_names_of_signs_and_taught_words_are_no_negations(question):
    form = question_form(question)
    assert (form.text, form.is_negated, form.problem) == (question, False, None)


@pytest.mark.parametrize("question", ["", "  ", "?!", "yes or no"])
def test_a_question_needs_a_word(question):
    assert "has no word" in question_form(question).problem

"""What questions ask for: yes or no, or a kind of words; two questions in one, and negations."""

from itertools import product

import pytest

from traffic_vlm.data.grammar import FILLINGS, TYPES, paraphrases_of, question_rules
from traffic_vlm.data.questions import SCENE_ATTRIBUTE_OF_TYPE
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
VALUES |= {name: set(SCENE_ATTRIBUTES[attribute]) for name, attribute in SCENE_ATTRIBUTE_OF_TYPE.items()}


def prompt_of(processor, question):
    return processor.tokenizer.decode(processor.prompt(question_words(RULES.form(question).asked)).ids)


YES_NO = """
is there a car|ARE THERE KIDS?|any pedestrians?|a red car|Isn\u2019t it wet?|isnt it wet?|Can you see a dog?
Please say if it is night.|tell me whether there's a bus|Can you tell me if there is a bus?|What about buses?
Please answer: are there any cars?|So, is it safe to cross?|When it is dark, are the lights on?
If the light is red, may we go?|In this image is there a bus?|Is there a car or a bus?|Are there 2 or more cars?
Is a car or truck stuck in traffic or smoke?|Answer yes or no: how about a car?|There is a car; is it red?
Is the car where it should be?|Can you find a car?|I want to know if there is a car
|?|;;|when, now|please|can you|tell me|on|\u00bf?
"""
OPEN = """
How busy is it?|what's ahead|Whats the weather|WHERE\u2019S the bus?|Which lane are we in?|When was this taken?|Why?
On which side is the car?|In this picture how many cars are there?|Describe the scene.|Could you please describe it?
Can you tell me what color it is?|When?|Please say where the car is.|tell me on which side it is|Count the cars.
Number of cars?|Is it day or night?|Is the light red, yellow or green?|Is the car on the left or on the right?
The parked car is what?|There is a car; what is it doing?|Based on this scene, what should we do?
Which object has eyes or nose?|What're the colors of the cars?|What'll the weather be?|Find a car.
I want to know what color the light is|I'd like to know how many cars there are
"""


@pytest.mark.parametrize(("texts", "expected"), [(YES_NO, True), (OPEN, False)], ids=["yes_no", "open"])
def test_yes_no_and_open_questions_by_their_words(texts, expected):
    for question in texts.strip("\n").replace("\n", "|").split("|"):
        assert RULES.form(question).is_yes_no == expected, question


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


# A taught question, and others that mean the same, which the weights would read as something else or not at all.
WORDINGS = """
Is it rainy?|Is it a rainy day?|Is it wet weather?|Is it pouring?|Is it pouring rain?
Is it cloudy?|Is it an overcast day?|Is it gray outside?
Is it day?|Is it light outside?|is it still light|Is it bright outside?
Is the road wet?|Are the roads wet, yes or no?|Is the pavement wet?
Are there any vehicles?|Is there any traffic?|Is there traffic?|Is there some traffic?
Are there many traffic lights?|Are there a lot of traffic lights?
Is there a traffic jam?|Is there congestion?|Is there a jam?|Are there any traffic jams?
Is there road construction?|Is there a work zone?|Is there construction?|Is there road construction work?
Is there a bus?|Hi, is there a bus?|Hello there! Is there a bus?|hey is there a bus
Is there a crosswalk?|Is there a pedestrian crossing?|Is there a crossing for pedestrians?
Is there a truck?|Is there a heavy goods vehicle?|Is there a semi-trailer truck?|Is there a truck, yes?
There is a truck.|There is a truck, right?
What is the weather?|Weather?|Tell me the weather.|Identify the weather.|And the weather, please?
What is the traffic like?|Traffic density?|What are the traffic conditions?|Is traffic heavy or light?
What is the road like?|How does the road look?|Is the road wet or dry?|Road conditions?
What time of day is it?|Is it day or night?|When was this photo taken?|Which part of the day is it?
What color is the traffic light?|Traffic light color?|Is the light red or green?|What's the signal's colour?
How many cars are there?|How many cars?|Number of cars?|number of cars please
What is the status of the car?|What is the car doing?|Is the car parked or moving?
Where is the bus?|What's the position of the bus?|Is the bus on the left or on the right?|Where can I find the bus?
Where is the bus?|bus location|Whereabouts is the bus?|What's the bus's location?|the position of the bus
"""


@pytest.mark.parametrize("line", WORDINGS.strip().splitlines())
def test_other_wordings_are_asked_as_taught(processor, line):
    taught, *others = line.split("|")
    for text in others:
        assert prompt_of(processor, text) == prompt_of(processor, taught), text
        assert RULES.form(text).is_yes_no == RULES.form(taught).is_yes_no, text


OTHER_MEANINGS = """
Is a pedestrian crossing the street?|Is there a pedestrian crossing the road?
Is there a pedestrian crossing our path?|Is there a pedestrian crossing ahead?|Is the light on?
Is it on the left, right?|Is it left, center, right?|Is there a lot of snow?|Is there plenty of room?
Is the sidewalk wet?|Is the road clear of snow?|How many lanes?
Are there fewer cars than 3?|Are there more or fewer cars than buses?|Is the car less visible than the bus?
Is the car turning left or right?|Is the road going to the left or to the right?
Is the car parked or stopped or moving?|Can I turn right here?|Should we turn right now?
Has the car turned over on the road?|Can we pull over on the left?|Is smoke pouring from the car?
"""


@pytest.mark.parametrize("line", OTHER_MEANINGS.strip().splitlines())
def test_words_of_another_meaning_stay(processor, line, monkeypatch):
    monkeypatch.setattr("traffic_vlm.tokenization_traffic_vlm._PHRASES", {})
    without_phrases = TrafficVLMTokenizer(processor.tokenizer.get_vocab())
    for text in line.split("|"):
        asked, typed = question_words(RULES.form(text).asked), question_words(text)
        assert processor.tokenizer.tokenize(asked) == without_phrases.tokenize(typed), text


def test_a_question_with_an_instruction_is_not_asked_for_words():
    for text in ("Traffic: yes or no?", "Speed limit, yes or no?", "Is the road wet or dry? Answer yes or no."):
        form = RULES.form(text)
        assert form.is_yes_no and "what" not in form.asked.lower(), text


def test_every_template_is_one_question_that_is_asked_as_it_stands():
    for _, is_open, text in templates():
        form, is_dry = RULES.form(text), not is_open and "dry" in text
        asked = text.replace("dry", "wet") if is_dry else text  # not wet
        assert (form.is_yes_no, form.is_negated, form.problem, form.asked) == (not is_open, is_dry, None, asked)
    for question_type, attribute in SCENE_ATTRIBUTE_OF_TYPE.items():  # a value may be two: "bridge or tunnel"
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


KINDS_OF = """
a number of lanes|How many lanes does the road have?
a number|how many people|Tell me the number of cars.|Could you please count the cars?
a list of vehicles|What vehicles are there?
a list of objects|What is on the road?
a traffic sign|What does the sign say?|What sign is on the right side of the road?
a color of a traffic light|Whats the colour of the signal
a color|what colour is the car
a kind of weather|How's the weather?|Weather?
a side|Where's the bus?
a density of traffic|Is the traffic heavy or light?
a time of day|Day or night?
a speed limit|How fast are we allowed to drive?
|Who is driving?|Where are we?|Why?|Is it a bus or a truck?|Should I stop or go?|How far is the car?|What is it doing?
"""


@pytest.mark.parametrize("line", KINDS_OF.strip().splitlines())
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

ASKED = {
    "is there a bus": """
        Is there a bus? Please answer yes or no.|Is there a bus (yes/no)?|Is there a bus or not?
        Yes or no: is there a bus?|Please answer the following question with yes or no: Is there a bus?
        Respond with yes/no. Is there a bus?|Is there a bus? Answer with a single word: "yes" or "no".
        Is there a bus? Respond only yes or no, nothing else.|Please don't explain, yes or no: is there a bus?""",
    # A question tag is not a negation.
    "it's raining": "It's raining, isn't it?|It's raining, is it not?|It's raining, right?",
    # Nor are names of signs and words that are taught.
    "is there a no parking sign": "Is there a no parking sign?",
    "are there no parking signs": "Are there no parking signs?",
    "is the bicycle without a rider": "Is the bicycle without a rider?",
}


@pytest.mark.parametrize("asked", ASKED)
def test_the_question_within_a_text(asked):
    for question in ASKED[asked].strip("\n").replace("\n", "|").split("|"):
        form = RULES.form(question.strip())
        found = (question_words(form.asked).lower(), form.is_yes_no, form.is_negated, form.problem)
        assert found == (asked, True, False, None), question


NEGATED = """
Is there no car?|Is there any car?
Are there zero cars on the left?|Are there any cars on the left?
Are no people visible?|Are any people visible?
Does the image show no bus?|Does the image show any bus?
Is the road dry?|Is the road wet?
"""


@pytest.mark.parametrize("line", NEGATED.strip().splitlines())
def test_the_opposite_of_a_question_is_asked(line):
    question, asked = line.split("|")
    form = RULES.form(question)
    assert (form.asked, form.is_negated, form.problem) == (asked, True, None)


PROBLEMS = {
    "contains 2 questions": """
        Is there a car? Is it snowing?|Is there a car, is it snowing?|Is there a car,Is there a bus
        Is there a car and is it red?|Is there a car? Where?|Is there a car, and where?|Are there cars? How many?""",
    "contains 3 questions": "Is there a bus? How many cars are there? What is ahead?",
    "does not understand": """
        Isn't there a car?|Is it not raining?|Is nobody on the road?|Isnt it wet?|Is nothing ahead?|Is'nt there a car?
        Is there hardly any traffic?|Could it be avoided if no car was there?|How many cars are not parked?
        Is the bus without windows?""",
    "has no word": "  |?!|yes or no",
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_cannot_be_asked(problem):
    for question in PROBLEMS[problem].strip("\n").replace("\n", "|").split("|"):
        assert problem in (RULES.form(question.strip()).problem or ""), question
    assert "contains 2 questions" in RULES.form("Is there a car\nIs there a bus").problem


ONE_QUESTION = """
When it is dark, are the lights on?|Hello, is there a car?|Could you tell me, is there a car?
There is a motorcycle; is its status the same as that of the car?|Is there a car, a bus or a truck?
Which way does the road turn, if it turns?|Is there a car, which is red?|Is there a bus? Can you confirm?
is there a vehicle moving, colliding, or crashing?|May I ask: is there a bus?|Can you help me: is there a bus?
"""


def test_one_question_of_several_clauses():
    for question in ONE_QUESTION.strip().replace("\n", "|").split("|"):
        assert RULES.form(question).problem is None, question

"""Questions: true answers, balanced and repeatable sampling, texts of known words, and question types of one's own."""

import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from truths import enumerate_questions

from tiny import ROOT
from traffic_vlm.data.grammar import FILLINGS, MASS_NOUNS, TYPES, paraphrases_of
from traffic_vlm.data.questions import TOLERANCE, Balancer, Question, ask
from traffic_vlm.data.scene import (
    ATTRIBUTES,
    CLASSES,
    LIGHT_STATES,
    SCENE_ATTRIBUTES,
    SPEED_LIMITS,
    Scene,
    SceneObject,
)
from traffic_vlm.data.truth import NONE, GroundTruth
from traffic_vlm.tokenization_traffic_vlm import TrafficVLMTokenizer


TOKENIZER = TrafficVLMTokenizer.from_pretrained(ROOT)
COLORS = ATTRIBUTES["color"]
COLORED = ("car", "bus", "van")
THIRDS = ("left", "center", "right")
EXHAUSTIVE = frozenset(CLASSES) - {"rider", "tree", "dog"}
OWN = {"color": COLORS, "status": ("parked", "moving"), "facing": ATTRIBUTES["facing"], "brake lights": ("on", "off")}
ATTRIBUTED = {category: frozenset(OWN) for category in COLORED} | {
    "traffic light": frozenset({"state"}),
    "speed limit sign": frozenset({"value"}),
}
CATEGORY_NAMES = "car,bus,pedestrian,person,traffic light,speed limit sign,stop sign,tree,sky,rider".split(",")


def attributes_of(category: str, choose) -> dict[str, str]:
    """Values of the attributes that the source of the random scenes gives for a class, chosen among all."""
    given = {"traffic light": {"state": LIGHT_STATES}, "speed limit sign": {"value": SPEED_LIMITS}}
    values = OWN if category in COLORED else given.get(category, {})
    return {name: choose(values[name]) for name in values}


@st.composite
def scenes(draw, labeled=None):
    """Scenes of boxes. Sizes are primes, so that no whole number of pixels lies on a threshold."""
    width, height = draw(st.sampled_from([(641, 479), (223, 227), (383, 281)]))
    objects = []
    for _ in range(draw(st.integers(0, 7))):
        category = draw(st.sampled_from(CATEGORY_NAMES))
        left, right = sorted(draw(st.lists(st.integers(0, width), min_size=2, max_size=2, unique=True)))
        top, bottom = sorted(draw(st.lists(st.integers(0, height), min_size=2, max_size=2, unique=True)))
        visible = draw(st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.2]))
        attributes = attributes_of(category, lambda values: draw(st.sampled_from(values)))
        objects.append(SceneObject(category, (left, top, right, bottom), visible=visible, attributes=attributes))
    scene_attributes = {
        name: draw(st.sampled_from(values)) for name, values in SCENE_ATTRIBUTES.items() if draw(st.booleans())
    }
    exhaustive = EXHAUSTIVE if labeled is None else draw(labeled)
    return Scene(width, height, tuple(objects), scene_attributes, exhaustive, ATTRIBUTED)


def answers(scene: Scene) -> dict[str, str]:
    return {question.question_id: question.answer for question in enumerate_questions(GroundTruth(scene))}


@cache
def decoded(answer: str) -> str:
    """An answer as a model that generates its tokens would give it."""
    return TOKENIZER.decode(TOKENIZER(answer, add_special_tokens=False)["input_ids"])


# An oracle for the answers: one check for each rule of `templates.yaml`, from boxes alone


class Asked:
    """A question with the objects of its class: those clearly visible, and those too small or too hidden."""

    def __init__(self, scene: Scene, question: Question):
        self.scene, self.answer, self.is_yes = scene, question.answer, question.answer == "yes"
        self.question_type, self.category, self.form, self.value = (*question.key, "", "")[:4]
        self.kind = TYPES[self.question_type]
        self.clear, self.unclear = by_sight(scene, self.category)

    @property
    def needs_all(self) -> bool:
        """Whether the answer is only known if every object of the class is labeled."""
        if self.kind.rule == "attribute":
            return self.form != "any" or self.answer == "no"
        if self.answer == "no" and self.kind.rule in ("presence", "place", "relation"):
            return True
        is_any_no = self.answer == "no" and self.form == "any"
        counts = self.kind.rule in ("count", "comparison", "side", "closest")
        return counts or is_any_no or self.answer == NONE or self.form in ("are", "what_all")


def by_sight(scene: Scene, category: str) -> tuple[list[SceneObject], list[SceneObject]]:
    clear, unclear = [], []
    for item in scene.of(category):
        patches = item.size * 196 / scene.width / scene.height
        if patches >= 1 and item.visible >= 0.3:
            clear.append(item)
        elif patches >= 0.035:
            unclear.append(item)
    return clear, unclear


def agrees(is_yes: bool, has: list[bool], has_not: list[bool]) -> bool:
    """Whether a yes is true of one of the objects, or a no of all."""
    return any(has) if is_yes else all(has_not)


def presence(q: Asked) -> bool:
    return bool(q.clear) if q.is_yes else not (q.clear or q.unclear)


def place(q: Asked) -> bool:
    if q.form in ("near", "far"):
        near, far = ([item.box[3] / q.scene.height for item in part] for part in (q.clear, q.clear + q.unclear))
        if q.form == "near":
            return agrees(q.is_yes, [bottom >= 0.7 for bottom in near], [bottom <= 0.6 for bottom in far])
        return agrees(q.is_yes, [bottom <= 0.6 for bottom in near], [bottom >= 0.7 for bottom in far])
    is_driver = q.scene.scene_attributes.get("view") == "driver"
    third = {"ahead": "center", "front left": "left", "front right": "right"}.get(q.form, q.form)
    return (is_driver or q.form in THIRDS) and is_in_third(q, third, q.is_yes)


def is_in_third(q: Asked, third: str, is_yes: bool) -> bool:
    """A yes: most of an object is inside, or it covers most of the third. A no: no part of any is inside."""
    start, end, width = THIRDS.index(third) / 3, (THIRDS.index(third) + 1) / 3, q.scene.width

    def overlap(item: SceneObject) -> float:
        return max(0.0, min(item.box[2] / width, end) - max(item.box[0] / width, start))

    has = [overlap(item) >= 2 / 3 * min((item.box[2] - item.box[0]) / width, 1 / 3) for item in q.clear]
    return agrees(is_yes, has, [overlap(item) == 0 for item in q.clear + q.unclear])


def relation(q: Asked) -> bool:
    [anchor], unclear = by_sight(q.scene, q.value)
    found = [related(q.form, item, anchor, q.scene) for item in q.clear if item is not anchor]
    is_true = agrees(q.is_yes, [is_so for is_so, _ in found], [is_not for _, is_not in found])
    return is_true and not unclear and q.value in q.scene.exhaustive and (q.is_yes or not q.unclear)


def related(name: str, item: SceneObject, anchor: SceneObject, scene: Scene) -> tuple[bool, bool]:
    """Whether a relation surely holds for an item, and whether it surely does not."""
    size = (scene.width, scene.height) * 2
    left, _, right, bottom = (edge / length for edge, length in zip(item.box, size))
    other_left, _, other_right, other_bottom = (edge / length for edge, length in zip(anchor.box, size))
    depth, gap = other_bottom - bottom, max(other_left - right, left - other_right)
    offset = left + right - other_left - other_right  # twice that of the centers; equal centers may be rounded
    surely = {
        "left": offset < 1e-9 and right <= other_left + 0.02,
        "right": offset > -1e-9 and left >= other_right - 0.02,
        "behind": depth >= 0.08 and gap < 0,
        "front": depth <= -0.08 and gap < 0,
        "closer": depth <= -0.08,
        "next to": -0.02 <= gap <= 0.06 and abs(depth) <= 0.05,
    }
    surely_not = {
        "left": offset > -1e-9,
        "right": offset < 1e-9,
        "behind": depth <= -0.08,
        "front": depth >= 0.08,
        "closer": depth >= 0.08,
        "next to": gap >= 0.25 or abs(depth) >= 0.16,
    }
    way, _, third = name.partition(" ")
    if third in ("left", "right"):  # "back left"
        step = depth if way == "back" else -depth
        return surely[third] and step >= 0.08, surely_not[third] or step <= 0
    return surely[name], surely_not[name]


def attribute(q: Asked) -> bool:
    """Colors, directions, light states and speed limits; "are" and "what_all" ask about several vehicles."""
    if q.kind.rule == "attribute" and q.form in ("is", "what"):  # about the largest vehicle
        first, *others = sorted(q.clear + q.unclear, key=lambda item: -item.size)
        if first not in q.clear or any(first.size < 1.2 * item.size for item in others):
            return False
        q.clear, q.unclear = [first], []
    if q.question_type == "travel":
        return travel(q)
    values = [item.attributes.get(q.kind.attribute) for item in q.clear]
    if q.form == "any":
        is_gray = q.value == "silver" and "gray" in values  # the names of these two are close
        return q.value in values if q.is_yes else q.value not in values and not q.unclear and not is_gray
    is_plural = q.form in ("are", "what_all")
    if q.kind.rule == "attribute" and is_plural != (len(q.clear) > 1):
        return False
    [value] = set(values) | {item.attributes.get(q.kind.attribute) for item in q.unclear}
    return value == q.answer if q.form.startswith("what") else q.is_yes == (value == q.value)


def travel(q: Asked) -> bool:
    moving = {item.attributes["facing"] for item in q.clear if item.attributes.get("status") == "moving"}
    return q.is_yes == (q.value in moving) and (q.is_yes or not q.unclear)


def sign_value(q: Asked) -> bool:
    return [item.category for item in q.clear] == [q.answer] if q.form == "which" else attribute(q)


def count(q: Asked) -> bool:
    number, limit = len(q.clear), 6 if q.form == "what" else int(q.value)
    in_words = str(number) if number <= 6 else "many"
    answer = in_words if q.form == "what" else "yes" if number > limit else "no"
    return q.answer == answer and (number > limit or not q.unclear)


def comparison(q: Asked) -> bool:
    others, unclear = by_sight(q.scene, q.value)
    holds = {"more": len(q.clear) > len(others), "fewer": len(q.clear) < len(others)}
    is_so = holds.get(q.form, len(q.clear) == len(others))
    return q.is_yes == is_so and not q.unclear + unclear and q.value in q.scene.exhaustive and any((q.clear, others))


def side(q: Asked) -> bool:
    is_right = is_in_third(q, q.answer, True) if q.form == "what" else is_in_third(q, q.value, q.is_yes)
    return is_right and len(q.clear) == 1 and not q.unclear


def scene_attribute(q: Asked) -> bool:
    known = q.scene.scene_attributes[q.category]
    if q.value == "sunny" and known == "clear":
        return {"day": "yes", "night": "no"}[q.scene.scene_attributes["time of day"]] == q.answer
    if (known, q.value) in [("rainy", "cloudy"), ("dusk", "day"), ("dusk", "night")]:
        return False
    return q.answer == known if q.form == "what" else q.is_yes == (q.value == known)


def closest(q: Asked) -> bool:
    """No other vehicle reaches nearly as low in the image as the one that the answer names."""
    *_, lowest = items = sorted(q.clear + q.unclear, key=lambda item: item.box[3])
    is_known = q.scene.scene_attributes["view"] == "driver" and lowest in q.clear
    is_known &= all(lowest.box[3] - item.box[3] >= 0.08 * q.scene.height for item in items[:-1])
    return is_known and (lowest.category == q.answer if q.form == "what" else q.is_yes == (lowest.category == q.value))


def sentence(q: Asked) -> bool:
    """Each object is in the scene as often as described, on that side; at least twice for "cars" without a number."""
    where = {"ahead": "center", "objects": q.form}.get(q.kind.rule)
    text = f"{q.answer} {'in' if where == 'center' else 'on'} the {where}" if where else q.answer
    for number, noun, third in read_sentence(text):
        color, _, rest = noun.partition(" ")
        color, noun = (color, rest) if color in COLORS else ("", noun)
        [name] = (name for name, forms in CLASSES.items() if noun in forms[:2])
        clear, unclear = by_sight(q.scene, name)
        items = [item for item in clear if item.category == name]
        centers = [(item.box[0] + item.box[2]) / 2 / q.scene.width for item in items]
        start = THIRDS.index(third) / 3 if third else 0.0
        inside = [center for center in centers if start < center < (start + 1 / 3 if third else 1.0)]
        on_border = any(abs(center - border) < 0.02 for center in centers for border in (1 / 3, 2 / 3))
        is_exact = len(inside) == number or (color and len(inside) > (number or 0))
        if number is None or number == 1:  # "a car" may be one of several
            is_exact = len(inside) >= (number or 2) and (is_exact or bool(unclear) or on_border)
        if not is_exact or (color and color not in {value for item in items for value in item.attributes.values()}):
            return False
    return len(q.answer.split()) <= 24


def read_sentence(answer: str) -> list[tuple[int | None, str, str]]:
    """(number, noun with its color, side) of each part of a description; the number of "cars" alone is None."""
    nouns, found = [], []
    for part in answer.replace(" and ", ", ").split(", "):
        text, third = re.fullmatch(r"(.+?)(?: (?:on|in) the (left|center|right))?", part).groups()
        number, noun = re.fullmatch(r"(?:(an?|\d+) )?(.+)", text).groups()
        nouns.append((number and (int(number) if number.isdecimal() else 1), noun))
        if third:
            found += [(*one, third) for one in nouns]
            nouns = []
    return found + [(*one, "") for one in nouns]


ORACLE = {
    **{"presence": presence, "place": place, "relation": relation, "attribute": attribute, "light_state": attribute},
    **{"sign_value": sign_value, "count": count, "comparison": comparison, "side": side, "closest": closest},
    **{"scene_attribute": scene_attribute, "ahead": sentence, "objects": sentence, "description": sentence},
}


@given(scenes(st.just(EXHAUSTIVE) | st.frozensets(st.sampled_from(CATEGORY_NAMES))))
@settings(max_examples=150, deadline=None)
def test_every_answer_is_true(scene):
    """It can be generated in words of the vocabulary, and a yes about objects has their boxes."""
    for question in enumerate_questions(GroundTruth(scene)):
        q = Asked(scene, question)
        assert (q.question_type, q.category) == (question.question_type, question.category)
        assert decoded(question.answer) == question.answer
        assert q.category in scene.exhaustive or not q.needs_all, question
        if question.answer == NONE:
            assert q.form in ("what", "which") and not q.clear + q.unclear
        else:
            assert ORACLE[q.kind.rule](q), question
        has_objects = q.is_yes and q.question_type != "comparison" and q.category not in SCENE_ATTRIBUTES
        assert bool(question.boxes) == has_objects
        assert set(question.boxes) <= {item.box for item in q.clear}


def mirrored(text: str) -> str:
    return "right".join(part.replace("right", "left") for part in text.split("left"))


@given(scenes())
@settings(max_examples=50, deadline=None)
def test_a_mirrored_scene_has_mirrored_answers(scene):
    expected = answers(scene.without("value"))  # mirrored digits cannot be read
    found = {mirrored(question_id): mirrored(answer) for question_id, answer in answers(scene.flipped()).items()}
    assert expected.keys() == found.keys()
    for question_id, answer in expected.items():
        if question_id.startswith("description"):  # both list objects from left to right
            assert Counter(read_sentence(answer)) == Counter(read_sentence(found[question_id]))
        else:
            assert found[question_id] == answer


# Answers about example scenes, with values on thresholds


EXAMPLES = yaml.load((ROOT / "tests" / "data" / "answers.yaml").read_text(), yaml.BaseLoader)


def example_scene(example: dict) -> Scene:
    """The scene of an entry of `answers.yaml`, which explains the fields."""
    objects = [mask(*entry) for entry in example.get("masks", ())]
    for category, left, bottom, *more in example.get("objects", ()):
        attributes = dict(*more)
        size, visible = float(attributes.pop("size", 60)), float(attributes.pop("visible", 1))
        box = (float(left), float(bottom) - size, float(left) + size, float(bottom))
        objects.append(SceneObject(category, box, visible=visible, attributes=attributes))
    labeled = example.get("labeled", CLASSES.keys() - example.get("unlabeled", ["rider", "tree", "dog"]))
    labels = {name: value == "yes" for name, value in example.get("presence", {}).items()}
    size = (140, 140) if "masks" in example else (600, 400)
    attributes = example.get("scene", {"view": "driver"})
    return Scene(*size, tuple(objects), attributes, frozenset(labeled), ATTRIBUTED, presence=labels)


def mask(category, columns, coverage="1", rows=("6", "7", "8")) -> SceneObject:
    left, top, right, bottom = (10 * int(one) for one in (columns[0], rows[0], columns[-1], rows[-1]))
    filled = [[float(coverage) * (str(i) in rows and str(j) in columns) for j in range(14)] for i in range(14)]
    box, area = (left, top, right + 10, bottom + 10), sum(map(sum, filled)) * 100
    return SceneObject(category, box, area=area, coverage=tuple(map(tuple, filled)), is_instance=False)


@pytest.mark.parametrize("name", EXAMPLES)
def test_answers_about_an_example(name):
    example = EXAMPLES[name]
    expected = {one: answer for answer in ("yes", "no", "none") for one in example.get(answer, ())}
    expected |= dict.fromkeys(example.get("unknown", ())) | example.get("words", {})
    found = answers(example_scene(example))
    assert expected and {question_id: found.get(question_id) for question_id in expected} == expected


def test_the_color_of_the_largest_is_known_although_other_cars_may_lack_a_box():
    red = SceneObject("car", (100, 100, 200, 200), attributes={"color": "red"}, is_largest=True)
    small = SceneObject("car", (300, 100, 350, 150))
    scene = Scene(600, 400, (red, small), presence={"bus": False})
    asked = ("color/car/what", "color/car/is/red", "color/car/is/blue", "color/vehicle/what", "color/bus/what")
    colors = dict(zip(asked, ["red", "yes", "no", None, NONE]))
    cases = [
        (scene, colors),
        (scene.flipped(), colors),
        (scene.cropped(50, 50, 325, 400), colors | {"color/bus/what": None}),
        (scene.cropped(105, 50, 600, 400), colors | {"color/bus/what": NONE}),  # 5 % of the red car are cut off
        (scene.cropped(115, 50, 600, 400), {"color/bus/what": NONE}),  # 15 %
        (replace(scene, objects=(replace(red, attributes={}), small)), {"color/bus/what": NONE}),  # of several colors
        (replace(scene, objects=(replace(red, is_largest=False), small)), {"color/bus/what": NONE}),
        (scene.without("color"), {"color/bus/what": NONE}),
    ]
    for seen, expected in cases:
        found = answers(seen)
        assert {one: found.get(one) for one in asked} == dict.fromkeys(asked) | expected, seen


def test_the_box_of_a_mask_is_cut_to_the_third_in_the_question():
    scene = example_scene({"masks": [("car", [str(column) for column in range(14)])]})
    found = {question.question_id: question for question in enumerate_questions(GroundTruth(scene))}
    assert found["place/car/left"].boxes == ((0.0, 60.0, 140 / 3, 90.0),)


def test_labels_that_contradict_each_other_have_no_answer():
    """A count below the number of boxes; a list that would leave out a crowd."""
    cars = SceneObject("car", (0, 100, 100, 200)), SceneObject("car", (200, 0, 300, 90))
    crowd, known = SceneObject("person", (200, 100, 300, 200), is_instance=False), frozenset({"car", "person"})
    assert GroundTruth(Scene(300, 300, cars, counts={"car": 1})).find(("count", "car", "what")) is None
    truth = GroundTruth(Scene(300, 300, (cars[0], crowd), exhaustive=known))
    assert truth.find(("description", "scene", "what")) is None


def test_answers_agree_with_those_of_wider_classes():
    """An ambulance is an emergency vehicle, a parked car the closest car; what boxes deny, a label does not affirm."""
    known = frozenset({"vehicle", "car", "parked car", "ambulance", "emergency vehicle"})
    parked, ambulance = SceneObject("parked car", (0, 200, 99, 299)), SceneObject("ambulance", (150, 50, 250, 150))
    truth = GroundTruth(Scene(300, 300, (parked, ambulance), {"view": "driver"}, known))
    assert truth.find(("presence", "emergency vehicle")).answer == "yes"
    assert truth.find(("closest", "vehicle", "is", "car")).answer == "yes"
    cropped = Scene(300, 300, (), exhaustive=frozenset({"vehicle"}), presence={"car": True})
    assert GroundTruth(cropped).find(("presence", "car")) is None


# Sampling


def random_scene(rng: random.Random, base_rate=0.5) -> Scene:
    """A scene with each class at a base rate; at the same rate objects are on the left and their value is red."""

    def choose(values):
        return "red" if "red" in values and rng.random() < base_rate else rng.choice(values)

    objects = []
    for category in ("car", "bus", "truck", "pedestrian", "traffic light", "speed limit sign"):
        while rng.random() < base_rate and len(objects) < 12:
            left = rng.uniform(0, 60) if rng.random() < base_rate else rng.uniform(0, 540)
            bottom = rng.uniform(60, 400)
            box = (left, bottom - 60, left + 60, bottom)
            objects.append(SceneObject(category, box, attributes=attributes_of(category, choose)))
            if rng.random() < 0.7:
                break
    scene_attributes = {
        name: values[0] if rng.random() < base_rate else rng.choice(values)
        for name, values in SCENE_ATTRIBUTES.items()
    }
    return Scene(600, 400, tuple(objects), scene_attributes, EXHAUSTIVE, ATTRIBUTED)


@given(scenes(), st.sampled_from([0, 1, 16, 500]), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_questions_have_true_answers_and_different_ids(scene, most, rng):
    true = {question.question_id: question for question in enumerate_questions(GroundTruth(scene))}
    asked = ask(GroundTruth(scene), rng, most)
    assert len({question.question_id for question in asked}) == len(asked) <= most
    for question in asked:
        assert question == replace(true[question.question_id], text=question.text)
        assert question.text in paraphrases_of(question.question_id)


def test_all_question_types_are_asked_where_something_is_known():
    rng, nothing = random.Random(0), GroundTruth(Scene(100, 100))
    asked = {one.question_type for _ in range(300) for one in ask(GroundTruth(random_scene(rng)), rng, 16)}
    assert asked == set(TYPES)
    assert ask(nothing, rng, 16) == enumerate_questions(nothing) == []


def test_yes_and_no_are_balanced_at_high_base_rates():
    rng, balancer = random.Random(0), Balancer()
    imbalances: Counter[tuple[str, ...]] = Counter()
    for _ in range(400):
        for question in ask(GroundTruth(random_scene(rng, base_rate=0.95)), rng, 16, balancer):
            if question.answer in ("yes", "no"):
                for key in ((question.question_type, question.category), (question.question_id,)):
                    imbalances[key] += 1 if question.answer == "yes" else -1
                    assert abs(imbalances[key]) <= TOLERANCE, key
    assert ("presence", "car") in imbalances


# Texts


def all_question_ids() -> set[str]:
    """The ids of each pattern in `templates.yaml`, with each class, place and relation; for cars, with each value."""
    lists = {"CLASS": CLASSES, "OTHER": ["ambulance"], "PLACE": FILLINGS["place"], "RELATION": FILLINGS["relation"]}
    found = set()
    for name, kind in TYPES.items():
        for first, *rest in (pattern.split("/") for pattern in kind.templates):
            for category in lists.get(first, [first]):
                if category in MASS_NOUNS and name in ("count", "comparison", "color"):
                    continue
                values = kind.values_of(category)[: 1 if first == "CLASS" and category != "car" else None]
                options = [{"VALUE": values}.get(part, lists.get(part, [part])) for part in rest]
                found |= {"/".join([name, category, *key]) for key in product(*options)}
    return found


def test_paraphrases_are_sentences_of_which_most_have_known_words_alone():
    is_known = []
    for question_id in all_question_ids():
        texts = paraphrases_of(question_id)
        assert len(texts) == len(set(texts)) >= 4
        for text in texts:
            assert not text[0].islower() and text.endswith(("?", "."))
            assert "{" not in text and "(" not in text and "  " not in text
        is_known.append([TOKENIZER.unk_token_id not in ids for ids in TOKENIZER([*texts])["input_ids"]])
    assert all(known[0] for known in is_known) and min(map(np.mean, is_known)) > 0.75


def test_a_text_means_one_question():
    """A text with two question ids could have two answers."""
    rng, owners = random.Random(0), {}
    for question_id in {one for _ in range(30) for one in answers(random_scene(rng))}:
        for text in paraphrases_of(question_id):
            is_own = owners.setdefault(text, question_id) == question_id
            assert is_own or question_id.startswith(("color", "light_state"))  # "What color are the lights?"


# In a new process, with a copy of the package: a question type of one's own


@pytest.fixture
def run_copy(tmp_path):
    """A function that runs code with the copy of the package in `tmp_path`, and returns the lines that it prints."""
    package = tmp_path / "traffic_vlm"
    shutil.copytree(ROOT / "data", package / "data", ignore=shutil.ignore_patterns("__pycache__"))

    def run(code: str, *arguments: str) -> list[str]:
        imports = """
            import random, sys
            from truths import enumerate_questions
            from traffic_vlm.data.truth import GroundTruth
            from traffic_vlm.data.grammar import question_type_of
            from traffic_vlm.data.questions import ask
            from traffic_vlm.data.scene import Scene, SceneObject
        """
        command = [sys.executable, "-c", textwrap.dedent(imports) + textwrap.dedent(code), *arguments]
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}/tests", "PYTHONHASHSEED": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        return done.stdout.splitlines()

    return run


def test_the_same_seed_gives_the_same_questions_in_every_process(run_copy):
    """The order of sets differs between processes."""
    scene = random_scene(random.Random(3))
    asked = ask(GroundTruth(scene), random.Random(1), 40)
    assert asked != ask(GroundTruth(scene), random.Random(2), 40)
    code = "print(ask(GroundTruth(Scene.from_json(sys.argv[1])), random.Random(1), 40))"
    assert run_copy(code, scene.to_json()) == [str(asked)]


def test_the_question_type_of_the_docs_is_asked_answered_and_recognized(run_copy, tmp_path):
    """The lines of docs/data.md, added to the copy."""
    section = (ROOT / "docs" / "data.md").read_text().partition("## A question type of your own")[2]
    (_, new_type), (_, new_class) = re.findall(r"```(\w+)\n(.+?)```", section, re.DOTALL)[:2]
    data = tmp_path / "traffic_vlm" / "data"
    with (data / "templates.yaml").open("a") as file:
        file.write(new_type)
    classes = (data / "classes.yaml").read_text()
    (data / "classes.yaml").write_text(classes.replace("\nclasses:\n", f"\nclasses:\n{new_class}"))
    code = """
        stroller = SceneObject("stroller", (270, 240, 330, 300))
        scene = Scene(600, 400, (stroller,), {"view": "driver"}, frozenset({"stroller", "pedestrian"}))
        truth = GroundTruth(scene)
        for one in enumerate_questions(truth):
            if one.question_type == "in_our_path":
                print(one.question_id, one.answer, one.boxes == (stroller.box,))
        asked = [one for one in ask(truth, random.Random(0), 40) if one.question_type == "in_our_path"]
        typed = question_type_of("is there a stroller in our path ahead")
        print(*{question_type_of(one.text) for one in asked}, typed)
    """
    assert run_copy(code) == [
        "in_our_path/stroller/ahead yes True",
        "in_our_path/pedestrian/ahead no False",
        "in_our_path in_our_path",
    ]

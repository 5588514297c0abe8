"""The question grammar: from a scene to questions with true answers, balanced between yes and no.

    Scene → candidate keys → ground truth (`ground_truth.py`) → Balancer → text of a template (`templates.py`)

Every question has an id, `type/category/form/value` ("place/car/left", "color/car/is/red"), which is the same in all
scenes and for all paraphrases. A key is a question id split at the slashes. `ground_truth.py` decides whether a
question may be asked, and holds the thresholds.
"""

import math
import random
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from .ground_truth import (
    EGO_REGIONS,
    GROUNDED,
    NO_GROUP,
    NONE,
    OWN_ATTRIBUTES,
    RIDDEN,
    STUFF,
    THINGS,
    THIRDS,
    UNCOUNTED,
    Box,
    Found,
    Key,
    View,
)
from .scene import CLASSES, COLORS, DIRECTIONS, LIGHT_STATES, SCENE_ATTRIBUTES, SPEED_LIMITS, Scene, is_a
from .templates import FILLINGS, QUESTION_TYPES, TYPES, paraphrases_of, random_paraphrase


QUESTION_TYPE_WEIGHTS = {kind.name: kind.weight for kind in TYPES.values()}
SCENE_ATTRIBUTE_OF_TYPE = {name.replace(" ", "_"): name for name in SCENE_ATTRIBUTES}
# Every place or relation of an absent class has the answer "no", which adds nothing to its absence. `ask` considers
# this fraction of the absent classes, so that most "no" answers are about objects that are somewhere else.
ABSENT_FRACTION = 0.25
# Maximum fraction of "none" and of "0" among the answers to a question such as "What color is the traffic light?"
NONE_FRACTION = 0.33
# "What color is the car?" is a single key beside many keys of "Is the car red?", so it is listed this many times, and
# may be asked this many times as often.
OPEN_QUESTION_COPIES = 3
# Answers in words that are more frequent than the mean of their question's answers are accepted with probability
# (mean / count) ** MEAN_POWER.
MEAN_POWER = 6
OVER = (1, 2, 3)  # limits of "Are there more than 2 cars?"
ATTRIBUTE_OF_TYPE = {name.replace(" ", "_"): name for name in OWN_ATTRIBUTES}
FORMS_OF_ONE = {"facing": ("what", "is", "any"), "travel": ("is", "any"), "brake lights": ("is", "any")}
FORMS_OF_ONE |= dict.fromkeys(("color", "status"), ("what", "is", "any"))
FORMS_OF_SEVERAL = dict.fromkeys(OWN_ATTRIBUTES, ("any",)) | {"color": ("what_all", "are", "any")}
COLORED = tuple(category for category in CLASSES if is_a(category, "vehicle") and category != "train")
# Of this many random keys, the one whose answer was asked least is tried first. Otherwise the yes of a rare class, or
# a rare number, would hardly be asked even about the few images where it is true.
CANDIDATES = 6
MAX_TRIES = 8  # keys tried for each question: limits the time spent on scenes with few questions


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """A question id that may be asked about a scene, and its true answer.

    Attributes:
        answer: "yes", "no", or words of the vocabulary.
        question_type: the question type, one of QUESTION_TYPES.
        category: of objects, or the scene attribute that the question is about.
        question_id: the question id `type/category/form/value`, the same for all paraphrases and all scenes.
        boxes: boxes in pixels of the objects that make the answer a yes; empty for other answers.
    """

    answer: str
    question_type: str
    category: str
    question_id: str
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A `GroundTruth` with `text`, one of the paraphrases of its question.

    With `is_labeled=False` the true answer is unknown, and `answer` means nothing.
    """

    text: str
    answer: str
    question_type: str
    category: str
    question_id: str
    boxes: tuple[Box, ...] = ()
    is_labeled: bool = True


_NO_ANSWERS: Counter[str] = Counter()


def _prefixes(key: Key) -> list[Key]:
    """The prefixes of at least two parts of a key, and the key itself."""
    return [key[:length] for length in range(2, len(key) + 1)]


@dataclass
class Balancer:
    """Balances the answers over all the scenes that it is used for.

    The rarer of yes and no is always accepted, the more frequent one half of the time, until their counts differ by
    `tolerance`. This holds for every (type, class), every (type, class, form) and every question id. So a question
    whose answer is nearly always yes is soon asked only as often as its answer is no. Other answers are balanced less
    strictly: rare ones are always accepted, frequent ones with a probability that falls with their count. A question
    that has had a single answer so far is hardly asked. "none" and "0" are limited.

    Attributes:
        tolerance: maximum difference between the number of yes and of no.
        counts: number of each answer by key and by each prefix of at least two parts of a key.
    """

    tolerance: int = 3
    counts: dict[Key, Counter[str]] = field(default_factory=dict)

    def accepts(self, key: Key, answer: str, rng: random.Random) -> bool:
        """Whether to ask this question. If so, its answer is counted."""
        if key[0] == "description":  # hardly any answer occurs twice
            return True
        if answer in ("yes", "no"):
            keys = _prefixes(key)
            imbalance = self._surplus(key, answer)
            if imbalance > 0 and (imbalance >= self.tolerance or rng.random() < 0.5):
                return False
        else:
            keys = [key]
            counter = self.counts.get(key, _NO_ANSWERS)
            if answer in (NONE, "0") and counter[answer] > NONE_FRACTION * counter.total():
                return False
            if rng.random() > ((self._mean(key) + 1) / (counter[answer] + 1)) ** MEAN_POWER:
                return False
        for prefix in keys:
            if prefix not in self.counts:
                self.counts[prefix] = Counter()
            self.counts[prefix][answer] += 1
        return True

    def frequency(self, key: Key, found: Found | None) -> tuple[bool, float]:
        """Sort key of an answer: first those that are not in surplus, and among these the ones counted least."""
        if found is None:
            return True, math.inf
        answer = found[0]
        count = self.counts.get(key, _NO_ANSWERS)[answer]
        if answer in ("yes", "no"):
            return self._surplus(key, answer) > 0, count
        return count > self._mean(key), count / OPEN_QUESTION_COPIES

    def _surplus(self, key: Key, answer: str) -> int:
        """The maximum over a key and its prefixes of how many more times yes, or no, was counted than the other."""
        return max(self._imbalance(prefix, answer) for prefix in _prefixes(key))

    def _mean(self, key: Key) -> float:
        """The mean count of the different answers to a question."""
        counter = self.counts.get(key, _NO_ANSWERS)
        return counter.total() / max(2, len(counter))

    def _imbalance(self, key: Key, answer: str) -> int:
        """How many more times this answer was counted than the opposite one."""
        counter = self.counts.get(key, _NO_ANSWERS)
        difference = counter.get("yes", 0) - counter.get("no", 0)
        return difference if answer == "yes" else -difference


class NaturalRates(Balancer):
    """Accepts every question, so that yes is as frequent as it is in the images."""

    def accepts(self, key: Key, answer: str, rng: random.Random) -> bool:
        return True


def enumerate_questions(scene: Scene) -> list[GroundTruth]:
    """All question ids with an unambiguous answer in a scene, and their answers."""
    view = View(scene)
    truths = []
    for question_type in QUESTION_TYPES:
        for key in dict.fromkeys(_keys(view, question_type)):
            found = view.find(key)
            if found is not None:
                truths.append(GroundTruth(found[0], question_type, key[1], "/".join(key), view.boxes(key, found)))
    return truths


def ask(
    scene: Scene,
    rng: random.Random,
    count: int,
    balancer: Balancer | None = None,
    question_types: Sequence[str] = QUESTION_TYPES,
    presuppose: bool = True,
) -> list[Question]:
    """Sample questions with different ids about a scene.

    Args:
        rng: source of random numbers. The result depends only on the arguments, with the states of `rng` and
            `balancer`.
        count: maximum number of questions. There are fewer where the scene has fewer or the balancer accepts fewer.
        balancer: balances answers over all scenes, and prefers those that it was asked least; by default this scene
            is balanced by itself.
        question_types: question types to ask, in proportion to QUESTION_TYPE_WEIGHTS.
        presuppose: also ask for the color, state, value or side of objects that are not there; the answer is "none".
    """
    balancer = Balancer() if balancer is None else balancer
    view = View(scene)
    weights = {question_type: QUESTION_TYPE_WEIGHTS[question_type] for question_type in question_types}
    pools: dict[str, list[Key]] = {}
    taken: set[Key] = set()
    questions: list[Question] = []
    tries = MAX_TRIES * count
    while weights and len(questions) < count and tries > 0:
        question_type = _pick(weights, rng)
        pool = pools.get(question_type)
        if pool is None:
            pool = pools[question_type] = list(_keys(view, question_type, rng))
        for _ in range(min(MAX_TRIES, len(pool))):
            tries -= 1
            candidates = [int(rng.random() * len(pool)) for _ in range(CANDIDATES)]
            answers = {i: None if pool[i] in taken else view.find(pool[i]) for i in candidates}
            i = min(answers, key=lambda i: balancer.frequency(pool[i], answers[i]))
            key, found = pool[i], answers[i]
            pool[i] = pool[-1]
            pool.pop()
            taken.add(key)  # also if the balancer refused it: a key that is listed several times gets one try
            if found is not None and found[0] == NONE and not presuppose:
                continue
            if found is not None and balancer.accepts(key, found[0], rng):
                question_id = "/".join(key)
                text = random_paraphrase(question_id, rng)
                questions.append(
                    Question(text, found[0], question_type, key[1], question_id, view.boxes(key, found)),
                )
                break
        else:
            weights[question_type] /= 4  # few questions of this type are accepted now: try other types first
        if not pool:
            del weights[question_type]
    return questions


def rebalance(asked: Sequence[Sequence[Question]]) -> list[list[Question]]:
    """Remove questions so that each question type and class has as many yes as no.

    A `Balancer` leaves a small surplus of the more frequent answer. It adds up over many balancers, one for each file.

    Args:
        asked: the questions about each image. The last questions of an image are removed first. The only question of
            an image is kept, so that no image is lost.
    """
    steps = {"yes": 1, "no": -1}
    kept = [list(questions) for questions in asked]
    positions = [(i, questions) for questions in kept for i in range(len(questions)) if questions[i].answer in steps]
    imbalances: Counter[str | tuple[str, str]] = Counter()  # yes minus no
    for i, questions in positions:
        imbalances[questions[i].question_type, questions[i].category] += steps[questions[i].answer]
        imbalances[questions[i].question_id] += steps[questions[i].answer]
    for i, questions in sorted(positions, key=lambda position: -position[0]):
        # Remove only where the question id has a surplus too. The imbalances of the ids add up to that of the class,
        # so there are always enough of these.
        keys = ((questions[i].question_type, questions[i].category), questions[i].question_id)
        step = steps[questions[i].answer]
        if len(questions) > 1 and all(imbalances[key] * step > 0 for key in keys):
            del questions[i]
            for key in keys:
                imbalances[key] -= step
    return kept


def _pick(weights: dict[str, float], rng: random.Random) -> str:
    """A random key of `weights`, in proportion to its weight."""
    point = rng.random() * sum(weights.values())
    for question_type, weight in weights.items():
        point -= weight
        if point < 0:
            return question_type
    return next(reversed(weights))


# Candidate keys; `View.find` decides which of them have an unambiguous answer. Without `rng` these functions list all
# keys. With `rng`, for `ask`, they list fewer keys whose answer is no (but for signs), so that yes and no are about
# equally likely.


def _keys(view: View, question_type: str, rng: random.Random | None = None) -> Sequence[Key]:
    if question_type in SCENE_ATTRIBUTE_OF_TYPE:
        return _scene_attribute_keys(view, question_type, rng)
    if question_type in ("ahead", "description"):
        return ((question_type, "scene", "what"),)
    if question_type == "objects":
        return tuple((question_type, "scene", third) for third in THIRDS)
    if question_type in ATTRIBUTE_OF_TYPE:
        return _own_attribute_keys(view, question_type, rng)
    return _KEYS[question_type](view, rng)


@lru_cache(maxsize=256)
def _in_order(categories: frozenset[str]) -> tuple[str, ...]:
    """Classes in a fixed order: the order of a set differs between processes."""
    return tuple(category for category in CLASSES if category in categories)


def _categories(view: View, rng: random.Random | None = None) -> list[str]:
    """The classes in the scene, and all classes known to be absent, or with `rng` some of them."""
    absent = [category for category in _in_order(view.exhaustive) if category not in view.groups]
    return [*view.groups, *(category for category in absent if rng is None or rng.random() < ABSENT_FRACTION)]


def _values(values: Sequence[str], true: Container[str], rng: random.Random | None) -> Sequence[str]:
    """All values, or with `rng` the true ones and a few others."""
    if rng is None:
        return values
    kept = [value for value in values if value in true]
    return [*kept, *(values[int(rng.random() * len(values))] for _ in range(len(kept) + 1))]


def _presence_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    seen = [name for name in view.scene.presence if name in CLASSES]
    return [("presence", category) for category in dict.fromkeys([*_categories(view), *seen])]


def _place_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    keys = [key for category in _categories(view, rng) for key in _regions(category, view.driver)]
    return [*keys, ("place", "pedestrian", "road")] if "pedestrian on the road" in view.scene.presence else keys


@lru_cache(maxsize=256)
def _regions(category: str, driver: bool) -> tuple[Key, ...]:
    regions = [*THIRDS]
    if driver and category in GROUNDED:
        regions += ["near", "far"]
    if driver and category not in STUFF:
        regions += EGO_REGIONS
    return tuple(("place", category, region) for region in regions)


def _relation_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    anchors = [
        one for category in view.groups if (one := view.one(category)) is not None and one.item.category == category
    ]
    if not anchors:
        return ()
    # Without a known view the image may be a product photo without any ground.
    depth = "view" in view.scene.scene_attributes
    keys: list[Key] = []
    for category in _categories(view, rng):
        is_single = len(view.groups.get(category, NO_GROUP).clear) == 1
        for anchor in anchors:
            # Skip "Is there a vehicle left of the car?" where that car is the only vehicle.
            if not (is_single and is_a(anchor.item.category, category)):
                keys += _relations(category, anchor.item.category, depth)
    return keys


@lru_cache(maxsize=4096)
def _relations(category: str, anchor: str, depth: bool) -> tuple[Key, ...]:
    if category in STUFF or anchor in STUFF or is_a(category, anchor):
        return ()
    relations = FILLINGS["relation"] if depth and category in GROUNDED and anchor in GROUNDED else ("left", "right")
    return tuple(("relation", category, relation, anchor) for relation in relations)


def _attribute_keys(
    view: View,
    question_type: str,
    category: str,
    attribute: str,
    values: Sequence[str],
    forms: Key,
    rng: random.Random | None,
) -> list[Key]:
    """Keys of an attribute; `forms` are some of what, what_all, is, are and any."""
    clear = view.groups.get(category, NO_GROUP).clear
    true = {value for seen in clear if (value := view.value(seen, attribute)) is not None}
    keys: list[Key] = []
    if true:
        open_keys = [(question_type, category, form) for form in forms if form in ("what", "what_all")]
        keys += open_keys if rng is None else open_keys * OPEN_QUESTION_COPIES
        asked = _values(values, true, rng)
        keys += [(question_type, category, form, value) for form in forms if form in ("is", "are") for value in asked]
    if "any" in forms and (true or view.gives(category, attribute)):
        keys += [(question_type, category, "any", value) for value in _values(values, true, rng)]
    return keys


def _absent_keys(view: View, question_type: str, categories: Sequence[str], rng: random.Random | None) -> list[Key]:
    """Open questions about classes that are not there, or with `rng` some of them; their answer is "none"."""
    absent = (category for category in categories if view.is_absent(category))
    return [(question_type, one, "what") for one in absent if rng is None or rng.random() < ABSENT_FRACTION]


def _light_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    forms = ("what", "what_all", "is", "are", "any")
    keys = _attribute_keys(view, "light_state", "traffic light", "state", LIGHT_STATES, forms, rng)
    seen = [state for state in LIGHT_STATES if f"{state} light" in view.scene.presence]
    keys += [("light_state", "traffic light", "any", state) for state in seen]
    return keys + _absent_keys(view, "light_state", ("traffic light",), rng)


def _sign_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    keys = _attribute_keys(view, "sign_value", "speed limit sign", "value", SPEED_LIMITS, ("what", "is"), rng)
    if keys:  # no to each limit, not only to a few: the model learns late to tell similar numbers apart
        keys += [("sign_value", "speed limit sign", "is", value) for value in SPEED_LIMITS]
    if "traffic sign" in view.groups or view.is_absent("traffic sign"):
        keys.append(("sign_value", "traffic sign", "which"))
    return keys + _absent_keys(view, "sign_value", ("speed limit sign",), rng)


def _own_attribute_keys(view: View, question_type: str, rng: random.Random | None) -> Sequence[Key]:
    keys: list[Key] = []
    attribute = ATTRIBUTE_OF_TYPE[question_type]
    attributed = [category for category in THINGS if category not in view.groups and view.gives(category, attribute)]
    for category in [*view.groups, *attributed]:
        several = len(view.groups.get(category, NO_GROUP).clear) > 1
        forms = (FORMS_OF_SEVERAL if several else FORMS_OF_ONE)[attribute]
        keys += _attribute_keys(view, question_type, category, attribute, _asked(category, attribute), forms, rng)
    if attribute == "color":
        keys += _absent_keys(view, question_type, COLORED, rng)
    elif attribute == "status":  # else all answers about photographs would be "none"
        keys += _absent_keys(view, question_type, [one for one in COLORED if view.gives(one, attribute)], rng)
    # "Is there a parked car?" is about the presence of a class.
    return [key for key in keys if key != ("status", "car", "any", "parked")]


def _asked(category: str, attribute: str) -> Sequence[str]:
    """The values of an attribute that are asked of a class."""
    if attribute == "color":
        return COLORS
    if attribute == "brake lights":
        return ("on",)
    if attribute != "status":
        return DIRECTIONS
    if category in RIDDEN:
        return ("with rider", "without rider")
    return ("parked", "moving") if is_a(category, "vehicle") else ("standing", "walking")


def _count_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    categories = [category for category in _in_order(view.exhaustive) if category not in UNCOUNTED]
    over = [
        ("count", category, "over", str(limit)) for category in categories if category in view.groups for limit in OVER
    ]
    return [("count", category, "what") for category in categories] + over


def _comparison_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    """Keys where at least one of the two classes is in the scene."""
    return [key for category in view.groups for key in _comparisons(category, view.exhaustive)]


@lru_cache(maxsize=4096)
def _comparisons(category: str, exhaustive: frozenset[str]) -> tuple[Key, ...]:
    """Keys of a class with every other class that can be counted, in both orders."""
    others = [
        other for other in _in_order(exhaustive - UNCOUNTED) if not is_a(category, other) and not is_a(other, category)
    ]
    pairs = [pair for other in others for pair in ((category, other), (other, category))]
    if category in UNCOUNTED or category not in exhaustive:
        return ()
    return tuple(("comparison", one, form, other) for one, other in pairs for form in ("more", "fewer", "same"))


def _side_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    categories = [category for category in view.groups if category not in STUFF and view.one(category) is not None]
    keys: list[Key] = [("side", category, "what") for category in categories]
    keys += [("side", category, "is", side) for category in categories for side in THIRDS]
    return keys + _absent_keys(view, "side", THINGS, rng)


def _closest_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    categories = [one for one in _in_order(view.exhaustive) if one != "vehicle" and is_a(one, "vehicle")]
    if not view.driver or "vehicle" not in view.groups:
        return _absent_keys(view, "closest", ("vehicle",) if view.driver else (), rng)
    asked = _values(categories, view.groups, rng) if categories else ()
    return [("closest", "vehicle", "what"), *(("closest", "vehicle", "is", one) for one in asked)]


def _scene_attribute_keys(view: View, question_type: str, rng: random.Random | None) -> Sequence[Key]:
    name = SCENE_ATTRIBUTE_OF_TYPE[question_type]
    if name not in view.scene.scene_attributes:
        return ()
    asked = [value for value in SCENE_ATTRIBUTES[name] if value != "other"]
    asked += ["sunny"] if name == "weather" else []
    values = _values(asked, (view.scene.scene_attributes[name],), rng)
    return [(question_type, name, "what"), *((question_type, name, "is", value) for value in values)]


_KEYS = {
    "presence": _presence_keys,
    "place": _place_keys,
    "relation": _relation_keys,
    "light_state": _light_keys,
    "sign_value": _sign_keys,
    "count": _count_keys,
    "comparison": _comparison_keys,
    "side": _side_keys,
    "closest": _closest_keys,
}

__all__ = [
    "QUESTION_TYPES",
    "QUESTION_TYPE_WEIGHTS",
    "Balancer",
    "GroundTruth",
    "NaturalRates",
    "Question",
    "ask",
    "enumerate_questions",
    "paraphrases_of",
    "random_paraphrase",
    "rebalance",
]

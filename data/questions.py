"""Questions about a scene with true answers, balanced between yes and no.

    GroundTruth of a scene → candidate keys → answers → Balancer → text of a template (`grammar.py`)

Every question has an id, `type/class/form/value` ("place/car/left", "color/car/is/red"), which is the same in all
scenes and for all paraphrases. A key is a question id split at the slashes. `truth.py` decides whether a
question may be asked, and holds the thresholds; `templates.yaml` lists the question types.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from .grammar import FILLINGS, TYPES, QuestionType, paraphrases_of
from .scene import CLASSES, is_a
from .truth import (
    EGO_REGIONS,
    GROUNDED,
    NO_GROUP,
    NONE,
    STUFF,
    THINGS,
    THIRDS,
    UNCOUNTED,
    AnswerWithBoxes,
    Box,
    GroundTruth,
    Key,
)


# Every place or relation of an absent class has the answer "no", which adds nothing to its absence. `ask` considers
# this fraction of the absent classes, so that most "no" answers are about objects that are somewhere else.
ABSENT_FRACTION = 0.25
# "What color is the car?" is one key among many like "Is the car red?". So it is listed this many times, and asked
# more often.
OPEN_QUESTION_COPIES = 3


@dataclass(frozen=True)
class Candidates:
    """The keys of a question type that may have an answer in a scene; `GroundTruth.find` decides which have one.

    Without `rng` these are all keys. With `rng`, for `ask`, fewer of them have the answer no (except for signs), so
    that yes and no are about equally likely.

    The public methods are the steps of STEPS: each returns what can follow the first parts of a key.
    """

    truth: GroundTruth
    kind: QuestionType
    rng: random.Random | None = None

    def find_keys(self) -> list[Key]:
        """All keys of the question type; some are listed several times, see OPEN_QUESTION_COPIES."""
        found: list[Key] = []
        for row in STEPS[self.kind.rule]:
            keys: list[Key] = [(self.kind.name,)]
            for step in row:
                keys = [longer for key in keys for longer in self._longer(key, step)]
            found += keys
        if self.kind.classes:
            found = [key for key in found if key[1] in self.kind.classes]
        if not any(map(str.isupper, self.kind.forms)):  # other forms have no templates
            found = [key for key in found if len(key) == 2 or key[2] in self.kind.forms]
        return found

    def _longer(self, key: Key, step: "Step") -> list[Key]:
        """All keys that extend `key` by one step."""
        parts: Sequence[Any] = step(self, *key[1:]) if callable(step) else [step] if isinstance(step, str) else [*step]
        if parts and isinstance(parts[0], str):
            return [(*key, part) for part in parts]
        return [key + group for group in parts]

    def _some(self, classes: Sequence[str]) -> list[str]:
        """All of the classes, or with `rng` some of them."""
        return [one for one in classes if self.rng is None or self.rng.random() < ABSENT_FRACTION]

    def _some_values(self, values: Sequence[str], true: Container[str | None]) -> Sequence[str]:
        """Values to ask about: all; when sampling (`rng`), every true value and as many random ones plus one."""
        if self.rng is None:
            return values
        kept = [value for value in values if value in true]
        return [*kept, *(values[int(self.rng.random() * len(values))] for _ in range(len(kept) + 1))]

    def _true_values(self, category: str) -> set[str | None]:
        """The values that the objects of a class have."""
        clear = self.truth.groups.get(category, NO_GROUP).clear
        return {self.truth.value(one, self.kind.attribute) for one in clear} - {None}

    # Classes

    def classes(self) -> list[str]:
        """The classes in the scene, and those known to be absent, or with `rng` some of these."""
        absent = [one for one in _in_order(self.truth.exhaustive) if one not in self.truth.groups]
        return [*self.truth.groups, *self._some(absent)]

    def known_classes(self) -> list[str]:
        """All classes that are known to be present or absent."""
        labeled = [name for name in self.truth.scene.presence if name in CLASSES]
        return list(dict.fromkeys([*Candidates(self.truth, self.kind).classes(), *labeled]))

    def numbered(self) -> list[str]:
        """The exhaustive classes that can be counted, and those that someone counted."""
        countable = [one for one in _in_order(self.truth.exhaustive) if one not in UNCOUNTED]
        return list(dict.fromkeys([*countable, *self.truth.scene.counts]))

    def counted(self) -> list[str]:
        """Of these the classes in the scene."""
        return [one for one in self.numbered() if one in self.truth.groups or self.truth.scene.counts.get(one)]

    def single(self) -> list[str]:
        """The classes of which the scene has one object."""
        return [one for one in self.truth.groups if one not in STUFF and self.truth.one(one) is not None]

    def attributed(self) -> list[str]:
        """The classes in the scene, and those whose attribute the source gives."""
        given = [one for one in THINGS if self.truth.gives(one, self.kind.attribute)]
        return list(dict.fromkeys([*self.truth.groups, *given]))

    def absent(self) -> list[str]:
        """Absent classes: the answer to an open question about one is "none"."""
        given = [one for one in self.kind.absent_where_given if self.truth.gives(one, self.kind.attribute)]
        return self._some([one for one in (*self.kind.absent, *given) if self.truth.is_absent(one)])

    def absent_things(self) -> list[str]:
        return self._some([one for one in THINGS if self.truth.is_absent(one)])

    def pedestrian(self) -> list[str]:
        """ "pedestrian", the only class of which scene labels say whether one is on the road, if they say it."""
        return ["pedestrian"] if "pedestrian on the road" in self.truth.scene.presence else []

    def sign(self) -> list[str]:
        name = "traffic sign"
        return [name] if name in self.truth.groups or self.truth.is_absent(name) else []

    def scene_attribute(self) -> list[str]:
        return [self.kind.attribute] if self.kind.attribute in self.truth.scene.scene_attributes else []

    # What follows a class

    def regions(self, category: str) -> Sequence[str]:
        return _regions(category, self.truth.driver)

    def limits(self, category: str, form: str) -> Sequence[str]:
        return self.kind.values_of(category)

    def limits_of_sign(self, category: str, form: str) -> Sequence[str]:
        """All limits, not only a few with the answer no: the model learns late to tell similar numbers apart."""
        return self.kind.values_of(category) if self._true_values(category) else ()

    def labeled_states(self, category: str, form: str) -> list[str]:
        return [state for state in self.kind.values_of(category) if f"{state} light" in self.truth.scene.presence]

    def scene_values(self, category: str, form: str) -> Sequence[str]:
        return self._some_values(self.kind.values_of(category), (self.truth.scene.scene_attributes[category],))

    def values(self, category: str) -> list[Key]:
        """What is asked about an attribute: ("what",), ("is", "red"), ("any", "red")."""
        true, forms, asked = self._true_values(category), self.kind.forms, self.kind.values_of(category)
        is_single = len(self.truth.groups.get(category, NO_GROUP).clear) <= 1
        if self.kind.rule == "attribute" and is_single:  # the other rules ask about several lights as if they were one
            forms -= {"what_all", "are"}
        keys: list[Key] = []
        if true:
            open_forms: list[Key] = [(form,) for form in ("what", "what_all") if form in forms]
            keys += open_forms if self.rng is None else open_forms * OPEN_QUESTION_COPIES
            values = self._some_values(asked, true)
            keys += [(form, value) for form in ("is", "are") if form in forms for value in values]
        if "any" in forms and (true or self.truth.gives(category, self.kind.attribute)):
            keys += [("any", value) for value in self._some_values(asked, true)]
        # "Is there a parked car?" is about the presence of a class.
        return [key for key in keys if (category, *key) != ("car", "any", "parked")]

    # Classes and what follows them

    def relations(self) -> list[Key]:
        truth = self.truth
        anchors = [one for name in truth.groups if (one := truth.one(name)) is not None and one.item.category == name]
        # Without a known view the image may be a product photo without any ground.
        depth = "view" in truth.scene.scene_attributes
        keys: list[Key] = []
        for category in self.classes() if anchors else ():
            is_single = len(truth.groups.get(category, NO_GROUP).clear) == 1
            for anchor in anchors:
                # Skip "Is there a vehicle left of the car?" where that car is the only vehicle.
                if not (is_single and is_a(anchor.item.category, category)):
                    keys += _relations(category, anchor.item.category, depth)
        return keys

    def comparisons(self) -> list[Key]:
        """Comparisons of classes of which at least one is in the scene."""
        return [key for category in self.truth.groups for key in _comparisons(category, self.truth.exhaustive)]

    def closest(self) -> list[Key]:
        if not self.truth.driver:
            return []
        if "vehicle" not in self.truth.groups:
            return [(one, "what") for one in self.absent()]
        vehicles = [one for one in _in_order(self.truth.exhaustive) if one != "vehicle" and is_a(one, "vehicle")]
        asked = self._some_values(vehicles, self.truth.groups) if vehicles else ()
        return [("vehicle", "what"), *(("vehicle", "is", one) for one in asked)]


@lru_cache(maxsize=256)
def _in_order(classes: frozenset[str]) -> tuple[str, ...]:
    """Classes in a fixed order: the order of a set differs between processes."""
    return tuple(category for category in CLASSES if category in classes)


@lru_cache(maxsize=256)
def _regions(category: str, driver: bool) -> tuple[str, ...]:
    regions = [*THIRDS]
    if driver and category in GROUNDED:
        regions += ["near", "far"]
    if driver and category not in STUFF:
        regions += EGO_REGIONS
    return tuple(regions)


@lru_cache(maxsize=4096)
def _relations(category: str, anchor: str, depth: bool) -> tuple[Key, ...]:
    if category in STUFF or anchor in STUFF or is_a(category, anchor):
        return ()
    relations = FILLINGS["relation"] if depth and category in GROUNDED and anchor in GROUNDED else ("left", "right")
    return tuple((category, relation, anchor) for relation in relations)


@lru_cache(maxsize=4096)
def _comparisons(category: str, exhaustive: frozenset[str]) -> tuple[Key, ...]:
    """Comparisons of a class with every other class that can be counted, in both orders."""
    if category in UNCOUNTED or category not in exhaustive:
        return ()
    others = [one for one in _in_order(exhaustive - UNCOUNTED) if not is_a(category, one) and not is_a(one, category)]
    pairs = [pair for other in others for pair in ((category, other), (other, category))]
    return tuple((one, form, other) for one, other in pairs for form in ("more", "fewer", "same"))


Step = str | Collection[str] | Callable[..., Sequence[str] | Sequence[Key]]
# Rule of `templates.yaml`: rows of steps. Every combination of what the steps of a row allow is a key.
STEPS: dict[str, list[tuple[Step, ...]]] = {
    "presence": [(Candidates.known_classes,)],
    "place": [(Candidates.classes, Candidates.regions), (Candidates.pedestrian, "road")],
    "relation": [(Candidates.relations,)],
    "light_state": [
        ("traffic light", Candidates.values),
        ("traffic light", "any", Candidates.labeled_states),
        (Candidates.absent, "what"),
    ],
    "sign_value": [
        ("speed limit sign", Candidates.values),
        ("speed limit sign", "is", Candidates.limits_of_sign),
        (Candidates.sign, "which"),
        (Candidates.absent, "what"),
    ],
    "attribute": [(Candidates.attributed, Candidates.values), (Candidates.absent, "what")],
    "count": [(Candidates.numbered, "what"), (Candidates.counted, "over", Candidates.limits)],
    "comparison": [(Candidates.comparisons,)],
    "side": [(Candidates.single, "what"), (Candidates.single, "is", THIRDS), (Candidates.absent_things, "what")],
    "scene_attribute": [
        (Candidates.scene_attribute, "what"),
        (Candidates.scene_attribute, "is", Candidates.scene_values),
    ],
    "closest": [(Candidates.closest,)],
    "ahead": [("scene", "what")],
    "objects": [("scene", THIRDS)],
    "description": [("scene", "what")],
}


# Maximum fraction of "none" and of "0" among the answers to a question such as "What color is the traffic light?"
NONE_FRACTION = 0.33
# Answers in words that are more frequent than the mean of their question's answers are accepted with probability
# (mean / count) ** MEAN_POWER.
MEAN_POWER = 6
# Of this many random keys, the one whose answer was asked least is tried first. Otherwise the yes of a rare class, or
# a rare number, would hardly be asked even about the few images where it is true.
CANDIDATES = 6
TOLERANCE = 3  # maximum difference between the number of yes and of no
MAX_TRIES = 8  # keys tried for each question: limits the time spent on scenes with few questions


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a scene.

    Attributes:
        text: one of the paraphrases of the question.
        answer: "yes", "no", or words of the vocabulary.
        question_type: a key of TYPES.
        category: the class of objects, or the scene attribute that the question is about.
        question_id: `type/class/form/value`, the same for all paraphrases and all scenes.
        boxes: boxes in pixels of the objects that make the answer a yes; empty for other answers.
    """

    text: str
    answer: str
    question_type: str
    category: str
    question_id: str
    boxes: tuple[Box, ...] = ()

    @property
    def key(self) -> Key:
        return tuple(self.question_id.split("/"))


def _prefixes(key: Key) -> list[Key]:
    """The prefixes of at least two parts of a key, and the key itself."""
    return [key[:length] for length in range(2, len(key) + 1)]


@dataclass
class Balancer:
    """Balances the answers over all the scenes that it is used for.

    The rarer of yes and no is always accepted, the more frequent one half of the time, until their counts differ by
    TOLERANCE. This holds for every (type, class), every (type, class, form) and every question id. So a question
    whose answer is nearly always yes is soon asked only as often as its answer is no. Other answers are balanced less
    strictly: rare ones are always accepted, frequent ones with a probability that falls with their count. A question
    that has had a single answer so far is hardly asked. "none" and "0" are limited.

    Attributes:
        counts: number of each answer by key and by each prefix of at least two parts of a key.
    """

    counts: defaultdict[Key, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def accepts(self, key: Key, answer: str, rng: random.Random) -> bool:
        """Whether to ask this question. If so, its answer is counted."""
        if key[0] == "description":  # hardly any answer occurs twice
            return True
        if answer in ("yes", "no"):
            keys = _prefixes(key)
            imbalance = self._surplus(key, answer)
            if imbalance > 0 and (imbalance >= TOLERANCE or rng.random() < 0.5):
                return False
        else:
            keys = [key]
            counter = self.counts[key]
            if answer in (NONE, "0") and counter[answer] > NONE_FRACTION * counter.total():
                return False
            if rng.random() > ((self._mean(key) + 1) / (counter[answer] + 1)) ** MEAN_POWER:
                return False
        for prefix in keys:
            self.counts[prefix][answer] += 1
        return True

    def frequency(self, key: Key, found: AnswerWithBoxes | None) -> tuple[bool, float]:
        """Sort key of an answer: first those that are not in surplus, and among these the ones counted least."""
        if found is None:
            return True, math.inf
        answer = found.answer
        count = self.counts[key][answer]
        if answer in ("yes", "no"):
            return self._surplus(key, answer) > 0, count
        return count > self._mean(key), count / OPEN_QUESTION_COPIES

    def _surplus(self, key: Key, answer: str) -> int:
        """How many more times this answer was counted than the opposite: the maximum over a key and its prefixes."""
        counters = [self.counts[prefix] for prefix in _prefixes(key)]
        differences = [counter.get("yes", 0) - counter.get("no", 0) for counter in counters]
        return max(differences) if answer == "yes" else -min(differences)

    def _mean(self, key: Key) -> float:
        """The mean count of the different answers to a question."""
        counter = self.counts[key]
        return counter.total() / max(2, len(counter))


def has_question(truth: GroundTruth) -> bool:
    """Whether a scene has any question with an unambiguous answer."""
    return any(truth.find(key) is not None for kind in TYPES.values() for key in Candidates(truth, kind).find_keys())


def ask(
    truth: GroundTruth,
    rng: random.Random,
    count: int,
    balancer: Balancer | None = None,
) -> list[Question]:
    """Questions with different ids about a scene, sampled at random.

    Args:
        truth: of the scene.
        rng: source of random numbers. The result depends only on the arguments, with the states of `rng` and
            `balancer`.
        count: maximum number of questions. There are fewer where the scene has fewer or the balancer accepts fewer.
        balancer: balances answers over all scenes, and prefers those that it has counted least; by default this scene
            is balanced by itself.
    """
    balancer = Balancer() if balancer is None else balancer
    weights = {name: kind.weight for name, kind in TYPES.items()}
    pools: dict[str, list[Key]] = {}
    taken: set[Key] = set()
    questions: list[Question] = []
    tries = MAX_TRIES * count
    while weights and len(questions) < count and tries > 0:
        [question_type] = rng.choices([*weights], [*weights.values()])
        pool = pools.get(question_type)
        if pool is None:
            pool = pools[question_type] = Candidates(truth, TYPES[question_type], rng).find_keys()
        for _ in range(min(MAX_TRIES, len(pool))):
            tries -= 1
            candidates = [int(rng.random() * len(pool)) for _ in range(CANDIDATES)]
            answers = {i: None if pool[i] in taken else truth.find(pool[i]) for i in candidates}
            i = min(answers, key=lambda i: balancer.frequency(pool[i], answers[i]))
            key, found = pool[i], answers[i]
            pool[i] = pool[-1]
            pool.pop()
            taken.add(key)  # also after a refusal by the balancer: a key that is listed several times gets one try
            if found is not None and balancer.accepts(key, found.answer, rng):
                question_id, boxes = "/".join(key), truth.boxes(key, found)
                texts = paraphrases_of(question_id)
                text = texts[int(rng.random() * len(texts))]
                questions.append(Question(text, found.answer, key[0], key[1], question_id, boxes))
                break
        else:
            weights[question_type] /= 4  # few questions of this type are accepted now: try other types first
        if not pool:
            del weights[question_type]
    return questions


def rebalance(asked: Sequence[Sequence[Question]]) -> list[list[Question]]:
    """Remove questions so that each question type and class has as many yes as no.

    A `Balancer` leaves a small surplus of the more frequent answer, which adds up over the balancers of many sources.

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

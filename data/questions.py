"""The question grammar: from a scene to questions with true answers, as many yes as no.

    Scene → what may be asked (keys) → what is true (`truths.py`) → what keeps the balance → a wording (`phrases.py`)

Every question has an identifier, the fact `kind/label/form/value` ("place/car/left", "color/car/is/red"), which is
the same in all scenes and all wordings. Whether a thing may be asked at all, and the thresholds, are in `truths.py`.
"""

import random
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from .phrases import RELATIONS, phrase, phrasings
from .scene import CLASSES, COLORS, FACTS, LIGHT_STATES, SPEED_LIMITS, Scene, is_a
from .truths import GROUNDED, NO_GROUP, STUFF, THINGS, THIRDS, UNCOUNTED, Box, Key, View


# How often each kind is picked. What there is and where leads, because to decide is the model's first use; attributes
# are as frequent, because few scenes have any, and each value of one is to be learned by itself.
KIND_WEIGHTS = {
    "presence": 5.0,
    "place": 4.0,
    "relation": 2.0,
    "light_state": 6.0,
    "sign_value": 4.0,
    "color": 5.0,
    "count": 4.0,
    "comparison": 1.0,
    "side": 4.0,
    "weather": 2.5,
    "time_of_day": 1.0,
    "view": 0.5,
    "ahead": 1.0,
    "description": 0.5,
}
KINDS = tuple(KIND_WEIGHTS)
FACT_OF_KIND = {name.replace(" ", "_"): name for name in FACTS}
# Of a class that is absent, every place and relation is a "no" that says no more than its absence does. `ask` looks at
# so many of these classes only, so that most "no" are about objects that are somewhere else.
ABSENT_SHARE = 0.25
IN_WORDS = 3  # "What color is the car?" is one question beside many of "Is the car red?", so it is drawn so many times
OVER = (1, 2, 3)  # "more than 2 cars"
MAX_TRIES = 8  # keys looked at for each question, so that a scene of which little may be asked costs little


@dataclass(frozen=True, slots=True)
class Truth:
    """Something that may be asked of a scene.

    Attributes:
        answer: "yes", "no", or words of the vocabulary.
        kind: one of KINDS.
        label: the class or the scene fact that is asked about.
        fact: `kind/label/form/value`, the same for all wordings and all scenes.
        boxes: of the objects that make the answer a yes, in pixels; empty otherwise.
    """

    answer: str
    kind: str
    label: str
    fact: str
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A truth, and in `text` one wording of its question."""

    text: str
    answer: str
    kind: str
    label: str
    fact: str
    boxes: tuple[Box, ...] = ()


_NOTHING_YET: Counter[str] = Counter()


@dataclass
class Balancer:
    """Keeps the answers in step over all the scenes that it is used for.

    Of yes and no the rarer is always taken and the other one half of the time, until it leads by `slack`: for every
    (kind, label), every (kind, label, form) and every fact. So what is always there is soon asked no more, however
    often it is seen. Other answers are balanced softly: shares of the truth are pulled toward their square roots.

    Attributes:
        slack: the most by which yes may lead no, or no yes.
        counts: how often each answer was given to a key, or to the keys that begin so.
    """

    slack: int = 3
    counts: dict[Key, Counter[str]] = field(default_factory=dict)

    def accepts(self, key: Key, answer: str, rng: random.Random) -> bool:
        """Whether to ask this. If so, it is counted as asked."""
        if key[0] == "description":  # nearly every answer is a new one
            return True
        if answer in ("yes", "no"):
            keys = [key[:length] for length in range(2, len(key) + 1)]
            lead = max([self._lead(part, answer) for part in keys])
            if lead > 0 and (lead >= self.slack or rng.random() < 0.5):
                return False
        else:
            keys = [key]
            counter = self.counts.get(key, _NOTHING_YET)
            fair = counter.total() / max(2, len(counter)) + 1
            if rng.random() * (counter.get(answer, 0) + 1) > fair:
                return False
        for part in keys:
            if part not in self.counts:
                self.counts[part] = Counter()
            self.counts[part][answer] += 1
        return True

    def _lead(self, key: Key, answer: str) -> int:
        counter = self.counts.get(key, _NOTHING_YET)
        lead = counter.get("yes", 0) - counter.get("no", 0)
        return lead if answer == "yes" else -lead


def enumerate_questions(scene: Scene) -> list[Truth]:
    """Everything that may truly be asked of a scene."""
    view = View(scene)
    truths = []
    for kind in KINDS:
        for key in dict.fromkeys(_keys(view, kind)):
            found = view.find(key)
            if found is not None:
                truths.append(Truth(found[0], kind, key[1], "/".join(key), view.boxes(key, found)))
    return truths


def ask(
    scene: Scene,
    rng: random.Random,
    count: int,
    balancer: Balancer | None = None,
    kinds: Sequence[str] = KINDS,
) -> list[Question]:
    """At most `count` questions of different facts, of `kinds` in the proportion of KIND_WEIGHTS.

    There are fewer where less may be asked, or where the balance forbids more. The result depends on nothing but the
    arguments, the state of `rng` and of `balancer` included; without a balancer the scene is balanced by itself.
    """
    balancer = Balancer() if balancer is None else balancer
    view = View(scene)
    weights = {kind: KIND_WEIGHTS[kind] for kind in kinds}
    pools: dict[str, list[Key]] = {}
    taken: set[Key] = set()
    questions: list[Question] = []
    tries = MAX_TRIES * count
    while weights and len(questions) < count and tries > 0:
        kind = _pick(weights, rng)
        pool = pools.get(kind)
        if pool is None:
            pool = pools[kind] = list(_keys(view, kind, rng))
        for _ in range(min(MAX_TRIES, len(pool))):
            tries -= 1
            i = int(rng.random() * len(pool))
            key, pool[i] = pool[i], pool[-1]
            pool.pop()
            found = None if key in taken else view.find(key)
            taken.add(key)  # refused or not: what is drawn more often gets no second try
            if found is not None and balancer.accepts(key, found[0], rng):
                fact = "/".join(key)
                questions.append(
                    Question(phrase(fact, rng), found[0], kind, key[1], fact, view.boxes(key, found)),
                )
                break
        else:
            weights[kind] /= 4  # little of it may be asked now: others first
        if not pool:
            del weights[kind]
    return questions


def settle(asked: Sequence[Sequence[Question]]) -> list[list[Question]]:
    """Take away what one answer leads by at the end, so that each kind and class has as many yes as no.

    A `Balancer` ends with the more frequent answer ahead, which adds up when many are used in turn, one for each file.

    Args:
        asked: the questions about each image. The last of them are taken first, and the only one of an image is left,
            so that no image is lost.
    """
    steps = {"yes": 1, "no": -1}
    settled = [list(questions) for questions in asked]
    places = [(i, questions) for questions in settled for i in range(len(questions)) if questions[i].answer in steps]
    leads: Counter[str | tuple[str, str]] = Counter()
    for i, questions in places:
        leads[questions[i].kind, questions[i].label] += steps[questions[i].answer]
        leads[questions[i].fact] += steps[questions[i].answer]
    for i, questions in sorted(places, key=lambda place: -place[0]):
        # Of a fact that leads itself: the leads of the facts add up to that of the class, so there are enough.
        keys, step = ((questions[i].kind, questions[i].label), questions[i].fact), steps[questions[i].answer]
        if len(questions) > 1 and all(leads[key] * step > 0 for key in keys):
            del questions[i]
            for key in keys:
                leads[key] -= step
    return settled


def _pick(weights: dict[str, float], rng: random.Random) -> str:
    """A kind in proportion to its weight."""
    point = rng.random() * sum(weights.values())
    for kind, weight in weights.items():
        point -= weight
        if point < 0:
            return kind
    return next(reversed(weights))


# What may be asked: keys, some of which turn out to be in doubt. Without `rng` all of them; with it, for `ask`, fewer,
# so that yes and no are closer to being as likely.


def _keys(view: View, kind: str, rng: random.Random | None = None) -> Sequence[Key]:
    if kind in FACT_OF_KIND:
        return _fact_keys(view, kind, rng)
    return ((kind, "scene", "what"),) if kind in ("ahead", "description") else _KEYS[kind](view, rng)


@lru_cache(maxsize=256)
def _in_order(labels: frozenset[str]) -> tuple[str, ...]:
    """A set has no order that is the same in every process."""
    return tuple(label for label in CLASSES if label in labels)


def _labels(view: View, rng: random.Random | None = None) -> list[str]:
    """The classes that are there, and of the absent ones that are known to be absent all, or some."""
    absent = [label for label in _in_order(view.exhaustive) if label not in view.groups]
    return [*view.groups, *(label for label in absent if rng is None or rng.random() < ABSENT_SHARE)]


def _values(values: Sequence[str], true: Container[str], rng: random.Random | None) -> Sequence[str]:
    """All values, or the true ones and a few others."""
    if rng is None:
        return values
    kept = [value for value in values if value in true]
    return [*kept, *(values[int(rng.random() * len(values))] for _ in range(len(kept) + 1))]


def _presence_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    return [("presence", label) for label in _labels(view)]


def _place_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    return [key for label in _labels(view, rng) for key in _places(label, view.driver)]


@lru_cache(maxsize=256)
def _places(label: str, driver: bool) -> tuple[Key, ...]:
    places = [*THIRDS]
    if driver and label in GROUNDED:
        places += ["near", "far"]
    if driver and label not in STUFF:
        places += ["ahead"]
    return tuple(("place", label, place) for place in places)


def _relation_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    anchors = [one for label in view.groups if (one := view.one(label)) is not None and one.item.label == label]
    if not anchors:
        return ()
    depth = "view" in view.scene.facts  # a catalogue photo may have no ground
    keys: list[Key] = []
    for label in _labels(view, rng):
        alone = len(view.groups.get(label, NO_GROUP).clear) == 1
        for anchor in anchors:
            if not (alone and is_a(anchor.item.label, label)):  # "Is there a vehicle left of the car?", and no other
                keys += _relations(label, anchor.item.label, depth)
    return keys


@lru_cache(maxsize=4096)
def _relations(label: str, anchor: str, depth: bool) -> tuple[Key, ...]:
    if label in STUFF or anchor in STUFF or is_a(label, anchor):
        return ()
    relations = RELATIONS if depth and label in GROUNDED and anchor in GROUNDED else ("left", "right")
    return tuple(("relation", label, relation, anchor) for relation in relations)


def _attribute_keys(
    view: View, kind: str, label: str, attribute: str, values: Sequence[str], forms: Key, rng: random.Random | None
) -> list[Key]:
    """Keys of an attribute; `forms` are among what, what_all, is, are, any."""
    clear = view.groups.get(label, NO_GROUP).clear
    true = {seen.item.attributes[attribute] for seen in clear if attribute in seen.item.attributes}
    keys: list[Key] = []
    if true:
        in_words = [(kind, label, form) for form in forms if form in ("what", "what_all")]
        keys += in_words if rng is None else in_words * IN_WORDS
        asked = _values(values, true, rng)
        keys += [(kind, label, form, value) for form in forms if form in ("is", "are") for value in asked]
    if "any" in forms and (true or attribute in view.scene.attributed.get(label, ())):
        keys += [(kind, label, "any", value) for value in _values(values, true, rng)]
    return keys


def _light_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    forms = ("what", "what_all", "is", "are", "any")
    return _attribute_keys(view, "light_state", "traffic light", "state", LIGHT_STATES, forms, rng)


def _sign_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    keys = _attribute_keys(view, "sign_value", "speed limit sign", "value", SPEED_LIMITS, ("what", "is"), rng)
    return [*keys, ("sign_value", "traffic sign", "which")] if "traffic sign" in view.groups else keys


def _color_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    keys: list[Key] = []
    attributed = [label for label in THINGS if label in view.scene.attributed and label not in view.groups]
    for label in [*view.groups, *attributed]:
        several = len(view.groups.get(label, NO_GROUP).clear) > 1
        forms = ("what_all", "are", "any") if several else ("what", "is", "any")
        keys += _attribute_keys(view, "color", label, "color", COLORS, forms, rng)
    return keys


def _count_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    labels = [label for label in _in_order(view.exhaustive) if label not in UNCOUNTED]
    over = [("count", label, "over", str(limit)) for label in labels if label in view.groups for limit in OVER]
    return [("count", label, "what") for label in labels] + over


def _comparison_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    """One of the two classes at least is there: nobody compares nothing with nothing."""
    return [key for label in view.groups for key in _comparisons(label, view.exhaustive)]


@lru_cache(maxsize=4096)
def _comparisons(label: str, exhaustive: frozenset[str]) -> tuple[Key, ...]:
    """A class with all others that can be counted, both ways round."""
    others = [
        other for other in _in_order(exhaustive - UNCOUNTED) if not is_a(label, other) and not is_a(other, label)
    ]
    pairs = [pair for other in others for pair in ((label, other), (other, label))]
    if label in UNCOUNTED or label not in exhaustive:
        return ()
    return tuple(("comparison", one, form, other) for one, other in pairs for form in ("more", "fewer", "same"))


def _side_keys(view: View, rng: random.Random | None) -> Sequence[Key]:
    labels = [label for label in view.groups if label not in STUFF and view.one(label) is not None]
    keys: list[Key] = [("side", label, "what") for label in labels]
    return keys + [("side", label, "is", side) for label in labels for side in THIRDS]


def _fact_keys(view: View, kind: str, rng: random.Random | None) -> Sequence[Key]:
    name = FACT_OF_KIND[kind]
    if name not in view.scene.facts:
        return ()
    values = _values(FACTS[name], (view.scene.facts[name],), rng)
    return [(kind, name, "what"), *((kind, name, "is", value) for value in values)]


_KEYS = {
    "presence": _presence_keys,
    "place": _place_keys,
    "relation": _relation_keys,
    "light_state": _light_keys,
    "sign_value": _sign_keys,
    "color": _color_keys,
    "count": _count_keys,
    "comparison": _comparison_keys,
    "side": _side_keys,
}

__all__ = [
    "KINDS",
    "KIND_WEIGHTS",
    "Balancer",
    "Question",
    "Truth",
    "ask",
    "enumerate_questions",
    "phrase",
    "phrasings",
    "settle",
]

"""Candidate keys: which questions of a type may have an answer in a scene.

    rule of a question type → rows of KEYS → keys such as ("place", "car", "left")

A row is a list of steps: a part of a key, several parts, or a method of `Candidates` that finds them in the scene.
"""

import random
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .ground_truth import EGO_REGIONS, GROUNDED, NO_GROUP, STUFF, THINGS, THIRDS, UNCOUNTED, GroundTruth, Key
from .scene import CLASSES, is_a
from .templates import FILLINGS, TYPES, QuestionType


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

    The public methods are the steps of KEYS: each returns what can follow the first parts of a key.
    """

    truth: GroundTruth
    kind: QuestionType
    rng: random.Random | None = None

    def keys(self) -> list[Key]:
        """All keys of the question type; some are listed several times, see OPEN_QUESTION_COPIES."""
        found: list[Key] = []
        for row in KEYS[self.kind.rule]:
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

    def countable(self) -> list[str]:
        return [one for one in _in_order(self.truth.exhaustive) if one not in UNCOUNTED]

    def counted(self) -> list[str]:
        """The countable classes in the scene."""
        return [one for one in self.countable() if one in self.truth.groups]

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
        if self.kind.rule == "attribute":  # the other rules ask about several lights as if they were one
            several = len(self.truth.groups.get(category, NO_GROUP).clear) > 1
            forms -= {"what", "is"} if several else {"what_all", "are"}
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
KEYS: dict[str, list[tuple[Step, ...]]] = {
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
    "count": [(Candidates.countable, "what"), (Candidates.counted, "over", Candidates.limits)],
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
if unknown := {kind.rule for kind in TYPES.values()} - KEYS.keys():
    raise ValueError(f"templates.yaml: unknown rules {sorted(unknown)}; expected some of {', '.join(KEYS)}")

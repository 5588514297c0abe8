"""Ground truth: the unambiguous answers to the questions that may be asked about a scene.

    Scene → GroundTruth → answer to a key, such as ("place", "car", "left")

- Ground truth has three values: yes, no, and None for unknown. Whether a class is present is unknown if its only
  object is smaller than a patch or mostly hidden; the side of an object is unknown on the border of two thirds. Only
  the questions that depend on these become unknown.
- "No", counts and names like "the car" require a class that the source labels exhaustively. The exceptions are the
  value of a labeled light or sign (`GroundTruth._all_have`), and an object that is known to be the largest.

All thresholds are fractions of the image, on a grid of 14 × 14 patches (224 × 224 pixels, patches of 16 × 16): lengths
are fractions of its width or height, areas are measured in patches, 1/196 of its area.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from .grammar import TYPES, QuestionType, amount, enumeration
from .scene import CLASSES, UNBOXED, Scene, SceneObject, classes_of, is_a


NONE = "none"  # the answer to a question about something that is not there
MAX_COUNT, MANY = 6, "many"  # the largest number in an answer, and the word for more

# Minimum areas in patches. An object fills only a part of a box, so a box needs a whole patch. A mask is exact and
# needs 130 pixels at 384 × 288. Objects below `NOTHING`, 20 pixels there, are invisible and count as absent.
PATCHES = 14 * 14
CLEAR_BOX = 1.0
CLEAR_MASK = 0.23
CLEAR_MASK_IN_REGION = 0.6  # of a mask, within one region
NOTHING = 0.035
MIN_VISIBLE = 0.3  # fraction of the object; with less in view, an object is hard to recognize

# An object is in a third or outside; across the border, its third is unknown.
THIRDS = {"left": (0.0, 1 / 3), "center": (1 / 3, 2 / 3), "right": (2 / 3, 1.0)}
BORDER = 0.02  # fraction of the width; closer to a border, the side is ambiguous
CLEAR_FRACTION = 2 / 3  # of the object's width that is in the third, or of the third's width that the object covers

# Distance in a driver's view, from the lower edge of an object on the road. With the camera 1.4 m above the road, the
# horizon at half the height and a field of view of 53°, 0.7 is 7 m and 0.6 is 14 m away. A far object must also be
# small in the image and hardly hidden, as otherwise the lower edge may be out of sight.
NEAR_BOTTOM = 0.7
FAR_BOTTOM = 0.6
FAR_HEIGHT = 0.2
FAR_VISIBLE = 0.8
DEPTH_STEP = 0.08  # fraction of the height, between the lower edges of two objects of which one is clearly behind
# Objects are next to each other if the gap between them, a fraction of the width, and the difference of their lower
# edges, a fraction of the height, are at most the first values. From one of the second values on they are not. Their
# boxes overlap by at most NEXT_OVERLAP of the width.
NEXT_GAP, NEXT_STEP, NEXT_OVERLAP = (0.06, 0.25), (0.05, 0.16), 0.02

LARGER = 1.2  # times as many pixels: an object is clearly larger than another one
MAX_WORDS = 24  # in a description
MAX_LISTED = 4  # classes in an answer to "What is ahead?"
# A list of objects needs a class of each set labeled exhaustively: without the cars or people of a street it is wrong.
REQUIRED_FOR_SENTENCES = ({"vehicle", "car"}, {"person", "pedestrian"})

# Stuff and things as in panoptic segmentation: surfaces and structures, and separate objects.
STUFF = frozenset(
    {
        *("sky", "road", "sidewalk", "building", "tree", "fence", "barrier", "pole", "road construction"),
        *("lane line", "glare"),
    }
)
THINGS = tuple(category for category in CLASSES if category not in STUFF)
UNCOUNTED = frozenset({"sky", "road", "sidewalk", "road construction", "lane line", "glare"})
RIDDEN = ("motorcycle", "bicycle")
# What "ahead" and the like mean in a driver's view, in which all objects are in front: a third of the image.
EGO_REGIONS = {"ahead": "center", "front left": "left", "front right": "right"}
# Objects on the ground: the lower edge of their box indicates their distance.
GROUNDED = frozenset(
    category
    for category in THINGS
    if category == "cone" or any(is_a(category, w) for w in ("vehicle", "person", "animal"))
)
UNNAMED = {"other", "bridge or tunnel", "silver"}  # values that are not answers in words; people call silver gray

Box = tuple[float, float, float, float]
Key = tuple[str, ...]  # a question id, split: (type, class, form, value), of two to four parts


class VisibleObject:
    """An object with its edges as fractions of the image, whether it is clearly visible, and its regions."""

    def __init__(self, item: SceneObject, scene: Scene, patches: float):
        left, top, right, bottom = item.box
        self.item = item
        self.box = item.box
        self.is_instance = item.is_instance
        self.clear = patches >= (CLEAR_BOX if item.is_instance else CLEAR_MASK) and item.visible >= MIN_VISIBLE
        self.left, self.right = left / scene.width, right / scene.width
        self.center = (left + right) / 2 / scene.width
        self.bottom, self.height = bottom / scene.height, (bottom - top) / scene.height
        self.coverage = None if item.is_instance else item.coverage
        self.columns: list[float] = []  # area in patches that a mask fills in each column of its grid

    def at(self, region: str) -> bool | None:
        """Whether the object is in a third, "near" or "far"; None if unknown."""
        if region in THIRDS:
            return self._in_third(*THIRDS[region])
        distance = self._distance()
        # One near part makes a mask near; other objects of the class may be far.
        others = not self.is_instance and distance == "near" and region == "far"
        return None if distance is None or others else distance == region

    def _in_third(self, start: float, end: float) -> bool | None:
        if self.right <= start - BORDER or self.left >= end + BORDER:
            return False
        inner_start, inner_end = start + BORDER * (start > 0), end - BORDER * (end < 1)
        if self.coverage is not None:
            scale = PATCHES / len(self.coverage) / len(self.coverage[0])
            self.columns = self.columns or [sum(column) * scale for column in zip(*self.coverage)]
            if self._covered(start - BORDER, end + BORDER) < NOTHING:
                return False
            return True if self._covered(inner_start, inner_end) >= CLEAR_MASK_IN_REGION else None
        if not self.is_instance:  # which part of the box is filled is unknown
            return True if inner_start <= self.left and self.right <= inner_end else None
        inside = min(self.right, inner_end) - max(self.left, inner_start)
        if inside >= CLEAR_FRACTION * (self.right - self.left):
            return True
        covered = min(self.right, end) - max(self.left, start)
        return True if covered >= CLEAR_FRACTION * (end - start) else None

    def _distance(self) -> str | None:
        if self.bottom <= FAR_BOTTOM and self.height <= FAR_HEIGHT and self.item.visible >= FAR_VISIBLE:
            return "far"
        if self.bottom < NEAR_BOTTOM or not (self.is_instance or self.coverage):
            return None
        if self.coverage:
            rows = self.coverage[round(NEAR_BOTTOM * len(self.coverage)) :]
            patches = sum(map(sum, rows)) * PATCHES / len(self.coverage) / len(rows[0])
            return "near" if patches >= CLEAR_MASK_IN_REGION else None
        return "near"

    def _covered(self, start: float, end: float) -> float:
        """Area in patches that a mask fills between two fractions of the width."""
        count = len(self.columns)
        overlaps = [min(j + 1, end * count) - max(j, start * count) for j in range(count)]
        return sum(overlap * column for overlap, column in zip(overlaps, self.columns) if overlap > 0)

    def third(self) -> str | None:
        """The third that contains the center of the object; None near a border."""
        for name, (start, end) in THIRDS.items():
            if start + BORDER * (start > 0) <= self.center <= end - BORDER * (end < 1):
                return name
        return None


@dataclass(slots=True)
class Group:
    """The objects of a class and its subclasses: those clearly visible, and those too small or too hidden."""

    clear: list[VisibleObject] = field(default_factory=list)
    unclear: list[VisibleObject] = field(default_factory=list)

    def having(self, attribute: str, value: str) -> "Group":
        """The objects with this value of an attribute."""
        clear, unclear = (
            [seen for seen in part if seen.item.attributes.get(attribute) == value]
            for part in (self.clear, self.unclear)
        )
        return Group(clear, unclear)

    def present(self, is_complete: bool) -> "AnswerWithBoxes | None":
        """Whether there is an object. One that is not clearly visible prevents a "no"."""
        return _any(self.clear, [True] * len(self.clear), is_complete and not self.unclear)

    def inside(self, region: str, is_complete: bool) -> "AnswerWithBoxes | None":
        """Whether an object is in a region. One not clearly visible prevents a "no" if it may be in the region."""
        is_complete = is_complete and all(seen.at(region) is False for seen in self.unclear)
        return _any(self.clear, [seen.at(region) for seen in self.clear], is_complete)


class AnswerWithBoxes(NamedTuple):
    """An answer, and the objects that make it a yes; none for other answers."""

    answer: str
    objects: Sequence[VisibleObject] = ()


NO_GROUP = Group()
NO = AnswerWithBoxes("no")
NOTHING_THERE = AnswerWithBoxes(NONE)


class GroundTruth:
    """The true answers about a scene. One method for each rule of `templates.yaml` finds the answer to a key.

    Questions and all targets of an image come from one instance, which finds each answer once.
    """

    def __init__(self, scene: Scene):
        self.scene = scene
        self.answers: dict[Key, AnswerWithBoxes | None] = {}
        self.driver = scene.scene_attributes.get("view") == "driver"
        self.groups: dict[str, Group] = {}
        self.has_masks = any(not item.is_instance for item in scene.objects)
        scale = PATCHES / (scene.width * scene.height)
        for item in scene.objects:
            patches = item.size * scale
            if patches < NOTHING:
                continue
            seen = VisibleObject(item, scene, patches)
            for category in classes_of(item.category):
                group = self.groups.setdefault(category, Group())
                (group.clear if seen.clear else group.unclear).append(seen)
        # A class that is known to be absent has no object, so its labels are complete.
        absent = {name for name, is_present in scene.presence.items() if not is_present} - UNBOXED
        self.exhaustive = scene.exhaustive | absent & CLASSES.keys() - self.groups.keys()

    def find(self, key: Key) -> AnswerWithBoxes | None:
        """The answer to a key; None if unknown."""
        if key not in self.answers:
            kind = TYPES[key[0]]
            self.answers[key] = getattr(self, kind.rule)(kind, *key[1:])
        return self.answers[key]

    def boxes(self, key: Key, found: AnswerWithBoxes) -> tuple[Box, ...]:
        """Boxes in pixels of the objects that make a yes; boxes of masks are cut to the third in the question."""
        if found.answer != "yes":
            return ()
        region = key[2] if TYPES[key[0]].rule == "place" else ""
        third = THIRDS.get(EGO_REGIONS.get(region, region))
        if third is None or not self.has_masks:
            return tuple(seen.box for seen in found.objects)
        start, end = third[0] * self.scene.width, third[1] * self.scene.width
        cut = [(max(seen.box[0], start), seen.box[1], min(seen.box[2], end), seen.box[3]) for seen in found.objects]
        boxes = [seen.box if seen.is_instance else box for seen, box in zip(found.objects, cut)]
        return tuple(box for box in boxes if box[0] < box[2])

    # Used by several question types

    def one(self, category: str) -> VisibleObject | None:
        """The object that "the car" refers to; None unless it is certainly the only one."""
        group = self.groups.get(category, NO_GROUP)
        if len(group.clear) != 1 or group.unclear or category not in self.exhaustive or not group.clear[0].is_instance:
            return None
        return group.clear[0]

    def largest(self, category: str) -> VisibleObject | None:
        """The object that "the car" refers to where it has attributes; None unless all others are clearly smaller."""
        group = self.groups.get(category, NO_GROUP)
        objects = sorted(group.clear + group.unclear, key=lambda seen: -seen.item.size)
        if not objects or not objects[0].clear or not all(seen.is_instance for seen in objects):
            return None
        first = objects[0].item
        is_known = category in self.exhaustive or (first.is_largest and first.category == category)
        is_clear = all(first.size >= LARGER * seen.item.size for seen in objects[1:])
        return objects[0] if is_known and is_clear else None

    def number(self, category: str) -> int | None:
        """The number of objects of a class; None if unknown.

        It is also None for 0 in a scene of masks: there, all other numbers are unknown.
        """
        group = self.groups.get(category, NO_GROUP)
        if not self.is_countable(category) or group.unclear:
            return None
        return None if self.has_masks and not group.clear else len(group.clear)

    def is_countable(self, category: str) -> bool:
        """Whether the source labels all objects of a class, and each one that is clear as a single object."""
        clear = self.groups.get(category, NO_GROUP).clear
        return category in self.exhaustive and all(seen.is_instance for seen in clear)

    def value(self, seen: VisibleObject, attribute: str) -> str | None:
        """The value of an object's attribute; None if unknown.

        "travel" is the direction in which a moving vehicle drives, or "parked". The "status" of a motorcycle or
        bicycle is whether it has a rider.
        """
        if attribute == "travel":
            status = seen.item.attributes.get("status")
            return seen.item.attributes.get("facing") if status == "moving" else status
        if attribute == "status" and seen.item.category in RIDDEN:
            return self._rider(seen)
        return seen.item.attributes.get(attribute)

    def gives(self, category: str, attribute: str) -> bool:
        """Whether the source gives an attribute of every object of a class."""
        if attribute == "status" and category in RIDDEN:
            return "rider" in self.exhaustive
        given = self.scene.attributed.get(category, ())
        return {"status", "facing"} <= set(given) if attribute == "travel" else attribute in given

    def _rider(self, cycle: VisibleObject) -> str | None:
        """ "with rider" if a rider's box is above the cycle's, "without rider" if no rider is close, else None."""
        if "rider" not in self.exhaustive or not cycle.is_instance:
            return None
        riders = self.groups.get("rider", NO_GROUP)
        close = [
            rider
            for rider in riders.clear + riders.unclear
            if rider.left < cycle.right + BORDER and cycle.left < rider.right + BORDER
        ]
        if not close:
            return "without rider"
        seated = (rider for rider in close if cycle.left < rider.center < cycle.right)
        on_it = any(cycle.bottom - cycle.height < rider.bottom <= cycle.bottom + BORDER for rider in seated)
        return "with rider" if on_it else None

    def _any_has(self, kind: QuestionType, category: str, value: str) -> AnswerWithBoxes | None:
        group = self.groups.get(category, NO_GROUP)
        known = [self.value(seen, kind.attribute) for seen in group.clear]
        has = [None if one is None or value in kind.also_possible.get(one, ()) else one == value for one in known]
        complete = category in self.exhaustive and not group.unclear and self.gives(category, kind.attribute)
        return _any(group.clear, has, self.is_absent(category) or complete)

    def _all_have(self, kind: QuestionType, category: str, form: str, value: str) -> AnswerWithBoxes | None:
        """The answer about the value that all objects of a class share, even those not clearly visible; else None.

        In a class that is not labeled exhaustively, "the traffic light" may refer to the labeled one, if the source
        gives the value of every light that it labels. Questions about all lights are unknown there.
        """
        if form == "what" and self.is_absent(category):
            return NOTHING_THERE
        group = self.groups.get(category, NO_GROUP)
        values = {self.value(seen, kind.attribute) for seen in group.clear + group.unclear}
        known = values.pop() if len(values) == 1 else None
        is_given = self.gives(category, kind.attribute)
        if category not in self.exhaustive and (form in ("are", "what_all") or not is_given):
            return None
        if known is None or not group.clear or (form in ("are", "what_all") and len(group.clear) == 1):
            return None
        return _by_value(kind, form, value, known, group.clear)

    def _known_presence(self, name: str) -> AnswerWithBoxes | None:
        """ "yes" or "no" where scene labels say whether the image shows something."""
        is_present = self.scene.presence.get(name)
        return None if is_present is None else AnswerWithBoxes("yes") if is_present else NO

    def is_absent(self, category: str) -> bool:
        """Whether the scene certainly has no object of a class."""
        return category in self.exhaustive and category not in self.groups

    # Question types

    def presence(self, kind: QuestionType, category: str) -> AnswerWithBoxes | None:
        group, labeled = self.groups.get(category, NO_GROUP), self.scene.presence.get(category)
        if labeled and not group.clear:
            # A crop may have cut off the boxes of what was seen.
            return None if any(map(self.is_absent, classes_of(category))) else AnswerWithBoxes("yes")
        return group.present(category in self.exhaustive or labeled is False)

    def place(self, kind: QuestionType, category: str, region: str) -> AnswerWithBoxes | None:
        if region == "road":
            return self._known_presence(f"{category} on the road")
        group = self.groups.get(category, NO_GROUP)
        return group.inside(EGO_REGIONS.get(region, region), category in self.exhaustive)

    def relation(self, kind: QuestionType, category: str, relation: str, other: str) -> AnswerWithBoxes | None:
        anchor = self.one(other)
        group = self.groups.get(category, NO_GROUP)
        others = [seen for seen in group.clear if seen is not anchor]
        if anchor is None or not all(seen.is_instance for seen in others):
            return None
        related = [_RELATION_TESTS[relation](seen, anchor) for seen in others]
        return _any(others, related, category in self.exhaustive and not group.unclear)

    def light_state(self, kind: QuestionType, category: str, form: str, state: str = "") -> AnswerWithBoxes | None:
        if form == "any":
            return self._any_has(kind, category, state) or self._known_presence(f"{state} light")
        return self._all_have(kind, category, form, state)

    def attribute(self, kind: QuestionType, category: str, form: str, value: str = "") -> AnswerWithBoxes | None:
        """The answer about the color, status, direction or brake lights of vehicles and people."""
        if form == "any":
            return self._any_has(kind, category, value)
        if form == "what" and self.is_absent(category):
            return NOTHING_THERE
        if form in ("what", "is"):
            seen = self.largest(category)
            known = None if seen is None else self.value(seen, kind.attribute)
            return None if seen is None or known is None else _by_value(kind, form, value, known, [seen])
        is_complete = category in self.exhaustive and not self.groups.get(category, NO_GROUP).unclear
        return self._all_have(kind, category, form, value) if is_complete else None

    def sign_value(self, kind: QuestionType, category: str, form: str, value: str = "") -> AnswerWithBoxes | None:
        if form == "which":
            if self.is_absent(category):
                return NOTHING_THERE
            sign = self.one(category)
            return None if sign is None or sign.item.category == category else AnswerWithBoxes(sign.item.category)
        return self._all_have(kind, category, form, value)

    def count(self, kind: QuestionType, category: str, form: str, limit: str = "") -> AnswerWithBoxes | None:
        number, clear = self.number(category), self.groups.get(category, NO_GROUP).clear
        most = MAX_COUNT if form == "what" else int(limit)
        if len(clear) > most and self.is_countable(category):
            return AnswerWithBoxes(MANY) if form == "what" else AnswerWithBoxes("yes", clear)  # there may be more
        if number is None:
            number = self.scene.counts.get(category)
        if number is None or number < len(clear):  # counted, but the boxes show more
            return None
        if number > most:
            return AnswerWithBoxes(MANY if form == "what" else "yes")
        return AnswerWithBoxes(str(number)) if form == "what" else NO

    def comparison(self, kind: QuestionType, category: str, form: str, other: str) -> AnswerWithBoxes | None:
        number, another = self.number(category), self.number(other)
        if number is None or another is None:
            return None
        holds = {"more": number > another, "fewer": number < another, "same": number == another}[form]
        return AnswerWithBoxes("yes") if holds else NO

    def side(self, kind: QuestionType, category: str, form: str, side: str = "") -> AnswerWithBoxes | None:
        if form == "what" and self.is_absent(category):
            return NOTHING_THERE
        seen = self.one(category)
        if seen is None:
            return None
        if form == "what":
            sides = [third for third in THIRDS if seen.at(third)]
            return AnswerWithBoxes(sides[0]) if len(sides) == 1 else None
        return _any([seen], [seen.at(side)], True)

    def closest(self, kind: QuestionType, category: str, form: str, other: str = "") -> AnswerWithBoxes | None:
        """The class of the object whose lower edge is clearly below those of all others, in a driver's view."""
        if not self.driver or category not in self.exhaustive:
            return None
        if self.is_absent(category):
            return NOTHING_THERE if form == "what" else None
        group = self.groups[category]
        first, *rest = sorted(group.clear + group.unclear, key=lambda seen: -seen.bottom)
        is_clear = first in group.clear and all(first.bottom - seen.bottom >= DEPTH_STEP for seen in rest)
        if not is_clear or first.item.category == category or not all(seen.is_instance for seen in (first, *rest)):
            return None
        known = first.item.category
        if form == "what":
            return AnswerWithBoxes(known)
        if is_a(known, other):
            return AnswerWithBoxes("yes", [first])
        return NO if other in self.exhaustive else None

    def scene_attribute(self, kind: QuestionType, category: str, form: str, value: str = "") -> AnswerWithBoxes | None:
        known = self.scene.scene_attributes.get(category)
        if (known, value) == ("clear", "sunny"):
            time = self.scene.scene_attributes.get("time of day", "")
            return {"day": AnswerWithBoxes("yes"), "night": NO}.get(time)
        if known == "empty" and self.groups.get("vehicle", NO_GROUP).clear:
            return None  # the vehicles are parked, or far away
        if known is None or value in kind.also_possible.get(known, ()) or (form == "what" and known in UNNAMED):
            return None
        return AnswerWithBoxes(known if form == "what" else "yes" if value == known else "no")

    def ahead(self, kind: QuestionType, category: str, form: str) -> AnswerWithBoxes | None:
        return self.objects(kind, category, "center") if self.driver else None

    def objects(self, kind: QuestionType, category: str, region: str) -> AnswerWithBoxes | None:
        """ "a car and 2 trucks": the objects whose center is in a third of the image."""
        parts = []
        for name, clear, unclear in self._things():
            sides = [seen.third() for seen in clear]
            number = sides.count(region)
            if number == 0 and None in sides:
                return None
            if number:
                is_exact = None not in sides and not any(seen.at(region) is not False for seen in unclear)
                parts.append(amount(number, name, is_exact=is_exact and number <= MAX_COUNT))
        return AnswerWithBoxes(enumeration(parts)) if 0 < len(parts) <= MAX_LISTED else None

    def description(self, kind: QuestionType, category: str, form: str) -> AnswerWithBoxes | None:
        """ "a red car and 2 pedestrians on the left, a bus in the center": all objects, as precisely as is known."""
        groups: Counter[Key] = Counter()  # (side, category, adjective): number
        inexact: set[Key] = set()  # (side, category) where there may be more
        details = [3, 2, 1]
        for name, clear, unclear in self._things():
            sides = [seen.third() for seen in clear]
            if None in sides:
                details = [1]
            attribute = "state" if name == "traffic light" else "color"
            adjectives = [seen.item.attributes.get(attribute, "") for seen in clear]
            for side, adjective in zip(sides, adjectives):
                groups[side or "", name, adjective if all(adjectives) else ""] += 1
            inexact |= {(side, name) for side in THIRDS if any(seen.at(side) is not False for seen in unclear)}
            inexact |= {("", name)} if unclear else set()
        for detail in details:
            text = _sentence(groups, inexact, detail)
            if text and len(text.split()) <= MAX_WORDS:
                return AnswerWithBoxes(text)
        return None

    def _things(self) -> list[tuple[str, list[VisibleObject], list[VisibleObject]]]:
        """For each class of countable objects, without its subclasses: its name, clear objects, unclear objects."""
        present = {name for name, is_present in self.scene.presence.items() if is_present and name in THINGS}
        if present - UNBOXED - self.groups.keys():  # a sentence would omit these
            return []
        if any(self.exhaustive.isdisjoint(labels) for labels in REQUIRED_FOR_SENTENCES):
            return []
        things = []
        for name in THINGS:
            group = self.groups.get(name)
            clear = [seen for seen in group.clear if seen.item.category == name] if group else []
            if clear and not self.is_countable(name):  # a sentence would omit these, too
                return []
            if group is not None and name in self.exhaustive:
                things.append((name, clear, [seen for seen in group.unclear if seen.item.category == name]))
        return things


def _any(objects: Sequence[VisibleObject], holds: Sequence[bool | None], complete: bool) -> AnswerWithBoxes | None:
    """Yes if one of `holds` is True; no if all are False and the objects are complete; else None."""
    if True in holds:
        return AnswerWithBoxes("yes", [seen for seen, is_true in zip(objects, holds) if is_true])
    return NO if complete and None not in holds else None


def _by_value(
    kind: QuestionType, form: str, value: str, known: str, objects: Sequence[VisibleObject]
) -> AnswerWithBoxes | None:
    """The answer about objects whose value of an attribute is `known`: in words, or whether it is `value`."""
    if form in ("what", "what_all"):
        return None if known in UNNAMED else AnswerWithBoxes(known)
    if known == value:
        return AnswerWithBoxes("yes", objects)
    return None if value in kind.also_possible.get(known, ()) else NO


def _sentence(groups: Counter[Key], inexact: set[Key], detail: int) -> str:
    """A description by class (`detail=1`), by class and side (2), or by class, side and color (3)."""
    merged: dict[str, Counter[Key]] = {side: Counter() for side in (THIRDS if detail > 1 else ("",))}
    for (side, category, adjective), number in groups.items():
        merged[side if detail > 1 else ""][category, adjective if detail > 2 else ""] += number
    clauses = []
    for side, counts in merged.items():
        parts = []
        for category, adjective in sorted(counts, key=lambda group: (THINGS.index(group[0]), group[1])):
            number = counts[category, adjective]
            is_exact = (side, category) not in inexact and number <= MAX_COUNT
            parts.append(amount(number, category, adjective, is_exact))
        if parts:
            where = {"": "", "center": " in the center"}.get(side, f" on the {side}")
            clauses.append(enumeration(parts) + where)
    return ", ".join(clauses)


def _left_of(seen: VisibleObject, anchor: VisibleObject) -> bool | None:
    """True if entirely left of the anchor, False if no part is left of the anchor's left edge."""
    if seen.right <= anchor.left + BORDER and seen.center < anchor.center:
        return True
    return False if seen.left + BORDER >= anchor.left and seen.center >= anchor.center else None


def _right_of(seen: VisibleObject, anchor: VisibleObject) -> bool | None:
    if seen.left + BORDER >= anchor.right and seen.center > anchor.center:
        return True
    return False if seen.right <= anchor.right + BORDER and seen.center <= anchor.center else None


def _behind(seen: VisibleObject, anchor: VisibleObject) -> bool | None:
    """True if farther from the camera in the same direction; None if farther, but to the side of the anchor."""
    step = anchor.bottom - seen.bottom
    if step >= DEPTH_STEP and min(seen.right, anchor.right) > max(seen.left, anchor.left):
        return True
    return False if step <= -DEPTH_STEP else None


def _diagonal(side: Callable[..., bool | None], way: int, seen: VisibleObject, anchor: VisibleObject) -> bool | None:
    """Whether on a side of the anchor, and also farther from the camera (`way` 1) or nearer (-1)."""
    step = way * (anchor.bottom - seen.bottom)
    beside = side(seen, anchor)
    if beside is False or step <= 0:
        return False
    return True if beside and step >= DEPTH_STEP else None


def _next_to(seen: VisibleObject, anchor: VisibleObject) -> bool | None:
    gap = max(anchor.left - seen.right, seen.left - anchor.right)
    step = abs(anchor.bottom - seen.bottom)
    if gap >= NEXT_GAP[1] or step >= NEXT_STEP[1]:
        return False
    return True if -NEXT_OVERLAP <= gap <= NEXT_GAP[0] and step <= NEXT_STEP[0] else None


def _closer(seen: VisibleObject, anchor: VisibleObject) -> bool | None:
    step = seen.bottom - anchor.bottom
    return step > 0 if abs(step) >= DEPTH_STEP else None


_RELATION_TESTS: dict[str, Callable[[VisibleObject, VisibleObject], bool | None]] = {
    "left": _left_of,
    "right": _right_of,
    "behind": _behind,
    "front": lambda seen, anchor: _behind(anchor, seen),
    "back left": partial(_diagonal, _left_of, 1),
    "back right": partial(_diagonal, _right_of, 1),
    "front left": partial(_diagonal, _left_of, -1),
    "front right": partial(_diagonal, _right_of, -1),
    "next to": _next_to,
    "closer": _closer,
}

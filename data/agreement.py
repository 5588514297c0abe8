"""Pairs of yes/no questions about one image whose answers must agree.

    "Is there a car on the left?" implies "Is there a car?"     P(first) ≤ P(second)
    "Is the road wet?" excludes "Is the road dry?"               P(first) + P(second) ≤ 1

Questions are given by their ids; see `grammar.py`.
"""

from collections.abc import Sequence
from functools import lru_cache

from .grammar import TYPES
from .scene import CLASSES, SCENE_ATTRIBUTES
from .truth import EGO_REGIONS


Pair = tuple[int, int]  # indices of two questions
FORMS_OF_SCENE = [[name, "is"] for name in SCENE_ATTRIBUTES]  # class and form of yes/no questions about these


@lru_cache(maxsize=1 << 14)
def implied_by(question_id: str) -> frozenset[str]:
    """The ids of all questions whose answer must be yes if the answer to this one is yes."""
    question_type, category, form, value = (question_id.split("/") + [""] * 4)[:4]
    rule = TYPES[question_type].rule if question_type in TYPES else ""
    if rule not in ("presence", "place", "relation", "light_state", "attribute", "count"):
        return frozenset()
    if form in ("what", "what_all", "is", "are"):
        return frozenset()  # the object is presupposed
    broader = CLASSES[category][2] if category in CLASSES else None
    found = {f"presence/{category}"}
    if rule == "presence":
        found = {f"presence/{broader}"} if broader else set()
    elif rule == "place" and broader and form != "road":
        found.add(f"place/{broader}/{form}")
    elif rule == "relation":
        found.add(f"presence/{value}")
    elif rule == "count":
        found |= {f"count/{category}/over/{limit}" for limit in range(1, int(value))}
        found |= {f"count/{broader}/over/{value}"} if broader else set()
    elif question_type == "travel":
        found |= {f"status/{category}/any/moving", f"facing/{category}/any/{value}"}
    if rule == "place" and form in EGO_REGIONS:
        found.add(f"place/{category}/{EGO_REGIONS[form]}")
    return frozenset(found.union(*map(implied_by, found)))


def implications(question_ids: Sequence[str]) -> list[Pair]:
    """Pairs (i, j) where a yes to question i implies a yes to question j."""
    asked = list(enumerate(question_ids))
    return [(i, j) for i, one in asked for j, other in asked if other in implied_by(one)]


def exclusions(question_ids: Sequence[str]) -> list[Pair]:
    """Pairs (i, j), i < j, of which at most one can be answered yes: two values of a scene attribute."""
    asked = [(i, question_id.split("/")) for i, question_id in enumerate(question_ids)]
    values = [(i, key[0], key[3]) for i, key in asked if key[1:3] in FORMS_OF_SCENE]
    return [
        (i, j)
        for i, one, value in values
        for j, other, another in values
        if i < j and one == other and value != another
        if another not in TYPES[one].also_possible.get(value, ())
        if value not in TYPES[one].also_possible.get(another, ())
    ]

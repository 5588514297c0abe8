"""The question type of a free question, by its words: the inverse of `templates.py`.

    "Is there a bus on the left?" → "place"          "Is the bus late?" → None

The templates of each question type, with their slots, are one regular expression. Upper and lower case, spaces and the
mark at the end do not matter. An expression accepts somewhat more than the grammar asks: "Is there a cars?".
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from string import Formatter

from .scene import CLASSES, COLORS, LIGHT_STATES, SCENE_ATTRIBUTES, SPEED_LIMITS
from .templates import FACING, IN, PLACES, RELATIONS, RIDERS, STATUSES, TEMPLATES, TRAVEL, TURNS


NOUNS = [noun for singular, plural, _ in CLASSES.values() for noun in (singular, plural)]
# What distinguishes question types that share a template: "Is there a red car?" and "Is there a red traffic light?",
# "Is it foggy?" and "Is it night?".
NOUNS_OF_TYPE = {"light_state": CLASSES["traffic light"][:2]}  # other types ask about all classes
VALUES_OF_TYPE: dict[str, tuple[str, ...]] = {
    "light_state": LIGHT_STATES,
    "sign_value": SPEED_LIMITS,
    "color": COLORS,
    **{name.replace(" ", "_"): values for name, values in SCENE_ATTRIBUTES.items()},
    "weather": (*SCENE_ATTRIBUTES["weather"], "sunny"),
}
NUMBER = r"\d+"
ANY_WORDS = r"[\w' -]+"  # for slots and values that are not listed here


@lru_cache(maxsize=4096)  # the same questions are usually asked about many images
def question_type_of(question: str) -> str | None:
    """Return the question type whose templates can produce a question; None for any other question.

    Of several question types it is the first one in TEMPLATES: "Is the traffic light red?" is a light_state, not a
    color.
    """
    text = _normalize(question)
    return next((name for name, pattern in _patterns().items() if pattern.fullmatch(text)), None)


def _normalize(text: str) -> str:
    return " ".join(text.lower().split()).rstrip("?.! ")


@lru_cache(maxsize=1)
def _patterns() -> dict[str, re.Pattern[str]]:
    """An expression for the questions of each question type."""
    alternatives: dict[str, list[str]] = defaultdict(list)
    for (question_type, _), templates in TEMPLATES.items():
        slots = _slots(question_type)
        for template in templates:
            parts = Formatter().parse(_normalize(template))
            patterns = (re.escape(text) + (slots.get(slot, ANY_WORDS) if slot else "") for text, slot, _, _ in parts)
            alternatives[question_type].append("".join(patterns))
    return {question_type: re.compile("|".join(patterns)) for question_type, patterns in alternatives.items()}


def _slots(question_type: str) -> dict[str, str]:
    """Expressions for the slots of a question type's templates; `paraphrases_of` fills the same slots."""
    noun = _one_of(NOUNS_OF_TYPE.get(question_type, NOUNS))
    value = _one_of(VALUES_OF_TYPE[question_type]) if question_type in VALUES_OF_TYPE else ANY_WORDS
    road = _one_of(SCENE_ATTRIBUTES["road type"])
    regions = RELATIONS if question_type == "relation" else PLACES
    return {
        **dict.fromkeys("spbq", noun),
        "a": f"(?:an? )?{noun}",
        "av": f"an? {road}" if question_type == "road_type" else f"an? {value} {noun}",
        "on": rf"(?:on|in|at) an? {ANY_WORDS}",
        "v": NUMBER if question_type == "count" else "(?:on|off)" if question_type == "brake_lights" else value,
        "next": NUMBER,
        "at": f"(?:by|at) {value}",
        "status": (statuses := _one_of(word for words in STATUSES.values() for word in words)),
        "as": f"(?:an? {statuses} {noun}|an? {noun} with(?:out)? a rider)",
        "ps": f"(?:{statuses} {noun}|{noun} with(?:out)? riders)",
        "rider": _one_of(RIDERS.values()),
        "facing": _one_of(text for texts in FACING.values() for text in texts),
        "travel": _one_of(text for texts in TRAVEL.values() for text in texts),
        "turn": _one_of(text for texts in TURNS.values() for text in texts),
        "lanes": r"(?:just one lane|\d lanes)",
        "in": _one_of(IN),
        "where": _one_of(text for texts in regions.values() for text in texts),
    }


def _one_of(texts: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, texts))})"

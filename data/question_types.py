"""The question type of a free question, by its words.

    "Is there a bus on the left?" → "place"          "Is the bus late?" → None

The templates of a question type, with all fillings of their slots, are one regular expression. Upper and lower case,
spaces and the mark at the end do not matter. An expression accepts somewhat more than the grammar asks: "Is there a
cars?", and any number.
"""

import re
from functools import lru_cache
from string import Formatter

from .scene import CLASSES
from .templates import FILLINGS, NOUN_SLOTS, TYPES, QuestionType, flat


@lru_cache(maxsize=4096)  # the same questions are usually asked about many images
def question_type_of(question: str) -> str | None:
    """The question type whose templates can produce a question; None for any other question.

    Of several question types it is the first one of the grammar: "Is the traffic light red?" is a light_state, not a
    color.
    """
    text = _normalize(question)
    return next((name for name, pattern in _patterns().items() if pattern.fullmatch(text)), None)


def _normalize(text: str) -> str:
    return " ".join(text.lower().split()).rstrip("?.! ")


@lru_cache(maxsize=1)
def _patterns() -> dict[str, re.Pattern[str]]:
    """An expression for the questions of each question type."""
    return {name: re.compile(re.sub(r"\d+", r"\\d+", _any_template(kind))) for name, kind in TYPES.items()}


def _any_template(kind: QuestionType) -> str:
    parts = [
        _template(_normalize(text), kind, pattern.split("/")[0])
        for pattern, texts in kind.templates.items()
        for text in texts
    ]
    return "|".join(dict.fromkeys(parts))


def _template(template: str, kind: QuestionType, category: str) -> str:
    """An expression for the texts of a template; `category` is its class, or in capitals any class."""
    found = ""
    for text, slot, _, _ in Formatter().parse(template):
        # "Is there bus?" is understood, but "Is this highway?" is not asked about a type of road.
        found += re.escape(text).replace(r"a\(n\)\ ", "(?:an? )?" if slot == "car" else "an? ")
        found += f"(?:{'|'.join(dict.fromkeys(_slot(slot, kind, category)))})" if slot else ""
    return found


def _slot(slot: str, kind: QuestionType, category: str) -> list[str]:
    """Expressions for all fillings of a slot."""
    if slot in NOUN_SLOTS:
        classes = [category] if category in CLASSES and slot in ("car", "cars") else CLASSES
        return [re.escape(noun) for name in classes for noun in CLASSES[name][:2]]
    if slot in ("value", "next"):
        return [re.escape(value) for value in kind.known_values]
    return [_template(filling, kind, category) for filling in flat(FILLINGS[slot])]

"""Checks of the questions that a command asks about many images."""

import unicodedata
from collections.abc import Sequence

from ..files import DataError


MAX_QUESTIONS = 128


def check_questions(questions: Sequence[str]) -> list[str]:
    """Strip the questions and remove duplicates.

    Raises:
        DataError: no question, more than MAX_QUESTIONS, or one without a letter, digit or symbol.
    """
    cleaned = [question.strip() for question in questions]
    for index, question in enumerate(cleaned):
        if not any(unicodedata.category(character)[0] in "LNS" for character in question):
            raise DataError(f"question {index + 1} is empty: {questions[index]!r}")
    cleaned = list(dict.fromkeys(cleaned))
    if not 0 < len(cleaned) <= MAX_QUESTIONS:
        raise DataError(f"{len(cleaned)} questions: at least 1 and at most {MAX_QUESTIONS} can be asked of each image")
    return cleaned

"""Items of the pipeline for people: their text, notes on their words, and which words have a map of what they look at.

This module needs only the standard library: the page in the browser uses it, too.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..question_traffic_vlm import NONE, is_content_word


def answer_text(item: Mapping[str, Any]) -> str:
    """An answer for people: "yes, 0.97", "none seen, 0.88, not sure", or its problem."""
    if item["answer"] is None:
        return str(item.get("problem", "not answered"))
    answer = "none seen" if item["answer"] == NONE else item["answer"]
    return f"{answer}, {item['score']:.2f}{', not sure' if item.get('not_sure') else ''}"


def answer_notes(item: Mapping[str, Any]) -> list[str]:
    """Notes on the words of an answered question: one on unknown words, one on untaught words."""
    if "problem" in item:
        return []
    notes = {"unknown_words": "unknown, so ignored", "untaught_words": "not taught, or not reliably, so guessed"}
    return [f"{note}: {', '.join(item[name])}" for name, note in notes.items() if item.get(name)]


def words_to_map(tokens: Iterable[str], nouns: Collection[str]) -> list[tuple[int, str]]:
    """The content words of a question with their columns (places among its tokens); without any, all its words.

    First comes the word that the question is about: the first of `nouns`, otherwise the last word.
    """
    words = [(column, word) for column, word in enumerate(tokens) if word.isalpha()]
    words = [found for found in words if is_content_word(found[1])] or words
    about = [found for found in words if found[1] in nouns][:1] or words[-1:]
    return about + [found for found in words if found not in about]


def map_strength(item: Mapping[str, Any], is_negated: bool) -> float:
    """The strength of a map, 0..1: twice the probability that there is something to see, at most 1.

    The probability is P(yes), of the positive question if negated; 1 - score for "none" and "0"; 1 for other words.
    """
    p_seen = item["p_yes"]
    if p_seen is None:
        p_seen = 1 - item["score"] if item["answer"] in (NONE, "0") else 1.0
    return min(1.0, 2 * (1 - p_seen if is_negated else p_seen))

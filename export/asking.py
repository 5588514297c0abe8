"""Questions in the browser: read and answered by the modules of the pipeline, in Python's build for WebAssembly.

web/traffic_vlm.js calls `Asking`; texts of JSON go in and out. This module needs only the standard library.
"""

import json
import re
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

from ..common.answers import answer_notes, answer_text, map_strength, words_to_map
from ..question_traffic_vlm import Prompt, Question, Rules


class Asking:
    """The questions of one page.

    Args:
        page: content of page.json.
        tokenize: text → JSON of a list of [id, token, word], one per token; the token was made from the word.
        vocabulary: JSON of an object token → id.
    """

    def __init__(self, page: str, tokenize: Callable[[str], str], vocabulary: str):
        self.page, self.tokenize, self.vocabulary = json.loads(page), tokenize, json.loads(vocabulary)
        self.about = self.page["model"]
        self.rules = Rules(**self.about["questions"])
        self.tokens = {index: token for token, index in self.vocabulary.items()}

    def read(self, text: str) -> Question:
        """A question, checked and tokenized."""
        about = self.about
        options = (about["max_tokens"], about["taught"], about["own_questions"], about["answer_untaught"])
        return self.rules.read(text, self._prompt, *options)

    def _prompt(self, text: str) -> Prompt:
        found = json.loads(self.tokenize(text)) if text else []  # "^" has no token either
        ids, tokens, words = ([one[i] for one in found] for i in range(3))
        ids = [self.about["start"], *ids, self.vocabulary["?"]]
        return Prompt(ids, ["[SOS]", *tokens, "?"], as_typed(text, words))

    def checks(self, question: Question) -> str:
        """JSON of the prompts of the yes/no questions with which an answer in words agrees."""
        return json.dumps([one.input_ids for _, one in question.checks])

    def agreeing(self, question: Question, is_yes: str) -> Question:
        """The question without the answers that are denied by JSON of the answers to its checks."""
        return question.agreeing(json.loads(is_yes))

    def words(self, question: Question) -> str:
        """JSON of [column, word] for each word with a map; first the word that the question is about."""
        tokens = [self.tokens[index] for index in question.input_ids]
        return json.dumps(words_to_map(tokens, self.page["nouns"]))

    def next_ids(self, question: Question, answer: str) -> str:
        """JSON of the ids of the tokens that can follow those of an answer in words so far, `answer`, JSON of ids."""
        words = [self.tokens[index] for index in json.loads(answer)]
        found = question.next_ids(words, self.vocabulary, self.about["yes_no"])
        return json.dumps([index for index in found if index not in self.about["never"]])

    def yes_or_no(self, question: Question, p: float) -> str:
        """JSON of the item of a yes/no question, from P(yes)."""
        return show(question.item(**question.yes_or_no(p)), question)

    def in_words(self, question: Question, answer: str, score: float) -> str:
        """JSON of the item of a question that was answered in words, or has a problem."""
        more = {"problem": question.problem} if question.problem else question.answer_in_words(answer, score)
        return show(question.item(**more), question)


def as_typed(text: str, words: list[str]) -> list[str]:
    """For each word of the tokenizer, the word of the text that it was made from: "tram" for "train"."""
    own = re.findall(r"[^\W_]+|[^\w\s]|_", text)
    typed = list(words)
    for _, i, end, k, last in SequenceMatcher(None, [word.casefold() for word in own], words).get_opcodes():
        many = end - i != last - k  # one became several
        typed[k:last] = [" ".join(own[i:end]) or words[k]] * (last - k) if many else own[i:end]
    return typed


def show(item: dict[str, Any], question: Question) -> str:
    """JSON of an item with its text, its notes and the strength of its maps."""
    strength = map_strength(item, question.is_negated) if item["answer"] else 0.0
    return json.dumps(item | {"text": answer_text(item), "notes": answer_notes(item), "strength": strength})

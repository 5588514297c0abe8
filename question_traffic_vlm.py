"""Questions that have been read, and what answers them: the rules of the pipeline that need neither torch nor a model.

    text → form, prompt, kind of answer ── P(yes) ──→ yes or no
      └─ or its problem                 └─ words ──→ an answer of its kind, or a problem

Programs without torch answer by the same rules: the page in the browser, and the example in docs/serving.md.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

from .answer_kind_traffic_vlm import COLORS, LIGHT_STATES, NONE, AnswerKind, answer_kind, asked_for, is_content_word
from .question_form_traffic_vlm import NEGATED, NO_WORD, NOT_YES_NO, QuestionForm, question_form, question_words


NO_KNOWN_WORD = "the model knows no word of the question {text!r}"
TOO_LONG = "the question has {size}; with its answer, at most {limit} tokens are possible: {text!r}"
UNKNOWN_KIND = (
    "the model was not taught questions like this one. In words it answers questions about colors, numbers, sides, "
    "lights, signs, objects, weather, time of day, road and traffic; it also answers yes/no questions"
)
NOT_OF_ITS_KIND = "the model's answer {answer!r} is not {kind}"
HARDLY_LIKELY = "the model has no answer: the likeliest of {kind}, {answer!r}, has a score of {score:.3f}"
NO_ANSWER = "the model's answer is empty"
GUESS = "its answer would be a guess, which answer_untaught gives"
UNKNOWN_WORD = "the model does not know {word!r}: " + GUESS
UNTAUGHT_WORD = "the model was not taught {word!r}: " + GUESS
UNTAUGHT_COLOR = "the model was taught the colors of lights, not that of {word!r}: " + GUESS
UNKNOWN_TOKEN = "[UNK]"


class Prompt(NamedTuple):
    """A tokenized question, `[SOS] words ?`.

    Attributes:
        ids: of the tokens.
        tokens: words of the vocabulary, or [UNK].
        typed: for each token between `[SOS]` and `?`, the word of the question that it comes from.
    """

    ids: list[int]
    tokens: list[str]
    typed: list[str]


@dataclass(frozen=True)
class Question:
    """A question that has been read: what the model is asked, and what is known about it.

    Attributes:
        text: the question as given.
        form: how it is asked.
        input_ids: its prompt; empty if it has a problem.
        kind: the kind of answer in words that it asks for; None for yes/no questions, and if any answer is accepted.
        unknown_words: its words that are not in the vocabulary; the model ignores them.
        untaught_words: its words that the model was not taught; it guesses what they mean.
        problem: why it cannot be answered; None if it can be.
        refusal: why its answer would be a guess: what it asks for is unknown or was not taught; otherwise None.
    """

    text: str
    form: QuestionForm
    input_ids: tuple[int, ...] = ()
    kind: AnswerKind | None = None
    unknown_words: tuple[str, ...] = ()
    untaught_words: tuple[str, ...] = ()
    problem: str | None = None
    refusal: str | None = None

    def checked(self, answer_untaught: bool) -> "Question":
        """The question, whose refusal is a problem unless `answer_untaught`."""
        return self if answer_untaught or self.problem else replace(self, problem=self.refusal)

    def answer(
        self,
        answer: str | None = None,
        score: float | None = None,
        p_yes: float | None = None,
        problem: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """The item that the pipeline returns: an answer or a problem, and unknown and untaught words."""
        item = {"question": self.text, "answer": answer, "score": score, "p_yes": p_yes, **more}
        notes = {"unknown_words": self.unknown_words, "untaught_words": self.untaught_words}
        item |= {name: list(words) for name, words in notes.items() if words}
        return item | ({"problem": problem} if problem else {})

    def answer_in_words(self, answer: str, score: float, min_score: float = 0.05) -> dict[str, Any]:
        """What an answer in words adds to the item: "answer" and "score", or a "problem".

        An answer is a problem if it is not of the question's kind, or if its score is below `min_score`. Answers to
        taught questions have 0.3 and more; to others they are often forced values.
        """
        if self.kind is None:  # any answer can be right
            return {"answer": answer, "score": score} if answer else {"problem": NO_ANSWER}
        if not self.kind.accepts(answer):
            return {"problem": NOT_OF_ITS_KIND.format(answer=answer, kind=self.kind.name)}
        if score < min_score:
            return {"problem": HARDLY_LIKELY.format(answer=answer, score=score, kind=self.kind.name)}
        return {"answer": answer, "score": score}

    def next_ids(self, words: list[str], vocabulary: Mapping[str, int], no_first: Collection[int]) -> list[int]:
        """The ids of the tokens that can follow the first words of its answer.

        Args:
            vocabulary: token → id.
            no_first: ids that no answer in words begins with, such as yes and no.
        """
        if self.kind is None:  # any word
            return [index for index in vocabulary.values() if words or index not in no_first]
        return [vocabulary[word] for word in self.kind.next_words(words) if word in vocabulary]


def read_question(
    text: str,
    tokenize: Callable[[str], Prompt],
    limit: int,
    taught: Collection[str] | None = None,
    any_kind: bool = False,
) -> Question:
    """A question, checked and tokenized.

    Args:
        tokenize: makes a prompt of the words of a question.
        limit: maximum number of tokens of a question with its answer.
        taught: the content words that the model was taught; None if they are not known.
        any_kind: accept every question and every answer in words: the model was taught a user's own questions.
    """
    form = question_form(text)
    if form.problem:
        return Question(text, form, problem=form.problem)
    words = question_words(form.text)
    if len(words) > 50 * limit:  # tokenizing it would take long
        size = f"{len(words):,} characters"
        return Question(text, form, problem=TOO_LONG.format(size=size, limit=limit, text=text[:80]))
    ids, tokens, typed = tokenize(words)
    tokens = tokens[1:-1]
    if not tokens:
        return Question(text, form, problem=NO_WORD.format(text=text[:80]))
    if len(ids) >= limit:  # an answer has one token at least
        return Question(text, form, problem=TOO_LONG.format(size=f"{len(ids)} tokens", limit=limit, text=text[:80]))
    unknown = _distinct(word for token, word in zip(tokens, typed) if token == UNKNOWN_TOKEN)
    if unknown and not any(token.isalnum() for token in tokens):
        return Question(text, form, unknown_words=unknown, problem=NO_KNOWN_WORD.format(text=text[:80]))
    known = tokens if taught is None else taught
    untaught = _distinct(word for token, word in zip(tokens, typed) if is_content_word(token) and token not in known)
    is_limited = not (form.is_yes_no or any_kind)
    kind = answer_kind(" ".join(tokens)) if is_limited else None
    problem = None
    if is_limited and kind is None:
        problem = UNKNOWN_KIND + (f". Unknown words: {', '.join(unknown)}" if unknown else "")
    refusal = _refusal(tokens, typed, taught)
    return Question(text, form, tuple(ids), kind, unknown, untaught, problem, refusal)


def _distinct(words: Iterable[str]) -> tuple[str, ...]:
    """The different words in order; "Bus" and "bus" are one."""
    found: dict[str, str] = {}
    for word in words:
        found.setdefault(word.casefold(), word)
    return tuple(found.values())


def _refusal(tokens: Sequence[str], typed: Sequence[str], taught: Collection[str] | None) -> str | None:
    """Why the answer to a question would be a guess; None if all that it asks for is known and taught."""
    sentence = list(takewhile(lambda token: token not in ("?", "."), tokens))
    places = asked_for(sentence)
    for i in reversed(places):  # first what is said of a thing, then the thing
        # What ends in "ly" tells how, but at the end: "is it really raining", "is the dog friendly".
        is_adverb = typed[i].casefold().endswith("ly") and i < len(sentence) - 1
        if sentence[i] == UNKNOWN_TOKEN and not is_adverb:
            return UNKNOWN_WORD.format(word=typed[i])
        if taught is not None and is_content_word(sentence[i]) and sentence[i] not in taught:
            return UNTAUGHT_WORD.format(word=typed[i])
    if taught is None or any(color in taught for color in COLORS if color not in LIGHT_STATES):
        return None
    # Colors are those of lights as long as no other color was taught.
    nouns = [i for i, word in enumerate(sentence) if is_content_word(word) and word not in (*COLORS, "color")]
    is_color = "color" in sentence or any(sentence[i] in COLORS for i in places)
    if not is_color or not nouns or {"light", "lights"} & set(sentence):
        return None
    return UNTAUGHT_COLOR.format(word=typed[nouns[0]])


def yes_or_no(form: QuestionForm, p: float, threshold: Any = 0.5) -> dict[str, Any]:
    """The answer to a yes/no question.

    Args:
        p: calibrated P(yes) of what the model was asked, `form.text`.
        threshold: P(yes) from which the answer is yes: a number, or an object with `threshold` and `is_unsure(p)`.

    Returns:
        "answer", "score" (the probability of this answer) and "p_yes" (that of yes); with an object as threshold also
        "not_sure".
    """
    is_yes = p >= getattr(threshold, "threshold", threshold)
    p_yes = 1 - p if form.is_negated else p
    answer = "yes" if is_yes != form.is_negated else "no"
    item = {"answer": answer, "score": p_yes if answer == "yes" else 1 - p_yes, "p_yes": p_yes}
    return item if isinstance(threshold, float | int) else item | {"not_sure": threshold.is_unsure(p)}


def yes_no_item(question: Question, p: float, threshold: float = 0.5) -> dict[str, Any]:
    """An item for P(yes) of a question that was asked as it is written, without a pipeline."""
    form = question.form
    problem = question.problem if form.is_yes_no else NOT_YES_NO
    problem = problem or (NEGATED.format(word="no") if form.is_negated else None)
    return question.answer(problem=problem) if problem else question.answer(**yes_or_no(form, p, threshold))


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


def words_to_map(
    tokens: Iterable[str], is_content: Callable[[str], bool], nouns: Collection[str]
) -> list[tuple[int, str]]:
    """The content words of a question with their columns (places among its tokens); without any, all its words.

    First comes the word that the question is about: the first of `nouns`, otherwise the last word.
    """
    words = [(column, word) for column, word in enumerate(tokens) if word.isalpha()]
    words = [found for found in words if is_content(found[1])] or words
    about = [found for found in words if found[1] in nouns][:1] or words[-1:]
    return about + [found for found in words if found not in about]


def map_strength(item: Mapping[str, Any]) -> float:
    """The strength of a map, 0..1: twice the probability that there is something to see, at most 1.

    The probability is P(yes), of the positive question if negated; 1 - score for "none" and "0"; 1 for other words.
    """
    p_seen = item["p_yes"]
    if p_seen is None:
        p_seen = 1 - item["score"] if item["answer"] in (NONE, "0") else 1.0
    elif question_form(item["question"]).is_negated:
        p_seen = 1 - p_seen
    return min(1.0, 2 * p_seen)

"""The words of a question as the tokenizer gets them, and what it asks for: yes or no, or words.

This module needs only the standard library, so that programs without torch decide as the processor does.
"""

import re
import unicodedata
from functools import lru_cache
from itertools import dropwhile


QUESTION_END = " .?!…。？！"  # removed from the end of a question and replaced by one "?"
_NO_APOSTROPHES = str.maketrans("", "", "'\u2018\u2019\u02bc\u2032\u00b4\u0060\"")

# Chat templates put these characters around control tokens in user text.
_CONTROL_MARKERS = str.maketrans("", "", "\U000f0000\U000f0001")

# Signs that the tokenizer would drop: "> 3" and "< 3", "-50" and "50" would be one prompt.
_SIGNS = re.compile(
    r"(?<![-=<>])[<>]=?(?= ?[-\u2212]?\.?\d)|(?<!\S)[<>]=?(?!\S)|[\u2264\u2265]"
    r"|(?<![\w-])[-\u2212\u2013](?=\.?\d)|(?<![\w-])(?<!\d )[-\u2212](?= \.?\d)"  # "30 - 50" is a range
)
# Characters that the tokenizer (NFKC) reads as signs. NFKC of the whole text would change unknown words, which are
# reported as typed, and apostrophes.
_SIGN_FORMS = str.maketrans("＜﹤＞﹥＝﹦－﹣．", "<<>>==--.")
_SIGN_WORDS = {">": "more than", "<": "less than", ">=": "at least", "\u2265": "at least", "<=": "at most"}
_SIGN_WORDS |= {"\u2264": "at most", "-": "minus", "\u2212": "minus", "\u2013": "minus"}

# The words that `is_yes_no_question` looks for at the beginning of a clause, without apostrophes.
_QUESTION_WORDS = frozenset("what which who whom whose where when why how".split())
_QUESTION_WORDS |= {word + ending for word in _QUESTION_WORDS for ending in ("s", "re", "d", "ll")}
_AUXILIARIES = frozenset(
    "is are was were am do does did has have had can could will would shall should may might must".split()
)
_AUXILIARIES |= {word + "nt" for word in _AUXILIARIES} | {"cant", "wont"}
_FILLERS = frozenset("please and so now ok okay hey hello hi also but then well or just".split())
_SAYING = frozenset("say tell answer know check show see look".split())  # ask for what follows: "say if", "say what"
_REQUESTS = frozenset(
    "describe list name count explain identify predict select choose determine estimate give summarize read find "
    "specify classify categorize caption compare".split()
)
_PREPOSITIONS = frozenset("in on at from to of for by with under along near towards toward about within".split())
_PROPERTY = re.compile(r"(?:the )?(?:number|amount|colou?r|type|kind|status|state|location|position|side) of\b")
# "Is the light red or green?", "Is it on the left or on the right?": one of the alternatives is the answer.
_ALTERNATIVES = re.compile(
    r"(?:is|are|was|were) (?:(?:it|this|that|these|those)\b|the(?: \w+){1,2}?)"
    r"(?:(?: \w+,)* \w+,? or \w+| .*\bor (?:on|in|at|by|of|to|from|an?|the) .*)"
)


def spell_signs(text: str) -> str:
    """Text with single spaces and signs before numbers in words: "> 3 cars" is "more than 3 cars", "- 5" "minus 5"."""
    text = " ".join(text.translate(_SIGN_FORMS).split())
    return " ".join(_SIGNS.sub(lambda match: f" {_SIGN_WORDS[match[0]]} ", text).split())


def question_words(text: str) -> str:
    """The words of a question: without [SOS] and closing punctuation, which the prompt adds, and signs in words."""
    return spell_signs(text.strip().removeprefix("[SOS]").translate(_CONTROL_MARKERS)).rstrip(QUESTION_END)


def has_word(text: str) -> bool:
    """Whether text is more than spaces and punctuation. An emoji counts as an unknown word."""
    return any(not character.isspace() and unicodedata.category(character)[0] != "P" for character in text)


@lru_cache(maxsize=4096)  # the same questions are usually asked about many images
def is_yes_no_question(text: str) -> bool:
    """Whether a question asks for yes or no, by its words alone: "Is there a car?", but not "How busy is it?".

    The first clause that begins with an auxiliary verb ("is", "does", "can"), with a question word ("what", "how"),
    or with a request ("describe", "say if") decides. Text without any of them ("a red car") counts as a yes/no
    question. Alternatives ("Is the light red or green?") do not.
    """
    text = " ".join(text.casefold().translate(_NO_APOSTROPHES).split()).strip(QUESTION_END)
    if "yes or no" in text:
        return True
    if _PROPERTY.match(text) or _ALTERNATIVES.fullmatch(text.removeprefix("please ").removesuffix(", please")):
        return False
    clauses = [words for clause in re.split(f"[,;:{QUESTION_END.strip()}]", text) if (words := clause.split())]
    decisions = (_asks_yes_no(words, words is clauses[-1]) for words in clauses)
    return next((decision for decision in decisions if decision is not None), True)


def _asks_yes_no(words: list[str], is_last: bool) -> bool | None:
    """Whether a clause asks for yes or no; None if it does not decide, like "There is a car" in "...; what is it?"."""
    words = list(dropwhile(_FILLERS.__contains__, words)) or [""]
    if words[0] in _AUXILIARIES and words[1:2] == ["you"]:  # "Could you describe it?" is a request
        rest = list(dropwhile(_FILLERS.__contains__, words[2:]))
        is_request = bool(_REQUESTS & set(rest[:1])) or _asks_for_words(rest, _SAYING - {"see"})
        return not is_request
    first = words[0]
    if first in _AUXILIARIES:
        return True
    if first in _REQUESTS or _asks_for_words(words, _SAYING):
        return False
    if first in _QUESTION_WORDS:
        if first == "when" and not is_last and not _AUXILIARIES & set(words[1:2]):
            return None  # "When it is dark, are the lights on?"
        return words[1:2] == ["about"]  # "What about buses?"
    if is_last and _QUESTION_WORDS & set(words[-2:]):  # "The parked car is in what lane?"
        return False
    if first in _PREPOSITIONS:  # "In this image how many cars are there?"
        return next((word in _AUXILIARIES for word in words if word in _AUXILIARIES | _QUESTION_WORDS), None)
    return None


def _asks_for_words(words: list[str], verbs: frozenset[str]) -> bool:
    """Whether words are like "tell me what color it is" or "say on which side it is"."""
    if not words or words[0] not in verbs:
        return False
    rest = [word for word in words[1:4] if word not in ("me", "us", "please")]
    return bool(_QUESTION_WORDS & set(rest[: 2 if _PREPOSITIONS & set(rest[:1]) else 1]))

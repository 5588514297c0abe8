"""What a question asks, by its words alone, and the item that answers it.

    "Is there no bus? Answer yes or no."   → asked as "Is there any bus", for yes or no, negated
    "Weather?"                             → asked as "How is the weather", for words: a kind of weather
    "Is there a car, is it snowing?"       → problem: two questions
    "Is there a kerb?"                     → refusal: the model does not know "kerb"

    text → form → prompt → kind of answer ─┬─ P(yes) → yes_or_no       ─┬─→ item
                                           └─ words  → answer_in_words ─┘

`Rules` holds what belongs to the words that a model was taught, as data in processor_config.json (written from
data/templates.yaml): the kinds of answers, each with one wording of its questions. This module needs only the
standard library, so that the page in a browser decides as the pipeline does.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple


NONE = "none"  # the answer to a question about something that is not there
END, UNKNOWN_TOKEN = "[EOS]", "[UNK]"
QUESTION_END = " .?!…。？！"  # removed from the end of a question and replaced by one "?"
LETTERS = 50  # per token. A longer text has too many tokens, and reading it to count them could take minutes

MASS = ("road construction",)  # nouns without an article or a plural
GUESS = "its answer would be a guess, which answer_untaught gives"
NO_KIND = (
    "the model was not taught questions like this one. In words it answers questions about colors, numbers, sides, "
    "lights, signs, objects, weather, time of day, road and traffic; it also answers yes/no questions"
)


# --- text ---

_NO_APOSTROPHES = str.maketrans("", "", "'\u2018\u2019\u02bc\u2032\u00b4\u0060\"\u201c\u201d")
# Chat templates put these characters around control tokens in user text.
_CONTROL_MARKERS = str.maketrans("", "", "\U000f0000\U000f0001")


def question_words(text: str) -> str:
    """The words of a question, with single spaces, without [SOS] and closing punctuation, which the prompt adds."""
    return " ".join(text.strip().removeprefix("[SOS]").translate(_CONTROL_MARKERS).split()).rstrip(QUESTION_END)


def has_word(text: str) -> bool:
    """Whether text is more than spaces and punctuation. An emoji counts as an unknown word."""
    return any(not letter.isspace() and unicodedata.category(letter)[0] != "P" for letter in text)


def with_article(noun: str) -> str:
    return noun if noun in MASS else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def words_at(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield for each token, at [start, end) of the text, the word that it comes from: all letters around it.

    Offsets of a rewritten word cover its last letter only, and one letter can become several tokens (U+FDFA).
    """
    words = {place: word for word in re.finditer(r"[^\W\d_]+", text) for place in range(*word.span())}
    for start, end in spans:
        first, last = words.get(start), words.get(end - 1)
        yield text[first.start() if first else start : last.end() if last else end]


def _simplify(text: str) -> str:
    """Text with single spaces, without apostrophes, "please" and closing punctuation: "what is it"."""
    text = " ".join(text.translate(_NO_APOSTROPHES).split()).strip(QUESTION_END)
    text = re.sub(r"^(what|where|how|when)s\b", r"\1 is", text, flags=re.I)
    return re.sub("^please |,? please$", "", text, flags=re.I)


# --- form: yes or no, negated, two questions ---

_BE = frozenset("is are was were".split())
_AUXILIARIES = _BE | frozenset("am do does did has have had can could will would shall should may might must".split())
_NEGATED_AUXILIARIES = frozenset(word + "nt" for word in _AUXILIARIES) | {"cant", "wont"}
_AUXILIARY = rf"(?:{'|'.join(sorted(_AUXILIARIES | _NEGATED_AUXILIARIES))})\b"
_WH = r"(?:what|which|who|whom|whose|whereabouts|where|when|why|how)(?:s|re|d|ll)?\b"
_CONDITION = rf"when\b(?! {_AUXILIARY})"  # "When it is dark, are the lights on?"
_TELL_ABOUT = r"tell (?:me|us)(?: \w+)? about\b"
_SEE = "see|find|count|read|detect|spot|observe|notice"
_COMPARED = "more|less|fewer|over|under|above|below|at least|at most"  # "count more than 2 cars", for yes or no
# What says nothing about the answer: "so, could you tell me", "I would like to know", "do you see" before "what".
_LEAD_IN = re.compile(
    r"(?:\s*(?:please|and|so|now|okay|ok|also|but|then|well|or|just|roughly|approximately|exactly|about(?= how)"
    rf"|(?:{_AUXILIARY} (?:you|i|we) |id? (?:(?:want|need|would|like) )*to |let (?:me|us) |i )?(?:please )?"
    rf"(?:(?:say|(?!{_TELL_ABOUT})tell|answer|know|check|show|ask|wonder)(?: (?:me|us|please))*"
    rf"|(?:see|look)(?=(?: \w+)? {_WH})))\b)*\s*"
)
_without_lead_in = partial(_LEAD_IN.sub, "", count=1)  # it matches at the start, if only the empty text
_REQUEST = re.compile(
    rf"give\b(?! way\b)|(?:{_AUXILIARY} you )?(?:please )?(?:{_TELL_ABOUT}|describe|list|name|count|explain|identify"
    r"|predict|select|choose|determine|estimate|summarize|read|specify|classify|categorize|caption|compare|locate)\b"
    rf"(?! (?:if|whether|{_COMPARED})\b)"
)
# "What color is it?", "In this image how many cars are there?", "The parked car is in what lane?"
_ASKS_FOR_WORDS = re.compile(
    rf"{_WH}(?! about\b)"
    rf"|(?:in|on|at|from|to|of|for|by|with|near|within)\b(?: (?!{_AUXILIARY})\w+)*? {_WH}"
    rf"|.* {_WH}(?: \w+)?$"
)
# Questions that begin like yes/no questions, but one of the alternatives is their answer.
_FOR_WORDS = re.compile(
    rf"(?:the )?(?:number|amount|colou?r|type|kind|status|state|location|position|side) of\b(?!.* (?:{_COMPARED})\b).*"
    # "Is the light red or green?", "Is it on the left or on the right?"
    r"|(?:is|are|was|were) (?:(?:it|this|that|these|those|they|traffic)\b"
    r"|the(?: \w+){1,2}?(?: ahead(?: of us)?| on the (?:left|right))?)"
    r"(?:(?: \w+,)* \w+,? or \w+(?: (?:right now|now|still|here|today|currently|at the moment|in (?:the|this) \w+))?"
    r"| .*\bor (?:on|in|at|by|of|to|from|an?|the) .*)"
    r"|(?!dusk)(?:\w+, )*\w+(?<!s),? or \w+(?<!s)"  # "Sunny or cloudy?"
    # "Is the car ahead of us parked or moving?", "Day or night?"
    r"|(?!(?:(?:is|are) )?(?:any|some|there)|can|do ).*\b(?:left or right|day(?:time)? or night(?:time)?|red or green"
    r"|wet or dry|stop or go|heavy or light|parked or moving|moving or parked)\b.*"
)
# With a verb, or as a thing that can be there: "any car", "a car seen from the side".
_NAMES_THING = re.compile(rf"\b{_AUXILIARY}|\b(?:any|some|than|{_COMPARED})\b|^(?:an?|look for|{_SEE})\b")
# A clause that can stand alone as a question, but not "can you tell me", "may I ask".
_QUESTION = re.compile(
    r"(?=\S+ \S+ \S+)"
    rf"(?:{_AUXILIARY} (?!(?:you|i) (?!{_SEE}|drive|turn|stop|go|pass|cross))"
    rf"|(?!{_CONDITION}){_WH}.* {_AUXILIARY})"
    rf"|(?!when){_WH}(?: \S+)?$"  # "Where?", "How many?"
)
# Clauses, to find "answer yes or no" and second questions. A hyphen between spaces separates, as a dash does.
_SEPARATOR = re.compile(r"(\s*(?:[.?!…。？！,;:()\[\]\n]|\s-\s|[\u2013\u2014])\s*)")
_YES_OR_NO = re.compile(r"\b(?:(?:yes|y|true) ?(?:/|\bor\b) ?(?:no|n|false)|no or yes)\b", re.IGNORECASE)
# A clause of these words alone asks for yes or no, and not about the image.
_INSTRUCTION = frozenset(
    "please answer answers reply respond response say tell give return output write choose pick use using state "
    "only just simply strictly directly with in by as to of from be is should must can could will would you your it "
    "me us a an the this that following question one single word words format form i want need either nothing else "
    "without do dont not explain explanation anything more or".split()
)
# A second question begins like this after "and".
_AND_ASKS = re.compile(rf"\b(?:and|or) (?={_AUXILIARY} (?:there|it|this|that|the|an?|any|you|we)\b|{_WH})")
# "No" and "zero" before a noun, but not in the name of a sign: "no entry signs".
_NO = r"\b(?:no|zero)(?= [^\W\d])(?! (?:parking|stopping|entry|passing|overtaking|(?:left|right|u) turn) signs?\b)"
_NEGATION = re.compile(
    r"\b(?:not|never|none|nobody|nothing|neither|nor|nowhere|cannot|hardly|barely|scarcely|rarely|no[ -]?one|non"
    r"|(?<!\ba )few|other than|except|excluding|besides"
    r"|without(?! (?:an? )?riders?\b)"  # was taught
    rf"|[^\W\d_]+(?:n't|'nt)|{'|'.join(sorted(_NEGATED_AUXILIARIES))})\b|{_NO}"
)
# What is left out of a question, in this order: (what, what is in its place).
_LEFT_OUT = [
    (r"(?<=\w)[\s.,?!]+(?:(?:do not|don.?t) explain|no explanations?|thanks|thank you)\b(?: \w+){0,3}\W*$", ""),
    (r"^\W*(?:hi|hello|hey)(?: there)?\b[\s,.!]*(?=\w)", ""),
    (r"^(?:(?:may|can|could) i ask|i wonder)(?: you)?[\s,:]+(?=\w)", ""),
    (r"\b(whether) or not\b|,?\s*\bor (?:not\b|no\W*$)", r"\1"),
    (r"(?<=[^\W\d_]{3}) ?/ ?(?=[^\W\d_]{3})", " or "),  # "red/green"
    # "It is raining, isn't it?" and "It is raining, right?" ask whether it is raining.
    (
        r",\s*(?:\w+n['\u2019]?t|is|are|does|do|has|can|was|were) (?:it|there|they|he|she|that)(?: not)?\W*$"
        r"|(?<!\bleft)(?<!\bcenter)(?<!\bmiddle)(?<!\bstraight),\s*(?:right|correct|yes|true)\W*$",
        "",
    ),
]
# What turns the meaning of a yes/no question around: (what, what is asked in its place).
_OPPOSITES = [
    (  # Elsewhere "no" is not understood.
        r"^((?:(?:is|are|was|were)(?: there)?|(?:do|can) (?:you|we) (?:see|have)"
        rf"|do(?:es)? (?:the|this) \w+ (?:show|have|contain)) ){_NO}",
        r"\1any",
    ),
    # "Dry" was hardly taught: it is asked as not wet. "Is there a car on the dry road" asks for something else.
    (
        r"^(?!.*\b(?:wet|snow\w*|icy|and|or)\b|.*\bthere (?!(?:an? |any )?dry\b))"
        r"(?=.*\b(?:roads?|streets?|pavement|asphalt|ground|surface|it)\b)(.*)(?<!\bthe )\bdry\b",
        r"\1wet",
    ),
]


def _rewrite(text: str, rules: Iterable[tuple[str, str]]) -> tuple[str, int]:
    """(text after all rules in their order, number of rules that changed something)."""
    count = 0
    for pattern, replacement in rules:
        text, found = re.subn(pattern, replacement, text, flags=re.IGNORECASE)
        count += bool(found)
    return text, count


def _without_instruction(text: str) -> tuple[str, bool]:
    """(question without "answer yes or no" in any wording, whether the text had it)."""
    plain = text.translate(_NO_APOSTROPHES)
    if not _YES_OR_NO.search(plain):
        return text, False
    clauses = _SEPARATOR.split(_YES_OR_NO.sub(" ", plain))  # clause, separator, clause, ...
    for i in range(0, len(clauses), 2):
        if set(clauses[i].casefold().split()) <= _INSTRUCTION:
            clauses[i : i + 2] = [" "] * len(clauses[i : i + 2])  # without the separator that follows
    return " ".join("".join(clauses).split()).strip(QUESTION_END + ",;:()[]-–—"), True


def _count_questions(text: str) -> int:
    """The number of questions in a text: 2 for "Is there a car? Is it snowing?" and "Is there a car, and where?"."""
    text = re.sub(r"[^\S\n]+", " ", text.casefold().translate(_NO_APOSTROPHES))
    clauses = _SEPARATOR.split(_AND_ASKS.sub("; ", text))[::2]
    return sum(_QUESTION.match(_without_lead_in(clause)) is not None for clause in clauses)


def _asks_yes_no(simple: str) -> bool:
    """Whether a simplified text asks for yes or no: "Is there a car", but not "How busy is it".

    The first clause that begins with a request, an auxiliary verb ("is", "can") or a question word decides, or that
    ends with one. Text without any of them ("a red car") is a yes/no question.
    """
    text = simple.casefold()
    if _FOR_WORDS.fullmatch(text):
        return False
    clauses = [_without_lead_in(clause) for clause in _SEPARATOR.split(text)[::2] if clause.strip()]
    for clause in clauses:
        if _REQUEST.match(clause):
            return False
        if re.match(_AUXILIARY, clause):
            return True
        is_condition = len(clauses) > 1 and re.match(_CONDITION, clause)
        if _ASKS_FOR_WORDS.match(clause) and not is_condition:
            return False
    return True


# --- grammar: the words that the answer depends on ---

# Words of the vocabulary that many questions teach, so that they are never reported as untaught.
FUNCTION_WORDS = frozenset(
    """
    a an the this that those it its they them their there here i my me we us you your
    is are was were be been am do does did doing has have can could will would should shall must may need
    and or not if than because while like of to in on at for with without by from into out off up down over under
    through across along against around about as before after toward past between
    all any each both another other same different very still just now too
    what which who where when why how many much most more fewer less least number none count please describe list
    answer select following options correct predict consider based mean b c d u s
    see look visible seen appear appears show showing scene status image video type types located location
    one first second third normal possible important main current likely able involved
    """.split()
)
_VERBS = _AUXILIARIES - _BE
_PRONOUNS = frozenset("it this that these those we you i they".split())
_BEFORE_THINGS = frozenset("many see seen have has show count than".split())
# Before a noun; they are skipped.
_DETERMINERS = _PRONOUNS | frozenset(
    "a an the any some its my your all both each other another more fewer just still now there visible possible main "
    "be been and or scene video".split()
)
# After a noun: where it is, which only qualifies. Function words end a noun, too.
_PLACES = frozenset(
    "ahead left right front back center near far close closer straight behind away next side clearly".split()
)
_NO_NOUNS = FUNCTION_WORDS | _PLACES
_CLAUSE_ENDS = frozenset([*".,;:", "and", "or", ""])
_ADVERBS = frozenset("actually currently perhaps really today".split())  # of the words around questions in training
# What to do, and what comes next, is not in the image: "may we go", "will the bus stop", but not "can we see a car".
_DECISION = re.compile(
    r"(?:^|(?<=, ))(?:(?:should(?: the)?|will the(?! (?:road|street)\b))(?: ego)? \w+"
    r"|(?:can|could|may|must|shall|do|will) (?:i|we)) "
    rf"(?!(?:{_SEE}|have(?! to\b)|look|ask|get)\b)\w+"
)
# Around the noun of a class, where all of its objects are asked about, or the only one.
_AROUND = frozenset("say name camera object objects road street color side".split())
# Words that add nothing to a thing or a value: "could you see any cars in this image", "check if the sky is cloudy".
_ADDS_NOTHING = frozenset(
    "a an the any there here now still just is are was were be been am do does did has have can could would may "
    "you we i me us it its this that those in on at to for by if please see seen look like visible show appear around "
    "image scene video taken say name object objects clearly weather sky status current out , . : [UNK]".split()
)
# A verb after a noun: "a person smoking", "the lane blocked".
_PARTICIPLE = re.compile(r"(?!(?:building|parking|red|speed)$)\w+(?:ing|ed)")


def is_content_word(word: str) -> bool:
    """Whether a word of the vocabulary is not a function word, number, punctuation or special token."""
    return word.isalpha() and word not in FUNCTION_WORDS


def asked_for(tokens: Sequence[str]) -> list[int]:
    """The places among `tokens` of the words that a question asks for, by its grammar alone.

    These are the head of the noun after "there is", "any", "how many", "where is", "color of" or "see", and what is
    said of something after "is" or another auxiliary: "is the crossing [closed]", "is a person [smoking]".

    Args:
        tokens: the words of the first sentence of a question, as the tokenizer writes them; [UNK] is a word.
    """
    found: set[int] = set()
    for i, word in enumerate(tokens):
        before, after = (tokens[k] if 0 <= k < len(tokens) else "" for k in (i - 1, i + 1))
        is_there = "there" in (word, before) and not _BE.isdisjoint((word, before))
        is_of = (before, word) in (("number", "of"), ("color", "of"), ("status", "of"), ("look", "for"))
        is_around = before in _PRONOUNS and word in ("in", "on", "at")  # "are we in a [tunnel]"
        is_verb = word in _VERBS and before in _CLAUSE_ENDS and after not in ("there", "you", "we", "i")
        if is_there or is_of or is_around or word in _BEFORE_THINGS:
            found |= _nouns(tokens, i + 1)
        elif word == "any" or is_verb or (word in _BE and after != "there"):
            found |= _nouns(tokens, i + 1, has_predicate=True)
    return sorted(found)


def _nouns(tokens: Sequence[str], start: int, has_predicate: bool = False) -> set[int]:
    """The places of the heads of the nouns that begin at `start`: "a white [van] or a [bus] near the kerb".

    Args:
        has_predicate: a word may be said of the noun: "the [lane] [blocked]".
    """
    found: set[int] = set()
    while True:
        while start < len(tokens) and (tokens[start] in _DETERMINERS or tokens[start].isdigit()):
            start += 1
        end = start
        while end < len(tokens) and tokens[end] not in _NO_NOUNS and (tokens[end].isalpha() or tokens[end] == "[UNK]"):
            end += 1
        if end == start:
            return found
        found.add(end - 1)
        after = tokens[end] if end < len(tokens) else ""
        is_said = _PARTICIPLE.fullmatch(tokens[end - 1]) or (has_predicate and after in _CLAUSE_ENDS)
        if is_said and end - start > 1:
            found.add(end - 2)  # what it is said of
        if after not in (",", "and", "or"):
            return found
        start = end + 1


# --- kinds of answers ---

_ARTICLES = ["a", "an", "2", "3", "4", "5", "6", ""]  # of an item of a list
_PLACES_OF_ITEMS = ["", "on the left", "in the center", "on the right"]


@dataclass(frozen=True)
class AnswerKind:
    """What a question in words asks for.

    Attributes:
        name: as people read it: "a color".
        values: all possible answers; empty for lists of objects.
        question: what all of its questions are asked as, where {car} or {cars} is the class; empty if it has none.
        affirmed: (value, yes/no question whose yes it needs).
        nouns, colors: of lists of objects: "a car, 2 trucks and red buses on the left".
        min_score: score below which the likeliest answer is no answer.
    """

    name: str
    values: tuple[str, ...] = ()
    question: str = ""
    affirmed: tuple[tuple[str, str], ...] = ()
    nouns: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    min_score: float = 0.0

    def accepts(self, answer: str) -> bool:
        """Whether an answer is of this kind."""
        words = [*answer.replace(",", " ,").split(), END]
        return all(word in self.next_words(words[:i]) for i, word in enumerate(words))

    def next_words(self, words: list[str]) -> set[str]:
        """The words, or END, that can follow the first words of an answer; empty if no answer begins with these."""
        if END in words:
            return {END}
        if self.values:
            return _next_words([self.values, [END]], words)
        item = max((i + 1 for i, word in enumerate(words) if word in ("and", ",")), default=0)  # where it begins
        slots = [_ARTICLES, (*self.colors, ""), self.nouns, _PLACES_OF_ITEMS, ["and", ",", END]]
        return _next_words(slots, words[item:])


def _next_words(slots: Sequence[Sequence[str]], words: list[str]) -> set[str]:
    """The words that can follow in a text that has one phrase of each slot; "" if a slot can be left empty."""
    found: set[str] = set()
    for phrase in map(str.split, slots[0] if slots else ()):
        if len(words) < len(phrase) and phrase[: len(words)] == words:
            found.add(phrase[len(words)])
        elif words[: len(phrase)] == phrase:
            found |= _next_words(slots[1:], words[len(phrase) :])
    return found


# --- questions ---


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
        asked: what the model is asked: positive, and without "answer yes or no".
        is_yes_no: whether the answer is yes or no.
        is_negated: whether "yes" to `text` is "no" to `asked`.
        input_ids: its prompt; empty if it has a problem.
        kind: the kind of answer in words that it asks for; None for yes/no questions, and if any answer is accepted.
        unknown_words: its words that are not in the vocabulary; the model ignores them.
        untaught_words: its words that the model was not taught; it guesses what they mean.
        problem: why it cannot be answered; None if it can be.
        checks: (value, yes/no question) that its answer in words must agree with: a value is an answer only if its
            question is answered yes; "" stands for "Is there a car?", without which only 0 and "none" are answers.
    """

    text: str
    asked: str
    is_yes_no: bool
    is_negated: bool = False
    input_ids: tuple[int, ...] = ()
    kind: AnswerKind | None = None
    unknown_words: tuple[str, ...] = ()
    untaught_words: tuple[str, ...] = ()
    problem: str | None = None
    checks: tuple[tuple[str, "Question"], ...] = ()

    def agreeing(self, is_yes: Sequence[bool]) -> "Question":
        """The same question without the answers that the answers to its `checks` deny, unless they deny all."""
        kind: Any = self.kind
        affirmed = {value: yes for (value, _), yes in zip(self.checks, is_yes)}
        is_there = affirmed.get("")
        values = [value for value in kind.values if is_there is None or (value in ("0", NONE)) != is_there]
        values = [value for value in values if affirmed.get(value, True)] or values
        return replace(self, kind=replace(kind, values=tuple(values)))

    def item(self, problem: str | None = None, **found: Any) -> dict[str, Any]:
        """The item that the pipeline returns: an answer or a problem, and unknown and untaught words."""
        item = {"question": self.text, "answer": None, "score": None, "p_yes": None, **found}
        notes = {"unknown_words": self.unknown_words, "untaught_words": self.untaught_words}
        item |= {name: list(words) for name, words in notes.items() if words}
        return item | ({"problem": problem} if problem else {})

    def answer_in_words(self, answer: str, score: float, min_score: float = 0.05) -> dict[str, Any]:
        """What an answer in words adds to the item: "answer" and "score", or a "problem".

        An answer is a problem if it is not of the question's kind, or if its score is below `min_score` or that of the
        kind. Answers to taught questions have 0.3 and more; to others they are often forced values.
        """
        problem = None
        if self.kind is None:  # any answer can be right
            problem = None if answer else "the model's answer is empty"
        elif not self.kind.accepts(answer):
            problem = f"the model's answer {answer!r} is not {self.kind.name}"
        elif score < max(min_score, self.kind.min_score):
            likeliest = f"the likeliest of {self.kind.name}, {answer!r}, has a score of {score:.3f}"
            problem = f"the model has no answer: {likeliest}"
        return {"problem": problem} if problem else {"answer": answer, "score": score}

    def next_ids(self, words: list[str], vocabulary: Mapping[str, int], no_first: Collection[int]) -> list[int]:
        """The ids of the tokens that can follow the first words of its answer.

        Args:
            vocabulary: token → id.
            no_first: ids that no answer in words begins with, such as yes and no.
        """
        if self.kind is None:  # any word
            return [index for index in vocabulary.values() if words or index not in no_first]
        return [vocabulary[word] for word in self.kind.next_words(words) if word in vocabulary]

    def yes_or_no(self, p: float, threshold: Any = 0.5) -> dict[str, Any]:
        """What P(yes) adds to the item: "answer", "score" (the probability of this answer), "p_yes" (that of yes).

        Args:
            p: calibrated P(yes) of `asked`.
            threshold: P(yes) from which the answer is yes: a number, or an object with `threshold` and
                `is_unsure(p)`, which adds "not_sure".
        """
        is_yes = p >= getattr(threshold, "threshold", threshold)
        p_yes = 1 - p if self.is_negated else p
        answer = "yes" if is_yes != self.is_negated else "no"
        item = {"answer": answer, "score": p_yes if answer == "yes" else 1 - p_yes, "p_yes": p_yes}
        return item if isinstance(threshold, float | int) else item | {"not_sure": threshold.is_unsure(p)}


class Rules:
    """Reads questions by the data of a model.

    Args:
        kinds: kinds of answers, the first whose `asked` matches counts: {"name", "asked": [regular expressions of the
            words that the tokenizer writes], "values": [...] or "nouns": {singular: plural}, "min_score",
            "question", "affirmed": {value: yes/no question}}. All questions of a kind are asked as its "question", in
            which {car} or {cars} is the class. Without kinds, every question in words is accepted.
        colors, light_colors: of objects and of traffic lights.
        colored: nouns whose colors a model can be taught, besides lights.
        examples: kind of question → a question.
    """

    def __init__(
        self,
        kinds: Sequence[Mapping[str, Any]] = (),
        colors: Sequence[str] = (),
        light_colors: Sequence[str] = (),
        colored: Sequence[str] = (),
        examples: Mapping[str, str] | None = None,
    ):
        self.colors, self.light_colors, self.colored, self.examples = colors, light_colors, colored, examples or {}
        self.kinds: list[tuple[AnswerKind, re.Pattern]] = []
        self.nouns: dict[str, str] = {}  # singular → plural
        for kind in kinds:
            self.nouns |= (nouns := kind.get("nouns", {}))
            names = tuple(dict.fromkeys([*nouns, *nouns.values()]))
            given = {part: kind[part] for part in ("question", "min_score") if part in kind}
            given |= {"values": tuple(kind.get("values", ())), "affirmed": tuple(kind.get("affirmed", {}).items())}
            found = AnswerKind(kind["name"], nouns=names, colors=tuple(colors), **given)
            self.kinds.append((found, re.compile("|".join(rf"(?:{one}(?!\w))" for one in kind["asked"]))))
        # (name, other words that are needed, yes/no question) of things, and of values of which a scene has one.
        forms = [(form, one) for one, many in self.nouns.items() for form in (one, many)]
        self.simplest = [(form, set[str](), f"Is there {with_article(one)}") for form, one in forms]
        for found, _ in self.kinds:
            for value, text in found.affirmed if NONE not in found.values else ():
                self.simplest.append((value, {*text.lower().split()}.difference(_ADDS_NOTHING, value.split()), text))

    def known_nouns(self, taught: Collection[str] | None) -> list[str]:
        """The nouns that a model can be asked about, in the singular; `taught`: its words, None if not known."""
        return [noun for noun in self.nouns if taught is None or all(word in taught for word in noun.split())]

    def form(self, text: str) -> Question:
        """A question with its form, not yet tokenized."""
        plain = text.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be tokenized
        asked, is_yes_no = _without_instruction(plain)
        asked, _ = _rewrite(asked, _LEFT_OUT)
        simple = _simplify(asked)
        is_yes_no |= _asks_yes_no(simple) and not self._is_name_of_kind(simple)
        asked, turned = _rewrite(asked, _OPPOSITES if is_yes_no else ())
        problem = None
        if not has_word(asked):
            problem = f"the question {plain[:80]!r} has no word"
        elif (questions := _count_questions(asked)) > 1:
            problem = f"{plain[:200]!r} contains {questions} questions: ask them one by one, as a list of questions"
        elif negation := _NEGATION.search(asked.casefold().replace("\u2019", "'")):
            problem = f"the model does not understand {negation[0]!r} in a question: ask without it"
        return Question(text, asked, is_yes_no, turned % 2 == 1, problem=problem)

    def _is_name_of_kind(self, simple: str) -> bool:
        """Whether a clause without a verb names what is asked for, and not one value of it: "Car position"."""
        text = simple.casefold().replace("colour", "color")
        rest = re.sub("time of (the )?day", "", text)  # "day" is no value there
        for clause in map(_without_lead_in, _SEPARATOR.split(text)[::2]):
            kind = None if _NAMES_THING.search(clause) else self.answer_kind(clause)
            if kind is not None and sum(bool(re.search(rf"\b{one}\b", rest)) for one in kind.values) != 1:
                return True
        return False

    def all_as_asked(self, questions: Iterable[str], answers: Iterable[str]) -> list[tuple[str, str]]:
        """`as_asked` of each question and its answer. A ValueError: there are more of one than of the other."""
        return [self.as_asked(*pair) for pair in zip(questions, answers, strict=True)]

    def as_asked(self, text: str, answer: str) -> tuple[str, str]:
        """A question without politeness and negation, and its answer, for training; unchanged if it has a problem."""
        form, opposite = self.form(text), {"yes": "no", "no": "yes"}
        if form.problem or (form.is_negated and answer.lower() not in opposite):
            return text, answer
        return form.asked, opposite[answer.lower()] if form.is_negated else answer

    def answer_kind(self, words: str) -> AnswerKind | None:
        """The kind of answer that a question in words asks for; None for a question of a kind that was not taught.

        `words` are those that the tokenizer reads: "what color is the traffic light".
        """
        words = words.replace(" 's", " is")
        if re.match(r"(?:why|who|how (?:far|close))\b", words):
            return None
        kind = next((kind for kind, pattern in self.kinds if pattern.search(words)), None)
        if kind is None or " or " not in words:
            return kind
        named = {value for value in kind.values if re.search(rf"\b{value}\b", words)}  # "is it sunny or rainy"
        chosen = tuple(value for value in kind.values if value in {*named, NONE})
        return replace(kind, values=chosen) if len(named) > 1 else kind

    def read(
        self,
        text: str,
        tokenize: Callable[[str], Prompt],
        limit: int,
        taught: Collection[str] | None = None,
        any_kind: bool = False,
        answer_untaught: bool = False,
    ) -> Question:
        """A question, checked and tokenized.

        Args:
            tokenize: makes a prompt of the words of a question.
            limit: maximum number of tokens of a question with its answer.
            taught: the content words that the model was taught; None if they are not known.
            any_kind: accept decisions and every answer in words: the model was taught a user's own questions.
            answer_untaught: accept a question whose answer would be a guess.
        """
        too_long = f"with its answer, at most {limit} tokens are possible: {text[:80]!r}"
        if len(text) > LETTERS * limit:
            return Question(text, text, True, problem=f"the question has {len(text):,} characters; {too_long}")
        form = self.form(text)
        if form.problem:
            return form
        ids, tokens, typed = tokenize(question_words(form.asked))
        tokens = tokens[1:-1]
        if not tokens:
            return replace(form, problem=f"the question {text[:80]!r} has no word")
        if len(ids) >= limit:  # an answer has one token at least
            return replace(form, problem=f"the question has {len(ids)} tokens; {too_long}")
        unknown = tuple(dict.fromkeys(word for token, word in zip(tokens, typed) if token == UNKNOWN_TOKEN))
        if unknown and not any(token.isalnum() for token in tokens):
            problem = f"the model knows no word of the question {text[:80]!r}"
            return replace(form, unknown_words=unknown, problem=problem)
        known = tokens if taught is None else taught
        untaught = (word for token, word in zip(tokens, typed) if is_content_word(token) and token not in known)
        question = replace(
            form,
            input_ids=tuple(ids),
            unknown_words=unknown,
            untaught_words=tuple(dict.fromkeys(untaught)),
            problem=None if answer_untaught else self._refusal(tokens, typed, taught, any_kind),
        )
        if any_kind or not self.kinds:
            return question
        kind = None if form.is_yes_no else self.answer_kind(" ".join(tokens))
        if kind is None and not form.is_yes_no:
            return replace(question, problem=NO_KIND + (f". Unknown words: {', '.join(unknown)}" if unknown else ""))
        noun = self._asked_about(tokens, kind) if kind else ""
        if asked := self._common_wording(kind, noun, tokens) if kind else self._simplest_yes_no(tokens):
            question = replace(question, asked=asked, input_ids=tuple(tokenize(asked)[0]))
        if kind is None:
            return question
        texts = {value: text for value, text in kind.affirmed if value in kind.values}
        if {"0", NONE} & {*kind.values} and noun:
            texts[""] = f"Is there {with_article(noun)}"
        prompts = ((value, text, tuple(tokenize(text)[0])) for value, text in texts.items())
        checks = tuple((value, Question(text, text, True, input_ids=ids)) for value, text, ids in prompts)
        kind = replace(kind, min_score=0.0) if answer_untaught else kind
        return replace(question, kind=kind, checks=checks)

    def _simplest_yes_no(self, tokens: Sequence[str]) -> str:
        """The simplest yes/no question about the same thing or value; "" if this one asks for more, or for [UNK]."""
        if any(tokens[i] == UNKNOWN_TOKEN for i in asked_for(tokens)):
            return ""
        text = f" {' '.join(tokens)} "
        for named, needed, asked in self.simplest:
            if f" {named} " in text:
                rest = re.sub(r"\b(?:street|surface|ground)\b", "road", text.replace(f" {named} ", " ")).split()
                if needed <= {*rest} <= _ADDS_NOTHING | needed:
                    return asked
        return ""

    def _common_wording(self, kind: AnswerKind, noun: str, tokens: Sequence[str]) -> str:
        """The question that all of a kind are asked as; "" if this one is about some objects of a class only."""
        text = kind.question
        is_one = f" {noun} " in f" {' '.join(tokens)} "  # "the cars" are not "the car"
        fits = "{" not in text or (noun and (is_one or "{car}" not in text))
        return text.format(car=noun, cars=self.nouns.get(noun)) if fits else ""

    def _asked_about(self, tokens: Sequence[str], kind: AnswerKind) -> str:
        """The noun of the class that a question is about, in the singular; "" if it is about some of its objects."""
        text = f" {' '.join(tokens)} "
        forms = [(form, one) for one, many in self.nouns.items() for form in (one, many) if f" {form} " in text]
        form, noun = max(forms, key=lambda pair: len(pair[0]), default=("", ""))
        rest = {*text.replace(f" {form} ", " ").split()}.difference(_AROUND, *map(str.split, kind.values))
        is_some = any(word in _PLACES or is_content_word(word) for word in rest)
        return "" if is_some else noun

    def _refusal(
        self, tokens: Sequence[str], typed: Sequence[str], taught: Collection[str] | None, any_kind: bool
    ) -> str | None:
        """Why the answer to a question would be a guess; None if all that it asks for is known and taught."""
        sentence = list(takewhile(lambda token: token not in ("?", "."), tokens))
        if not any_kind and (decision := _DECISION.search(" ".join(sentence))):
            return f"the model does not decide or predict {decision[0]!r}: {GUESS}"
        places = asked_for(sentence)
        for i in reversed(places):  # first what is said of a thing, then the thing
            # What ends in "ly" tells how, but at the end: "is it barely raining", "is the dog friendly".
            word = typed[i].casefold()
            is_adverb = word in _ADVERBS or (word.endswith("ly") and i < len(sentence) - 1)
            if sentence[i] == UNKNOWN_TOKEN and not is_adverb:
                return f"the model does not know {typed[i]!r}: {GUESS}"
            if taught is not None and is_content_word(sentence[i]) and sentence[i] not in taught:
                return f"the model was not taught {typed[i]!r}: {GUESS}"
        nouns = [i for i, word in enumerate(sentence) if is_content_word(word) and word not in {*self.colors, "color"}]
        is_color = "color" in sentence or any(sentence[i] in self.colors for i in places)
        if taught is None or not is_color or not nouns or {"light", "lights"} & set(sentence):
            return None
        # Colors are those of lights as long as no other color was taught.
        has_others = bool(set(taught) & (set(self.colors) - set(self.light_colors)))
        thing = next((i for i in nouns if sentence[i] in self.nouns or sentence[i] in self.nouns.values()), nouns[0])
        if has_others and (any_kind or sentence[thing] in self.colored):
            return None
        named = "lights and vehicles" if has_others else "lights"
        return f"the model was taught the colors of {named}, not that of {typed[thing]!r}: {GUESS}"

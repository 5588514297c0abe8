"""How a question is asked, by its words alone: for yes or no or for words, with a negation, twice in one text.

    "Is there no bus? Answer yes or no."   → "Is there any bus", yes or no, negated
    "Weather?"                             → "What is the weather", words
    "Is there a car, is it snowing?"       → problem: two questions
    "What color is the traffic light?"     → words

This module needs only the standard library, so that programs without torch decide as the pipeline does.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile


QUESTION_END = " .?!…。？！"  # removed from the end of a question and replaced by one "?"
_NO_APOSTROPHES = str.maketrans("", "", "'\u2018\u2019\u02bc\u2032\u00b4\u0060\"\u201c\u201d")

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
_QUESTION_WORDS = frozenset("what which who whom whose where whereabouts when why how".split())
_QUESTION_WORDS |= {word + ending for word in _QUESTION_WORDS for ending in ("s", "re", "d", "ll")}
_AUXILIARIES = frozenset(
    "is are was were am do does did has have had can could will would shall should may might must".split()
)
_NEGATED_AUXILIARIES = frozenset(word + "nt" for word in _AUXILIARIES) | {"cant", "wont"}
_AUXILIARIES |= _NEGATED_AUXILIARIES
_FILLERS = frozenset("please and so now ok okay hey hello hi also but then well or just".split())
_SAYING = frozenset("say tell answer know check show see look".split())  # ask for what follows: "say if", "say what"
_REQUESTS = frozenset(
    "describe list name count explain identify predict select choose determine estimate give summarize read find "
    "specify classify categorize caption compare locate".split()
)
_PREPOSITIONS = frozenset("in on at from to of for by with under along near towards toward about within".split())
_PROPERTY = re.compile(r"(?:the )?(?:number|amount|colou?r|type|kind|status|state|location|position|side) of\b")
# "Is the light red or green?", "Is it on the left or on the right?": one of the alternatives is the answer.
_ALTERNATIVES = re.compile(
    r"(?:is|are|was|were) (?:(?:it|this|that|these|those)\b|the(?: \w+){1,2}?)"
    r"(?:(?: \w+,)* \w+,? or \w+| .*\bor (?:on|in|at|by|of|to|from|an?|the) .*)"
)

# Pairs of values of which one is the answer, too: "Is traffic heavy or light?", "Day or night?".
_PAIRS = (
    "left or right,right or left,day or night,night or day,day or dusk,red or green,green or red,wet or dry,"
    "dry or wet,heavy or light,light or heavy,parked or moving,moving or parked,stop or go"
).replace(",", "|")
_PAIR = re.compile(
    rf"(?!are there|is there|can|do ).*\b(?:{_PAIRS})\b"
    r"|(?:is|was) (?:it|this|that) an? \w+(?: \w+)? or \w+(?: \w+){0,2}$"
)

# People's wordings of whole questions. Phrases within a question ("a rainy day", "a road sign") are rewritten by the
# tokenizer. docs/words.md has what both bring.

_REQUEST = (
    r"(?:and |what about )?(?:(?:(?:can|could|would) you )?(?:please )?(?:tell|give|show)(?: me| us)? )?(?:the )?"
)
# Words that are not part of a noun: "bus stop location", but not "should we hold position".
_OTHERS = (
    f"{'|'.join(sorted(_AUXILIARIES))}|"
    "whats?|which|who|where|why|how|when|say|tell|list|name|count|see|describe|please|there|it|i|we|you|they|he|she|"
    "the|an?|any|this|that|these|those|its|my|our|your|in|on|at|of|to|from|for|with|by|as|and|or|than|no|not|if|"
    r"more|most|fewer|less|many|several|some|all|every|each|both|(?:any|some|every|no)(?:one|body|thing)|\d+|"
    "one|two|three|four|five|six|main|other|same|current|exact"
)
_WORD = rf"(?!(?:{_OTHERS})\b)\w+"
_NOUN = rf"({_WORD}(?: {_WORD}){{0,2}})"
_NOUNS = rf"(?:{_WORD} ){{0,2}}(?!(?:{_OTHERS})\b)(?:\w+(?<!bu)s|people|children|men|women|deer|sheep)"
_PICTURE = "(?:image|picture|photo|frame|scene)"
_HERE = f"(?:,? (?:in|on|of) (?:the|this) {_PICTURE})?"
_VIEW = f"(?:(?:the|this) {_PICTURE}|view|sight)"
_LEFT = "(?:left|right)(?: side)?"
# "Is the car turning left or right?" asks for a direction, not for a place.
_TURNS = r"(?:.*\b)?(?:(?!parking|standing|building)\w+ing|turn|curve|bend|road|street|arrow)\b"
_STATES = "(?:parked|moving|stopped|driving|standing|walking)"
_POSSESSIVE = re.compile(r"(?<=\w)['\u2018\u2019]s (?=(?:colou?r|status|state|position|location)\b)", re.IGNORECASE)
_CONTRACTION = re.compile(r"^(what|where|how|when)s\b", re.IGNORECASE)
_PLEASE = re.compile("^please |,? please$", re.IGNORECASE)
# Taught form: regular expressions of simplified questions that mean the same. They are tried in this order, each on
# what those before it have made of the question.
_REPHRASED = {
    # Without a verb, or as a request: "Weather?", "Color of the bus?", "Tell me the number of cars".
    r"How many \1 are there": (
        rf"{_REQUEST}number of (?:the )?({_NOUNS}(?: (?:in|on|at|near|to|behind|ahead) [\w ]+)?)",
        r"how many ((?!lanes)(?:traffic )?\w+)(?: in total| do we have)?",
    ),
    r"What is the \1": (
        rf"{_REQUEST}((?:weather|traffic|road)(?: conditions?)?|traffic (?:density|level)|speed limit){_HERE}",
        rf"{_REQUEST}(time of day|(?:{_WORD} ){{0,2}}colou?rs?(?: of .*)?)",
    ),
    "What is the weather": (r"(?:identify|name) the weather(?: conditions?)?", "what is the current weather"),
    "What is the road like": (
        r"what is the road(?: conditions?)?|how does the road look|(?:state|condition) of (?:the )?road",
        r"is the (?:road|street|pavement|road surface) (?:wet|dry) or (?:wet|dry)|(?:wet|dry) or (?:wet|dry) road",
    ),
    "What is the traffic like": (
        r"what (?:are|is) the (?:traffic(?: conditions?| density| level)?|level of traffic)",
        r"is (?:the )?traffic (?:heavy|light|busy) or (?:heavy|light|busy)",
    ),
    "What time of day is it": (
        r"(?:at )?(?:which|what) (?:time of the day|part of (?:the )?day) (?:is this|was (?:this|the) \w+ taken)",
        r"(?:which|what) (?:time|part) of the day is it|what is the lighting",
        r"when was (?:this|the) (?:image|picture|photo|photograph|video|frame) taken",
        r"(?:is it )?(?:day|night)(?:time)? or (?:day|night)(?:time)?",
    ),
    "What color is the traffic light": (
        r"(?:what is the )?(?:traffic )?(?:light|signal)s? (?:colou?r|state|status)",
        r"is the (?:traffic )?(?:light|signal) (?:red|yellow|green)(?: or (?:red|yellow|green)){1,2}",
    ),
    r"What color is the \1": (rf"what is the ({_WORD}) colou?r",),
    r"What is the status of the \1": (rf"(?:what is )?(?:the )?{_NOUN} (?:status|state)",),
    r"What is the status of \1": (
        r"what is (the (?!.*\bto\b)[\w ]+) doing",  # not "the driver supposed to be doing"
        r"what does (the (?!.*\bto\b)[\w ]+) do",
        rf"is (the (?!.*\bor\b.*\bor\b)[\w ]+) {_STATES} or {_STATES}(?: still)?",
    ),
    r"Where is the \1": (
        rf"(?:what is )?(?:the )?(?!.*\blane ){_NOUN} (?:position|location)",
        r"(?:the )?(?:position|location) of (?:the )?([\w ]+)",
    ),
    r"Where is \1": (
        r"what is the (?:position|location) of (.+)",
        rf"(?:in|on) (?:which|what) (?:part|side) of the {_PICTURE} is (.+)",
        r"where can (?:(?:i|we) (?:find|see)|you find) ((?!what|which|how|if).+)",
        rf"is (the (?!{_TURNS})[\w ]+?) (?:(?:on|to) the )?{_LEFT} or (?:(?:on|to) )?(?:the )?{_LEFT}",
    ),
    r"Which side is \1": (r"what side is (.+)",),
    r"Are there more \1 than \2": (
        r"do (.+) outnumber (.+)",
        r"is the number of (.+) (?:higher|greater|larger|bigger) than (?:the number|that) of (.+)",
    ),
    r"Is there any \1": (r"is (?:any|one) of the (?:vehicles|objects) an? (.+)",),
    "Which traffic sign is there": (r"(?:what|which) (?:traffic )?sign is (?:this|it|that)",),
    "What type of road is it": (r"what road type is (?:it|this)|(?:the )?road type|type of (?:the )?road",),
    "What is the closest vehicle": (r"(?:nearest|closest) vehicle(?: type)?",),
    # Asked of something else.
    r"Is the road \1": (r"(?:is (?:it|this) an? )?(wet|dry|snowy|busy|empty) (?:road|street)",),
    "Is it cloudy": (r"(?:is|are) there (?:any |many )?clouds?(?: in the sky)?",),
    "Is this a highway": (r"(?:are we )?on (?:a|the) (?:highway|freeway|motorway|expressway)",),
    "Is it sunny": (r"is the sun (?:out|shining)|sunshine",),
    "Is there a traffic jam": (r"is (?:the )?traffic (?:jammed|stuck|at a standstill)",),
    r"Is there any \1 in the image": (rf"(?:an? |any |the )?{_NOUN} in {_VIEW}",),
    r"Is there \1 in the image": (rf"((?:any|some)(?:one|body|thing)) in {_VIEW}",),
}
_REPHRASING = [
    (re.compile(pattern, re.IGNORECASE), taught) for taught, patterns in _REPHRASED.items() for pattern in patterns
]

# Clauses, to find "answer yes or no" and second questions. A hyphen between spaces separates, as a dash does.
_SEPARATOR = re.compile(r"(\s*(?:[.?!…。？！,;:()\[\]\n]|\s-\s|[\u2013\u2014])\s*)")
_SEPARATORS = " .?!…。？！,;:()[]-–—"
_YES_OR_NO = re.compile(r"\b(?:yes or no|yes ?/ ?no|no or yes|either yes or no)\b", re.IGNORECASE)
# A clause of these words alone asks for yes or no, and not about the image.
_INSTRUCTION = frozenset(
    "please answer answers reply respond response say tell give return output write choose pick use using state "
    "only just simply strictly directly with in by as to of from be is should must can could will would you your it "
    "me us a an the this that following question one single word words format form i want need either nothing else "
    "without do dont not explain explanation anything more".split()
)
_PERCEIVING = frozenset("see find count read detect spot observe notice drive turn stop go pass cross".split())
# A second question begins like this after "and".
_AND_ASKS = re.compile(
    r"\band (?=(?:is|are|does|do|can|was|were|has|have|will) (?:there|it|this|that|the|an?|any|you|we)\b"
    r"|(?:what|which|how|where|when|who|why)\b)"
)
# "no" and "zero" before a noun, but not in the name of a sign: "a no parking sign", "the sign says no entry".
_NO = re.compile(
    r"(?<!\ba )(?<!\ban )(?<!\bthe )(?<!\bthis )(?<!\bsays )(?<!\bsay )\b(?:no|zero)(?= [^\W\d])", re.IGNORECASE
)
# "No" there turns the meaning of the whole question around; elsewhere it is not understood.
_STARTS_WITH_NO = re.compile(
    r"(?:(?:please|so|and|ok|okay|now),? )*(?:(?:is|are|was|were)(?: there)?|(?:do|can) (?:you|we) (?:see|have)"
    r"|do(?:es)? (?:the|this) \w+ (?:show|have|contain))(?: really| still)? (?:no|zero)\b",
    re.IGNORECASE,
)
_NEGATIONS = frozenset(
    "not never none nobody nothing neither nor nowhere without cannot hardly barely scarcely rarely".split()
)
# "It is raining, isn't it?" and "It is raining, right?" ask whether it is raining.
_TAG = re.compile(
    r",\s*(?:\w+n['\u2019]?t|is|are|does|do|has|can|was|were) (?:it|there|they|he|she|that)(?: not)?\W*$"
    r"|(?<!\bleft)(?<!\bcenter)(?<!\bmiddle)(?<!\bstraight),\s*(?:right|correct|yes|true)\W*$",
    re.IGNORECASE,
)
_GREETING = re.compile(r"^\W*(?:hi|hello|hey)(?: there)?\b[\s,.!]*(?=\w)", re.IGNORECASE)
_OR_NOT = re.compile(r"(whether)? or not\b", re.IGNORECASE)
# "Dry" was hardly taught: it is asked as not wet.
_DRY = re.compile(
    r"(?!.*\b(?:wet|snow\w*|icy)\b)(.*\b(?:roads?|streets?|pavement|surface|it)\b.*)\bdry\b", re.IGNORECASE
)
_WITHOUT_RIDER = re.compile(r"\bwithout (?:an? )?riders?\b", re.IGNORECASE)  # was taught

NO_WORD = "the question {text!r} has no word"
TWO_QUESTIONS = "{text!r} contains {count} questions: ask them one by one, as a list of questions"
NEGATED = "the model does not understand {word!r} in a question: ask without it"
NOT_YES_NO = "not a yes/no question"


@dataclass(frozen=True)
class QuestionForm:
    """How a question is asked.

    Attributes:
        text: what the model is asked: positive, and without "answer yes or no".
        is_yes_no: whether the answer is yes or no.
        is_negated: whether "yes" to the question is "no" to `text`.
        problem: why the question cannot be answered; None if it can be.
    """

    text: str
    is_yes_no: bool
    is_negated: bool = False
    problem: str | None = None


@lru_cache(maxsize=4096)  # the same questions are usually asked about many images
def question_form(question: str) -> QuestionForm:
    """The form of a question, by its words alone."""
    question = question.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be tokenized
    text, is_yes_no = _without_instruction(_GREETING.sub("", question))
    text = _TAG.sub("", _OR_NOT.sub(r"\1", text))  # "Is it wet or not?"
    asked = _rephrase(text)
    if not is_yes_no or is_yes_no_question(asked):  # "Traffic: yes or no?" is not "What is the traffic like?"
        text = asked
    is_yes_no = is_yes_no or is_yes_no_question(text)
    if not has_word(text):
        return QuestionForm(text, is_yes_no, problem=NO_WORD.format(text=question[:80]))
    if (count := _count_questions(text)) > 1:
        return QuestionForm(text, is_yes_no, problem=TWO_QUESTIONS.format(text=question[:200], count=count))
    if negations := _find_negations(text):
        return QuestionForm(text, is_yes_no, problem=NEGATED.format(word=negations[0]))
    positive, count = _NO.subn("any", text)
    if count and not (is_yes_no and count == 1 and _STARTS_WITH_NO.match(text)):
        return QuestionForm(text, is_yes_no, problem=NEGATED.format(word="no"))
    is_dry = is_yes_no and _DRY.match(positive) is not None
    return QuestionForm(_DRY.sub(r"\1wet", positive) if is_dry else positive, is_yes_no, (count == 1) != is_dry)


def question_as_asked(text: str) -> str:
    """The words in which the pipeline asks a question, for training; its own words if negated or with a problem."""
    form = question_form(text)
    return text if form.problem or form.is_negated else form.text


def _without_instruction(text: str) -> tuple[str, bool]:
    """A question without "answer yes or no" in any wording, and whether it was there."""
    plain = text.translate(_NO_APOSTROPHES)
    if not _YES_OR_NO.search(plain):
        return text, False
    clauses = _SEPARATOR.split(_YES_OR_NO.sub(" ", plain))  # clause, separator, clause, ...
    for i in range(0, len(clauses), 2):
        if set(clauses[i].casefold().split()) <= _INSTRUCTION:
            clauses[i : i + 2] = [" "] * len(clauses[i : i + 2])  # without the separator that follows
    return " ".join("".join(clauses).split()).strip(_SEPARATORS), True


def _count_questions(text: str) -> int:
    """The number of questions in a text: 2 for "Is there a car? Is it snowing?" and "Is there a car, and where?"."""
    text = _AND_ASKS.sub("; ", text.casefold().translate(_NO_APOSTROPHES))
    first, *rest = _SEPARATOR.split(text)  # clause, separator, clause, ...
    count = int(_is_question(_without_fillers(first)))
    for separator, clause in zip(rest[::2], rest[1::2]):
        words = _without_fillers(clause)
        is_relative = separator.strip() == "," and words[:1] and words[0] in ("which", "who", "whose")
        is_short = 0 < len(words) < 3 and words[0] in _QUESTION_WORDS - {"when"}  # "Where?", "How many?"
        count += not is_relative and (is_short or _is_question(words))
    return count


def _without_fillers(clause: str) -> list[str]:
    """The words of a clause without fillers at its beginning: "please is it" is "is it"."""
    return list(dropwhile(_FILLERS.__contains__, clause.split()))


def _is_question(words: list[str]) -> bool:
    """Whether a clause can stand alone as a question. Two words, such as "is it", belong to another clause."""
    if len(words) < 3:
        return False
    if words[0] in _AUXILIARIES:
        return words[1] not in ("you", "i") or words[2] in _PERCEIVING  # not "can you tell me", "may I ask"
    is_condition = words[0] == "when" and words[1] not in _AUXILIARIES  # "When it is dark, are the lights on?"
    return words[0] in _QUESTION_WORDS and not is_condition and bool(_AUXILIARIES & set(words[1:]))


def _find_negations(text: str) -> list[str]:
    """The words of a question that negate it, other than "no" before a noun."""
    text = _WITHOUT_RIDER.sub("", text.casefold().replace("\u2019", "'"))
    words = re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?", text)
    found = [w for w in words if w in _NEGATIONS or w.endswith(("n't", "'nt")) or w in _NEGATED_AUXILIARIES]
    return found + re.findall(r"\bno one\b", text)


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
    text = _simplify(_rephrase(text)).casefold()
    if _YES_OR_NO.search(text):
        return True
    if _PROPERTY.match(text) or _ALTERNATIVES.fullmatch(text) or _PAIR.match(text):
        return False
    clauses = [words for clause in re.split(f"[,;:{QUESTION_END.strip()}]", text) if (words := clause.split())]
    decisions = (_asks_yes_no(words, words is clauses[-1]) for words in clauses)
    return next((decision for decision in decisions if decision is not None), True)


def _rephrase(text: str) -> str:
    """The taught question that means the same as a text; the text itself if there is none."""
    if len(text) > 200:  # some patterns take a time that grows with the square of the length
        return text
    simple = _simplify(text)
    for pattern, taught in _REPHRASING:
        if match := pattern.fullmatch(simple):
            text = match.expand(taught)
            simple = _simplify(text)
    return text


def _simplify(text: str) -> str:
    """Text with single spaces, without apostrophes, "please" and closing punctuation: "what is it"."""
    text = " ".join(_POSSESSIVE.sub(" ", text).translate(_NO_APOSTROPHES).split()).strip(QUESTION_END)
    return _PLEASE.sub("", _CONTRACTION.sub(r"\1 is", text))


def _asks_yes_no(words: list[str], is_last: bool) -> bool | None:
    """Whether a clause asks for yes or no; None if it does not decide, like "There is a car" in "...; what is it?"."""
    words = list(dropwhile(_FILLERS.__contains__, words)) or [""]
    if words[0] in _AUXILIARIES and words[1:2] == ["you"]:  # "Could you describe it?" is a request
        rest = list(dropwhile(_FILLERS.__contains__, words[2:]))
        is_request = bool((_REQUESTS - {"find"}) & set(rest[:1])) or _asks_for_words(rest, _SAYING - {"see"})
        return not is_request
    first = words[0]
    if first in _AUXILIARIES:
        return True
    if first in _REQUESTS or _asks_for_words(words, _SAYING):
        return False
    if words[:4] == ["i", "want", "to", "know"]:
        return not _QUESTION_WORDS & set(words[4:5])
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


def words_at(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield for each token, at [start, end) of the text, the word that it comes from: all letters around it.

    Offsets of a rewritten word cover its last letter only, and one letter can become several tokens (U+FDFA). Takes
    time linear in the text, as the letters of a word are read once.
    """
    begin = stop = 0  # of the last word
    for start, end in spans:
        if not (begin <= start and end <= stop):
            begin, stop = start, end
            while 0 < begin < end and text[begin - 1].isalpha() and text[begin].isalpha():
                begin -= 1
            while 0 < stop < len(text) and text[stop - 1].isalpha() and text[stop].isalpha():
                stop += 1
        yield text[begin:stop]

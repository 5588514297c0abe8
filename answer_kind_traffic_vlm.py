"""What a question asks for: the words that its answer depends on, and the kind of an answer in words.

    "what color is the traffic light"   → red, yellow, green, none
    "how many lanes does the road have" → 1 to 6
    "how many cars are there"           → 0 to 6, many
    "what vehicles are there"           → a list of objects: "a car and a bus"
    "who is driving"                    → None: such questions were not taught
    "is the white van near the [UNK] parked" → the words "van" and "parked": the others only qualify

This module needs only the standard library, so that programs without torch decide as the pipeline does.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache


NONE = "none"  # the answer to a question about something that is not there
COLORS = ("white", "black", "gray", "silver", "red", "blue", "green", "yellow", "orange", "brown")
LIGHT_STATES = ("red", "yellow", "green")
SPEED_LIMITS = tuple(str(limit) for limit in range(10, 131, 10))
DIRECTIONS = ("toward us", "away from us", "to the side")
MAX_COUNT = 6
MANY = "many"  # more than MAX_COUNT
END = "[EOS]"  # after the last word of an answer
NUMBERS = frozenset(map(str, range(2, MAX_COUNT + 1)))  # "2 cars", but "a car"
PLACES = ("", "on the left", "in the center", "on the right")  # after a noun in a list
VEHICLES = ("car", "van", "bus", "truck", "trailer", "train", "rickshaw", "ambulance", "motorcycle", "bicycle")
SIGN_NAMES = ("traffic sign", "stop sign", "yield sign", "speed limit sign", "crosswalk sign")
# What a list of objects can hold: "a car, 2 trucks and red buses on the left".
VEHICLE_NOUNS = (
    *("vehicle", *VEHICLES),
    *"vehicles cars vans buses trucks trailers trains rickshaws ambulances motorcycles bicycles".split(),
    *("parked car", "parked cars", "emergency vehicle", "emergency vehicles"),
)
OTHER_NOUNS = tuple(
    "person pedestrian child rider animal dog cow horse deer crosswalk barrier fence pole building tree sidewalk road "
    "umbrella helmet people pedestrians children riders animals dogs cows horses crosswalks barriers fences poles "
    "buildings trees sidewalks roads umbrellas helmets sky glare".split()
    + [f"{name}{s}" for name in ("traffic light", "lane line", "traffic island", "traffic cone") for s in ("", "s")]
    + [f"{name}{s}" for name in SIGN_NAMES for s in ("", "s")]
    + ["road construction"]
)


@dataclass(frozen=True)
class AnswerKind:
    """What a question in words asks for.

    Attributes:
        name: as people read it: "a color".
        values: all possible answers; empty for lists of objects.
        nouns: of lists of objects.
    """

    name: str
    values: frozenset[str] = frozenset()
    nouns: tuple[str, ...] = ()

    def accepts(self, answer: str) -> bool:
        """Whether an answer is of this kind."""
        words = [*answer.replace(",", " ,").split(), END]
        return all(word in self.next_words(words[:i]) for i, word in enumerate(words))

    def next_words(self, words: list[str]) -> set[str]:
        """The words, or END, that can follow the first words of an answer; empty if no answer begins with these."""
        if END in words:
            return {END}
        if self.values:
            return _continuations([[*value.split(), END] for value in self.values], words)
        begin = max((i + 1 for i, word in enumerate(words) if word in ("and", ",")), default=0)
        return set(_next_in_item(self.nouns, tuple(words[begin:])))


def _continuations(phrases: list[list[str]], words: list[str]) -> set[str]:
    """The word that follows these words, in each phrase that begins with them."""
    size = len(words)
    return {phrase[size] for phrase in phrases if phrase[:size] == words and len(phrase) > size}


@lru_cache(maxsize=4096)  # asked for at each word of each answer
def _next_in_item(nouns: tuple[str, ...], prefix: tuple[str, ...]) -> frozenset[str]:
    """The words that can follow in an item of a list: "2 red cars on the left"."""
    words = list(prefix)
    after_noun = [[*place.split(), end] for place in PLACES for end in ("and", ",", END)]
    if not words:
        return frozenset({"a", "an", *NUMBERS, *COLORS} | _continuations([noun.split() for noun in nouns], []))
    rest = words[1:] if words[0] in {"a", "an", *NUMBERS} else words
    found = set(COLORS) if not rest else set()
    rest = rest[1:] if rest and rest[0] in COLORS else rest
    found |= _continuations([noun.split() for noun in nouns], rest)
    for noun in nouns:
        size = len(noun.split())
        if rest[:size] == noun.split():
            found |= _continuations(after_noun, rest[size:])
    return frozenset(found)


def _one_of(name: str, *values: str) -> AnswerKind:
    return AnswerKind(name, frozenset(values))


LANES = _one_of("a number of lanes", *map(str, range(1, 7)))
COUNT = _one_of("a number", *map(str, range(MAX_COUNT + 1)), MANY)
DENSITY = _one_of("a density of traffic", "empty", "light", "busy", "jam")
LIGHT = _one_of("a color of a traffic light", *LIGHT_STATES, NONE)
COLOR = _one_of("a color", *COLORS, NONE)
SPEED = _one_of("a speed limit", *SPEED_LIMITS, NONE)
SIGN = _one_of("a traffic sign", *SPEED_LIMITS, *SIGN_NAMES, NONE)
TIME = _one_of("a time of day", "day", "night", "dusk")
WEATHER = _one_of("a kind of weather", "clear", "cloudy", "rainy", "snowy", "foggy")
SURFACE = _one_of("a state of the road", "dry", "wet", "snowy")
STATUS = _one_of("a status", "parked", "moving", "standing", "walking", "with rider", "without rider", NONE)
FACING = _one_of("a direction", *DIRECTIONS, NONE)
SHAPE = _one_of("a course of the road", "straight", "left", "right")
ROAD_TYPES = ("city street", "residential street", "highway", "rural road", "intersection", "parking area")
ROAD = _one_of("a type of road", *ROAD_TYPES)
VIEW = _one_of("a view", "driver", "camera")
CLOSEST = _one_of("a vehicle", *VEHICLES, "parked car", "emergency vehicle", NONE)
SIDE = _one_of("a side", "left", "center", "right", NONE)
OBJECTS = AnswerKind("a list of objects", nouns=VEHICLE_NOUNS + OTHER_NOUNS)
ONLY_VEHICLES = AnswerKind("a list of vehicles", nouns=VEHICLE_NOUNS)

# A question asks for the first kind with a matching pattern. The words are those of the vocabulary: the tokenizer has
# replaced synonyms ("signal" by "light", "thing" by "object").
PATTERNS: tuple[tuple[AnswerKind, tuple[str, ...]], ...] = (
    (LANES, (r"(how many|number of|count)( the)? lanes?",)),
    (COUNT, (r"how many", r"number of", r"^(please )?count", r"you (please )?count")),
    (DENSITY, (r"how (much traffic|busy|heavy|is the traffic)", r"traffic (like|heavy)", r"describe the traffic$")),
    (LIGHT, (r"color .*lights?", r"lights? .*color", r"lights? (show|showing|say|red)", r"status of .*lights?$")),
    (COLOR, (r"color",)),
    (FACING, (r"facing",)),
    (SHAPE, (r"(way|direction|where) (does|do|is|will) (the|this) (road|street)", r"way the road")),
    # The name of a sign asks for its value, unless the question is where it is.
    (SIDE, (r"(which|what|the) (side|part)", r"where (is|are|does)(?! (we|you|i|this|that)\b)")),
    (SIDE, (r"where (can|do) (you|we|i) see", r"where (the|a) \w+( \w+){0,2} (is|are)", r"on the left .*or")),
    (SPEED, (r"speed limit", r"how fast (may|can|should|must) (we|i|you)", r"how fast are we allowed")),
    (SIGN, (r"traffic signs?", r"signs? (say|mean|show|is|are)", r"(which|what)( type of)? signs?", r"written on")),
    (
        TIME,
        (
            r"time of day",
            r"what is the time",
            r"what time( is it)?",
            r"(day|night|dusk) or .*",
            r"it (day|night|dusk) .*or",
            r"when was",
        ),
    ),
    (WEATHER, (r"weather", r"it (clear|cloudy|rainy|snowy|foggy) .*or", r"sky (like|clear|cloudy)")),
    (SURFACE, (r"(road|street|surface) (like|dry|wet|snowy)", r"how is the (road|street)", r"road surface")),
    (SURFACE, (r"status of the road", r"it (dry|wet) .*or")),
    (STATUS, (r"status",)),
    (ROAD, (r"(which|what|the)( type of)? (road|street) (is|are|do|was)", r"type of (road|street)")),
    (VIEW, (r"view .*(driver|camera)", r"driver or by", r"which view")),
    (CLOSEST, (r"closest",)),
    (ONLY_VEHICLES, (r"(what|which)( types? of| other)? vehicles?",)),
    (OBJECTS, (r"^((can|could) you )?(please )?(describe|list|name)",)),
    (
        OBJECTS,
        (r"what (is|are)( there)? (ahead|straight|behind|in|to the|on|at the|near|close|far|next|visible|there)",),
    ),
    (OBJECTS, (r"what (is|are)( there)? (left|right|around|crossing|walking|moving)",)),
    (OBJECTS, (r"what (can|do|did) (you|we|i) see", r"what you see", r"image show")),
    (OBJECTS, (r"(what|which)( types? of| other)? (objects?|animals?|people)",)),
    (OBJECTS, (r"what (is|are) (the )?((?!of\b)\w+ ){0,3}objects?", r"what is (it|this|that)$", r"is what$")),
)
_COMPILED = [(kind, re.compile("|".join(rf"(?:{p}(?!\w))" for p in patterns))) for kind, patterns in PATTERNS]


@lru_cache(maxsize=4096)  # the same questions are usually asked about many images
def answer_kind(words: str) -> AnswerKind | None:
    """The kind of answer that a question in words asks for.

    Args:
        words: the words that the tokenizer reads: "what color is the traffic light".

    Returns:
        None for a question of a kind that was not taught.
    """
    words = words.replace(" 's", " is")
    kind = next((kind for kind, pattern in _COMPILED if pattern.search(words)), None)
    if kind is not None and " or " in words:  # "is it sunny or rainy": one of these
        named = {value for value in kind.values if re.search(rf"\b{value}\b", words)}
        return AnswerKind(kind.name, frozenset(named | ({NONE} & kind.values))) if len(named) > 1 else kind
    return kind


# Kind of question: an example.
EXAMPLE_QUESTIONS = {
    "is it there": "Is there a bus?",
    "is it at a place": "Is there a car on the left?",
    "side": "On which side is the truck?",
    "number": "How many cars are there?",
    "comparison": "Are there more cars than people?",
    "state of a light": "What color is the traffic light?",
    "sign": "What is the speed limit?",
    "weather": "Is it raining?",
    "time of day": "Is it night?",
    "road": "Is the road wet?",
    "traffic": "Is there a traffic jam?",
    "type of road": "Is this a highway?",
    "scene": "What is ahead?",
}


def known_nouns(taught: Collection[str] | None) -> list[str]:
    """The nouns that a model can be asked about, in the singular; `taught`: its words, None if they are not known."""
    nouns = VEHICLE_NOUNS + OTHER_NOUNS
    is_known = {noun: taught is None or all(word in taught for word in noun.split()) for noun in nouns}
    plurals = {noun + ending for noun in nouns for ending in ("s", "es")} | {"people", "children"}
    return [noun for noun in nouns if is_known[noun] and noun not in plurals]


# Words of the vocabulary that many questions teach, so that they are never reported as untaught.
FUNCTION_WORDS = frozenset(
    """
    a an the this that those it its they them their there here i me my we us you your
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
_BE = frozenset("is are was were".split())
_AUXILIARIES = frozenset("do does did has have had can will should may must".split())
_PRONOUNS = frozenset("it this that these those we you i they".split())
_SEEING = frozenset("see have has show".split())  # what is seen follows
# Before a noun; they are skipped.
_DETERMINERS = _PRONOUNS | frozenset(
    """
    a an the any some its my your their all both each every another other more many most fewer less same of just still
    now there visible first second third possible important main current normal likely
    """.split()
)
# After a noun: where it is, which only qualifies. Function words end a noun, too.
_PLACES = frozenset(
    "ahead left right front back center near far close closer straight behind away next side clearly".split()
)
_CLAUSE_ENDS = frozenset([*".,;:", "and", "or", "like"])
# A verb after a noun: "a person smoking", "the lane blocked"; these three have no ending.
_PARTICIPLE = re.compile(r"(?!(?:building|parking|red|speed)$)\w+(?:ing|ed)|broken|fallen|hit")


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
        is_there = (word == "there" and before in _BE) or (word in _BE | {"be", "been"} and before == "there")
        is_of = word == "of" and before in ("number", "color")
        is_many = word == "many" and before in ("how", "as")
        if is_there or is_of or is_many or (word in _SEEING and after != "to"):
            found |= _nouns(tokens, i + 1)
        elif word == "any" or (word in _BE and after != "there"):
            found |= _nouns(tokens, i + 1, has_predicate=True, has_preposition=after in _PRONOUNS)
        elif word in _AUXILIARIES and before in _CLAUSE_ENDS | {""} and after not in ("there", "you", "we", "i"):
            found |= _nouns(tokens, i + 1, has_predicate=True)
    return sorted(found)


def _nouns(tokens: Sequence[str], start: int, has_predicate: bool = False, has_preposition: bool = False) -> set[int]:
    """The places of the heads of the nouns that begin at `start`: "a white [van] or a [bus] near the kerb".

    Args:
        has_predicate: a word may be said of the noun: "the [lane] [blocked]".
        has_preposition: the noun may follow a preposition: "we in a [tunnel]".
    """
    found: set[int] = set()
    skipped = _DETERMINERS | {"be", "been"} | (FUNCTION_WORDS - _BE - _AUXILIARIES if has_preposition else frozenset())
    while True:
        while start < len(tokens) and (tokens[start] in skipped or tokens[start].isdigit()):
            start += 1
        end = start
        while end < len(tokens) and not _ends_noun(tokens[end]):
            end += 1
        if end == start:
            return found
        found.add(end - 1)
        is_verb = _PARTICIPLE.fullmatch(tokens[end - 1]) is not None
        is_last = end == len(tokens) or tokens[end] in _CLAUSE_ENDS
        if end - 1 > start and (is_verb or (has_predicate and is_last)):
            found.add(end - 2)  # what it is said of
        if is_verb and tokens[end : end + 1] in (["a"], ["an"], ["the"]):
            found |= _nouns(tokens, end)  # its object: "wearing a [belt]"
        after = list(tokens[end : end + 2])
        if has_predicate and after[:1] in (["of"], ["be"], ["been"]):  # "the door of the car [open]", "it be [safe]"
            start = end + 1
        elif after[:1] in ([","], ["and"], ["or"]):
            start = end + (2 if after[1:] in (["and"], ["or"]) else 1)
        else:
            return found


def _ends_noun(word: str) -> bool:
    is_sign = not word[:1].isalnum() and word != "[UNK]"
    return word in FUNCTION_WORDS or word in _PLACES or is_sign or word.isdigit()

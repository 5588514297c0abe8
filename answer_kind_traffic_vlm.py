"""The kind of answer that a question in words asks for, and the answers of each kind.

    "what color is the traffic light"   → red, yellow, green, none
    "how many lanes does the road have" → 1 to 6
    "what vehicles are there"           → a list of objects: "a car and a bus"
    "who is driving"                    → None: such questions were not taught

This module needs only the standard library, so that programs without torch decide as the pipeline does.
"""

import re
from dataclasses import dataclass
from functools import lru_cache


NONE = "none"  # the answer to a question about something that is not there
COLORS = ("white", "black", "gray", "silver", "red", "blue", "green", "yellow", "orange", "brown")
LIGHT_STATES = ("red", "yellow", "green")
SPEED_LIMITS = tuple(str(limit) for limit in range(10, 131, 10))
DIRECTIONS = ("toward us", "away from us", "to the side")
MAX_COUNT = 10
# The first word of a list of objects: "cars and a bus", "2 people", "red cars", "a truck".
FIRST_NOUNS = frozenset(
    "vehicles cars parked vans buses trucks trailers trains rickshaws ambulances emergency motorcycles bicycles "
    "people pedestrians children riders animals dogs cows horses deer traffic stop yield speed crosswalk crosswalks "
    "barriers road fences poles buildings trees sidewalks roads sky lane glare umbrellas helmets".split()
)


@dataclass(frozen=True)
class AnswerKind:
    """What a question in words asks for.

    Attributes:
        name: as people read it: "a color".
        values: all possible answers; None for answers of many forms, of which only the first word is limited.
        first_words: the words that an answer can begin with.
    """

    name: str
    values: frozenset[str] | None
    first_words: frozenset[str]

    def accepts(self, answer: str) -> bool:
        """Whether an answer is of this kind."""
        if self.values is not None:
            return answer in self.values
        return answer.split(" ")[0] in self.first_words and not answer.isdecimal()


def _one_of(name: str, *values: str) -> AnswerKind:
    return AnswerKind(name, frozenset(values), frozenset(value.split()[0] for value in values))


LANES = _one_of("a number of lanes", *map(str, range(1, 7)))
COUNT = _one_of("a number", *map(str, range(MAX_COUNT + 1)))
DENSITY = _one_of("how busy the traffic is", "empty", "light", "busy", "jam")
LIGHT = _one_of("the color of a traffic light", *LIGHT_STATES, NONE)
COLOR = _one_of("a color", *COLORS, NONE)
SPEED = _one_of("a speed limit", *SPEED_LIMITS, NONE)
SIGN_NAMES = ("traffic sign", "stop sign", "yield sign", "speed limit sign", "crosswalk sign")
SIGN = _one_of("a traffic sign", *SPEED_LIMITS, *SIGN_NAMES, NONE)
TIME = _one_of("a time of day", "day", "night", "dusk")
WEATHER = _one_of("the weather", "clear", "cloudy", "rainy", "snowy", "foggy")
SURFACE = _one_of("the state of the road", "dry", "wet", "snowy")
STATUS = _one_of("a status", "parked", "moving", "standing", "walking", "with rider", "without rider", NONE)
FACING = _one_of("a direction", *DIRECTIONS, NONE)
SHAPE = _one_of("the way of the road", "straight", "left", "right")
ROAD_TYPES = ("city street", "residential street", "highway", "rural road", "intersection", "parking area")
ROAD = _one_of("a type of road", *ROAD_TYPES)
VIEW = _one_of("a view", "driver", "camera")
VEHICLES = ("car", "van", "bus", "truck", "trailer", "train", "rickshaw", "ambulance", "motorcycle", "bicycle")
CLOSEST = _one_of("a vehicle", *VEHICLES, "parked car", "emergency vehicle", NONE)
SIDE = _one_of("a side", "left", "center", "right", NONE)
NUMBERS = frozenset(map(str, range(2, MAX_COUNT + 1)))
OBJECTS = AnswerKind("a list of objects", None, frozenset({"a", "an", NONE, *COLORS}) | NUMBERS | FIRST_NOUNS)

# The first kind decides of which a pattern matches. The words are those of the vocabulary: the tokenizer has replaced
# synonyms ("signal" by "light", "thing" by "object").
PATTERNS: tuple[tuple[AnswerKind, tuple[str, ...]], ...] = (
    (LANES, (r"(how many|number of|count)( the)? lanes?",)),
    (COUNT, (r"how many", r"number of", r"^(please )?count")),
    (DENSITY, (r"how (much traffic|busy|heavy|is the traffic)", r"traffic (like|heavy)", r"describe the traffic$")),
    (LIGHT, (r"color .*lights?", r"lights? .*color", r"lights? (show|showing|say|red)", r"status of .*lights?$")),
    (COLOR, (r"color",)),
    (SPEED, (r"speed limit", r"how fast (may|can|should|must|are) (we|i|you)")),
    (SIGN, (r"traffic sign", r"signs? (say|mean|show|is|are)", r"(which|what)( type of)? signs?", r"written on")),
    (TIME, (r"time of day", r"what is the time", r"what time( is it)?", r"it (day|night|dusk) .*or", r"when was")),
    (WEATHER, (r"weather", r"it (clear|cloudy|rainy|snowy|foggy) .*or", r"sky (like|clear|cloudy)")),
    (FACING, (r"facing",)),
    (SHAPE, (r"(way|direction|where) (does|do|is|will) (the|this) (road|street)", r"way the road")),
    (SIDE, (r"(which|what|the) (side|part)", r"where (is|are|does)(?! (we|you|i|this|that)\b)")),
    (SIDE, (r"where (can|do) (you|we|i) see", r"where (the|a) \w+( \w+)? (is|are)", r"on the left .*or")),
    (SURFACE, (r"(road|street|surface) (like|dry|wet|snowy)", r"how is the (road|street)", r"road surface")),
    (SURFACE, (r"status of the road", r"it (dry|wet) .*or")),
    (STATUS, (r"status",)),
    (ROAD, (r"(which|what|the)( type of)? (road|street) (is|are|do|was)", r"type of (road|street)")),
    (VIEW, (r"view .*(driver|camera)", r"driver or by", r"which view")),
    (CLOSEST, (r"closest",)),
    (OBJECTS, (r"^((can|could) you )?(please )?(describe|list|name)",)),
    (
        OBJECTS,
        (r"what (is|are)( there)? (ahead|straight|behind|in|to the|on|at the|near|close|far|next|visible|there)",),
    ),
    (OBJECTS, (r"what (is|are)( there)? (left|right|around|crossing|walking|moving)",)),
    (OBJECTS, (r"what (can|do|did) (you|we|i) see", r"what you see", r"image show")),
    (OBJECTS, (r"(what|which)( types? of| other)? (objects?|vehicles?|animals?|people)",)),
    (OBJECTS, (r"what (is|are) (the )?((?!of\b)\w+ ){0,3}objects?", r"what is (it|this|that)$", r"is what$")),
)
_COMPILED = [(kind, re.compile("|".join(rf"(?:{p}(?!\w))" for p in patterns))) for kind, patterns in PATTERNS]
_CHOICE = re.compile(r"(?:please )?(?:is|are|was|were)\b.*\bor\b")


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
    if kind is None and _CHOICE.match(words):  # "is it a bus or a truck"
        return AnswerKind("one of the alternatives", None, frozenset(words.split()) - {"is", "are", "or"})
    return kind

"""Questions in other words: what people type becomes the question that the weights were taught.

    "Weather?"                → "What is the weather"
    "Is the road wet or dry?" → "What is the road like"
    "Do cars outnumber buses" → "Are there more cars than buses"

Only questions whose every word is accounted for are changed. Phrases within a question ("a rainy day", "a road sign")
are rewritten by the tokenizer. docs/words.md has what both bring.
"""

import re


QUESTION_END = " .?!…。？！"  # removed from the end of a question and replaced by one "?"
NO_APOSTROPHES = str.maketrans("", "", "'\u2018\u2019\u02bc\u2032\u00b4\u0060\"\u201c\u201d")

_REQUEST = (
    r"(?:and |what about )?(?:(?:(?:can|could|would) you )?(?:please )?(?:tell|give|show)(?: me| us)? )?(?:the )?"
)
# Words that are no part of a noun: "bus stop location", but not "should we hold position".
_OTHERS = (
    "(?:is|are|was|were|am|do|does|did|has|have|had|can|could|will|would|shall|should|may|might|must)(?:nt)?|cant|wont|"
    "whats?|which|who|where|why|how|when|say|tell|list|name|count|see|describe|please|there|it|i|we|you|they|he|she|"
    "the|an?|any|this|that|these|those|its|my|our|your|in|on|at|of|to|from|for|with|by|as|and|or|than|no|not|if|"
    r"more|most|fewer|less|many|several|some|all|every|each|both|(?:any|some|every|no)(?:one|body|thing)|\d+|"
    "one|two|three|four|five|six|main|other|same|current|exact"
)
_WORD = rf"(?!(?:{_OTHERS})\b)\w+"
_NOUN = rf"({_WORD}(?: {_WORD}){{0,2}})"
_NOUNS = rf"(?:{_WORD} ){{0,2}}(?!(?:{_OTHERS})\b)(?:\w+(?<!bu)s|people|children|men|women|deer|sheep)"
_HERE = r"(?:,? (?:in|on|of) (?:the|this) (?:image|picture|photo|frame|scene))?"
_VIEW = "(?:(?:the|this) (?:image|picture|photo|frame|scene)|view|sight)"
_LEFT = "(?:left|right)(?: side)?"
# "Is the car turning left or right?" asks for a direction, not for a place.
_TURNS = r"(?:.*\b)?(?:(?!parking|standing|building)\w+ing|turn|curve|bend|road|street|arrow)\b"
_STATES = "(?:parked|moving|stopped|driving|standing|walking)"
# Taught form: regular expressions of simplified questions that mean the same. They are tried in this order, and what
# one returns is tried on the next ones.
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
        r"(?:in|on) (?:which|what) (?:part|side) of the (?:image|picture|photo|frame|scene) is (.+)",
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
_REPHRASING = [(re.compile(pattern), taught) for taught, patterns in _REPHRASED.items() for pattern in patterns]


def rephrase(text: str) -> str:
    """The question that was taught in place of one that means the same; other texts stay as they are."""
    if len(text) > 200:  # some patterns take a time that grows with the square of the length
        return text
    simple = simplify(text)
    for pattern, taught in _REPHRASING:
        if match := pattern.fullmatch(simple):
            text = match.expand(taught)
            simple = simplify(text)
    return text


def simplify(text: str) -> str:
    """Lower-case text with single spaces, without apostrophes, "please" and the mark at its end: "what is it"."""
    text = re.sub(r"(?<=\w)['\u2018\u2019]s (?=(?:colou?r|status|state|position|location)\b)", " ", text.casefold())
    text = " ".join(text.translate(NO_APOSTROPHES).split()).strip(QUESTION_END)
    text = re.sub(r"^(what|where|how|when)s\b", r"\1 is", text)
    return re.sub(",? please$", "", text.removeprefix("please "))

"""Tokenizer of Traffic VLM: a word-level vocabulary of 500 tokens for questions about traffic.

What is special here:
- the backend does all text processing, so `tokenizer.json` alone gives the same ids as this class;
- close synonyms, other spellings and contractions are rewritten to a word of the vocabulary and need no entry;
- the words "yes" and "no" become `[YES]` and `[NO]`. These tokens are not special: skipping special tokens keeps them,
  and they are decoded as "yes" and "no";
- a number outside the vocabulary is split into its digits, so no number is unknown;
- a word that is not in the vocabulary becomes `[UNK]` and is never dropped; the processor names such words;
- 20 entries are reserved for a user's own words, which `with_words` adds.
"""

import re
import unicodedata
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[SOS]", "[EOS]"]
ANSWER_TOKENS = ["[YES]", "[NO]"]
RESERVED_TOKENS = [f"[RESERVED_{number}]" for number in range(20)]  # no text becomes one: brackets are removed

# A word ends where no letter follows. \b would miss the end of "car" in "car2", which is split later.
_START, _END = r"(?<![\p{L}\p{M}])", r"(?![\p{L}\p{M}])"

# The rules that rewrite lower-case text apply in the order in which they stand here: spelling, phrases, nouns with
# their plurals, and other words. Each reads what those before it have made of the text.

# Other spellings of the same words: regular expression -> replacement.
_SPELLING = [
    (_START + r"wo(?=n't" + _END + ")", "will"),
    (r"(?<=\bcan)(?:'t|not)" + _END + r"|(?<!\bca)n't" + _END, " not"),
    (r"(?<=\bis|\bare|\bwas|\bwere|\bdo|\bdoes|\bdid|\bhas|\bhave|\bcould|\bwould|\bshould)nt" + _END, " not"),
    (r"'re" + _END, " are"),
    (r"'ll" + _END, " will"),
    (r"'ve" + _END, " have"),
    (r"(?<=\bi)'m" + _END, " am"),
    (r"(?<=[\p{L}\p{M}])\((?=e?s\))|(?<=[\p{L}\p{M}]\(s|[\p{L}\p{M}]\(es)\)", ""),  # vehicle(s), bus(es)
    (r"[\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff]", ""),  # joiners, direction marks, variation selectors
    (r"km ?/ ?h" + _END + "|" + _START + "kmp?h" + _END, "kph"),
    (r"!+|\.{2,}", "."),
    ("&", " and "),
    # Remove quotes, brackets, hyphens, and every apostrophe except that of "driver's".
    (r"[\"\u201c-\u201f\u00ab\u00bb\u2039\u203a()\[\]{}*_~^|\\#/\u2010-\u2015\u2022-]|<(?=\p{L})|(?<=\p{L})>", " "),
    (r"'(?!s" + _END + r")|(?<![\p{L}\p{M}])'", " "),
]

_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
# "twenty-five" is 25, not 20 and 5.
_SPELLING += [(f"{_START}{ten} (?=(?:{'|'.join(_NUMBERS[1:10])}){_END})", str(n)) for n, ten in enumerate(_TENS, 2)]
_SPELLING += [(f"(?<=[2-9])one{_END}", "1")]

_AT_END = r"(?=(?:,? please)? ?[?.]?$)"
_HERE_AT_END = rf"(?=(?: here| (?:in|on|at) [^?.,]*)?{_AT_END})"
_NO_OBJECT = "(?! (?:light|sign|signal|cone|island|camera))"  # not "a lot of traffic lights"
# Not "turn right here", nor "on the right ahead".
_NO_TURN = "(?<!the |to |turn |turns |turning |turned |go |goes |going |steer |keep |look |or )"
# Taught words: regular expression of phrases that the weights misread. "Is it a rainy day?" was answered as "Is it
# day?", and "a road sign" as "a road".
_PHRASES = {
    # weather, time of day, road and traffic
    "rainy": "a rainy day|wet weather|(?<=weather )wet|(?<=it )pouring(?: down)?(?: with)?(?: rain)?",
    "snowy": "a snowy day",
    "foggy": "a (?:foggy|misty|hazy) day",
    "cloudy": "an? (?:cloudy|overcast) day|(?<=sky )gr[ae]y|(?<=it )gr[ae]y outside",
    "sunny": "a sunny day",
    "it sunny": r"(?<=\bis )the sun (?:out|shining)",
    "is it cloudy": "are there (?:any |many |some )?clouds(?: in the sky)?",
    "clear": "a clear day|(?<=sky )blue",
    "rain": "rainfall",
    "fog": "foggy conditions",
    "it day": rf"it (?:still )?(?:light|bright)(?: out(?:side|doors)?)?{_AT_END}",
    "is the road": "are the (?:roads|streets)(?= (?:wet|dry|snowy|icy|empty|busy))",
    "road": "(?:pavement|ground)(?= (?:look )?(?:wet|dry|snowy|icy))",
    # Not "the sky above the road clear", nor "the road clear of snow".
    "road empty": r"(?<=(?:is|was) (?:the|this|our) )(?:road|street) (?:clear|free|deserted)"
    r"(?! (?:of|for|to|from|enough|and|or)\b)",
    "are there any vehicles": f"(?<!why )is there (?:any |some )?traffic{_HERE_AT_END}",
    "see any vehicles": f"see (?:any |some )?traffic{_HERE_AT_END}",
    "heavy traffic": f"(?:a lot of|lots of|dense) traffic{_NO_OBJECT}",
    "light traffic": f"(?:only )?(?:a )?little traffic{_NO_OBJECT}",
    "is there a traffic jam": "are there (?:any )?(?:traffic )?jams|is (?:the )?traffic (?:jammed|stuck)",
    "there a traffic jam": "there (?:any |a |much |a lot of )?(?:traffic )?(?:congestion|gridlock|tailback|jam)",
    "a city street": "an urban (?:road|street)",
    "city street": "(?:urban|city) (?:road|street)",
    "rural road": "country road",
    "road construction": "(?:an? )?(?:road )?(?:construction|work) (?:zone|site|area|works?)"
    rf"|(?<=there )construction(?:(?= (?:here|ahead|in|on|at))|{_AT_END})",
    # numbers
    "many": r"(?:a lot|(?<!parking )lots|plenty) of(?! (?:snow|rain|fog|ice|water|mud|smoke|dust|space|room)\b)"
    "|numerous",
    "any": r"(?:at least|even) one(?!,? (?:of|or|and|more|hundred|third|half|way|meter|metre|mile|second|minute)\b)"
    "|one or more(?! than)|some",
    "more than one": r"multiple(?! (?:lane|vehicle|car)\b)",
    "more than 2": "several(?! (?:hundred|more))",
    # objects
    # Not "a pedestrian crossing our path", and ahead of us it may be a person.
    "crosswalk": "pedestrian crosswalk|(?<=there a |there any )(?:pedestrian )?crossing(?: for pedestrians)?"
    f"(?:{_AT_END}|(?= (?:here|visible|sign)| (?:in|on) th(?:e|is) (?:image|picture|photo|scene|frame)))"
    "|(?<=there a |there any )crossing(?= ahead)",
    "crosswalks": "pedestrian crossings",
    "buses": "coaches|shuttles|(?:coach|shuttle) buses",
    "bus": "(?:coach|shuttle)(?: bus)?",
    # ways to ask
    "where": "where exactly|whereabouts",
    "ahead": "up ahead",
    "on": "(?<!ed |ing |pull |turn |roll |flip |run )over on(?= the (?:left|right))",
    "now": f"{_NO_TURN}right now|at (?:the|this) moment",
    "straight": f"{_NO_TURN}right(?= (?:in front|ahead))",
}

# Word of the vocabulary: regular expression of its synonyms. A plural "s" is kept: "bikes" becomes "bicycles".
_SYNONYMS = {
    # road users and vehicles
    "motorcycle rider": "motorcyclist|motorbiker|biker",
    "truck": "(?:pick ?up |semi |semi trailer )?truck|lorry|pickup|heavy goods vehicle|hgv"
    "|semi(?! (?:trailer|auto|circ|trans|detached))",
    "fire truck": "fire ?engine|firetruck",
    "motorcycle": "motor(?:bike| cycle)|scooter|moped|motor(?!s? vehicle)|two wheeler",
    "bicycle": "bike|push ?bike|(?<!light |signal )cycle|cycling(?= (?:lane|path|track|route))",
    "car": "automobile|hatchback|sedan|suv",
    "van": "minivan",
    "train": "tram|streetcar|trolley",
    "rickshaw": "auto ?rickshaw|tuk ?tuk|three wheeler",
    "object": "obj|element|thing",
    # roads and roadside objects
    "road": "roadway|carriageway|asphalt|tarmac",
    "highway": "motorway|freeway|expressway",
    "crosswalk": "zebra crossing",
    "sidewalk": "pavement|footpath|footway|walkway",
    "parking area": "parking lot|car park",
    "curb": "kerb",
    "curve": "bend",
    "line": "marking|queue",
    "barrier": "guard ?rail|railing|crash barrier",
    "pole": "(?<!lamp )post(?! office)|pillar|bollard",
    "building": "house|shop|store|tower|skyscraper",
    "traffic sign": "(?:road|street) sign",
    "sign": "signboard|signpost|billboard|(?<!on )board",
    "traffic light": "stop ?light|traffic signal",
    "front light": "headlight|headlamp",
    "street light": "streetlight|street ?lamp|lamp ?post",
    "light": "lamp|signal",
    # other words
    "color": "colour",
    "behavior": "behaviour",
    "center": "centre",
    "side": "edge",
    "area": "zone|site",
    "location": "position",
    "time": "moment",
    "type": "kind|sort",
    "stop": "halt",
    "show": "display|indicate|contain",
}

# Words of the vocabulary: regular expression of the exact words that they replace, without an added plural "s".
_WHOLE_WORDS = {
    # road users and vehicles
    "a person": "someone|somebody|anyone|anybody",
    "rider of a bicycle": "(?:bi)?cyclist|bicycle rider",  # recognized better than "cyclist"
    "riders of bicycles": "(?:bi)?cyclists|bicycle riders",
    "person": "human|individual|passenger(?! (?:car|side|seat|door|vehicle))",
    "people": "persons|humans|individuals|folks|men|women|passengers",
    "man": "guy|gentleman",
    "woman": "lady",
    "child": "kid|boy|girl",
    "children": "kids|boys|girls",
    "police": "police officers?|policem[ae]n|policewom[ae]n|officers?|cops?",
    "an object": "something|anything",
    "trucks": "lorries",
    "bus": "minibus",
    "buses": "minibuses|busses",
    # roads, signs and places
    "an intersection": "a (?:junction|cross ?roads?)",
    "intersection": "junctions?|cross ?roads?",
    "road construction": "road ?works?",
    "road": "drive?able (?:area|surface|space|road)",
    "traffic camera": "cctv(?: camera)?|(?:surveillance|security) camera",
    "vegetation": "bush|bushes|shrubs|plants|greenery",
    "speed limit": "(?:maximum|max|highest|top) (?:allowed |permitted )?speed(?: limit)?",
    "city": "urban",
    "rural area": "countryside",
    "way": "(?<!bicycle |bike |foot )path",
    "near": "nearby",
    "next to": "beside|alongside|adjacent to",
    "between": "surrounded by",
    "in": "inside|within|during",
    "here": "anywhere|somewhere",
    "sky": "skies",
    "out": "outside",
    "on": "onto|(?<!road |street |scene |area )(?:lit|illuminated)",
    "over": "above|higher than",
    "under": "underneath|beneath|below|lower than",
    "past": "beyond",
    "center": "middle",
    "ahead": "forwards?",
    "back": "rear|backwards?",
    "toward": "towards",
    "straight": "directly",
    "closer": "nearer",
    "closest": "nearest",
    "located": "positioned|situated",
    # colors, weather, light
    "color": "colou?rs",
    "gray": "grey",
    "cloudy": "overcast",
    "yellow": "amber",
    "rainy": "raining",
    "snowy": "snowing",
    "fog": "mist|haze",
    "foggy": "misty|hazy",
    "night": "night ?time",
    "day": "day ?(?:time|light)",
    "dusk": "sunset|twilight|evening",
    "dawn": "sunrise",
    # motion and actions
    "moving": "(?:in )?motion",
    "stopped": "halted|stationary",
    "still": "motionless",
    "approaching": "oncoming|coming",
    "fast": "quickly|rapidly",
    "slowing down": "decelerating|braking",
    "yield": "give way",
    "going": "getting(?= to )",
    "going on": "happening|occurring",
    "with": "carrying|holding",
    "see": "observe|notice|perceive|detect|find|(?<!parking |blind |clear |free |a |the )spot|recogni[sz]e",
    "seen": "observed|noticed|perceived|detected|spotted",
    "visible": "shown|displayed|depicted|(?<!at )present",
    "view": "observations?|visibility",
    "showing": "displaying|indicating",
    "look": "check",
    "describe": "explain",
    "name": "identify",
    "allowed": "permitted",
    # accidents and hazards
    "blocked": "obstructed|occluded|obscured|hidden|stuck|closed",
    "traffic jam": "(?:traffic )?(?:congestion|gridlock|tailback)",
    "traffic": "traffic flow",
    "fire": "flames?|burning",
    "crash": "crash(?:es|ed|ing)|collisions?|collid(?:e|es|ed|ing)",
    "prevented": "prevent",
    "steering": "steers?",
    "cause": "reasons?",
    # description
    "large": "big|huge",
    "heavy": "thick|dense",
    "busy": "congested|crowded|full of (?:traffic|vehicles)",
    "clear": "free",
    "possible": "potential",
    "important": "relevant",
    "status": "states?|conditions?",
    "scene": "scenario|situation",
    "image": "images?|pictures?|photos?|photographs?|pics?|frames?",
    # grammar
    "if": "whether",
    "say": "(?:tell|show) (?:me|us)(?= (?:if|whether|what|which|where|how))|let (?:me|us) know",
    "my": "our",
    "those": "these",
    "each": "every",
    "may": "might",
    "and": "but",
    "now": "currently|presently|at present",
    "about": "approximately|roughly",
    "just": "only|exactly",
    "most": "mostly|mainly|primarily",
    "least": "minimum",
    "like": "such as",
    "based on": "judging by",
    "the same as": "equal to",
    "the same": "equal",
    # numbers and answers
    "first": "1st",
    "second": "2nd",
    "third": "3rd",
    "meters": "metres",
    "100": "(?:(?:one|a) )?hundred",
    "[YES]": "yes|yeah|yep",
    "[NO]": "no|nope",
}
# A number word and its digits give the same token. The word "one" is not replaced because it is also a pronoun.
_WHOLE_WORDS |= {str(number): word for number, word in enumerate(_NUMBERS) if word != "one"}
_WHOLE_WORDS |= {str(10 * number): word for number, word in enumerate(_TENS, start=2)}


_MARK = "\u034f"  # an invisible combining mark


def _rewrites(vocab: Collection[str], added_words: Sequence[str]) -> list[tuple[str, str]]:
    """The rules of the normalizer, as (regular expression, replacement).

    Added words and their plurals are marked until all other rules have been applied. No rule reads a marked word,
    because a word does not end before a mark.
    """
    own = []
    for word in added_words:
        plural = word + ("es" if re.search(r"(?:s|x|z|ch|sh)$", word) else "s")  # boxes, cars
        if re.search(r"[^aeiou]y$", word):
            plural = word[:-1] + "ies"
        forms = word if plural in vocab else f"{word}|{plural}"
        own.append((f"{_START}(?:{forms}){_END}", word + _MARK))
    return [
        *_SPELLING,
        *own,
        *((f"{_START}(?:{phrases}){_END}", words) for words, phrases in _PHRASES.items()),
        *((f"{_START}(?:{synonyms})(?=s?{_END})", word) for word, synonyms in _SYNONYMS.items()),
        *((f"{_START}(?:{words}){_END}", word) for word, words in _WHOLE_WORDS.items()),
        *([(_MARK, "")] if own else []),
    ]


def _backend(vocab: dict[str, int] | None, added_words: Sequence[str]) -> Tokenizer:
    """The tokenizer of the library `tokenizers` with a vocabulary, as `tokenizer.json` holds it."""
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS + ANSWER_TOKENS)} if vocab is None else vocab
    backend = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence(
        [
            # Before NFKC, which turns some of these apostrophes into a space and an accent.
            normalizers.Replace(Regex(r"[\u2018-\u201b\u02bc\u2032\u00b4\u0060]"), "'"),
            normalizers.NFKC(),
            normalizers.Lowercase(),
            *(normalizers.Replace(Regex(pattern), text) for pattern, text in _rewrites(vocab, added_words)),
        ]
    )
    # Answer tokens, numbers of the vocabulary, other digits, words, runs of symbols (an emoji) and punctuation marks.
    numbers = sorted((word for word in vocab if word.isdecimal() and len(word) > 1), key=len, reverse=True)
    whole_numbers = [rf"(?<!\d)(?:{'|'.join(numbers)})(?!\d)"] if numbers else []
    patterns = [r"\[(?:YES|NO)\]", "'s", *whole_numbers, r"\d", r"[\p{L}\p{M}]+", r"[^\s\p{L}\p{M}\d\p{P}]+", r"\S"]
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(patterns)), behavior="removed", invert=True)
    backend.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=True),  # no word has the prefix; cleanup handles "." "," "?" "'s"
            decoders.Replace(Regex(r"^ (?=[;:])"), ""),
            decoders.Replace("[YES]", "yes"),
            decoders.Replace("[NO]", "no"),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[SOS] $A [EOS]",
        pair="[SOS] $A $B:1 [EOS]:1",
        special_tokens=[("[SOS]", vocab["[SOS]"]), ("[EOS]", vocab["[EOS]"])],
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ANSWER_TOKENS])
    return backend


class TrafficVLMTokenizer(PreTrainedTokenizerFast):
    """Word-level tokenizer: `tokenizer("Is there a car?")` gives `[SOS] is there a car ? [EOS]`.

    A pair is a question and its answer: `[SOS] question answer [EOS]`, as in training. Padding is on the left, as
    generation requires. The processor leaves out `[EOS]` for prompts.

    Args:
        vocab: word -> id, contiguous; 0 to 5 are `[PAD]`, `[UNK]`, `[SOS]`, `[EOS]`, `[YES]`, `[NO]`. None means these
            six tokens only. Ignored if `tokenizer_file` or `tokenizer_object` is given.
        added_words: the words of `vocab` that `with_words` added.
        kwargs: those of the library; `model_max_length` is the maximum number of tokens of a question with its answer.
    """

    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"
    _tokenizer: Any  # the backend, which the base class types as None

    def __init__(self, vocab: dict[str, int] | None = None, added_words: Sequence[str] = (), **kwargs: Any):
        if kwargs.get("tokenizer_object") is None and kwargs.get("tokenizer_file") is None:
            self._tokenizer = _backend(vocab, added_words)
        if added_words:  # saved in tokenizer_config.json: the library may rebuild the tokenizer from its vocabulary
            kwargs["added_words"] = list(added_words)
        kwargs.pop("dtype", None)  # of the model, which pipelines pass on; a tokenizer could not be saved with it
        tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[SOS]", "eos_token": "[EOS]"}
        super().__init__(**tokens | {"model_max_length": 128, "clean_up_tokenization_spaces": False} | kwargs)

    @property
    def added_words(self) -> list[str]:
        """The words that `with_words` added."""
        return list(self.init_kwargs.get("added_words", ()))

    @property
    def reserved_ids(self) -> list[int]:
        """The ids of the reserved entries that are free. They are never generated."""
        vocab = self.get_vocab()
        return [vocab[token] for token in RESERVED_TOKENS if token in vocab]

    def with_words(self, words: Sequence[str]) -> "TrafficVLMTokenizer":
        """A copy in which each new word has the first reserved entry that is free.

        The plural of a new word is read as the word ("forklifts"), unless the vocabulary has the plural. A new word
        that was a synonym ("scooter" of "motorcycle") is no longer one.

        Raises:
            ValueError: a word is in the vocabulary already, or is not a single word of letters, or is split or
                rewritten; or there are more words than free entries.
        """
        vocab, free = self.get_vocab(), self.reserved_ids
        if len(words) > len(free):
            limit, before = len(RESERVED_TOKENS), len(self.added_words)
            raise ValueError(f"{len(words)} words cannot be added: the limit is {limit}, {before} were added before")
        for word, entry in zip(words, free):
            if word in vocab:
                raise ValueError(f"{word!r} is in the vocabulary already")
            if not word.isalpha() or unicodedata.normalize("NFKC", word).lower() != word:
                raise ValueError(f"{word!r} is not a single word of lower-case letters")
            del vocab[self.convert_ids_to_tokens(entry)]
            vocab[word] = entry
        copy = deepcopy(self)
        copy.init_kwargs["added_words"] = [*self.added_words, *words]
        copy._tokenizer = _backend(vocab, copy.added_words)
        for word in words:
            if copy.tokenize(word) != [word]:
                raise ValueError(f"{word!r} is split or rewritten by the tokenizer: choose another word")
        return copy

    def encode_words(self, texts: list[str], **options: Any) -> Any:
        """The ids of the words of texts, without `[SOS]` and `[EOS]`. "[PAD]" or "[EOS]" in a text are words, too."""
        plain = {"add_special_tokens": False, "split_special_tokens": True, "padding": False, "truncation": False}
        return self(texts, verbose=False, return_attention_mask=False, **plain, **options)


# Needed only for a class imported from the package: a tokenizer loaded by an auto class saves its auto_map anyway.
TrafficVLMTokenizer.register_for_auto_class("AutoTokenizer")

__all__ = ["TrafficVLMTokenizer"]

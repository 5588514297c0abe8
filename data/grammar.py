"""The question types of `templates.yaml`, the paraphrases of their questions, and the text of lists of objects.

    question id "place/car/left" → "Is there a car on the left?", "Can you see any cars on the left side?", ...

A question id is `type/class/form/value`, of two to four parts; `truth.py` finds its answer. `question_type_of` goes
the other way, from a text to its type.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from ..question_traffic_vlm import with_article
from .scene import ATTRIBUTES, CLASSES, SCENE_ATTRIBUTES, classes_of, is_a


# Nouns without article and plural: "sky", not "a sky" or "skies".
MASS_NOUNS = {"sky", "road construction", "glare"}
NOUN_SLOTS, PLURALS = ("car", "cars", "bus", "buses"), ("cars", "buses")
# All words in it are texts: `on` is not true.
CONTENT = yaml.load(Path(__file__).with_name("templates.yaml").read_text(encoding="utf-8"), yaml.BaseLoader)
FILLED, AROUND = 0.2, 0.3  # chance of a filler in a question, and of a prefix, and of a suffix
OTHER = "other"  # as a key of a table by class or value: all that the table does not list


@dataclass(frozen=True)
class QuestionType:
    """An entry of `templates.yaml`, which explains the fields; `values` are those that are asked, by class."""

    name: str
    weight: float
    templates: Mapping[str, Sequence[str]]
    rule: str
    attribute: str
    values: Mapping[str, Sequence[str]]
    also_possible: Mapping[str, Sequence[str]] = field(default_factory=dict)
    classes: Sequence[str] = ()
    absent: Sequence[str] = ()
    absent_where_given: Sequence[str] = ()

    @cached_property
    def known_values(self) -> Sequence[str]:
        """All values of the attribute, or all that are asked."""
        return tuple(dict.fromkeys([*flat(self.values), *ATTRIBUTES.get(self.attribute, ())]))

    @cached_property
    def forms(self) -> frozenset[str]:
        """The forms that have templates: "what", "is", "any", ..., or names in capitals such as "PLACE"."""
        return frozenset(pattern.split("/")[1] for pattern in self.templates if "/" in pattern)

    def values_of(self, category: str) -> Sequence[str]:
        """The values that are asked of a class."""
        names = classes_of(category) if category in CLASSES else (category,)
        return next((self.values[name] for name in (*names, OTHER) if name in self.values), ())

    def templates_of(self, key: Sequence[str]) -> Sequence[str]:
        """The templates of a question id, given as its parts after the type."""
        found: dict[int, Sequence[str]] = {}  # by the number of parts in capitals
        for pattern, texts in self.templates.items():
            parts = pattern.split("/")
            if len(parts) == len(key) and all(map(self._fits, parts, key)):
                found[sum(map(str.isupper, parts))] = texts
        return found[min(found)] if found else ()

    def _fits(self, part: str, value: str) -> bool:
        if part == "VALUE":  # if all known values are numbers, any number fits
            return value in self.known_values or (value.isdecimal() and all(map(str.isdecimal, self.known_values)))
        return part == value or part.isupper()


def question_rules() -> dict[str, Any]:
    """The kinds of answers and example questions of `templates.yaml`, as `Rules` takes them."""
    attributes = ATTRIBUTES | SCENE_ATTRIBUTES
    kinds: list[dict[str, Any]] = []
    for name, entry in CONTENT["kinds"].items():
        kind = {"name": name} | {part: entry[part] for part in ("question", "asked", "affirmed") if part in entry}
        if "min_score" in entry:
            kind["min_score"] = float(entry["min_score"])
        if "classes" in entry:
            names = [one for one in CLASSES if entry["classes"] == "all" or is_a(one, entry["classes"])]
            kind["nouns"] = {CLASSES[one][0]: CLASSES[one][1] for one in names}
        else:
            kind["values"] = [*attributes.get(entry.get("attribute"), ()), *entry.get("values", ())]
        kinds.append(kind)
    colors = {
        "colors": ATTRIBUTES["color"],
        "light_colors": ATTRIBUTES["state"],
        "colored": [name for one in CONTENT["colored"] for name in CLASSES[one][:2]],
    }
    return {"kinds": kinds, **colors, "examples": CONTENT["examples"]}


def _question_type(
    name: str, weight: str, templates: Any, rule: str = "", attribute: str = "", values: Any = (), **others: Any
) -> QuestionType:
    values = values or ATTRIBUTES.get(attribute) or SCENE_ATTRIBUTES.get(attribute, ())
    values = values if isinstance(values, dict) else {OTHER: values}
    texts = {pattern: tuple(flat(group)) for pattern, group in templates.items()}
    return QuestionType(name, float(weight), texts, rule or name, attribute, values, **others)


def flat(texts: Any) -> Iterator[str]:
    """The texts in a list or in the values of a mapping, at any depth."""
    if isinstance(texts, str):
        yield texts
    else:
        for one in texts.values() if isinstance(texts, Mapping) else texts:
            yield from flat(one)


FILLINGS: dict[str, Any] = CONTENT["fillings"]
TYPES = {name: _question_type(name, **entry) for name, entry in CONTENT["types"].items()}


@lru_cache(maxsize=1 << 14)
def paraphrases_of(question_id: str) -> tuple[str, ...]:
    """All paraphrases of a question id, the simplest first."""
    name, *key = question_id.split("/")
    templates = TYPES[name].templates_of(key) if name in TYPES else ()
    is_mass = bool(key) and key[0] in MASS_NOUNS
    if is_mass:
        templates = [one for one in templates if "{cars}" not in one and not one.startswith("Is any object")]
    found = []
    for template in templates:
        for text in _filled(template, key):
            text = text.replace(f"a(n) {key[0]}", key[0]) if is_mass else text
            text = re.sub(r"a\(n\) (\w)", lambda match: with_article(match[1]), text)
            found.append(text[0].upper() + text[1:])
    return tuple(dict.fromkeys(found))


def in_other_words(question: str, rng: random.Random) -> str:
    """A question as people ask it: most have a prefix, a suffix or a filler of `templates.yaml`; the meaning stays."""
    core, end, around = question[:-1], question[-1], CONTENT["around"]
    prefixes = around["prefixes"]["question" if end == "?" or core.startswith(("I ", "Let me")) else "request"]
    if rng.random() < FILLED:
        words = core.split()
        gaps = [i for i, word in enumerate(words) if i and word in ("a", "an", "any", "the")] or [len(words)]
        words.insert(rng.choice(gaps), rng.choice(around["fillers"]))
        core = " ".join(words)
    if rng.random() < AROUND:
        core = rng.choice(prefixes) + core[0].lower() + core[1:]
    if rng.random() < AROUND:
        core += rng.choice(around["suffixes"])
    return core + end


def _filled(template: str, key: Sequence[str]) -> Iterator[str]:
    """The text of a template with each combination of fillings."""
    names = [name for _, name, _, _ in Formatter().parse(template) if name]
    for fillings in product(*(_fillings(name, key) for name in names)):
        yield template.format(**dict(zip(names, fillings)))


def _fillings(slot: str, key: Sequence[str]) -> Sequence[str]:
    """The fillings of a slot for the parts of a question id after its type; none if the id lacks such a part."""
    category, *rest = key
    if slot in NOUN_SLOTS:
        name = category if slot in ("car", "cars") else key[-1]
        singular, plural, _ = CLASSES.get(name, ("", "", None))
        return [noun] if (noun := plural if slot in PLURALS else singular) else ()
    if slot in ("value", "next"):
        return [key[-1]] if slot == "value" else [str(int(key[-1]) + 1)]
    table = FILLINGS[slot]
    if isinstance(table, Mapping):
        table = next((table[part] for part in (*reversed(rest), OTHER) if part in table), ())
    return [text for filling in table for text in _filled(filling, key)]


def amount(number: int, category: str, adjective: str = "", is_exact: bool = True) -> str:
    """ "a red car" for one object; for more "2 cars", or "cars" if there may be more than `number`."""
    singular, plural, _ = CLASSES[category]
    noun = singular if number == 1 else plural
    noun = f"{adjective} {noun}" if adjective else noun
    if number == 1:
        return with_article(noun)
    return f"{number} {noun}" if is_exact else noun


def enumeration(parts: Sequence[str]) -> str:
    """ "a car, a bus and 2 people" """
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


@lru_cache(maxsize=4096)  # the same questions are usually asked about many images
def question_type_of(question: str) -> str | None:
    """The question type whose templates can produce a question; None for any other question.

    Of several question types it is the first one of the grammar: "Is the traffic light red?" is a light_state, not a
    color.
    """
    text = _normalize(question)
    return next((name for name, pattern in _patterns().items() if pattern.fullmatch(text)), None)


def _normalize(text: str) -> str:
    """The words of a question without a prefix and a suffix that `in_other_words` adds."""
    text, around = " ".join(text.lower().split()).rstrip("?.! "), CONTENT["around"]
    for prefix in flat(around["prefixes"]):
        text = text.removeprefix(prefix)
    for suffix in around["suffixes"]:
        text = text.removesuffix(suffix)
    return text


@lru_cache(maxsize=1)
def _patterns() -> dict[str, re.Pattern[str]]:
    """An expression for the questions of each question type."""
    found = {}
    for name, kind in TYPES.items():
        pairs = ((pattern.split("/")[0], text) for pattern, texts in kind.templates.items() for text in texts)
        parts = dict.fromkeys(_template(_normalize(text), kind, category) for category, text in pairs)
        found[name] = re.compile(re.sub(r"\d+", r"\\d+", "|".join(parts)))
    return found


def _template(template: str, kind: QuestionType, category: str) -> str:
    """An expression for the texts of a template; `category` is its class, or in capitals any class."""
    found = ""
    for text, slot, _, _ in Formatter().parse(template):
        # "Is there bus?" is understood, but "Is this highway?" is not asked about a type of road.
        found += re.escape(text).replace(r"a\(n\)\ ", "(?:an? )?" if slot == "car" else "an? ")
        found += f"(?:{'|'.join(dict.fromkeys(_slot(slot, kind, category)))})" if slot else ""
    return found


def _slot(slot: str, kind: QuestionType, category: str) -> list[str]:
    """Expressions for all fillings of a slot."""
    if slot in NOUN_SLOTS:
        classes = [category] if category in CLASSES and slot in ("car", "cars") else CLASSES
        return [re.escape(noun) for name in classes for noun in CLASSES[name][:2]]
    if slot in ("value", "next"):
        return [re.escape(value) for value in kind.known_values]
    return [_template(filling, kind, category) for filling in flat(FILLINGS[slot])]

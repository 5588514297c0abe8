"""A user's own words: each takes an entry of the vocabulary, and its row of the weights, from a word of little use.

--add_words forklift:vehicle → entry of an untaught word → tokenizer, row (the mean of its kin), counts
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import torch
from transformers.utils import cached_file

from ..data.scene import ATTRIBUTES, CLASSES, SCENE_ATTRIBUTES, is_a
from ..data.templates import IN, PLACES, RELATIONS, TEMPLATES, enumeration
from ..tokenization_traffic_vlm import ANSWER_TOKENS, SPECIAL_TOKENS, TrafficVLMTokenizer


TAUGHT_FILE = "taught_words.json"  # beside the weights: {word: {"questions", "images", "yes", "no", "taught"}}
TAUGHT = ("no", "unreliable", "synthetic", "real")  # values of "taught"; only words of the first two are given away


def parse_words(options: Sequence[str], tokenizer: TrafficVLMTokenizer) -> dict[str, str | None]:
    """New words with their kin, from `WORD` or `WORD:KIN`. The kin is a category or a word of the vocabulary.

    Raises:
        ValueError: a word is given twice, is in the vocabulary already or is not a single word; the kin is unknown.
    """
    words: dict[str, str | None] = {}
    vocabulary = tokenizer.get_vocab()
    for option in options:
        word, _, kin = option.lower().partition(":")
        if word in words:
            raise ValueError(f"--add_words: {word!r} is given twice")
        if word in vocabulary:
            raise ValueError(f"--add_words: {word!r} is in the vocabulary already")
        if not word.isalpha():
            raise ValueError(f"--add_words: {word!r} is not a single word of letters; expected WORD or WORD:KIN")
        if kin and kin not in CLASSES and (kin not in vocabulary or kin in SPECIAL_TOKENS + ANSWER_TOKENS):
            raise ValueError(f"--add_words {option}: {kin!r} is neither a category nor a word of the vocabulary")
        words[word] = kin or None
    return words


def kin_words(kin: str | None) -> list[str]:
    """The words whose mean a new word starts from: the nouns of a category and its subclasses, or a word itself.

    Without kin, the nouns of all categories. The noun of "traffic light" is "light".
    """
    if kin is not None and kin not in CLASSES:
        return [kin]
    names = [CLASSES[category][0] for category in CLASSES if kin is None or is_a(category, kin)]
    return list(dict.fromkeys(name.rsplit(" ", 1)[-1] for name in names))


def words_of(texts: Iterable[str], tokenizer: TrafficVLMTokenizer) -> set[str]:
    """The words of the vocabulary that occur in texts."""
    return {word for text in texts for word in tokenizer.tokenize(text)}


def template_words(tokenizer: TrafficVLMTokenizer) -> set[str]:
    """The words of all templates, categories and values: without them our own questions could not be asked."""
    templates = [template for group in TEMPLATES.values() for template in group]
    texts = [text for template in templates for text, *_ in Formatter().parse(template)]
    texts += [*IN, *(text for group in (PLACES, RELATIONS) for texts in group.values() for text in texts)]
    texts += [name for singular, plural, _ in CLASSES.values() for name in (singular, plural)]
    values = [*ATTRIBUTES.values(), *SCENE_ATTRIBUTES.values(), PLACES]
    texts += [value for group in values for value in group]
    return words_of([*texts, enumeration(["a", "an", "none"])], tokenizer)


def entries_to_replace(
    tokenizer: TrafficVLMTokenizer, number: int, taught: Mapping[str, Any] | None = None, keep: Collection[str] = ()
) -> list[str]:
    """The words whose entries new words get, those of least use first.

    Never special tokens, [YES], [NO], numbers, punctuation, words of templates, categories and values, words that were
    added before, or `keep`. With the counts of taught words, untaught words come first, then unreliable ones, and
    taught ones are never given away. Among equals, and without counts, the last words of the vocabulary come first:
    it begins with grammar and ends with actions, hazards and descriptions.

    Raises:
        ValueError: there are fewer than `number`; a value of "taught" is unknown.
    """
    protected = {*SPECIAL_TOKENS, *ANSWER_TOKENS, *template_words(tokenizer), *tokenizer.added_words, *keep}
    ranks = {}
    for word in tokenizer.get_vocab():
        level = (taught or {}).get(word, {}).get("taught", "no")
        if level not in TAUGHT:
            raise ValueError(f"{TAUGHT_FILE}: {word!r} has taught={level!r}, expected one of {', '.join(TAUGHT)}")
        if word.isalpha() and word not in protected and level in TAUGHT[:2]:
            ranks[word] = (TAUGHT.index(level), -tokenizer.get_vocab()[word])
    if len(ranks) < number:
        raise ValueError(f"--add_words has {number} words, but only {len(ranks)} entries can be given away")
    return sorted(ranks, key=ranks.__getitem__)[:number]


def add_words(
    model: Any,
    tokenizer: TrafficVLMTokenizer,
    options: Sequence[str],
    taught: Mapping[str, Any] | None = None,
    texts: Iterable[str] = (),
) -> TrafficVLMTokenizer:
    """Give new words entries of the vocabulary: return the new tokenizer, and change the rows of the model.

    Args:
        model: a `TrafficVLMForConditionalGeneration`; its embeddings [V,C] and language-model head change in place.
        options: `WORD` or `WORD:KIN` each.
        taught: counts of taught words.
        texts: questions and answers to train on; no word of theirs is given away.

    Raises:
        ValueError: see `parse_words` and `entries_to_replace`.
    """
    words = parse_words(options, tokenizer)
    kin = {word for name in words.values() for word in kin_words(name)}
    entries = entries_to_replace(tokenizer, len(words), taught, keep=words_of(texts, tokenizer) | kin)
    changed = tokenizer.replace_words(dict(zip(words, entries)))
    with torch.no_grad():
        tables = {layer.weight for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
        for weight in tables:  # one if they are tied
            for word, name in words.items():
                ids = tokenizer.convert_tokens_to_ids(kin_words(name))
                weight[changed.convert_tokens_to_ids(word)] = weight[ids].mean(0)
    return changed


def read_taught_words(name: str | Path) -> dict[str, Any] | None:
    """The counts of taught words beside the weights of a folder or a repository on the Hub; None if there are none.

    Raises:
        ValueError: the file is not a JSON object of objects.
    """
    path = cached_file(str(name), TAUGHT_FILE, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    try:
        taught = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(taught, dict) or not all(isinstance(counts, dict) for counts in taught.values()):
        raise ValueError(f'{path}: expected {{word: {{"questions": ..., "taught": ...}}}}')
    return taught


def renamed_counts(taught: Mapping[str, Any], added: Mapping[str, str]) -> dict[str, Any]:
    """The counts of taught words after words were added: new words have no questions, replaced words no entry."""
    none = {"questions": 0, "images": 0, "yes": 0, "no": 0, "taught": "no"}
    kept = {word: counts for word, counts in taught.items() if word not in added.values()}
    return {word: dict(none) for word in added} | kept

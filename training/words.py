"""A user's own words: each takes an entry of the vocabulary, and its row of the weights, from a word of little use.

--add_words forklift:vehicle → entry of a word that was not taught → tokenizer, and row (the mean of its kin)
"""

from collections.abc import Collection, Iterable, Sequence
from string import Formatter
from typing import Any

import torch

from ..data.grammar import FILLINGS, TYPES, enumeration, flat
from ..data.scene import ATTRIBUTES, CLASSES, SCENE_ATTRIBUTES, is_a
from ..question_traffic_vlm import is_content_word
from ..tokenization_traffic_vlm import ANSWER_TOKENS, SPECIAL_TOKENS, TrafficVLMTokenizer


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
    return {word for text in texts for word in tokenizer.tokenize(text)} - {tokenizer.unk_token}


def template_words(tokenizer: TrafficVLMTokenizer) -> set[str]:
    """The words of all templates, categories and values: without them our own questions could not be asked."""
    templates = flat([[kind.templates for kind in TYPES.values()], FILLINGS])
    texts = [text for template in templates for text, *_ in Formatter().parse(template)]
    texts += [name for singular, plural, _ in CLASSES.values() for name in (singular, plural)]
    texts += flat([ATTRIBUTES, SCENE_ATTRIBUTES, [kind.values for kind in TYPES.values()]])
    return words_of([*texts, *FILLINGS["place"], enumeration(["a", "an", "none"])], tokenizer)


def entries_to_replace(tokenizer: TrafficVLMTokenizer, number: int, keep: Collection[str] = ()) -> list[str]:
    """The content words whose entries new words get: the last ones of the vocabulary.

    It begins with road users and ends with actions, hazards and descriptions. Never given away are function words,
    numbers, words of templates, categories and values, words that were added before, and those to `keep`.

    Raises:
        ValueError: there are fewer than `number`.
    """
    vocabulary = tokenizer.get_vocab()
    protected = {*template_words(tokenizer), *tokenizer.added_words, *keep}
    words = sorted(filter(is_content_word, vocabulary.keys() - protected), key=vocabulary.__getitem__, reverse=True)
    if len(words) < number:
        raise ValueError(f"--add_words has {number} words, but only {len(words)} entries can be given away")
    return words[:number]


def add_words(
    model: Any,
    tokenizer: TrafficVLMTokenizer,
    options: Sequence[str],
    taught: Iterable[str] = (),
    texts: Iterable[str] = (),
) -> TrafficVLMTokenizer:
    """Give new words entries of the vocabulary: return the new tokenizer, and change the rows of the model.

    Args:
        model: a `TrafficVLMForConditionalGeneration`; its embeddings [V,C] and language-model head change in place.
        options: `WORD` or `WORD:KIN` each.
        taught: the words that the weights were taught.
        texts: questions and answers to train on. Neither their words nor taught ones are given away.

    Raises:
        ValueError: see `parse_words` and `entries_to_replace`.
    """
    words = parse_words(options, tokenizer)
    kin = {word for name in words.values() for word in kin_words(name)}
    entries = entries_to_replace(tokenizer, len(words), keep={*taught, *words_of(texts, tokenizer), *kin})
    changed = tokenizer.replace_words(dict(zip(words, entries)))
    with torch.no_grad():
        tables = {layer.weight for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
        for weight in tables:  # one if they are tied
            for word, name in words.items():
                ids = tokenizer.convert_tokens_to_ids(kin_words(name))
                weight[changed.convert_tokens_to_ids(word)] = weight[ids].mean(0)
    return changed

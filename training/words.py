"""A user's own words: each takes a reserved entry of the tokenizer, and starts from the mean of related words.

--add_words forklift:vehicle → [RESERVED_0] becomes "forklift", its row of the weights the mean of car, bus, truck, …
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..data.scene import CLASSES, is_a
from ..tokenization_traffic_vlm import TrafficVLMTokenizer


def related_words(kin: str) -> list[str]:
    """The words whose mean a new word starts from: the nouns of a category and its subclasses, or a word itself.

    Without kin ("") these are the nouns of all categories. The noun of "traffic light" is "light".
    """
    if kin and kin not in CLASSES:
        return [kin]
    names = [CLASSES[category][0] for category in CLASSES if not kin or is_a(category, kin)]
    return list(dict.fromkeys(name.rsplit(" ", 1)[-1] for name in names))


def add_words(model: Any, tokenizer: TrafficVLMTokenizer, options: Sequence[str]) -> TrafficVLMTokenizer:
    """The tokenizer with new words, whose rows in the model start from the mean of related words.

    Args:
        model: a `TrafficVLMForConditionalGeneration`. Its embeddings [V,C] and language-model head change in place,
            and it never generates the reserved entries that are left.
        options: `WORD`, or `WORD:KIN` with a category or a word of the vocabulary.

    Raises:
        ValueError: the kin is neither; or a word cannot be added, see `TrafficVLMTokenizer.with_words`.
    """
    pairs = [option.lower().partition(":")[::2] for option in options]
    vocabulary = tokenizer.get_vocab()
    for word, kin in pairs:
        if kin and kin not in CLASSES and kin not in vocabulary:
            raise ValueError(f"--add_words {word}:{kin}: {kin!r} is neither a category nor a word of the vocabulary")
    changed = tokenizer.with_words([word for word, _ in pairs])
    with torch.no_grad():
        tables = {layer.weight for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
        for weight in tables:  # one if they are tied
            for word, kin in pairs:
                ids = tokenizer.convert_tokens_to_ids(related_words(kin))
                weight[changed.convert_tokens_to_ids(word)] = weight[ids].mean(0)
    model.generation_config.suppress_tokens = changed.reserved_ids or None
    return changed

"""The words of a training: a user's own ones, which are added, and those that its questions teach.

--add_words forklift:vehicle → [RESERVED_0] becomes "forklift", its row of the weights the mean of car, bus, truck, …
packed questions and answers → counts of words → words that are taught from then on
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..configuration_traffic_vlm import TrafficVLMTextConfig
from ..data.scene import CLASSES, is_a
from ..question_traffic_vlm import is_content_word
from ..tokenization_traffic_vlm import TrafficVLMTokenizer


MIN_ASKED = 200  # times that a word must stand in questions of a training to be taught


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


class AskedWords(nn.Module):
    """Counts [V,3] of the words of questions of the first process whose answer is yes, no, or in words."""

    counts: torch.Tensor

    def __init__(self, config: TrafficVLMTextConfig):
        super().__init__()
        self.config = config
        self.register_buffer("counts", torch.zeros(config.vocab_size, 3, dtype=torch.long))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, segment_ids: torch.Tensor) -> None:
        """Count the words of packed rows [R,L]. Nothing is read from a GPU, which would wait for it."""
        answer = (labels == self.config.yes_token_id) + 2 * (labels == self.config.no_token_id)  # 0 at other tokens
        of_segment = torch.zeros_like(labels).scatter_reduce(1, segment_ids, answer, "amax")
        kind = (of_segment.gather(1, segment_ids) - 1) % 3  # yes 0, no 1, in words 2
        is_asked = (labels < 0) & (segment_ids > 0)
        self.counts.index_put_((input_ids, kind), is_asked.long(), accumulate=True)

    def taught(self, tokenizer: TrafficVLMTokenizer, own: Iterable[str] = ()) -> set[str]:
        """The content words of at least MIN_ASKED questions, whose answers were both yes and no, or in words.

        Words of `own`, questions and answers of the user, count however rarely they are asked.
        """
        yes, no, in_words = self.counts.T
        is_taught = (self.counts.sum(1) >= MIN_ASKED) & ((yes * no > 0) | (in_words > 0))
        words = set(tokenizer.convert_ids_to_tokens(is_taught.nonzero().flatten().tolist()))
        return set(filter(is_content_word, words.union(*map(tokenizer.tokenize, own))))

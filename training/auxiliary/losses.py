"""Auxiliary losses, for training from few images.

    grounding: cross-attention of question words [N,P] ↔ patches of their objects
    intermediate: mid-layer states of the decoder [N,C] → norm, lm_head ↔ the true value ("green" for "Is the light
    red?")
    consistency: log-odds of yes [N] ↔ log-odds of a paraphrase
    distillation: P(yes) ↔ P of the query head for the same category and region
    agreement: P(yes) of a question ≤ P(yes) of one that it implies; P(yes) of two that exclude each other ≤ 1 in sum

These losses have no weights of their own; the presence loss of `head.py` has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


Words = tuple[torch.Tensor, torch.Tensor]  # rows [N] and columns [N] of tokens


def grounding_loss(maps: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """Mean of -log(attention on the object's patches).

    Args:
        maps: attention [N,P] of words; each row sums to 1. patches: bool [N,P], those of the words' objects.
    """
    if not len(maps):
        return maps.sum()
    return -(maps * patches).sum(-1).clamp(min=1e-6).log().mean()


def intermediate_loss(model: Any, states: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the true values [N] (token ids), predicted from mid-layer states [N,C] by norm and lm_head.

    To answer "Is it raining?" a decoder must recognize the weather and compare it. From yes or no alone, neither can
    be learned before the other. This loss teaches the first half of the decoder to recognize the value.
    """
    logits = model.compute_logits(model.get_decoder().norm(states)).float()
    return nn.functional.cross_entropy(logits, words, reduction="sum") / max(1, len(words))


def consistency_loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Symmetric KL divergence between P(yes) of paraphrases, (p - q) (logit p - logit q), mean over pairs.

    Args:
        first, second: log-odds of yes [N].
    """
    first, second = first.float(), second.float()
    return ((first.sigmoid() - second.sigmoid()) * (first - second)).sum() / max(1, len(first))


def agreement_loss(first: torch.Tensor, second: torch.Tensor, is_exclusion: torch.Tensor) -> torch.Tensor:
    """By how much pairs of answers contradict each other, mean over pairs.

    Args:
        first, second: log-odds of yes [N] of two questions. is_exclusion: bool [N], True if at most one of them can
            be answered yes, False if the first implies the second.
    """
    p, q = first.float().sigmoid(), second.float().sigmoid()
    return torch.where(is_exclusion, p + q - 1, p - q).clamp(min=0).sum() / max(1, len(p))


def distillation_loss(log_odds: torch.Tensor, head_logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of P(yes) and the probabilities of the query head, mean over questions.

    Args:
        log_odds: log-odds of yes [N]. head_logits: of the query head for the same questions [N]; without gradient.
    """
    targets = head_logits.detach().float().sigmoid()
    entropy = nn.functional.binary_cross_entropy_with_logits(log_odds.float(), targets, reduction="sum")
    return entropy / max(1, len(targets))


class Recorded:
    """Intermediate results of a forward pass, with gradients.

    Attributes:
        image_tokens: [I,P,C] of the vision tower.
        mid_layer_states: [B,L,C] after half of the decoder's layers.
        cross_attention: for each layer the module, its input states [B,L,C] and the image keys [B,K,P,D].
    """

    def __init__(self) -> None:
        self.image_tokens: Any = None
        self.mid_layer_states: Any = None
        self.cross_attention: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def attention_maps(self, words: Words) -> torch.Tensor:
        """Attention [N,P] of words to patches, the mean over heads and layers.

        It is computed after the pass; within it, gradient checkpointing would compute it twice.
        """
        rows, columns = words
        maps = []
        for module, hidden_states, key in self.cross_attention:
            weights = module.attention_weights(hidden_states[rows, columns][:, None], key[rows])  # [N,H,1,P]
            maps.append(weights[:, :, 0].mean(1))
        return torch.stack(maps).mean(0)


@contextmanager
def recording(model: Any) -> Iterator[Recorded]:
    """Record the intermediate results of a full model's forward pass."""
    recorded = Recorded()

    def keep_tokens(module: nn.Module, args: Any, output: Any) -> None:
        recorded.image_tokens = output.last_hidden_state

    def keep_states(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        recorded.mid_layer_states = output

    def keep_keys(module: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
        recorded.cross_attention.append((module, *args[:2]))

    layers = model.get_decoder().layers
    handles = [model.model.vision_tower.register_forward_hook(keep_tokens)]
    handles += [layers[(len(layers) - 1) // 2].register_forward_hook(keep_states)]
    handles += [layer.cross_attn.register_forward_hook(keep_keys) for layer in layers]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()

"""Losses beside that of the answers, for training from few images.

    cross-attention of question words [N,P] ↔ patches of their objects: grounding
    decoder states halfway [N,C] → norm, lm_head ↔ what is there ("green", for "Is the light red?"): intermediate
    log-odds of yes [N] ↔ those of a paraphrase: consistency

They add no weights. The presence loss of `head.py` does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


Words = tuple[torch.Tensor, torch.Tensor]  # rows [N] and columns [N] of tokens


def grounding_loss(maps: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """Mean of -log(attention on the object), of attention maps [N,P] that sum to 1 and bool patches [N,P]."""
    if not len(maps):
        return maps.sum()
    return -(maps * patches).sum(-1).clamp(min=1e-6).log().mean()


def intermediate_loss(model: Any, states: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the words [N] for what is there, from mid-layer states [N,C] and the model's own head.

    To answer "Is it raining?" a decoder must see the weather and compare it. From yes or no alone it learns neither
    before the other; this loss teaches the first half of the decoder to name what it sees.
    """
    logits = model.compute_logits(model.get_decoder().norm(states)).float()
    return nn.functional.cross_entropy(logits, words, reduction="sum") / max(1, len(words))


def consistency_loss(log_odds: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """How far P(yes) of two paraphrases differ: KL divergence in both directions, (p - q) (logit p - logit q).

    Args:
        log_odds: of yes [N]. pairs: [N], the number of each one's pair; every number occurs twice.

    Returns:
        the mean over pairs.
    """
    ordered = log_odds[pairs.argsort()].float()
    first, second = ordered[0::2], ordered[1::2]
    return ((first.sigmoid() - second.sigmoid()) * (first - second)).sum() / max(1, len(first))


class Recorded:
    """Inner results of a forward pass, with gradients.

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
        """Attention [N,P] of words, the mean over heads and layers.

        It is computed after the pass: inside, gradient checkpointing would compute it twice.
        """
        rows, columns = words
        maps = []
        for module, hidden_states, key in self.cross_attention:
            weights = module.attention_weights(hidden_states[rows, columns][:, None], key[rows])  # [N,H,1,P]
            maps.append(weights[:, :, 0].mean(1))
        return torch.stack(maps).mean(0)


@contextmanager
def recording(model: Any) -> Iterator[Recorded]:
    """Record the inner results of a full model's forward passes."""
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

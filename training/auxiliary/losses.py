"""Auxiliary losses, for training from few images: a recorded forward pass is compared with `targets.py`.

presence: image tokens → query head (`head.py`) ↔ which categories are where
grounding: cross-attention of question words [N,P] ↔ patches of their objects
intermediate: mid-layer states of the decoder [N,C] → norm, lm_head ↔ the true value ("green" for "Is the light
red?")
consistency: log-odds of yes [N] ↔ log-odds of a paraphrase
agreement: P(yes) of a question ≤ P(yes) of one that it implies; P(yes) of two that exclude each other ≤ 1 in sum
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...scoring_traffic_vlm import reading_cross_attention


Tensors = Mapping[str, torch.Tensor]


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


class ForwardPass:
    """Intermediate results of a forward pass of a full model, with gradients. See `recording`.

    Attributes:
        image_tokens: [I,P,C] of the vision tower.
        mid_layer_states: [B,L,C] after half of the decoder's layers.
        cross_attention: for each layer the module, its input states [B,L,C] and the image keys [B,K,P,D].
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.image_tokens: Any = None
        self.mid_layer_states: Any = None
        self.cross_attention: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def attention_maps(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Attention [N,P] of the words at rows [N] and columns [N] to patches, the mean over heads and layers."""
        maps = []
        for module, hidden_states, key in self.cross_attention:
            weights = module.attention_weights(hidden_states[rows, columns][:, None], key[rows])  # [N,H,1,P]
            maps.append(weights[:, :, 0].mean(1))
        return torch.stack(maps).mean(0)

    def losses(
        self, names: Iterable[str], logits: torch.Tensor, targets: Mapping[str, Tensors]
    ) -> dict[str, torch.Tensor]:
        """The auxiliary losses with these names, unweighted: each is a method, and compares with its own targets.

        Args:
            logits: [R,L,V] of the pass.
        """
        return {name: getattr(self, name)(logits, **targets[name]) for name in names}

    def presence(
        self, logits: torch.Tensor, region: torch.Tensor, patch: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        """Presence loss; the model must have a training head."""
        head, grid = self.model.training_head, patch.shape[2:]
        tokens = self.image_tokens[:, -grid.numel() :]  # leaves out a class token, if there is one
        loss: torch.Tensor = head["loss"](head["head"](tokens, tuple(grid)), region, patch, source)
        return loss

    def grounding(self, logits: torch.Tensor, words: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        return grounding_loss(self.attention_maps(*words.unbind(-1))[:, -patches.shape[-1] :], patches)

    def intermediate(self, logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        rows, columns, words = answers.unbind(-1)
        return intermediate_loss(self.model, self.mid_layer_states[rows, columns], words)

    def consistency(self, logits: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        return consistency_loss(*self._log_odds(logits, pairs))

    def agreement(self, logits: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        return agreement_loss(*self._log_odds(logits, pairs), pairs[:, 4].bool())

    def _log_odds(self, logits: torch.Tensor, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-odds [N] of yes of two questions each, whose rows and columns are in the first four columns of pairs."""
        text = self.model.config.get_text_config()
        log_odds = logits[..., text.yes_token_id] - logits[..., text.no_token_id]
        return log_odds[pairs[:, 0], pairs[:, 1]], log_odds[pairs[:, 2], pairs[:, 3]]


@contextmanager
def recording(model: Any) -> Iterator[ForwardPass]:
    """Record the forward pass of a full model inside the block."""
    found = ForwardPass(model)

    def keep_tokens(module: nn.Module, args: Any, output: Any) -> None:
        found.image_tokens = output.last_hidden_state

    def keep_states(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        found.mid_layer_states = output

    decoder = model.get_decoder()
    handles = [model.model.vision_tower.register_forward_hook(keep_tokens)]
    handles += [decoder.layers[(len(decoder.layers) - 1) // 2].register_forward_hook(keep_states)]
    try:
        with reading_cross_attention(decoder) as found.cross_attention:
            yield found
    finally:
        for handle in handles:
            handle.remove()

"""Auxiliary losses, for training from few images: a recorded forward pass is compared with `targets.py`.

presence: image tokens → query head (`head.py`) ↔ which categories are where
grounding: cross-attention of question words [N,P] ↔ patches of their objects
centers: center head of the tower ↔ where the objects are, and their boxes (`centers.py`)
agreement: P(yes) of a question ≤ P(yes) of one that it implies; P(yes) of two that exclude each other ≤ 1 in sum
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...scoring_traffic_vlm import reading_cross_attention
from .centers import center_loss


def grounding_loss(maps: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """Mean of -log(attention on the object's patches).

    Args:
        maps: attention [N,P] of words; each row sums to 1. patches: bool [N,P], those of the words' objects.
    """
    if not len(maps):
        return maps.sum()
    return -(maps * patches).sum(-1).clamp(min=1e-6).log().mean()


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
        seen: output of the vision tower.
        cross_attention: for each layer the module, its input states [B,L,C] and the image keys [B,K,P,D].
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seen: Any = None
        self.cross_attention: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def losses(
        self, names: Iterable[str], logits: torch.Tensor, targets: Mapping[str, Mapping[str, torch.Tensor]]
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
        tokens = self.seen.last_hidden_state[:, -grid.numel() :]  # leaves out tokens of counts, or a class token
        loss: torch.Tensor = head["loss"](head["head"](tokens, tuple(grid)), region, patch, source)
        return loss

    def grounding(self, logits: torch.Tensor, words: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        return grounding_loss(self.attention_maps(*words.unbind(-1))[:, -patches.shape[-1] :], patches)

    def centers(self, logits: torch.Tensor, **targets: torch.Tensor) -> torch.Tensor:
        return center_loss(self.seen.centers, **targets)

    def attention_maps(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Attention [N,P] of the words at rows [N] and columns [N] to patches, the mean over heads and layers."""
        maps = []
        for module, hidden_states, key in self.cross_attention:
            weights = module.attention_weights(hidden_states[rows, columns][:, None], key[rows])  # [N,H,1,P]
            maps.append(weights[:, :, 0].mean(1))
        return torch.stack(maps).mean(0)

    def agreement(self, logits: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        text = self.model.config.get_text_config()
        log_odds = logits[..., text.yes_token_id] - logits[..., text.no_token_id]
        row, end, other_row, other_end, is_exclusion = pairs.unbind(-1)
        return agreement_loss(log_odds[row, end], log_odds[other_row, other_end], is_exclusion.bool())


@contextmanager
def recording(model: Any) -> Iterator[ForwardPass]:
    """Record the forward pass of a full model inside the block."""
    found = ForwardPass(model)

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found.seen = output

    handle = model.model.vision_tower.register_forward_hook(keep)
    try:
        with reading_cross_attention(model.get_decoder()) as found.cross_attention:
            yield found
    finally:
        handle.remove()

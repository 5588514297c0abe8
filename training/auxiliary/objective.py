"""Which auxiliary losses a training has, and what each of them compares.

forward pass, recorded → tokens, states, attention of words ↔ `Targets` of the collator → {name: loss}
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch

from ...data.targets import Targets
from .head import PATCH_WEIGHT
from .losses import (
    Recorded,
    agreement_loss,
    consistency_loss,
    distillation_loss,
    grounding_loss,
    intermediate_loss,
    recording,
)


def log_odds_of_yes(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Log-odds [N] of yes against no, from logits [N,V] and the configuration of the decoder."""
    return logits[:, config.yes_token_id] - logits[:, config.no_token_id]


class Objective:
    """The auxiliary losses of a training.

    Args:
        names: of `options.LOSSES`. "presence" and "distillation" need a model with a training head.
    """

    recording = staticmethod(recording)

    def __init__(self, names: Collection[str]):
        self.names = set(names)

    def __call__(
        self, full: Any, recorded: Recorded, logits: torch.Tensor, targets: Targets
    ) -> dict[str, torch.Tensor]:
        """The losses by name, unweighted, of a recorded pass of the full model with logits [R,L,V]."""
        losses: dict[str, torch.Tensor] = {}
        log_odds = partial(log_odds_of_yes, config=full.config.get_text_config())
        if self.names & {"presence", "distillation"}:
            grid = targets.patch.shape[2:]
            tokens = recorded.image_tokens[:, -grid.numel() :]  # leaves out a class token, if there is one
            head_logits = full.training_head["head"](tokens, tuple(grid))
        if "presence" in self.names:
            presence = full.training_head["loss"]
            of_regions, of_patches = presence(head_logits, targets.region, targets.patch, targets.source)
            losses["presence"] = of_regions + PATCH_WEIGHT * of_patches
        if "distillation" in self.names:
            row, column, image, category, third = targets.distillation.unbind(-1)
            teacher = head_logits[0][image, category, third]
            losses["distillation"] = distillation_loss(log_odds(logits[row, column]), teacher)
        if "grounding" in self.names:
            row, column = targets.grounding_words.unbind(-1)
            maps = recorded.attention_maps((row, column))[:, -targets.grounding.shape[-1] :]
            losses["grounding"] = grounding_loss(maps, targets.grounding)
        if "intermediate" in self.names:
            row, column, word = targets.intermediate.unbind(-1)
            losses["intermediate"] = intermediate_loss(full, recorded.mid_layer_states[row, column], word)
        if "consistency" in self.names:
            row, column, other_row, other_column = targets.paraphrases.unbind(-1)
            first, second = log_odds(logits[row, column]), log_odds(logits[other_row, other_column])
            losses["consistency"] = consistency_loss(first, second)
        if "agreement" in self.names:
            row, column, other_row, other_column, kind = targets.agreement.unbind(-1)
            first, second = log_odds(logits[row, column]), log_odds(logits[other_row, other_column])
            losses["agreement"] = agreement_loss(first, second, kind.bool())
        return losses

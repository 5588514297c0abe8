"""What each auxiliary loss compares.

forward pass, recorded → tokens, states, attention of words ↔ `Targets` of the collator → {name: loss}
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
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
)
from .losses import recording as recording


@dataclass
class Pass:
    """A recorded forward pass and its targets. Each auxiliary loss of `options.LOSSES` is a method of this name.

    Attributes:
        model: the full model; `presence` and `distillation` need its training head.
        logits: [R,L,V] of the pass.
    """

    model: Any
    recorded: Recorded
    logits: torch.Tensor
    targets: Targets

    def losses(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The losses with these names, unweighted."""
        return {name: getattr(self, name)() for name in names}

    @cached_property
    def head_logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Region and patch logits of the query head."""
        grid = self.targets.patch.shape[2:]
        tokens = self.recorded.image_tokens[:, -grid.numel() :]  # leaves out a class token, if there is one
        found: tuple[torch.Tensor, torch.Tensor] = self.model.training_head["head"](tokens, tuple(grid))
        return found

    def log_odds(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Log-odds [N] of yes against no, read at these places."""
        config, logits = self.model.config.get_text_config(), self.logits[row, column]
        return logits[:, config.yes_token_id] - logits[:, config.no_token_id]

    def presence(self) -> torch.Tensor:
        one = self.targets
        loss = self.model.training_head["loss"]
        of_regions, of_patches = loss(self.head_logits, one.region, one.patch, one.source)
        total: torch.Tensor = of_regions + PATCH_WEIGHT * of_patches
        return total

    def grounding(self) -> torch.Tensor:
        row, column = self.targets.grounding_words.unbind(-1)
        patches = self.targets.grounding
        return grounding_loss(self.recorded.attention_maps((row, column))[:, -patches.shape[-1] :], patches)

    def intermediate(self) -> torch.Tensor:
        row, column, word = self.targets.intermediate.unbind(-1)
        return intermediate_loss(self.model, self.recorded.mid_layer_states[row, column], word)

    def consistency(self) -> torch.Tensor:
        row, column, other_row, other_column = self.targets.paraphrases.unbind(-1)
        return consistency_loss(self.log_odds(row, column), self.log_odds(other_row, other_column))

    def agreement(self) -> torch.Tensor:
        row, column, other_row, other_column, is_exclusion = self.targets.agreement.unbind(-1)
        first, second = self.log_odds(row, column), self.log_odds(other_row, other_column)
        return agreement_loss(first, second, is_exclusion.bool())

    def distillation(self) -> torch.Tensor:
        row, column, image, category, region = self.targets.distillation.unbind(-1)
        return distillation_loss(self.log_odds(row, column), self.head_logits[0][image, category, region])

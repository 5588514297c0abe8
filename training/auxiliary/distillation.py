"""Self-distillation: a tower learns what it said, before the run, about a larger image of the same crop.

    crop of S × S pixels → tower and query head before the run → P(present) ↔ region logits ← the same crop, smaller

Images that are too small have no such target.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...configuration_traffic_vlm import token_grid
from ..collator import Prepared
from .presence import region_weights


class Teacher(nn.Module):
    """A copy of a tower and its query head, which is never trained."""

    def __init__(self, tower: Any, head: Any):
        super().__init__()
        self.tower, self.head = copy.deepcopy(tower), copy.deepcopy(head)
        self.requires_grad_(False)

    def train(self, mode: bool = True) -> "Teacher":
        return super().train(False)

    @torch.no_grad()
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """P(present) [K,categories,4] in normalized images [K,3,S,S]."""
        inside = region_weights(*token_grid(self.tower.config, *pixels.shape[-2:])).to(pixels.device)
        found: torch.Tensor = self.head(self.tower(pixels).last_hidden_state, inside)
        return found.float().sigmoid()


def targets(
    images: Sequence[Prepared], batch: Mapping[str, Any], vision_config: Any, processor: Any
) -> dict[str, torch.Tensor]:
    """Larger images of a batch, for the teacher.

    Returns:
        pixels: [K,3,S,S], normalized. index: [K], places in the batch. inside: `region_weights` [4,P] of the batch.
    """
    index, options = [i for i, item in enumerate(images) if item.large is not None], processor.image_processor
    pixels = torch.from_numpy(np.array([images[i].large for i in index], np.float32))
    if index:
        pixels = (pixels * options.rescale_factor - torch.tensor(options.image_mean)) / torch.tensor(options.image_std)
        pixels = pixels.permute(0, 3, 1, 2)
    grid = token_grid(vision_config, *batch["pixel_values"].shape[-2:])
    return {"pixels": pixels, "index": torch.tensor(index, dtype=torch.long), "inside": region_weights(*grid)}


def loss(passed: Any, pixels: torch.Tensor, index: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Mean binary cross-entropy with the probabilities of the teacher; 0 without larger images."""
    head = passed.model.training_head
    if not len(index):
        return torch.zeros((), device=index.device)
    logits = head["head"](passed.seen.last_hidden_state[index], inside)
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), head["teacher"](pixels))

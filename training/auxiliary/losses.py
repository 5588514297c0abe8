"""Auxiliary losses, by name: what the collator adds to a batch for each, and how a forward pass is compared with it.

images and batch → targets → tensors ─┐
model → recording → ForwardPass ──────┴→ loss
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...scoring_traffic_vlm import reading_cross_attention
from ..collator import Target
from . import agreement, centers, grounding, presence


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "presence": presence.loss,
    "grounding": grounding.loss,
    "agreement": agreement.loss,
    "centers": centers.loss,
}


def make_targets(
    losses: Iterable[str], processor: Any, vision_config: Any, sources: Sequence[str]
) -> dict[str, Target]:
    """The targets of losses with these names, for a tower with this configuration; centers need a center head.

    Args:
        sources: names of all sources; the index of a source is its position here, 0 for other sources.
    """
    classes = [*(getattr(vision_config, "located", None) or ())]
    made: dict[str, Target] = {
        "presence": partial(presence.targets, vision_config=vision_config, sources=sources),
        "grounding": partial(grounding.targets, vision_config=vision_config, processor=processor),
        "agreement": agreement.targets,
        "centers": partial(centers.targets, classes=classes),
    }
    return {name: made[name] for name in losses if name != "centers" or classes}


@dataclass
class ForwardPass:
    """Results of a forward pass, with gradients. A tower alone has an output of the tower only.

    Attributes:
        model: with a `training_head`, see `presence.py`, for the presence loss.
        seen: output of the vision tower.
        logits: [R,L,V].
        cross_attention: for each layer the module, its input states [B,L,C] and the image keys [B,K,P,D].
    """

    model: Any
    seen: Any = None
    logits: Any = None
    cross_attention: list[tuple[Any, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def attention_maps(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Attention [N,P] of the words at rows [N] and columns [N] to patches, the mean over heads and layers."""
        maps = []
        for module, hidden_states, key in self.cross_attention:
            weights = module.attention_weights(hidden_states[rows, columns][:, None], key[rows])  # [N,H,1,P]
            maps.append(weights[:, :, 0].mean(1))
        return torch.stack(maps).mean(0)


@contextmanager
def recording(model: Any) -> Iterator[ForwardPass]:
    """Record the forward pass of a full model inside the block, but for its logits."""
    found = ForwardPass(model)
    keep = partial(setattr, found, "seen")
    handle = model.model.vision_tower.register_forward_hook(lambda module, inputs, output: keep(output))
    try:
        with reading_cross_attention(model.get_decoder()) as found.cross_attention:
            yield found
    finally:
        handle.remove()

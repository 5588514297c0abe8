"""The query head: presence of each category in the whole image, in its thirds and in its patches.

    image tokens [B,P,C] → QueryHead → region logits [B,categories,4] ↔ PresenceLoss ↔ region targets
                                     → patch logits [B,P,categories]  ↔              ↔ patch targets

Training a tower alone also has an auxiliary head: other yes/no questions about the whole image, such as the number of
lanes.

`training/tower.py` trains tower and heads alone. `training/run.py` adds the head to the full model while it trains; it
is saved beside the weights as `training_head.safetensors`.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import cached_file

from ...data.presence import CATEGORIES, REGIONS


HEAD_FILE = "training_head.safetensors"
MAX_WEIGHT = 16.0  # maximum weight of a rare answer
OVERALL_WEIGHT = 0.25  # weight of the balance over all sources; the balance within each source has weight 1
DECAY = 0.998  # of the running counts of yes and no, per batch
POSITIVE_WEIGHT = 4.0  # weight of patches that an object covers
PATCH_WEIGHT = 2.0  # weight of the patch loss; the region loss has weight 1


class QueryPool(nn.Module):
    """Learned queries that attend to tokens, `num_queries` for each output; each has its own value projection."""

    def __init__(self, hidden_size: int, num_outputs: int, num_queries: int):
        super().__init__()
        self.shape = (num_outputs, num_queries)
        self.query = nn.Linear(hidden_size, num_outputs * num_queries, bias=False)
        self.value = nn.Linear(hidden_size, num_outputs * num_queries, bias=False)
        for layer in (self.query, self.value):
            nn.init.normal_(layer.weight, std=0.02)

    def pool(self, tokens: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
        """What the queries find [B,outputs,R] in tokens [B,P,C]; `regions` [R,P] is the fraction of a patch inside."""
        scores = self.query(tokens).float().transpose(1, 2)  # [B,outputs·queries,P]
        values = self.value(tokens).float().transpose(1, 2)
        found = [((scores + weights.log()).softmax(-1) * values).sum(-1) for weights in regions]
        return torch.stack(found, -1).unflatten(1, self.shape).sum(2)


class QueryHead(QueryPool):
    """Presence by region: tokens [B,P,C] → logits [B,categories,4].

    The queries of a category are used for the thirds of the image, too, where they attend only to the columns of that
    third. So the appearance of a car is learned once for all regions.
    """

    def __init__(self, hidden_size: int, num_categories: int = len(CATEGORIES), num_queries: int = 2):
        super().__init__(hidden_size, num_categories, num_queries)
        self.patch = nn.Linear(hidden_size, num_categories)
        self.bias = nn.Parameter(torch.zeros(num_categories, len(REGIONS)))
        nn.init.normal_(self.patch.weight, std=0.02)
        nn.init.constant_(self.patch.bias, -4.0)  # few categories are present in a patch

    def forward(self, tokens: torch.Tensor, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Region logits [B,categories,4] and patch logits [B,P,categories] of tokens in `grid` (rows, columns)."""
        return self.pool(tokens, region_weights(*grid, tokens.device)) + self.bias, self.patch(tokens)


class AuxiliaryHead(QueryPool):
    """Yes/no questions about the whole image: tokens [B,P,C] → logits [B,F]."""

    def __init__(self, hidden_size: int, num_facts: int, num_queries: int = 2):
        super().__init__(hidden_size, num_facts, num_queries)
        self.bias = nn.Parameter(torch.zeros(num_facts))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.pool(tokens, torch.ones(1, tokens.shape[1], device=tokens.device))[..., 0] + self.bias


@cache
def region_weights(rows: int, columns: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Fraction [4,rows·columns] of each patch inside the whole image and its left, center and right third."""
    edges = torch.arange(columns + 1) / columns * 3
    thirds = [(edges[1:].clamp(max=n + 1) - edges[:-1].clamp(min=n)).clamp(min=0) for n in range(3)]
    weights = torch.stack([torch.full((columns,), 3 / columns), *thirds]) * columns / 3
    return weights[:, None].expand(-1, rows, -1).flatten(1).to(device)


class BalancedLoss(nn.Module):
    """Binary cross-entropy of questions, with equal total weight of yes and no by running counts.

    So P(yes) = 0.5 fits equally frequent answers. They are balanced within each source; otherwise the style of a
    source would be evidence for an answer that is common in one source and rare in another. With `overall_weight`
    they are also balanced over all sources, so that a category that never occurs in a source is learned as absent
    there.

    Args:
        num_sources: number of sources that are balanced separately.
        shape: of the questions about an image.
    """

    counts: torch.Tensor

    def __init__(self, num_sources: int, shape: tuple[int, ...], overall_weight: float = 0.0) -> None:
        super().__init__()
        self.overall_weight = overall_weight
        # Of no and of yes, by source; the last row is of all sources.
        self.register_buffer("counts", torch.zeros(num_sources + 1, 2, *shape))

    def forward(
        self, logits: torch.Tensor, targets: torch.Tensor, source: torch.Tensor, count: bool = True
    ) -> torch.Tensor:
        """The mean over known targets.

        Args:
            logits: [B,*shape]. targets: int8 [B,*shape] of 1, 0 or -1 for unknown.
            source: index of each image's source [B].
            count: whether to update the running counts.
        """
        answers = torch.stack([targets == 0, targets == 1], 1).float()  # [B,2,*shape]
        if count:
            by_source = DECAY * self.counts[:-1].index_add(0, source, answers * (1 - DECAY) / DECAY)
            self.counts = torch.cat([by_source, by_source.sum(0, keepdim=True)])
        # The total weight of yes, and of no: smaller where one is so rare that its weight would exceed MAX_WEIGHT.
        both = torch.minimum(self.counts.sum(1) / 2, MAX_WEIGHT * self.counts.amin(1))
        weight = both[:, None] / self.counts.clamp(min=1e-9)  # [sources + 1,2,*shape]
        weights = (answers * (weight[source] + self.overall_weight * weight[-1])).sum(1)
        entropy = nn.functional.binary_cross_entropy_with_logits(
            logits, targets.clamp(min=0).float(), weights, reduction="sum"
        )
        return entropy / (targets >= 0).sum().clamp(min=1)


class PresenceLoss(nn.Module):
    """Binary cross-entropy of regions, balanced within sources and overall, and of patches."""

    def __init__(self, num_sources: int = 1) -> None:
        super().__init__()
        self.regions = BalancedLoss(num_sources, (len(CATEGORIES), len(REGIONS)), OVERALL_WEIGHT)

    def forward(
        self,
        logits: tuple[torch.Tensor, torch.Tensor],
        region: torch.Tensor,
        patch: torch.Tensor,
        source: torch.Tensor,
        count: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Region loss and patch loss, unweighted.

        Args:
            logits: of `QueryHead`.
            region: int8 [B,categories,4]; patch: int8 [B,categories,rows,columns]; both 1, 0 or -1 for unknown.
            source, count: as for `BalancedLoss`.
        """
        regions = self.regions(logits[0], region, source, count)
        patches = patch.flatten(2).transpose(1, 2)  # [B,P,categories]
        known = patches >= 0
        # Unknown patches have weight 0. To select the known ones, the CPU would wait for the GPU.
        weights = torch.where(patches == 1, POSITIVE_WEIGHT, known.float())
        entropy = nn.functional.binary_cross_entropy_with_logits(
            logits[1].float(), (patches == 1).float(), weights, reduction="sum"
        )
        return regions, entropy / known.sum().clamp(min=1)


def add_training_head(model: Any, head: QueryHead | None = None, num_sources: int = 1) -> None:
    """Add the query head and its loss to a full model as `model.training_head`; a new head by default.

    A new, untrained head disturbs a trained tower until it has learned.
    """
    head = head or QueryHead(model.config.vision_config.hidden_size)
    model.training_head = nn.ModuleDict({"head": head, "loss": PresenceLoss(num_sources)})


def load_training_head(name: str | Path) -> QueryHead | None:
    """The head saved beside the weights of a folder or a repository on the Hub; None if there is none.

    Raises:
        ValueError: it has other categories or another width than this code; the message names the tensor.
    """
    path = cached_file(str(name), HEAD_FILE, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    state = load_file(path)
    head = QueryHead(state["query.weight"].shape[1])
    try:
        head.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the {len(CATEGORIES)} categories of this code: {error}") from error
    return head


def save_training_head(model: Any, folder: Path) -> None:
    """Remove the head from a full model and save it in a folder."""
    training_head = model._modules.pop("training_head")
    save_file(training_head["head"].state_dict(), folder / HEAD_FILE, {"format": "pt"})

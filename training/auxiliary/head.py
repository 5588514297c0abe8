"""The query head: presence of each category in the whole image, in its thirds and in its patches.

    image tokens [B,P,C] → QueryHead → region logits [B,categories,4] ─┐
                                     → patch logits [B,P,categories]  ─┴→ PresenceLoss ← targets of `presence.py`

A model to train, a tower alone or a full one, has it with its loss as `training_head`. It is saved beside the weights
as `training_head.safetensors`.
"""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import cached_file

from .presence import CATEGORIES, REGIONS


HEAD_FILE = "training_head.safetensors"
IN_A_CLONE = f"training/auxiliary/{HEAD_FILE}"  # the head of the shipped weights
MAX_WEIGHT = 16.0  # maximum weight of a rare answer
OVERALL_WEIGHT = 0.25  # weight of the balance over all sources; the balance within each source has weight 1
DECAY = 0.998  # of the running counts of yes and no, per batch
POSITIVE_WEIGHT = 4.0  # weight of patches that an object covers
PATCH_WEIGHT = 2.0  # weight of the patch loss; the region loss has weight 1


class QueryHead(nn.Module):
    """Presence by region and patch, from image tokens.

    Learned queries, `num_queries` for each category, attend to the tokens; each has its own value projection. For a
    third of the image the same queries attend only to the columns of that third. So the appearance of a car is learned
    once for all regions.
    """

    def __init__(self, hidden_size: int, num_categories: int = len(CATEGORIES), num_queries: int = 2):
        super().__init__()
        self.query = nn.Linear(hidden_size, num_categories * num_queries, bias=False)
        self.value = nn.Linear(hidden_size, num_categories * num_queries, bias=False)
        self.patch = nn.Linear(hidden_size, num_categories)
        self.bias = nn.Parameter(torch.zeros(num_categories, len(REGIONS)))
        for layer in (self.query, self.value, self.patch):
            nn.init.normal_(layer.weight, std=0.02)
        nn.init.constant_(self.patch.bias, -4.0)  # few categories are present in a patch

    def forward(self, tokens: torch.Tensor, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Region logits [B,categories,4] and patch logits [B,P,categories] of tokens [B,P,C].

        Args:
            grid: rows and columns of the patches; tokens before them, of counts or a class, are left out.
        """
        tokens = tokens[:, -grid[0] * grid[1] :]
        scores = self.query(tokens).float().transpose(1, 2)  # [B,categories·queries,P]
        values = self.value(tokens).float().transpose(1, 2)
        inside = region_weights(*grid, tokens.device)
        found = [((scores + weights.log()).softmax(-1) * values).sum(-1) for weights in inside]
        regions = torch.stack(found, -1).unflatten(1, (len(self.bias), -1)).sum(2)
        return regions + self.bias, self.patch(tokens)


@cache
def region_weights(rows: int, columns: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Fraction [4,rows·columns] of each patch inside the whole image and its left, center and right third."""
    edges = torch.arange(columns + 1) / columns * 3
    thirds = [(edges[1:].clamp(max=n + 1) - edges[:-1].clamp(min=n)).clamp(min=0) for n in range(3)]
    weights = torch.stack([torch.full((columns,), 3 / columns), *thirds]) * columns / 3
    return weights[:, None].expand(-1, rows, -1).flatten(1).to(device)


class PresenceLoss(nn.Module):
    """Binary cross-entropy of the regions, balanced between yes and no, and of the patches.

    By running counts, yes and no have equal total weight for each category and region. So P(yes) = 0.5 fits equally
    frequent answers. They are balanced within each source; otherwise the style of a source would be evidence for an
    answer that is common in one source and rare in another. With OVERALL_WEIGHT they are also balanced over all
    sources, so that a category that never occurs in a source is learned as absent there.

    Args:
        num_sources: number of sources that are balanced separately.
    """

    counts: torch.Tensor  # of no and of yes, by source; the last row is of all sources

    def __init__(self, num_sources: int = 1) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(num_sources + 1, 2, len(CATEGORIES), len(REGIONS)))

    def forward(
        self,
        logits: tuple[torch.Tensor, torch.Tensor],
        region: torch.Tensor,
        patch: torch.Tensor,
        source: torch.Tensor,
    ) -> torch.Tensor:
        """The mean over known regions, plus PATCH_WEIGHT times the mean over known patches.

        Args:
            logits: of `QueryHead`.
            region: int8 [B,categories,4]; patch: int8 [B,categories,rows,columns]; both 1, 0 or -1 for unknown.
            source: index of each image's source [B].
        """
        answers = torch.stack([region == 0, region == 1], 1).float()  # [B,2,categories,4]
        by_source = DECAY * self.counts[:-1].index_add(0, source, answers * (1 - DECAY) / DECAY)
        self.counts = torch.cat([by_source, by_source.sum(0, keepdim=True)])
        # The total weight of yes, and of no: smaller where one is so rare that its weight would exceed MAX_WEIGHT.
        both = torch.minimum(self.counts.sum(1) / 2, MAX_WEIGHT * self.counts.amin(1))
        weight = both[:, None] / self.counts.clamp(min=1e-9)  # [sources + 1,2,categories,4]
        weights = (answers * (weight[source] + OVERALL_WEIGHT * weight[-1])).sum(1)
        of_regions = _mean_entropy(logits[0], region, weights)
        patches = patch.flatten(2).transpose(1, 2)  # [B,P,categories]
        # Unknown patches have weight 0. To select the known ones, the CPU would wait for the GPU.
        weights = torch.where(patches == 1, POSITIVE_WEIGHT, (patches == 0).float())
        return of_regions + PATCH_WEIGHT * _mean_entropy(logits[1], patches, weights)


def _mean_entropy(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted binary cross-entropy, divided by the number of known targets."""
    truth = (targets == 1).float()
    entropy = nn.functional.binary_cross_entropy_with_logits(logits.float(), truth, weights, reduction="sum")
    return entropy / (targets >= 0).sum().clamp(min=1)


def load_training_head(name: str | Path) -> QueryHead | None:
    """The head saved beside the weights of a folder or a repository on the Hub; None if there is none."""
    for file in (HEAD_FILE, IN_A_CLONE):
        if path := cached_file(str(name), file, _raise_exceptions_for_missing_entries=False):
            state = load_file(path)
            head = QueryHead(state["query.weight"].shape[1])
            head.load_state_dict(state)
            return head
    return None


def save_training_head(head: QueryHead, folder: Path) -> None:
    """Write the head to a folder, beside the weights that it was trained with."""
    save_file(head.state_dict(), folder / HEAD_FILE, {"format": "pt"})

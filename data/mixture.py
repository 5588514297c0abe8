"""A mixture of datasets as one map-style dataset of any length, drawn anew each epoch.

    sources with weights → epoch e, number i → the same row on every machine, however often training was stopped

An epoch here is as many images as one wants between two checkpoints, not one pass over the data: sources of a hundred
and of a million images are mixed in the shares that training needs.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch

from .dataset import render_row


class SyntheticRows(torch.utils.data.Dataset):
    """Scenes rendered when they are asked for, one for each seed from `first_seed` on."""

    def __init__(self, first_seed: int = 0, num_images: int = 1 << 20):
        self.first_seed, self.num_images = first_seed, num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> dict[str, Any]:
        return render_row(self.first_seed + index)


class Mixture(torch.utils.data.Dataset):
    """Rows of several datasets in given shares.

    Args:
        sources: map-style datasets.
        weights: the share of each, any positive numbers; by default the number of its rows.
        images_per_epoch: length of an epoch; by default the number of all rows.
        seed: with the epoch and the number of the row it decides which one is drawn.

    Raises:
        ValueError: no source, an empty one, or weights that do not fit.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        weights: Sequence[float] | None = None,
        images_per_epoch: int | None = None,
        seed: int = 0,
    ):
        sizes = [len(source) for source in sources]
        if not sizes or min(sizes) == 0:
            raise ValueError(f"every dataset must have rows, these have {sizes}")
        weights = list(sizes if weights is None else weights)
        if len(weights) != len(sizes) or min(weights) <= 0:
            raise ValueError(f"{len(sizes)} datasets need as many positive weights, got {weights}")
        self.sources, self.weights, self.sizes = list(sources), weights, sizes
        self.images_per_epoch = images_per_epoch or sum(sizes)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.images_per_epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self.seed}/{self.epoch}/{index}")
        [number] = rng.choices(range(len(self.sources)), self.weights)
        return self.sources[number][rng.randrange(self.sizes[number])]

"""Drawing of the images of a run: how often each one is drawn, and the size of each batch.

Images of one camera resemble each other, so a camera counts with the square root of its images, and so does a source.
All images of a batch have one size, and fewer of them are in a batch of a larger size, so that every step takes the
same time. A tower is not trained on small images at large sizes: `augment` enlarges none by more than `MAX_ENLARGED`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from ..data.augment import is_large_enough
from ..data.scene import parse_scene
from .options import TrainOptions


MAX_DRAWS = 12  # of one image in a run, on average
LAST_FRACTION = 0.1  # of a run: the last batches, which have the default size


@dataclass
class Drawn:
    """A batch before it is collated. `size` is (height, width) in pixels; `rng` makes all of its random choices."""

    rows: list[dict[str, Any]]
    size: tuple[int, int]
    rng: np.random.Generator
    epoch: int = 0


def draw_chances(groups: Sequence[Sequence[Any]], weights: Sequence[float], draws: int) -> np.ndarray:
    """Chance [N] of each image at each draw, one source after the other; at most `MAX_DRAWS` on average if possible.

    Args:
        groups: for each source, the group (camera, drive, near-duplicates) of each of its images.
        weights: of each source. draws: of the whole run.
    """
    parts = []
    for names, weight in zip(groups, weights):
        _, group, counts = np.unique(names, return_inverse=True, return_counts=True)
        share = counts[group] ** -0.5
        parts.append(weight * share / share.sum())
    chances = np.concatenate(parts) / sum(weights)
    limit = max(MAX_DRAWS / draws, 1 / len(chances))
    while (is_over := chances > limit * (1 + 1e-9)).any():
        is_limited = is_over | (chances >= limit)
        rest = chances[~is_limited].sum()
        chances = np.where(is_limited, limit, chances * (1 - limit * is_limited.sum()) / max(rest, 1e-12))
    return chances


class Drawing(Dataset[Any]):
    """Batches of rows, drawn at random. Any process, and a resumed run, draws the same ones for an epoch and indices.

    Args:
        parts: rows of each source. Images without a group are a group each.
        options: sizes of the batches, images of an epoch, and weights of the sources: by default the square root of
            their number of rows.
        default: (height, width) of the images in the last batches.
        draws: number of images of the run at the default size.

    Raises:
        ValueError: a source has no rows, or no image of a tower's run is large enough for one of its sizes.
    """

    def __init__(self, parts: Sequence[Any], options: TrainOptions, default: tuple[int, int], draws: int, seed: int):
        counts = [len(rows) for rows in parts]
        if not min(counts):
            raise ValueError(f"every dataset must have rows, these have {counts}")
        self.rows: ConcatDataset[dict[str, Any]] = ConcatDataset(parts)
        self.options, self.default, self.draws, self.seed, self.epoch = options, default, draws, seed, 0
        named = [enumerate(rows["group"] if "group" in rows.column_names else ()) for rows in parts]
        groups = [[name or f"image {i}" for i, name in one] or range(count) for one, count in zip(named, counts)]
        # Each time that a decoder's image is drawn, new questions are asked: only a tower's images have a limit.
        limited = 1 if options.questions_per_image else draws
        self.chances = draw_chances(groups, options.train_weights or [count**0.5 for count in counts], limited)
        scenes = [] if options.questions_per_image else [scene for rows in parts for scene in rows["scene"][:]]
        stored = [(scene.width, scene.height) for scene in map(parse_scene, scenes)]
        sizes = {default, *((side, side) for side in options.sizes)} if stored else ()
        # For each size, which images can be drawn. A run would stop in its last tenth if the default had none.
        self.fits = {size: np.array([is_large_enough(*one, size) for one in stored]) for size in sizes}
        if large := [f"{width} × {height}" for (height, width), fits in self.fits.items() if not fits.any()]:
            raise ValueError(f"no image is large enough for {large[0]} pixels; leave out this size")

    def __len__(self) -> int:
        return self.options.images_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Draw the images of this epoch. accelerate calls it."""
        self.epoch = epoch

    def __getitems__(self, indices: Sequence[int]) -> Drawn:
        first = self.epoch * len(self) + indices[0]
        rng = np.random.default_rng([self.seed, first])
        size = self.draw_size(first, rng)
        chances = self.chances * self.fits.get(size, 1)
        count = max(1, round(len(indices) * self.default[0] * self.default[1] / (size[0] * size[1])))
        drawn = rng.choice(len(chances), count, p=chances / chances.sum())
        return Drawn([self.rows[int(index)] for index in drawn], size, rng, self.epoch)

    def draw_size(self, first: int, rng: np.random.Generator) -> tuple[int, int]:
        """The size of the batch that begins with this draw of the run."""
        if not self.options.sizes or first >= (1 - LAST_FRACTION) * self.draws:
            return self.default
        weights = np.array(self.options.size_weights or [1.0] * len(self.options.sizes))
        side = int(rng.choice(self.options.sizes, p=weights / weights.sum()))
        return side, side

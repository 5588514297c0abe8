"""Drawing of pictures for the tower alone: how often each one is drawn, and the size of each batch.

Pictures of one camera resemble each other, so a camera counts with the square root of its pictures, and so does a
source. All pictures of a batch have one size, and fewer of them are in a batch of a larger size, so that every step
takes the same time. Small pictures are not drawn for large sizes: `augment` enlarges none by more than `MAX_ENLARGED`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import concatenate_datasets

from ..data.augment import is_large_enough
from ..data.scene import parse_scene
from .options import TrainOptions


MAX_DRAWS = 12  # of one picture in a run, on average
LAST_FRACTION = 0.1  # of the steps: the last ones, whose batches have the default size


def draw_chances(groups: Sequence[Sequence[str]], weights: Sequence[float], draws: int) -> np.ndarray:
    """Chance [N] of each picture at each draw, one source after the other; at most `MAX_DRAWS` on average if possible.

    Args:
        groups: for each source, the group (camera, drive, near-duplicates) of each of its pictures.
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


class Drawing(torch.utils.data.Dataset):
    """Rows of photographs, drawn in batches. Any process, and a resumed run, draws the same rows for a step.

    The indices `step` × `pictures` and the following ones are the batch of a step. Each row also has the `size`
    (height, width) of its batch, and the random generator `rng` of its step.

    Args:
        parts: rows of each source, with the columns "scene" and "group".
        options: sizes of the batches, and weights of the sources: by default the square root of their number of rows.
        default: side in pixels of the images in the last steps.
        pictures: number in a batch of the default size. steps: number of batches of the run.
    """

    def __init__(
        self, parts: Sequence[Any], options: TrainOptions, default: int, pictures: int, steps: int, seed: int = 0
    ):
        self.rows, self.options, self.default = concatenate_datasets(parts), options, default
        self.pictures, self.steps, self.seed = pictures, steps, seed
        weights = options.train_weights or [len(rows) ** 0.5 for rows in parts]
        self.chances = draw_chances([rows["group"][:] for rows in parts], weights, len(self))
        self.stored = [(scene.width, scene.height) for scene in map(parse_scene, self.rows["scene"][:])]

    def __len__(self) -> int:
        return self.steps * self.pictures

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        step = indices[0] // self.pictures
        rng = np.random.default_rng([self.seed, step])
        count, side = self.batch_size(step, rng)
        chances = self.chances * [is_large_enough(*stored, (side, side)) for stored in self.stored]
        if not chances.any():
            raise ValueError(f"no picture is large enough for {side} × {side} pixels; leave out this size")
        drawn = rng.choice(len(chances), count, p=chances / chances.sum())
        return [self.rows[int(index)] | {"size": (side, side), "rng": rng} for index in drawn]

    def batch_size(self, step: int, rng: np.random.Generator) -> tuple[int, int]:
        """(number of pictures, side in pixels) of the batch of a step."""
        if step >= (1 - LAST_FRACTION) * self.steps:
            return self.pictures, self.default
        sizes = self.options.weighted_sizes or {self.default: 1.0}
        side = int(rng.choice([*sizes], p=np.array([*sizes.values()]) / sum(sizes.values())))
        return max(1, round(self.pictures * (self.default / side) ** 2)), side

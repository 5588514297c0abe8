"""Drawing of pictures for the tower alone: how often each one is drawn, the size of each batch, and mixtures.

Pictures of one camera resemble each other, so a camera counts with the square root of its pictures, and so does a
source. All pictures of a batch have one size, and fewer of them are in a batch of a larger size, so that every step
takes the same time. Small pictures are not drawn for large sizes: `augment` enlarges none by more than `MAX_ENLARGED`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import concatenate_datasets

from ..data.augment import is_large_enough
from ..data.scene import parse_scene
from .options import TrainOptions


MAX_DRAWS = 12  # of one picture in a run, on average
ASPECTS = (0.75, 1.8)  # width / height of a batch
STEP = 32  # sides of a batch are multiples, in pixels
LAST_FRACTION = 0.1  # of the steps: the last ones, whose batches have the default size
MIXUP = 0.4  # both parameters of the beta distribution of an image's weight in a mixture
MIXUP_FRACTION = 0.6  # fraction of the run with mixed images


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
    (height, width) of its batch, the random generator `rng` of its step, and its `mixed_weight`.

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
        count, height, width = self.batch_size(step, rng)
        chances = self.chances * [is_large_enough(*stored, (height, width)) for stored in self.stored]
        if not chances.any():
            raise ValueError(f"no picture is large enough for {height} × {width} pixels; leave out this size")
        drawn = rng.choice(len(chances), count, p=chances / chances.sum())
        shared = {"size": (height, width), "rng": rng, "mixed": mixed_weight(self.seed, step, self.steps)}
        return [self.rows[int(index)] | shared for index in drawn]

    def batch_size(self, step: int, rng: np.random.Generator) -> tuple[int, int, int]:
        """(number of pictures, height, width) of the batch of a step."""
        if step >= (1 - LAST_FRACTION) * self.steps:
            return self.pictures, self.default, self.default
        sizes = self.options.weighted_sizes or {self.default: 1.0}
        side = rng.choice([*sizes], p=np.array([*sizes.values()]) / sum(sizes.values()))
        low, high = map(math.log, ASPECTS)
        aspect = math.exp(rng.uniform(low, high)) if self.options.vary_aspect else 1.0
        height, width = (STEP * round(length / STEP) for length in (side / aspect**0.5, side * aspect**0.5))
        return max(1, round(self.pictures * self.default**2 / (height * width))), height, width


def mixed_weight(seed: int, step: int, steps: int) -> float:
    """The weight of each image in a mixture with its neighbor in the batch of a step (mixup); 1 mixes nothing.

    In half of the steps images are mixed, or sources with a few hundred images would be learned by heart; the last
    images of the run are not mixed.
    """
    rng = np.random.default_rng([seed, step])
    is_mixed = step < MIXUP_FRACTION * steps and rng.random() >= 0.5
    return float(rng.beta(MIXUP, MIXUP)) if is_mixed else 1.0

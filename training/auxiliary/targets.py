"""Targets: what the auxiliary losses of `losses.py` compare a batch with.

Each target is a function that the collator calls with the images that it has prepared and the batch. Places in the
batch are lists, found on the CPU: to search for them on a GPU, the CPU would wait for it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...configuration_traffic_vlm import token_grid
from ...data.agreement import exclusions, implications
from ...data.scene import Scene
from ..collator import Prepared, Target
from .centers import center_targets
from .grounding import find_word, object_patches, word_patches
from .presence import CATEGORIES, REGIONS, patch_targets, region_targets


Images = Sequence[Prepared]
Batch = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]
GridOf = Callable[[int, int], tuple[int, int]]  # height and width in pixels → rows and columns of patches


def make_targets(
    losses: Iterable[str], processor: Any, vision_config: Any, sources: Sequence[str]
) -> dict[str, Target]:
    """The targets of losses with these names, for a tower with this configuration.

    Args:
        sources: names of all sources; the index of a source is its position here, 0 for other sources.
    """
    grid_of = partial(token_grid, vision_config)
    made: dict[str, Target] = {
        "presence": partial(presence, grid_of=grid_of, sources=sources),
        "grounding": partial(grounding, grid_of=grid_of, processor=processor),
        "agreement": agreement,
        "centers": partial(centers, classes=[*getattr(vision_config, "located", ())]),
    }
    return {name: made[name] for name in losses}


def presence(images: Images, batch: Batch, grid_of: GridOf, sources: Sequence[str]) -> Tensors:
    """Presence of categories: 1 is present, 0 absent, -1 unknown.

    Returns:
        region: int8 [I,C,4], in the whole image and in its thirds. patch: int8 [I,C,rows,columns]. source: [I], the
        index of each image's source.
    """
    grid, shape = grid_of(*batch["pixel_values"].shape[-2:]), (len(images), len(CATEGORIES))
    region, patch = np.full((*shape, len(REGIONS)), -1, np.int8), np.full((*shape, *grid), -1, np.int8)
    for index, item in enumerate(images):
        if item.truth is not None:
            scene = item.truth.scene
            region[index], patch[index] = region_targets(item.truth), patch_targets(scene, object_patches(scene, grid))
    index_of = {source: index for index, source in enumerate(sources)}
    source = torch.tensor([index_of.get(item.source, 0) for item in images])
    return {"region": torch.from_numpy(region), "patch": torch.from_numpy(patch), "source": source}


def centers(images: Images, batch: Batch, classes: Sequence[str]) -> Tensors:
    """Where the objects of `classes` are; see `center_targets`. Nothing is known about images without a scene."""
    height, width = batch["pixel_values"].shape[-2:]
    scenes = [Scene(width, height) if item.truth is None else item.truth.scene for item in images]
    found = [center_targets(scene, classes, height, width) for scene in scenes]
    return {name: torch.from_numpy(np.stack([one[name] for one in found])) for name in found[0]}


def grounding(images: Images, batch: Batch, grid_of: GridOf, processor: Any) -> Tensors:
    """Words that name objects in the image.

    Returns:
        words: [K,2], row and column of each word. patches: bool [K,P], those of its objects.
    """
    grid = grid_of(*batch["pixel_values"].shape[-2:])
    words, patches = [], []
    for item in images:
        if item.truth is None:
            continue
        scene = item.truth.scene
        for index, category, covered in word_patches(item.questions, scene, object_patches(scene, grid)):
            row, start, end = item.spans[index]
            position = find_word(processor, batch["input_ids"][row, start : end + 1].tolist(), category)
            if position is not None:
                words.append((row, start + position))
                patches.append(covered)
    found = torch.tensor(np.array(patches), dtype=torch.bool).reshape(len(words), grid[0] * grid[1])
    return {"words": _table(words, 2), "patches": found}


def agreement(images: Images, batch: Batch) -> Tensors:
    """Questions about an image whose answers must agree.

    Returns:
        pairs: [K,5], row and column of the last tokens of both questions, and 1 if they exclude each other, 0 if the
        first implies the second.
    """
    found = []
    for item in images:
        places = [(row, end) for row, _, end in item.spans]
        ids = [question.question_id for question in item.questions]
        found += [(*places[i], *places[j], 0) for i, j in implications(ids)]
        found += [(*places[i], *places[j], 1) for i, j in exclusions(ids)]
    return {"pairs": _table(found, 5)}


def _table(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.long).reshape(-1, width)

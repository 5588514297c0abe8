"""Split a dataset so that near-duplicate images (frames of one video) stay on one side.

    images → difference hash of 8 × 8 bits → groups of images whose hashes are close → a part that is held back

A development part shows how a model does on new images only if training has no neighbors of its frames. Where a source
names drives or cameras, split by these; this module is for other sources.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from ..images_traffic_vlm import to_rgb


MAX_DISTANCE = 8  # different bits of 64: from 10 on chains of unlike images form in sources of thousands


def difference_hash(image: Image.Image) -> np.ndarray:
    """Bits [64] of an image: whether each cell of an 8 × 9 grid is brighter than its right neighbor.

    Size, compression and an even change of light hardly alter them.
    """
    cells = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), dtype=int)
    return (cells[:, :-1] > cells[:, 1:]).ravel()


def near_duplicate_groups(hashes: np.ndarray) -> np.ndarray:
    """Group [N] of each image, by bits [N,64] of `difference_hash`; numbered from 0 in the order of first images.

    Two images are in one group if a chain of near-duplicates leads from one to the other: the first and the last frame
    of a video may have nothing in common.
    """
    groups = np.full(len(hashes), -1)
    for first in range(len(hashes)):
        if groups[first] >= 0:
            continue
        groups[first] = groups.max() + 1
        pending = [first]
        while pending:
            is_close = (hashes != hashes[pending.pop()]).sum(axis=1) <= MAX_DISTANCE
            found = (is_close & (groups < 0)).nonzero()[0]
            groups[found] = groups[first]
            pending += found.tolist()
    return groups


def held_back(groups: Iterable[int], folders: Sequence[int], fraction: float, seed: int = 0) -> list[int]:
    """Indices of about `fraction` of the images of each folder (at least one), sorted: whole groups, drawn at random.

    A group that is larger than what is still to be held back of one of its folders is not drawn. If all are, as in a
    single video, nothing is held back. `groups` and `folders` have a number for each image.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(int(group), []).append(index)
    missing = {folder: max(1, round(fraction * count)) for folder, count in Counter(folders).items()}
    chosen: list[int] = []
    for some in random.Random(seed).sample(list(members.values()), len(members)):
        needed = Counter(folders[index] for index in some)
        if all(count <= missing[folder] for folder, count in needed.items()):
            chosen += some
            missing = {folder: count - needed[folder] for folder, count in missing.items()}
    return sorted(chosen)


def image_hashes(rows: Any) -> np.ndarray:
    """Bits [N,64] of the images of a `datasets.Dataset`. `datasets` caches them if it was loaded from files."""
    images = rows.select_columns(["image"])
    hashed = images.map(
        lambda row: {"bits": difference_hash(to_rgb(row["image"]))}, remove_columns="image", desc="comparing images"
    )
    return np.array(hashed["bits"][:], dtype=bool).reshape(-1, 64)


def count_repeated(rows: Any, train_rows: Any) -> dict[str, int]:
    """Number of images of each source that are near-duplicates of training images; sources without any are left out.

    Both are a `datasets.Dataset` with the column "image", and `rows` with "source".
    """
    seen = image_hashes(train_rows)
    pairs = zip(rows.select_columns(["source"]), image_hashes(rows))
    repeated = [row["source"] for row, bits in pairs if ((seen != bits).sum(axis=1) <= MAX_DISTANCE).any()]
    return dict(sorted(Counter(repeated).items()))


def split_rows(datasets: Sequence[Any], fraction: float) -> tuple[list[Any], list[Any], int]:
    """(rows that stay, `fraction` of each dataset that is held back, number of these that may have near-duplicates).

    Rows may have near-duplicates among those that stay if their dataset has no group that is small enough to hold
    back: they are drawn one by one. Each is a `datasets.Dataset` with the column "image" and at least two rows.
    """
    folders = [number for number, rows in enumerate(datasets) for _ in range(len(rows))]
    groups = near_duplicate_groups(np.concatenate([image_hashes(rows) for rows in datasets]))
    chosen = held_back(groups, folders, fraction)
    stay, held, repeated, first = [], [], 0, 0
    for number, rows in enumerate(datasets):
        indices = [index - first for index in chosen if folders[index] == number]
        if not indices:
            indices = sorted(random.Random(0).sample(range(len(rows)), max(1, round(fraction * len(rows)))))
            repeated += len(indices)
        stay.append(rows.select(sorted(set(range(len(rows))) - set(indices))))
        held.append(rows.select(indices))
        first += len(rows)
    return stay, held, repeated

"""Images for training the vision tower: shrunk once to 256 × 256 pixels, and drawn with augmentation and targets.

    dataset folders → rows {pixels, scene, source} in the cache of `datasets` → `TowerImages` → pixels and `Targets`

Images are resized without regard to their shape, as by the processor.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from ..data.augment import augment
from ..data.dataset import Mixture
from ..data.folders import load_rows
from ..data.ground_truth import GroundTruth
from ..data.grounding import object_patches
from ..data.presence import HEAD_QUESTIONS, patch_targets, region_targets
from ..data.scene import parse_scene
from ..data.targets import Targets
from ..files import DataError
from ..images_traffic_vlm import to_rgb


SIDE, SMALL_SIDE = 256, 192
MIN_FACTS = 25  # questions with the answer yes, and with no, that a fact needs in the datasets
UNLEARNED = ("relation", "comparison")  # question types with too many ids for a head


def load_frames(folder: str | Path) -> Any:
    """Rows {pixels, scene, source, image_id, question_ids, answers} of a dataset folder of `scripts/make_dataset.py`.

    The pixels are the bytes of uint8 [256,256,3]; `datasets` keeps them for the next run.

    Raises:
        DataError: the folder or an image cannot be read, or the rows have no scenes.
    """
    rows = load_rows([Path(folder)])
    if "scene" not in rows.column_names:
        raise DataError(f"{folder} has no scenes; make the dataset with make_dataset.py")
    return rows.map(_shrink, remove_columns="image", writer_batch_size=100, desc=f"shrinking the images of {folder}")


def _shrink(row: Any) -> dict[str, bytes]:
    try:
        image = np.asarray(to_rgb(row["image"]))
    except (ValueError, TypeError, OSError) as error:
        raise DataError(f"image {row['image_id']} cannot be read: {error}") from error
    return {"pixels": resize(image, SIDE).tobytes()}


def resize(image: np.ndarray, side: int) -> np.ndarray:
    """The image as uint8 [side,side,3]."""
    shrinks = image.shape[0] * image.shape[1] > side * side
    return cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def pixels_of(row: Any) -> np.ndarray:
    """The image uint8 [256,256,3] of a row of `load_frames`."""
    return np.frombuffer(row["pixels"], np.uint8).reshape(SIDE, SIDE, 3)


def find_facts(rows: Iterable[tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    """The ids of yes/no questions, other than HEAD_QUESTIONS, with at least MIN_FACTS of both answers, sorted.

    Args:
        rows: question ids and answers of each image.
    """
    counts = Counter(pair for ids, answers in rows for pair in zip(ids, answers))
    often = {name for (name, _), count in counts.items() if count >= MIN_FACTS}
    return sorted(
        name
        for name in often - HEAD_QUESTIONS.keys()
        if min(counts[name, "yes"], counts[name, "no"]) >= MIN_FACTS and name.split("/")[0] not in UNLEARNED
    )


def fact_targets(truth: GroundTruth, facts: Sequence[str]) -> np.ndarray:
    """Answers int8 [F] to the yes/no questions with the ids `facts`: 1, 0, or -1 for unknown."""
    found = (truth.find(tuple(name.split("/"))) for name in facts)
    return np.array([-1 if one is None else one.answer == "yes" for one in found], np.int8)


class TowerImages(torch.utils.data.Dataset):
    """Augmented images with their targets, by index: any process, and a resumed run, draws the same ones.

    An item holds pixels uint8 [S,S,3], and `Targets` of one image with patches of 16 pixels.

    Args:
        mixture: of rows of `load_frames`; its epoch has all images of the run.
        sources: the names of all sources; the index of a source is its position here.
        facts: ids of the questions of `fact_targets`.
        small_images: number of images, at the start of the run, that have 192 pixels in place of 256.
    """

    def __init__(self, mixture: Mixture, sources: Sequence[str], facts: Sequence[str], small_images: int = 0):
        self.mixture, self.sources, self.facts = mixture, list(sources), facts
        self.small_images = small_images

    def __len__(self) -> int:
        return len(self.mixture)

    def __getitem__(self, index: int) -> dict[str, Any]:
        cv2.setNumThreads(1)  # the data loader has as many processes as there shall be
        row, rng = self.mixture[index], np.random.default_rng([self.mixture.seed, index])
        side = SMALL_SIDE if index < self.small_images else SIDE
        image, scene = augment(pixels_of(row), parse_scene(row["scene"]), rng)
        truth, covered = GroundTruth(scene), object_patches(scene, (side // 16, side // 16))
        targets = Targets(
            region=torch.from_numpy(region_targets(truth)),
            patch=torch.from_numpy(patch_targets(scene, covered)),
            source=torch.tensor(self.sources.index(row["source"])),
            facts=torch.from_numpy(fact_targets(truth, self.facts)),
        )
        return {"pixels": torch.from_numpy(resize(image, side)), "targets": targets}


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch of `TowerImages`: pixels uint8 [B,S,S,3] and `Targets`."""
    names = vars(items[0]["targets"])
    targets = {name: torch.stack([getattr(item["targets"], name) for item in items]) for name in names}
    return {"pixels": torch.stack([item["pixels"] for item in items]), "targets": Targets(**targets)}

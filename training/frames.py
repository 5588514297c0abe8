"""Images for training the vision tower: decoded once into a memory-mapped array, drawn in augmented batches.

    dataset folders → cache folder {frames.npy uint8 [N,256,256,3], index.json} → batches of pixels and targets

Images are resized to 256 × 256 without regard to their shape, as by the processor. A batch depends only on the seed
and its index, so a resumed run draws the same batches as an uninterrupted one.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from tqdm import tqdm

from ..data.augment import augment
from ..data.folders import load_rows
from ..data.ground_truth import GroundTruth
from ..data.grounding import object_patches
from ..data.presence import HEAD_QUESTIONS, patch_targets, region_targets
from ..data.scene import Scene, parse_scene
from ..data.targets import Targets
from ..files import DataError, atomic_write, atomic_write_text
from ..images_traffic_vlm import to_rgb


SIDE = 256
MIN_FACTS = 25  # questions with the answer yes, and with no, that a fact needs in the datasets
UNLEARNED = ("relation", "comparison")  # question types with too many ids for a head


@dataclass(frozen=True)
class Frames:
    """The images of datasets with their scenes.

    Attributes:
        scenes: [N], as JSON, which takes less memory than objects.
        sources: [N], the source of each image.
        pixels: uint8 [N,256,256,3].
        facts: ids of the yes/no questions, other than HEAD_QUESTIONS, that the datasets ask often.
    """

    scenes: Sequence[str]
    sources: Sequence[str]
    pixels: np.ndarray
    facts: Sequence[str]


def decode(path: object) -> np.ndarray:
    """The image as uint8 [256,256,3]. Raises ValueError if it cannot be read."""
    image = np.asarray(to_rgb(path))
    shrinks = image.shape[0] * image.shape[1] > SIDE * SIDE
    return cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def load_frames(folders: Sequence[str | Path], cache: Path) -> Frames:
    """The frames of dataset folders of `scripts/make_dataset.py`, decoded once into the folder `cache`.

    Raises:
        DataError: a folder or an image cannot be read, or rows have no scenes.
    """
    paths = [Path(folder) for folder in folders]
    rows = load_rows(paths)
    if "scene" not in rows.column_names:
        raise DataError(f"{', '.join(map(str, paths))}: has no scenes; make the datasets with make_dataset.py")
    stats = [(path, path.stat()) for folder in paths for path in sorted((folder / "data").glob("*.parquet"))]
    files = [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    index, pixels = cache / "index.json", cache / "frames.npy"
    known = json.loads(index.read_text(encoding="utf-8")) if index.is_file() and pixels.is_file() else None
    if known != files:
        with atomic_write(pixels) as temporary:
            array = np.lib.format.open_memmap(temporary, "w+", np.uint8, (len(rows), SIDE, SIDE, 3))
            names = rows["image_id"]
            for row in tqdm(range(len(rows)), desc="decoding images", mininterval=5):
                try:
                    array[row] = decode(rows[row]["image"])
                except (ValueError, TypeError, OSError) as error:
                    raise DataError(f"image {names[row]} cannot be read: {error}") from error
            array.flush()
            del array
            index.unlink(missing_ok=True)
        atomic_write_text(index, json.dumps(files))
    facts = find_facts(zip(rows["question_ids"], rows["answers"]))
    return Frames(list(rows["scene"]), list(rows["source"]), np.load(pixels, mmap_mode="r"), facts)


def find_facts(rows: Iterable[tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    """The ids of yes/no questions, other than HEAD_QUESTIONS, with at least MIN_FACTS of both answers, sorted."""
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


class FrameBatches(torch.utils.data.Dataset):
    """The augmented batches of a run, by their index: any process, and a resumed run, draws the same ones.

    A batch holds pixels uint8 [B,S,S,3] and `Targets` for patches of 16 pixels; the index of a source is its position
    in `source_weights`.

    Args:
        frames: as returned by `load_frames`.
        source_weights: {source: sampling weight}, any positive numbers; sources that are absent are not drawn.
        size_of: maps the index of a batch to the side S of its images in pixels.
        steps: number of batches.
    """

    def __init__(
        self,
        frames: Frames,
        source_weights: dict[str, float],
        batch_size: int,
        size_of: Callable[[int], int],
        steps: int,
        seed: int = 0,
    ):
        self.frames, self.batch_size, self.size_of = frames, batch_size, size_of
        self.steps, self.seed = steps, seed
        sources = np.array(frames.sources)
        self.rows = {name: np.flatnonzero(sources == name) for name in source_weights if (sources == name).any()}
        total = sum(source_weights[name] for name in self.rows)
        self.source_weights = [source_weights[name] / total for name in self.rows]

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The batch with this index in the run."""
        cv2.setNumThreads(1)  # the processes of the data loader are as many as there shall be
        rng, size = np.random.default_rng([self.seed, index]), self.size_of(index)
        items, names = [], list(self.rows)
        sources = rng.choice(len(names), self.batch_size, p=self.source_weights)
        for source in sources:
            row = int(rng.choice(self.rows[names[source]]))
            scene = parse_scene(self.frames.scenes[row])
            items.append(drawn(self.frames.pixels[row], scene, self.frames.facts, size, rng))
        pixels, region, patch, facts = (torch.from_numpy(np.stack(column)) for column in zip(*items))
        return {"pixels": pixels, "targets": Targets(region, patch, torch.from_numpy(sources), facts)}


def drawn(
    image: np.ndarray, scene: Scene, facts: Sequence[str], size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """An augmented image [size,size,3], and its region, patch and fact targets."""
    image, scene = augment(image, scene, rng)
    shrinks = size < image.shape[1]
    image = cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    truth, covered = GroundTruth(scene), object_patches(scene, (size // 16, size // 16))
    return image, region_targets(truth), patch_targets(scene, covered), fact_targets(truth, facts)

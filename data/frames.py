"""Images for training the vision tower: decoded once into a memory-mapped array, drawn in augmented batches.

    sources → cache folder {frames.npy uint8 [N,256,256,3], index.json} → batches of pixels and targets

Images are resized to 256 × 256 without regard to their shape, as by the processor. A batch depends only on the seed
and its index, so a resumed run draws the same batches as an uninterrupted one.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from tqdm import tqdm

from ..images_traffic_vlm import to_rgb
from ..utils import DataError, atomic_write, atomic_write_text
from .formats import Problems, read_source
from .presence import INDEX, SCENE_VALUES, ImageLabels, image_labels, targets
from .scene_labels import read_scene_labels


SIDE = 256
# folder: mapping, splits for training, splits for development. Images of one drive are never in both.
SOURCES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "bdd100k": ("bdd100k_coco", ("train",), ("val",)),
    "camvid": ("camvid", ("train_part",), ("dev",)),
    "driving_signs": ("driving_signs", ("train",), ("val",)),
    "highway": ("highway", ("train",), ("val",)),
    "idd_lite": ("idd_lite", ("train_part",), ("dev",)),
    "road_signs": ("road_signs", ("train",), ("val",)),
    "road_vehicles": ("road_vehicles", ("train_part",), ("dev",)),
    "traffic_camera": ("traffic_camera", ("train",), ("val",)),
    "traffic_lights": ("traffic_lights", ("train",), ("val",)),
}


@dataclass(frozen=True)
class Frame:
    """One image with its labels; `source` names the folder it came from."""

    path: Path
    source: str
    labels: ImageLabels


def read_frames(root: str | Path, development: bool, problems: Problems) -> list[Frame]:
    """All images of the sources in the folder `root`, for training or for development.

    Missing folders and images that cannot be opened are added to `problems`.

    Raises:
        DataError: no source has an image.
    """
    root, frames = Path(root), []
    for source, (mapping, *splits) in SOURCES.items():
        if not (root / source).is_dir():
            problems.add("missing source", root / source, "the folder does not exist")
            continue
        seen_path = root / "scene_labels" / f"{source}.jsonl"
        if not seen_path.is_file():
            problems.add("missing scene labels", seen_path, "the file does not exist")
        seen = dict(read_scene_labels(seen_path, problems)) if seen_path.is_file() else {}
        for split in splits[development]:
            for record in read_source(root / source, mapping, split, problems):
                name = record.image.relative_to(root).as_posix()
                frames.append(Frame(record.image, source, image_labels(record.scene, seen.get(name))))
    if not frames:
        found = "".join(f"\n  {message}" for message in problems.messages[:20])
        raise DataError(f"{root}: none of {', '.join(SOURCES)} has an image{found}")
    return frames


def decode(path: Path) -> np.ndarray:
    """The image as uint8 [256,256,3]. Raises ValueError if it cannot be read."""
    image = np.asarray(to_rgb(path))
    shrinks = image.shape[0] * image.shape[1] > SIDE * SIDE
    return cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def load_frames(frames: Sequence[Frame], cache: Path, problems: Problems) -> tuple[list[Frame], np.ndarray]:
    """The frames whose images can be read, and their pixels uint8 [N,256,256,3], decoded once into the folder `cache`.

    Unreadable images are added to `problems`, also when the cache is reused.
    """
    stats = [frame.path.stat() for frame in frames]
    files = [[str(frame.path), stat.st_size, stat.st_mtime_ns] for frame, stat in zip(frames, stats)]
    index, pixels = cache / "index.json", cache / "frames.npy"
    known = json.loads(index.read_text(encoding="utf-8")) if index.is_file() and pixels.is_file() else {}
    if known.get("files") != files:
        known = {"files": files, "rows": [], "unreadable": []}
        with atomic_write(pixels) as temporary:
            array = np.lib.format.open_memmap(temporary, "w+", np.uint8, (len(files), SIDE, SIDE, 3))
            for row, frame in enumerate(tqdm(frames, desc="decoding images", mininterval=5)):
                try:
                    array[len(known["rows"])] = decode(frame.path)
                    known["rows"].append(row)
                except (ValueError, TypeError) as error:
                    known["unreadable"].append([str(frame.path), str(error)])
            array.flush()
            del array
            index.unlink(missing_ok=True)
        atomic_write_text(index, json.dumps(known))
    for name, error_text in known["unreadable"]:
        problems.add("corrupt image", name, error_text)
    return [frames[row] for row in known["rows"]], np.load(pixels, mmap_mode="r")[: len(known["rows"])]


class FrameBatches(torch.utils.data.IterableDataset):
    """An endless stream of augmented batches.

    A batch holds pixels uint8 [B,S,S,3], region int8 [B,C,4], patch int8 [B,C,S/16,S/16] and source [B], the index of
    each image's source in `source_weights`.

    Args:
        frames, pixels: as returned by `load_frames`.
        source_weights: {source: sampling weight}, any positive numbers; sources that are absent are not drawn.
        size_of: maps the index of a batch to the side S of its images in pixels.
        start: index of the first batch.
    """

    def __init__(
        self,
        frames: Sequence[Frame],
        pixels: np.ndarray,
        source_weights: dict[str, float],
        batch_size: int,
        size_of: Callable[[int], int],
        start: int = 0,
        seed: int = 0,
    ):
        super().__init__()
        self.frames, self.pixels, self.batch_size, self.size_of = frames, pixels, batch_size, size_of
        self.start, self.seed = start, seed
        sources = np.array([frame.source for frame in frames])
        self.rows = {name: np.flatnonzero(sources == name) for name in source_weights if (sources == name).any()}
        total = sum(source_weights[name] for name in self.rows)
        self.source_weights = [source_weights[name] / total for name in self.rows]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        cv2.setNumThreads(1)
        index = self.start + first
        while True:
            yield self.batch(index)
            index += step

    def batch(self, index: int) -> dict[str, torch.Tensor]:
        """The batch with this index in the run."""
        rng, size = np.random.default_rng([self.seed, index]), self.size_of(index)
        items, names = [], list(self.rows)
        sources = rng.choice(len(names), self.batch_size, p=self.source_weights)
        for source in sources:
            row = int(rng.choice(self.rows[names[source]]))
            items.append(augmented(self.pixels[row], self.frames[row].labels, size, rng))
        pixels, region, patch = (torch.from_numpy(np.stack(column)) for column in zip(*items))
        return {"pixels": pixels, "region": region, "patch": patch, "source": torch.from_numpy(sources)}


def augmented(
    image: np.ndarray, labels: ImageLabels, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A random crop of 40 to 100 % of the image with random mirroring and light, and its region and patch targets."""
    window, mirrored = random_window(rng), rng.random() < 0.5
    region, patch = targets(labels, window, mirrored, (size // 16, size // 16))
    left, top, right, bottom = (round(SIDE * edge) for edge in window)
    crop = image[top:bottom, left:right]
    crop = cv2.resize(crop, (size, size), interpolation=cv2.INTER_AREA if size < right - left else cv2.INTER_LINEAR)
    crop = crop[:, ::-1] if mirrored else crop
    return relight(np.ascontiguousarray(crop), region, patch, rng), region, patch


def random_window(rng: np.random.Generator) -> tuple[float, float, float, float]:
    """A random window (left, top, right, bottom in 0..1) of 40 to 100 % of the area.

    Its width and height, as fractions of the image, differ by at most a third.
    """
    area, shape = rng.uniform(0.4, 1.0), np.exp(rng.uniform(-0.28, 0.28))
    width, height = min(1.0, np.sqrt(area * shape)), min(1.0, np.sqrt(area / shape))
    left, top = rng.uniform(0, 1 - width), rng.uniform(0, 1 - height)
    return float(left), float(top), float(left + width), float(top + height)


def relight(image: np.ndarray, region: np.ndarray, patch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Randomly change brightness, contrast, saturation, blur, noise and JPEG quality; add darkness, fog or rain.

    Targets that the change makes unrecognizable are set to unknown, in place.
    """
    gain, offset = rng.uniform(0.7, 1.35), rng.uniform(-25, 25)
    table = (np.arange(256) / 255.0) ** np.exp(rng.uniform(-0.3, 0.3)) * 255 * gain + offset
    if rng.random() < 0.05:
        table = table * rng.uniform(0.25, 0.6)
        _forget(region, patch, ("time_of_day", "weather"))
    image = cv2.LUT(image, table.clip(0, 255).astype(np.uint8))
    chance = rng.random(6)
    if chance[0] < 0.1:
        image = np.repeat(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None], 3, 2)
        _forget(region, patch, ("red light", "green light", "yellow light", "weather"))
    elif chance[0] < 0.5:
        gray = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
        amount = rng.uniform(0.6, 1.4)
        image = cv2.addWeighted(image, amount, gray, 1 - amount, 0)
    if chance[1] < 0.03:
        haze = np.linspace(rng.uniform(0.4, 0.85), rng.uniform(0.1, 0.5), len(image))[:, None, None]
        image = (image * (1 - haze) + rng.uniform(150, 225) * haze).astype(np.uint8)
        _forget(region, patch, ("weather", "glare"))
    if chance[2] < 0.03:
        _draw_rain(image, rng)
        _forget(region, patch, ("weather", "road"))
    if chance[3] < 0.12:
        image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.3, 1.3))
    if chance[4] < 0.12:
        noise = rng.standard_normal(image.shape, np.float32) * rng.uniform(2, 12)
        image = (image + noise).clip(0, 255).astype(np.uint8)
    if chance[5] < 0.12:
        _, coded = cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(25, 85))))
        image = np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR))
    return image


def _draw_rain(image: np.ndarray, rng: np.random.Generator) -> None:
    size, slant = len(image), rng.uniform(-0.3, 0.3)
    for x, y, length in rng.uniform((0, 0, 0.03), (1, 1, 0.1), (int(rng.integers(40, 160)), 3)) * size:
        tone = int(rng.integers(150, 230))
        end = (int(x + slant * length), int(y + length))
        cv2.line(image, (int(x), int(y)), end, (tone, tone, tone), 1, cv2.LINE_AA)


def _forget(region: np.ndarray, patch: np.ndarray, names: Sequence[str]) -> None:
    for name in names:
        for category in [f"{name}: {value}" for value in SCENE_VALUES[name]] if name in SCENE_VALUES else [name]:
            region[INDEX[category]] = -1
            patch[INDEX[category]] = -1

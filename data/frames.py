"""Images for training the vision tower: decoded once into a memory-mapped array, drawn in augmented batches.

    dataset folders → cache folder {frames.npy uint8 [N,256,256,3], index.json} → batches of pixels and targets

Images are resized to 256 × 256 without regard to their shape, as by the processor. A batch depends only on the seed
and its index, so a resumed run draws the same batches as an uninterrupted one.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from tqdm import tqdm

from ..files import DataError, atomic_write, atomic_write_text
from ..images_traffic_vlm import to_rgb
from .collator import cropped_fraction, mirrored_fraction
from .folders import load_rows
from .ground_truth import View
from .presence import HEAD_QUESTIONS, INDEX, SCENE_VALUES, image_labels, targets
from .scene import Scene


SIDE = 256
WHOLE = (0.0, 0.0, 1.0, 1.0)
MIN_FACTS = 25  # questions with the answer yes, and with no, that a fact needs in the datasets
UNLEARNED = ("relation", "comparison")  # question types with too many ids for a head
# Question types whose answers a change of light can falsify.
OF_LIGHT = ("color", "light_state", "weather", "road_surface", "time_of_day")


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


def fact_targets(scene: Scene, facts: Sequence[str]) -> np.ndarray:
    """Answers int8 [F] to the yes/no questions with the ids `facts`: 1, 0, or -1 for unknown."""
    view = View(scene)
    found = (view.find(tuple(name.split("/"))) for name in facts)
    return np.array([-1 if one is None else one[0] == "yes" for one in found], np.int8)


class FrameBatches(torch.utils.data.IterableDataset):
    """An endless stream of augmented batches.

    A batch holds pixels uint8 [B,S,S,3], region int8 [B,C,4], patch int8 [B,C,S/16,S/16], facts int8 [B,F] and source
    [B], the index of each image's source in `source_weights`.

    Args:
        frames: as returned by `load_frames`.
        source_weights: {source: sampling weight}, any positive numbers; sources that are absent are not drawn.
        size_of: maps the index of a batch to the side S of its images in pixels.
        start: index of the first batch.
    """

    def __init__(
        self,
        frames: Frames,
        source_weights: dict[str, float],
        batch_size: int,
        size_of: Callable[[int], int],
        start: int = 0,
        seed: int = 0,
    ):
        super().__init__()
        self.frames, self.batch_size, self.size_of = frames, batch_size, size_of
        self.start, self.seed = start, seed
        sources = np.array(frames.sources)
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
            scene = Scene.from_json(self.frames.scenes[row])
            items.append(augmented(self.frames.pixels[row], scene, self.frames.facts, size, rng))
        pixels, region, patch, facts = (torch.from_numpy(np.stack(column)) for column in zip(*items))
        batch = {"pixels": pixels, "region": region, "patch": patch, "facts": facts}
        return batch | {"source": torch.from_numpy(sources)}


def augmented(
    image: np.ndarray, scene: Scene, facts: Sequence[str], size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The image or a crop, with random mirroring and light, and its region, patch and fact targets."""
    labels, window = image_labels(scene), WHOLE
    if rng.random() < cropped_fraction(scene):
        size_of_edges = (scene.width, scene.height) * 2
        left, top, right, bottom = (round(edge * whole) for edge, whole in zip(random_window(rng), size_of_edges))
        window = left / scene.width, top / scene.height, right / scene.width, bottom / scene.height
        scene = scene.cropped(left, top, right, bottom)
    mirrored = rng.random() < mirrored_fraction(scene)
    region, patch = targets(labels, window, mirrored, (size // 16, size // 16))
    answers = fact_targets(scene.flipped() if mirrored else scene, facts)
    left, top, right, bottom = (round(edge * SIDE) for edge in window)
    crop = image[top:bottom, left:right]
    crop = cv2.resize(crop, (size, size), interpolation=cv2.INTER_AREA if size < right - left else cv2.INTER_LINEAR)
    crop = crop[:, ::-1] if mirrored else crop
    image, hidden = relight(np.ascontiguousarray(crop), rng)
    _forget(region, patch, hidden)
    if hidden:
        answers[[name.split("/")[0] in OF_LIGHT for name in facts]] = -1
    return image, region, patch, answers


def random_window(rng: np.random.Generator) -> tuple[float, float, float, float]:
    """A random window (left, top, right, bottom in 0..1) of 40 to 100 % of the area.

    Its width and height, as fractions of the image, differ by at most a third.
    """
    area, shape = rng.uniform(0.4, 1.0), np.exp(rng.uniform(-0.28, 0.28))
    width, height = min(1.0, np.sqrt(area * shape)), min(1.0, np.sqrt(area / shape))
    left, top = rng.uniform(0, 1 - width), rng.uniform(0, 1 - height)
    return float(left), float(top), float(left + width), float(top + height)


def relight(image: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, list[str]]:
    """Randomly change brightness, contrast, saturation, blur, noise and JPEG quality; add darkness, fog or rain.

    Returns:
        the image, and the names of categories and scene labels that the change makes unrecognizable.
    """
    hidden: list[str] = []
    gain, offset = rng.uniform(0.7, 1.35), rng.uniform(-25, 25)
    table = (np.arange(256) / 255.0) ** np.exp(rng.uniform(-0.3, 0.3)) * 255 * gain + offset
    if rng.random() < 0.05:
        table = table * rng.uniform(0.25, 0.6)
        hidden += ["time_of_day", "weather"]
    image = cv2.LUT(image, table.clip(0, 255).astype(np.uint8))
    chance = rng.random(6)
    if chance[0] < 0.1:
        image = np.repeat(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None], 3, 2)
        hidden += ["red light", "green light", "yellow light", "weather"]
    elif chance[0] < 0.5:
        gray = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
        amount = rng.uniform(0.6, 1.4)
        image = cv2.addWeighted(image, amount, gray, 1 - amount, 0)
    if chance[1] < 0.03:
        haze = np.linspace(rng.uniform(0.4, 0.85), rng.uniform(0.1, 0.5), len(image))[:, None, None]
        image = (image * (1 - haze) + rng.uniform(150, 225) * haze).astype(np.uint8)
        hidden += ["weather", "glare"]
    if chance[2] < 0.03:
        _draw_rain(image, rng)
        hidden += ["weather", "road"]
    if chance[3] < 0.12:
        image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.3, 1.3))
    if chance[4] < 0.12:
        noise = rng.standard_normal(image.shape, np.float32) * rng.uniform(2, 12)
        image = (image + noise).clip(0, 255).astype(np.uint8)
    if chance[5] < 0.12:
        _, coded = cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(25, 85))))
        image = np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR))
    return image, hidden


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

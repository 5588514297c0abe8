"""Datasets of images, scenes and questions: written as Parquet files, rendered while training, and mixed.

    records or seeds → questions → rows {image, questions, answers, ..., source, image_id, scene} → Parquet files

The content of a file follows from the options and its index alone, and a file is either complete or absent. So a run
that is stopped at any moment and started again writes the same files as one that was never stopped.
"""

import hashlib
import io
import json
import multiprocessing
import os
import random
import re
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset, Features, Image, List, Value, disable_progress_bars
from PIL import Image as PILImage
from tqdm import tqdm

from ..files import DataError, atomic_write, atomic_write_text
from .folders import LISTS, select_evenly
from .formats import Problems, Record, check_sources, load_mapping, read_source
from .formats.drafting import draft_mapping
from .questions import Balancer, NaturalRates, Question, ask, rebalance
from .scene import SYNTHETIC, Scene
from .scene_labels import read_scene_labels, with_scene_labels
from .synthetic import render


Item = Record | int  # an annotated image, or the seed of a synthetic one
FEATURES = Features(
    {
        "image": Image(),
        **{name: List(Value("string")) for name in LISTS},
        **{name: Value("string") for name in ("source", "image_id", "scene")},
    }
)
SYNTHETIC_IMAGES = 1000  # by default
JPEG_QUALITY = 92  # of synthetic images: about 20 kB each, without visible artifacts
# With the hash of the files: without it `load_dataset` may load another folder of the same name from its cache.
CARD = """---
configs:
  - config_name: default
    description: made of {files}
    data_files:
      - split: {split}
        path: data/{split}-*.parquet
---

Images of traffic scenes with questions and true answers, made by `scripts/make_dataset.py` of Traffic VLM.
"""


@dataclass
class DatasetOptions:
    """Options of `make_dataset`."""

    output_dir: Path = field(metadata={"help": "folder to write to"})
    source: list[str] = field(
        default_factory=lambda: [SYNTHETIC],
        metadata={
            "help": "synthetic, NAME=FOLDER with the name or path of a mapping file, or a FOLDER with data.yaml, COCO "
            "or Pascal VOC files, for which a mapping file is drafted beside output_dir"
        },
    )
    scene_labels: Path | None = field(
        default=None, metadata={"help": "folder of scene labels: a file FOLDER.jsonl for the folder of each source"}
    )
    num_images: int | None = field(
        default=None,
        metadata={"help": "maximum number of images of each source, evenly spread; default: all, 1000 synthetic ones"},
    )
    split: str = field(default="train", metadata={"help": "split of the sources, and of the dataset"})
    questions_per_image: int = field(default=16, metadata={"help": "maximum number of questions for each image"})
    balance: bool = field(
        default=True,
        metadata={"help": "as many yes as no for each question type and class; false: as frequent as in the images"},
    )
    first_seed: int = field(default=0, metadata={"help": "seed of the first synthetic image"})
    seed: int = field(default=0, metadata={"help": "seed of the choice of questions"})
    shard_size: int = field(default=256, metadata={"help": "images in a file"})
    num_workers: int = field(default=2, metadata={"help": "number of processes"})
    strict: bool = field(default=False, metadata={"help": "stop at the first problem instead of skipping the image"})

    def __post_init__(self) -> None:
        for name in ("questions_per_image", "shard_size", "num_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not re.fullmatch(r"\w+(\.\w+)*", self.split):
            raise ValueError(f"--split must be words with dots between, like train or val.night, got {self.split!r}")


def make_dataset(options: DatasetOptions) -> dict[str, Any]:
    """Write data/SPLIT-*.parquet, README.md and report.json to a folder, or complete them after a stopped run.

    Returns:
        The report: numbers of images, and of questions by type; what was skipped; the fraction of yes by category.

    Raises:
        DataError: a source or its mapping is unusable, or the folder holds another dataset. OSError: for example, the
            disk is full; complete files are kept.
    """
    problems = Problems(strict=options.strict)
    items = read_items(options, problems)
    _check_plan(options, items)
    paths = _write_shards(options, [item for part in items.values() for item in part])
    report = _summarize(paths, problems)
    files = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            files.update(hashlib.file_digest(file, "sha256").digest())
    card = CARD.format(split=options.split, files=files.hexdigest())
    atomic_write_text(options.output_dir / "README.md", card)
    atomic_write_text(options.output_dir / "report.json", json.dumps(report, indent=1, sort_keys=True))
    return report


def read_items(options: DatasetOptions, problems: Problems) -> dict[str, list[Item]]:
    """Return all images by source, in a fixed order. Each split has synthetic scenes of its own.

    Raises:
        DataError: a source is unknown or given twice, or no source has a usable image.
    """
    parts = {source: _find_mapping(source, options.output_dir) for source in options.source}
    mappings = {name: load_mapping(name) for name, folder in parts.values() if folder}
    check_sources(mappings.values())
    folders = [(mappings[name].name, Path(folder).resolve()) for name, folder in parts.values() if folder]
    if len(parts) < len(options.source) or len(set(folders)) < len(folders):
        raise DataError(f"a source is given twice: {' '.join(options.source)}")
    items: dict[str, list[Item]] = {}
    for source, (name, folder) in parts.items():
        if folder:
            records = list(read_source(folder, mappings[name], options.split, problems))
            if options.scene_labels is not None:
                records = add_scene_labels(records, Path(folder), options.scene_labels, problems)
            count = len(records) if options.num_images is None else options.num_images
            items[source] = list(select_evenly(records, count))
        else:
            count = SYNTHETIC_IMAGES if options.num_images is None else options.num_images
            offset = 0 if options.split == "train" else (1 + zlib.crc32(options.split.encode())) << 32
            items[source] = [offset + options.first_seed + i for i in range(count)]
    if not any(items.values()):
        found = "; ".join(problems.messages[:3]) or "--num_images is 0"
        raise DataError(f"the sources {options.source} have no usable image: {found}")
    return items


def _find_mapping(source: str, output_dir: Path) -> tuple[str, str]:
    """Return (mapping, folder) of a value of --source, with a drafted mapping if it is a folder alone.

    For "synthetic" both are empty.
    """
    if source == SYNTHETIC:
        return "", ""
    if Path(source).is_dir():
        path = output_dir.parent / f"{output_dir.name}_{Path(source).resolve().name}.json"
        print(draft_mapping(Path(source), path))
        return str(path), source
    mapping, _, folder = source.partition("=")
    if not folder:
        raise DataError(f"source {source!r} is no folder, and a mapping needs one: --source {source}=FOLDER")
    return mapping, folder


def add_scene_labels(records: Sequence[Record], folder: Path, scene_labels: Path, problems: Problems) -> list[Record]:
    """Add scene labels to the records of a source; images without any are added to `problems`.

    Raises:
        DataError: the source has no file of scene labels.
    """
    path = scene_labels / f"{folder.resolve().name}.jsonl"
    if not path.is_file():
        raise DataError(f"{path} does not exist; --scene_labels needs a file for the folder of each source")
    labels, found = {}, []
    for name, entry in read_scene_labels(path, problems):
        if name in labels:
            problems.add("bad scene label", path, f"{name} has two lines")
        elif not (folder.resolve().parent / name).is_file():
            problems.add("scene labels without image", path, f"{name} does not exist")
        labels[name] = entry
    for record in records:
        name = f"{folder.resolve().name}/{record.image.relative_to(folder).as_posix()}"
        if name not in labels:
            problems.add("image without scene labels", record.image, f"{path} has no line for {name}")
        scene = with_scene_labels(record.scene, labels[name]) if name in labels else record.scene
        found.append(replace(record, scene=scene))
    return found


def _check_plan(options: DatasetOptions, items: dict[str, list[Item]]) -> None:
    """Note what the dataset consists of; refuse a folder that holds something else."""
    plan = {name: str(value) for name, value in asdict(options).items() if name not in ("num_workers", "output_dir")}
    plan |= {f"images of {source}": _fingerprint(part) for source, part in items.items()}
    folder, path = options.output_dir, options.output_dir / ".parts" / "plan.json"
    existing = [name for name in ("README.md", "report.json", "data") if (folder / name).exists()]
    if existing and not path.exists():
        raise DataError(f"{folder} has {', '.join(existing)} of something else; choose another --output_dir")
    advice = f"choose another --output_dir, or delete {folder} to start over"
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else plan
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); {advice}") from error
    changes = [f"{key}: {before.get(key)} before, {plan[key]} now" for key in plan if before.get(key) != plan[key]]
    if changes:
        raise DataError(f"{folder} holds another dataset ({'; '.join(changes)}); {advice}")
    atomic_write_text(path, json.dumps(plan, indent=1))


def _fingerprint(items: list[Item]) -> str:
    """Hash seeds, or scenes with the names, sizes and times of their image files."""
    digest = hashlib.sha256()
    for item in items:
        text = str(item)
        if isinstance(item, Record):
            status = item.image.stat()
            text = f"{item.image.name} {status.st_size} {status.st_mtime_ns} {item.scene.to_json()}"
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()[:16]


def _write_shards(options: DatasetOptions, items: list[Item]) -> list[Path]:
    """Write the files that are missing, in parallel; return the paths of all."""
    folder = options.output_dir / "data"
    for temporary in (*folder.glob("*.tmp"), *folder.parent.glob(".parts/*.tmp")):  # of a killed run
        temporary.unlink(missing_ok=True)
    paths: list[Path] = []
    shards: dict[int, list[Item]] = {}  # those to write
    for start in range(0, len(items), options.shard_size):
        paths.append(folder / f"{options.split}-{len(paths):05d}.parquet")
        if not paths[-1].exists():
            shards[len(paths) - 1] = items[start : start + options.shard_size]
    done = len(items) - sum(map(len, shards.values()))
    with (
        tqdm(total=len(items), initial=done, unit="image") as progress,
        ProcessPoolExecutor(options.num_workers, initializer=end_with_parent) as pool,
    ):
        futures = {pool.submit(write_shard, paths[i], shard, i, options): shard for i, shard in shards.items()}
        try:
            for future in as_completed(futures):
                future.result()
                progress.update(len(futures[future]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return paths


def end_with_parent() -> None:
    """Make this worker end with its parent, whatever ended that: a worker of a killed parent would wait for good."""
    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write_shard(path: Path, items: Sequence[Item], index: int, options: DatasetOptions) -> None:
    """Write one Parquet file, and what was skipped beside it.

    Raises:
        DataError: an image cannot be read and `options.strict` is set. OSError: for example, the disk is full.
    """
    rng, balancer = random.Random(f"{options.seed}/{index}"), Balancer() if options.balance else NaturalRates()
    skipped: Counter[str] = Counter()
    messages, loaded, asked, rows = [], [], [], []
    for item in items:
        try:
            loaded.append(load_item(item))
        except DataError as error:
            if options.strict:
                raise
            skipped["unreadable image"] += 1
            messages.append(str(error))
            continue
        asked.append(ask(loaded[-1][1], rng, options.questions_per_image, balancer))
    for (image, scene), questions in zip(loaded, rebalance(asked) if options.balance else asked):
        if questions:
            rows.append(make_row(image, scene, questions))
        else:
            skipped["nothing to ask"] += 1
    # Written first: a Parquet file that exists needs no further work.
    atomic_write_text(skipped_path(path), json.dumps({"skipped": skipped, "messages": messages}))
    disable_progress_bars()  # of the library: ours counts images
    with atomic_write(path) as temporary:
        columns = {name: [row[name] for row in rows] for name in FEATURES}
        Dataset.from_dict(columns, features=FEATURES).to_parquet(str(temporary))


def skipped_path(shard: Path) -> Path:
    """Return the file that notes what a Parquet file lacks, in a hidden folder that `load_dataset` ignores."""
    return shard.parent.parent / ".parts" / f"{shard.stem}.json"


def _summarize(paths: Sequence[Path], problems: Problems) -> dict[str, Any]:
    """Return the report on these files, and on the problems that the readers found."""
    skipped, messages, rows = Counter(problems.counts), list(problems.messages), []
    for path in paths:
        try:
            noted = json.loads(skipped_path(path).read_text(encoding="utf-8"))
            skipped.update(noted["skipped"])
            messages += noted["messages"]
            rows += pq.read_table(path, columns=["source", "question_types", "categories", "answers"]).to_pylist()
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{path} or {skipped_path(path)} is damaged ({error!r})"
            raise DataError(f"{what}; delete {path} and run the same command again") from error
    answers = Counter(
        (f"{question_type}/{category}", answer)
        for row in rows
        for question_type, category, answer in zip(row["question_types"], row["categories"], row["answers"])
    )
    yes_no = sorted({name for name, answer in answers if answer in ("yes", "no")})
    return {
        "images": len(rows),
        "messages": messages,
        "questions": Counter(question_type for row in rows for question_type in row["question_types"]),
        "skipped": skipped,
        "sources": Counter(row["source"] for row in rows),
        "yes_rates": {
            name: round(answers[name, "yes"] / (answers[name, "yes"] + answers[name, "no"]), 3) for name in yes_no
        },
    }


def make_row(image: bytes, scene: Scene, questions: Sequence[Question]) -> dict[str, Any]:
    """Return one row of FEATURES; the image as the bytes of a file."""
    return {
        "image": {"bytes": image, "path": None},
        "questions": [question.text for question in questions],
        "answers": [question.answer for question in questions],
        "question_types": [question.question_type for question in questions],
        "categories": [question.category for question in questions],
        "question_ids": [question.question_id for question in questions],
        "source": scene.source,
        "image_id": scene.image_id,
        "scene": scene.to_json(),
    }


def load_item(item: Item) -> tuple[bytes, Scene]:
    """Return the bytes of an image file and its scene, from annotations or a synthetic seed.

    Raises:
        DataError: the image cannot be read.
    """
    if isinstance(item, int):
        image, scene = render(item)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        return buffer.getvalue(), scene
    try:
        content = item.image.read_bytes()
        with PILImage.open(io.BytesIO(content)) as opened:
            opened.load()  # a truncated file opens, but does not load
    except Exception as error:  # Pillow raises almost any error on damaged bytes
        raise DataError(f"{item.image}: the image cannot be read: {error}") from error
    return content, item.scene


def synthetic_rows(first_seed: int, num_images: int, questions_per_image: int = 16) -> list[dict[str, Any]]:
    """Return rows of rendered scenes as `load_dataset` would give them, with decoded images."""
    rng, balancer = random.Random(first_seed), Balancer()
    items = [load_item(seed) for seed in range(first_seed, first_seed + num_images)]
    asked = rebalance([ask(scene, rng, questions_per_image, balancer) for _, scene in items])
    rows = [make_row(content, scene, questions) for (content, scene), questions in zip(items, asked)]
    return [row | {"image": PILImage.open(io.BytesIO(row["image"]["bytes"]))} for row in rows]


class SyntheticRows(torch.utils.data.Dataset):
    """Rendered scenes as rows {image (PIL), scene, source, image_id}, one for each seed from `first_seed` on."""

    def __init__(self, first_seed: int = 0, num_images: int = 1 << 20):
        self.first_seed, self.num_images = first_seed, num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, scene = render(self.first_seed + index)
        return {"image": image, "scene": scene.to_json(), "source": scene.source, "image_id": scene.image_id}


class Mixture(torch.utils.data.Dataset):
    """Rows of several map-style datasets. A row follows from the seed, the epoch and the index alone.

    Args:
        sources: the datasets.
        weights: of each dataset, any positive numbers; by default the number of its rows.
        images_per_epoch: the number of images between two checkpoints; by default the number of all rows.
        seed: of the draw.

    Raises:
        ValueError: there is no dataset, one is empty, or the weights do not fit.
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
        """Choose the epoch to draw; called before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.images_per_epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self.seed}/{self.epoch}/{index}")
        [source] = rng.choices(range(len(self.sources)), self.weights)
        return self.sources[source][rng.randrange(self.sizes[source])]

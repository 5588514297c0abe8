"""Datasets of images, scenes and questions: written as Parquet files, rendered while training, and mixed.

    records or seeds → blocks of 256 → Dataset.from_generator → rows {image, questions, answers, ..., scene} → Parquet

The rows of a block follow from the options and its index alone, and a file is either complete or absent. So a run that
is stopped and started again writes the same rows as one that was never stopped, with any number of processes.
"""

import hashlib
import io
import json
import random
import re
import shutil
import tempfile
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from datasets import Dataset, Features, Image, List, Value, disable_progress_bars
from PIL import Image as PILImage
from tqdm import tqdm

from ..common.files import DataError, atomic_write, atomic_write_text, claim
from .folders import LISTS, select_evenly
from .formats import Problems, Record, check_sources, load_mapping, read_source
from .formats.drafting import draft_mapping
from .formats.names import plain_name
from .ground_truth import GroundTruth
from .near_duplicates import hash_file, near_duplicate_groups
from .questions import Balancer, NaturalRates, Question, ask, rebalance
from .scene import SYNTHETIC, Scene
from .scene_labels import read_scene_labels, with_scene_labels
from .synthetic import render


Item = Record | int  # an annotated image, or the seed of a synthetic one
FEATURES = Features(
    {
        "image": Image(),
        **{name: List(Value("string")) for name in LISTS},
        **{name: Value("string") for name in ("source", "image_id", "group", "scene")},
    }
)
COLUMN_OF = tuple(zip(LISTS, ("text", "answer", "question_type", "category", "question_id")))  # (column, attribute)
SYNTHETIC_IMAGES = 1000  # by default
BLOCK = 256  # images among which the answers are balanced
NOTHING = "nothing to ask"  # the problem of an image without a possible question
REPORT = ("source", "question_types", "categories", "answers")  # columns that the report counts
JPEG_QUALITY = 92  # of synthetic images: about 20 kB each, without visible artifacts
# `files` is a hash of the files: without it `load_dataset` may load another folder of the same name from its cache.
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
            "or Pascal VOC files, for which a mapping file is drafted next to output_dir"
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
    images_per_file: int = field(default=2 * BLOCK, metadata={"help": "a stopped run continues after the last file"})
    num_workers: int = field(default=2, metadata={"help": "number of processes"})
    strict: bool = field(default=False, metadata={"help": "stop at the first problem instead of skipping the image"})

    def __post_init__(self) -> None:
        for name in ("questions_per_image", "images_per_file", "num_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not re.fullmatch(r"\w+(\.\w+)*", self.split):
            raise ValueError(f"--split must be words with dots between, like train or val.night, got {self.split!r}")


def make_dataset(options: DatasetOptions) -> dict[str, Any]:
    """Write data/SPLIT-*.parquet, README.md and report.json to a folder, or complete them after a stopped run.

    Returns:
        The report: numbers of images, and of questions by type; what was skipped because it is unusable;
        what was left out as intended; the fraction of yes by category.

    Raises:
        DataError: a source or its mapping is unusable, or the folder holds another dataset. OSError: for example, the
            disk is full; complete files are kept.
    """
    folder, problems = options.output_dir, Problems(strict=options.strict)
    items = read_items(options, problems)
    others = [name for name in ("README.md", "report.json", "data") if (folder / name).exists()]
    if others and not (folder / ".options.json").exists():
        raise DataError(f"{folder} has {', '.join(others)} of something else; choose another --output_dir")
    chosen = {name: str(value) for name, value in asdict(options).items() if name not in ("num_workers", "output_dir")}
    claim(folder, chosen | {f"images of {source}": _fingerprint(part) for source, part in items.items()})
    paths = _write_files([item for part in items.values() for item in part], options)
    report, digest = _summarize(paths, problems), hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    atomic_write_text(folder / "README.md", CARD.format(split=options.split, files=digest.hexdigest()))
    atomic_write_text(folder / "report.json", json.dumps(report, indent=1, sort_keys=True))
    return report


def read_items(options: DatasetOptions, problems: Problems) -> dict[str, list[Item]]:
    """All images by source, in a fixed order. Each split has other synthetic scenes.

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
            items[source] = list(add_groups(select_evenly(records, count)))
        else:
            count = SYNTHETIC_IMAGES if options.num_images is None else options.num_images
            offset = 0 if options.split == "train" else (1 + zlib.crc32(options.split.encode())) << 32
            items[source] = [offset + options.first_seed + i for i in range(count)]
    if not any(items.values()):
        found = "; ".join(problems.messages[:3]) or f"--num_images is {options.num_images}"
        raise DataError(f"the sources {options.source} have no usable image: {found}")
    return items


def _find_mapping(source: str, output_dir: Path) -> tuple[str, str]:
    """(mapping, folder) of a value of --source, with a drafted mapping if it is a folder alone.

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
        raise DataError(f"source {source!r} is not a folder, and a mapping needs one: --source {source}=FOLDER")
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
        name = plain_name(f"{folder.resolve().name}/{record.image.relative_to(folder).as_posix()}")
        if name not in labels:
            problems.add("image without scene labels", record.image, f"{path} has no line for {name}")
        scene = with_scene_labels(record.scene, labels[name]) if name in labels else record.scene
        found.append(replace(record, scene=scene))
    return found


def add_groups(records: Sequence[Record]) -> list[Record]:
    """Records of one source, each with a group. Where the source names none, near-duplicates are a group."""
    unnamed = [record for record in records if not record.group]
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(lambda record: hash_file(record.image), unnamed))
    numbers = near_duplicate_groups(np.array(hashes).reshape(-1, 64)).tolist()
    first: dict[int, str] = {}
    names = iter([first.setdefault(number, one.scene.image_id) for number, one in zip(numbers, unnamed)])
    return [record if record.group else replace(record, group=f"like {next(names)}") for record in records]


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


def _write_files(items: Sequence[Item], options: DatasetOptions) -> list[Path]:
    """The paths of all files; those that are missing are written."""
    folder = options.output_dir / "data"
    paths: list[Path] = []
    for temporary in folder.glob(".*"):  # of a killed run
        if temporary.is_dir():
            shutil.rmtree(temporary)
        elif temporary.suffix == ".tmp":
            temporary.unlink()
    disable_progress_bars()  # of the library, which has three for each file
    with tqdm(total=len(items), unit=" images") as progress:
        for start in range(0, len(items), options.images_per_file):
            chosen = items[start : start + options.images_per_file]
            path = folder / f"{options.split}-{len(paths):05d}.parquet"
            if not path.exists():
                write_file(path, chosen, start, options)
            paths.append(path)
            progress.update(len(chosen))
    return paths


def write_file(path: Path, items: Sequence[Item], first: int, options: DatasetOptions) -> None:
    """Write the rows of some images to a Parquet file, and what was skipped to `skipped_path`.

    Args:
        first: index of the first image in the dataset.

    Raises:
        DataError: an image cannot be read and `options.strict` is set. OSError: for example, the disk is full.
    """
    blocks = [(first + start, items[start : start + BLOCK]) for start in range(0, len(items), BLOCK)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as cache:
        made = Dataset.from_generator(
            make_rows,
            features=Features({**FEATURES, "problem": Value("string")}),
            cache_dir=cache,
            gen_kwargs={"blocks": blocks, "options": options},
            num_proc=min(options.num_workers, len(blocks)),
            fingerprint=uuid.uuid4().hex,  # by default a hash of all scenes
        )
        problems = list(made["problem"])
        skipped = [problem for problem in problems if problem]
        if options.strict and (unreadable := [problem for problem in skipped if problem != NOTHING]):
            raise DataError(unreadable[0])
        rows = made.select([i for i, problem in enumerate(problems) if not problem]).remove_columns("problem")
        # Written first: a Parquet file that exists needs no further work.
        atomic_write_text(skipped_path(path), json.dumps(skipped))
        with atomic_write(path) as temporary:
            rows.to_parquet(str(temporary))


def skipped_path(path: Path) -> Path:
    """The hidden file that lists what a Parquet file lacks; `load_dataset` ignores it."""
    return path.parent / f".{path.stem}.json"


def make_rows(blocks: Sequence[tuple[int, Sequence[Item]]], options: DatasetOptions) -> Iterator[dict[str, Any]]:
    """Yield rows of FEATURES and "problem", why a row is left out or "". A block is (index of first image, images)."""
    for first, items in blocks:
        rng = random.Random(f"{options.seed}/{first // BLOCK}")
        balancer = Balancer() if options.balance else NaturalRates()
        loaded, asked = [], []
        for item in items:
            try:
                loaded.append((*load_item(item), item.group if isinstance(item, Record) else ""))
            except DataError as error:
                yield dict.fromkeys(FEATURES) | {"problem": str(error)}
                continue
            asked.append(ask(GroundTruth(loaded[-1][1]), rng, options.questions_per_image, balancer))
        for (image, scene, group), questions in zip(loaded, rebalance(asked) if options.balance else asked):
            yield make_row(image, scene, questions, group) | {"problem": "" if questions else NOTHING}


def _summarize(paths: Sequence[Path], problems: Problems) -> dict[str, Any]:
    """The report on these files, and on the problems that the readers found.

    Raises:
        DataError: a file is damaged.
    """
    found, messages, rows = Counter(problems.counts), list(problems.messages), []
    for path in paths:
        try:
            noted = json.loads(skipped_path(path).read_text(encoding="utf-8"))
            found.update(NOTHING if one == NOTHING else "unreadable image" for one in noted)
            messages += [one for one in noted if one != NOTHING]
            rows += pq.read_table(path, columns=list(REPORT)).to_pylist()
        except (OSError, ValueError, TypeError) as error:
            what = f"{path} or {skipped_path(path)} is damaged ({error!r})"
            raise DataError(f"{what}; delete {path} and run the same command again") from error
    answers = Counter(
        (f"{question_type}/{category}", answer)
        for row in rows
        for question_type, category, answer in zip(row["question_types"], row["categories"], row["answers"])
    )
    left_out = problems.expected | {NOTHING}
    yes_no = sorted({name for name, answer in answers if answer in ("yes", "no")})
    return {
        "images": len(rows),
        "left_out": Counter({kind: count for kind, count in found.items() if kind in left_out}),
        "messages": messages,
        "questions": Counter(question_type for row in rows for question_type in row["question_types"]),
        "skipped": Counter({kind: count for kind, count in found.items() if kind not in left_out}),
        "sources": Counter(row["source"] for row in rows),
        "yes_rates": {
            name: round(answers[name, "yes"] / (answers[name, "yes"] + answers[name, "no"]), 3) for name in yes_no
        },
    }


def make_row(image: bytes, scene: Scene, questions: Sequence[Question], group: str = "") -> dict[str, Any]:
    """One row of FEATURES. `image` is the content of an image file, `group` its camera, drive or near-duplicates."""
    return {
        "image": {"bytes": image, "path": None},
        **{column: [getattr(question, name) for question in questions] for column, name in COLUMN_OF},
        "source": scene.source,
        "image_id": scene.image_id,
        "group": group,
        "scene": scene.to_json(),
    }


def load_item(item: Item) -> tuple[bytes, Scene]:
    """The bytes of an image file and its scene, from annotations or a synthetic seed.

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
    """Rows of rendered scenes as `load_dataset` would give them, with decoded images."""
    rng, balancer = random.Random(first_seed), Balancer()
    items = [load_item(seed) for seed in range(first_seed, first_seed + num_images)]
    asked = rebalance([ask(GroundTruth(scene), rng, questions_per_image, balancer) for _, scene in items])
    rows = [make_row(content, scene, questions) for (content, scene), questions in zip(items, asked)]
    return [row | {"image": PILImage.open(io.BytesIO(row["image"]["bytes"]))} for row in rows]


class SyntheticRows(torch.utils.data.Dataset):
    """Rows {image (PIL), scene (a `Scene`), source, image_id}, rendered from one seed each, from `first_seed` on."""

    def __init__(self, first_seed: int = 0, num_images: int = 1 << 20):
        self.first_seed, self.num_images = first_seed, num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, scene = render(self.first_seed + index)
        return {"image": image, "scene": scene, "source": scene.source, "image_id": scene.image_id}


class Mixture(torch.utils.data.Dataset):
    """Rows of several map-style datasets. A row follows from the seed, the epoch and the index alone.

    Args:
        sources: the datasets.
        weights: of each dataset, any positive numbers; by default the number of its rows.
        images_per_epoch: the number of images between two checkpoints; by default the number of all rows.
        seed: seed of the draw.

    Raises:
        ValueError: there is no dataset, one is empty, or the weights are not one positive number for each.
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
            raise ValueError(f"weights must be positive numbers, one for each dataset ({len(sizes)}), got {weights}")
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

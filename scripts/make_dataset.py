"""Make a dataset of images with true questions and answers that `datasets.load_dataset(folder)` loads.

    python scripts/make_dataset.py --source synthetic --num_images 1000 --output_dir runs/synthetic
    python scripts/make_dataset.py --source camvid=/data/camvid synthetic --num_images 500 --output_dir runs/mix
    python scripts/make_dataset.py --source my_map.json=/data/mine --split val --output_dir runs/mine

A source is "synthetic" or NAME=FOLDER, where NAME is a mapping shipped in data/mappings/ or the path of one's own.
Stopped at any moment and started again with the same options, it goes on where it was. The report is in report.json.
Each split has synthetic scenes of its own, so that no scene is in two of them.
"""

import hashlib
import json
import re
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from tqdm import tqdm
from transformers import HfArgumentParser

from traffic_vlm.data.dataset import (
    Shard,
    ShardReport,
    merge_problems,
    report_path,
    write_shard,
)
from traffic_vlm.data.readers import Problems, Record, check_sources, load_mapping, read_source
from traffic_vlm.utils import DataError, atomic_write_text


Item = Record | int  # an annotated image, or the seed of a synthetic one
SEEDS = 1 << 32  # for each split
# `datasets` takes folders of one name for one dataset, and would load an older one from its cache, but for what the
# card says of the files.
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
class Arguments:
    output_dir: Path = field(metadata={"help": "folder to write to"})
    source: list[str] = field(default_factory=lambda: ["synthetic"], metadata={"help": "synthetic or NAME=FOLDER"})
    num_images: int = field(default=1000, metadata={"help": "synthetic images"})
    split: str = field(default="train", metadata={"help": "split of the sources, and of the dataset"})
    questions_per_image: int = 16
    first_seed: int = field(default=0, metadata={"help": "seed of the first synthetic image"})
    seed: int = field(default=0, metadata={"help": "decides which questions are asked"})
    shard_size: int = field(default=256, metadata={"help": "images in a file"})
    num_workers: int = 2
    strict: bool = field(default=False, metadata={"help": "stop at the first problem instead of skipping"})

    def __post_init__(self) -> None:
        for name in ("questions_per_image", "shard_size", "num_workers"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not re.fullmatch(r"\w+(\.\w+)*", self.split):
            raise SystemExit(f"--split must be words with dots between, like train or val.night, got {self.split!r}")


def read_sources(arguments: Arguments, problems: Problems) -> dict[str, list[Item]]:
    """All images to be, by source, in a fixed order."""
    parts = {source: source.partition("=") for source in arguments.source}
    mappings = {name: load_mapping(name) for name, _, folder in parts.values() if folder}
    check_sources(mappings.values())
    folders = [(mappings[name].name, Path(folder).resolve()) for name, _, folder in parts.values() if folder]
    if len(parts) < len(arguments.source) or len(set(folders)) < len(folders):
        raise DataError(f"a source is given twice: {' '.join(arguments.source)}")
    items: dict[str, list[Item]] = {}
    for source, (name, _, folder) in parts.items():
        if folder:
            items[source] = list(read_source(folder, mappings[name], arguments.split, problems))
        elif name == "synthetic":
            first = arguments.first_seed + seed_offset(arguments.split)
            items[source] = list(range(first, first + arguments.num_images))
        else:
            raise DataError(f"source {name!r} needs a folder: --source {name}=FOLDER")
    if not any(items.values()):
        found = "; ".join(problems.messages[:3]) or "no images were asked for"
        raise DataError(f"none of the sources {arguments.source} has an image that can be used: {found}")
    return items


def seed_offset(split: str) -> int:
    """Where the synthetic seeds of a split begin."""
    return 0 if split == "train" else SEEDS * (1 + zlib.crc32(split.encode()))


def fingerprint(items: list[Item]) -> str:
    """Of annotations as they were read, and of names, sizes and times of image files."""
    digest = hashlib.sha256()
    for item in items:
        text = str(item)
        if isinstance(item, Record):
            status = item.image.stat()
            text = f"{item.image.name} {status.st_size} {status.st_mtime_ns} {item.scene.to_json()}"
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()[:16]


def note_plan(arguments: Arguments, fingerprints: dict[str, str]) -> None:
    """Note what the dataset is made of, for the next start; refuse a folder that holds another one."""
    fixed = {name: str(value) for name, value in asdict(arguments).items()}
    del fixed["num_workers"], fixed["output_dir"]
    fixed |= {f"images of {source}": mark for source, mark in fingerprints.items()}
    path = arguments.output_dir / ".parts" / "plan.json"
    others = [name for name in ("README.md", "report.json", "data") if (arguments.output_dir / name).exists()]
    if others and not path.exists():
        raise DataError(f"{arguments.output_dir} has another's {', '.join(others)}; choose another --output_dir")
    instead = f"choose another --output_dir, or delete {arguments.output_dir} to make it anew"
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else fixed
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is broken ({error}); {instead}") from error
    if changed := [name for name in fixed if before.get(name) != fixed[name]]:
        what = "; ".join(f"{name}: {before.get(name)} before, {fixed[name]} now" for name in changed)
        raise DataError(f"{arguments.output_dir} holds a dataset made of something else ({what}); {instead}")
    atomic_write_text(path, json.dumps(fixed, indent=1))


def plan(arguments: Arguments, items: list[Item]) -> list[Shard]:
    """Which images go into which file."""
    folder, size = arguments.output_dir / "data", arguments.shard_size
    folder.mkdir(exist_ok=True)
    for left_over in folder.glob("*.tmp"):
        left_over.unlink()
    return [
        Shard(
            folder / f"{arguments.split}-{number:05d}.parquet",
            tuple(items[start : start + size]),
            f"{arguments.seed}/{number}",
            arguments.questions_per_image,
            arguments.strict,
        )
        for number, start in enumerate(range(0, len(items), size))
    ]


def write_all(shards: list[Shard], num_workers: int) -> ShardReport:
    """Write the shards that are not there yet, in parallel; the report covers all."""
    total = ShardReport()
    written = [shard for shard in shards if shard.path.exists()]
    missing = [shard for shard in shards if not shard.path.exists()]
    for shard in written:
        total.merge(read_report(shard))
    done = sum(len(shard.items) for shard in written)
    with (
        tqdm(total=done + sum(len(shard.items) for shard in missing), initial=done, unit="image") as progress,
        ProcessPoolExecutor(max_workers=num_workers) as pool,
    ):
        futures = {pool.submit(write_shard, shard): shard for shard in missing}
        try:
            for future in as_completed(futures):
                total.merge(future.result())
                progress.update(len(futures[future].items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return total


def read_report(shard: Shard) -> ShardReport:
    path = report_path(shard.path)
    try:
        return ShardReport.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is broken ({error!r}); delete {shard.path} to write both anew") from error


def write_summary(arguments: Arguments, report: ShardReport, shards: list[Shard]) -> None:
    """The dataset's card, and the report of all shards as JSON."""
    files = hashlib.sha256()
    for shard in shards:
        with shard.path.open("rb") as file:
            files.update(hashlib.file_digest(file, "sha256").digest())
    summary = json.loads(report.to_json()) | {"yes_rates": report.yes_rates()}
    del summary["answers"]  # thousands of sentences; the rates say what matters of them
    atomic_write_text(arguments.output_dir / "README.md", CARD.format(split=arguments.split, files=files.hexdigest()))
    atomic_write_text(arguments.output_dir / "report.json", json.dumps(summary, indent=1, sort_keys=True))


def main() -> None:
    arguments = Arguments(**vars(HfArgumentParser(Arguments).parse_args()))
    problems = Problems(strict=arguments.strict)
    try:
        sources = read_sources(arguments, problems)
        fingerprints = {source: fingerprint(items) for source, items in sources.items()}
        try:
            note_plan(arguments, fingerprints)
            shards = plan(arguments, list(chain.from_iterable(sources.values())))
        except OSError as error:
            raise DataError(f"{arguments.output_dir} cannot be written: {error}") from error
        report = write_all(shards, arguments.num_workers)
        merge_problems(report, problems)
        write_summary(arguments, report, shards)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
    except DataError as error:
        sys.exit(str(error))
    except (OSError, BrokenProcessPool) as error:
        sys.exit(f"{error}; what is complete was kept, and the same command goes on from here")
    print(f"{report.images} images, {report.questions.total()} questions")
    for kind, number in report.questions.most_common():
        print(f"  {kind:<14}{number:>8}")
    for why, number in report.skipped.most_common():
        print(f"  skipped: {why} ({number})")
    print(f"wrote {arguments.output_dir}; the yes rate of each class is in report.json")


if __name__ == "__main__":
    main()

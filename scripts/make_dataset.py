"""Make a dataset of images with true questions and answers that `datasets.load_dataset(folder)` loads.

    python scripts/make_dataset.py --source synthetic --num_images 1000 --output_dir runs/synthetic
    python scripts/make_dataset.py --source camvid=/data/camvid synthetic --num_images 500 --output_dir runs/mix
    python scripts/make_dataset.py --source my_map.json=/data/mine --split val --output_dir runs/mine

A source is "synthetic" or NAME=FOLDER, where NAME is a mapping shipped in data/mappings/ or the path of one's own.
Stopped at any moment and started again with the same options, it goes on where it was. The report is in report.json.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm
from transformers import HfArgumentParser

from traffic_vlm.data.dataset import (
    Shard,
    ShardReport,
    merge_problems,
    report_path,
    write_shard,
    write_whole,
)
from traffic_vlm.data.readers import DataError, Problems, Record, check_sources, load_mapping, read_source


CARD = """---
configs:
  - config_name: default
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


def read_items(arguments: Arguments, problems: Problems) -> list[Record | int]:
    """All images to be, in a fixed order."""
    items: list[Record | int] = []
    sources = [source.partition("=") for source in arguments.source]
    mappings = {name: load_mapping(name) for name, _, folder in sources if folder}
    check_sources(mappings.values())
    for name, _, folder in sources:
        if folder:
            items += read_source(folder, mappings[name], arguments.split, problems)
        elif name == "synthetic":
            items += range(arguments.first_seed, arguments.first_seed + arguments.num_images)
        else:
            raise DataError(f"source {name!r} needs a folder: --source {name}=FOLDER")
    if not items:
        found = "; ".join(problems.messages[:3]) or "no images were asked for"
        raise DataError(f"none of the sources {arguments.source} has an image that can be used: {found}")
    return items


def plan(arguments: Arguments, items: list[Record | int]) -> list[Shard]:
    """Which images go into which file; refuses a folder that holds another dataset."""
    fixed = {
        name: str(value) for name, value in asdict(arguments).items() if name not in ("num_workers", "output_dir")
    }
    path = arguments.output_dir / ".parts" / "plan.json"
    if path.exists() and (before := json.loads(path.read_text())) != fixed:
        changed = [
            f"{name}: {before.get(name)} before, {fixed[name]} now"
            for name in fixed
            if before.get(name) != fixed[name]
        ]
        raise DataError(f"{arguments.output_dir} holds a dataset made with other options ({'; '.join(changed)})")
    write_whole(path, json.dumps(fixed, indent=1))
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
    missing = [shard for shard in shards if not shard.path.exists()]
    for shard in shards:
        if shard.path.exists():
            total.merge(ShardReport.from_json(report_path(shard.path).read_text()))
    done = sum(len(shard.items) for shard in shards) - sum(len(shard.items) for shard in missing)
    with (
        tqdm(total=sum(len(shard.items) for shard in shards), initial=done, unit="image") as progress,
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


def main() -> None:
    [arguments] = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    problems = Problems(strict=arguments.strict)
    try:
        items = read_items(arguments, problems)
        report = write_all(plan(arguments, items), arguments.num_workers)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
    except DataError as error:
        sys.exit(str(error))
    except (OSError, BrokenProcessPool) as error:
        sys.exit(f"{error}\nwhat is complete was kept; the same command goes on from here")
    merge_problems(report, problems)
    summary = json.loads(report.to_json()) | {"yes_rates": report.yes_rates()}
    del summary["answers"]  # thousands of sentences; the rates say what matters of them
    write_whole(arguments.output_dir / "README.md", CARD.format(split=arguments.split))
    write_whole(arguments.output_dir / "report.json", json.dumps(summary, indent=1, sort_keys=True))
    print(f"{report.images} images, {report.questions.total()} questions")
    for kind, number in report.questions.most_common():
        print(f"  {kind:<14}{number:>8}")
    for why, number in report.skipped.most_common():
        print(f"  skipped: {why} ({number})")
    print(f"wrote {arguments.output_dir}; the yes rate of each class is in report.json")


if __name__ == "__main__":
    main()

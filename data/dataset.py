"""Scenes with questions as rows of a `datasets` table, in files or as an endless stream.

    records or seeds → shards → rows {image, questions, answers, kinds, ..., source, image_id, scene} → Parquet

A shard is written to a temporary name and renamed when it is complete, so that stopping at any moment loses at most
the shards in work, and no half file loads. What a shard holds follows from the plan and its number alone, not from who
writes it when: a stopped run that goes on gives the same files as one that was never stopped.
"""

import io
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Image, List, Value, disable_progress_bars
from PIL import Image as PILImage

from ..utils import DataError, atomic_write_text
from .questions import Balancer, Question, ask, rebalance
from .readers import Problems, Record
from .scene import Scene
from .synthetic import render


FEATURES = Features(
    {
        "image": Image(),
        "questions": List(Value("string")),
        "answers": List(Value("string")),
        "kinds": List(Value("string")),
        "labels": List(Value("string")),
        "facts": List(Value("string")),
        "source": Value("string"),
        "image_id": Value("string"),
        "scene": Value("string"),
    }
)
JPEG_QUALITY = 92  # of synthetic images: about 20 kB each, and no artefact that a person would notice


@dataclass
class ShardReport:
    """What was written and what was not."""

    images: int = 0
    questions: Counter[str] = field(default_factory=Counter)  # by kind
    answers: Counter[str] = field(default_factory=Counter)  # "kind/label/answer"
    sources: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def count(self, scene: Scene, questions: Sequence[Question]) -> None:
        self.images += 1
        self.sources[scene.source] += 1
        for question in questions:
            self.questions[question.kind] += 1
            self.answers[f"{question.kind}/{question.label}/{question.answer}"] += 1

    def merge(self, other: "ShardReport") -> None:
        self.images += other.images
        for name in ("questions", "answers", "sources", "skipped"):
            getattr(self, name).update(getattr(other, name))
        self.messages += other.messages

    def to_json(self) -> str:
        return json.dumps(vars(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ShardReport":
        fields = json.loads(text)
        counters = {name: Counter(fields[name]) for name in ("questions", "answers", "sources", "skipped")}
        return cls(images=fields["images"], messages=fields["messages"], **counters)

    def yes_rates(self) -> dict[str, float]:
        """For each kind and class with yes/no answers, the part of them that is yes."""
        counts: dict[str, Counter[str]] = {}
        for name, number in self.answers.items():
            what, answer = name.rsplit("/", 1)
            if answer in ("yes", "no"):
                counts.setdefault(what, Counter())[answer] += number
        return {what: round(both["yes"] / both.total(), 3) for what, both in sorted(counts.items())}


@dataclass(frozen=True)
class Shard:
    """One file to be: records of annotated images, or seeds of synthetic ones."""

    path: Path
    items: tuple[Record | int, ...]
    seed: str
    questions_per_image: int = 16
    strict: bool = False


def make_row(image: bytes, scene: Scene, questions: Sequence[Question]) -> dict[str, Any]:
    """One row of FEATURES; the image as the bytes of a file."""
    return {
        "image": {"bytes": image, "path": None},
        "questions": [question.text for question in questions],
        "answers": [question.answer for question in questions],
        "kinds": [question.kind for question in questions],
        "labels": [question.label for question in questions],
        "facts": [question.fact for question in questions],
        "source": scene.source,
        "image_id": scene.image_id,
        "scene": scene.to_json(),
    }


def load_item(item: Record | int) -> tuple[bytes, Scene]:
    """The bytes of an image file and its scene, from annotations or a synthetic seed.

    Raises:
        DataError: the image cannot be read.
    """
    if isinstance(item, int):
        picture, scene = render(item)
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        return buffer.getvalue(), scene
    try:
        content = item.image.read_bytes()
        with PILImage.open(io.BytesIO(content)) as picture:
            picture.load()  # a file that is cut short opens, but does not load
    except Exception as error:  # on broken bytes Pillow raises whatever the code of the format happens to raise
        raise DataError(f"{item.image}: the image cannot be read: {error}") from error
    return content, item.scene


def synthetic_rows(first_seed: int, num_images: int, questions_per_image: int = 16) -> list[dict[str, Any]]:
    """Rows of rendered scenes as `load_dataset` would give them, the images decoded."""
    rng, balancer = random.Random(first_seed), Balancer()
    items = [load_item(seed) for seed in range(first_seed, first_seed + num_images)]
    asked = rebalance([ask(scene, rng, questions_per_image, balancer) for _, scene in items])
    rows = [make_row(content, scene, questions) for (content, scene), questions in zip(items, asked)]
    return [row | {"image": PILImage.open(io.BytesIO(row["image"]["bytes"]))} for row in rows]


def write_shard(shard: Shard) -> ShardReport:
    """Write one Parquet file and its report; both are complete or not there.

    Raises:
        DataError: strict, and an image cannot be read. OSError: the disk is full, for example.
    """
    rng, balancer, report = random.Random(shard.seed), Balancer(), ShardReport()
    loaded, asked, rows = [], [], []
    for item in shard.items:
        try:
            loaded.append(load_item(item))
        except DataError as error:
            if shard.strict:
                raise
            report.skipped["unreadable image"] += 1
            report.messages.append(str(error))
            continue
        asked.append(ask(loaded[-1][1], rng, shard.questions_per_image, balancer))
    for (image, scene), questions in zip(loaded, rebalance(asked)):
        if not questions:
            report.skipped["nothing to ask"] += 1
            continue
        rows.append(make_row(image, scene, questions))
        report.count(scene, questions)
    columns = {name: [row[name] for row in rows] for name in FEATURES}
    atomic_write_text(report_path(shard.path), report.to_json())  # first: where the data is, so is its report
    temporary = shard.path.with_suffix(".tmp")
    try:
        disable_progress_bars()  # of the library: ours counts images
        Dataset.from_dict(columns, features=FEATURES).to_parquet(str(temporary))
        os.replace(temporary, shard.path)
    finally:
        temporary.unlink(missing_ok=True)
    return report


def report_path(shard: Path) -> Path:
    """Where a shard's report lies: hidden, so that `load_dataset` does not take it for data."""
    return shard.parent.parent / ".parts" / f"{shard.stem}.json"


def render_row(seed: int) -> dict[str, Any]:
    """A rendered scene as a row that the collator asks about: image (PIL), scene, source, image_id."""
    image, scene = render(seed)
    return {"image": image, "scene": scene.to_json(), "source": scene.source, "image_id": scene.image_id}


class SyntheticStream(torch.utils.data.IterableDataset):
    """Endless synthetic rows without files, for `Trainer(max_steps=...)` and `TrafficCollator`.

    Seeds run from `first_seed` on; the workers of a `DataLoader` take turns. Rows hold image (PIL), scene and source;
    the questions are asked by the collator.
    """

    def __init__(self, first_seed: int = 0, num_images: int | None = None):
        super().__init__()
        self.first_seed, self.num_images = first_seed, num_images

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        number = start
        while self.num_images is None or number < self.num_images:
            yield render_row(self.first_seed + number)
            number += step


def merge_problems(report: ShardReport, problems: Problems) -> None:
    """Add what the readers skipped to a report."""
    report.skipped.update(problems.counts)
    report.messages = problems.messages + report.messages

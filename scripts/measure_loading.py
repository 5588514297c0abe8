"""Measure how fast training data are loaded, augmented and collated: training that is faster waits for data.

python scripts/measure_loading.py --dataset runs/synthetic
python scripts/measure_loading.py --dataset synthetic --num_images 64    # drawn on the fly, without files
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import concatenate_datasets, load_dataset

from traffic_vlm.data.collator import TrafficCollator
from traffic_vlm.data.dataset import SyntheticRows
from traffic_vlm.data.scene import SYNTHETIC
from traffic_vlm.options import option_parser
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor


@dataclass
class Options:
    dataset: str = field(metadata={"help": "folder made by make_dataset.py, or synthetic"})
    processor: str = field(default=".", metadata={"help": "folder of the model repository"})
    num_images: int = field(default=1024, metadata={"help": "images to measure"})
    batch_size: int = field(default=32, metadata={"help": "images in a batch"})
    num_workers: int = field(default=2, metadata={"help": "processes that load; 0 loads in the main process"})
    questions_per_image: int = field(default=16, metadata={"help": "maximum number of questions about an image"})

    def __post_init__(self) -> None:
        minima = {"num_images": 1, "batch_size": 1, "num_workers": 0, "questions_per_image": 1}
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise SystemExit(f"--{name} must be at least {minimum}, got {getattr(self, name)}")
        # `load_dataset` would search the Hub for a name that is not a folder.
        if self.dataset != SYNTHETIC and not Path(self.dataset).is_dir():
            raise SystemExit(f"--dataset must be synthetic or a folder made by make_dataset.py, got {self.dataset!r}")
        if not Path(self.processor).is_dir():
            raise SystemExit(f"--processor must be the folder of the model repository, got {self.processor!r}")


def read_rows(name: str) -> Any:
    """The rows of a dataset in random order, or synthetic scenes."""
    if name == SYNTHETIC:
        return SyntheticRows()
    try:
        splits = load_dataset(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--dataset {name} cannot be loaded: {error}") from error
    return concatenate_datasets(list(splits.values())).shuffle(seed=0)


def measure(loader: Iterable[dict[str, torch.Tensor]], skip: int, num_images: int) -> tuple[int, int, float]:
    """Images, questions and seconds of the batches after the first `skip`, up to `num_images` or a little more."""
    batches = iter(loader)
    for _ in islice(batches, skip):
        pass
    images = questions = 0
    start = time.perf_counter()
    for batch in batches:
        images += len(batch["pixel_values"])
        questions += int((batch["question_ends"] >= 0).sum())
        if images >= num_images:
            break
    return images, questions, time.perf_counter() - start


def main() -> None:
    options = Options(**vars(option_parser([Options], __doc__).parse_args()))
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(
        read_rows(options.dataset),
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        collate_fn=TrafficCollator(
            TrafficVLMProcessor.from_pretrained(options.processor), options.questions_per_image
        ),
        multiprocessing_context="fork" if options.num_workers else None,
    )
    # While the workers start, each of them prepares one batch: these would count as loaded in no time.
    skip = max(1, options.num_workers)
    images, questions, seconds = measure(loader, skip, options.num_images)
    if not images:
        raise SystemExit(f"{options.dataset} has no image after the first {skip} x {options.batch_size}, not measured")
    print(f"{images / seconds:.0f} images per second, {questions / images:.1f} questions each, {seconds:.1f} s")


if __name__ == "__main__":
    main()

"""How many images a second are loaded, augmented, asked about and collated: more than training takes, or it waits.

python scripts/measure_loading.py --dataset runs/synthetic
python scripts/measure_loading.py --dataset synthetic --num_images 256   # rendered while training, no files
"""

import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import concatenate_datasets, load_dataset
from transformers import HfArgumentParser

from traffic_vlm.data.collator import TrafficCollator
from traffic_vlm.data.dataset import SyntheticRows
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor


@dataclass
class Arguments:
    dataset: str = field(metadata={"help": "folder made by make_dataset.py, or synthetic"})
    processor: str = field(default=".", metadata={"help": "folder of the model repository"})
    num_images: int = 1024
    batch_size: int = 32
    num_workers: int = 2
    questions_per_image: int = 16

    def __post_init__(self) -> None:
        least = {"num_images": 1, "batch_size": 1, "num_workers": 0, "questions_per_image": 1}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise SystemExit(f"--{name} must be at least {limit}, got {getattr(self, name)}")
        # What is no folder would be looked for on the Hub.
        if self.dataset != "synthetic" and not Path(self.dataset).is_dir():
            raise SystemExit(f"--dataset must be synthetic or a folder made by make_dataset.py, got {self.dataset!r}")
        if not Path(self.processor).is_dir():
            raise SystemExit(f"--processor must be the folder of the model repository, got {self.processor!r}")


def read_rows(arguments: Arguments) -> Any:
    """The rows of a dataset in random order, or rendered ones."""
    if arguments.dataset == "synthetic":
        return SyntheticRows()
    try:
        splits = load_dataset(arguments.dataset)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--dataset {arguments.dataset} cannot be loaded: {error}") from error
    return concatenate_datasets(list(splits.values())).shuffle(seed=0)


def main() -> None:
    arguments = Arguments(**vars(HfArgumentParser(Arguments).parse_args()))
    torch.set_num_threads(1)
    processor = TrafficVLMProcessor.from_pretrained(arguments.processor)
    loader = torch.utils.data.DataLoader(
        read_rows(arguments),
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        collate_fn=TrafficCollator(processor, arguments.questions_per_image),
        multiprocessing_context="fork" if arguments.num_workers else None,
    )
    # The first batch starts the workers, and meanwhile each of the others makes one too: they are not counted.
    uncounted = max(1, arguments.num_workers)
    batches = iter(loader)
    for _ in islice(batches, uncounted):
        pass
    images = questions = 0
    start = time.perf_counter()
    for batch in batches:
        images += batch["pixel_values"].shape[0]
        questions += int((batch["question_ends"] >= 0).sum())
        if images >= arguments.num_images:
            break
    if not images:
        size = arguments.batch_size
        raise SystemExit(f"{arguments.dataset} has no image after the first {uncounted} x {size}, which do not count")
    seconds = time.perf_counter() - start
    print(f"{images / seconds:.0f} images per second, {questions / images:.1f} questions each, {seconds:.1f} s")


if __name__ == "__main__":
    main()

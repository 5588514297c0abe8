"""How many images a second are loaded, augmented, asked about and collated: more than training takes, or it waits.

python scripts/measure_loading.py --dataset runs/synthetic
python scripts/measure_loading.py --dataset synthetic --num_images 256   # rendered while training, no files
"""

import time
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from transformers import HfArgumentParser

from traffic_vlm.data.collator import TrafficCollator
from traffic_vlm.data.dataset import SyntheticStream
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor


@dataclass
class Arguments:
    dataset: str = field(metadata={"help": "folder made by make_dataset.py, or synthetic"})
    processor: str = field(default=".", metadata={"help": "folder of the model repository"})
    num_images: int = 1024
    batch_size: int = 32
    num_workers: int = 2
    questions_per_image: int = 16


def main() -> None:
    [arguments] = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    torch.set_num_threads(1)
    processor = TrafficVLMProcessor.from_pretrained(arguments.processor)
    stream = arguments.dataset == "synthetic"
    rows = SyntheticStream() if stream else load_dataset(arguments.dataset, split="train").shuffle(seed=0)
    loader = torch.utils.data.DataLoader(
        rows,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        collate_fn=TrafficCollator(processor, arguments.questions_per_image),
        multiprocessing_context="fork" if arguments.num_workers else None,
    )
    images = questions = 0
    start = None  # the first batch starts the workers, and is not counted
    for batch in loader:
        if start is None:
            start = time.perf_counter()
            continue
        images += batch["pixel_values"].shape[0]
        questions += int((batch["question_ends"] >= 0).sum())
        if images >= arguments.num_images:
            break
    if start is None or not images:
        raise SystemExit(f"{arguments.dataset} has fewer images than two batches of {arguments.batch_size}")
    seconds = time.perf_counter() - start
    print(f"{images / seconds:.0f} images per second, {questions / images:.1f} questions each, {seconds:.1f} s")


if __name__ == "__main__":
    main()

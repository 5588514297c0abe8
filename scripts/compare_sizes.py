"""Compare sizes of images: accuracy of yes and no, AUC of small objects, and time, in one table.

    python scripts/compare_sizes.py --model . --dataset runs/unseen_city --sizes 256 384 512 --output runs/sizes.md

Times are CPU times of one process relative to the first size, medians of rounds in which all sizes take turns: of one
question about a new image, and of sixteen. Small objects: the largest one of the class asked about has a shorter side
of 2 to 6 % of the image.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from traffic_vlm.common.files import ROOT, atomic_write_text
from traffic_vlm.common.loading import load_weights, set_image_size
from traffic_vlm.common.options import choose_threads, option, option_parser
from traffic_vlm.configuration_traffic_vlm import check_image_size
from traffic_vlm.data.datasets import add_questions, load_rows
from traffic_vlm.data.scene import scene_of
from traffic_vlm.evaluation.markdown import table
from traffic_vlm.evaluation.metrics import auc, balanced_accuracy, is_yes_no
from traffic_vlm.evaluation.predict import predict
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.scripts import command


SMALL = (0.02, 0.06)  # shorter side of the box, as a fraction of the image
ROUNDS = 7


@dataclass
class SizeOptions:
    dataset: list[Path] = field(metadata={"help": "dataset folders with scenes"})
    model: str = option(str(ROOT), "model folder")
    sizes: list[int] = option([224, 256, 320, 384, 448, 512, 640], "sides of the images in pixels")
    max_images: int | None = option(None, "draw at most so many images")
    output: Path | None = option(None, "file for the table; default: it is printed only")


def largest_sides(rows: Any) -> dict[tuple[str, str, str], float]:
    """The shorter side of the largest object, as a fraction of the image, by source, image and class."""
    sides: dict[tuple[str, str, str], float] = {}
    for row in rows.select_columns(["scene", "source", "image_id"]):
        if (scene := scene_of(row)) is None:
            continue
        for item in scene.objects:
            left, top, right, bottom = item.box
            key = row["source"], row["image_id"], item.category
            sides[key] = max(sides.get(key, 0), min((right - left) / scene.width, (bottom - top) / scene.height))
    return sides


def accuracy(answers: pd.DataFrame, sides: dict[tuple[str, str, str], float]) -> dict[str, Any]:
    """Balanced accuracy, AUC, and AUC of small objects in questions such as "Is there a car?"."""
    yes_no = answers[is_yes_no(answers)]
    asked = yes_no[yes_no["question_type"] == "presence"]
    keys = zip(asked["source"], asked["image_id"], asked["category"])
    is_small = np.array([SMALL[0] <= sides.get(key, 0) <= SMALL[1] for key in keys])
    small = asked[is_small | (asked["truth"] == "no")]
    return {"balanced accuracy": balanced_accuracy(yes_no), "AUC": auc(yes_no), "AUC of small objects": auc(small)}


def times(pipe: TrafficVLMPipeline, sizes: list[int]) -> dict[str, list[float]]:
    """Times of one question and of sixteen at each size, relative to the first size."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8))
    nouns = ("car", "bus", "truck", "van", "bicycle", "motorcycle", "person", "dog")
    questions = [f"Is there a {noun}{place}?" for noun in nouns for place in ("", " on the left")]
    asked, found = {"one question": questions[:1], "sixteen": questions}, {}
    for name, some in asked.items():
        rounds: list[list[float]] = []
        for _ in range(ROUNDS + 1):
            spent = []
            for size in sizes:
                start = time.process_time()
                pipe(image, some, image_size=size)
                spent.append(time.process_time() - start)
            rounds.append(spent)
        medians = [median(column) for column in zip(*rounds[1:])]  # the first round warms up
        found[name] = [one / medians[0] for one in medians]
    return found


@command("train")
def main() -> None:
    [options] = option_parser([SizeOptions], __doc__).parse_args_into_dataclasses()
    choose_threads()
    for size in options.sizes:
        check_image_size(size)
    rows = add_questions(load_rows(options.dataset, max_images=options.max_images))
    model = load_weights(options.model, dtype=torch.float32).eval()
    processor = TrafficVLMProcessor.from_pretrained(options.model)
    spent = times(TrafficVLMPipeline(model=model, processor=processor), options.sizes)
    sides, lines = largest_sides(rows), {}
    for index, size in enumerate(options.sizes):
        set_image_size(model, processor, (size, size))
        found = accuracy(predict(model, processor, rows), sides)
        lines[str(size)] = found | {name: f"{values[index]:.2f}" for name, values in spent.items()}
        print(size, lines[str(size)], flush=True)
    text = table("size", lines)
    print(text)
    if options.output:
        atomic_write_text(options.output, text + "\n")


if __name__ == "__main__":
    sys.exit(main())

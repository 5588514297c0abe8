"""Mix the weights of two towers, and evaluate every mixture on photographs that neither was trained on.

    python scripts/mix_towers.py --end runs/tower/tower --eval_dataset runs/choose --output_dir runs/mixed

A mixture of where a training started and ended often does better on new cameras than both. Each is written to
OUTPUT_DIR/WEIGHT (0 is the start, 1 the end), as by train_tower.py: tower/, answers.parquet and report.md.
"""

import copy
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import concatenate_datasets

from traffic_vlm.common.options import choose_threads, option, option_parser
from traffic_vlm.scripts import command
from traffic_vlm.training.auxiliary.head import load_training_head
from traffic_vlm.training.start import add_pooling, load_tower
from traffic_vlm.training.tower import TowerModel, evaluate_tower, load_images


@dataclass
class Options:
    end: str = field(metadata={"help": "folder tower/ of a training"})
    eval_dataset: list[str] = field(metadata={"help": "folders of images for evaluation"})
    start_from: str = option(str(Path(__file__).resolve().parents[1]), "tower that the training started from")
    weights: list[float] = option([0.0, 0.3, 0.5, 0.7, 1.0], "weight of the end in each mixture")
    eval_sizes: list[int] = option([256, 320, 384, 448], "sides of the images in pixels")
    output_dir: Path = option(Path("runs/mixed"), "a folder for each weight is written here")


def load(name: str, pool_above: int | None = None) -> TowerModel:
    """The tower of a folder with its query head; `pool_above` adds pooling where the tower has none."""
    tower, head = load_tower(name), load_training_head(name)
    if head is None:
        raise ValueError(f"{name} has no query head")
    if pool_above is not None and tower.config.pool_above is None:
        tower = add_pooling(tower, pool_above)
    return TowerModel(tower, head, 1)


def mix(start: TowerModel, end: TowerModel, weight: float) -> TowerModel:
    """The model with `weight` × the weights of `end` + (1 - `weight`) × those of `start`."""
    mixed, first, last = copy.deepcopy(end), start.state_dict(), end.state_dict()
    floats = {name: value for name, value in last.items() if value.is_floating_point()}
    mixed.load_state_dict(last | {name: first[name].lerp(value, weight) for name, value in floats.items()})
    return mixed


@command("train")
def main() -> None:
    [options] = option_parser([Options], __doc__).parse_args_into_dataclasses()
    choose_threads()
    rows = concatenate_datasets(load_images(options.eval_dataset))
    end = load(options.end)
    start = load(options.start_from, end.tower.config.pool_above)
    with torch.no_grad():
        for weight in options.weights:
            evaluate_tower(mix(start, end, weight), rows, options.eval_sizes, options.output_dir / str(weight))
            print(f"{options.output_dir / str(weight)}: {weight} of {options.end}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Compare towers on the same photographs with paired errors, or mix two towers and compare the mixtures.

    python scripts/compare_towers.py --runs runs/first runs/second --sources unseen_city_cameras
    python scripts/compare_towers.py --mix . runs/tower/tower --eval_dataset runs/choose --output_dir runs/mixed

Differences are to the first run at its first size. Their errors are clustered by group, such as a camera. A mixture of
where a training started and ended often does better on new cameras than both. Each is written to OUTPUT_DIR/WEIGHT:
tower/, answers.parquet and report.md.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from datasets import concatenate_datasets

from traffic_vlm.common.options import choose_threads, option, option_parser
from traffic_vlm.evaluation import markdown
from traffic_vlm.evaluation.compare import compare_presence
from traffic_vlm.scripts import command
from traffic_vlm.training.auxiliary.tower import answer_presence, load_tower_model, write_tower
from traffic_vlm.training.model import add_parts
from traffic_vlm.training.rows import check_scenes, open_datasets


@dataclass
class TowerOptions:
    runs: list[Path] = option([], "folders with the answers.parquet of a training")
    sources: list[str] = option([], "sources of the photographs; default: all")
    sizes: list[int] = option([], "sides of the images in pixels; default: all, and of a mixture 256 and 384")
    mix: list[str] = option([], "two folders with a tower: where a training started, and where it ended")
    weights: list[float] = option([0.0, 0.3, 0.5, 0.7, 1.0], "weight of the end in each mixture")
    eval_dataset: list[str] = option([], "folders of images to evaluate mixtures on")
    output_dir: Path = option(Path("runs/mixed"), "a folder for each weight is written here")


def compare_runs(runs: list[Path], sources: list[str], sizes: list[int]) -> str:
    """Markdown table with a row for each run and size: both metrics, and their differences to the first row."""
    tables: dict[str, pd.DataFrame] = {}
    for folder in runs:
        answers = pd.read_parquet(folder / "answers.parquet")
        for name, chosen in (("source", sources), ("size", sizes)):
            answers = answers[answers[name].isin(chosen)] if chosen else answers
        tables |= {f"{folder.name} at {size}": rows for size, rows in answers.groupby("size", sort=False)}
    first = next(iter(tables.values()))
    lines: dict[str, dict[str, object]] = {name: {} for name in tables}
    for name, rows in tables.items():
        for metric, (before, after, error) in compare_presence(first, rows).items():
            lines[name] |= {metric: after, f"{metric}, difference": f"{after - before:+.3f} ± {error or 0:.3f}"}
    return markdown.table("run", lines)


@torch.no_grad()
def mix(options: TowerOptions) -> list[Path]:
    """The folders of the mixtures, which are evaluated. The start is pooled like the end."""
    parts = open_datasets(options.eval_dataset)
    check_scenes(options.eval_dataset, parts)
    rows, start, mixed = concatenate_datasets(parts), *map(load_tower_model, options.mix)
    if mixed.tower.config.pool_above is not None and start.tower.config.pool_above is None:
        start.tower = add_parts(start.tower, pool_above=mixed.tower.config.pool_above)
    before, after = start.state_dict(), {name: value.clone() for name, value in mixed.state_dict().items()}
    for weight in options.weights:
        changed = {name: before[name].lerp(one, weight) for name, one in after.items() if one.is_floating_point()}
        mixed.load_state_dict(after | changed)
        answers = answer_presence(mixed, rows, options.sizes or [256, 384])
        write_tower(mixed, answers, options.output_dir / str(weight))
    return [options.output_dir / str(weight) for weight in options.weights]


@command("train")
def main() -> None:
    [options] = option_parser([TowerOptions], __doc__).parse_args_into_dataclasses()
    choose_threads()
    runs = mix(options) if options.mix else options.runs
    print(compare_runs(runs, options.sources, options.sizes))


if __name__ == "__main__":
    sys.exit(main())

"""Compare runs of train_tower.py on the same photographs, at all sizes, with paired errors.

    python scripts/compare_towers.py --runs runs/first runs/second --sources unseen_city_cameras

Differences are to the first run at its first size. Their errors are clustered by group, such as a camera.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from traffic_vlm.common.options import option, option_parser
from traffic_vlm.evaluation import markdown
from traffic_vlm.evaluation.compare import compare_presence
from traffic_vlm.scripts import command


@dataclass
class Options:
    runs: list[str] = field(metadata={"help": "folders with the answers.parquet of train_tower.py"})
    sources: list[str] | None = option(None, "sources of the photographs; default: all")
    sizes: list[int] | None = option(None, "sizes to compare; default: all")


def compare_runs(runs: list[str], sources: list[str] | None = None, sizes: list[int] | None = None) -> str:
    """Markdown table with a row for each run and size: both metrics, and their differences to the first row."""
    tables = {}
    for folder in map(Path, runs):
        answers = pd.read_parquet(folder / "answers.parquet")
        for name, chosen in (("source", sources), ("size", sizes)):
            answers = answers[answers[name].isin(chosen)] if chosen else answers
        tables |= {f"{folder.name} at {size}": rows for size, rows in answers.groupby("size", sort=False)}
    first, lines = next(iter(tables.values())), {}
    for name, rows in tables.items():
        lines[name] = {}
        for metric, (before, after, error) in compare_presence(first, rows).items():
            lines[name][metric] = after
            lines[name][f"{metric}, difference"] = f"{after - before:+.3f} ± {error or 0:.3f}"
    return markdown.table("run", lines)


@command("train")
def main() -> None:
    [options] = option_parser([Options], __doc__).parse_args_into_dataclasses()
    print(compare_runs(options.runs, options.sources, options.sizes))


if __name__ == "__main__":
    sys.exit(main())

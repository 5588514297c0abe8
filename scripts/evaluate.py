"""Evaluate a model on datasets, and the same model that is shown the mean image.

    python scripts/evaluate.py --model . --dataset runs/synthetic --output_dir runs/report --max_images 60
    python scripts/evaluate.py --model runs/small --dataset runs/val runs/unseen_camera --output_dir runs/report
    python scripts/evaluate.py --model runs/small --dataset runs/unseen_camera --output_dir runs/report \\
        --write_temperature true

The first one takes a minute on a CPU. A dataset is a folder that scripts/make_dataset.py writes, or images with a
metadata.jsonl. Sources that training never saw are those whose names begin with "unseen_", or that --unseen names:
temperature and thresholds are fitted to them if there are any, otherwise to all. The output is

- report.json, report.md and plots;
- predictions.parquet: each question with its image, truth, answer, score and p_yes, for FiftyOne or pandas;
- thresholds.json: the P(yes) from which a question of each type is answered yes, and a band of answers that are not
  sure; ask.py, watch.py, label.py and serve.py take it as --thresholds. evaluation/thresholds.py describes the fit.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import disable_progress_bars
from transformers.utils import logging

from traffic_vlm.common.files import DataError, atomic_write, atomic_write_text
from traffic_vlm.common.loading import load_processor, load_weights, refuse_adapter
from traffic_vlm.common.options import choose_threads, option, option_parser
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.data.datasets import add_questions, load_rows
from traffic_vlm.data.near_duplicates import count_repeated
from traffic_vlm.evaluation import MIN_ANSWERS
from traffic_vlm.evaluation.markdown import headline, to_markdown
from traffic_vlm.evaluation.metrics import at_temperature, with_probability
from traffic_vlm.evaluation.plots import draw_question_types, draw_reliability
from traffic_vlm.evaluation.predict import predict
from traffic_vlm.evaluation.report import Options, evaluate_model, rows_to_fit
from traffic_vlm.evaluation.thresholds import fit_thresholds
from traffic_vlm.scripts import command


NEEDED = f"at least {MIN_ANSWERS} questions with the answer yes, and as many with no"  # to fit P(yes)


@dataclass
class Arguments:
    model: str = field(metadata={"help": "model folder, or a name on the Hub"})
    dataset: list[Path] = field(metadata={"help": "dataset folders"})
    output_dir: Path = field(metadata={"help": "folder to write to"})
    split: str | None = option(None, "split to load; needed for folders with several")
    unseen: list[str] | None = option(None, "sources that training never saw, if not named unseen_...")
    train_dataset: list[Path] | None = option(None, "datasets of training, to count near-duplicates of their images")
    max_images: int | None = option(None, "draw at most so many images")
    bf16: bool = option(False, "compute in bfloat16 (autocast)")
    write_temperature: bool = option(False, "write the fitted temperature of P(yes) to the model folder")

    def __post_init__(self) -> None:
        if self.max_images is not None and self.max_images < 1:
            raise ValueError(f"--max_images must be at least 1, got {self.max_images}")
        if self.write_temperature:
            refuse_adapter(self.model, "--write_temperature")
            if not (Path(self.model) / "config.json").is_file():
                raise ValueError(f"--write_temperature writes to the model folder: {self.model} has no config.json")


def evaluate(arguments: Arguments, options: Options) -> None:
    """Write the report of a model, and what the arguments ask for."""
    device, folder = "cuda" if torch.cuda.is_available() else "cpu", arguments.output_dir
    rows = add_questions(load_rows(arguments.dataset, arguments.split, arguments.max_images))
    sources, unseen = sorted(rows.unique("source")), arguments.unseen or []
    for name in unseen:
        if not any(name in (source, *source.split("/")) for source in sources):
            raise DataError(f"--unseen {name}: no image is of this source, only of {', '.join(sources)}")
    model = load_weights(arguments.model, dtype=torch.float32).eval().to(device)
    processor = load_processor(arguments.model)
    report: dict[str, Any] = {"model": arguments.model, "datasets": list(map(str, arguments.dataset))}
    with torch.autocast(device, torch.bfloat16, enabled=arguments.bf16):
        answers = predict(model, processor, rows, options.batch_size, unseen=unseen)
        report |= evaluate_model(model, processor, rows, answers, options)
    if arguments.train_dataset:
        report["repeated"] = count_repeated(rows, load_rows(arguments.train_dataset, prefer="train"))
    write_report(report, folder)
    with atomic_write(folder / "predictions.parquet") as temporary:
        answers.to_parquet(temporary, index=False)
    counts = report["questions"]
    print(f"images: {report['images']}, yes/no questions: {counts['yes_no']}, in words: {counts['words']}")
    if counts["yes_no"]:
        print(headline(report))
    print(f"wrote {folder / 'report.md'}, report.json, predictions.parquet and plots")
    fitted, calibration = rows_to_fit(answers), report["calibration"]
    if calibration:
        temperature = calibration["fitted_temperature"]
        print(f"temperature of P(yes), fitted to {', '.join(calibration['fitted_on'])}: {temperature:.3f}")
    if arguments.write_temperature:
        yes, no = ((with_probability(fitted)["truth"] == truth).sum() for truth in ("yes", "no"))
        if min(yes, no) < MIN_ANSWERS:  # of one question, right or wrong, the fit is a limit of the search
            raise DataError(f"--write_temperature needs {NEEDED}, got {yes} and {no}")
        write_temperature(Path(arguments.model), temperature)
        fitted = at_temperature(fitted, temperature)  # thresholds are for the model as it is now
    write_thresholds(fitted, folder / "thresholds.json")


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write report.json, report.md and the plots of the metrics."""
    if report["calibration"]:
        draw_reliability(report["calibration"], folder / "reliability.png")
    if types := report["tables"].get("yes_no_by_question_type"):
        draw_question_types(pd.DataFrame.from_dict(types, orient="index"), folder / "question_types.png")
    atomic_write_text(folder / "report.json", json.dumps(report, indent=1, allow_nan=False))
    atomic_write_text(folder / "report.md", to_markdown(report))


def write_thresholds(answers: pd.DataFrame, path: Path) -> None:
    """Write the thresholds, or remove those of an earlier run if there are too few questions to fit any."""
    thresholds = fit_thresholds(answers)
    if thresholds is None:
        path.unlink(missing_ok=True)
        print(f"no {path.name}: it needs {NEEDED}")
        return
    atomic_write_text(path, json.dumps(thresholds.to_dict(), indent=1, allow_nan=False))
    print(f"wrote {path}")


def write_temperature(folder: Path, temperature: float) -> None:
    """Set the temperature of P(yes) in config.json, in a single step."""
    config = TrafficVLMConfig.from_pretrained(folder)
    config.yes_no_temperature = temperature
    with tempfile.TemporaryDirectory(dir=folder, prefix=".temperature") as temporary:
        config.save_pretrained(temporary)
        os.replace(Path(temporary) / "config.json", folder / "config.json")
    print(f"wrote yes_no_temperature {temperature:.4f} to {folder / 'config.json'}")


@command()
def main() -> None:
    parser = option_parser((Arguments, Options), __doc__)
    disable_progress_bars()
    logging.disable_progress_bar()
    arguments, options = parser.parse_args_into_dataclasses()
    choose_threads()
    evaluate(arguments, options)


if __name__ == "__main__":
    sys.exit(main())

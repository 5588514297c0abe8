"""Measure a model on datasets, beside what it would answer without looking: report.json, report.md and pictures.

    python scripts/evaluate.py --model runs/small --dataset runs/synthetic --output_dir runs/report --max_images 60
    python scripts/evaluate.py --model runs/small --dataset runs/val runs/dev --train_dataset runs/train \\
        --output_dir runs/report
    python scripts/evaluate.py --model runs/small --dataset runs/val --output_dir runs/report --write_temperature
    python scripts/evaluate.py --model . --exported runs/onnx --int8 --dataset runs/val --output_dir runs/report_int8

A dataset is a folder that make_dataset.py writes. --train_dataset gives the mean image and the most frequent answers
of the baselines. --write_temperature sets the fitted temperature of P(yes) in the model folder.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from transformers import HfArgumentParser
from transformers.utils import logging

from traffic_vlm.evaluation.folders import load_model, load_rows, write_temperature
from traffic_vlm.evaluation.plots import draw_examples, draw_kinds, draw_reliability
from traffic_vlm.evaluation.report import Options, evaluate_model
from traffic_vlm.evaluation.tables import number, to_markdown
from traffic_vlm.utils import DataError, atomic_write_text


@dataclass
class Arguments:
    model: Path = field(metadata={"help": "folder of a model with weights"})
    dataset: list[Path] = field(metadata={"help": "folders made by make_dataset.py"})
    output_dir: Path = field(metadata={"help": "folder to write to"})
    split: str | None = field(default=None, metadata={"help": "by default the only one that a dataset has"})
    train_dataset: list[Path] | None = field(default=None, metadata={"help": "for the baselines"})
    max_images: int | None = field(default=None, metadata={"help": "draw so many of all images"})
    batch_size: int = field(default=16, metadata={"help": "images at once"})
    reworded_images: int = field(default=100, metadata={"help": "at most so many are asked in other words"})
    corrupted_images: int = field(default=200, metadata={"help": "at most so many are worsened"})
    pointing_images: int = field(default=1000, metadata={"help": "at most so many are for the pointing game"})
    bf16: bool = field(default=False, metadata={"help": "compute in bfloat16 (autocast)"})
    exported: Path | None = field(default=None, metadata={"help": "folder of export.py: its graphs are asked instead"})
    int8: bool = field(default=False, metadata={"help": "with --exported: those with int8 weights"})
    write_temperature: bool = field(default=False, metadata={"help": "set it in the model folder"})

    def __post_init__(self) -> None:
        least = {"max_images": 1, "batch_size": 1, "reworded_images": 0, "corrupted_images": 0, "pointing_images": 0}
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise SystemExit(f"--{name} must be at least {limit}, got {value}")
        if self.int8 and self.exported is None:
            raise SystemExit("--int8 needs --exported: the folder of the graphs")
        if self.exported and (self.bf16 or self.write_temperature):
            raise SystemExit("--exported takes neither --bf16 nor --write_temperature: graphs stay as they are")


def evaluate(arguments: Arguments) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = load_rows(arguments.dataset, arguments.split, arguments.max_images)
    train_rows = load_rows(arguments.train_dataset, prefer="train") if arguments.train_dataset else None
    model, processor = load_model(arguments.model, device)
    options = Options(
        batch_size=arguments.batch_size,
        reworded_images=arguments.reworded_images,
        corrupted_images=arguments.corrupted_images,
        pointing_images=arguments.pointing_images,
    )
    if arguments.exported:
        from traffic_vlm.export.runtime import ExportedModel

        answering: Any = ExportedModel(arguments.exported, model.config, "_int8" if arguments.int8 else "")
        # Graphs answer; they do not show where words look, nor how likely other answers were.
        options = replace(options, pointing_images=0, perplexity=False)
    else:
        answering = model
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    with torch.autocast(device, torch.bfloat16, enabled=arguments.bf16):
        report = evaluate_model(answering, processor, rows, options, train_rows)
        examples = arguments.output_dir / "examples.png"
        draw_examples(model, processor, rows, report["examples"], examples)
    graphs = f"{arguments.exported}{', int8' if arguments.int8 else ''}" if arguments.exported else None
    about = {"model": str(arguments.model), "graphs": graphs, "datasets": list(map(str, arguments.dataset))}
    report = about | report
    if report["yes_no"]:
        draw_reliability(report["calibration"], arguments.output_dir / "reliability.png")
        draw_kinds(report["yes_no"], arguments.output_dir / "kinds.png")
    atomic_write_text(arguments.output_dir / "report.json", json.dumps(report, indent=1, allow_nan=False))
    atomic_write_text(arguments.output_dir / "report.md", to_markdown(report))
    summarise(report)
    print(f"wrote {arguments.output_dir / 'report.md'}, report.json and pictures")
    if arguments.write_temperature:
        set_temperature(arguments.model, report)


def summarise(report: dict) -> None:
    print(f"{report['images']} images, {report['questions']['yes_no']} yes/no questions")
    if report["yes_no"]:
        found = report["yes_no"]
        rows = {"mean over sources": found["mean_over_sources"], "all together": found["all"], **found["by_source"]}
        for name, row in rows.items():
            print(f"  {name:<20} balanced accuracy {number(row['balanced_accuracy'])}, blind {number(row['blind'])}")
        print(f"  temperature of P(yes) over all: {report['calibration']['fitted_temperature']:.3f}")


def set_temperature(folder: Path, report: dict) -> None:
    if not report["calibration"]:
        raise DataError("--write_temperature: no yes/no questions to fit a temperature to")
    temperature = report["calibration"]["fitted_temperature"]
    write_temperature(folder, temperature)
    limit = ", a limit of the search" if report["calibration"]["at_limit"] else ""
    print(f"wrote yes_no_temperature {temperature:.4f}{limit} to {folder / 'config.json'}")


def main() -> None:
    arguments = Arguments(**vars(HfArgumentParser(Arguments).parse_args()))
    disable_progress_bars()  # of the library: ours count images
    logging.disable_progress_bar()
    try:
        evaluate(arguments)
    except (ValueError, OSError, FloatingPointError) as error:  # a DataError among them
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped; there is no report")


if __name__ == "__main__":
    main()

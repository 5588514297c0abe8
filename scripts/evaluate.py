"""Evaluate a model on datasets, and the same model that is shown the mean image.

    python scripts/evaluate.py --model . --dataset runs/synthetic --output_dir runs/report --max_images 60
    python scripts/evaluate.py --model runs/small --dataset runs/val runs/unseen_camera --output_dir runs/report
    python scripts/evaluate.py --model runs/small --dataset runs/unseen_camera --output_dir runs/report \\
        --write_temperature true

The first one takes a minute on a CPU. A dataset is a folder of scripts/make_dataset.py, or images with a
metadata.jsonl. Temperature and thresholds are fitted to sources that training never saw if there are any, otherwise to
all. docs/evaluation.md explains the metrics and the files: report.json, report.md, plots, predictions.parquet and
thresholds.json, which ask.py, watch.py, label.py and serve.py take as --thresholds.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import disable_progress_bars
from transformers.utils import logging

from traffic_vlm.common.files import DataError, atomic_write_text
from traffic_vlm.common.loading import load_weights, parse_size, set_image_size
from traffic_vlm.common.options import choose_threads, option, option_parser
from traffic_vlm.configuration_traffic_vlm import height_and_width
from traffic_vlm.data.datasets import add_questions, load_rows
from traffic_vlm.data.near_duplicates import count_repeated
from traffic_vlm.evaluation import MIN_ANSWERS
from traffic_vlm.evaluation.markdown import headline, to_markdown
from traffic_vlm.evaluation.metrics import at_temperature
from traffic_vlm.evaluation.plots import draw_question_types, draw_reliability
from traffic_vlm.evaluation.predict import predict
from traffic_vlm.evaluation.report import evaluate_model, rows_to_fit
from traffic_vlm.evaluation.thresholds import Thresholds, fit_thresholds
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.scripts import command


@dataclass
class EvaluateOptions:
    model: str = field(metadata={"help": "model folder, or a name on the Hub"})
    dataset: list[Path] = field(metadata={"help": "dataset folders"})
    output_dir: Path = field(metadata={"help": "folder to write to"})
    split: str | None = option(None, "split to load; needed for folders with several")
    unseen: list[str] = option([], "sources that training never saw, if not named unseen_...")
    train_dataset: list[Path] = option([], "datasets of training, to count near-duplicates of their images")
    max_images: int | None = option(None, "draw at most so many images")
    image_size: str | None = option(None, "side of the pixels, or height,width; default: the model's")
    batch_size: int = option(16, "images at once")
    paraphrased_images: int = option(100, "ask in paraphrases, and for contradictions, about at most so many images")
    write_temperature: bool = option(False, "write the fitted temperature of P(yes) to the model folder")


def evaluate(options: EvaluateOptions) -> None:
    """Write the report of a model, its answers and thresholds, and what the options ask for."""
    config = Path(options.model) / "config.json"
    if options.write_temperature and not config.is_file():
        raise DataError(f"--write_temperature writes to the model folder: {options.model} has no config.json")
    rows = add_questions(load_rows(options.dataset, options.split, options.max_images))
    sources = sorted(rows.unique("source"))
    for name in options.unseen:
        if not any(name in (source, *source.split("/")) for source in sources):
            raise DataError(f"--unseen {name}: no image is of this source, only of {', '.join(sources)}")
    model = load_weights(options.model, dtype=torch.float32).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    processor = TrafficVLMProcessor.from_pretrained(options.model)
    default = height_and_width(model.config.vision_config.image_size)
    size = parse_size(options.image_size) if options.image_size else default
    set_image_size(model, processor, size)

    answers = predict(model, processor, rows, options.batch_size, unseen=options.unseen)
    report: dict[str, Any] = {"model": options.model, "datasets": list(map(str, options.dataset)), "image_size": size}
    report |= evaluate_model(model, processor, rows, answers, options.batch_size, options.paraphrased_images)
    if options.train_dataset:
        report["repeated"] = count_repeated(rows, load_rows(options.train_dataset, prefer="train"))
    fitted, temperature = rows_to_fit(answers), report["calibration"].get("fitted_temperature")
    if options.write_temperature and temperature:
        fitted = at_temperature(fitted, temperature)  # thresholds are for the model as it will be
    thresholds = fit_thresholds(fitted)
    write_report(report, answers, thresholds, options.output_dir)
    if options.write_temperature:
        if thresholds is None:  # of one question, right or wrong, the fit is a limit of the search
            raise DataError(f"--write_temperature needs {MIN_ANSWERS} questions with the answer yes, and as many no")
        fields = json.loads(config.read_text(encoding="utf-8"))
        if size == default:
            fields["yes_no_temperature"] = temperature
        else:
            side = str(round(math.prod(size) ** 0.5))
            fields["size_temperatures"] = fields.get("size_temperatures", {}) | {side: temperature}
        atomic_write_text(config, json.dumps(fields, indent=2, sort_keys=True) + "\n")


def write_report(report: dict[str, Any], answers: pd.DataFrame, thresholds: Thresholds | None, folder: Path) -> None:
    """Write a report with its plots, answers and thresholds, and print the most important figures."""
    folder.mkdir(parents=True, exist_ok=True)
    if calibration := report["calibration"]:
        draw_reliability(calibration, folder / "reliability.png")
    if types := report["tables"].get("yes_no_by_question_type"):
        draw_question_types(types, folder / "question_types.png")
    texts = {"report.json": json.dumps(report, indent=1, allow_nan=False), "report.md": to_markdown(report)}
    (folder / "thresholds.json").unlink(missing_ok=True)  # of an earlier run
    if thresholds:
        texts["thresholds.json"] = json.dumps(asdict(thresholds), indent=1, allow_nan=False)
    for name, text in texts.items():
        atomic_write_text(folder / name, text)
    answers.to_parquet(folder / "predictions.parquet", index=False)
    print(headline(report))
    print(f"wrote {folder / 'report.md'}, with the fitted temperature, report.json, predictions.parquet and plots")


@command()
def main() -> None:
    [options] = option_parser([EvaluateOptions], __doc__).parse_args_into_dataclasses()
    disable_progress_bars()
    logging.disable_progress_bar()
    choose_threads()
    evaluate(options)


if __name__ == "__main__":
    sys.exit(main())

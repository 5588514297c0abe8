"""Evaluate a model on datasets, beside baselines that see no image.

    python scripts/evaluate.py --model . --dataset runs/synthetic --output_dir runs/report --max_images 60
    python scripts/evaluate.py --model runs/small --dataset runs/val runs/dev --train_dataset runs/train \\
        --output_dir runs/report
    python scripts/evaluate.py --model runs/small --dataset runs/val --output_dir runs/report --write_temperature
    python scripts/evaluate.py --model . --exported runs/onnx --int8 --dataset runs/val --output_dir runs/report_int8

The first one takes a minute on a CPU. A dataset is a folder that scripts/make_dataset.py writes, or images beside a
metadata.jsonl. The output is

- report.json, report.md and plots;
- predictions.parquet: each question with its image, ground truth, answer, score and p_yes, for FiftyOne or pandas;
- thresholds.json: the P(yes) from which a question of each type is answered yes, and a band of answers that are not
  sure; ask.py, watch.py, label.py and serve.py take it as --thresholds. evaluation/thresholds.py describes the fit.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from transformers.utils import logging

from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.data.folders import load_rows
from traffic_vlm.evaluation.markdown import format_value, to_markdown
from traffic_vlm.evaluation.plots import draw_examples, draw_question_types, draw_reliability
from traffic_vlm.evaluation.predict import Prediction, predict, write_predictions
from traffic_vlm.evaluation.report import Options, evaluate_model
from traffic_vlm.evaluation.thresholds import MIN_ANSWERS, fit_thresholds
from traffic_vlm.evaluation.trust import MIN_GAIN_QUESTIONS, update_taught
from traffic_vlm.files import DataError, atomic_write_text
from traffic_vlm.loading import load_processor, load_weights, refuse_adapter
from traffic_vlm.options import option_parser
from traffic_vlm.processing_traffic_vlm import TAUGHT_ON


@dataclass
class Arguments:
    model: str = field(metadata={"help": "model folder, or a name on the Hub"})
    dataset: list[Path] = field(metadata={"help": "dataset folders"})
    output_dir: Path = field(metadata={"help": "folder to write to"})
    split: str | None = field(default=None, metadata={"help": "split to load; needed for folders with several"})
    train_dataset: list[Path] | None = field(
        default=None, metadata={"help": "dataset folders for the mean image and the most frequent answers"}
    )
    max_images: int | None = field(default=None, metadata={"help": "draw at most so many images"})
    bf16: bool = field(default=False, metadata={"help": "compute in bfloat16 (autocast)"})
    exported: Path | None = field(default=None, metadata={"help": "folder of scripts/export.py: ask its graphs"})
    int8: bool = field(default=False, metadata={"help": "with --exported: the graphs with int8 weights"})
    write_temperature: bool = field(
        default=False, metadata={"help": "write the fitted temperature of P(yes) to the model folder"}
    )
    write_taught_words: bool = field(
        default=False,
        metadata={"help": "write the words that are answered better than blind to processor_config.json"},
    )

    def __post_init__(self) -> None:
        if self.max_images is not None and self.max_images < 1:
            raise ValueError(f"--max_images must be at least 1, got {self.max_images}")
        if self.int8 and self.exported is None:
            raise ValueError("--int8 needs --exported: the folder of the graphs")
        if self.exported and (self.bf16 or self.write_temperature):
            raise ValueError("--exported takes neither --bf16 nor --write_temperature: exported graphs are fixed")
        if self.write_temperature:
            refuse_adapter(self.model, "--write_temperature")


def evaluate(arguments: Arguments, options: Options) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = load_rows(arguments.dataset, arguments.split, arguments.max_images)
    train_rows = load_rows(arguments.train_dataset, prefer="train") if arguments.train_dataset else None
    model: Any = load_weights(arguments.model, dtype=torch.float32).eval()
    processor = load_processor(arguments.model)
    evaluated: Any = model.to(device)
    about: dict[str, Any] = {"model": arguments.model, "graphs": None}
    if arguments.exported:
        from traffic_vlm.export.runtime import ExportedModel

        evaluated = ExportedModel(arguments.exported, model.config, "_int8" if arguments.int8 else "")
        # Exported graphs give neither attention maps nor the logits of given answers.
        options = replace(options, grounding_images=0, perplexity=False)
        about["graphs"] = f"{arguments.exported}{', int8' if arguments.int8 else ''}"
    output_dir = arguments.output_dir
    with torch.autocast(device, torch.bfloat16, enabled=arguments.bf16):
        progress = "questions" if options.progress else None
        predictions = predict(evaluated, processor, rows, options.batch_size, progress=progress)
        report = evaluate_model(evaluated, processor, rows, options, train_rows, predictions)
        draw_examples(model, processor, rows, report["examples"], output_dir / "examples.png")
    report = about | {"datasets": list(map(str, arguments.dataset))} | report
    if report["calibration"]:
        draw_reliability(report["calibration"], output_dir / "reliability.png")
    if report["yes_no"]:
        draw_question_types(report["yes_no"], output_dir / "question_types.png")
    atomic_write_text(output_dir / "report.json", json.dumps(report, indent=1, allow_nan=False))
    atomic_write_text(output_dir / "report.md", to_markdown(report))
    write_predictions(predictions, output_dir / "predictions.parquet")
    print_summary(report)
    print(f"wrote {output_dir / 'report.md'}, report.json, predictions.parquet and plots")
    if arguments.write_temperature:
        if not report["calibration"]:
            raise DataError("--write_temperature needs yes/no questions, to fit a temperature to")
        temperature = report["calibration"]["fitted_temperature"]
        write_temperature(Path(arguments.model), temperature)
        # Thresholds are for the model as it is now.
        predictions = [one.at_temperature(temperature) for one in predictions]
    write_thresholds(predictions, output_dir / "thresholds.json")
    if arguments.write_taught_words:
        write_taught_words(Path(arguments.model), processor.taught, report["trust"]["word_gains"])


def print_summary(report: dict[str, Any]) -> None:
    print(f"{report['images']} images, {report['questions']['yes_no']} yes/no questions")
    if not report["yes_no"]:
        return
    found = report["yes_no"]
    rows = {"mean over sources": found["mean_over_sources"], "all together": found["all"], **found["by_source"]}
    for name, row in rows.items():
        values = [format_value(row[key]) for key in ("balanced_accuracy", "mean_image")]
        print(f"  {name:<20} balanced accuracy {values[0]}, of the mean image {values[1]}")
    if report["calibration"]:
        print(f"  fitted temperature of P(yes): {report['calibration']['fitted_temperature']:.3f}")


def write_thresholds(predictions: list[Prediction], path: Path) -> None:
    """Write the thresholds, or remove those of an earlier run if there are too few questions to fit any."""
    thresholds = fit_thresholds(predictions)
    if thresholds is None:
        path.unlink(missing_ok=True)
        print(f"no {path.name}: it needs at least {MIN_ANSWERS} questions with the answer yes, and as many with no")
        return
    atomic_write_text(path, json.dumps(thresholds.to_dict(), indent=1, allow_nan=False))
    print(f"wrote {path}")


def write_taught_words(
    folder: Path, before: Mapping[str, Sequence[str]] | None, gains: Mapping[str, Mapping[str, float]]
) -> None:
    """Set the standing of the words that were measured in processor_config.json of the model folder."""
    asked = {word: TAUGHT_ON[0 if found["photographs"] >= MIN_GAIN_QUESTIONS else 1] for word, found in gains.items()}
    path = folder / "processor_config.json"
    fields = json.loads(path.read_text(encoding="utf-8")) | {"taught": update_taught(before or {}, asked, gains)}
    atomic_write_text(path, json.dumps(fields, indent=2, sort_keys=True) + "\n")
    print(f"wrote the taught words to {path}")


def write_temperature(folder: Path, temperature: float) -> None:
    """Set the temperature of P(yes) in config.json, and in decision.json for pipelines. Replaces each file at once."""
    config = TrafficVLMConfig.from_pretrained(folder)
    config.yes_no_temperature = temperature
    with tempfile.TemporaryDirectory(dir=folder, prefix=".temperature") as temporary:
        config.save_pretrained(temporary)
        for name in ("decision.json", "config.json"):
            os.replace(Path(temporary) / name, folder / name)
    print(f"wrote yes_no_temperature {temperature:.4f} to {folder / 'config.json'}")


def main() -> None:
    parser = option_parser((Arguments, Options), __doc__)
    disable_progress_bars()
    logging.disable_progress_bar()
    try:
        evaluate(*parser.parse_args_into_dataclasses())
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit((str(error).strip().splitlines() or [type(error).__name__])[0])
    except KeyboardInterrupt:
        sys.exit("stopped; no report was written")


if __name__ == "__main__":
    main()

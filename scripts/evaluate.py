"""Evaluate a model on datasets, beside the same model that is shown the mean image.

    python scripts/evaluate.py --model . --dataset runs/synthetic --output_dir runs/report --max_images 60
    python scripts/evaluate.py --model runs/small --dataset runs/val runs/unseen_camera --output_dir runs/report
    python scripts/evaluate.py --model runs/small --dataset runs/unseen_camera --output_dir runs/report \\
        --write_temperature true
    python scripts/evaluate.py --model . --exported runs/onnx --int8 --dataset runs/val --output_dir runs/report_int8

The first one takes a minute on a CPU. A dataset is a folder that scripts/make_dataset.py writes, or images beside a
metadata.jsonl. Sources that training never saw are those whose names begin with "unseen_", or that --unseen names:
temperature and thresholds are fitted to them if there are any. The output is

- report.json, report.md and plots;
- predictions.parquet: each question with its image, truth, answer, score and p_yes, for FiftyOne or pandas;
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

import pandas as pd
import torch
from datasets import disable_progress_bars
from transformers.utils import logging

from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.data.folders import load_rows
from traffic_vlm.data.near_duplicates import count_repeated
from traffic_vlm.evaluation.markdown import headline, to_markdown
from traffic_vlm.evaluation.metrics import MIN_ANSWERS, at_temperature
from traffic_vlm.evaluation.plots import draw_question_types, draw_reliability
from traffic_vlm.evaluation.predict import predict
from traffic_vlm.evaluation.report import Options, evaluate_model, rows_to_fit
from traffic_vlm.evaluation.taught import MIN_GAIN_QUESTIONS, update_taught
from traffic_vlm.evaluation.thresholds import fit_thresholds
from traffic_vlm.files import DataError, atomic_write, atomic_write_text
from traffic_vlm.loading import load_processor, load_weights, refuse_adapter
from traffic_vlm.options import option, option_parser
from traffic_vlm.processing_traffic_vlm import TAUGHT_ON


KINDS = ("unseen", "known", "rendered", "all")


@dataclass
class Arguments:
    model: str = field(metadata={"help": "model folder, or a name on the Hub"})
    dataset: list[Path] = field(metadata={"help": "dataset folders"})
    output_dir: Path = field(metadata={"help": "folder to write to"})
    split: str | None = option(None, "split to load; needed for folders with several")
    unseen: list[str] = field(
        default_factory=list, metadata={"help": "sources that training never saw, beside those named unseen_..."}
    )
    train_dataset: list[Path] | None = field(
        default=None,
        metadata={"help": "datasets of training: the report counts the images that are near-duplicates of theirs"},
    )
    fit_on: str | None = option(
        None,
        "kind of sources that temperature and thresholds are fitted to: unseen, known, rendered or all; default: "
        "unseen if there are any, otherwise all",
    )
    max_images: int | None = option(None, "draw at most so many images")
    bf16: bool = option(False, "compute in bfloat16 (autocast)")
    exported: Path | None = option(None, "folder of scripts/export.py: ask its graphs")
    int8: bool = option(False, "with --exported: the graphs with int8 weights")
    write_temperature: bool = option(False, "write the fitted temperature of P(yes) to the model folder")
    write_taught_words: bool = option(
        False, "write the words that are answered better than without the image to processor_config.json"
    )

    def __post_init__(self) -> None:
        if self.max_images is not None and self.max_images < 1:
            raise ValueError(f"--max_images must be at least 1, got {self.max_images}")
        if self.fit_on not in (None, *KINDS):
            raise ValueError(f"--fit_on must be one of {', '.join(KINDS)}, got {self.fit_on!r}")
        if self.int8 and self.exported is None:
            raise ValueError("--int8 needs --exported: the folder of the graphs")
        if self.exported and (self.bf16 or self.write_temperature):
            raise ValueError("--exported takes neither --bf16 nor --write_temperature: exported graphs are fixed")
        if self.write_temperature:
            refuse_adapter(self.model, "--write_temperature")


def evaluate(arguments: Arguments, options: Options) -> None:
    """Write the report of a model, and what the arguments ask for."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = load_rows(arguments.dataset, arguments.split, arguments.max_images)
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
        answers = predict(evaluated, processor, rows, options.batch_size, unseen=arguments.unseen)
        report = evaluate_model(evaluated, processor, rows, options, answers, arguments.fit_on)
    if arguments.train_dataset:
        about["repeated"] = count_repeated(rows, load_rows(arguments.train_dataset, prefer="train"))
    report = about | {"datasets": list(map(str, arguments.dataset))} | report
    write_report(report, output_dir)
    with atomic_write(output_dir / "predictions.parquet") as temporary:
        answers.to_parquet(temporary, index=False)
    print(f"{report['images']} images, {report['questions']['yes_no']} yes/no questions\n{headline(report)}")
    if calibration := report["calibration"]:
        fitted_on = ", ".join(calibration["fitted_on"])
        print(f"temperature of P(yes), fitted to {fitted_on}: {calibration['fitted_temperature']:.3f}")
    print(f"wrote {output_dir / 'report.md'}, report.json, predictions.parquet and plots")
    fitted = rows_to_fit(answers, arguments.fit_on)
    if arguments.write_temperature:
        if not report["calibration"]:
            raise DataError("--write_temperature needs yes/no questions, to fit a temperature to")
        temperature = report["calibration"]["fitted_temperature"]
        write_temperature(Path(arguments.model), temperature)
        fitted = at_temperature(fitted, temperature)  # thresholds are for the model as it is now
    write_thresholds(fitted, output_dir / "thresholds.json")
    if arguments.write_taught_words:
        write_taught_words(Path(arguments.model), processor.taught, report["word_gains"])


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

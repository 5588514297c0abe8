"""Whether a training made the model better: answers before it, kept beside the checkpoints, against those after it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import TrainerState, TrainingArguments

from ..evaluation.compare import Comparison, compare
from ..evaluation.predict import predict
from ..evaluation.report import quick_metrics
from ..files import atomic_write


BEFORE_FILE = ".answers_before.parquet"  # beside the checkpoints


@dataclass(frozen=True)
class Outcome:
    """Metrics by name before and after training; empty without evaluation."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    verdict: str  # a sentence


def find_outcome(
    state: TrainerState, arguments: TrainingArguments, comparison: Comparison | None, model: str = "the model"
) -> Outcome:
    """The metrics of the evaluation before training and of the finished weights, and the verdict on their difference.

    The finished weights are the last ones, or those of the checkpoint selected as best.

    Args:
        comparison: of the answers before and after.
        model: what the verdict calls the model.
    """
    logged = [entry for entry in state.log_history if any(name.startswith("eval_") for name in entry)]
    is_best = arguments.load_best_model_at_end
    chosen = [entry for entry in logged if is_best and entry["step"] == state.best_global_step] or logged[-1:]
    first = [entry for entry in logged if entry["step"] == 0]
    before, after = (
        {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_")}
        for entry in ((first or [{}])[0], (chosen or [{}])[-1])
    )
    if comparison is None:
        return Outcome(before, after, f"Whether training made {model} better is not known: it was not evaluated.")
    return Outcome(before, after, comparison.verdict(model))


def evaluate(trainer: Any, model: Any, rows: Any, before: Path) -> dict[str, float]:
    """The metrics that training follows. The answers before training are kept in the file `before`."""
    batch_size = trainer.args.per_device_eval_batch_size
    answers = predict(model, trainer.processing_class, rows, batch_size)
    if trainer.state.global_step == 0 and trainer.is_world_process_zero():
        with atomic_write(before) as temporary:
            answers.to_parquet(temporary)
    return quick_metrics(model, trainer.processing_class, rows, batch_size, answers)


def compare_with_start(trainer: Any, model: Any, before: Path) -> Comparison | None:
    """Comparison of the finished model with the answers before training, in the same precision; None without them."""
    rows = trainer.eval_dataset
    if rows is None or not before.is_file():
        return None
    with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
        answers = predict(model.eval(), trainer.processing_class, rows, trainer.args.per_device_eval_batch_size)
    return compare(pd.read_parquet(before), answers)

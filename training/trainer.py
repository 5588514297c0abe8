"""The library's Trainer with auxiliary losses and our evaluation metrics.

batch from `SupervisedCollator` → answer loss + presence, grounding, intermediate and consistency losses
evaluation → `quick_metrics`, the same metrics as in `scripts/evaluate.py`
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..evaluation.predict import predict
from ..evaluation.report import quick_metrics
from ..files import atomic_write
from .watched import WatchedTrainer


BEFORE_FILE = ".answers_before.parquet"  # beside the checkpoints: the answers before training


def perplexity(loss: float) -> float:
    """Perplexity exp(loss): the number of equally likely words that would be as uncertain."""
    return math.exp(min(loss, 50.0))


def unwrap(model: Any) -> Any:
    """The full model inside a peft model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class TrafficTrainer(WatchedTrainer):
    """`Trainer` for batches of packed questions from `SupervisedCollator`. It evaluates on rows of a dataset.

    Args:
        loss_weights: weights of the auxiliary losses by name, of `options.LOSSES`; a loss with weight 0 or without a
            weight is not computed. "presence" and "distillation" need a model with a training head.

    Attributes:
        word_counts: numbers of the questions of the training so far, by word; see `SupervisedCollator`.
    """

    def __init__(self, *args: Any, loss_weights: Mapping[str, float] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.loss_weights = {name: weight for name, weight in (loss_weights or {}).items() if weight}
        self.auxiliary: Any = None
        if self.loss_weights:  # a training without them loads none of their code
            from .auxiliary import objective

            self.auxiliary = objective
        self.answer_losses: tuple[Any, Any] = (0.0, 0)  # sum and count since the last evaluation
        self.word_counts = WordCounts()
        self.add_callback(self.word_counts)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        full = unwrap(self.accelerator.unwrap_model(model))
        targets = inputs.pop("targets", None)
        self.word_counts.add(inputs.pop("word_counts", 0))
        inputs["pixel_values"] = self._normalized(inputs["pixel_values"])
        inputs["use_cache"], labels = False, inputs["labels"]  # label smoothing removes the labels
        with self.auxiliary.recording(full) if self.auxiliary else nullcontext() as recorded:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        number = (labels[:, 1:] >= 0).sum()
        self._count_answers(
            outputs, loss, labels, number, number if num_items_in_batch is None else num_items_in_batch
        )
        # Without num_items_in_batch the library itself divides by the number of accumulated passes.
        fraction = 1.0 if num_items_in_batch is None else 1.0 / self.current_gradient_accumulation_steps
        if self.auxiliary and targets is not None:
            with self.accelerator.autocast():
                passed = self.auxiliary.Pass(full, recorded, outputs.logits, targets)
                for name, value in passed.losses(self.loss_weights).items():
                    self._add(f"{name}_loss", value)
                    loss = loss + self.loss_weights[name] * fraction * value
        return (loss, outputs) if return_outputs else loss

    def _normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalized pixels [I,3,H,W] of those of the collator; uint8 pixels are normalized as by the processor."""
        if pixels.dtype != torch.uint8:
            return pixels
        options = self.processing_class.image_processor
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (options.image_mean, options.image_std))
        mean, std = (values.to(pixels.device, non_blocking=True) for values in (mean, std))
        return (pixels * options.rescale_factor - mean) / std

    @torch.no_grad()
    def _count_answers(
        self, outputs: Any, loss: torch.Tensor, labels: torch.Tensor, number: torch.Tensor, divisor: Any
    ) -> None:
        """Add up the cross-entropy of the answers and the number of correct yes/no answers, for the log.

        Args:
            outputs, loss: of the model; with label smoothing only `loss` is there, the smoothed one.
            number: of the answers' tokens. divisor: by which the model divided the sum over them.
        """
        entropy = (loss if outputs.loss is None else outputs.loss).detach() * divisor
        self._add("answer_loss", entropy, number)
        total, count = self.answer_losses
        self.answer_losses = (total + entropy, count + number)
        text = self.model.config.get_text_config()
        truth, guess = labels[:, 1:], outputs.logits[:, :-1]
        log_odds = guess[..., text.yes_token_id] - guess[..., text.no_token_id]
        is_yes, is_no = truth == text.yes_token_id, truth == text.no_token_id
        right = (is_yes & (log_odds > 0)) | (is_no & (log_odds <= 0))
        self._add("yes_no_accuracy", right.sum(), (is_yes | is_no).sum())

    def means(self, logs: dict[str, float]) -> dict[str, float]:
        """The log with means, and with `words`, the perplexity of the answers, exp(answer_loss)."""
        logs = super().means(logs)
        if "answer_loss" in logs:
            logs["words"] = round(perplexity(logs["answer_loss"]), 3)
        return logs

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The `quick_metrics` of the evaluation rows, with the prefix `eval_`. Before training, answers are kept.

        Beside the `answer_loss` of these rows stand `train_answer_loss` and `train_words`, of the training steps since
        the last evaluation, and `uniform_loss`, ln V, of a model that gives all V words the same probability.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        batch_size, was_training = self.args.per_device_eval_batch_size, self.model.training
        answers = self.answers(self.model, rows)
        if self.state.global_step == 0 and self.is_world_process_zero():
            with atomic_write(Path(self.args.output_dir) / BEFORE_FILE) as temporary:
                answers.to_parquet(temporary)
        with self.accelerator.autocast():
            figures = quick_metrics(self.model, self.processing_class, rows, batch_size, answers)
        self.model.train(was_training)
        self._check_best_metric(figures, rows)
        if "answer_loss" in figures:
            figures |= self._losses_to_compare()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def answers(self, model: Any, rows: Any, **options: Any) -> pd.DataFrame:
        """Table of `predict` in the precision of the training. The model is in evaluation mode from then on."""
        with self.accelerator.autocast():
            return predict(model.eval(), self.processing_class, rows, self.args.per_device_eval_batch_size, **options)

    def _check_best_metric(self, figures: Mapping[str, float], rows: Any) -> None:
        best = (self.args.metric_for_best_model or "").removeprefix("eval_")
        if best and best not in figures:
            other = f", or select the best checkpoint by --metric_for_best_model {' or '.join(figures)}"
            raise ValueError(
                f"the metric {best}, which selects the best checkpoint, is not available for these {len(rows)} "
                "evaluation images. Balanced accuracy needs questions that are answered yes for some images and no "
                f"for others: pass more images with --eval_dataset and --max_eval_images{other if figures else ''}"
            )

    def _losses_to_compare(self) -> dict[str, float]:
        """What the held-out loss is compared with: the training loss since the last evaluation, and ln V."""
        (total, count), self.answer_losses = self.answer_losses, (0.0, 0)
        found = {"uniform_loss": math.log(self.model.config.get_text_config().vocab_size)}
        if int(count):  # no training step before the first evaluation
            loss = float(total) / int(count)
            found |= {"train_answer_loss": loss, "train_words": perplexity(loss)}
        return found


class WordCounts(TrainerCallback, ExportableState):  # type: ignore[misc]
    """The sum of the word counts of all batches; of the first process, if there are several.

    The library saves it in `trainer_state.json` of each checkpoint.
    """

    def __init__(self) -> None:
        self.counts: Any = np.zeros(1, np.int64)

    def add(self, counts: Any) -> None:
        self.counts = self.counts + counts

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"counts": self.counts.tolist()}}

    def load(self, state: Any) -> None:
        """Continue the counts of the `TrainerState` of a checkpoint."""
        self.counts = np.array(state.stateful_callbacks["WordCounts"]["attributes"]["counts"])


class StartEpoch(TrainerCallback):
    """Set the epoch of dataset and collator, so that a resumed run draws the same images as an uninterrupted one.

    The library sets the epoch of a dataset, but not with several processes.
    """

    def __init__(self, mixture: Any, collator: Any):
        self.mixture, self.collator = mixture, collator

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch = int((state.epoch or 0) + 1e-6)  # rounding may make 2.0 slightly smaller
        self.mixture.set_epoch(epoch)
        self.collator.start_epoch(epoch)

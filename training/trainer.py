"""The library's Trainer with auxiliary losses and our evaluation metrics.

batch from `SupervisedCollator` → answer loss + presence, grounding, intermediate, consistency and agreement losses
evaluation → `quick_metrics`, the same metrics as in `scripts/evaluate.py`
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import TrainerCallback

from ..common.files import atomic_write
from ..evaluation.predict import predict
from ..evaluation.report import quick_metrics
from .checkpoints import CheckedTrainer
from .words import AskedWords


BEFORE_FILE = ".answers_before.parquet"  # beside the checkpoints: the answers before training


def unwrap(model: Any) -> Any:
    """The full model inside a peft model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class TrafficTrainer(CheckedTrainer):
    """`Trainer` for batches of packed questions from `SupervisedCollator`. It evaluates on rows of a dataset.

    Args:
        loss_weights: weights of the auxiliary losses by name, of `options.LOSSES`; a loss with weight 0 or without a
            weight is not computed. "presence" needs a model with a training head.

    Attributes:
        asked: counts of the words of the questions of the training so far.
    """

    def __init__(self, *args: Any, loss_weights: Mapping[str, float] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.loss_weights = {name: weight for name, weight in (loss_weights or {}).items() if weight}
        self.recording: Any = nullcontext
        if self.loss_weights:  # a training without them loads none of their code
            from .auxiliary.losses import recording

            self.recording = recording
        self.sums: dict[str, tuple[Any, Any]] = {}  # {name: (sum, count)} since the last log
        self.asked = AskedWords(self.model.config.get_text_config())
        self.add_callback(self.asked)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the answers plus the weighted auxiliary losses. Each is also added to the means of the log."""
        targets = inputs.pop("targets", None)
        self.asked.add(inputs["input_ids"], inputs["labels"], inputs["segment_ids"])
        inputs["pixel_values"] = self._normalized(inputs["pixel_values"])
        inputs["use_cache"], labels = False, inputs["labels"]  # label smoothing removes the labels
        with self.recording(unwrap(self.accelerator.unwrap_model(model))) as recorded:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._count_answers(outputs.logits[:, :-1], labels[:, 1:])
        if self.loss_weights and targets is not None:
            # Without num_items_in_batch the library itself divides by the number of accumulated passes.
            fraction = 1.0 if num_items_in_batch is None else 1.0 / self.current_gradient_accumulation_steps
            with self.accelerator.autocast():
                losses = recorded.losses(self.loss_weights, outputs.logits, targets)
            for name, value in losses.items():
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
    def _count_answers(self, guess: torch.Tensor, truth: torch.Tensor) -> None:
        """Add the cross-entropy of the answers and the number of right yes/no answers to the means of the log.

        The loss will not do: it is multiplied by the number of processes, and label smoothing changes it.

        Args:
            guess: logits [R,L,V] of the tokens `truth` [R,L], which are negative where none is learned.
        """
        entropy = nn.functional.cross_entropy(guess.flatten(0, 1).float(), truth.flatten(), reduction="sum")
        self._add("answer_loss", entropy, (truth >= 0).sum())
        text = self.model.config.get_text_config()
        log_odds = guess[..., text.yes_token_id] - guess[..., text.no_token_id]
        is_yes, is_no = truth == text.yes_token_id, truth == text.no_token_id
        right = (is_yes & (log_odds > 0)) | (is_no & (log_odds <= 0))
        self._add("yes_no_accuracy", right.sum(), (is_yes | is_no).sum())

    def _add(self, name: str, value: torch.Tensor, count: torch.Tensor | int = 1) -> None:
        """Add to a mean of the log. Values stay tensors until then: reading one would wait for the GPU."""
        total, number = self.sums.get(name, (0.0, 0))
        self.sums[name] = (total + value.detach(), number + count)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log training steps with the means since the last log, and `perplexity`, exp of the answer loss."""
        if "loss" in logs:
            means = {name: float(total) / max(1, int(count)) for name, (total, count) in self.sums.items()}
            self.sums = {}
            if "answer_loss" in means:
                means["perplexity"] = math.exp(min(means["answer_loss"], 50.0))
            logs = logs | {name: round(mean, 4) for name, mean in means.items()}
        super().log(logs, *args, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The `quick_metrics` of the evaluation rows, with the prefix `eval_`. Before training, answers are kept.

        Raises:
            ValueError: the metric that selects the best checkpoint is not among them.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        was_training = self.model.training
        answers = self.answers(self.model, rows)
        if self.state.global_step == 0 and self.is_world_process_zero():
            with atomic_write(Path(self.args.output_dir) / BEFORE_FILE) as temporary:
                answers.to_parquet(temporary)
        with self.accelerator.autocast():
            batch_size = self.args.per_device_eval_batch_size
            figures = quick_metrics(self.model, self.processing_class, rows, batch_size, answers)
        self.model.train(was_training)
        if not figures:
            raise ValueError("no evaluation image has a question: pass others with --eval_dataset")
        best = (self.args.metric_for_best_model or "").removeprefix("eval_")
        if best and best not in figures:
            raise ValueError(
                f"the metric {best}, which selects the best checkpoint, is not available for the evaluation images "
                f"({len(rows)}). Balanced accuracy needs questions that are answered yes for some images and no for "
                "others: pass more images with --eval_dataset and --max_eval_images, or select the best checkpoint by "
                f"another --metric_for_best_model: {', '.join(figures)}"
            )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def answers(self, model: Any, rows: Any, **options: Any) -> pd.DataFrame:
        """Table of `predict` in the precision of the training. The model is in evaluation mode from then on."""
        with self.accelerator.autocast():
            return predict(model.eval(), self.processing_class, rows, self.args.per_device_eval_batch_size, **options)


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

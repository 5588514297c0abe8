"""The library's Trainer with auxiliary losses, our evaluation metrics and freezing of the vision tower.

batch from `SupervisedCollator` → answer loss + presence, grounding, intermediate and consistency losses
evaluation → `quick_metrics`, the same metrics as in `scripts/evaluate.py`
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from transformers import TrainerCallback

from .watched import WatchedTrainer
from .word_counts import WordCounts


def perplexity(loss: float) -> float:
    """Perplexity exp(loss): the number of equally likely words that would be as uncertain."""
    return math.exp(min(loss, 50.0))


def unwrap(model: Any) -> Any:
    """The full model inside a peft model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def freeze_blocks(tower: Any, blocks: int) -> None:
    """Freeze the stem and the first `blocks` convolution blocks of a tower; if these are all, all convolutions.

    Raises:
        ValueError: the tower has no convolutions, or `blocks` is negative.
    """
    if blocks < 0:
        raise ValueError(f"--freeze_blocks must be at least 0, got {blocks}")
    if not hasattr(tower, "convolutions"):
        raise ValueError(
            f"--freeze_blocks needs a vision tower with convolutions; this {type(tower).__name__} has none"
        )
    convolutions = tower.convolutions
    if blocks >= len(convolutions.blocks):
        convolutions.requires_grad_(False)
    for module in (convolutions.stem, *convolutions.blocks[:blocks]):
        module.requires_grad_(False)


class TrafficTrainer(WatchedTrainer):
    """`Trainer` for batches of packed questions from `SupervisedCollator`.

    Args:
        loss_weights: weights of the auxiliary losses by name, of `options.LOSSES`; a loss with weight 0 or without a
            weight is not computed. "presence" and "distillation" need a model with a training head.
        evaluator: computes metrics {name: value} from a model and the evaluation rows.
        word_counts: sums up the counts of the words of the questions.

    Raises:
        FloatingPointError: during training, if a loss or a gradient is NaN or infinite. It is found at the next log or
            checkpoint, which is not written: to look at each step, the CPU would wait for the GPU.
    """

    def __init__(
        self,
        *args: Any,
        loss_weights: Mapping[str, float] | None = None,
        evaluator: Callable[[Any, Any], dict[str, float]] | None = None,
        word_counts: WordCounts | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.loss_weights = {name: weight for name, weight in (loss_weights or {}).items() if weight}
        self.auxiliary: Any = None
        if self.loss_weights:  # a training without them loads none of their code
            from .auxiliary.objective import Objective

            self.auxiliary = Objective(self.loss_weights)
        self.evaluator, self.word_counts = evaluator, word_counts
        self.answer_losses: tuple[Any, Any] = (0.0, 0)  # sum and count since the last evaluation

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        full = unwrap(self.accelerator.unwrap_model(model))
        targets, counts = inputs.pop("targets", None), inputs.pop("word_counts", None)
        if self.word_counts is not None and counts is not None:
            self.word_counts.counts += counts
        inputs["pixel_values"] = self._normalized(inputs["pixel_values"])
        inputs["use_cache"], labels = False, inputs["labels"]  # label smoothing removes the labels
        with nullcontext() if self.auxiliary is None else self.auxiliary.recording(full) as recorded:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        number = (labels[:, 1:] >= 0).sum()
        self._count_answers(
            outputs, loss, labels, number, number if num_items_in_batch is None else num_items_in_batch
        )
        # Without num_items_in_batch the library itself divides by the number of accumulated passes.
        fraction = 1.0 if num_items_in_batch is None else 1.0 / self.current_gradient_accumulation_steps
        with self.accelerator.autocast():
            has_extra = self.auxiliary is not None and targets is not None
            extra = self.auxiliary(full, recorded, outputs.logits, targets) if has_extra else {}
            for name, value in extra.items():
                self._add(f"{name}_loss", value)
                loss = loss + self.loss_weights[name] * fraction * value
        self.broken.look("loss", loss)
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
        """Metrics of `evaluator` on the evaluation rows, with the prefix `eval_`.

        Beside the `answer_loss` of these rows stand `train_answer_loss` and `train_words`, of the training steps since
        the last evaluation, and `uniform_loss`, ln V, of a model that gives all V words the same probability.
        """
        if self.evaluator is None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        was_training = self.model.training
        self.model.eval()
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            figures = self.evaluator(self.model, rows)
        self.model.train(was_training)
        best = (self.args.metric_for_best_model or "").removeprefix("eval_")
        if best and best not in figures:
            other = f", or select the best checkpoint by --metric_for_best_model {' or '.join(figures)}"
            raise ValueError(
                f"the metric {best}, which selects the best checkpoint, is not available for these {len(rows)} "
                "evaluation images. Balanced accuracy needs questions that are answered yes for some images and no "
                f"for others: pass more images with --eval_dataset and --max_eval_images{other if figures else ''}"
            )
        if "answer_loss" in figures:
            figures |= self._losses_to_compare()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _losses_to_compare(self) -> dict[str, float]:
        """What the held-out loss is compared with: the training loss since the last evaluation, and ln V."""
        (total, count), self.answer_losses = self.answer_losses, (0.0, 0)
        found = {"uniform_loss": math.log(self.model.config.get_text_config().vocab_size)}
        if int(count):  # no training step before the first evaluation
            loss = float(total) / int(count)
            found |= {"train_answer_loss": loss, "train_words": perplexity(loss)}
        return found


def epoch_of(state: Any) -> int:
    """The index of the current epoch, also within an epoch of a resumed run."""
    return int((state.epoch or 0) + 1e-6)  # rounding may make 2.0 slightly smaller


class StartEpoch(TrainerCallback):
    """Set the epoch of dataset and collator, so that a resumed run draws the same images as an uninterrupted one.

    The library sets the epoch of a dataset, but not with several processes.
    """

    def __init__(self, mixture: Any, collator: Any):
        self.mixture, self.collator = mixture, collator

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mixture.set_epoch(epoch_of(state))
        self.collator.start_epoch(epoch_of(state))


class FreezeTower(TrainerCallback):
    """Freeze the vision tower for the first `epochs` epochs, and its first `blocks` convolution blocks throughout."""

    def __init__(self, epochs: float, blocks: int | None = None):
        self.epochs, self.blocks = epochs, blocks

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        tower = unwrap(model).model.vision_tower
        tower.requires_grad_(epoch_of(state) >= self.epochs)
        if self.blocks is not None:
            freeze_blocks(tower, self.blocks)

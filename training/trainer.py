"""The library's Trainer with what our training adds: losses beside the answers, our figures, a frozen tower.

batch from `SupervisedCollator` → loss of the answers + cell, attention, value and wording losses
evaluation → `quick_metrics`, the same figures as `scripts/evaluate.py`
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from .annotated import AnnotatedTokens, mix, share_of_annotations
from .auxiliary import (
    CELL_HEAD,
    attention_loss,
    cell_loss,
    image_loss,
    image_targets,
    recording,
    value_loss,
    wording_loss,
)


ADVICE = (
    "training stops before the weights are spoilt, and checkpoints stay as they are. A smaller --learning_rate or "
    "--max_grad_norm, or --bf16 false, may help"
)


def unwrap(model: Any) -> Any:
    """The full model inside peft's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def keep_statistics(tower: Any) -> None:
    """What is frozen drops nothing, and what is frozen in part only keeps its statistics, too: they go to eval."""
    if not any(parameter.requires_grad for parameter in tower.parameters()):
        tower.eval()
    for part in tower.children():
        if part.training and not all(parameter.requires_grad for parameter in part.parameters()):
            part.eval()


def freeze_blocks(tower: Any, blocks: int) -> None:
    """Keep the stem and the first `blocks` blocks of a tower's convolutions, and with the last of them what follows.

    Raises:
        ValueError: the tower has no convolutions, or a negative number.
    """
    if blocks < 0:
        raise ValueError(f"--freeze_blocks must be at least 0, got {blocks}")
    if not hasattr(tower, "convolutions"):
        raise ValueError(f"--freeze_blocks is for our own vision tower, not for a {type(tower).__name__}")
    convolutions = tower.convolutions
    if blocks >= len(convolutions.blocks):
        convolutions.requires_grad_(False)
    for part in (convolutions.stem, *convolutions.blocks[:blocks]):
        part.requires_grad_(False)


class TrafficTrainer(Trainer):
    """`Trainer` for batches of packed questions.

    Args:
        cell_weight, attention_weight, value_weight, wording_weight: of the losses beside that of the answers; 0 leaves
            one out.
        annotated, annotated_steps: image tokens as the annotations tell them, which the decoder reads in place of the
            tower's until the first step, and less and less until the second.
        evaluator: gives the figures of a model on the evaluation rows, as floats by name.

    Raises:
        FloatingPointError: while training, when the loss is NaN or infinite. The last checkpoint is from before.
    """

    def __init__(
        self,
        *args: Any,
        cell_weight: float = 0.0,
        attention_weight: float = 0.0,
        value_weight: float = 0.0,
        wording_weight: float = 0.0,
        annotated: AnnotatedTokens | None = None,
        annotated_steps: Sequence[int] = (0, 0),
        evaluator: Callable[[Any, Any], dict[str, float]] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.cell_weight, self.attention_weight = cell_weight, attention_weight
        self.value_weight, self.wording_weight = value_weight, wording_weight
        self.evaluator = evaluator
        self.annotated, self.annotated_steps = annotated, annotated_steps
        self.sums: dict[str, tuple[Any, Any]] = {}  # since the last log: sum and number

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        full = unwrap(self.accelerator.unwrap_model(model))
        keep_statistics(full.model.vision_tower)
        cells, look_at = inputs.pop("cell_targets", None), inputs.pop("attention_targets", None)
        values, pairs = inputs.pop("value_targets", None), inputs.pop("wording_pairs", None)
        words = None
        if self.attention_weight and look_at is not None:
            words = look_at.any(-1).nonzero(as_tuple=True)
        replace, share_told = None, share_of_annotations(self.state.global_step, self.annotated_steps)
        if self.annotated is not None and cells is not None and share_told:
            told = self.annotated(cells)
            replace = lambda tokens: mix(tokens, told, share_told)  # noqa: E731
        inputs["use_cache"] = False
        with recording(full, replace) as recorded:
            if "labels" in inputs:
                loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
                self._count_answers(outputs.logits, inputs["labels"])
            else:  # no questions: the tower alone learns
                outputs, loss = model(**inputs), torch.zeros((), device=self.args.device)
        # The library has divided by the number of accumulated passes already where it counted their tokens.
        share = 1.0 if num_items_in_batch is None else 1.0 / self.current_gradient_accumulation_steps
        with self.accelerator.autocast():
            extra: dict[str, tuple[float, torch.Tensor]] = {}  # weight and loss
            if self.cell_weight and cells is not None:
                head = getattr(full, CELL_HEAD)
                logits = head(recorded.tokens[:, -cells.shape[1] :])  # without a class token, where a tower has one
                extra["cell_loss"] = self.cell_weight, cell_loss(logits, cells)
                there = image_loss(head.image_logits(logits), image_targets(cells))
                extra["image_loss"] = self.cell_weight, there
            if words is not None:
                look = attention_loss(recorded.mean_map(words)[:, -look_at.shape[-1] :], look_at[words])
                extra["attention_loss"] = self.attention_weight, look
            if self.value_weight and values is not None:
                seen = value_loss(full, recorded.halfway[values > 0], values[values > 0])
                extra["value_loss"] = self.value_weight, seen
            if self.wording_weight and pairs is not None:
                apart = wording_loss(self._log_odds(outputs.logits[pairs > 0]), pairs[pairs > 0])
                extra["wording_loss"] = self.wording_weight, apart
            for name, (weight, value) in extra.items():
                self._add(name, value)
                loss = loss + weight * share * value
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss is {loss.item()} at step {self.state.global_step + 1}: {ADVICE}")
        return (loss, outputs) if return_outputs else loss

    def _log_odds(self, logits: torch.Tensor) -> torch.Tensor:
        """Of yes against no [N], from logits [N,V]."""
        text = self.model.config.get_text_config()
        return logits[:, text.yes_token_id] - logits[:, text.no_token_id]

    @torch.no_grad()
    def _count_answers(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Cross-entropy of the answers, and how many of yes and no are right."""
        text = self.model.config.get_text_config()
        truth, guess = labels[:, 1:], logits[:, :-1]
        learned = truth >= 0
        entropy = torch.nn.functional.cross_entropy(guess[learned].float(), truth[learned], reduction="sum")
        self._add("answer_loss", entropy, learned.sum())
        decided = (truth == text.yes_token_id) | (truth == text.no_token_id)
        right = (self._log_odds(guess[decided]) > 0) == (truth[decided] == text.yes_token_id)
        self._add("yes_no_accuracy", right.sum(), decided.sum())

    def _add(self, name: str, value: torch.Tensor, count: torch.Tensor | int = 1) -> None:
        """Kept as tensors until the next log: reading a number makes a GPU wait."""
        total, number = self.sums.get(name, (0.0, 0))
        self.sums[name] = (total + value.detach(), number + count)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds our figures to those of the library; `words` is exp(loss), the words that it is choosing between."""
        if "loss" in logs:
            means = {name: float(total) / max(1, int(count)) for name, (total, count) in self.sums.items()}
            logs = logs | {name: round(mean, 4) for name, mean in means.items()}
            if "answer_loss" in logs:
                logs["words"] = round(math.exp(min(logs["answer_loss"], 50.0)), 3)  # of 500
            self.sums = {}
        super().log(logs, *args, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The figures of `evaluator` on the evaluation rows, named `eval_...`."""
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
            other = f", or choose another figure by --metric_for_best_model: {', '.join(figures)}" if figures else ""
            raise ValueError(
                f"{len(rows)} evaluation images give no {best}, by which the best checkpoint is chosen: where nothing "
                "is a yes here and a no there, nothing is balanced. Give others or more by --eval_dataset and "
                f"--max_eval_images{other}"
            )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def epoch_of(state: Any) -> int:
    """The number of the epoch that begins, or goes on where a run was stopped inside it."""
    return int((state.epoch or 0) + 1e-6)  # 2.0 may be a little less


class StartEpoch(TrainerCallback):
    """Tell the dataset and the collator which epoch begins, so that a run that was stopped draws what it would have.

    The library tells a dataset by itself, but on several processes it does not.
    """

    def __init__(self, mixture: Any, collator: Any):
        self.mixture, self.collator = mixture, collator

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mixture.set_epoch(epoch_of(state))
        self.collator.start_epoch(epoch_of(state))


class RefuseBrokenGradients(TrainerCallback):
    """Stop before a step that would make weights NaN, as a checkpoint of them could never be trained on.

    Raises:
        FloatingPointError: a gradient is NaN or infinite. Not in float16, whose scaler skips such steps.
    """

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if args.fp16:
            return
        norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient is {norm.item()} at step {state.global_step + 1}: {ADVICE}")


class FreezeTower(TrainerCallback):
    """Keep the vision tower as it is for the first `epochs` epochs, and some blocks of convolutions for good."""

    def __init__(self, epochs: float, blocks: int | None = None):
        self.epochs, self.blocks = epochs, blocks

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        tower = unwrap(model).model.vision_tower
        tower.requires_grad_(epoch_of(state) >= self.epochs)
        if self.blocks is not None:
            freeze_blocks(tower, self.blocks)

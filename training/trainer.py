"""The library's Trainer with a stop at NaN and averaged weights; for questions, with auxiliary losses and our metrics.

batch of `TrafficCollator` → answer loss + auxiliary losses
evaluation → `quick_metrics`, the same metrics as in `scripts/evaluate.py`
"""

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback

from ..common.files import DataError, atomic_write, atomic_write_text
from ..evaluation.predict import predict
from ..evaluation.report import quick_metrics


AVERAGE_FILE = "average.safetensors"  # in each checkpoint
BEFORE_FILE = ".answers_before.parquet"  # beside the checkpoints: the answers before training
ADVICE = "training stops, and no checkpoint is affected. A smaller --learning_rate may help"


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; the library writes `trainer_state.json` last."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(complete, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def check_options(folder: Path, options: Mapping[str, Any]) -> None:
    """Record the options of a run in its folder, or raise a DataError if its checkpoints have others."""
    path, text = folder / ".options.json", json.dumps(options, indent=1, default=str)
    if last_checkpoint(folder) is not None and path.is_file() and path.read_text(encoding="utf-8") != text:
        raise DataError(f"{folder} has checkpoints of a run with other options ({path}): choose another --output_dir")
    atomic_write_text(path, text)


class AverageWeights(TrainerCallback):
    """Averaged weights (EMA): `decay` × average + (1 - `decay`) × weights after each step; faster in the first steps.

    The trainable weights of the model are averaged, and the running statistics of batch normalization, as those of the
    last step belong to the last weights. A decay of 0 averages nothing.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.weights = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
        self.weights |= {name: buffer for name, buffer in model.named_buffers() if "running_" in name}
        self.values: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue the average of the checkpoint that training resumes from."""
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / AVERAGE_FILE
        if path.is_file():
            self.values = load_file(path, str(next(iter(self.weights.values())).device))

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.decay:
            self.values = self.values or {name: weight.clone() for name, weight in self.weights.items()}
            decay = min(self.decay, state.global_step / (state.global_step + 10))
            torch._foreach_lerp_([self.values[name] for name in self.weights], [*self.weights.values()], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the model and their averages, if there are any."""
        for name, value in self.values.items():
            last = self.weights[name].clone()
            self.weights[name].copy_(value)
            value.copy_(last)


class AveragingTrainer(Trainer):
    """A `Trainer` that stops at NaN, can average weights, and evaluates on rows of a dataset by `figures`.

    It looks for NaN in losses that are logged and weights that are saved: at each step, the CPU would wait for the
    GPU. The error is a FloatingPointError, and the checkpoint is not written.
    """

    def __init__(self, *args: Any, average_decay: float = 0.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.average = AverageWeights(self.model, average_decay)
        self.add_callback(self.average)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of matrices and kernels: biases and the weights of norms do not decay."""
        return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """A sampler that keeps the order of rows, as `Mixture` and `Drawing` draw them at random."""
        return SequentialSampler(self.train_dataset)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            raise FloatingPointError(f"the loss is NaN or infinite at step {self.state.global_step}: {ADVICE}")
        super().log(logs, *args, **kwargs)

    def check_weights(self) -> None:
        """Raise FloatingPointError if a weight is NaN or infinite, as after a gradient of NaN."""
        if not all(bool(weight.isfinite().all()) for weight in self.model.parameters()):
            raise FloatingPointError(f"weights are NaN or infinite at step {self.state.global_step}: {ADVICE}")

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.check_weights()
        if self.average.values and self.is_world_process_zero():  # first: the library's last file makes it complete
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            with atomic_write(folder / AVERAGE_FILE) as temporary:
                save_file(self.average.values, temporary)
        super()._save_checkpoint(*args, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The `figures` of the evaluation rows, with the prefix `eval_`: of the averaged weights, if there are any.

        A ValueError if the metric that selects the best checkpoint is not among them.
        """
        self.check_weights()
        self.average.swap()
        with self.accelerator.autocast():
            figures = self.figures(self.eval_dataset if eval_dataset is None else eval_dataset)
        self.average.swap()
        best = (self.args.metric_for_best_model or "").removeprefix("eval_")
        if best and best not in figures:
            known = ", ".join(figures) or "none, as they have no question"
            raise ValueError(f"--metric_for_best_model {best} is not known of the evaluation images: {known}")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def figures(self, rows: Any) -> dict[str, float]:
        """Metrics by name."""
        found: dict[str, float] = self.model.figures(rows)
        return found


class TrafficTrainer(AveragingTrainer):
    """Trains a full model of `prepare_model` on questions, with auxiliary losses of these weights, by name."""

    def __init__(self, *args: Any, loss_weights: Mapping[str, float], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.loss_weights = loss_weights
        self.sums: dict[str, tuple[Any, Any]] = {}  # {name: (sum, count)} since the last log
        self.recording: Any = nullcontext
        self.losses: Mapping[str, Any] = {}
        if loss_weights:  # a training without them loads none of their code
            from .auxiliary.losses import LOSSES, recording

            self.recording, self.losses = recording, LOSSES

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the answers plus the weighted auxiliary losses. Each is also added to the means of the log."""
        targets, labels = inputs.pop("targets"), inputs["labels"]  # label smoothing removes the labels
        head: Any = self.model.training_head
        head["words"](inputs["input_ids"], labels, inputs["segment_ids"])
        # Pixels in 0..255 are normalized as by the processor.
        options, pixels = self.processing_class.image_processor, inputs["pixel_values"]
        values = torch.tensor([options.image_mean, options.image_std]).to(pixels.device, non_blocking=True)
        mean, std = values[..., None, None]  # [3,1,1]
        inputs["pixel_values"], inputs["use_cache"] = (pixels * options.rescale_factor - mean) / std, False
        with self.recording(self.accelerator.unwrap_model(model)) as passed:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.loss_weights:
            passed.logits = outputs.logits
        # The loss itself will not do for the log: it is multiplied by the number of processes, and smoothed.
        guess, truth = outputs.logits.detach()[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        self._add("answer_loss", nn.functional.cross_entropy(guess, truth, reduction="sum"), (truth >= 0).sum())
        # Without num_items_in_batch the library itself divides by the number of accumulated passes.
        fraction = 1.0 if num_items_in_batch is None else 1.0 / self.current_gradient_accumulation_steps
        for name, tensors in targets.items():
            with self.accelerator.autocast():
                value = self.losses[name](passed, **tensors)
            self._add(f"{name}_loss", value)
            loss = loss + self.loss_weights[name] * fraction * value
        return (loss, outputs) if return_outputs else loss

    def _add(self, name: str, value: torch.Tensor, count: torch.Tensor | int = 1) -> None:
        """Add to a mean of the log. Values stay tensors until then: reading one would wait for the GPU."""
        total, number = self.sums.get(name, (0.0, 0))
        self.sums[name] = (total + value.detach(), number + count)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log training steps with the means since the last log, and `perplexity`, exp of the answer loss."""
        if "loss" in logs:
            means = {name: float(total) / max(1, int(count)) for name, (total, count) in self.sums.items()}
            self.sums = {}
            means["perplexity"] = math.exp(min(means["answer_loss"], 50.0))
            logs = logs | {name: round(mean, 4) for name, mean in means.items()}
        super().log(logs, *args, **kwargs)

    def figures(self, rows: Any) -> dict[str, float]:
        """The `quick_metrics` of rows. Before training, the answers are kept."""
        answers = self.answers(rows)
        if self.state.global_step == 0 and self.is_world_process_zero():
            with atomic_write(Path(self.args.output_dir) / BEFORE_FILE) as temporary:
                answers.to_parquet(temporary)
        return quick_metrics(self.model, self.processing_class, rows, self.args.per_device_eval_batch_size, answers)

    def answers(self, rows: Any) -> pd.DataFrame:
        """Table of `predict` in the precision of the training. The model is in evaluation mode from then on."""
        with self.accelerator.autocast():
            return predict(self.model.eval(), self.processing_class, rows, self.args.per_device_eval_batch_size)


class StartEpoch(TrainerCallback):
    """Set the epoch of dataset and collator, which the library does not do with several processes."""

    def __init__(self, mixture: Any, collator: Any):
        self.mixture, self.collator = mixture, collator

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch = int((state.epoch or 0) + 1e-6)  # rounding may make 2.0 slightly smaller
        self.mixture.set_epoch(epoch)
        self.collator.start_epoch(epoch)

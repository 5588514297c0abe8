"""The library's Trainer with auxiliary losses, averaged weights, a stop at NaN, and our metrics.

batch of `TrafficCollator` → loss of the answers + weighted auxiliary losses
rows to evaluate → table of answers → metrics, the same as in `scripts/evaluate.py`
"""

import json
import math
from collections import defaultdict
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
from ..evaluation.predict import loss_metrics, predict
from ..evaluation.report import answer_metrics
from .options import TrainOptions


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
        path = Path(args.resume_from_checkpoint or "") / AVERAGE_FILE
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


class TrafficTrainer(Trainer):
    """Trains a model of `prepare_model`: on questions, or a tower alone.

    It looks for NaN in losses that are logged and weights that are saved: at each step, the CPU would wait for the
    GPU. The error is a FloatingPointError, and the checkpoint is not written.
    """

    def __init__(self, *args: Any, options: TrainOptions, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.average = AverageWeights(self.model, options.average_decay)
        self.add_callback(self.average)
        self.loss_weights, self.is_tower = options.loss_weights(), not options.questions_per_image
        # {name: (sum, count) of each pass since the last log}: tensors, as reading one would wait for the GPU.
        self.seen: defaultdict[str, list[tuple[torch.Tensor, Any]]] = defaultdict(list)
        self.auxiliary: Any = None
        if self.loss_weights:  # a training without auxiliary losses loads none of their code
            from .auxiliary import losses

            self.auxiliary = losses

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of matrices and kernels: biases and the weights of norms do not decay."""
        return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """A sampler that keeps the order of indices, as a `Drawing` draws rows at random."""
        return SequentialSampler(self.train_dataset)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the answers, 0 for a tower, plus the weighted auxiliary losses. The log has the mean of each."""
        targets, pixels = inputs.pop("targets"), inputs["pixel_values"]
        # Pixels in 0..255 are normalized as by the processor.
        options = self.processing_class.image_processor
        values = torch.tensor([options.image_mean, options.image_std]).to(pixels.device, non_blocking=True)
        mean, std = values[..., None, None]  # [3,1,1]
        inputs["pixel_values"] = (pixels * options.rescale_factor - mean) / std
        loss: Any = 0.0
        if self.is_tower:
            passed = self.auxiliary.ForwardPass(self.accelerator.unwrap_model(model), model(**inputs))
        else:
            loss, passed = self.answer_loss(model, inputs, num_items_in_batch)
        # Without num_items_in_batch the library itself divides by the number of accumulated passes.
        fraction = 1.0 if num_items_in_batch is None else 1.0 / self.current_gradient_accumulation_steps
        for name, tensors in targets.items():
            with self.accelerator.autocast():
                value = self.auxiliary.LOSSES[name](passed, **tensors)
            self.seen[f"{name}_loss"].append((value.detach(), 1))
            loss = loss + self.loss_weights[name] * fraction * value
        if self.args.world_size > 1:  # processes wait for all gradients; small images do not pass the pooling layer
            loss = loss + 0 * sum(weight.sum() for weight in model.parameters() if weight.requires_grad)
        return loss

    def answer_loss(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple[torch.Tensor, Any]:
        """(loss of the answers, its `ForwardPass`); without auxiliary losses, nothing is recorded."""
        labels = inputs["labels"]  # label smoothing removes them
        unwrapped = self.accelerator.unwrap_model(model)
        unwrapped.training_head["words"](inputs["input_ids"], labels, inputs["segment_ids"])
        with self.auxiliary.recording(unwrapped) if self.auxiliary else nullcontext() as passed:
            loss, outputs = super().compute_loss(model, inputs | {"use_cache": False}, True, num_items_in_batch)
        if passed:
            passed.logits = outputs.logits
        # The loss itself will not do for the log: it is multiplied by the number of processes, and smoothed.
        guess, truth = outputs.logits.detach()[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(guess, truth, reduction="sum")
        self.seen["answer_loss"].append((total, (truth >= 0).sum()))
        return loss, passed

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log training steps with the means since the last log, and `perplexity`, exp of the answer loss."""
        if "loss" in logs:
            if not math.isfinite(logs["loss"]):
                raise FloatingPointError(f"the loss is NaN or infinite at step {self.state.global_step}: {ADVICE}")
            pairs = {name: map(sum, zip(*found)) for name, found in self.seen.items()}
            means = {name: float(total) / max(1, int(count)) for name, (total, count) in pairs.items()}
            self.seen.clear()
            if "answer_loss" in means:
                means["perplexity"] = math.exp(min(means["answer_loss"], 50.0))
            logs = logs | {name: round(mean, 4) for name, mean in means.items()}
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
        """Metrics of the evaluation rows, by the averaged weights if there are any. The first answers are kept.

        A ValueError if the metric that selects the best checkpoint is not among them: before training, not after it.
        """
        self.average.swap()
        answers = self.answers()
        if self.state.global_step == 0 and self.is_world_process_zero():
            with atomic_write(Path(self.args.output_dir) / BEFORE_FILE) as temporary:
                answers.to_parquet(temporary)
        known = answer_metrics(answers)
        if not self.is_tower:
            parts = self.model, self.processing_class, self.eval_dataset, self.args.per_device_eval_batch_size
            with self.accelerator.autocast():
                known |= loss_metrics(*parts)
        self.average.swap()
        best = (self.args.metric_for_best_model or "").removeprefix("eval_")
        if best and best not in known:
            advice = f"choose one of {', '.join(known)}, or label more images"
            raise ValueError(f"--metric_for_best_model {best} is not known of the evaluation images: {advice}")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in known.items()}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def answers(self) -> pd.DataFrame:
        """Table of answers about the evaluation rows. The model is in evaluation mode from then on."""
        parts = self.model.eval(), self.processing_class, self.eval_dataset
        with self.accelerator.autocast():  # in the precision of the training
            if not self.is_tower:
                return predict(*parts, self.args.per_device_eval_batch_size)
            from .auxiliary.tower import answer_presence

            return answer_presence(*parts)

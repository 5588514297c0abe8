"""Checkpoints of both trainings: the last complete one, averaged weights in each, and none with NaN."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

from ..common.files import atomic_write, claim


AVERAGE_FILE = "average.safetensors"  # in each checkpoint
NOT_THE_MODEL = {  # pattern of names → what it stands for
    "checkpoint-*": "checkpoint-* (weights and optimizer states, to resume this training)",
    "runs": "runs (logs)",
}
ADVICE = "training stops, and no checkpoint is affected. A smaller --learning_rate may help"


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; the library writes `trainer_state.json` last."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if _is_json(path)]
    return max(complete, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def files_to_delete(folder: Path) -> str:
    """A sentence on the files of a finished training that are not part of the model, with their size."""
    found = [pattern for pattern in NOT_THE_MODEL if any(folder.glob(pattern))]
    paths = [path for pattern in found for path in folder.glob(f"{pattern}/**/*")]
    size = sum(path.stat().st_size for path in paths if path.is_file()) / 1e6
    names = " and ".join(NOT_THE_MODEL[pattern] for pattern in found) or "none"
    return f"Files that are not part of the model, and can be deleted ({size:.1f} MB): {names}."


def claim_run(folder: Path, options: dict[str, Any]) -> None:
    """Note the options of a run in its folder, beside its checkpoints.

    Raises:
        DataError: the folder has checkpoints of a run with other options.
    """
    if last_checkpoint(folder) is None:
        (folder / ".options.json").unlink(missing_ok=True)  # of a run that ended before its first checkpoint
    claim(folder, options)


class AverageWeights(TrainerCallback):
    """Averaged weights (EMA): `decay` × average + (1 - `decay`) × weights after each step.

    The running statistics of batch normalization are averaged, too: those of the last step belong to the last weights.

    Args:
        model: its trainable weights are averaged. At the start, when there are few steps, the average follows faster.
    """

    def __init__(self, model: Any, decay: float):
        self.model, self.decay = model, decay
        self.values: dict[str, torch.Tensor] = {}

    def _weights(self) -> dict[str, torch.Tensor]:
        found = {name: weight.detach() for name, weight in self.model.named_parameters() if weight.requires_grad}
        return found | {name: buffer for name, buffer in self.model.named_buffers() if "running_" in name}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue the average of the checkpoint that training resumes from."""
        path = self._path(args, state)
        if path.is_file():
            self.values = load_file(path, str(next(self.model.parameters()).device))
        elif state.global_step:  # a checkpoint of another folder
            print(f"{path} does not exist: the average starts again from this checkpoint")

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = self._weights()
        self.values = self.values or {name: weight.clone() for name, weight in weights.items()}
        decay = min(self.decay, state.global_step / (state.global_step + 10))
        torch._foreach_lerp_([self.values[name] for name in weights], list(weights.values()), 1 - decay)

    def save(self, args: Any, state: Any) -> None:
        """Write the averages into the checkpoint of the current step."""
        with atomic_write(self._path(args, state)) as temporary:
            save_file(self.values, temporary)

    @staticmethod
    def _path(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / AVERAGE_FILE

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the model and their averages."""
        weights = self._weights()
        for name, value in self.values.items():
            last = weights[name].clone()
            weights[name].copy_(value)
            value.copy_(last)


class CheckedTrainer(Trainer):
    """The library's `Trainer`, which stops at NaN, and averages weights if `average_decay` is not 0.

    To look for NaN at each step, the CPU would wait for the GPU.

    Attributes:
        average: the averaged weights, which are in each checkpoint, too.

    Raises:
        FloatingPointError: in training, if the loss of a log, or a weight of a checkpoint, is NaN or infinite; the
            checkpoint is not written.
    """

    def __init__(self, model: Any, *args: Any, average_decay: float = 0.0, **kwargs: Any):
        super().__init__(model, *args, **kwargs)
        self.average = AverageWeights(model, average_decay)
        if average_decay:
            self.add_callback(self.average)

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
        if self.average.values and self.is_world_process_zero():
            # First: older checkpoints are deleted as soon as the library has written its own files.
            self.average.save(self.args, self.state)
        super()._save_checkpoint(*args, **kwargs)

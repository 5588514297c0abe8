"""The library's Trainer with means of further values in its log; it stops at NaN without waiting for the GPU."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from ..files import FILE_MODE


ADVICE = (
    "training stops, and no checkpoint is affected. A smaller --learning_rate or --max_grad_norm, or --bf16 false, "
    "may help"
)


class WatchedTrainer(Trainer):
    """`Trainer` whose subclasses add values to the log by `_add`.

    Raises:
        FloatingPointError: in training, if the loss of a log, or a weight of a checkpoint, is NaN or infinite; the
            checkpoint is not written. To look at each step, the CPU would wait for the GPU.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sums: dict[str, tuple[Any, Any]] = {}  # {name: (sum, count)} since the last log

    def _add(self, name: str, value: torch.Tensor, count: torch.Tensor | int = 1) -> None:
        """Add to a mean in the log. Values stay tensors until then: reading one would wait for the GPU."""
        total, number = self.sums.get(name, (0.0, 0))
        self.sums[name] = (total + value.detach(), number + count)

    def means(self, logs: dict[str, float]) -> dict[str, float]:
        """The library's log with the step and the means since the last log."""
        logs = logs | {"step": self.state.global_step, "max_steps": self.state.max_steps}
        means = {name: float(total) / max(1, int(count)) for name, (total, count) in self.sums.items()}
        self.sums = {}
        return logs | {name: round(mean, 4) for name, mean in means.items()}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            if not math.isfinite(logs["loss"]):
                raise FloatingPointError(f"the loss is NaN or infinite at step {self.state.global_step}: {ADVICE}")
            logs = self.means(logs)
        super().log(logs, *args, **kwargs)

    def check_weights(self) -> None:
        """Raise FloatingPointError if a weight is NaN or infinite, as after a gradient of NaN."""
        if not all(bool(weight.isfinite().all()) for weight in self.model.parameters()):
            raise FloatingPointError(f"weights are NaN or infinite at step {self.state.global_step}: {ADVICE}")

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.check_weights()
        super()._save_checkpoint(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        for path in Path(output_dir or self.args.output_dir).glob("*.safetensors"):
            path.chmod(FILE_MODE)

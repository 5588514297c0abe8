"""The library's Trainer with means of further values in its log; it stops at NaN without waiting for the GPU."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from ..files import FILE_MODE


ADVICE = (
    "training stops, and no checkpoint is affected. A smaller --learning_rate or --max_grad_norm, or --bf16 false, "
    "may help"
)


class Broken(TrainerCallback):
    """What was NaN or infinite since the last look: a loss, or a gradient before a step.

    In float16 gradients may be: the gradient scaler skips such steps.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}  # {name: bool tensor}; it stays on its device until `refuse`

    @torch.no_grad()
    def look(self, name: str, value: torch.Tensor) -> None:
        self.found[name] = ~value.isfinite() | self.found.get(name, False)

    def refuse(self, step: int) -> None:
        """Raise FloatingPointError if something was broken."""
        for name, is_broken in self.found.items():
            if bool(is_broken):
                raise FloatingPointError(f"the {name} is NaN or infinite at step {step} or just before: {ADVICE}")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not args.fp16:
            grads = [one.grad for one in model.parameters() if one.grad is not None]
            self.look("gradient", torch.nn.utils.get_total_norm(grads))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.refuse(state.global_step)


class WatchedTrainer(Trainer):
    """`Trainer` whose subclasses add values to the log by `_add`, and let `broken` look at the loss.

    Raises:
        FloatingPointError: in training, if a loss or a gradient is NaN or infinite. No checkpoint is affected.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.broken = Broken()
        self.add_callback(self.broken)
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
            self.broken.refuse(self.state.global_step)
            logs = self.means(logs)
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.broken.refuse(self.state.global_step)
        super()._save_checkpoint(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        for path in Path(output_dir or self.args.output_dir).glob("*.safetensors"):
            path.chmod(FILE_MODE)

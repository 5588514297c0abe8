"""Averaged weights (EMA) of a training run: the last batches move them less than the weights themselves."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from ..files import atomic_write


AVERAGE_FILE = "average.safetensors"  # in each checkpoint


class AverageWeights(TrainerCallback):
    """Keeps `decay` × average + (1 - `decay`) × weights after each step, saved with each checkpoint.

    The running statistics of batch normalization are averaged, too: those of the last step belong to the last weights.
    To compute them anew from images would take a pass over hundreds of augmented images, and where the weights move
    slowly the average of their statistics is close to that.

    Args:
        model: its trainable weights are averaged. At the start, when there are few steps, the average follows faster.
    """

    def __init__(self, model: Any, decay: float):
        self.model, self.decay = model, decay
        self.values: dict[str, torch.Tensor] = {}

    def _weights(self) -> dict[str, torch.Tensor]:
        found = {name: weight.detach() for name, weight in self.model.named_parameters() if weight.requires_grad}
        return found | {name: buffer for name, buffer in self.model.named_buffers() if "running_" in name}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = self._weights()
        self.values = self.values or {name: weight.clone() for name, weight in weights.items()}
        decay = min(self.decay, state.global_step / (state.global_step + 10))
        torch._foreach_lerp_([self.values[name] for name in weights], list(weights.values()), 1 - decay)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / AVERAGE_FILE
            with atomic_write(path) as temporary:
                save_file(self.values, temporary)

    def load(self, checkpoint: Path) -> None:
        """Continue the average of a checkpoint; without its file, as after a kill while it was written, say so."""
        path = checkpoint / AVERAGE_FILE
        if path.is_file():
            self.values = load_file(path, str(next(self.model.parameters()).device))
        else:
            print(f"{path} does not exist: the average starts again from this checkpoint")

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the model and their averages."""
        weights = self._weights()
        for name, value in self.values.items():
            last = weights[name].clone()
            weights[name].copy_(value)
            value.copy_(last)

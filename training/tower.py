"""Train the vision tower alone, on presence of categories by region and patch and on facts, without a decoder.

    pixels → tower → tokens [B,P,C] ─┬→ QueryHead     → region logits [B,categories,4] ↔ region targets
                                     ├→ linear        → patch logits [B,P,categories] ↔ patch targets
                                     └→ AuxiliaryHead → fact logits [B,F]             ↔ answers to yes/no questions

One step costs little more than a forward and backward pass of the tower. Weights are averaged (EMA); the averages are
evaluated and saved.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..configuration_traffic_vlm import TrafficVLMVisionConfig
from ..data.presence import CATEGORIES, REGIONS
from ..data.targets import Targets
from ..files import atomic_write, atomic_write_text
from ..modeling_traffic_vlm import is_bfloat16_slow
from ..vision_traffic_vlm import TrafficVLMVisionModel
from .frames import FrameBatches, Frames
from .head import PATCH_WEIGHT, AuxiliaryHead, BalancedLoss, PresenceLoss, QueryHead


EMA_DECAY = 0.998
WEIGHT_DECAY = 0.05
MIXUP = 0.4  # both parameters of the beta distribution of an image's weight in a mixture
MIXUP_FRACTION = 0.6  # fraction of the run with mixed images
CATEGORIES_FILE = "categories.json"  # beside the weights
SAVED = ("model", "average", "optimizer", "losses")  # by a checkpoint, with their states


@dataclass
class TowerOptions:
    """Options for training a tower.

    Attributes:
        images: number of images of the run.
        learning_rate: of new parts; `tower_learning_rate`: of trained parts.
        constant_fraction: fraction of the run with a constant learning rate, before it falls linearly to 0.
        sizes: (side of the images in pixels, fraction of the run at which this size ends).
    """

    images: int
    batch_size: int = 32
    learning_rate: float = 1e-3
    tower_learning_rate: float = 3e-4
    constant_fraction: float = 0.3
    sizes: Sequence[tuple[int, float]] = ((192, 0.6), (256, 1.0))
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.images, self.batch_size, self.learning_rate, self.tower_learning_rate) <= 0:
            raise ValueError(f"images, batch_size and learning rates must be positive, got {self}")

    @property
    def steps(self) -> int:
        return math.ceil(self.images / self.batch_size)

    def size_of(self, step: int) -> int:
        """The side of the images of a step."""
        return next((size for size, end in self.sizes if step < end * self.steps), self.sizes[-1][0])

    def rate_of(self, step: int, warmup_images: int, power: int = 1) -> float:
        """The factor of the learning rate: warm-up, constant, then linear to 0."""
        warm = min(1.0, (step + 1) * self.batch_size / warmup_images) ** power
        left = (1 - (step + 1) / self.steps) / (1 - self.constant_fraction)
        return warm * min(1.0, max(0.0, left))


class TowerTrainer:
    """Trains a tower with its head, averages their weights, and saves checkpoints to resume from.

    Args:
        tower: the tower to train, on the device to train on; its convolutions may be trained already.
        new_parts: names of the tower's untrained parts, and "head" if that is new; they have a higher learning rate.
        sources: names of the sources in the order of the batches' source indices.
        facts: ids of the yes/no questions of the auxiliary head, which is always new.
    """

    def __init__(
        self,
        tower: TrafficVLMVisionModel,
        head: QueryHead,
        options: TowerOptions,
        new_parts: set[str],
        sources: Sequence[str],
        facts: Sequence[str],
    ):
        parts: dict[str, nn.Module] = {
            "tower": tower,
            "head": head,
            "facts": AuxiliaryHead(tower.config.hidden_size, len(facts)),
        }
        self.device = tower.device
        self.model, self.config, self.options = nn.ModuleDict(parts).to(self.device), tower.config, options
        self.losses = nn.ModuleDict(
            {"presence": PresenceLoss(len(sources)), "facts": BalancedLoss(len(sources), (len(facts),))}
        ).to(self.device)
        self.sources, self.facts = list(sources), list(facts)
        self.step, self.seconds, self.waited = 0, 0.0, 0.0
        self.average = copy.deepcopy(self.model).requires_grad_(False).eval()
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            is_new = not {"facts", *new_parts}.isdisjoint(name.split(".")[:2])
            groups.setdefault((is_new, parameter.ndim > 1), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": some, "is_new": is_new, "weight_decay": WEIGHT_DECAY if decays else 0.0}
                for (is_new, decays), some in groups.items()
            ],
            betas=(0.9, 0.98),
            fused=True,
        )

    def train_step(self, batch: dict[str, Any]) -> tuple[float, float, float]:
        """Do one step; return the losses of regions, patches and facts.

        Raises:
            FloatingPointError: a gradient is NaN or infinite. The weights are unchanged.
        """
        options = self.options
        for group in self.optimizer.param_groups:
            if group["is_new"]:
                group["lr"] = options.learning_rate * options.rate_of(self.step, 600)
            else:
                group["lr"] = options.tower_learning_rate * options.rate_of(self.step, 2000, power=2)
        self.model.train()
        losses = self._losses(batch["pixels"].to(self.device).float(), batch["targets"].to(self.device))
        (losses[0] + PATCH_WEIGHT * losses[1] + losses[2]).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient is {norm.item()} at step {self.step + 1}; the last checkpoint is not affected"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self._update_average()
        return losses[0].item(), losses[1].item(), losses[2].item()

    def _losses(self, pixels: torch.Tensor, targets: Targets) -> list[torch.Tensor]:
        """Losses of regions, patches and facts, of a batch of mixtures (mixup, https://arxiv.org/abs/1710.09412).

        In half of the steps each image is mixed with its neighbor in the batch, and so are their losses: sources with
        a few hundred images would be learned by heart. The last images of the run are not mixed.
        """
        rng = np.random.default_rng([self.options.seed, self.step])
        if self.step >= MIXUP_FRACTION * self.options.steps or rng.random() < 0.5:
            return self._losses_of(forward(self.model, pixels), targets)
        fraction = rng.beta(MIXUP, MIXUP)
        logits = forward(self.model, pixels.lerp(pixels.roll(1, 0), 1 - fraction))
        own = self._losses_of(logits, targets)
        other = self._losses_of(logits, targets.each(lambda one: one.roll(1, 0)), count=False)  # counted above
        return [fraction * a + (1 - fraction) * b for a, b in zip(own, other)]

    def _losses_of(self, logits: tuple[torch.Tensor, ...], targets: Targets, count: bool = True) -> list[torch.Tensor]:
        presence = self.losses["presence"](logits[:2], targets.region, targets.patch, targets.source, count)
        return [*presence, self.losses["facts"](logits[2], targets.facts, targets.source, count)]

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(EMA_DECAY, self.step / (self.step + 10))
        new, old = self.model.state_dict(), self.average.state_dict()
        names = [name for name, value in old.items() if value.is_floating_point()]
        torch._foreach_lerp_([old[name] for name in names], [new[name] for name in names], 1 - decay)

    def identity(self) -> dict[str, Any]:
        """Settings that must be the same in a checkpoint and in the run that resumes from it."""
        options = {
            "batch_size": self.options.batch_size,
            "seed": self.options.seed,
            "sources": self.sources,
            "facts": self.facts,
        }
        return {"categories": list(CATEGORIES), "config": vision_fields(self.config)} | options

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        state = {name: getattr(self, name).state_dict() for name in SAVED}
        state |= {"step": self.step, "seconds": self.seconds, "waited": self.waited}
        with atomic_write(path) as temporary:
            torch.save(state | {"identity": self.identity()}, temporary)

    def load(self, path: Path) -> None:
        """Resume from a checkpoint.

        Raises:
            ValueError: it cannot be read, or belongs to a run with other settings; the message names the setting.
        """
        try:
            state = torch.load(path, self.device, weights_only=True)
            saved = state["identity"]
        except Exception as error:  # torch raises exceptions of many classes on broken files
            raise ValueError(f"the checkpoint {path} cannot be read: {error}") from error
        for name, value in self.identity().items():
            if saved.get(name) != value:
                difference = f"{path} belongs to a run with another {name}: {saved.get(name)}, expected {value}"
                raise ValueError(f"{difference}; choose another --output_dir")
        for name in SAVED:
            getattr(self, name).load_state_dict(state[name])
        self.step, self.seconds, self.waited = state["step"], state["seconds"], state["waited"]

    def batches(self, frames: Frames, source_weights: dict[str, float], num_workers: int = 1) -> Any:
        """Batches from the next step on, prepared in separate processes."""
        options = self.options
        dataset = FrameBatches(frames, source_weights, options.batch_size, options.size_of, self.step, options.seed)
        return iter(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=num_workers, prefetch_factor=8))

    def run(self, batches: Any, every: Callable[["TowerTrainer", list[tuple[float, float, float]]], None]) -> None:
        """Train to the end of the options; `every` is called after each step with the losses so far."""
        losses: list[tuple[float, float, float]] = []
        while self.step < self.options.steps:
            start = time.perf_counter()
            batch = next(batches)
            self.waited += time.perf_counter() - start
            losses.append(self.train_step(batch))
            self.seconds += time.perf_counter() - start
            every(self, losses)


def vision_fields(config: TrafficVLMVisionConfig) -> dict[str, Any]:
    """The fields of a tower's configuration that determine its weights."""
    names = ["conv_widths", "conv_depths", "conv_kernel_sizes", "conv_strides", "conv_expansion", "hidden_size"]
    names += ["intermediate_size", "num_hidden_layers", "num_attention_heads", "neck", "neck_width"]
    return {name: getattr(config, name) for name in names}


def forward(model: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Region and patch logits of pixels [B,S,S,3] in 0..255, under autocast where bfloat16 is fast.

    They are followed by fact logits if the model has an auxiliary head.
    """
    x = pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1)  # as the processor normalizes
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=not is_bfloat16_slow(pixels.device)):
        tokens = model["tower"](x).last_hidden_state
        found = model["head"](tokens, (x.shape[2] // 16, x.shape[3] // 16))
        return (*found, model["facts"](tokens)) if "facts" in model else found


@torch.inference_mode()
def predict(model: Any, pixels: np.ndarray, batch_size: int = 32) -> np.ndarray:
    """P(yes) float32 [N,C,4] of images uint8 [N,256,256,3]."""
    model.eval()
    results, device = [], next(model.parameters()).device
    for start in range(0, len(pixels), batch_size):
        some = torch.tensor(pixels[start : start + batch_size], device=device)
        results.append(forward(model, some)[0].sigmoid().cpu().numpy())
    return np.concatenate(results) if results else np.zeros((0, len(CATEGORIES), len(REGIONS)), np.float32)


def save_tower(model: Any, folder: Path) -> None:
    """Write tower and query head in bfloat16 with configuration and categories, each file atomically."""
    atomic_write_text(folder / "config.json", model["tower"].config.to_json_string())
    atomic_write_text(folder / CATEGORIES_FILE, json.dumps(list(CATEGORIES), indent=1) + "\n")
    state = {
        name: (value.bfloat16() if value.is_floating_point() else value).contiguous()
        for name, value in model.state_dict().items()
        if not name.startswith("facts.")
    }
    with atomic_write(folder / "model.safetensors") as temporary:
        save_file(state, temporary, {"format": "pt"})


def is_tower_folder(name: str | Path) -> bool:
    """Whether a folder was written by `save_tower`."""
    return (Path(name) / CATEGORIES_FILE).is_file()


def load_tower(folder: Path) -> nn.ModuleDict:
    """Load tower and head, in float32, from a folder written by `save_tower`.

    Raises:
        ValueError: the folder cannot be read, or was written for other categories.
    """
    try:
        categories = json.loads((folder / CATEGORIES_FILE).read_text(encoding="utf-8"))
        state = load_file(folder / "model.safetensors")
    except Exception as error:  # safetensors raises its own exception class
        raise ValueError(f"the tower {folder} cannot be read: {error}") from error
    if categories != list(CATEGORIES):
        other = sorted(set(categories) ^ set(CATEGORIES)) or "their order"
        raise ValueError(f"{folder} has other categories than this code: {other}")
    config = TrafficVLMVisionConfig.from_pretrained(folder)
    model = nn.ModuleDict({"tower": TrafficVLMVisionModel(config), "head": QueryHead(config.hidden_size)})
    model.load_state_dict(state)
    return model

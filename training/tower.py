"""Train the vision tower alone, on presence of categories by region and patch and on facts, without a decoder.

    pixels → tower → tokens [B,P,C] ─┬→ QueryHead     → region logits [B,categories,4] ↔ region targets
                                     ├→ linear        → patch logits [B,P,categories] ↔ patch targets
                                     └→ AuxiliaryHead → fact logits [B,F]             ↔ answers to yes/no questions

The library's `Trainer` trains them. Weights are averaged (EMA); the averages are evaluated and saved.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainingArguments

from ..configuration_traffic_vlm import TrafficVLMVisionConfig
from ..data.ground_truth import GroundTruth
from ..data.presence import CATEGORIES, REGIONS, region_targets
from ..data.scene import parse_scene
from ..data.targets import Targets
from ..files import atomic_write, atomic_write_text
from ..modeling_traffic_vlm import is_bfloat16_slow
from ..vision_traffic_vlm import TrafficVLMVisionModel
from .auxiliary.head import PATCH_WEIGHT, AuxiliaryHead, BalancedLoss, PresenceLoss, QueryHead
from .average import AverageWeights
from .frames import collate, pixels_of
from .watched import WatchedTrainer


EMA_DECAY = 0.998
MIXUP = 0.4  # both parameters of the beta distribution of an image's weight in a mixture
MIXUP_FRACTION = 0.6  # fraction of the run with mixed images
CATEGORIES_FILE = "categories.json"  # beside the weights


class TowerModel(nn.Module):
    """A vision tower with its query head, an auxiliary head, and their losses.

    Args:
        tower: the tower to train; its convolutions may be trained already.
        num_sources: number of sources that the losses balance separately.
        num_facts: number of yes/no questions of the auxiliary head, which is always new.
    """

    def __init__(self, tower: TrafficVLMVisionModel, head: QueryHead, num_sources: int, num_facts: int):
        super().__init__()
        self.tower, self.head = tower, head
        self.facts = AuxiliaryHead(tower.config.hidden_size, num_facts)
        self.losses = nn.ModuleDict(
            {"presence": PresenceLoss(num_sources), "facts": BalancedLoss(num_sources, (num_facts,))}
        )

    def logits(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Region, patch and fact logits of pixels [B,S,S,3] in 0..255, in bfloat16 where that is fast."""
        x = pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1)  # as the processor normalizes
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=not is_bfloat16_slow(pixels.device)):
            tokens = self.tower(x).last_hidden_state
            region, patch = self.head(tokens, (x.shape[2] // 16, x.shape[3] // 16))
            return region, patch, self.facts(tokens)

    def forward(self, pixels: torch.Tensor, targets: Targets, mixed: float | None = None) -> dict[str, torch.Tensor]:
        """The `loss` of a batch, and its parts by name: of regions, patches and facts.

        Args:
            pixels: [B,S,S,3] in 0..255.
            mixed: weight of each image in a mixture with its neighbor in the batch, and of its own losses (mixup,
                https://arxiv.org/abs/1710.09412); None mixes nothing.
        """
        if mixed is None:
            parts = self._losses_of(self.logits(pixels), targets)
        else:
            pixels = pixels.float()
            logits = self.logits(pixels.lerp(pixels.roll(1, 0), 1 - mixed))
            own = self._losses_of(logits, targets)
            other = self._losses_of(logits, targets.each(lambda one: one.roll(1, 0)), count=False)  # counted above
            parts = [mixed * a + (1 - mixed) * b for a, b in zip(own, other)]
        region, patch, facts = parts
        return {"loss": region + PATCH_WEIGHT * patch + facts, "region": region, "patch": patch, "facts": facts}

    def _losses_of(self, logits: tuple[torch.Tensor, ...], targets: Targets, count: bool = True) -> list[torch.Tensor]:
        presence = self.losses["presence"](logits[:2], targets.region, targets.patch, targets.source, count)
        return [*presence, self.losses["facts"](logits[2], targets.facts, targets.source, count)]


class TowerTrainer(WatchedTrainer):
    """`Trainer` of a `TowerModel` on `TowerImages`. Weights are averaged; the averages are evaluated.

    Args:
        new_parts: names of the tower's untrained parts, and "head" if that is new; their learning rate is that of the
            arguments.
        tower_learning_rate: of the other parts.
        evaluator: metrics {name: value} of the model.
    """

    def __init__(
        self,
        model: TowerModel,
        arguments: TrainingArguments,
        new_parts: Collection[str],
        tower_learning_rate: float,
        evaluator: Callable[[TowerModel], dict[str, float]],
        **kwargs: Any,
    ):
        self.average, self.evaluator = AverageWeights(model, EMA_DECAY), evaluator
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            is_new = not {"facts", *new_parts}.isdisjoint(name.split(".")[:2])
            groups.setdefault((is_new, parameter.ndim > 1), []).append(parameter)
        rates = (tower_learning_rate, arguments.learning_rate)
        parts = [
            {"params": some, "lr": rates[is_new], "weight_decay": arguments.weight_decay if decays else 0.0}
            for (is_new, decays), some in groups.items()
        ]
        optimizer = torch.optim.AdamW(parts, betas=(0.9, 0.98), fused=True)
        super().__init__(model, arguments, collate, optimizers=(optimizer, None), callbacks=[self.average], **kwargs)

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss. In half of the steps images are mixed, or sources with a few hundred images would be learned by
        heart; the last images of the run are not mixed.
        """
        step = self.state.global_step
        rng = np.random.default_rng([self.args.seed, step])
        is_mixed = step < MIXUP_FRACTION * self.state.max_steps and rng.random() >= 0.5
        outputs = model(**inputs, mixed=rng.beta(MIXUP, MIXUP) if is_mixed else None)
        loss = outputs.pop("loss")
        for name, value in outputs.items():
            self._add(name, value)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Metrics of the averaged weights, with the prefix `eval_`."""
        self.average.swap()
        metrics = {f"eval_{name}": value for name, value in self.evaluator(self.average.model).items()}
        self.average.swap()
        self.log(metrics)
        return metrics


@torch.inference_mode()
def answer_presence(model: TowerModel, rows: Any, batch_size: int = 32) -> pd.DataFrame:
    """Table of the known answers about rows of `load_frames`, for the metrics of `evaluation`.

    A question id is a category and a region, such as "car/left".
    """
    model.eval()
    parts, device = [], next(model.parameters()).device
    for start in range(0, len(rows), batch_size):
        some = [rows[i] for i in range(start, min(start + batch_size, len(rows)))]
        pixels = torch.from_numpy(np.stack([pixels_of(row) for row in some]))
        p_yes = model.logits(pixels.to(device))[0].float().sigmoid().cpu().numpy()  # [B,categories,4]
        truth = np.stack([region_targets(GroundTruth(parse_scene(row["scene"]))) for row in some])
        image, category, region = (truth >= 0).nonzero()
        part = pd.DataFrame({"image_id": start + image, "p_yes": p_yes[truth >= 0], "is_yes": truth[truth >= 0] == 1})
        part["source"] = np.array([row["source"] for row in some])[image]
        part["category"], part["region"] = np.array(CATEGORIES)[category], np.array(REGIONS)[region]
        parts.append(part)
    found = pd.concat(parts, ignore_index=True)
    found["question_id"] = found["category"] + "/" + found["region"]
    found["truth"] = np.where(found["is_yes"], "yes", "no")
    return found.assign(is_right=(found["p_yes"] > 0.5) == found["is_yes"])


def save_tower(model: Any, folder: Path) -> None:
    """Write tower and query head in bfloat16 with configuration and categories, each file atomically."""
    atomic_write_text(folder / "config.json", model.tower.config.to_json_string())
    atomic_write_text(folder / CATEGORIES_FILE, json.dumps(list(CATEGORIES), indent=1) + "\n")
    state = {
        name: (value.bfloat16() if value.is_floating_point() else value).contiguous()
        for name, value in model.state_dict().items()
        if name.startswith(("tower.", "head."))
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

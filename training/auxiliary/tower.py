"""The vision tower alone with its query head: the model that trains without a decoder, and its evaluation.

pixels → tower ─┬→ tokens [B,P,C] → query head ↔ presence loss
                └→ centers of the center head, if there is one ↔ center loss
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from ...common.files import atomic_write, atomic_write_text
from ...configuration_traffic_vlm import token_grid
from ...data.augment import resize
from ...data.scene import parse_scene
from ...data.truth import GroundTruth
from ...evaluation import markdown
from ...evaluation.metrics import auc, balanced_accuracy, by_group
from ...images_traffic_vlm import to_rgb
from ...vision_traffic_vlm import TrafficVLMBatchNorm2d
from .losses import LOSSES, ForwardPass
from .presence import (
    CATEGORIES,
    REGIONS,
    PresenceLoss,
    QueryHead,
    region_targets,
    save_training_head,
)


FIGURES = {"balanced accuracy": balanced_accuracy, "AUC": auc, "answers": len}


class TowerModel(nn.Module):
    """A vision tower with its query head, to train with these weights of the losses "presence" and "centers"."""

    def __init__(
        self, tower: Any, head: QueryHead, num_sources: int = 1, loss_weights: Mapping[str, float] | None = None
    ):
        super().__init__()
        self.tower, self.loss_weights = tower, loss_weights or {"presence": 1.0}
        self.training_head: Any = nn.ModuleDict({"head": head, "loss": PresenceLoss(num_sources)})

    def train(self, mode: bool = True) -> "TowerModel":
        """As in torch, but batch normalization uses its stored statistics: those of a batch differ between sizes."""
        super().train(mode)
        for module in self.tower.modules():
            if isinstance(module, TrafficVLMBatchNorm2d):
                module.eval()
        return self

    def see(self, pixel_values: torch.Tensor) -> Any:
        """The output of the tower for pixels [B,3,H,W] in 0..255."""
        return self.tower(pixel_values.float().div(127.5).sub(1))  # as the processor normalizes

    def presence(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """P(present) [B,categories,4] of pixels [B,3,H,W] in 0..255."""
        grid = token_grid(self.tower.config, *pixel_values.shape[2:])
        regions: torch.Tensor = self.training_head["head"](self.see(pixel_values).last_hidden_state, grid)[0]
        return regions.float().sigmoid()

    def figures(self, rows: Any) -> dict[str, float]:
        """Balanced accuracy and AUC in rows at the tower's own size, as far as they are known."""
        answers = answer_presence(self, rows, [self.tower.config.image_size])
        figures = {"balanced_accuracy": balanced_accuracy(answers), "auc": auc(answers)}
        return {name: value for name, value in figures.items() if value is not None}

    def forward(
        self, pixel_values: torch.Tensor, targets: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """The `loss` of a batch.

        Args:
            pixel_values: [B,3,H,W] in 0..255.
            targets: by the name of their loss.
        """
        passed = ForwardPass(self, self.see(pixel_values))
        losses = (self.loss_weights[name] * LOSSES[name](passed, **tensors) for name, tensors in targets.items())
        return {"loss": sum(losses, pixel_values.new_zeros((), dtype=torch.float32))}


def write_tower(model: TowerModel, answers: pd.DataFrame | None, folder: Path) -> None:
    """Write tower/ with its head, for `--vision_tower`, and with `answers` answers.parquet and report.md."""
    model.tower.save_pretrained(folder / "tower")
    save_training_head(model.training_head["head"], folder / "tower")
    if answers is None:
        return
    with atomic_write(folder / "answers.parquet") as temporary:
        answers.to_parquet(temporary)
    tables = {names: by_group(answers, FIGURES, *names) for names in (("source", "size"), ("category", "size"))}
    text = "\n\n".join(markdown.table(" / ".join(names), rows.to_dict("index")) for names, rows in tables.items())
    atomic_write_text(folder / "report.md", text + "\n")


def answer_presence(model: TowerModel, rows: Any, sizes: Sequence[int]) -> pd.DataFrame:
    """Table of the known answers about rows with scenes at sides of these sizes, for `evaluation.metrics`.

    A question id is a category and a region, such as "car/left".
    """
    truth = np.stack([region_targets(GroundTruth(parse_scene(row["scene"]))) for row in rows.select_columns("scene")])
    image, category, region = known = (truth >= 0).nonzero()
    named = {name: np.array(rows[name])[image] for name in ("source", "group", "image_id")}
    table = pd.DataFrame({**named, "category": np.array(CATEGORIES)[category], "region": np.array(REGIONS)[region]})
    table["question_id"] = table["category"] + "/" + table["region"]
    table["truth"] = np.where(truth[known] == 1, "yes", "no")
    answers = pd.concat([table.assign(size=size, p_yes=predict_presence(model, rows, size)[known]) for size in sizes])
    return answers.assign(is_right=(answers["p_yes"] > 0.5) == (answers["truth"] == "yes"))


@torch.inference_mode()
def predict_presence(model: TowerModel, rows: Any, size: int, batch_size: int = 16) -> np.ndarray:
    """P(present) [N,categories,4] in rows at `size` × `size` pixels."""
    device, found = next(model.eval().parameters()).device, []
    for batch in rows.select_columns("image").iter(batch_size):
        pixels = np.stack([resize(np.asarray(to_rgb(image)), (size, size)) for image in batch["image"]])
        found.append(model.presence(torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)).cpu().numpy())
    return np.concatenate(found)

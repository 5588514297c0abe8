"""The vision tower alone with its query head: the model that trains without a decoder, its Trainer and evaluation.

    pixels → tower ─┬→ tokens [B,P,C] → QueryHead → region and patch logits ↔ `PresenceLoss`
                    └→ centers of the center head, if there is one ↔ `center_loss`

The statistics of batch normalization stay as they are: those of a batch would differ between sizes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from ...common.files import atomic_write, atomic_write_text
from ...data.augment import resize
from ...data.scene import parse_scene
from ...data.truth import GroundTruth
from ...evaluation import markdown
from ...evaluation.metrics import auc, balanced_accuracy, by_group
from ...images_traffic_vlm import to_rgb
from ...vision_traffic_vlm import TrafficVLMBatchNorm2d
from ..drawing import mixed_weight
from ..model import load_tower
from ..trainer import AveragingTrainer
from .centers import center_loss
from .head import PresenceLoss, QueryHead, load_training_head, save_training_head
from .presence import CATEGORIES, REGIONS, region_targets


FIGURES = {"balanced accuracy": balanced_accuracy, "AUC": auc, "answers": len}


class TowerModel(nn.Module):
    """A vision tower with its query head and their losses.

    Args:
        num_sources: the presence loss is balanced within each source.
        centers_weight: weight of the loss of the tower's center head.
    """

    def __init__(self, tower: Any, head: QueryHead, num_sources: int = 1, centers_weight: float = 0.0):
        super().__init__()
        self.tower, self.head, self.loss = tower, head, PresenceLoss(num_sources)
        self.centers_weight = centers_weight

    def train(self, mode: bool = True) -> "TowerModel":
        """As in torch, but batch normalization always uses its stored statistics."""
        super().train(mode)
        for module in self.tower.modules():
            if isinstance(module, TrafficVLMBatchNorm2d):
                module.eval()
        return self

    def logits(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Region and patch logits of pixels [B,3,H,W] in 0..255, and the output of the center head or None."""
        x = pixel_values.float().div(127.5).sub(1)  # as the processor normalizes
        grid, seen = self.tower.config.token_grid(*x.shape[2:]), self.tower(x)
        region, patch = self.head(seen.last_hidden_state[:, -grid[0] * grid[1] :], grid)
        return region, patch, seen.centers

    def forward(
        self,
        pixel_values: torch.Tensor,
        presence: Mapping[str, torch.Tensor],
        centers: Mapping[str, torch.Tensor] | None = None,
        mixed: float | None = None,
    ) -> dict[str, torch.Tensor]:
        """The `loss` of a batch.

        Args:
            pixel_values: [B,3,H,W] in 0..255.
            presence, centers: targets of these names, see `targets.py`.
            mixed: weight of each image in a mixture with its neighbor in the batch, and of its own loss (mixup,
                https://arxiv.org/abs/1710.09412); None mixes nothing.
        """
        pixels = pixel_values.float()
        if mixed is not None:
            pixels = pixels.lerp(pixels.roll(1, 0), 1 - mixed)
        region, patch, found = self.logits(pixels)
        total = pixels.new_zeros(())
        for weight, shift in [(1.0, 0)] if mixed is None else [(mixed, 0), (1 - mixed, 1)]:
            loss = self.loss((region, patch), **{name: one.roll(shift, 0) for name, one in presence.items()})
            if centers is not None and found is not None:
                rolled = {name: one.roll(shift, 0) for name, one in centers.items()}
                loss = loss + self.centers_weight * center_loss(found, **rolled)
            total = total + weight * loss
        return {"loss": total}


class TowerTrainer(AveragingTrainer):
    """Trains a `TowerModel`.

    Args:
        eval_sizes: sides of the images in pixels, in evaluation; the first one gives the metrics.
    """

    def __init__(self, *args: Any, eval_sizes: Sequence[int], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.eval_sizes = eval_sizes

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        mixed = mixed_weight(self.args.seed, self.state.global_step, self.state.max_steps)
        outputs = model(inputs["pixel_values"], **inputs["targets"], mixed=mixed)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def figures(self, rows: Any) -> dict[str, float]:
        """Balanced accuracy and AUC, as far as they are known."""
        answers = answer_presence(self.model, rows, self.eval_sizes[:1])
        figures = {"balanced_accuracy": balanced_accuracy(answers), "auc": auc(answers)}
        return {name: value for name, value in figures.items() if value is not None}

    def finish(self) -> None:
        """Write the tower, and evaluate it at all sizes."""
        folder, answers = Path(self.args.output_dir), None
        if self.eval_dataset is not None:
            with self.accelerator.autocast():
                answers = answer_presence(self.model, self.eval_dataset, self.eval_sizes)
        write_tower(self.accelerator.unwrap_model(self.model), answers, folder)
        print(
            f"The tower is in {folder / 'tower'}. checkpoint-* (to resume this training) in {folder} can be deleted."
        )


def load_tower_model(name: str) -> TowerModel:
    """The tower of a folder with its query head. Raises a ValueError if there is no head."""
    head = load_training_head(name)
    if head is None:
        raise ValueError(f"{name} has no query head")
    return TowerModel(load_tower(name), head)


def write_tower(model: TowerModel, answers: pd.DataFrame | None, folder: Path) -> None:
    """Write tower/ with its head, for `--vision_tower`, and with `answers` answers.parquet and report.md."""
    model.tower.save_pretrained(folder / "tower")
    save_training_head(model.head, folder / "tower")
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
    """P(present) [N,categories,4] of rows at `size` × `size` pixels."""
    model.eval()
    device, found = next(model.parameters()).device, []
    for batch in rows.select_columns("image").iter(batch_size):
        pixels = np.stack([resize(np.asarray(to_rgb(image)), (size, size)) for image in batch["image"]])
        regions = model.logits(torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2))[0]
        found.append(regions.float().sigmoid().cpu().numpy())
    return np.concatenate(found)

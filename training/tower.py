"""Train the vision tower alone, on the presence of categories by region and patch, without a decoder.

    dataset folders → rows {pixels, scene, source}, shrunk once → `TowerImages`: augmented images with their targets
    pixels → tower → tokens [B,P,C] → QueryHead → region and patch logits ↔ `PresenceLoss`

The library's `Trainer` trains them. Weights are averaged (EMA); the averages are evaluated and saved. Images are
256 × 256 pixels, resized without regard to their shape, as by the processor.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pandas as pd
import torch
from torch import nn

from ..common.files import DataError, atomic_write_text
from ..data.augment import augment
from ..data.dataset import Mixture
from ..data.ground_truth import GroundTruth
from ..data.grounding import object_patches
from ..data.presence import CATEGORIES, REGIONS, patch_targets, region_targets
from ..data.scene import parse_scene
from ..evaluation import markdown
from ..evaluation.metrics import auc, balanced_accuracy, by_group
from ..images_traffic_vlm import to_rgb
from .auxiliary.head import PresenceLoss, QueryHead, save_training_head
from .checkpoints import CheckedTrainer
from .rows import open_datasets


SIDE, PATCH_SIDE = 256, 16
EMA_DECAY = 0.998
MIXUP = 0.4  # both parameters of the beta distribution of an image's weight in a mixture
MIXUP_FRACTION = 0.6  # fraction of the run with mixed images
FIGURES = {"balanced accuracy": balanced_accuracy, "AUC": auc, "answers": len}


def is_bfloat16_slow(device: torch.device) -> bool:
    """Whether a device computes bfloat16 much slower than float32: a CPU with AVX2 has no instructions for it."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def load_images(folders: Sequence[str]) -> list[Any]:
    """Rows of each dataset folder of `scripts/make_dataset.py`, with pixels, the bytes of uint8 [256,256,3], in place
    of the image. `datasets` keeps them for the next run.

    Raises:
        DataError: a folder or an image cannot be read, the rows have no scenes, or a folder is given twice.
    """
    found = open_datasets(folders)
    for folder, rows in zip(folders, found):
        if "scene" not in getattr(rows, "column_names", ()):
            raise DataError(f"{folder} has no scenes; make the dataset with make_dataset.py")
    return [rows.map(_shrink, remove_columns="image", writer_batch_size=100, desc="shrinking") for rows in found]


def _shrink(row: Any) -> dict[str, bytes]:
    try:
        image = np.asarray(to_rgb(row["image"]))
    except (ValueError, TypeError, OSError) as error:
        raise DataError(f"image {row['image_id']} cannot be read: {error}") from error
    return {"pixels": _resize(image).tobytes()}


def _resize(image: np.ndarray) -> np.ndarray:
    shrinks = image.shape[0] * image.shape[1] > SIDE * SIDE
    return cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def pixels_of(row: Any) -> np.ndarray:
    """The image uint8 [256,256,3] of a row of `load_images`."""
    return np.frombuffer(row["pixels"], np.uint8).reshape(SIDE, SIDE, 3)


class TowerImages(torch.utils.data.Dataset):
    """Augmented images with their targets, by index: any process, and a resumed run, draws the same ones.

    An item holds the arguments of `TowerModel` for one image.

    Args:
        mixture: of rows of `load_images`; its epoch has all images of the run.
        sources: the names of all sources; the index of a source is its position here.
    """

    def __init__(self, mixture: Mixture, sources: Sequence[str]):
        self.mixture, self.sources = mixture, list(sources)

    def __len__(self) -> int:
        return len(self.mixture)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        cv2.setNumThreads(1)  # the data loader has as many processes as there shall be
        row, rng = self.mixture[index], np.random.default_rng([self.mixture.seed, index])
        image, scene = augment(pixels_of(row), parse_scene(row["scene"]), rng)
        covered = object_patches(scene, (SIDE // PATCH_SIDE,) * 2)
        return {
            "pixels": torch.from_numpy(_resize(image)),
            "region": torch.from_numpy(region_targets(GroundTruth(scene))),
            "patch": torch.from_numpy(patch_targets(scene, covered)),
            "source": torch.tensor(self.sources.index(row["source"])),
        }


class TowerModel(nn.Module):
    """A vision tower with its query head and their loss, balanced within each of `num_sources` sources."""

    def __init__(self, tower: Any, head: QueryHead, num_sources: int):
        super().__init__()
        self.tower, self.head, self.loss = tower, head, PresenceLoss(num_sources)

    def logits(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Region and patch logits of pixels [B,256,256,3] in 0..255, in bfloat16 where that is fast."""
        x = pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1)  # as the processor normalizes
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=not is_bfloat16_slow(pixels.device)):
            tokens = self.tower(x).last_hidden_state
            logits: tuple[torch.Tensor, torch.Tensor] = self.head(tokens, (SIDE // PATCH_SIDE,) * 2)
            return logits

    def forward(
        self,
        pixels: torch.Tensor,
        region: torch.Tensor,
        patch: torch.Tensor,
        source: torch.Tensor,
        mixed: float | None = None,
    ) -> dict[str, torch.Tensor]:
        """The `loss` of a batch.

        Args:
            pixels: [B,256,256,3] in 0..255.
            region, patch, source: see `PresenceLoss`.
            mixed: weight of each image in a mixture with its neighbor in the batch, and of its own loss (mixup,
                https://arxiv.org/abs/1710.09412); None mixes nothing.
        """
        if mixed is None:
            return {"loss": self.loss(self.logits(pixels), region, patch, source)}
        pixels = pixels.float()
        logits = self.logits(pixels.lerp(pixels.roll(1, 0), 1 - mixed))
        neighbor = self.loss(logits, region.roll(1, 0), patch.roll(1, 0), source.roll(1, 0))
        return {"loss": mixed * self.loss(logits, region, patch, source) + (1 - mixed) * neighbor}


class TowerTrainer(CheckedTrainer):
    """`Trainer` of a `TowerModel` on `TowerImages`; it evaluates the averaged weights on rows of `load_images`."""

    def __init__(self, model: TowerModel, *args: Any, **kwargs: Any):
        super().__init__(model, *args, average_decay=EMA_DECAY, **kwargs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of matrices and kernels: biases and the weights of norms do not decay."""
        return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss. In half of the steps images are mixed, or sources with a few hundred images would be learned by
        heart; the last images of the run are not mixed.
        """
        step = self.state.global_step
        rng = np.random.default_rng([self.args.seed, step])
        is_mixed = step < MIXUP_FRACTION * self.state.max_steps and rng.random() >= 0.5
        return model(**inputs, mixed=rng.beta(MIXUP, MIXUP) if is_mixed else None)["loss"]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Metrics of the averaged weights, with the prefix `eval_`; report.md and tower/ are written."""
        self.check_weights()  # or the tower of the last evaluation would be lost
        folder, model = Path(self.args.output_dir), self.average.model
        self.average.swap()
        answers = answer_presence(model, self.eval_dataset)
        model.tower.save_pretrained(folder / "tower")
        save_training_head(model.head, folder / "tower")
        self.average.swap()
        tables = {name: by_group(answers, FIGURES, name).to_dict("index") for name in ("source", "category")}
        text = "\n\n".join(markdown.table(name, rows) for name, rows in tables.items())
        atomic_write_text(folder / "report.md", text + "\n")
        figures = {"eval_balanced_accuracy": balanced_accuracy(answers), "eval_auc": auc(answers)}
        metrics = {name: value for name, value in figures.items() if value is not None}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


@torch.inference_mode()
def answer_presence(model: TowerModel, rows: Any, batch_size: int = 32) -> pd.DataFrame:
    """Table of the known answers about rows of `load_images`, for the metrics of `evaluation`.

    A question id is a category and a region, such as "car/left".
    """
    model.eval()
    device, p_yes = next(model.parameters()).device, []
    for start in range(0, len(rows), batch_size):
        some = range(start, min(start + batch_size, len(rows)))
        pixels = torch.from_numpy(np.stack([pixels_of(rows[i]) for i in some]))
        p_yes += list(model.logits(pixels.to(device))[0].float().sigmoid().cpu().numpy())  # [categories,4] each
    truth = np.stack([region_targets(GroundTruth(parse_scene(row["scene"]))) for row in rows.select_columns("scene")])
    image, category, region = known = (truth >= 0).nonzero()
    table = pd.DataFrame({"image_id": image, "source": np.array(rows["source"])[image]})
    table["category"], table["region"] = np.array(CATEGORIES)[category], np.array(REGIONS)[region]
    table["question_id"] = table["category"] + "/" + table["region"]
    table["p_yes"], table["truth"] = np.stack(p_yes)[known], np.where(truth[known] == 1, "yes", "no")
    return table.assign(is_right=(table["p_yes"] > 0.5) == (table["truth"] == "yes"))

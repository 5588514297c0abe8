"""Train the vision tower alone, on the presence of categories by region and patch, without a decoder.

    dataset folders → rows {image, scene, group, source} → `TowerBatches`: augmented images of one size with targets
    pixels → tower → tokens [B,P,C] → QueryHead → region and patch logits ↔ `PresenceLoss`

The library's `Trainer` trains them. The statistics of batch normalization stay as they are: those of a batch would
differ between sizes. Weights are averaged (EMA); the averages are evaluated at several sizes, and saved.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pandas as pd
import torch
from datasets import Image
from PIL import Image as PILImage
from torch import nn
from torch.utils.data import SequentialSampler, default_collate

from ..common.files import DataError, atomic_write, atomic_write_text
from ..data.augment import augment, is_large_enough, resize
from ..data.grounding import object_patches
from ..data.presence import CATEGORIES, REGIONS, patch_targets, region_targets
from ..data.scene import parse_scene
from ..data.truth import GroundTruth
from ..evaluation import markdown
from ..evaluation.metrics import auc, balanced_accuracy, by_group
from ..images_traffic_vlm import to_rgb
from ..vision_traffic_vlm import TrafficVLMBatchNorm2d
from .auxiliary.head import PresenceLoss, QueryHead, save_training_head
from .checkpoints import CheckedTrainer
from .drawing import BatchSizes, draw_chances
from .rows import open_datasets


EMA_DECAY = 0.998
MIXUP = 0.4  # both parameters of the beta distribution of an image's weight in a mixture
MIXUP_FRACTION = 0.6  # fraction of the run with mixed images
COLUMNS = ["image", "scene", "group", "source", "image_id"]
FIGURES = {"balanced accuracy": balanced_accuracy, "AUC": auc, "answers": len}


def is_bfloat16_slow(device: torch.device) -> bool:
    """Whether a device computes bfloat16 much slower than float32: a CPU with AVX2 has no instructions for it."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def load_images(folders: Sequence[str]) -> list[Any]:
    """Rows of each dataset folder of `scripts/make_dataset.py`, whose images are not decoded yet.

    Raises:
        DataError: a folder cannot be read, was not made by make_dataset.py, or is given twice.
    """
    found = open_datasets(folders)
    for folder, rows in zip(folders, found):
        if not {"scene", "group"} <= set(getattr(rows, "column_names", ())):
            raise DataError(f"{folder} has no scenes or no groups; make the dataset with make_dataset.py")
    return [rows.select_columns(COLUMNS).cast_column("image", Image(decode=False)) for rows in found]


def shared_groups(train: Sequence[Any], held: Any) -> list[str]:
    """Groups, such as cameras, with rows of `load_images` both in `train` and in `held`; sorted."""

    def names(rows: Any) -> set[str]:
        return {f"{source}: {group}" for source, group in zip(rows["source"][:], rows["group"][:])}

    return sorted(set().union(*map(names, train)) & names(held))


def pixels_of(row: Any) -> np.ndarray:
    """The image uint8 [H,W,3] of a row of `load_images`. Raises `DataError` if it cannot be read."""
    try:
        with PILImage.open(io.BytesIO(row["image"]["bytes"])) as image:
            return np.asarray(to_rgb(image))
    except (ValueError, TypeError, OSError) as error:
        raise DataError(f"image {row['image_id']} cannot be read: {error}") from error


class TowerBatches(torch.utils.data.Dataset):
    """Batches of augmented images with their targets, by step: any process, and a resumed run, draws the same ones.

    An item holds the arguments of `TowerModel`.

    Args:
        parts: rows of `load_images` of each source.
        weights: of each source.
        sizes: of the batches.
        token_grid: that of the tower's configuration.
        sources: the names of all sources; the index of a source is its position here.
        seed: of all draws.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        weights: Sequence[float],
        sizes: BatchSizes,
        token_grid: Any,
        sources: Sequence[str],
        seed: int = 0,
    ):
        self.parts, self.sizes, self.token_grid = parts, sizes, token_grid
        self.sources, self.seed = list(sources), seed
        groups = [rows["group"][:] for rows in parts]
        self.chances = draw_chances(groups, weights, sizes.steps * sizes.pictures)
        self.places = [(part, index) for part, rows in enumerate(parts) for index in range(len(rows))]
        scenes = [parse_scene(text) for rows in parts for text in rows["scene"][:]]
        self.stored = [(scene.width, scene.height) for scene in scenes]

    def __len__(self) -> int:
        return self.sizes.steps

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        cv2.setNumThreads(1)  # the data loader has as many processes as there shall be
        rng = np.random.default_rng([self.seed, step])
        count, height, width = self.sizes.draw(step, rng)
        chances = self.chances * [is_large_enough(*stored, (height, width)) for stored in self.stored]
        if not chances.any():
            raise ValueError(f"no picture is large enough for {height} × {width} pixels; leave out this size")
        drawn = rng.choice(len(chances), count, p=chances / chances.sum())
        return default_collate([self._item(index, (height, width), rng) for index in drawn])

    def _item(self, index: int, size: tuple[int, int], rng: np.random.Generator) -> dict[str, Any]:
        part, place = self.places[index]
        row = self.parts[part][place]
        image, scene = augment(pixels_of(row), parse_scene(row["scene"]), rng, size=size)
        return {
            "pixels": torch.from_numpy(image),
            "region": torch.from_numpy(region_targets(GroundTruth(scene))),
            "patch": torch.from_numpy(patch_targets(scene, object_patches(scene, self.token_grid(*size)))),
            "source": self.sources.index(row["source"]),
        }


def only(batches: Sequence[Any]) -> Any:
    """The only one of a list: an item of `TowerBatches` is a batch already."""
    [batch] = batches
    return batch


class TowerModel(nn.Module):
    """A vision tower with its query head and their loss, balanced within each of `num_sources` sources."""

    def __init__(self, tower: Any, head: QueryHead, num_sources: int):
        super().__init__()
        self.tower, self.head, self.loss = tower, head, PresenceLoss(num_sources)

    def train(self, mode: bool = True) -> "TowerModel":
        """As in torch, but batch normalization always uses its stored statistics."""
        super().train(mode)
        for module in self.tower.modules():
            if isinstance(module, TrafficVLMBatchNorm2d):
                module.eval()
        return self

    def logits(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Region and patch logits of pixels [B,H,W,3] in 0..255, in bfloat16 where that is fast."""
        x = pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1)  # as the processor normalizes
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=not is_bfloat16_slow(pixels.device)):
            tokens = self.tower(x).last_hidden_state
            logits: tuple[torch.Tensor, torch.Tensor] = self.head(tokens, self.tower.config.token_grid(*x.shape[2:]))
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
            pixels: [B,H,W,3] in 0..255.
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
    """`Trainer` of a `TowerModel` on `TowerBatches`; it evaluates the averaged weights on rows of `load_images`.

    Args:
        sizes: sides in pixels at which the weights are evaluated; the first one gives the metrics.
    """

    def __init__(self, model: TowerModel, *args: Any, sizes: Sequence[int], **kwargs: Any):
        super().__init__(model, *args, average_decay=EMA_DECAY, data_collator=only, **kwargs)
        self.sizes = sizes

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of matrices and kernels: biases and the weights of norms do not decay."""
        return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # the size of a batch depends on its step

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss. In half of the steps images are mixed, or sources with a few hundred images would be learned by
        heart; the last images of the run are not mixed.
        """
        step = self.state.global_step
        rng = np.random.default_rng([self.args.seed, step])
        is_mixed = step < MIXUP_FRACTION * self.state.max_steps and rng.random() >= 0.5
        return model(**inputs, mixed=rng.beta(MIXUP, MIXUP) if is_mixed else None)["loss"]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Metrics of the averaged weights, with the prefix `eval_`; `evaluate_tower` writes its files."""
        self.check_weights()  # or the tower of the last evaluation would be lost
        self.average.swap()
        answers = evaluate_tower(self.average.model, self.eval_dataset, self.sizes, Path(self.args.output_dir))
        self.average.swap()
        first = answers[answers["size"] == self.sizes[0]]
        figures = {"eval_balanced_accuracy": balanced_accuracy(first), "eval_auc": auc(first)}
        metrics = {name: value for name, value in figures.items() if value is not None}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def evaluate_tower(model: TowerModel, rows: Any, sizes: Sequence[int], folder: Path) -> pd.DataFrame:
    """The answers about rows of `load_images` at several sizes; answers.parquet, report.md and tower/ are written."""
    model.tower.save_pretrained(folder / "tower")
    save_training_head(model.head, folder / "tower")
    answers = pd.concat([answer_presence(model, rows, size) for size in sizes])
    with atomic_write(folder / "answers.parquet") as temporary:
        answers.to_parquet(temporary)
    tables = {names: by_group(answers, FIGURES, *names) for names in (("source", "size"), ("category", "size"))}
    text = "\n\n".join(markdown.table(" / ".join(names), rows.to_dict("index")) for names, rows in tables.items())
    atomic_write_text(folder / "report.md", text + "\n")
    return answers


@torch.inference_mode()
def answer_presence(model: TowerModel, rows: Any, size: int, batch_size: int = 16) -> pd.DataFrame:
    """Table of the known answers about rows of `load_images` at `size` × `size` pixels, for `evaluation.metrics`.

    A question id is a category and a region, such as "car/left".
    """
    model.eval()
    device, p_yes = next(model.parameters()).device, []
    for start in range(0, len(rows), batch_size):
        some = range(start, min(start + batch_size, len(rows)))
        pixels = torch.from_numpy(np.stack([resize(pixels_of(rows[i]), (size, size)) for i in some]))
        p_yes += list(model.logits(pixels.to(device))[0].float().sigmoid().cpu().numpy())  # [categories,4] each
    truth = np.stack([region_targets(GroundTruth(parse_scene(row["scene"]))) for row in rows.select_columns("scene")])
    image, category, region = known = (truth >= 0).nonzero()
    names = {name: np.array(rows[name])[image] for name in ("source", "group", "image_id")}
    table = pd.DataFrame({"size": size, **names})
    table["category"], table["region"] = np.array(CATEGORIES)[category], np.array(REGIONS)[region]
    table["question_id"] = table["category"] + "/" + table["region"]
    table["p_yes"], table["truth"] = np.stack(p_yes)[known], np.where(truth[known] == 1, "yes", "no")
    return table.assign(is_right=(table["p_yes"] > 0.5) == (table["truth"] == "yes"))

"""Train the vision tower without a decoder.

    python scripts/train_tower.py --train_dataset runs/data/*/ --eval_dataset runs/dev/*/ --output_dir runs/tower
    python scripts/train.py --model_name_or_path . --vision_tower runs/tower/tower --train_dataset runs/data/*/

It learns the categories in images by region and patch. Datasets are folders of make_dataset.py, best one for each
source. The same command resumes a stopped run from its last checkpoint. Every `--eval_steps` and at the end the
averaged weights are evaluated: `tower/` and `report.md` are written.
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import concatenate_datasets
from transformers import TrainingArguments

from traffic_vlm.common.options import choose_threads, option, option_parser
from traffic_vlm.scripts import command
from traffic_vlm.training.auxiliary.head import QueryHead, load_training_head
from traffic_vlm.training.checkpoints import claim_run, files_to_delete, last_checkpoint
from traffic_vlm.training.drawing import BatchSizes
from traffic_vlm.training.start import add_pooling, freeze_blocks, load_tower
from traffic_vlm.training.tower import TowerBatches, TowerModel, TowerTrainer, load_images, shared_groups


CONSTANT_FRACTION = 0.3  # of the run with a constant learning rate, before it falls linearly to 0
SAME = ("batch_size", "seed", "train_dataset", "start_from")  # in a resumed run; `images` may change


@dataclass
class Options:
    train_dataset: list[str] = field(metadata={"help": "folders of make_dataset.py"})
    eval_dataset: list[str] = field(metadata={"help": "folders of images for evaluation"})
    train_weights: list[float] | None = option(
        None, "sampling weight of each train_dataset; default: the square root of its number of images"
    )
    output_dir: Path = option(Path("runs/tower"), "checkpoints, report.md and tower/ are written here")
    start_from: str = option(
        str(Path(__file__).resolve().parents[1]), "a folder tower/ or a model whose tower is trained further"
    )
    images: int = option(64_000, "images until the learning rate reaches 0, if all were of the default size")
    batch_size: int = option(32, "images per step; fewer in a step with larger images")
    sizes: list[int] = option([256, 352, 448, 480, 512], "sides of the images in pixels, one for each step")
    size_weights: list[float] = option([60.0, 25.0, 5.0, 5.0, 5.0], "weight of each of --sizes")
    default_size: int = option(256, "side of the images in the last tenth of the steps")
    vary_aspect: bool = option(False, "vary the shape of the images from 0.75 to 1.8")
    pool_above: int | None = option(None, "larger images have one token for 2 × 2 patches; default: as the start")
    freeze_blocks: int | None = option(None, "freeze the stem and this number of convolution blocks")
    eval_sizes: list[int] = option([256, 320, 384, 448], "sides of the images in evaluation, in pixels")
    learning_rate: float = option(3e-4, "learning rate, after the first 3 %% of the run")
    seed: int = option(0, "seed of images and new weights")
    num_workers: int = option(1, "processes that prepare batches")
    save_steps: int = option(200, "steps between two checkpoints")
    eval_steps: int = option(1000, "steps between two evaluations")

    def __post_init__(self) -> None:
        for name in ("images", "batch_size", "num_workers", "learning_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name} must be positive, got {getattr(self, name)}")


def train(options: Options) -> None:
    """Start or resume a training of the tower."""
    parts, held = load_images(options.train_dataset), concatenate_datasets(load_images(options.eval_dataset))
    if shared := shared_groups(parts, held):
        print(f"{len(shared)} groups of pictures are also in --eval_dataset, whose figures are too high: {shared[:5]}")
    sources = sorted({name for rows in parts for name in rows.unique("source")})
    weights = options.train_weights or [len(rows) ** 0.5 for rows in parts]
    claim_run(options.output_dir, {name: getattr(options, name) for name in SAME})
    torch.manual_seed(options.seed)
    tower = load_tower(options.start_from)
    if options.pool_above is not None:
        tower = add_pooling(tower, options.pool_above)
    if options.freeze_blocks is not None:
        freeze_blocks(tower, options.freeze_blocks)
    head = load_training_head(options.start_from) or QueryHead(tower.config.hidden_size)
    steps = math.ceil(options.images / options.batch_size)
    arguments = TrainingArguments(
        str(options.output_dir),
        max_steps=steps,
        per_device_train_batch_size=1,  # an item is a batch
        learning_rate=options.learning_rate,
        weight_decay=0.05,
        adam_beta2=0.98,
        warmup_steps=0.03,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": int((1 - CONSTANT_FRACTION) * steps), "decay_type": "linear"},
        seed=options.seed,
        logging_steps=50,
        logging_nan_inf_filter=False,  # it would wait for the GPU at each step
        save_steps=options.save_steps,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=options.eval_steps,
        dataloader_num_workers=options.num_workers,
        dataloader_prefetch_factor=4,
        dataloader_pin_memory=torch.accelerator.is_available(),  # torch warns that it does nothing on a CPU
        report_to="none",
    )
    plan = BatchSizes(
        options.sizes,
        options.size_weights,
        options.default_size,
        options.batch_size,
        steps,
        options.vary_aspect,
    )
    batches = TowerBatches(parts, weights, plan, tower.config.token_grid, sources, options.seed)
    model = TowerModel(tower, head, len(sources))
    trainer = TowerTrainer(model, arguments, sizes=options.eval_sizes, train_dataset=batches, eval_dataset=held)
    checkpoint = last_checkpoint(options.output_dir)
    if checkpoint is not None:
        print(f"resuming from {checkpoint.name.replace('checkpoint-', 'step ')} of {steps}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if not any("eval_auc" in entry for entry in trainer.state.log_history if entry["step"] == steps):
        trainer.evaluate()
    print(f"The tower is in {options.output_dir / 'tower'}. {files_to_delete(options.output_dir)}")


@command("train")
def main() -> None:
    [options] = option_parser([Options], __doc__).parse_args_into_dataclasses()
    choose_threads()
    train(options)


if __name__ == "__main__":
    sys.exit(main())

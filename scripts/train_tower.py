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
from traffic_vlm.data.dataset import Mixture
from traffic_vlm.scripts import command
from traffic_vlm.training.auxiliary.head import QueryHead, load_training_head
from traffic_vlm.training.checkpoints import claim_run, files_to_delete, last_checkpoint
from traffic_vlm.training.start import load_tower
from traffic_vlm.training.tower import TowerImages, TowerModel, TowerTrainer, load_images


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
    images: int = option(64_000, "images until the learning rate reaches 0")
    batch_size: int = option(32, "images per step")
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
    sources = sorted({name for rows in parts for name in rows.unique("source")})
    weights = options.train_weights or [len(rows) ** 0.5 for rows in parts]
    mixture = Mixture(parts, weights, options.images, options.seed)
    claim_run(options.output_dir, {name: getattr(options, name) for name in SAME})
    torch.manual_seed(options.seed)
    tower = load_tower(options.start_from)
    head = load_training_head(options.start_from) or QueryHead(tower.config.hidden_size)
    steps = math.ceil(options.images / options.batch_size)
    arguments = TrainingArguments(
        str(options.output_dir),
        max_steps=steps,
        per_device_train_batch_size=options.batch_size,
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
        dataloader_prefetch_factor=8,
        dataloader_pin_memory=torch.accelerator.is_available(),  # torch warns that it does nothing on a CPU
        report_to="none",
    )
    images, model = TowerImages(mixture, sources), TowerModel(tower, head, len(sources))
    trainer = TowerTrainer(model, arguments, train_dataset=images, eval_dataset=held)
    checkpoint = last_checkpoint(options.output_dir)
    if checkpoint is not None:
        print(f"resuming from {checkpoint.name.replace('checkpoint-', 'step ')} of {steps}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if not any("eval_auc" in entry for entry in trainer.state.log_history if entry["step"] == steps):
        trainer.evaluate()
    print(f"The tower is in {options.output_dir / 'tower'}. {files_to_delete(options.output_dir)}")


@command("train", resumes=True)
def main() -> None:
    [options] = option_parser([Options], __doc__).parse_args_into_dataclasses()
    choose_threads()
    train(options)


if __name__ == "__main__":
    sys.exit(main())

"""Train the vision tower without a decoder.

    python scripts/train_tower.py --train_dataset runs/data/* --eval_dataset runs/dev/* --output_dir runs/tower
    python scripts/train.py --model_name_or_path . --vision_tower runs/tower/tower --train_dataset runs/data/*

It learns the categories in images by region and patch, and the answers to yes/no questions that the datasets ask
often. Datasets are folders of make_dataset.py, best one for each source. The same command resumes a stopped run from
its last checkpoint. Every `--eval_steps` and at the end the averaged weights are evaluated: `tower/` and `report.md`
are written.
"""

import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path


# Keep freed memory for the next step: returning it to the system and allocating it again takes 20 % of a step. glibc
# reads these variables at program start, so the program restarts itself once.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "30000000000"}
if __name__ == "__main__" and not ALLOCATOR.keys() <= os.environ.keys():
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)

import torch  # noqa: E402
from datasets import concatenate_datasets  # noqa: E402
from transformers import AutoModel, TrainingArguments  # noqa: E402

from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig  # noqa: E402
from traffic_vlm.data.dataset import Mixture  # noqa: E402
from traffic_vlm.evaluation.markdown import table  # noqa: E402
from traffic_vlm.evaluation.metrics import auc, balanced_accuracy, by_group  # noqa: E402
from traffic_vlm.files import atomic_write_text  # noqa: E402
from traffic_vlm.options import option, option_parser  # noqa: E402
from traffic_vlm.training.auxiliary.head import QueryHead, load_training_head  # noqa: E402
from traffic_vlm.training.frames import TowerImages, find_facts, load_frames  # noqa: E402
from traffic_vlm.training.resume import claim_run, last_checkpoint  # noqa: E402
from traffic_vlm.training.tower import (  # noqa: E402
    TowerModel,
    TowerTrainer,
    answer_presence,
    is_tower_folder,
    load_tower,
    save_tower,
)
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel  # noqa: E402


ROOT = Path(__file__).parents[1]
CONSTANT_FRACTION = 0.3  # of the run with a constant learning rate, before it falls linearly to 0
SAME = ("batch_size", "seed", "train_dataset", "start_from", "neck", "neck_width", "neck_layers")  # in a resumed run
FIGURES = {"balanced accuracy": balanced_accuracy, "AUC": auc, "answers": len}


@dataclass
class Options:
    train_dataset: list[str] = field(metadata={"help": "folders of make_dataset.py"})
    eval_dataset: list[str] = field(metadata={"help": "folders of images for evaluation"})
    train_weights: list[float] | None = option(
        None, "sampling weight of each train_dataset; default: the square root of its number of images"
    )
    output_dir: Path = option(Path("runs/tower"), "checkpoints, report.md and tower/ are written here")
    start_from: str = option(
        str(ROOT),
        "a folder tower/ or a model whose tower is trained further; with another neck only the model's convolutions "
        "are kept",
    )
    images: int = option(64_000, "images until the learning rate reaches 0")
    small_fraction: float = option(0.6, "fraction of the run, at its start, with images of 192 pixels in place of 256")
    batch_size: int = option(32, "images per step")
    learning_rate: float = option(1e-3, "learning rate of untrained parts")
    tower_learning_rate: float = option(3e-4, "learning rate of already trained parts")
    neck: str = option("depthwise", "type of the neck's layers: depthwise or transformer")
    neck_width: int = option(384, "width of the neck's layers")
    neck_layers: int = option(2, "number of the neck's layers")
    seed: int = option(0, "seed of images and new weights")
    num_workers: int = option(1, "processes that prepare batches")
    save_steps: int = option(200, "steps between two checkpoints")
    eval_steps: int = option(1000, "steps between two evaluations")

    def __post_init__(self) -> None:
        for name in ("images", "batch_size", "num_workers", "learning_rate", "tower_learning_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.small_fraction <= 1:
            raise ValueError(f"--small_fraction must be in 0..1, got {self.small_fraction}")


def make_model(options: Options, num_sources: int, num_facts: int) -> tuple[TowerModel, set[str]]:
    """The model to train, and the names of its untrained parts.

    Its tower is that of a folder `tower/` or of a model, or has the convolutions of a model and a new neck.
    """
    torch.manual_seed(options.seed)
    if is_tower_folder(options.start_from):
        parts = load_tower(Path(options.start_from))
        return TowerModel(parts["tower"], parts["head"], num_sources, num_facts), set()
    known = AutoModel.from_pretrained(options.start_from, trust_remote_code=True, dtype=torch.float32)
    tower, head = known.model.vision_tower.requires_grad_(True), load_training_head(options.start_from)
    neck = {
        "neck": options.neck,
        "neck_width": options.neck_width,
        "num_hidden_layers": options.neck_layers,
        "intermediate_size": 4 * options.neck_width,
    }
    new = {"head"} if head is None else set()
    if any(getattr(tower.config, name) != value for name, value in neck.items()):
        convolutions, tower = tower.convolutions, TrafficVLMVisionModel(TrafficVLMVisionConfig(**neck))
        tower.convolutions.load_state_dict(convolutions.state_dict())
        head, new = None, {"head", *(name for name, _ in tower.named_children())} - {"convolutions"}
    return TowerModel(tower, head or QueryHead(tower.config.hidden_size), num_sources, num_facts), new


def train(options: Options) -> None:
    parts = [load_frames(folder) for folder in options.train_dataset]
    held = concatenate_datasets([load_frames(folder) for folder in options.eval_dataset])
    facts = find_facts(pair for rows in parts for pair in zip(rows["question_ids"], rows["answers"]))
    sources = sorted({name for rows in parts for name in rows.unique("source")})
    weights = options.train_weights or [len(rows) ** 0.5 for rows in parts]
    mixture = Mixture(parts, weights, options.images, options.seed)
    steps = math.ceil(options.images / options.batch_size)
    images = TowerImages(mixture, sources, facts, int(options.small_fraction * steps) * options.batch_size)
    output = options.output_dir
    # `images` may change, to train for longer.
    claim_run(output, {name: getattr(options, name) for name in SAME} | {"facts": facts})
    model, new_parts = make_model(options, len(sources), len(facts))

    def evaluate(model: TowerModel) -> dict[str, float]:
        answers = answer_presence(model, held)
        tables = [by_group(answers, FIGURES, name) for name in ("source", "category")]
        text = "\n\n".join(table(one.index.name or "", one.to_dict("index")) for one in tables)
        boxed = answers[~answers["category"].str.contains(":")]  # without weather, time of day, road, traffic, view
        found = {"balanced_accuracy": balanced_accuracy(answers), "presence": balanced_accuracy(boxed)}
        found["auc"] = auc(answers)
        atomic_write_text(output / "report.md", text + "\n")
        save_tower(model, output / "tower")
        return {name: value for name, value in found.items() if value is not None}

    arguments = TrainingArguments(
        str(output),
        max_steps=steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        weight_decay=0.05,
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
        report_to="none",
    )
    data = {"train_dataset": images, "eval_dataset": held}
    trainer = TowerTrainer(model, arguments, new_parts, options.tower_learning_rate, evaluate, **data)
    checkpoint = last_checkpoint(output)
    if checkpoint is not None:
        print(f"resuming from {checkpoint.name.replace('checkpoint-', 'step ')} of {steps}")
        trainer.average.load(checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    print(trainer.evaluate())


def main() -> None:
    try:
        [options] = option_parser([Options], __doc__).parse_args_into_dataclasses()
        train(options)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

"""Train the vision tower without a decoder, or apply one to a folder of images.

    python scripts/train_tower.py --train_dataset runs/data/* --eval_dataset runs/dev/* --output_dir runs/tower
    python scripts/train_tower.py --predict FOLDER --tower runs/tower/tower --output answers.parquet

It learns the categories in images by region and patch, and the answers to yes/no questions that the datasets ask
often. Datasets are folders of make_dataset.py. The same command resumes a stopped run from its last checkpoint. Every
`--eval_steps` and at the end the averaged weights are evaluated: `log.md` in the output folder gets a line, and
`tower/`, `judged.json`, `table.md` and `worst.png` are written.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


# Keep freed memory for the next step: returning it to the system and allocating it again takes 20 % of a step. glibc
# reads these variables at program start, so the program restarts itself once.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "30000000000"}
if __name__ == "__main__" and not ALLOCATOR.keys() <= os.environ.keys():
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)

import torch  # noqa: E402
from transformers import AutoModel, TrainingArguments  # noqa: E402

from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig  # noqa: E402
from traffic_vlm.data.presence import CATEGORIES, REGIONS  # noqa: E402
from traffic_vlm.files import DataError, atomic_write, atomic_write_text, check_file  # noqa: E402
from traffic_vlm.image_files import select_files  # noqa: E402
from traffic_vlm.options import option_parser  # noqa: E402
from traffic_vlm.training.auxiliary.head import QueryHead, load_training_head  # noqa: E402
from traffic_vlm.training.frames import FrameBatches, decode, load_frames  # noqa: E402
from traffic_vlm.training.resume import check_same_run, last_checkpoint  # noqa: E402
from traffic_vlm.training.tower import (  # noqa: E402
    TowerModel,
    TowerSchedule,
    TowerTrainer,
    is_tower_folder,
    load_tower,
    predict,
    save_tower,
)
from traffic_vlm.training.tower_report import draw_worst, frame_targets, presence_metrics, table  # noqa: E402
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel  # noqa: E402


ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WEIGHT_DECAY = 0.05
SAME = ("batch_size", "seed", "train_dataset", "start_from", "neck", "neck_width", "neck_layers")  # in a resumed run
CHUNK = 512  # images per written part


@dataclass
class Options:
    train_dataset: list[str] = field(
        default_factory=list, metadata={"help": "folders of make_dataset.py, photographs and rendered scenes"}
    )
    eval_dataset: list[str] = field(default_factory=list, metadata={"help": "folders of images for evaluation"})
    output_dir: str = field(default="runs/tower", metadata={"help": "checkpoint, log and tower/ are written here"})
    start_from: str = field(
        default=str(ROOT),
        metadata={
            "help": "a folder tower/ or a model whose tower is trained further; with another neck only the model's "
            "convolutions are kept"
        },
    )
    images: int = field(default=64_000, metadata={"help": "images until the learning rate reaches 0"})
    batch_size: int = field(default=32, metadata={"help": "images per step"})
    learning_rate: float = field(default=1e-3, metadata={"help": "learning rate of untrained parts"})
    tower_learning_rate: float = field(default=3e-4, metadata={"help": "learning rate of already trained parts"})
    neck: str = field(default="depthwise", metadata={"help": "type of the neck's layers: depthwise or transformer"})
    neck_width: int = field(default=384, metadata={"help": "width of the neck's layers"})
    neck_layers: int = field(default=2, metadata={"help": "number of the neck's layers"})
    source_weights: str = field(
        default="{}",
        metadata={"help": 'JSON {"source": sampling weight}; default: the square root of its number of images'},
    )
    sizes: str = field(
        default="[[192, 0.6], [256, 1.0]]",
        metadata={"help": "JSON list of [side of the images in pixels, fraction of the run at which it ends]"},
    )
    seed: int = field(default=0, metadata={"help": "seed of batches and new weights"})
    num_workers: int = field(default=1, metadata={"help": "processes that prepare batches"})
    save_steps: int = field(default=200, metadata={"help": "steps between two checkpoints"})
    eval_steps: int = field(default=1000, metadata={"help": "steps between two evaluations"})
    cache_dir: str | None = field(
        default=None, metadata={"help": "folder for decoded images; default: OUTPUT_DIR/cache"}
    )
    predict: str | None = field(
        default=None, metadata={"help": "folder of images to apply a tower to, instead of training"}
    )
    tower: str = field(default=str(ROOT / "tower"), metadata={"help": "tower to apply with --predict"})
    output: str = field(default="predictions.parquet", metadata={"help": "file that --predict writes"})


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


def read_sizes(text: str) -> list[tuple[int, float]]:
    """Parse --sizes. Raises DataError unless sides are multiples of 32 up to 256 and fractions rise to 1."""
    try:
        sizes = [(int(side), float(end)) for side, end in json.loads(text)]
        ends = [end for _, end in sizes]
        if not sizes or ends != sorted(set(ends)) or ends[0] <= 0 or ends[-1] != 1:
            raise ValueError("the fractions must rise to 1")
        if any(side % 32 or not 0 < side <= 256 for side, _ in sizes):
            raise ValueError("sides must be multiples of 32, at most 256")
    except (ValueError, TypeError) as error:
        raise DataError(f"--sizes must be JSON such as [[128, 0.8], [224, 1.0]], got {text!r}: {error}") from error
    return sizes


def read_source_weights(text: str, sources: Iterable[str]) -> dict[str, float]:
    """Parse --source_weights. Raises DataError unless it maps sources of the datasets to positive numbers."""
    try:
        source_weights = {source: float(weight) for source, weight in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f'--source_weights must be JSON such as {{"highway": 40}}, got {text!r}') from error
    if unknown := source_weights.keys() - set(sources):
        raise DataError(
            f"--source_weights has unknown sources {sorted(unknown)}; expected some of {', '.join(sources)}"
        )
    if not all(0 < weight < float("inf") for weight in source_weights.values()):
        raise DataError(f"--source_weights must be positive numbers, got {text}")
    return source_weights


def train(options: Options) -> None:
    if options.num_workers < 1:
        raise DataError(f"--num_workers must be at least 1, got {options.num_workers}")
    if min(options.learning_rate, options.tower_learning_rate) <= 0:
        raise DataError("--learning_rate and --tower_learning_rate must be positive")
    if not options.train_dataset or not options.eval_dataset:
        raise DataError("pass --train_dataset and --eval_dataset, or --predict, a folder of images")
    output = Path(options.output_dir)
    cache = Path(options.cache_dir or output / "cache")
    output.mkdir(parents=True, exist_ok=True)
    frames = load_frames(options.train_dataset, cache / "train")
    held = load_frames(options.eval_dataset, cache / "eval")
    truth = frame_targets(held)
    sizes = Counter(frames.sources)
    source_weights = {source: number**0.5 for source, number in sorted(sizes.items())}
    source_weights |= read_source_weights(options.source_weights, source_weights)
    schedule = TowerSchedule(options.images, options.batch_size, sizes=read_sizes(options.sizes))
    # `images` may change, as for a run that goes on for longer.
    check_same_run(output, {name: getattr(options, name) for name in SAME} | {"facts": list(frames.facts)})
    model, new_parts = make_model(options, len(source_weights), len(frames.facts))
    start = time.time()

    def report(model: TowerModel) -> dict[str, float]:
        answers = predict(model, held.pixels)
        figures = presence_metrics(answers, truth, held.sources)
        atomic_write_text(output / "judged.json", json.dumps(figures, indent=1))
        atomic_write_text(output / "table.md", table(figures["questions"]))
        draw_worst(answers, truth, held, output / "worst.png")
        print(f"not evaluated, with fewer than 10 yes or 10 no: {', '.join(figures['left_out'])}")
        save_tower(model, output / "tower")
        sources = ", ".join(f"{source} {value:.3f}" for source, value in figures["sources"].items())
        line = (
            f"| {trainer.state.global_step * options.batch_size:,} | {(time.time() - start) / 60:.0f} | "
            f"{figures['macro']:.3f} | {figures['presence']:.3f} | {figures['auc']:.3f} | {sources} |"
        )
        print(f"| images | minutes | macro | presence | AUC | by source |\n{line}", flush=True)
        with (output / "log.md").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return {name: figures[name] for name in ("macro", "presence", "auc")}

    arguments = TrainingArguments(
        options.output_dir,
        max_steps=schedule.steps,
        per_device_train_batch_size=1,  # a batch of `FrameBatches`
        learning_rate=options.learning_rate,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=1.0,
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
    batches = FrameBatches(frames, source_weights, options.batch_size, schedule.size_of, schedule.steps, options.seed)
    trainer = TowerTrainer(
        model,
        arguments,
        schedule,
        new_parts,
        options.tower_learning_rate,
        report,
        train_dataset=batches,
        eval_dataset=held,
    )
    checkpoint = last_checkpoint(output)
    if checkpoint is not None:
        print(f"resuming from {checkpoint.name.replace('checkpoint-', 'step ')} of {schedule.steps}")
        trainer.average.load(checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.evaluate()


def answer(options: Options) -> None:
    """Write image, category, region and P(yes) for every image in a folder and its subfolders."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, model = Path(options.predict or ""), load_tower(Path(options.tower)).to(DEVICE)
    if not folder.is_dir():
        raise DataError(f"--predict {folder}: the folder does not exist")
    names, note = select_files(sorted(map(str, folder.rglob("*"))), root=str(folder))
    if note:
        print(note, file=sys.stderr)
    paths = list(map(Path, names))
    schema = pa.schema(
        [("image", pa.string()), ("category", pa.string()), ("region", pa.string()), ("P", pa.float32())]
    )
    answered = 0
    with atomic_write(options.output) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for start in range(0, len(paths), CHUNK):
            names, pixels = [], []
            for path in paths[start : start + CHUNK]:
                try:
                    check_file(path, folder)
                    pixels.append(decode(path))
                    names.append(path.relative_to(folder).as_posix())
                except (ValueError, TypeError) as error:
                    print(f"skipped: {error}")
            if not names:
                continue
            p = predict(model, np.stack(pixels))
            columns = {
                "image": np.repeat(names, p[0].size),
                "category": np.tile(np.repeat(CATEGORIES, len(REGIONS)), len(names)),
                "region": np.tile(REGIONS, len(names) * len(CATEGORIES)),
                "P": p.ravel(),
            }
            writer.write_table(pa.table(columns, schema))
            answered += len(names)
            print(f"{start + len(names)} of {len(paths)} images", flush=True)
        if not answered:
            raise DataError(f"--predict {folder}: the folder has no readable image")
    print(f"{answered} images × {len(CATEGORIES) * len(REGIONS)} answers in {options.output}")


def main() -> None:
    [options] = option_parser([Options], __doc__).parse_args_into_dataclasses()
    try:
        answer(options) if options.predict else train(options)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

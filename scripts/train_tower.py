"""Train the vision tower without a decoder, or apply one to a folder of images.

    python scripts/train_tower.py --train_dataset runs/data/* --eval_dataset runs/dev/* --output_dir runs/tower
    python scripts/train_tower.py --predict FOLDER --tower runs/tower/tower --output answers.parquet

It learns the categories in images by region and patch, and the answers to yes/no questions that the datasets ask
often. Datasets are folders of make_dataset.py. The same command resumes a stopped run. Every half hour and at the
end the averaged weights are evaluated: `log.md` in the output folder gets a line, and `tower/`, `judged.json`,
`table.md` and `worst.png` are written.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


# Keep freed memory for the next step: returning it to the system and allocating it again takes 20 % of a step. glibc
# reads these variables at program start, so the program restarts itself once.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "30000000000"}
if __name__ == "__main__" and not ALLOCATOR.keys() <= os.environ.keys():
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)

import torch  # noqa: E402
from transformers import AutoModel  # noqa: E402

from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig  # noqa: E402
from traffic_vlm.data.presence import CATEGORIES, REGIONS  # noqa: E402
from traffic_vlm.files import DataError, atomic_write, atomic_write_text, check_file  # noqa: E402
from traffic_vlm.image_files import select_files  # noqa: E402
from traffic_vlm.options import option_parser  # noqa: E402
from traffic_vlm.training.frames import decode, load_frames  # noqa: E402
from traffic_vlm.training.head import QueryHead, load_training_head  # noqa: E402
from traffic_vlm.training.tower import (  # noqa: E402
    TowerOptions,
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
SAVE_SECONDS, EVALUATE_SECONDS, PRINT_STEPS = 300, 1800, 50
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
    cache_dir: str | None = field(
        default=None, metadata={"help": "folder for decoded images; default: OUTPUT_DIR/cache"}
    )
    predict: str | None = field(
        default=None, metadata={"help": "folder of images to apply a tower to, instead of training"}
    )
    tower: str = field(default=str(ROOT / "tower"), metadata={"help": "tower to apply with --predict"})
    output: str = field(default="predictions.parquet", metadata={"help": "file that --predict writes"})


def make_trainer(options: Options, sources: list[str], facts: Sequence[str]) -> TowerTrainer:
    """A trainer of the tower in a folder `tower/` or of a model, or of a model's convolutions with a new neck."""
    torch.manual_seed(options.seed)
    run = TowerOptions(
        options.images,
        options.batch_size,
        options.learning_rate,
        options.tower_learning_rate,
        sizes=read_sizes(options.sizes),
        seed=options.seed,
    )
    if is_tower_folder(options.start_from):
        model = load_tower(Path(options.start_from)).to(DEVICE)
        return TowerTrainer(model["tower"], model["head"], run, set(), sources, facts)
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
    return TowerTrainer(tower.to(DEVICE), head or QueryHead(tower.config.hidden_size), run, new, sources, facts)


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
    trainer = make_trainer(options, list(source_weights), frames.facts)
    checkpoint = output / "checkpoint.pt"
    if checkpoint.is_file():
        trainer.load(checkpoint)
        print(f"resuming from step {trainer.step} of {trainer.options.steps}")
    last = {"save": time.time(), "evaluate": time.time(), "print": time.time(), "waited": trainer.waited}

    def report() -> None:
        start = time.time()
        answers = predict(trainer.average, held.pixels)
        figures = presence_metrics(answers, truth, held.sources)
        atomic_write_text(output / "judged.json", json.dumps(figures, indent=1))
        atomic_write_text(output / "table.md", table(figures["questions"]))
        draw_worst(answers, truth, held, output / "worst.png")
        print(f"not evaluated, with fewer than 10 yes or 10 no: {', '.join(figures['left_out'])}")
        save_tower(trainer.average, output / "tower")
        sources = ", ".join(f"{source} {value:.3f}" for source, value in figures["sources"].items())
        line = (
            f"| {trainer.step * options.batch_size:,} | {trainer.seconds / 60:.0f} | {figures['macro']:.3f} | "
            f"{figures['presence']:.3f} | {figures['auc']:.3f} | {sources} |"
        )
        print(f"| images | minutes | macro | presence | AUC | by source |\n{line}", flush=True)
        with (output / "log.md").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        last["print"] += time.time() - start

    def every(trainer: TowerTrainer, losses: list[tuple[float, float, float]]) -> None:
        now = time.time()
        if trainer.step % PRINT_STEPS == 0:
            recent, seconds = losses[-PRINT_STEPS:], now - last["print"]
            region, patch, facts = (sum(column) / len(recent) for column in zip(*recent))
            print(
                f"step {trainer.step}/{trainer.options.steps}, size {trainer.options.size_of(trainer.step)}, "
                f"region {region:.4f}, patch {patch:.4f}, facts {facts:.4f}, "
                f"{len(recent) * options.batch_size / seconds:.1f} images/s, "
                f"waiting {(trainer.waited - last['waited']) / seconds:.1%}",
                flush=True,
            )
            last["print"], last["waited"] = now, trainer.waited
        if now - last["save"] > SAVE_SECONDS:
            trainer.save(checkpoint)
            last["save"] = now
        if now - last["evaluate"] > EVALUATE_SECONDS:
            report()
            last["evaluate"] = time.time()

    if trainer.step < trainer.options.steps:
        trainer.run(trainer.batches(frames, source_weights, options.num_workers), every)
        trainer.save(checkpoint)
        report()


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

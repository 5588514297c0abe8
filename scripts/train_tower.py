"""Train the vision tower on what is where in real images, or ask a trained one about a folder of images.

    python scripts/train_tower.py --data DATA --output_dir runs/tower --images 2000000
    python scripts/train_tower.py --data DATA --output_dir runs/try --images 960 --batch_size 16   # a minute on a CPU
    python scripts/train_tower.py --predict FOLDER --tower runs/tower/tower --output answers.parquet

The same command goes on where a run was stopped. DATA holds a folder for each source (see data/frames.py).
Every half hour and at the end the average of the weights is judged on held-back images: `log.md` in the output folder
gets a line, and `tower/`, `judged.json`, `table.md` and `worst.png` are written.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path


# Memory that was freed is kept for the next step: giving it back and taking it again costs a fifth of a step.
# glibc reads these when a program starts, so the program starts once more.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "30000000000"}
if __name__ == "__main__" and not ALLOCATOR.keys() <= os.environ.keys():
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)

import torch  # noqa: E402
from transformers import AutoModel, HfArgumentParser  # noqa: E402

from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig  # noqa: E402
from traffic_vlm.data.formats import IMAGE_SUFFIXES, Problems  # noqa: E402
from traffic_vlm.data.frames import SOURCES, decode, load_frames, read_frames  # noqa: E402
from traffic_vlm.data.presence import CATEGORIES, REGIONS  # noqa: E402
from traffic_vlm.evaluation.presence import draw_worst, judge, table  # noqa: E402
from traffic_vlm.training.tower import (  # noqa: E402
    QueryHead,
    TowerOptions,
    TowerTrainer,
    load_tower,
    predict,
    save_tower,
)
from traffic_vlm.utils import DataError, atomic_write_text  # noqa: E402
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel  # noqa: E402


ROOT = Path(__file__).parents[1]
SAVE_SECONDS, EVALUATE_SECONDS, PRINT_STEPS = 300, 1800, 50
CHUNK = 512  # images that are asked about at a time


@dataclass
class Options:
    data: str | None = field(default=None, metadata={"help": "folder with a folder for each source"})
    output_dir: str = field(default="runs/tower", metadata={"help": "checkpoint, log and tower/ are written here"})
    start_from: str = field(
        default=str(ROOT), metadata={"help": "a tower/ to go on from, or a model whose convolutions to start from"}
    )
    images: int = field(default=2_000_000, metadata={"help": "images until the learning rate reaches 0"})
    batch_size: int = field(default=48, metadata={"help": "images a step"})
    learning_rate: float = field(default=1e-3, metadata={"help": "of new parts"})
    tower_learning_rate: float = field(default=5e-4, metadata={"help": "of parts that know something"})
    neck: str = field(default="depthwise", metadata={"help": "layers on the tokens: depthwise or transformer"})
    neck_width: int = field(default=384, metadata={"help": "width of these layers"})
    neck_layers: int = field(default=2, metadata={"help": "their number"})
    shares: str = field(
        default="{}", metadata={"help": 'JSON {"source": share}; others have the root of their number of images'}
    )
    seed: int = field(default=0, metadata={"help": "of batches and new weights"})
    cache_dir: str | None = field(default=None, metadata={"help": "decoded images; default: OUTPUT_DIR/cache"})
    predict: str | None = field(default=None, metadata={"help": "folder of images to ask about, instead of training"})
    tower: str = field(default=str(ROOT / "tower"), metadata={"help": "for --predict"})
    output: str = field(default="predictions.parquet", metadata={"help": "for --predict"})


def make_trainer(options: Options, sources: list[str]) -> TowerTrainer:
    """A tower that starts from a `tower/` as it is, or from the convolutions of a model with a new neck."""
    torch.manual_seed(options.seed)
    run = TowerOptions(
        options.images, options.batch_size, options.learning_rate, options.tower_learning_rate, seed=options.seed
    )
    if (Path(options.start_from) / "categories.json").is_file():
        model = load_tower(Path(options.start_from))
        return TowerTrainer(model["tower"], model["head"], run, set(), sources)
    known = AutoModel.from_pretrained(options.start_from, trust_remote_code=True, dtype=torch.float32)
    config = TrafficVLMVisionConfig(
        neck=options.neck,
        neck_width=options.neck_width,
        num_hidden_layers=options.neck_layers,
        intermediate_size=4 * options.neck_width,
    )
    tower = TrafficVLMVisionModel(config)
    tower.convolutions.load_state_dict(known.model.vision_tower.convolutions.state_dict())
    new = {name for name, _ in tower.named_children()} - {"convolutions"}
    return TowerTrainer(tower, QueryHead(config.hidden_size), run, new, sources)


def read_shares(text: str) -> dict[str, float]:
    """The shares of --shares. Raises DataError where they are not positive numbers of known sources."""
    try:
        shares = {source: float(share) for source, share in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f'--shares must be JSON such as {{"highway": 40}}, got {text!r}') from error
    if unknown := shares.keys() - SOURCES.keys():
        raise DataError(f"--shares names unknown sources {sorted(unknown)}; known are {', '.join(SOURCES)}")
    if not all(0 < share < float("inf") for share in shares.values()):
        raise DataError(f"--shares must be positive numbers, got {text}")
    return shares


def train(options: Options) -> None:
    if options.data is None:
        raise DataError("give --data, a folder with a folder for each source, or --predict, a folder of images")
    output, problems, given = Path(options.output_dir), Problems(), read_shares(options.shares)
    cache = Path(options.cache_dir or output / "cache")
    output.mkdir(parents=True, exist_ok=True)
    frames, pixels = load_frames(read_frames(options.data, False, problems), cache / "train", problems)
    held, held_pixels = load_frames(read_frames(options.data, True, problems), cache / "development", problems)
    for message in problems.messages:
        print(f"skipped: {message}")
    if problems.counts:
        print("skipped:", ", ".join(f"{number} × {kind}" for kind, number in problems.counts.items()))
    sizes = {source: sum(frame.source == source for frame in frames) for source in SOURCES}
    shares = {source: given.get(source, number**0.5) for source, number in sizes.items() if number}
    trainer = make_trainer(options, list(shares))
    checkpoint = output / "checkpoint.pt"
    if checkpoint.is_file():
        trainer.load(checkpoint)
        print(f"going on from step {trainer.step} of {trainer.options.steps}")
    last = {"save": time.time(), "evaluate": time.time(), "print": time.time(), "waited": trainer.waited}

    def report() -> None:
        start = time.time()
        answers = predict(trainer.average, held_pixels)
        figures = judge(answers, held)
        atomic_write_text(output / "judged.json", json.dumps(figures, indent=1))
        atomic_write_text(output / "table.md", table(figures["questions"]))
        draw_worst(answers, held, held_pixels, output / "worst.png")
        print(f"left out, with fewer than 10 yes or 10 no: {', '.join(figures['left_out'])}")
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

    def every(trainer: TowerTrainer, losses: list[tuple[float, float]]) -> None:
        now = time.time()
        if trainer.step % PRINT_STEPS == 0:
            recent, seconds = losses[-PRINT_STEPS:], now - last["print"]
            region, patch = (sum(column) / len(recent) for column in zip(*recent))
            print(
                f"step {trainer.step}/{trainer.options.steps}, size {trainer.options.size_of(trainer.step)}, "
                f"region {region:.4f}, patch {patch:.4f}, {len(recent) * options.batch_size / seconds:.1f} images/s, "
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
        trainer.run(trainer.batches(frames, pixels, shares), every)
        trainer.save(checkpoint)
        report()


def answer(options: Options) -> None:
    """Write image, category, region and P for every image below a folder."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, model = Path(options.predict or ""), load_tower(Path(options.tower))
    if not folder.is_dir():
        raise DataError(f"--predict {folder}: there is no such folder")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    schema = pa.schema(
        [("image", pa.string()), ("category", pa.string()), ("region", pa.string()), ("P", pa.float32())]
    )
    temporary, answered = Path(f"{options.output}.tmp"), 0
    temporary.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(temporary, schema) as writer:
        for start in range(0, len(paths), CHUNK):
            names, pixels = [], []
            for path in paths[start : start + CHUNK]:
                try:
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
        temporary.unlink()
        raise DataError(f"--predict {folder}: no image in it can be read")
    os.replace(temporary, options.output)
    print(f"{answered} images × {len(CATEGORIES) * len(REGIONS)} answers in {options.output}")


def main() -> None:
    [options] = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    try:
        answer(options) if options.predict else train(options)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

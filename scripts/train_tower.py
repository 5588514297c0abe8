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
from traffic_vlm.data.frames import SOURCES, decode, load_frames, read_frames  # noqa: E402
from traffic_vlm.data.presence import CATEGORIES, REGIONS  # noqa: E402
from traffic_vlm.data.readers import IMAGE_SUFFIXES, DataError, Problems  # noqa: E402
from traffic_vlm.evaluation.presence import draw_worst, judge, table  # noqa: E402
from traffic_vlm.training.tower import (  # noqa: E402
    QueryHead,
    TowerOptions,
    TowerTrainer,
    load_tower,
    predict,
    save_tower,
)
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel  # noqa: E402


ROOT = Path(__file__).parents[1]
SAVE_SECONDS, EVALUATE_SECONDS, PRINT_STEPS = 300, 1800, 50


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
    shares: str = field(default="{}", metadata={"help": 'JSON {"source": share}; the default is the root of its size'})
    seed: int = field(default=0, metadata={"help": "of batches and new weights"})
    cache_dir: str | None = field(default=None, metadata={"help": "decoded images; default: OUTPUT_DIR/cache"})
    predict: str | None = field(default=None, metadata={"help": "folder of images to ask about, instead of training"})
    tower: str = field(default=str(ROOT / "tower"), metadata={"help": "for --predict"})
    output: str = field(default="predictions.parquet", metadata={"help": "for --predict"})


def make_trainer(options: Options, num_sources: int) -> TowerTrainer:
    """A tower that starts from a `tower/` as it is, or from the convolutions of a model with a new neck."""
    torch.manual_seed(options.seed)
    run = TowerOptions(
        options.images, options.batch_size, options.learning_rate, options.tower_learning_rate, seed=options.seed
    )
    if (Path(options.start_from) / "categories.json").is_file():
        model = load_tower(Path(options.start_from))
        return TowerTrainer(model["tower"], model["head"], run, set(), num_sources)
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
    return TowerTrainer(tower, QueryHead(config.hidden_size), run, new, num_sources)


def train(options: Options) -> None:
    output, problems = Path(options.output_dir), Problems()
    cache = Path(options.cache_dir or output / "cache")
    output.mkdir(parents=True, exist_ok=True)
    frames, pixels = load_frames(read_frames(options.data or "", False, problems), cache / "train", problems)
    held, held_pixels = load_frames(read_frames(options.data or "", True, problems), cache / "development", problems)
    for message in problems.messages:
        print(f"skipped: {message}")
    if problems.counts:
        print("skipped:", ", ".join(f"{number} × {kind}" for kind, number in problems.counts.items()))
    sizes = {source: sum(frame.source == source for frame in frames) for source in SOURCES}
    shares = {source: number**0.5 for source, number in sizes.items() if number} | json.loads(options.shares)
    if unknown := shares.keys() - SOURCES.keys():
        raise DataError(f"--shares names unknown sources {sorted(unknown)}; known are {', '.join(SOURCES)}")
    trainer = make_trainer(options, len(shares))
    checkpoint = output / "checkpoint.pt"
    if checkpoint.is_file():
        trainer.load(checkpoint)
        print(f"going on from step {trainer.step} of {trainer.options.steps}")
    last = {"save": time.time(), "evaluate": time.time(), "print": time.time(), "waited": trainer.waited}

    def report() -> None:
        answers = predict(trainer.average, held_pixels)
        figures = judge(answers, held)
        (output / "judged.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
        (output / "table.md").write_text(table(figures["questions"]), encoding="utf-8")
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
            last["evaluate"] = last["print"] = time.time()

    trainer.run(trainer.batches(frames, pixels, shares), every)
    trainer.save(checkpoint)
    report()


def answer(options: Options) -> None:
    """Write image, category, region and P for every image below a folder."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, names, pixels = Path(options.predict or ""), [], []
    if not folder.is_dir():
        raise DataError(f"--predict {folder}: there is no such folder")
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES):
        try:
            pixels.append(decode(path))
            names.append(path.relative_to(folder).as_posix())
        except ValueError as error:
            print(f"skipped: {error}")
    if not names:
        raise DataError(f"--predict {folder}: no image in it can be read")
    p = predict(load_tower(Path(options.tower)), np.stack(pixels))
    columns = {
        "image": np.repeat(names, p[0].size),
        "category": np.tile(np.repeat(CATEGORIES, len(REGIONS)), len(names)),
        "region": np.tile(REGIONS, len(names) * len(CATEGORIES)),
        "P": p.ravel(),
    }
    temporary = f"{options.output}.tmp"
    pq.write_table(pa.table(columns), temporary)
    os.replace(temporary, options.output)
    print(f"{len(names)} images × {p[0].size} answers in {options.output}")


def main() -> None:
    [options] = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    try:
        answer(options) if options.predict else train(options)
    except (DataError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

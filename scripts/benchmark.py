"""Measure the speed and memory of this model beside models of the same size that are built otherwise.

    python scripts/benchmark.py --output_dir runs/benchmark --quick    # tiny models, minutes: to see that it runs
    python scripts/benchmark.py --output_dir runs/benchmark            # CPU, and GPU if there is one; float32 and bf16
    python scripts/benchmark.py --output_dir runs/benchmark --device cpu --dtype bfloat16 --only questions train

Writes report.json and report.md after every part, so that a run that was stopped leaves what it found, and pictures.
No weights are needed: all models are random. Let nothing else run meanwhile. The parts:

    questions, images   yes/no questions about one image, and about a batch of them
    generate, compiled  words, in the plain way and with a static cache and a compiled step
    onnx                yes/no questions by the exported graphs, on a CPU in float32
    train, load         a training step, from_pretrained
    memory              the most that each of these takes, in processes of their own
    cached, cache_bytes what our cache saves, and how large it is
    split, rate         where our time goes, and how near it is to what the machine can do
    growth              how our cost grows with questions and images
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import HfArgumentParser
from transformers.utils import logging

from traffic_vlm.benchmark.contestants import TINY_SIZES, Setup, Sizes
from traffic_vlm.benchmark.parts import PARTS, Bench
from traffic_vlm.benchmark.plots import draw
from traffic_vlm.benchmark.report import environment, goals_table, judge, to_markdown
from traffic_vlm.benchmark.works import TINY_AMOUNTS, Amounts
from traffic_vlm.utils import atomic_write_text


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Arguments:
    output_dir: Path = field(metadata={"help": "folder to write to"})
    only: list[str] | None = field(default=None, metadata={"help": f"parts to do, of {', '.join(PARTS)}"})
    device: list[str] | None = field(default=None, metadata={"help": "cpu, cuda or both; by default what there is"})
    dtype: list[str] = field(default_factory=lambda: list(DTYPES), metadata={"help": "float32, bfloat16 or both"})
    repeats: int = field(default=11, metadata={"help": "rounds of each comparison"})
    max_seconds: float = field(default=60.0, metadata={"help": "begin no round of a comparison later, but at least 3"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads; by default torch's own choice"})
    processor: str = field(default=".", metadata={"help": "folder of the model repository"})
    quick: bool = field(default=False, metadata={"help": "tiny models and few rounds, to see that it runs"})

    def __post_init__(self) -> None:
        self.only = list(PARTS) if self.only is None else self.only
        self.device = self.device or (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
        for name, known in (("only", PARTS), ("dtype", DTYPES), ("device", ("cpu", "cuda"))):
            if unknown := [value for value in getattr(self, name) if value not in known]:
                raise SystemExit(f"--{name} must be of {', '.join(known)}, got {' '.join(unknown)}")
        if "cuda" in self.device and not torch.cuda.is_available():
            raise SystemExit("--device cuda: torch finds no GPU")
        for name, least in (("repeats", 1), ("threads", 1), ("max_seconds", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SystemExit(f"--{name} must be at least {least}, got {value}")
        if not (Path(self.processor) / "tokenizer.json").is_file():
            raise SystemExit(f"--processor must be the folder of the model repository, got {self.processor!r}")


def benchmark(arguments: Arguments) -> dict[str, Any]:
    """All parts in all settings; the report is written after each part."""
    sizes, amounts = (TINY_SIZES, TINY_AMOUNTS) if arguments.quick else (Sizes(), Amounts())
    rounds = min(arguments.repeats, 3) if arguments.quick else arguments.repeats
    options = asdict(arguments) | {"output_dir": str(arguments.output_dir)}
    report: dict[str, Any] = {"environment": environment(), "options": options, "sizes": asdict(sizes), "settings": {}}
    setups = [
        Setup(arguments.processor, device, DTYPES[dtype], sizes)
        for device in arguments.device or []
        for dtype in arguments.dtype
    ]
    names = [name for name in PARTS if name in (arguments.only or [])]
    with tqdm(total=len(setups) * len(names), unit="part") as bar:
        for setup in setups:

            def say(title: str, setup: Setup = setup) -> None:
                bar.set_description(f"{setup.name}, {title}")

            bench = Bench(setup, amounts, rounds, arguments.max_seconds, say)
            figures: dict[str, Any] = {"amounts": asdict(amounts)}
            for name in names:
                figures[name] = PARTS[name](bench)
                report["settings"][setup.name] = {"goals": judge(figures), "figures": figures}
                write(report, arguments.output_dir)
                bar.update()
            write(report, arguments.output_dir, draw(report, arguments.output_dir))
            bar.write(f"{setup.name}\n{goals_table(report['settings'][setup.name]['goals'])}\n")
    return report


def write(report: dict[str, Any], folder: Path, pictures: Sequence[Path] = ()) -> None:
    atomic_write_text(folder / "report.json", json.dumps(report, indent=1, allow_nan=False))
    shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in pictures)
    atomic_write_text(folder / "report.md", to_markdown(report) + shown)


def main() -> None:
    arguments = Arguments(**vars(HfArgumentParser(Arguments).parse_args()))
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # ours counts parts
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if (arguments.output_dir / "report.json").exists():
        sys.exit(f"{arguments.output_dir} holds a report already; choose another --output_dir")
    try:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        benchmark(arguments)
    except (OSError, RuntimeError, MemoryError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; {arguments.output_dir} holds what was measured")
    print(f"wrote {arguments.output_dir / 'report.md'}, report.json and pictures")


if __name__ == "__main__":
    main()

"""Measure CUDA graphs on a GPU, against PaliGemma plain and compiled, in at most eight minutes.

    python scripts/benchmark_gpu.py                                 # with the weights of this folder, in bfloat16
    python scripts/benchmark_gpu.py --device cpu --images 2 --tokens 4 --stages equal plain   # only tries itself

Each stage is a process with a time limit, because an error on a GPU ends the use of it by a process:

    equal      answers of recorded passes and of the model itself, what they wait for, and their GPU operations
    compile    the same with passes that torch has compiled
    plain      times of Traffic VLM, plain and with graphs, and of PaliGemma
    ours       times of Traffic VLM with compiled graphs
    peer       times of PaliGemma compiled as its users do, torch.compile(mode="reduce-overhead")
    attention  which other implementations of attention run, and how their answers differ

Results are printed as they come, and at the end as a table: milliseconds, and the time of each PaliGemma divided by
that of Traffic VLM.
"""

import argparse
import copy
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile

from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.scripts.benchmark import OPEN_QUESTION, PaliGemma, TrafficVLM, generate_run, make_questions


ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"equal": 60, "compile": 100, "plain": 60, "ours": 60, "peer": 160, "attention": 40}  # seconds
TOLERANCE = 1e-2  # of P(yes) in bfloat16


class Bench:
    """The models, inputs and results of a stage."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.is_cuda = options, options.device == "cuda"
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        placement: dict[str, Any] = {"device": options.device, "dtype": self.dtype}
        config = TrafficVLMConfig.from_pretrained(options.model)
        self.processor = TrafficVLMProcessor.from_pretrained(options.model)
        self.ours = TrafficVLM(config, self.processor, **placement)
        if (options.model / "model.safetensors").is_file():
            loaded = TrafficVLMForConditionalGeneration.from_pretrained(options.model, dtype=self.dtype)
            self.ours.model = loaded.to(options.device).eval()
        self.peer = PaliGemma(TrafficVLMConfig(), self.processor, **placement)
        pictures = [Image.open(path) for path in sorted((ROOT / "docs").glob("*.jpg"))]
        pixels = self.processor(images=pictures, return_tensors="pt")["pixel_values"].to(**placement)
        self.pixels = pixels[torch.arange(options.images) % len(pixels)]

    @property
    def workloads(self) -> dict[str, tuple[int, int]]:
        """Numbers of images and of questions about each."""
        images = self.options.images
        return {"1 question": (1, 1), "16 questions": (1, 16), f"{images} images × 16 questions": (images, 16)}

    @property
    def text_title(self) -> str:
        return f"{self.options.tokens} tokens"

    def prepared(self, kind: str) -> TrafficVLM:
        """Traffic VLM as "plain", with "graphs", or with "compiled graphs"."""
        ours = copy.copy(self.ours)
        ours.model = copy.deepcopy(ours.model)
        if kind != "plain":
            ours.model.fuse_for_inference(compile=kind == "compiled graphs")
            ours.model.graphs.devices = (self.options.device,)
        return ours

    def report(self, name: str, value: Any) -> None:
        with self.options.output.open("a") as file:
            file.write(json.dumps([name, value]) + "\n")
        print(f"  {name}: {f'{value:.3f}' if isinstance(value, float) else value}", flush=True)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    @torch.no_grad()
    def measure(self, title: str, kind: str, run: Callable[[], Any]) -> None:
        """Report the median milliseconds of a run, each waited for, and the seconds of the first three."""
        begin = time.perf_counter()
        for _ in range(3):
            run()
        self.wait()
        times, start = [], time.perf_counter()
        while len(times) < 5 or time.perf_counter() < start + 0.5:
            last = time.perf_counter()
            run()
            self.wait()
            times.append(1e3 * (time.perf_counter() - last))
        self.report(f"{title} | {kind}", median(times))
        self.report(f"{title} | {kind}, seconds of the first runs", round(start - begin, 1))

    def measure_all(self, kind: str, model: Any, compiled: bool = False) -> None:
        for title, (images, count) in self.workloads.items():
            self.measure(title, kind, model.yes_no(self.pixels[:images], make_questions(count), compiled))
        prompt = model.prompt(self.pixels[:1], OPEN_QUESTION)
        self.measure(self.text_title, kind, generate_run(model.model, prompt, self.options.tokens, compiled))

    @torch.no_grad()
    def compare(self, kind: str) -> None:
        """Report how far recorded passes are from the model's own, beside the rounding of bfloat16 itself."""
        plain, recorded = self.prepared("plain"), self.prepared(kind)
        exact = copy.copy(plain)
        exact.model = copy.deepcopy(plain.model).float()
        for title, (images, count) in self.workloads.items():
            pixels, questions = self.pixels[:images], make_questions(count)
            for model in (plain, recorded):  # the last of three runs is recorded, the fourth is of other images
                for _ in range(3):
                    model.yes_no(pixels, questions)()
            for name, moved in (("", pixels), (", mirrored", pixels.flip(-1))):
                own, found = (one.yes_no(moved, questions)() for one in (plain, recorded))
                reference = exact.yes_no(moved.float(), questions)()
                difference, rounding = ((a - b).abs().max().item() for a, b in ((found, own), (own, reference)))
                verdict = "equal" if difference <= TOLERANCE else "DIFFERENT"
                text = f"{verdict}: P(yes) differs by {difference:.1e}; plain from float32 by {rounding:.1e}"
                self.report(f"{title}, {kind}{name}", text)
        prompt = plain.prompt(self.pixels[:1], OPEN_QUESTION)
        own, *_, found = (
            generate_run(model.model, prompt, self.options.tokens)()[0].tolist() for model in (plain, *[recorded] * 3)
        )
        self.report(f"{self.text_title}, {kind}", "equal" if own == found else f"DIFFERENT: {own} {found}")
        self.report(f"recorded, {kind}", [str(key) for key in recorded.model.graphs.passes])
        if self.is_cuda:
            self.count_operations(kind, recorded)

    def count_operations(self, kind: str, model: TrafficVLM) -> None:
        """Report the GPU operations of a run, and check that text and pixels on the CPU are asked without waiting."""
        run = model.yes_no(self.pixels[:1], make_questions(16))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
            self.wait()
        kernels = [one for one in profiler.events() if one.device_type == torch.autograd.DeviceType.CUDA]
        busy = sum(one.time_range.elapsed_us() for one in kernels)
        self.report(f"16 questions, {kind}", f"{len(kernels)} GPU operations, {busy / 1e3:.3f} ms")
        times: Counter[str] = Counter()
        for one in kernels:
            times[one.name[:80]] += one.time_range.elapsed_us()
        self.report(f"16 questions, {kind}, most µs", times.most_common(10))
        inputs = model.processor(text=[make_questions(16)], packed=True, on_unknown="ignore", return_tensors="pt")
        pixels = self.pixels[:1].cpu()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.model.score_yes_no(**inputs, pixel_values=pixels)
            self.report(f"waits, {kind}", "none")
        except RuntimeError as error:
            self.report(f"waits, {kind}", str(error))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @torch.no_grad()
    def try_attention(self) -> None:
        plain, inputs = self.prepared("plain"), self.processor(text="Is there a car?", return_tensors="pt")
        expected = plain.model.question_logits(**inputs, pixel_values=self.pixels[:1])[0]
        for name in ("eager", "flash_attention_2", "flash_attention_3", "flex_attention"):
            try:
                other = copy.deepcopy(plain.model)
                other.set_attn_implementation(name)
                found = other.question_logits(**inputs, pixel_values=self.pixels[:1])[0]
                difference = (found - expected)[:, 1:].abs().max().item()
                self.report(f"attention {name}", f"runs, logits differ by {difference:.1e}")
            except Exception as error:
                self.report(f"attention {name}", f"no: {type(error).__name__}: {str(error)[:120]}")

    def run(self, stage: str) -> None:
        if stage in ("equal", "compile"):
            self.compare("graphs" if stage == "equal" else "compiled graphs")
        elif stage == "plain":
            self.measure_all("Traffic VLM", self.prepared("plain"))
            self.measure_all("Traffic VLM, graphs", self.prepared("graphs"))
            self.measure_all("PaliGemma", self.peer)
        elif stage == "ours":
            self.measure_all("Traffic VLM, compiled graphs", self.prepared("compiled graphs"))
        elif stage == "peer":
            self.measure_all("PaliGemma, compiled", self.peer, compiled=True)
        else:
            self.try_attention()


def print_table(output: Path) -> None:
    """Print milliseconds by workload and model, and the ratios of each PaliGemma and each Traffic VLM."""
    results = dict(json.loads(line) for line in output.read_text().splitlines())
    times: dict[str, dict[str, float]] = {}
    for name, value in results.items():
        title, _, kind = name.partition(" | ")
        if isinstance(value, float) and kind and "seconds" not in kind:
            times.setdefault(title, {})[kind] = value
    print("\n| | milliseconds | ratios |\n| --- | --- | --- |")
    for title, row in times.items():
        ratios = [
            f"{peer} / {ours}: {row[peer] / row[ours]:.2f}"
            for peer in row
            if peer.startswith("PaliGemma")
            for ours in row
            if ours.startswith("Traffic VLM,")
        ]
        print(f"| {title} | {', '.join(f'{kind} {ms:.2f}' for kind, ms in row.items())} | {', '.join(ratios)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT, help="folder of the model; random weights without any")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("benchmark_gpu.jsonl"))
    parser.add_argument("--stages", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--within", action="store_true", help="run the stage in this process")
    options = parser.parse_args()
    if options.within:
        bench = Bench(options)
        for stage in options.stages:
            bench.run(stage)
        return
    options.output.write_text("")
    for stage in options.stages:
        limit = LIMITS[stage] if options.device == "cuda" else 600
        print(f"{stage}:", flush=True)
        arguments = [
            f"--{name}={getattr(options, name)}" for name in ("model", "device", "images", "tokens", "output")
        ]
        command = [sys.executable, "-P", __file__, *arguments, "--stages", stage, "--within"]
        try:
            code = subprocess.run(command, timeout=limit).returncode
            print(f"  ended with {code}" if code else "  done", flush=True)
        except subprocess.TimeoutExpired:
            print(f"  stopped after {limit} seconds", flush=True)
    print_table(options.output)


if __name__ == "__main__":
    main()

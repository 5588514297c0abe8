"""Measure Traffic VLM on this machine, speed and memory against PaliGemma of the same widths and depths.

    python scripts/benchmark.py speed                           # some minutes on 2 CPU cores
    python scripts/benchmark.py speed --dtype float32 --compiled true
    python scripts/benchmark.py speed --device cuda --images 64 --questions 16
    python scripts/benchmark.py speed --model . runs/latent     # also a folder of build_files.py with other sizes
    python scripts/benchmark.py memory --memory_gb 8            # of answers, and of training
    python scripts/benchmark.py data --dataset runs/mine        # training that is faster waits for its images
    python scripts/benchmark.py service --clients 100           # of a running scripts/serve.py

PaliGemma is the class of transformers: SigLIP vision tower, linear projector, and a Gemma decoder that has the 256
tokens of the image in its prompt. It has the widths and depths of the default configuration of Traffic VLM, whose own
sizes are those of --model. The weights of both are random. Traffic VLM encodes an image once and packs all questions
about it into one row; PaliGemma takes one row per question, each with the image, as its own processor arranges it, and
computes only the logits that are read.

The models take turns in one process, so a machine that becomes slower or faster affects all of them. Times are
medians, and the number in brackets is the time divided by that of the first model: above 1, the first one is faster.
Run nothing else meanwhile.
"""

import argparse
import base64
import copy
import json
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer
from transformers import CompileConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration

from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.options import option, option_parser
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.scripts import command


ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 5  # in which the models take turns
RESERVED_GB = 1.0  # of a GPU, for the CUDA context, kernels and workspace; assumed

# PaliGemma reads the token ids of Traffic VLM's processor, and these for what its own processor adds.
IMAGE, NEWLINE = 500, 501
PEER_VOCABULARY = 512
PEER_VISION_LAYERS = 3  # gives about as many parameters as Traffic VLM's default tower and cross-attention have
VISION_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "image_size", "patch_size")
TEXT_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
TEXT_FIELDS += ("num_hidden_layers", "pad_token_id", "bos_token_id", "eos_token_id")

CLASSES = (
    "car, bus, truck, van, taxi, bicycle, motorcycle, tram, train, pedestrian, cyclist, child, dog, crosswalk, "
    "barrier, trailer, traffic light, stop sign, police car, fire truck, traffic cone, speed limit sign"
).split(", ")
TEMPLATES = ["Is there a {}?", "Can you see a {}?", "Is there a {} on the left?", "Do you see a {} ahead?"]
TEMPLATES += ["Is a {} crossing the street?"]
OPEN_QUESTION = "What is ahead?"
SIDES = ("left", "right")
LONG_QUESTIONS = [f"Is there a car{' and a bus' * 34} on the {side}?" for side in SIDES * 32]  # 108 tokens each
QUESTIONS_IN_WORDS = [f"What is on the {side}?" for side in SIDES * 32]

Run = Callable[[], Any]  # does a workload once, with all inputs prepared


def check_minimum(options: Any, **minima: float) -> None:
    """Raise a ValueError for the first option, or element of a list, that is below its minimum."""
    for name, minimum in minima.items():
        value = getattr(options, name)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and not one >= minimum:
                raise ValueError(f"--{name} must be at least {minimum}, got {one}")


@dataclass
class ModelOptions:
    model: list[Path] = field(
        default_factory=lambda: [ROOT], metadata={"help": "folders with the sizes (config.json) of Traffic VLM"}
    )
    peer: Path | None = option(None, "folder with the sizes of PaliGemma; by default those of TrafficVLMConfig()")
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "bfloat16 is slow on a CPU without AVX-512 or AMX")
    threads: int | None = option(None, "CPU threads; by default torch's choice")

    def __post_init__(self) -> None:
        check_minimum(self, threads=1)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU")
        for folder in (*self.model, self.peer or ROOT):
            if not (folder / "config.json").is_file():
                raise ValueError(f"{folder}: there is no config.json")


@dataclass
class SpeedOptions(ModelOptions):
    images: int = option(1, "images of a pass")
    questions: list[int] = field(default_factory=lambda: [1, 4, 16, 64], metadata={"help": "questions about each"})
    new_tokens: int = option(32, "tokens to generate about one image")
    compiled: bool = option(False, "also compiled: PaliGemma, and generation by Traffic VLM")
    min_run_time: float = option(1.0, "seconds that each model is timed in each of 5 rounds")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, images=1, questions=1, new_tokens=1, min_run_time=0.001)


@dataclass
class MemoryOptions(ModelOptions):
    questions: int = option(16, "questions about an image")
    memory_gb: float = option(6.0, "memory of a GPU in GB (10^9 bytes), for the images of a training step")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, questions=1, memory_gb=RESERVED_GB)


@dataclass
class DataOptions:
    dataset: Path | None = option(None, "folder of make_dataset.py; by default scenes are drawn")
    model: Path = option(ROOT, "folder with the processor")
    num_images: int = option(512, "images to measure")
    batch_size: int = option(32, "images in a batch")
    num_workers: int = option(2, "processes that load; 0 loads in the main process")
    questions_per_image: int = option(16, "maximum number of questions about an image")

    def __post_init__(self) -> None:
        check_minimum(self, num_images=1, batch_size=1, num_workers=0, questions_per_image=1)


@dataclass
class ServiceOptions:
    url: str = "http://127.0.0.1:8000"
    image: Path = option(ROOT / "docs/example.jpg", "image to ask about")
    clients: int = option(100, "clients, each of which asks again as soon as it is answered")
    questions: int = option(4, "questions of their requests")
    long_callers: int = option(0, "more clients, with 64 questions of 108 tokens")
    in_words: bool = option(False, "the 64 questions are short, and answered in words")
    seconds: float = option(30.0, "time in which requests are sent")

    def __post_init__(self) -> None:
        check_minimum(self, clients=1, questions=1, long_callers=0, seconds=0)


# --- the models ---


class TrafficVLM:
    """The model of this repository: an image is encoded once, all questions about it are packed into one row."""

    def __init__(self, config: TrafficVLMConfig, processor: TrafficVLMProcessor, **placement: Any):
        self.model = with_random_weights(TrafficVLMForConditionalGeneration, config, **placement)
        self.processor = processor

    def prepare(self) -> None:
        """Change the model for inference as the pipeline does."""
        self.model.fuse_for_inference()

    def inputs(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> dict[str, torch.Tensor]:
        text = [list(questions)] * len(pixel_values)
        packed = self.processor(text=text, packed=True, on_unknown="ignore", return_tensors="pt")
        return {**packed.to(self.model.device), "pixel_values": pixel_values}

    def yes_no(self, pixel_values: torch.Tensor, questions: Sequence[str], compiled: bool = False) -> Run | None:
        """A run that returns P(yes) [I·N] of N questions about each image [I,3,H,W]; there is no compiled one."""
        inputs = self.inputs(pixel_values, questions)
        return None if compiled else lambda: torch.cat(self.model.score_yes_no(**inputs))

    def prompt(self, pixel_values: torch.Tensor, question: str) -> dict[str, torch.Tensor]:
        """Inputs of `generate` for one image and one question."""
        inputs = self.processor(text=question, on_unknown="ignore", return_tensors="pt").to(self.model.device)
        return {**inputs, "pixel_values": pixel_values}

    def loss(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> torch.Tensor:
        """The loss of a training step on N questions about each image."""
        inputs = self.inputs(pixel_values, questions)
        return self.model(**inputs, labels=inputs["input_ids"], use_cache=False).loss


class PaliGemma:
    """A PaliGemma with the widths and depths of a configuration of Traffic VLM. It computes no more than is read.

    A row is `<image>*256 <bos> question \\n`; image and question see each other in both directions.
    """

    def __init__(self, config: TrafficVLMConfig, processor: TrafficVLMProcessor, **placement: Any):
        vision = {name: getattr(config.vision_config, name) for name in VISION_FIELDS}
        text = {name: getattr(config.text_config, name) for name in TEXT_FIELDS}
        vision |= {"model_type": "siglip_vision_model", "vision_use_head": False}
        peer = PaliGemmaConfig(
            vision_config=vision | {"num_hidden_layers": PEER_VISION_LAYERS},
            text_config=text | {"model_type": "gemma", "vocab_size": PEER_VOCABULARY},
            image_token_index=IMAGE,
            projection_dim=text["hidden_size"],
            hidden_size=text["hidden_size"],
        )
        self.model = with_random_weights(PaliGemmaForConditionalGeneration, peer, **placement)
        self.processor, self.image_tokens = processor, (vision["image_size"] // vision["patch_size"]) ** 2

    def prepare(self) -> None:
        """Nothing to change for inference."""

    def inputs(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Inputs of the model for N questions about each image: I·N rows, padded on the left."""
        pad = self.model.config.text_config.pad_token_id
        question_ids = self.processor(text=list(questions), on_unknown="ignore")["input_ids"]
        rows = [[IMAGE] * self.image_tokens + [*ids, NEWLINE] for ids in question_ids] * len(pixel_values)
        length = max(map(len, rows))
        input_ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=pixel_values.device)
        return {
            "input_ids": input_ids,
            "attention_mask": (input_ids != pad).long(),
            "token_type_ids": torch.zeros_like(input_ids),
            "pixel_values": pixel_values.repeat_interleave(len(questions), 0),
        }

    def yes_no(self, pixel_values: torch.Tensor, questions: Sequence[str], compiled: bool = False) -> Run:
        """A run that returns P(yes) [I·N] of N questions about each image [I,3,H,W]."""
        inputs = self.inputs(pixel_values, questions)
        no_yes = self.processor.tokenizer.convert_tokens_to_ids(["[NO]", "[YES]"])
        mode = "reduce-overhead" if pixel_values.is_cuda else "default"
        forward = torch.compile(self.model, mode=mode) if compiled else self.model

        @torch.no_grad()
        def run() -> torch.Tensor:
            logits = forward(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
            return logits[:, no_yes].float().softmax(-1)[:, 1]

        return run

    def prompt(self, pixel_values: torch.Tensor, question: str) -> dict[str, torch.Tensor]:
        """Inputs of `generate` for one image and one question."""
        return self.inputs(pixel_values, [question])

    def loss(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> torch.Tensor:
        """The loss of a training step on N questions about each image."""
        inputs = self.inputs(pixel_values, questions)
        is_text = (inputs["attention_mask"] > 0) & (inputs["input_ids"] != IMAGE)
        return self.model(**inputs, labels=inputs["input_ids"].where(is_text, -100), use_cache=False).loss


def with_random_weights(model_class: Any, config: Any, device: str, dtype: torch.dtype) -> Any:
    """A model in eval mode."""
    torch.manual_seed(0)
    return model_class(config).to(device, dtype).eval()


def build_models(options: ModelOptions, dtype: torch.dtype) -> tuple[dict[str, Any], torch.Tensor]:
    """The models by the names of their columns, and an image [1,3,H,W].

    Raises:
        ValueError: their images have different sizes.
    """
    placement: dict[str, Any] = {"device": options.device, "dtype": dtype}
    models: dict[str, Any] = {}
    for folder in options.model:
        name = "Traffic VLM" if len(options.model) == 1 else f"Traffic VLM {folder.resolve().name}"
        config, processor = TrafficVLMConfig.from_pretrained(folder), TrafficVLMProcessor.from_pretrained(folder)
        models[name] = TrafficVLM(config, processor, **placement)
    peer = TrafficVLMConfig.from_pretrained(options.peer) if options.peer else TrafficVLMConfig()
    models["PaliGemma"] = PaliGemma(peer, processor, **placement)
    sizes = {name: model.model.config.vision_config.image_size for name, model in models.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the models have images of different sizes: {sizes}")
    [size] = set(sizes.values())
    return models, torch.randn(1, 3, size, size).to(**placement)


def make_questions(count: int) -> list[str]:
    """`count` yes/no questions of 6 to 11 tokens; from the 111th on they repeat."""
    return list(islice(cycle(template.format(name) for name, template in product(CLASSES, TEMPLATES)), count))


# --- speed ---


def generate_run(model: Any, inputs: Mapping[str, Any], new_tokens: int, compiled: bool = False) -> Run:
    """A run that greedily generates `new_tokens` tokens; `compiled` selects a static cache and a compiled step."""
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    if compiled:
        options |= {"cache_implementation": "static", "compile_config": CompileConfig()}
        if model.device.type == "cpu":
            options["compile_config"] = CompileConfig(mode="default")  # the library's default is for CUDA graphs
            options["compile_config"]._compile_all_devices = True  # otherwise the library compiles on GPUs only
    return lambda: model.generate(**inputs, **options)


def time_in_turns(runs: Mapping[str, Run], min_run_time: float) -> dict[str, float]:
    """Median time of each run in seconds; in each of ROUNDS, each is repeated for at least `min_run_time` seconds."""
    threads = torch.get_num_threads()
    timers = {name: Timer("run()", globals={"run": run}, num_threads=threads) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(2):  # a compiled step is compiled again when a length changes
            run()
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            times[name] += timer.blocked_autorange(min_run_time=min_run_time).times
    return {name: median(values) for name, values in times.items()}


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def print_row(title: str, cells: Sequence[str]) -> None:
    print(f"| {' | '.join([title, *cells])} |", flush=True)


def print_header(options: ModelOptions, models: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Print what the measurements belong to: machine, versions, and parameters of the models."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    cpu = f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    machine = torch.cuda.get_device_name() if options.device == "cuda" else cpu
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    counts = ", ".join(f"{name} {model.model.num_parameters() / 1e6:.1f} M" for name, model in models.items())
    print(f"{machine}, {plural(torch.get_num_threads(), 'thread')}, {versions}, {options.dtype}. {counts}.\n")
    print_row("", columns)
    print_row("---", ["--:"] * len(columns))


def measure_speed(options: SpeedOptions) -> None:
    """Print a row for each number of questions, one for generated tokens, and one for loading."""
    models, image = build_models(options, getattr(torch, options.dtype))
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            model.model.save_pretrained(f"{folder}/{name}")
            model.prepare()
        kinds = {name: (model, False) for name, model in models.items()}
        if options.compiled:
            kinds |= {f"{name}, compiled": (model, True) for name, model in models.items()}
        print_header(options, models, [*kinds])

        def print_times(title: str, runs: Mapping[str, Run | None]) -> None:
            seconds = time_in_turns({name: run for name, run in runs.items() if run}, options.min_run_time)
            first = next(iter(seconds.values()))
            cells = {name: f"{1e3 * value:,.1f} ms ({value / first:.2f})" for name, value in seconds.items()}
            print_row(title, [cells.get(name, "–") for name in kinds])

        def load(model: Any, files: str) -> None:
            loaded = copy.copy(model)
            loaded.model = type(model.model).from_pretrained(files, dtype=image.dtype).to(image.device).eval()
            loaded.prepare()
            loaded.yes_no(image, [OPEN_QUESTION])()

        for count in options.questions:
            images, questions = image.repeat(options.images, 1, 1, 1), make_questions(count)
            runs = {name: model.yes_no(images, questions, compiled) for name, (model, compiled) in kinds.items()}
            print_times(f"{plural(options.images, 'image')} × {plural(count, 'question')}", runs)
        runs = {
            name: generate_run(model.model, model.prompt(image, OPEN_QUESTION), options.new_tokens, compiled)
            for name, (model, compiled) in kinds.items()
        }
        print_times(plural(options.new_tokens, "token"), runs)
        runs = {name: partial(load, model, f"{folder}/{name}") for name, model in models.items()}
        print_times("from files to the first answer", runs)


# --- memory ---


def peak_bytes(run: Run, device: str) -> int:
    """Peak bytes of all tensors that a run allocates, without those that exist before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def training_bytes(model: Any, image: torch.Tensor, options: MemoryOptions) -> list[int]:
    """Bytes of training with AdamW: the state, and what one more image needs without and with checkpointing.

    The state is weights, gradients and moments in float32, after a step.
    """
    optimizer, questions = torch.optim.AdamW(model.model.parameters()), make_questions(options.questions)
    model.model.train()

    def step(images: int) -> None:
        with torch.autocast(options.device, torch.bfloat16, enabled=options.dtype == "bfloat16"):
            loss = model.loss(image.repeat(images, 1, 1, 1), questions)
        loss.backward()

    def an_image() -> int:
        # The peak of one image can be in a layer with large buffers, not where all that is saved exists.
        two, three = (peak_bytes(partial(step, images), options.device) for images in (2, 3))
        return three - two

    step(1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # gradients belong to the state
    moments = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [weight.grad for weight in model.model.parameters() if weight.grad is not None]
    state = sum(tensor.nbytes for tensor in (*model.model.parameters(), *model.model.buffers(), *moments, *gradients))
    plain = an_image()
    model.model.gradient_checkpointing_enable()
    return [state, plain, an_image()]


def measure_memory(options: MemoryOptions) -> None:
    """Print the memory of answers, with weights in the dtype, and of training in float32 or bfloat16 autocast."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints each of its starts and stops
    warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)  # renamed in transformers 5.23
    models, image = build_models(options, getattr(torch, options.dtype))
    print_header(options, models, [f"{name}, MB" for name in models])

    def print_megabytes(title: str, sizes: Iterable[int]) -> None:
        print_row(title, [f"{size / 1e6:,.1f}" for size in sizes])

    weights = [(*model.model.parameters(), *model.model.buffers()) for model in models.values()]
    print_megabytes("weights", [sum(tensor.nbytes for tensor in tensors) for tensors in weights])
    for count in sorted({1, options.questions}):
        runs = [model.yes_no(image, make_questions(count)) for model in models.values()]
        peaks = [peak_bytes(run, options.device) for run in runs]
        print_megabytes(f"{plural(count, 'question')} about an image, peak above that", peaks)
    models, image = build_models(options, torch.float32)
    found = [training_bytes(model, image, options) for model in models.values()]
    states, *kinds = zip(*found)
    print_megabytes("training: weights, gradients and AdamW", states)
    for title, sizes in zip(("", ", checkpointing"), kinds):
        print_megabytes(f"training: an image with {plural(options.questions, 'question')}{title}", sizes)
        room = [(options.memory_gb - RESERVED_GB) * 1e9 - state for state in states]
        counts = [f"{max(0, int(free // size)):,}" for free, size in zip(room, sizes)]
        print_row(f"training: images a step in {options.memory_gb:g} GB{title}, computed", counts)


# --- training data ---


def measure_data(options: DataOptions) -> None:
    """Print how many images a second are loaded, augmented and collated for training."""
    from traffic_vlm.data.collator import TrafficCollator
    from traffic_vlm.data.dataset import SyntheticRows
    from traffic_vlm.data.folders import load_rows

    torch.set_num_threads(1)
    processor = TrafficVLMProcessor.from_pretrained(options.model)
    loader = torch.utils.data.DataLoader(
        SyntheticRows() if options.dataset is None else load_rows([options.dataset], prefer="train"),
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        collate_fn=TrafficCollator(processor, options.questions_per_image),
        multiprocessing_context="fork" if options.num_workers else None,
    )
    batches = iter(loader)
    skipped = max(1, options.num_workers)  # each worker prepares one while they start, which would take no time
    for _ in islice(batches, skipped):
        pass
    images = questions = 0
    start = time.perf_counter()
    for batch in batches:
        images += len(batch["pixel_values"])
        questions += int((batch["question_ends"] >= 0).sum())
        if images >= options.num_images:
            break
    if not images:
        raise ValueError(f"--dataset {options.dataset}: no image after the first {skipped} x {options.batch_size}")
    seconds = time.perf_counter() - start
    print(f"{images / seconds:.0f} images per second, {questions / images:.1f} questions each, {seconds:.1f} s")


# --- service ---


def call_service(options: ServiceOptions, questions: Sequence[str], end: float) -> list[tuple[int, float]]:
    """Status and seconds of each request of a client that asks until `end`. Status 0: no response."""
    image, results = options.image.read_bytes(), []
    while (begin := time.perf_counter()) < end:
        encoded = base64.b64encode(image + os.urandom(8)).decode()  # not the image of an earlier request
        body = json.dumps({"image": encoded, "questions": questions}).encode()
        request = Request(f"{options.url}/v1/answer", body, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=300) as response:
                response.read()
                status = response.status
        except HTTPError as error:
            status = error.code
        except URLError:
            status = 0
        results.append((status, time.perf_counter() - begin))
    return results


def measure_service(options: ServiceOptions) -> None:
    """Print requests a second and their times: a line for the clients, and one for the long callers, if any."""
    groups = {"clients": (options.clients, make_questions(options.questions))}
    if options.long_callers:
        groups["long callers"] = (options.long_callers, QUESTIONS_IN_WORDS if options.in_words else LONG_QUESTIONS)
    begin = time.perf_counter()
    with ThreadPoolExecutor(sum(count for count, _ in groups.values())) as pool:
        end = begin + options.seconds
        calls = {
            name: [pool.submit(call_service, options, questions, end) for _ in range(count)]
            for name, (count, questions) in groups.items()
        }
    took = time.perf_counter() - begin
    for name, futures in calls.items():
        results = [result for future in futures for result in future.result()]
        seconds = [each for status, each in results if status == 200]
        errors = dict(Counter(status for status, _ in results if status != 200))
        p50, p99 = np.percentile(seconds or [float("nan")], [50, 99])
        rate = f"{len(seconds) / took:.1f} requests/s, p50 {p50:.2f} s, p99 {p99:.2f} s"
        print(f"{name}: {rate}, {len(results)} requests, errors {errors or 'none'}")


MEASUREMENTS: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "speed": (SpeedOptions, measure_speed),
    "memory": (MemoryOptions, measure_memory),
    "data": (DataOptions, measure_data),
    "service": (ServiceOptions, measure_service),
}


@command()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=MEASUREMENTS, help="--help after it shows its options")
    option_types, measure = MEASUREMENTS[parser.parse_args(sys.argv[1:2]).measurement]
    [options] = option_parser([option_types], __doc__).parse_args_into_dataclasses(sys.argv[2:])
    transformers.logging.set_verbosity_error()
    if getattr(options, "threads", None):
        torch.set_num_threads(options.threads)
    measure(options)


if __name__ == "__main__":
    sys.exit(main())

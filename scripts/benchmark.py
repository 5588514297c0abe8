"""Measure Traffic VLM on this machine, speed and memory against PaliGemma of the same widths and depths.

    python scripts/benchmark.py speed                           # some minutes on 2 CPU cores
    python scripts/benchmark.py speed --dtype float32 --compiled true
    python scripts/benchmark.py speed --device cuda --images 64 --questions 16
    python scripts/benchmark.py speed --model . runs/latent     # also a folder of build_files.py with other sizes
    python scripts/benchmark.py memory                          # of answers, and of training; minutes

PaliGemma is the class of transformers: SigLIP vision tower, linear projector, and a Gemma decoder that has the 256
tokens of the image in its prompt. It has the widths and depths of the default configuration of Traffic VLM, whose own
sizes are those of --model. The weights of both are random. Traffic VLM encodes an image once and packs all questions
about it into one row; PaliGemma takes one row per question, each with the image, as its own processor arranges it, and
computes only the logits that are read.

The models take turns in one process, so a machine that becomes slower or faster affects all of them. Times are
medians, and the number in brackets is the time divided by that of the first model: above 1, the first one is faster.
Run nothing else meanwhile.
"""

import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer
from transformers import CompileConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration

from traffic_vlm.common.options import option, option_parser
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.data.datasets import source_names
from traffic_vlm.evaluation.markdown import table
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.scripts import command


ROOT = Path(__file__).resolve().parent.parent
ROUNDS, SECONDS = 5, 1.0  # the models take turns so many times, each for so long
TRAINING_QUESTIONS = 16  # about an image

# PaliGemma reads the token ids of Traffic VLM's processor, and these for what its own processor adds.
IMAGE, NEWLINE, PEER_VOCABULARY = 500, 501, 512
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

Run = Callable[[], Any]  # does a workload once, with all inputs prepared
Rows = dict[str, dict[str, str]]  # of a table: {row: {model: cell}}


@dataclass
class Options:
    model: list[Path] = option([ROOT], "folders with the sizes (config.json) of Traffic VLM")
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "bfloat16 is slow on a CPU without AVX-512 or AMX")
    questions: list[int] = option([1, 4, 16, 64], "questions about an image")
    images: int = option(1, "speed: images of a pass")
    new_tokens: int = option(32, "speed: tokens to generate about one image")
    fused: bool = option(True, "speed: Traffic VLM after fuse_for_inference(), as the pipeline has it")
    compiled: bool = option(False, "speed: also compiled PaliGemma, and compiled generation by Traffic VLM")

    def __post_init__(self) -> None:
        lowest = {"questions": min(self.questions, default=0), "images": self.images, "new_tokens": self.new_tokens}
        for name, value in lowest.items():
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU")
        for folder in self.model:
            if not (folder / "config.json").is_file():
                raise ValueError(f"{folder}: there is no config.json")


# --- the models ---


class Model:
    """What both models have: pixels are [I,3,H,W], and each of N questions is asked about each of the I images.

    Their `inputs` are the arguments of `forward`. Their `yes_no` is a run that returns P(yes) [I·N], None if there is
    no compiled one.
    """

    model: Any
    processor: TrafficVLMProcessor

    def prompt(self, pixel_values: torch.Tensor, question: str) -> dict[str, torch.Tensor]:
        """The arguments of `generate` for one image."""
        return self.inputs(pixel_values, [question])

    def loss(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> torch.Tensor:
        """The loss of a training step on all tokens of the questions."""
        inputs = self.inputs(pixel_values, questions)
        is_text = (inputs["attention_mask"] > 0) & (inputs["input_ids"] != IMAGE)
        return self.model(**inputs, labels=inputs["input_ids"].where(is_text, -100), use_cache=False).loss


class TrafficVLM(Model):
    """The model of this repository: an image is encoded once, all questions about it are packed into one row."""

    def __init__(self, config: TrafficVLMConfig, processor: TrafficVLMProcessor):
        self.model, self.processor = TrafficVLMForConditionalGeneration(config).eval(), processor

    def inputs(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> dict[str, torch.Tensor]:
        text = [list(questions)] * len(pixel_values)
        packed = self.processor(text=text, packed=True, on_unknown="ignore", return_tensors="pt")
        return {**packed.to(pixel_values.device), "pixel_values": pixel_values}

    def prompt(self, pixel_values: torch.Tensor, question: str) -> dict[str, torch.Tensor]:
        inputs = self.processor(text=question, on_unknown="ignore", return_tensors="pt")
        return {**inputs.to(pixel_values.device), "pixel_values": pixel_values}

    def yes_no(self, pixel_values: torch.Tensor, questions: Sequence[str], compiled: bool = False) -> Run | None:
        inputs = self.inputs(pixel_values, questions)
        return None if compiled else lambda: torch.cat(self.model.score_yes_no(**inputs))


class PaliGemma(Model):
    """A PaliGemma with the widths and depths of a configuration of Traffic VLM. It computes no more than is read.

    A row is `<image>*256 <bos> question \\n`; image and question see each other in both directions.
    """

    def __init__(self, config: TrafficVLMConfig, processor: TrafficVLMProcessor):
        vision = {name: getattr(config.vision_config, name) for name in VISION_FIELDS}
        vision |= {"num_hidden_layers": PEER_VISION_LAYERS, "vision_use_head": False}
        text = {name: getattr(config.text_config, name) for name in TEXT_FIELDS}
        peer = PaliGemmaConfig(
            vision_config=vision | {"model_type": "siglip_vision_model"},
            text_config=text | {"model_type": "gemma", "vocab_size": PEER_VOCABULARY},
            image_token_index=IMAGE,
            projection_dim=text["hidden_size"],
            hidden_size=text["hidden_size"],
        )
        self.model, self.processor = PaliGemmaForConditionalGeneration(peer).eval(), processor
        self.image_tokens = (vision["image_size"] // vision["patch_size"]) ** 2

    def inputs(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> dict[str, torch.Tensor]:
        pad = self.model.config.text_config.pad_token_id
        question_ids = self.processor(text=list(questions), on_unknown="ignore")["input_ids"]
        rows = [[IMAGE] * self.image_tokens + [*ids, NEWLINE] for ids in question_ids] * len(pixel_values)
        length = max(map(len, rows))
        input_ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=pixel_values.device)
        return {
            "input_ids": input_ids,  # [I·N,L], padded on the left
            "attention_mask": (input_ids != pad).long(),
            "token_type_ids": torch.zeros_like(input_ids),
            "pixel_values": pixel_values.repeat_interleave(len(questions), 0),
        }

    def yes_no(self, pixel_values: torch.Tensor, questions: Sequence[str], compiled: bool = False) -> Run:
        inputs = self.inputs(pixel_values, questions)
        no_yes = self.processor.tokenizer.convert_tokens_to_ids(["[NO]", "[YES]"])
        mode = "reduce-overhead" if pixel_values.is_cuda else "default"
        forward = torch.compile(self.model, mode=mode) if compiled else self.model

        @torch.no_grad()
        def run() -> torch.Tensor:
            logits = forward(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
            return logits[:, no_yes].float().softmax(-1)[:, 1]

        return run


def build_models(options: Options) -> dict[str, Model]:
    """The models with random weights, by the titles of their columns. Each sees images of its own size, and
    PaliGemma, the last one, of the size of the model before it."""
    torch.manual_seed(0)
    models: dict[str, Model] = {}
    for folder, name in zip(options.model, source_names([folder.resolve() for folder in options.model])):
        config, processor = TrafficVLMConfig.from_pretrained(folder), TrafficVLMProcessor.from_pretrained(folder)
        models["Traffic VLM" if len(options.model) == 1 else f"Traffic VLM {name}"] = TrafficVLM(config, processor)
    models["PaliGemma"] = PaliGemma(TrafficVLMConfig({"image_size": config.vision_config.image_size}), processor)
    for model in models.values():
        model.model.to(options.device, getattr(torch, options.dtype))
    return models


def random_images(model: Model, count: int) -> torch.Tensor:
    """Pixels [count,3,H,W] in the size, dtype and place that a model takes."""
    size = model.model.config.vision_config.image_size
    return torch.randn(count, 3, size, size).to(model.model.device, model.model.dtype)


def make_questions(count: int) -> list[str]:
    """`count` yes/no questions of 6 to 11 tokens; from the 111th on they repeat."""
    return list(islice(cycle(template.format(name) for name, template in product(CLASSES, TEMPLATES)), count))


def describe(options: Options, models: Mapping[str, Model]) -> str:
    """What the measurements belong to: machine, versions, and parameters of the models."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    cpu = f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    machine = torch.cuda.get_device_name() if options.device == "cuda" else cpu
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    counts = ", ".join(f"{name} {model.model.num_parameters() / 1e6:.1f} M" for name, model in models.items())
    return f"{machine}, threads: {torch.get_num_threads()}, {versions}, {options.dtype}. {counts}."


# --- speed ---


def measure_speed(options: Options, models: Mapping[str, Model]) -> Rows:
    """Milliseconds: a row for each number of questions, and one for generated tokens."""
    columns = {name: (model, False) for name, model in models.items()}
    if options.compiled:
        columns |= {f"{name}, compiled": (model, True) for name, model in models.items()}
    for model in models.values():
        if options.fused and isinstance(model, TrafficVLM):
            model.model.fuse_for_inference()
    rows: Rows = {}
    for count in options.questions:
        questions = make_questions(count)
        runs = {
            name: model.yes_no(random_images(model, options.images), questions, compiled)
            for name, (model, compiled) in columns.items()
        }
        rows[f"images: {options.images}, questions: {count}"] = time_in_turns(runs)
    runs = {name: generate_run(model, options.new_tokens, compiled) for name, (model, compiled) in columns.items()}
    return rows | {f"tokens: {options.new_tokens}": time_in_turns(runs)}


def generate_run(model: Model, new_tokens: int, compiled: bool) -> Run:
    """A run that greedily generates `new_tokens` tokens; `compiled` selects a static cache and a compiled step."""
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    if compiled:
        options |= {"cache_implementation": "static", "compile_config": CompileConfig()}
        if model.model.device.type == "cpu":
            options["compile_config"] = CompileConfig(mode="default")  # the library's default is for CUDA graphs
            options["compile_config"]._compile_all_devices = True  # otherwise the library compiles on GPUs only
    inputs = model.prompt(random_images(model, 1), OPEN_QUESTION)
    return lambda: model.model.generate(**inputs, **options)


def time_in_turns(runs: Mapping[str, Run | None]) -> dict[str, str]:
    """Median time of each run in ms, with its ratio to that of the first; "–" for None."""
    threads, timers = torch.get_num_threads(), {}
    for name, run in runs.items():
        if run is not None:
            run(), run()  # a compiled step is compiled again when a length changes
            timers[name] = Timer("run()", globals={"run": run}, num_threads=threads)
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            times[name] += timer.blocked_autorange(min_run_time=SECONDS).times
    medians = {name: median(values) for name, values in times.items()}
    first = next(iter(medians.values()))
    cells = {name: f"{1e3 * value:,.1f} ms ({value / first:.2f})" for name, value in medians.items()}
    return {name: cells.get(name, "–") for name in runs}


# --- memory ---


def measure_memory(options: Options, models: Mapping[str, Model]) -> Rows:
    """Megabytes of answers, with weights in the dtype, and of training in float32 or bfloat16 autocast."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints each of its starts and stops
    warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)  # renamed in transformers 5.23
    rows: Rows = {}
    for name, model in models.items():
        sizes = {"weights": count_bytes(model.model.parameters(), model.model.buffers())}
        for count in options.questions:
            run = model.yes_no(random_images(model, 1), make_questions(count))
            sizes[f"peak above that, questions about an image: {count}"] = peak_bytes(run, options.device)
        model.model.float()
        sizes |= training_bytes(model, autocast=options.dtype == "bfloat16")
        for title, size in sizes.items():
            rows.setdefault(f"{title}, MB", {})[name] = f"{size / 1e6:,.1f}"
    return rows


def count_bytes(*tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in chain(*tensors))


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


def training_bytes(model: Model, autocast: bool) -> dict[str, int]:
    """Bytes of training with AdamW: the state, and what one more image needs without and with checkpointing.

    The state is weights, gradients and moments in float32, after a step.
    """
    optimizer, device = torch.optim.AdamW(model.model.parameters()), model.model.device.type
    image, questions = random_images(model, 1), make_questions(TRAINING_QUESTIONS)
    model.model.train()

    def step(count: int) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model.loss(image.repeat(count, 1, 1, 1), questions)
        loss.backward()

    def bytes_of_an_image() -> int:
        # The peak of one image can be in a layer with large buffers, not where all that is saved exists.
        two, three = (peak_bytes(partial(step, count), device) for count in (2, 3))
        return three - two

    step(1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # gradients belong to the state
    moments = (value for state in optimizer.state.values() for value in state.values())
    gradients = (weight.grad for weight in model.model.parameters() if weight.grad is not None)
    state = count_bytes(model.model.parameters(), model.model.buffers(), moments, gradients)
    title = f"training: an image with {TRAINING_QUESTIONS} questions"
    found = {"training: weights, gradients and AdamW": state, title: bytes_of_an_image()}
    model.model.gradient_checkpointing_enable()
    return found | {f"{title}, checkpointing": bytes_of_an_image()}


@command()
def main() -> None:
    measurements = {"speed": measure_speed, "memory": measure_memory}
    parser = option_parser([Options], __doc__)
    parser.add_argument("measurement", choices=measurements)
    options, chosen = parser.parse_args_into_dataclasses()
    transformers.logging.set_verbosity_error()
    models = build_models(options)
    print(describe(options, models), flush=True)
    print(table("", measurements[chosen.measurement](options, models)))


if __name__ == "__main__":
    sys.exit(main())

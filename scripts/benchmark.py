"""Compare the speed of Traffic VLM with baselines of its widths and depths, all with random weights.

    python scripts/benchmark.py --output_dir runs/benchmark        # about 5 minutes on 2 CPU cores
    python scripts/benchmark.py --output_dir runs/generate --workloads generate --dtype float32
    python scripts/benchmark.py --output_dir runs/gpu --device cuda
    python scripts/benchmark.py service --clients 100              # of a running scripts/serve.py
    python scripts/benchmark.py service --clients 1 --questions 1 --long_callers 16 [--in_words]

Writes report.json and report.md. Run nothing else meanwhile.

Traffic VLM has the configuration of this repository's weights. The baselines are classes of transformers with the
widths and depths of its default configuration:

    PaliGemma   SigLIP vision tower, linear projector, Gemma decoder; 256 image tokens in the prompt
    Idefics3    SigLIP vision tower, pixel shuffle, Llama decoder, as in SmolVLM; 64 image tokens in the prompt

Workloads:

    questions   P(yes) of N questions about an image, for every N in --questions. Traffic VLM packs the questions into
                one row; a baseline takes one row per question, each with the image.
    generate    greedy generation of --new_tokens tokens for one image and one question
    compiled    as generate, but Traffic VLM has a static cache and a compiled step

The models take turns in one process: a machine that becomes slower or faster affects all of them. Times are medians. A
ratio is the time of a model divided by the time of Traffic VLM.

`service` prints requests a second and the seconds of a request, for clients that ask again as soon as they are
answered, and for callers of 64 long questions beside them. No image is sent twice.
"""

import base64
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import torch
import transformers
from torch.utils.benchmark import Timer
from tqdm import tqdm
from transformers import (
    CompileConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.evaluation.markdown import table
from traffic_vlm.files import atomic_write_text
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.options import option_parser
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor


ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = ("questions", "generate", "compiled")
ROUNDS = 5  # in which the models take turns

# The baselines read the token ids of Traffic VLM's processor, and these for what their own processors add.
IMAGE, NEWLINE, FAKE_IMAGE, GLOBAL_IMAGE, USER, ASSISTANT, COLON, END_OF_UTTERANCE = range(500, 508)
BASELINE_VOCABULARY = 512
BASELINE_VISION_LAYERS = 3  # gives about as many parameters as Traffic VLM's tower and cross-attention have
SHARED_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")

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


@dataclass
class Options:
    output_dir: Path = field(metadata={"help": "folder to write the report to"})
    workloads: list[str] = field(default_factory=lambda: [*WORKLOADS], metadata={"help": "workloads to run"})
    questions: list[int] = field(
        default_factory=lambda: [1, 4, 16, 64], metadata={"help": "numbers of questions about an image"}
    )
    new_tokens: int = field(default=32, metadata={"help": "tokens to generate"})
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata={"help": "device of all models"})
    dtype: Literal["bfloat16", "float32"] = field(
        default="bfloat16", metadata={"help": "type of weights; bfloat16 is slow on a CPU without AVX-512 or AMX"}
    )
    threads: int | None = field(default=None, metadata={"help": "CPU threads; None is torch's choice"})
    min_run_time: float = field(default=1.0, metadata={"help": "seconds that each model is timed in each round"})

    def __post_init__(self) -> None:
        if unknown := [name for name in self.workloads if name not in WORKLOADS]:
            raise SystemExit(f"--workloads must be among {', '.join(WORKLOADS)}; got {' '.join(unknown)}")
        for name in ("questions", "new_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and min(value if isinstance(value, list) else [value]) < 1:
                raise SystemExit(f"--{name} must be at least 1; got {value}")
        if not self.min_run_time > 0:
            raise SystemExit(f"--min_run_time must be positive; got {self.min_run_time}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("--device cuda: torch finds no GPU")
        if (self.output_dir / "report.json").exists():
            raise SystemExit(f"{self.output_dir} already holds a report; choose another --output_dir")


@dataclass
class ServiceOptions:
    url: str = "http://127.0.0.1:8000"
    image: Path = field(default=ROOT / "docs/example.jpg", metadata={"help": "image to ask about"})
    clients: int = field(default=100, metadata={"help": "clients, each of which waits for its answer"})
    questions: int = field(default=4, metadata={"help": "questions of their requests"})
    long_callers: int = field(default=0, metadata={"help": "clients beside them, with 64 questions of 108 tokens"})
    in_words: bool = field(default=False, metadata={"help": "the 64 questions are short, and answered in words"})
    seconds: float = field(default=30.0, metadata={"help": "time in which requests are sent"})


class TrafficVLM:
    """The model of this repository: an image is encoded once, all questions about it are packed into one row."""

    def __init__(self, config: TrafficVLMConfig, processor: TrafficVLMProcessor, **placement: Any):
        self.processor = processor
        self.model: Any = build(TrafficVLMForConditionalGeneration, config, **placement).fuse_for_inference()

    def yes_no_run(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> Run:
        """A run that returns P(yes) [N] of N questions about an image [1,3,H,W]."""
        inputs = self.processor(text=[list(questions)], packed=True, on_unknown="ignore", return_tensors="pt")
        on_device = inputs.to(self.model.device)
        return lambda: self.model.score_yes_no(**on_device, pixel_values=pixel_values)[0]

    def prompt(self, pixel_values: torch.Tensor, question: str) -> dict[str, Any]:
        """Inputs of `generate` for one image and one question."""
        inputs = self.processor(text=question, on_unknown="ignore", return_tensors="pt").to(self.model.device)
        return {**inputs, "pixel_values": pixel_values}


class Baseline:
    """A model that reads the image as tokens of its prompt and answers one question per row.

    It computes no more than needed: for yes/no no cache and only the logits that are read, and no image tiles.
    """

    model_class: Any

    def __init__(self, config: TrafficVLMConfig, processor: TrafficVLMProcessor, **placement: Any):
        self.processor = processor
        self.text_config = config.text_config
        self.image_tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        vision = {name: getattr(config.vision_config, name) for name in (*SHARED_FIELDS, "image_size", "patch_size")}
        text_fields = (*SHARED_FIELDS, "num_hidden_layers", "num_key_value_heads", "head_dim", *SPECIAL_TOKENS)
        text = {name: getattr(config.text_config, name) for name in text_fields} | {"vocab_size": BASELINE_VOCABULARY}
        baseline_config = self.make_config(vision | {"num_hidden_layers": BASELINE_VISION_LAYERS}, text)
        self.model: Any = build(self.model_class, baseline_config, **placement)

    def make_config(self, vision: dict[str, Any], text: dict[str, Any]) -> Any:
        """The configuration of the model from fields of its vision tower and of its decoder."""
        raise NotImplementedError

    def make_row(self, question_ids: list[int]) -> list[int]:
        """The prompt as the model's own processor arranges it; question_ids are those of `[SOS] words ?`."""
        raise NotImplementedError

    def make_inputs(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs of the model for rows [N,L], padded on the left, and the image of each row [N,3,H,W]."""
        mask = (input_ids != self.text_config.pad_token_id).long()
        return {"input_ids": input_ids, "attention_mask": mask, "pixel_values": pixel_values}

    def prepare(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Inputs of the model for questions about an image [1,3,H,W], one row for each."""
        question_ids = self.processor(text=list(questions), on_unknown="ignore")["input_ids"]
        rows = [self.make_row(ids) for ids in question_ids]
        length, pad = max(map(len, rows)), self.text_config.pad_token_id
        input_ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=pixel_values.device)
        return self.make_inputs(input_ids, pixel_values.expand(len(rows), -1, -1, -1))

    def yes_no_run(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> Run:
        """A run that returns P(yes) [N] of N questions about an image [1,3,H,W]."""
        inputs = self.prepare(pixel_values, questions)
        no_yes = [self.text_config.no_token_id, self.text_config.yes_token_id]

        @torch.no_grad()
        def run() -> torch.Tensor:
            logits = self.model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
            return logits[:, no_yes].float().softmax(-1)[:, 1]

        return run

    def prompt(self, pixel_values: torch.Tensor, question: str) -> dict[str, Any]:
        """Inputs of `generate` for one image and one question."""
        return self.prepare(pixel_values, [question])


class PaliGemma(Baseline):
    """`<image>*256 <bos> question \\n`; image and question see each other in both directions (token type 0)."""

    model_class = PaliGemmaForConditionalGeneration

    def make_config(self, vision: dict[str, Any], text: dict[str, Any]) -> PaliGemmaConfig:
        return PaliGemmaConfig(
            vision_config=vision | {"model_type": "siglip_vision_model", "vision_use_head": False},
            text_config=text | {"model_type": "gemma"},
            image_token_index=IMAGE,
            projection_dim=text["hidden_size"],
            hidden_size=text["hidden_size"],
        )

    def make_row(self, question_ids: list[int]) -> list[int]:
        return [IMAGE] * self.image_tokens + [*question_ids, NEWLINE]

    def make_inputs(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().make_inputs(input_ids, pixel_values) | {"token_type_ids": torch.zeros_like(input_ids)}


class Idefics3(Baseline):
    """`<bos>User:<fake><global><image>*64<fake>question<end_of_utterance>\\nAssistant:`; a token is 2 × 2 patches."""

    model_class = Idefics3ForConditionalGeneration
    scale_factor = 2

    def make_config(self, vision: dict[str, Any], text: dict[str, Any]) -> Idefics3Config:
        return Idefics3Config(
            vision_config=vision | {"model_type": "idefics3_vision"},
            text_config=text | {"model_type": "llama", "tie_word_embeddings": True},
            image_token_id=IMAGE,
            scale_factor=self.scale_factor,
            tie_word_embeddings=True,
            pad_token_id=text["pad_token_id"],
        )

    def make_row(self, question_ids: list[int]) -> list[int]:
        start, *words = question_ids
        image = [FAKE_IMAGE, GLOBAL_IMAGE, *[IMAGE] * (self.image_tokens // self.scale_factor**2), FAKE_IMAGE]
        return [start, USER, COLON, *image, *words, END_OF_UTTERANCE, NEWLINE, ASSISTANT, COLON]

    def make_inputs(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().make_inputs(input_ids, pixel_values[:, None])  # [N,1,3,H,W]: one image per row


MODELS: dict[str, Any] = {"TrafficVLM": TrafficVLM, "PaliGemma": PaliGemma, "Idefics3": Idefics3}


def build(model_class: Any, config: Any, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, in eval mode."""
    torch.manual_seed(0)
    return model_class(config).to(device, dtype).eval()


def make_questions(count: int) -> list[str]:
    """`count` yes/no questions of 6 to 11 tokens; from the 111th on they repeat."""
    return list(islice(cycle(template.format(name) for name, template in product(CLASSES, TEMPLATES)), count))


def generate_run(model: Any, inputs: Mapping[str, Any], new_tokens: int, compiled: bool = False) -> Run:
    """A run that greedily generates `new_tokens` tokens; `compiled` selects a static cache and a compiled step."""
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    if compiled:
        options |= {"cache_implementation": "static", "compile_config": CompileConfig()}
        if model.device.type == "cpu":
            options["compile_config"] = CompileConfig(mode="default")  # the library's default is for CUDA graphs
            options["compile_config"]._compile_all_devices = True  # otherwise the library compiles on GPUs only
    return lambda: model.generate(**inputs, **options)


def make_workloads(
    models: Mapping[str, Any], pixel_values: torch.Tensor, options: Options
) -> dict[str, dict[str, Run]]:
    """The run of each model for every workload, by the workload's title; pixel_values are [1,3,H,W]."""
    workloads = {}
    for count in options.questions if "questions" in options.workloads else []:
        title = f"1 image, {count} question{'s' * (count > 1)}"
        questions = make_questions(count)
        workloads[title] = {name: model.yes_no_run(pixel_values, questions) for name, model in models.items()}
    prompts = {name: model.prompt(pixel_values, OPEN_QUESTION) for name, model in models.items()}
    for workload, compiled in {"generate": "", "compiled": "TrafficVLM"}.items():
        if workload in options.workloads:
            title = f"{options.new_tokens} tokens" + (f", compiled {compiled}" if compiled else "")
            workloads[title] = {
                name: generate_run(model.model, prompts[name], options.new_tokens, compiled=name == compiled)
                for name, model in models.items()
            }
    return workloads


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


def describe_environment() -> dict[str, Any]:
    """The machine and the versions that the measurements belong to."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return {
        "cpu": names[0] if names else platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def to_markdown(report: Mapping[str, Any]) -> str:
    """A table with a row for each workload and a column for each model."""
    options, parameters = report["options"], {n: f"{count / 1e6:.1f} M" for n, count in report["parameters"].items()}
    rows = {"parameters": parameters}
    for title, models in report["workloads"].items():
        rows[title] = {name: f"{1e3 * one['seconds']:,.1f} ms, {one['ratio']:.2f}" for name, one in models.items()}
    environment = ", ".join(f"{key} {value}" for key, value in report["environment"].items() if value)
    text = f"{options['device']}, {options['dtype']}, random weights. Median time, and its ratio to TrafficVLM's:"
    return "\n\n".join(["# Benchmark", environment, text, table("", rows)]) + "\n"


def run_benchmark(
    options: Options, shipped: TrafficVLMConfig, default: TrafficVLMConfig, processor: TrafficVLMProcessor
) -> dict[str, Any]:
    """Measure all workloads, and write the report after each.

    Args:
        shipped: configuration of Traffic VLM. default: the configuration whose size the baselines have.
    """
    placement = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    models = {
        name: model(shipped if model is TrafficVLM else default, processor, **placement)
        for name, model in MODELS.items()
    }
    size = default.vision_config.image_size
    pixel_values = torch.randn(1, 3, size, size).to(**placement)
    report: dict[str, Any] = {
        "environment": describe_environment(),
        "options": asdict(options) | {"output_dir": str(options.output_dir)},
        "parameters": {name: model.model.num_parameters() for name, model in models.items()},
        "workloads": {},
    }
    for title, runs in tqdm(make_workloads(models, pixel_values, options).items(), unit="workload"):
        seconds = time_in_turns(runs, options.min_run_time)
        report["workloads"][title] = {
            name: {"seconds": value, "ratio": value / seconds["TrafficVLM"]} for name, value in seconds.items()
        }
        atomic_write_text(options.output_dir / "report.json", json.dumps(report, indent=1))
        atomic_write_text(options.output_dir / "report.md", to_markdown(report))
    return report


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


def measure_service(options: ServiceOptions) -> list[str]:
    """A line for the clients, and one for the long callers, if there are any."""
    groups = {"clients": (options.clients, make_questions(options.questions))}
    if options.long_callers:
        groups["long callers"] = (options.long_callers, QUESTIONS_IN_WORDS if options.in_words else LONG_QUESTIONS)
    begin, lines = time.perf_counter(), []
    with ThreadPoolExecutor(sum(count for count, _ in groups.values())) as pool:
        end = begin + options.seconds
        calls = {
            name: [pool.submit(call_service, options, questions, end) for _ in range(count)]
            for name, (count, questions) in groups.items()
        }
    took = time.perf_counter() - begin
    for name, futures in calls.items():
        results = [result for future in futures for result in future.result()]
        seconds = [each for status, each in results if status == 200] or [float("nan")]
        errors = dict(Counter(status for status, _ in results if status != 200))
        p50, p99 = np.percentile(seconds, [50, 99])
        rate = f"{len(seconds) / took:.1f} requests/s, p50 {p50:.2f} s, p99 {p99:.2f} s"
        lines.append(f"{name}: {rate}, {len(results)} requests, errors {errors or 'none'}")
    return lines


def main() -> None:
    if sys.argv[1:2] == ["service"]:
        [service] = option_parser([ServiceOptions], __doc__).parse_args_into_dataclasses(sys.argv[2:])
        print("\n".join(measure_service(service)))
        return
    [options] = option_parser([Options], __doc__).parse_args_into_dataclasses()
    transformers.logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
    shipped, processor = TrafficVLMConfig.from_pretrained(ROOT), TrafficVLMProcessor.from_pretrained(ROOT)
    try:
        report = run_benchmark(options, shipped, TrafficVLMConfig(), processor)
    except (OSError, torch.OutOfMemoryError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(to_markdown(report))


if __name__ == "__main__":
    main()

"""Measure the speed of Traffic VLM on this machine against PaliGemma of the same widths and depths.

    python scripts/benchmark.py                           # some minutes on 2 CPU cores
    python scripts/benchmark.py --dtype float32
    python scripts/benchmark.py --device cuda --images 64 --questions 16
    python scripts/benchmark.py --model runs/latent       # a folder with a config.json of other sizes

The weights of both are random. The models take turns in one process, so a machine that becomes slower affects both.
Times are medians, and the number in brackets is the time divided by that of Traffic VLM: above 1, Traffic VLM is
faster. Run nothing else meanwhile. docs/benchmark.md has our figures.
"""

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import transformers
from torch.utils.benchmark import Timer
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

from traffic_vlm.common.files import ROOT
from traffic_vlm.common.options import option, option_parser
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.evaluation.markdown import table
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.scripts import command


ROUNDS, SECONDS = 5, 1.0  # the models take turns so many times, each for so long
# PaliGemma reads the token ids of Traffic VLM's processor, and these for what its own processor adds.
IMAGE, NEWLINE, PEER_VOCABULARY = 500, 501, 512
PEER_VISION_LAYERS = 3  # as the tower of `TrafficVLMConfig.with_patch_tower()` has
VISION_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "image_size", "patch_size")
TEXT_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", "pad_token_id", "bos_token_id", "eos_token_id"),
)
NAMES = "car, bus, truck, van, bicycle, motorcycle, tram, train, pedestrian, dog, traffic light, stop sign, police car"
TEMPLATES = ["Is there a {}?", "Can you see a {}?", "Is there a {} on the left?", "Is a {} crossing the street?"]

Run = Callable[[], Any]  # does a workload once, with all inputs prepared


@dataclass
class BenchmarkOptions:
    model: Path = option(ROOT, "folder with the sizes (config.json) of Traffic VLM")
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "bfloat16 is slow on a CPU without AVX-512 or AMX")
    questions: list[int] = option([1, 4, 16, 64], "questions about an image")
    images: int = option(1, "images of a pass")
    new_tokens: int = option(32, "tokens to generate about one image")


class TrafficVLM:
    """The model of this repository: an image is encoded once, all questions about it are packed into one row."""

    def __init__(self, config: TrafficVLMConfig, processor: TrafficVLMProcessor):
        self.model, self.processor = TrafficVLMForConditionalGeneration(config).eval(), processor

    def inputs(self, pixel_values: torch.Tensor, text: Any) -> dict[str, Any]:
        """The arguments of `generate` for one question, or of `score_yes_no` for a list of questions an image."""
        options: Any = {"packed": not isinstance(text, str), "on_unknown": "ignore", "return_tensors": "pt"}
        return {**self.processor(text=text, **options).to(pixel_values.device), "pixel_values": pixel_values}

    def yes_no(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> Run:
        """A run that returns P(yes) [I·N] of N questions about each of I images."""
        inputs = self.inputs(pixel_values, [list(questions)] * len(pixel_values))
        return lambda: torch.cat(self.model.score_yes_no(**inputs))


class PaliGemma:
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

    def inputs(self, pixel_values: torch.Tensor, text: Any) -> dict[str, Any]:
        """The arguments of `forward`: one question or N about each of I images, padded on the left to [I·N,L]."""
        questions, pad = [text] if isinstance(text, str) else list(text), self.model.config.text_config.pad_token_id
        question_ids = self.processor(text=questions, on_unknown="ignore")["input_ids"]
        rows = [[IMAGE] * self.image_tokens + [*ids, NEWLINE] for ids in question_ids] * len(pixel_values)
        length = max(map(len, rows))
        input_ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=pixel_values.device)
        pixels = pixel_values.repeat_interleave(len(questions), 0)
        return {"input_ids": input_ids, "attention_mask": (input_ids != pad).long(), "pixel_values": pixels}

    def yes_no(self, pixel_values: torch.Tensor, questions: Sequence[str]) -> Run:
        """A run that returns P(yes) [I·N] of N questions about each of I images."""
        inputs = self.inputs(pixel_values, questions)
        no_yes = self.processor.tokenizer.convert_tokens_to_ids(["[NO]", "[YES]"])

        @torch.no_grad()
        def run() -> torch.Tensor:
            logits = self.model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
            return logits[:, no_yes].float().softmax(-1)[:, 1]

        return run


Models = Mapping[str, TrafficVLM | PaliGemma]  # by the title of their column


def make_questions(count: int) -> list[str]:
    """`count` yes/no questions of 6 to 11 tokens; from the 53rd on they repeat."""
    texts = [template.format(name) for name in NAMES.split(", ") for template in TEMPLATES]
    return (texts * count)[:count]


def measure(options: BenchmarkOptions, models: Models) -> dict[str, dict[str, str]]:
    """{row: {model: time}}: a row for each number of questions, and one for generated tokens."""
    size = models["PaliGemma"].model.config.vision_config.image_size
    pixels = torch.randn(options.images, 3, size, size).to(options.device, getattr(torch, options.dtype))
    rows = {}
    for count in options.questions:
        runs = {name: one.yes_no(pixels, make_questions(count)) for name, one in models.items()}
        rows[f"images: {options.images}, questions: {count}"] = time_in_turns(runs)
    length = {"min_new_tokens": options.new_tokens, "max_new_tokens": options.new_tokens, "do_sample": False}
    asked = {name: one.inputs(pixels[:1], "What is ahead?") | length for name, one in models.items()}
    runs = {name: partial(models[name].model.generate, **inputs) for name, inputs in asked.items()}
    return rows | {f"tokens: {options.new_tokens}": time_in_turns(runs)}


def time_in_turns(runs: Mapping[str, Run]) -> dict[str, str]:
    """Median time of each run in ms, with its ratio to that of the first."""
    timers, times = {}, {name: list[float]() for name in runs}
    for name, run in runs.items():
        run(), run()  # a graph is recorded when its shape comes for the second time
        timers[name] = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    for name in [*timers] * ROUNDS:
        times[name] += timers[name].blocked_autorange(min_run_time=SECONDS).times
    medians = {name: median(values) for name, values in times.items()}
    first = next(iter(medians.values()))
    return {name: f"{1e3 * value:,.1f} ms ({value / first:.2f})" for name, value in medians.items()}


@command()
def main() -> None:
    [options] = option_parser([BenchmarkOptions], __doc__).parse_args_into_dataclasses()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config, processor = (kind.from_pretrained(options.model) for kind in (TrafficVLMConfig, TrafficVLMProcessor))
    peer = TrafficVLMConfig.with_patch_tower(vision_config={"image_size": config.vision_config.image_size})
    models: Models = {"Traffic VLM": TrafficVLM(config, processor), "PaliGemma": PaliGemma(peer, processor)}
    for one in models.values():
        one.model.to(options.device, getattr(torch, options.dtype))
    models["Traffic VLM"].model.fuse_for_inference()  # as the pipeline has it
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    machine = torch.cuda.get_device_name() if options.device == "cuda" else cpu
    counts = ", ".join(f"{name} {one.model.num_parameters() / 1e6:.1f} M" for name, one in models.items())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{machine}, {versions}, {options.dtype}. {counts}.", flush=True)
    print(table("", measure(options, models)))


if __name__ == "__main__":
    sys.exit(main())

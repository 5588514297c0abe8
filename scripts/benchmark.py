"""Measure the speed of Traffic VLM on this machine against PaliGemma of the same widths and depths.

    python scripts/benchmark.py                           # some minutes on 2 CPU cores
    python scripts/benchmark.py --dtype float32 --questions 1 16 --image_size 256 384 512
    python scripts/benchmark.py --device cuda --images 64 --questions 16
    python scripts/benchmark.py --model runs/latent       # a folder with a config.json of other sizes

The weights of both are random. The models take turns in one process, at all sizes of images, so a machine that becomes
slower affects all. Times are medians, and the number in brackets is the time divided by that of the first column:
Traffic VLM at the first size. Run nothing else meanwhile. docs/benchmark.md has our figures.
"""

import platform
import sys
from collections.abc import Callable, Mapping
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
# The decoder has the widths and depths of Traffic VLM's. The three layers of the tower are about as large as the two
# of its first tower and its cross-attention.
PEER_TEXT = {"model_type": "gemma", "vocab_size": PEER_VOCABULARY, "hidden_size": 512, "intermediate_size": 2048}
PEER_TEXT |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
PEER_TEXT |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
PEER_VISION = {"model_type": "siglip_vision_model", "hidden_size": 768, "intermediate_size": 3072}
PEER_VISION |= {"num_hidden_layers": 3, "num_attention_heads": 12, "patch_size": 16, "vision_use_head": False}
NAMES = "car, bus, truck, van, bicycle, motorcycle, tram, train, pedestrian, dog, traffic light, stop sign, police car"
TEMPLATES = ["Is there a {}?", "Can you see a {}?", "Is there a {} on the left?", "Is a {} crossing the street?"]
QUESTIONS = [template.format(name) for name in NAMES.split(", ") for template in TEMPLATES]  # of 6 to 11 tokens
IN_WORDS = "What is ahead?"


@dataclass
class BenchmarkOptions:
    model: Path = option(ROOT, "folder with the sizes (config.json) of Traffic VLM")
    image_size: list[int] = option([], "sides of the images in pixels; default: the model's")
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "bfloat16 is slow on a CPU without AVX-512 or AMX")
    questions: list[int] = option([1, 4, 16, 64], "questions about an image")
    images: int = option(1, "images of a pass")
    new_tokens: int = option(32, "tokens to generate about one image")


def make_peer(image_size: int) -> PaliGemmaForConditionalGeneration:
    """A PaliGemma with random weights, for images of `image_size` pixels a side."""
    vision = PEER_VISION | {"image_size": image_size}
    widths = {"hidden_size": PEER_TEXT["hidden_size"], "projection_dim": PEER_TEXT["hidden_size"]}
    config = PaliGemmaConfig(vision_config=vision, text_config=PEER_TEXT, image_token_index=IMAGE, **widths)
    return PaliGemmaForConditionalGeneration(config).eval()


def peer_inputs(peer: Any, processor: Any, pixels: torch.Tensor, questions: list[str]) -> dict[str, torch.Tensor]:
    """The arguments of PaliGemma for N questions about each of I images, padded on the left to [I·N,L].

    A row is `<image>*576 <bos> question \\n`, for images of 384 pixels; image and question see each other in both
    directions.
    """
    vision, pad = peer.config.vision_config, peer.config.text_config.pad_token_id
    image = [IMAGE] * (vision.image_size // vision.patch_size) ** 2
    question_ids = processor(text=questions, on_unknown="ignore")["input_ids"]
    rows = [[*image, *ids, NEWLINE] for ids in question_ids] * len(pixels)
    length = max(map(len, rows))
    input_ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=pixels.device)
    masks = {"attention_mask": (input_ids != pad).long(), "token_type_ids": torch.zeros_like(input_ids)}
    return {"input_ids": input_ids, "pixel_values": pixels.repeat_interleave(len(questions), 0), **masks}


def measure(options: BenchmarkOptions, model: Any, peers: Mapping[int, Any], processor: Any) -> dict[str, Any]:
    """{row: {model and size: time}}: a row for each number of questions, and one for generated tokens."""
    images = {size: torch.randn(options.images, 3, size, size).to(model.device, model.dtype) for size in peers}
    rows = {}
    for count in options.questions:
        runs, questions = {}, (QUESTIONS * count)[:count]
        packed = {"packed": True, "on_unknown": "ignore", "return_tensors": "pt"}
        asked = processor(text=[questions] * options.images, **packed).to(options.device)
        for size, pixels in images.items():
            runs[f"Traffic VLM, {size}"] = partial(model.score_yes_no, **asked, pixel_values=pixels)
            inputs = peer_inputs(peers[size], processor, pixels, questions)
            runs[f"PaliGemma, {size}"] = partial(peers[size], **inputs, use_cache=False, logits_to_keep=1)
        rows[f"images: {options.images}, questions: {count}"] = time_in_turns(runs)
    length = {"min_new_tokens": options.new_tokens, "max_new_tokens": options.new_tokens, "do_sample": False}
    asked, runs = processor(text=IN_WORDS, return_tensors="pt").to(options.device), {}
    for size, pixels in images.items():
        runs[f"Traffic VLM, {size}"] = partial(model.generate, **asked, pixel_values=pixels[:1], **length)
        inputs = peer_inputs(peers[size], processor, pixels[:1], [IN_WORDS])
        runs[f"PaliGemma, {size}"] = partial(peers[size].generate, **inputs, **length)
    return rows | {f"tokens: {options.new_tokens}": time_in_turns(runs)}


@torch.no_grad()
def time_in_turns(runs: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Median time in ms of each run, a function with all inputs prepared, and its ratio to the time of the first."""
    timers, times = {}, {name: list[float]() for name in runs}
    for name, run in runs.items():
        run()  # records a graph of its shape
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
    place = (options.device, getattr(torch, options.dtype))
    model = TrafficVLMForConditionalGeneration(config).eval().to(*place)
    peers = {size: make_peer(size).to(*place) for size in options.image_size or [config.vision_config.image_size]}
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    machine = torch.cuda.get_device_name() if options.device == "cuda" else cpu
    models = {"Traffic VLM": model, "PaliGemma": next(iter(peers.values()))}
    counts = ", ".join(f"{name} {one.num_parameters() / 1e6:.1f} M" for name, one in models.items())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{machine}, {versions}, {options.dtype}. {counts}.", flush=True)
    with model.fast_context():  # as in the pipeline
        print(table("", measure(options, model, peers, processor)))


if __name__ == "__main__":
    sys.exit(main())

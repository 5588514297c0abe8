"""Measure the memory of training and inference, and compute how many images a training step can have.

python scripts/measure_memory.py --output_dir runs/memory
python scripts/measure_memory.py --output_dir runs/memory --model runs/tuned --memory_gb 8 --questions_per_image 8

Runs on the CPU and writes report.json and report.md. Weights, gradients and the states of AdamW are the bytes of their
tensors after a step. Activations are the tensors that a forward pass saves for the backward pass, without the weights;
with gradient checkpointing the backward pass also computes one layer at a time again, and the largest one is added.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_layers import GradientCheckpointingLayer

from traffic_vlm.data.collator import TrafficCollator
from traffic_vlm.data.dataset import SyntheticRows
from traffic_vlm.files import atomic_write_text
from traffic_vlm.loading import load_weights
from traffic_vlm.options import option_parser
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor


Batch = dict[str, torch.Tensor]


@dataclass
class Options:
    output_dir: Path = field(metadata={"help": "folder for report.json and report.md"})
    model: str = field(default=".", metadata={"help": "folder with weights and processor"})
    questions_per_image: int = field(default=16, metadata={"help": "questions about an image, in training"})
    memory_gb: float = field(default=6.0, metadata={"help": "memory of the GPU in GB (10^9 bytes)"})
    reserved_gb: float = field(
        default=1.0, metadata={"help": "GB of it that tensors cannot have; assumed: CUDA context, kernels, workspace"}
    )
    bfloat16: bool = field(
        default=True, metadata={"help": "count activations under bfloat16 autocast, too; slow on some CPUs"}
    )
    timed_images: int = field(default=4, metadata={"help": "images of the step whose time is measured"})
    repeats: int = field(default=5, metadata={"help": "times that the steps are measured; the median counts"})

    def __post_init__(self) -> None:
        for name in ("questions_per_image", "timed_images", "repeats"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.reserved_gb < self.memory_gb:
            raise SystemExit(f"--reserved_gb must be in [0, memory_gb={self.memory_gb:g}), got {self.reserved_gb:g}")


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors; one that several tensors share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of the weights with buffers, of the gradients, and of the optimizer's states, after a step."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": tensor_bytes([*model.parameters(), *model.buffers()]),
        "gradients": tensor_bytes(weight.grad for weight in model.parameters() if weight.grad is not None),
        "optimizer": tensor_bytes(value for value in states if isinstance(value, torch.Tensor)),
    }


def activation_bytes(model: torch.nn.Module, run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that a forward pass saves for the backward pass, and those of the layer that saves most.

    Weights and buffers of the model do not count. Layers are those that gradient checkpointing computes again.
    """
    fixed = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Any] = {}  # holds the storages, because a freed address could be used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            saved[storage.data_ptr()] = storage
        return tensor.detach()

    def total() -> int:
        return sum(storage.nbytes() for storage in saved.values())

    before: list[int] = []
    largest = 0

    def leave(*_: Any) -> None:
        nonlocal largest
        largest = max(largest, total() - before.pop())

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    handles = [layer.register_forward_pre_hook(lambda *_: before.append(total())) for layer in layers]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = run()
    finally:
        for handle in handles:
            handle.remove()
    del output  # kept until here: its graph holds what was saved
    return total(), largest


def peak_memory(run: Callable[[], Any]) -> int:
    """Peak bytes of all tensors that a run allocates on the CPU, beside those that exist before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def make_batch(processor: Any, questions: int) -> Batch:
    """One rendered image with its questions and answers in packed rows, as in training."""
    collator = TrafficCollator(processor, questions_per_image=questions, training=False, row_tokens="fit")
    batch = collator([SyntheticRows()[0]])
    batch.pop("question_spans", None)
    return batch


def repeat(batch: Batch, images: int) -> Batch:
    """A batch of one image, repeated."""
    rows = len(batch["input_ids"])
    repeated = {name: torch.cat([tensor] * images) for name, tensor in batch.items()}
    return repeated | {"image_index": torch.arange(images).repeat_interleave(rows)}


def measure_training(model: Any, batch: Batch, options: Options) -> dict[str, Any]:
    """Bytes of the state and, with and without checkpointing, of activations, and what checkpointing costs in time."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(images: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return model(**repeat(batch, images), use_cache=False).loss

    def step(images: int, is_checkpointed: bool) -> Callable[[], None]:
        def run() -> None:
            set_checkpointing(model, is_checkpointed)
            model.zero_grad(set_to_none=False)  # gradients belong to the state
            loss(images).backward()

        return run

    step(1, False)()
    optimizer.step()
    found: dict[str, Any] = {"state": state_bytes(model, optimizer), "activations": {}, "peak": {}}
    for dtype in (torch.float32, *([torch.bfloat16] if options.bfloat16 else [])):
        found["activations"][str(dtype).removeprefix("torch.")] = activations(model, partial(loss, dtype=dtype))
    steps = {}
    for name, is_checkpointed in (("all", False), ("checkpointing", True)):
        # With one image, the peak can be in a layer with large buffers of its own, not where all that is saved exists.
        three, four = (peak_memory(step(images, is_checkpointed)) for images in (3, 4))
        found["peak"][name] = four - three
        steps[name] = step(options.timed_images, is_checkpointed)
    ratios = []
    for _ in range(options.repeats):
        plain, checkpointed = (cpu_seconds(steps[name]) for name in ("all", "checkpointing"))
        ratios.append(checkpointed / plain)
    return found | {"checkpointing_time": median(ratios)}


def cpu_seconds(run: Callable[[], Any]) -> float:
    """Processor time of a run; other programs on the machine hardly change it."""
    start = time.process_time()
    run()
    return time.process_time() - start


def set_checkpointing(model: Any, is_on: bool) -> None:
    if is_on:
        model.gradient_checkpointing_enable()
    else:
        model.gradient_checkpointing_disable()


def activations(model: Any, loss: Callable[[int], Any]) -> dict[str, int]:
    """Bytes of activations of an image, and of a step whatever its number of images, such as weights in bfloat16.

    Args:
        loss: runs a forward pass about a number of images.
    """
    set_checkpointing(model, False)
    (one, layer), (two, _) = (activation_bytes(model, partial(loss, n)) for n in (1, 2))
    set_checkpointing(model, True)
    (less, _), (twice_less, _) = (activation_bytes(model, partial(loss, n)) for n in (1, 2))
    return {"all": two - one, "checkpointing": twice_less - less + layer, "layer": layer, "step": 2 * one - two}


def measure_inference(model: Any, batch: Batch) -> dict[str, int]:
    """Bytes of one encoded image, and the peaks of encoding it and of scoring its questions, beside the weights."""
    model.eval()
    pixels = batch["pixel_values"]
    text = {name: tensor for name, tensor in batch.items() if name != "pixel_values"}
    encoded = model.encode_images(pixels)
    return {
        "image": tensor_bytes(tensor for pair in encoded.key_values for tensor in pair),
        "encode": peak_memory(lambda: model.encode_images(pixels)),
        "score": peak_memory(lambda: model.score_yes_no(**text, encoded_images=encoded)),
    }


def images_that_fit(state: int, image: int, step: int, options: Options) -> int:
    """Images of a training step; 0 if the state alone is too large."""
    return max(0, int((options.memory_gb - options.reserved_gb) * 1e9 - state - step) // image)


def to_markdown(report: dict[str, Any], options: Options) -> str:
    """The report as two tables, in MB (10^6 bytes)."""
    training, inference = report["training"], report["inference"]
    state = sum(training["state"].values())
    sizes = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in training["state"].items())
    lines = [
        f"Training in MB (10^6 bytes), {options.questions_per_image} questions an image ({report['tokens']} tokens): "
        f"{sizes}; {state / 1e6:.1f} in all. A step with checkpointing takes {training['checkpointing_time']:.2f} "
        "times the processor time.",
        "",
        f"| activations | an image | a step | images that fit into {options.memory_gb:g} GB |",
        "|---|--:|--:|--:|",
    ]
    for dtype, found in training["activations"].items():
        for name, title in (("all", dtype), ("checkpointing", f"{dtype}, checkpointing")):
            count = images_that_fit(state, found[name], found["step"], options)
            lines.append(f"| {title} | {found[name] / 1e6:.1f} | {found['step'] / 1e6:.1f} | {count:,} |")
    peaks = ", ".join(f"{peak / 1e6:.1f} ({name})" for name, peak in training["peak"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"Of them {options.reserved_gb:g} GB are reserved. Measured peak of a float32 step, an image: {peaks}.",
            "",
            f"Inference in float32: weights {training['state']['weights'] / 1e6:.1f}, one encoded image "
            f"{inference['image'] / 1e6:.2f}, peak beside them while an image is encoded "
            f"{inference['encode'] / 1e6:.1f}, while its questions are scored {inference['score'] / 1e6:.1f}.",
            "",
        ]
    )


def main() -> None:
    [options] = option_parser([Options], __doc__).parse_args_into_dataclasses()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints each of its starts and stops
    warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)  # renamed in transformers 5.23
    try:
        model = load_weights(options.model, dtype=torch.float32)
        batch = make_batch(TrafficVLMProcessor.from_pretrained(options.model), options.questions_per_image)
    except (OSError, ValueError) as error:
        sys.exit(f"--model {options.model}: {error}")
    inference = measure_inference(model, batch)
    training = measure_training(model, batch, options)
    report = {
        "options": asdict(options) | {"output_dir": str(options.output_dir)},
        "tokens": int(batch["attention_mask"].sum()),
        "training": training,
        "inference": inference,
    }
    atomic_write_text(options.output_dir / "report.json", json.dumps(report, indent=1))
    atomic_write_text(options.output_dir / "report.md", to_markdown(report, options))
    print(to_markdown(report, options))


if __name__ == "__main__":
    main()

"""The parts of a benchmark. Each is a function of a `Bench` that gives figures as plain values, ready for JSON.

Times are medians in seconds of runs that took turns (`Timings.to_dict`), unless a name says otherwise.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .contestants import (
    CONTESTANTS,
    VOCABULARY,
    Contestant,
    Ours,
    OursWithPatches,
    PaliGemmaImageOnce,
    Setup,
)
from .memory import measure
from .timing import Run, Timings, alternate, count_flops, device_seconds, fit_line, record_kernels
from .works import PROMPT, Amounts, Work, ask_about


OURS = Ours.name
TOWER = "vision tower alone"
# Who goes further than the documentation shares the features of an image: that changes yes/no questions only.
USUAL = [name for name in CONTESTANTS if name != PaliGemmaImageOnce.name]


@dataclass
class Bench:
    """What the parts need.

    Attributes:
        rounds, max_seconds: of each comparison, as for `alternate`.
        say: is told what is measured next.
    """

    setup: Setup
    amounts: Amounts = field(default_factory=Amounts)
    rounds: int = 11
    max_seconds: float = 60.0
    say: Callable[[str], None] = print

    @cached_property
    def contestants(self) -> dict[str, Contestant]:
        return {name: build(self.setup) for name, build in CONTESTANTS.items()}

    @property
    def ours(self) -> Ours:
        return self.contestants[OURS]  # type: ignore[return-value]

    def time(self, title: str, runs: Mapping[str, Run], **options: Any) -> Timings:
        """The runs in turns, without gradients unless they ask for them."""
        self.say(title)
        with torch.no_grad():
            return alternate(runs, self.setup.device, self.rounds, self.max_seconds, **options)

    def compare(self, work: Work, names: list[str], others: dict[str, Run] | None = None) -> dict[str, Any]:
        """A work by several contestants, and other runs beside it; ratios are to ours.

        Yes/no questions have their "flops", too: what the ratio would be if all computed at the same rate.
        """
        runs = {name: work.prepare(self.contestants[name]) for name in names} | (others or {})
        timings = self.time(work.name, runs)
        found = timings.to_dict(OURS)
        if work.kind == "yes_no":
            for name in timings.seconds:
                found[name]["flops"] = count_flops(runs[name])
        return found


def questions(bench: Bench) -> dict[str, Any]:
    """One image and several yes/no questions, beside the vision tower alone on that image."""
    tower = partial(bench.ours.model.model.vision_tower, bench.setup.pixels(1))
    counts = bench.amounts.questions
    works = {count: Work("yes_no", questions=count) for count in counts}
    return {str(count): bench.compare(work, list(CONTESTANTS), {TOWER: tower}) for count, work in works.items()}


def images(bench: Bench) -> dict[str, Any]:
    """Several images with several yes/no questions each."""
    return bench.compare(Work("yes_no", *bench.amounts.images), list(CONTESTANTS))


def generate(bench: Bench) -> dict[str, Any]:
    """Greedy generation with a dynamic cache, as `generate` does it when nothing else is asked for."""
    return {str(count): bench.compare(Work("generate", tokens=count), USUAL) for count in bench.amounts.tokens}


def compiled(bench: Bench) -> dict[str, Any]:
    """Greedy generation with a static cache and a compiled step; ratios are to ours compiled.

    Each contestant's plain run takes turns with them, under its name with ", plain".
    """
    torch._dynamo.reset()
    pixels, tokens = bench.setup.pixels(1), bench.amounts.compiled_tokens
    names = [name for name in USUAL if bench.contestants[name].compiles]
    runs = {name: bench.contestants[name].compiled_generation(pixels, PROMPT, tokens) for name in names}
    plain = {f"{name}, plain": bench.contestants[name].generation(pixels, PROMPT, tokens) for name in names}
    # The second run may compile again, for lengths that change.
    timings = bench.time(f"{tokens} tokens, compiled", runs | plain, warm_up=3, errors=Exception)
    return timings.to_dict(OURS)


def onnx(bench: Bench) -> dict[str, Any]:
    """One image and yes/no questions by the exported graphs in ONNX Runtime, in float32 and with int8 weights.

    Ratios are to ours in PyTorch, on a CPU in float32. Nothing is measured in another setting, or where ONNX Runtime
    is not installed.
    """
    if bench.setup.device != "cpu" or bench.setup.dtype != torch.float32:
        return {}
    if not all(map(find_spec, ("onnx", "onnxruntime", "onnxscript"))):
        return {}
    runs_of = onnx_runs(bench)
    found = {}
    for count in (1, 16):
        questions, pixels = ask_about(1, count), bench.setup.pixels(1)
        runs = {OURS: bench.ours.yes_no(pixels, questions)} | runs_of(pixels, questions)
        found[str(count)] = bench.time(f"{count} questions in ONNX Runtime", runs).to_dict(OURS)
    return found


def onnx_runs(bench: Bench) -> Callable[[torch.Tensor, list[list[str]]], dict[str, Run]]:
    """What makes runs of the exported graphs for an image and its questions, by name."""
    from ..publishing import export
    from ..publishing.exported import ExportedModel

    bench.say("exporting")
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        model = deepcopy(bench.ours.model)
        model.set_attn_implementation("eager")
        export.export_onnx(model, Path(folder))
        export.quantise(Path(folder))
        for name, kind in (("ONNX Runtime", ""), ("ONNX Runtime, int8", "_int8")):
            models[name] = ExportedModel(Path(folder), model.config, kind, torch.get_num_threads())

    def make(pixels: torch.Tensor, questions: list[list[str]]) -> dict[str, Run]:
        packed = bench.ours.process(questions, packed=True)

        def run(model: Any) -> Any:
            return model.question_logits(**packed, encoded_images=model.encode_images(pixels))

        return {name: partial(run, model) for name, model in models.items()}

    return make


def train(bench: Bench) -> dict[str, Any]:
    """A training step, forward, backward and AdamW; "per_question" is its time over the number of questions."""
    setup = replace(bench.setup, training=True)
    work = Work("train", *bench.amounts.training)
    runs = {name: work.prepare(CONTESTANTS[name](setup)) for name in USUAL}
    found = bench.time(work.name, runs).to_dict(OURS)
    for figures in found.values():
        if "seconds" in figures:
            figures["per_question"] = figures["seconds"] / (work.images * work.questions)
    return found


def load(bench: Bench) -> dict[str, Any]:
    """`from_pretrained` of weights that the system has read before, until they lie on the device."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for number, name in enumerate(USUAL):
            model, path = bench.contestants[name].model, Path(folder) / str(number)
            model.save_pretrained(path)
            runs[name] = partial(_load, type(model), path, bench.setup)
        return bench.time("loading", runs).to_dict(OURS)


def _load(model_class: Any, path: Path, setup: Setup) -> None:
    model_class.from_pretrained(path, dtype=setup.dtype).to(setup.device)


def memory(bench: Bench) -> dict[str, Any]:
    """Peak memory in bytes of each work and contestant, each in a process of its own."""
    amounts = bench.amounts
    works = [
        Work("yes_no", questions=max(amounts.questions)),
        Work("yes_no", *amounts.images),
        Work("generate", tokens=max(amounts.tokens)),
        Work("train", *amounts.training),
    ]
    found: dict[str, Any] = {}
    for work in works:
        setup = replace(bench.setup, training=work.kind == "train")
        for name in USUAL:
            bench.say(f"memory of {work.name}: {name}")
            try:
                figures: dict[str, Any] = measure(name, setup, [work])[0]
            except (MemoryError, RuntimeError) as error:
                figures = {"error": str(error)}
            found.setdefault(work.name, {})[name] = figures
    return found


def cached(bench: Bench) -> dict[str, Any]:
    """Our generation with and without a cache by length (both encode the image once); "ratio" is how much it saves."""
    found, pixels = {}, bench.setup.pixels(1)
    for tokens in bench.amounts.cached_tokens:
        runs = {
            name: bench.ours.generation(pixels, PROMPT, tokens, use_cache=name == "cached")
            for name in ("cached", "uncached")
        }
        found[str(tokens)] = bench.time(f"{tokens} tokens, cached or not", runs).to_dict("cached")
    return found


def cache_bytes(bench: Bench) -> dict[str, Any]:
    """Bytes of our cache for one image and some tokens: multi-head, grouped-query and multi-query attention."""
    sizes, found = bench.setup.sizes, {}
    input_ids = torch.full((1, bench.amounts.cache_tokens), VOCABULARY // 2, device=bench.setup.device)
    for heads in sorted({sizes.heads, sizes.key_value_heads, 1}, reverse=True):
        bench.say(f"cache of {heads} key/value heads")
        model = Ours(replace(bench.setup, sizes=replace(sizes, key_value_heads=heads))).model
        with torch.no_grad():
            cache = model(input_ids, bench.setup.pixels(1), use_cache=True).past_key_values
        text, image = (
            sum(tensor.nbytes for layer in part.layers for tensor in (layer.keys, layer.values))
            for part in (cache.self_attention_cache, cache.cross_attention_cache)
        )
        found[str(heads)] = {"text": text, "image": image, "together": text + image}
    return found


def split(bench: Bench) -> dict[str, Any]:
    """Our time split into kernels of the vision tower (and projections of its tokens), of the decoder, and the rest.

    "overhead" is what is left of the whole when the kernels are taken off: Python, checks, and the library's loop. On
    a CPU a run's tensor operations are recorded, and done again without any other code, in turns with the whole; on a
    GPU the profiler sums the time in which it computes. "vision_call" and "decoder_call" are the two halves as one
    calls them, so that it can be seen where the overhead lies.
    """
    pixels = bench.setup.pixels(1)
    encode = partial(bench.ours.model.encode_images, pixels)
    encoded = encode()
    many = max(count for count in bench.amounts.questions if count <= 16)
    works = [Work("yes_no"), Work("yes_no", questions=many), Work("generate", tokens=bench.amounts.compiled_tokens)]
    found = {}
    for work in works:
        if work.kind == "generate":
            decode = bench.ours.generation(pixels, PROMPT, work.tokens, pixel_values=None, encoded_images=encoded)
        else:
            decode = bench.ours.yes_no_about({"encoded_images": encoded}, ask_about(1, work.questions))
        whole = work.prepare(bench.ours)
        title = f"parts of {work.name}"
        if bench.setup.device == "cpu":
            parts = {"vision": record_kernels(encode), "decoder": record_kernels(decode)}
            runs: dict[str, Run] = {"whole": whole, "vision_call": encode, "decoder_call": decode}
            timings = bench.time(title, runs | {name: kernels.replay for name, kernels in parts.items()})
            seconds: dict[str, Any] = {name: timings.median(name) for name in timings.seconds}
            seconds["operations"] = {name: len(kernels.calls) for name, kernels in parts.items()}
        else:
            seconds = {"whole": bench.time(title, {"whole": whole}).median("whole")}
            seconds |= {"vision": device_seconds(encode), "decoder": device_seconds(decode)}
        seconds["overhead"] = seconds["whole"] - seconds["vision"] - seconds["decoder"]
        found[work.name] = seconds
    return found


def rate(bench: Bench) -> dict[str, Any]:
    """FLOP/s of vision towers and of plain matrix products, and "share": a tower's rate over the fastest product's.

    Also the limit of generation: the decoder's weights in bytes over the rate at which memory is read
    ("token_limit", seconds a token).
    """
    device, dtype = bench.setup.device, bench.setup.weight_dtype
    runs: dict[str, Run] = {}
    for rows, inner, columns in bench.amounts.products:
        product = (
            torch.randn(rows, inner, device=device).to(dtype),
            torch.randn(inner, columns, device=device).to(dtype),
        )
        runs[f"product {rows} × {inner} × {columns}"] = partial(torch.mm, *product)
    products = list(runs)
    for name in (OURS, OursWithPatches.name):
        for count in bench.amounts.tower_images:
            tower = bench.contestants[name].model.model.vision_tower
            runs[f"{name}, images: {count}"] = partial(tower, bench.setup.pixels(count))
    flops = {name: count_flops(run) for name, run in runs.items()}
    block = torch.zeros(64 * 1024**2 // dtype.itemsize, dtype=dtype, device=device)  # more than caches hold
    timings = bench.time("rates", runs | {"sum": block.sum})
    rates = {name: flops[name] / timings.median(name) for name in runs}
    best = max(rates[name] for name in products)
    found: dict[str, Any] = {
        name: {"flops": flops[name], "seconds": timings.median(name), "flops_per_second": rates[name]}
        | {"share": rates[name] / best}
        for name in runs
    }
    decoder = sum(weight.nbytes for weight in bench.ours.model.model.text_model.parameters())
    bandwidth = block.nbytes / timings.median("sum")
    limit = {"bytes_per_second": bandwidth, "decoder_bytes": decoder, "token_limit": decoder / bandwidth}
    return {"runs": found, "memory": limit}


def growth(bench: Bench) -> dict[str, Any]:
    """Time, operations and peak memory of our model as questions or images grow, with lines of least squares."""
    series = {
        "questions": [Work("yes_no", questions=count) for count in bench.amounts.grown_questions],
        "images": [Work("yes_no", images=count) for count in bench.amounts.grown_images],
    }
    found = {}
    for name, works in series.items():
        numbers = [getattr(work, name) for work in works]
        runs = {str(number): work.prepare(bench.ours) for number, work in zip(numbers, works)}
        timings = bench.time(f"growth with {name}", runs)
        bench.say(f"memory as {name} grow")
        # All in one process: from the smallest on, memory that stays with it hides no peak.
        peaks = [figures["peak"] for figures in measure(OURS, bench.setup, works)]
        points: dict[str, Sequence[float]] = {
            "seconds": [timings.median(str(number)) for number in numbers],
            "flops": [count_flops(run) for run in runs.values()],
            "peak_bytes": peaks,
        }
        lines = {key: fit_line(numbers, values) for key, values in points.items()}
        found[name] = {"numbers": numbers, "points": points, "lines": lines}
    return found


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    part.__name__: part
    for part in (
        questions,
        images,
        generate,
        compiled,
        onnx,
        train,
        load,
        memory,
        cached,
        cache_bytes,
        split,
        rate,
        growth,
    )
}

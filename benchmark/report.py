"""A benchmark as a report: the goals and how near they are, tables for people, the machine it ran on."""

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from .contestants import PaliGemma
from .parts import OURS, TOWER


Figures = Mapping[str, Any]  # the parts of one setting, by name

PEER = PaliGemma.name
MEGABYTE = 1e6


@dataclass(frozen=True)
class Goal:
    """A figure that the project wants to reach; `value` finds it in the parts, or raises LookupError."""

    work: str
    goal: float
    at_least: float
    value: Callable[[Figures], float]
    smaller_is_better: bool = False

    def judge(self, figures: Figures) -> dict[str, Any]:
        """The row of the table: "met" is "goal", "at least" or "no", and None where nothing was measured."""
        try:
            value: float | None = self.value(figures)
        except LookupError:
            value = None
        met = None if value is None else self.reached(value)
        return {"work": self.work, "value": value, "goal": self.goal, "at_least": self.at_least, "met": met}

    def reached(self, value: float) -> str:
        sign = -1 if self.smaller_is_better else 1
        limits = {"goal": self.goal, "at least": self.at_least}
        return next((name for name, limit in limits.items() if sign * value >= sign * limit), "no")


def _questions(count: int) -> Callable[[Figures], float]:
    return lambda figures: figures["questions"][str(count)][PEER]["ratio"]


def _passes(figures: Figures) -> float:
    runs = figures["questions"]["16"]
    return runs[OURS]["seconds"] / runs[TOWER]["seconds"]


def _tower_share(figures: Figures) -> float:
    """With the most images at once."""
    return [run["share"] for name, run in figures["rate"]["runs"].items() if name.startswith(f"{OURS}, images")][-1]


def _cached(figures: Figures) -> float:
    """At the greatest length."""
    return list(figures["cached"].values())[-1]["uncached"]["ratio"]


GOALS = (
    Goal("1 image, 1 yes/no", 1.8, 1.3, _questions(1)),
    Goal("1 image, 16 yes/no", 16, 12, _questions(16)),
    Goal("16 yes/no, in passes of the vision tower alone", 1.5, 2.0, _passes, smaller_is_better=True),
    Goal("32 images × 8 questions", 10, 7, lambda figures: figures["images"][PEER]["ratio"]),
    Goal("generate 32 tokens, plain", 1.3, 1.0, lambda figures: figures["generate"]["32"][PEER]["ratio"]),
    Goal(
        "generate 32 tokens, compiled, static cache, against the peer plain",
        3,
        2,
        lambda figures: figures["compiled"][f"{PEER}, plain"]["ratio"],
    ),
    Goal("training step, per question", 10, 6, lambda figures: figures["train"][PEER]["ratio"]),
    Goal("vision tower: share of the matrix-product rate", 0.8, 0.6, _tower_share),
    Goal("cached against uncached generation at 120 tokens", 10, 5, _cached),
)


def judge(figures: Figures) -> list[dict[str, Any]]:
    """All rows of the table of goals for one setting."""
    return [goal.judge(figures) for goal in GOALS]


def environment() -> dict[str, Any]:
    """The machine and the versions that the figures belong to."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def cpu_name() -> str:
    """The processor's name, as far as the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def seconds(value: float) -> str:
    """Three digits, in the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; the first column is of names, the others of numbers."""
    cells = [list(head), *map(list, rows)]
    cells.insert(1, ["---", *["--:"] * (len(cells[0]) - 1)])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def to_markdown(report: Mapping[str, Any]) -> str:
    """The whole report."""
    machine = report["environment"]
    place = f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores"
    place += f"; {machine['gpu']}" if "gpu" in machine else ""
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "transformers"))
    parts = [
        "# Benchmark",
        f"{place}. {versions}, {machine['cpu_capability']}.",
        "Times are medians of runs that take turns in one process. In brackets stands how many times as long as ours "
        "a run takes. Peers have the same widths and depths, and random weights. Goals are about how many times as "
        f"long {PEER} takes, where they say nothing else.",
    ]
    if report["options"]["quick"]:
        parts.append("**Tiny models and amounts (`--quick`): these figures say nothing about speed.**")
    for name, setting in report["settings"].items():
        parts += [f"## {name}", goals_table(setting["goals"])]
        for title, section in SECTIONS.items():
            lines = section(setting["figures"])
            parts += [f"### {title}", *lines] if lines else []
    return "\n\n".join(parts) + "\n"


def goals_table(rows: Iterable[Mapping[str, Any]]) -> str:
    body = []
    for row in rows:
        numbers = ("–" if row[key] is None else f"{row[key]:.3g}" for key in ("value", "goal", "at_least"))
        body.append([row["work"], *numbers, row["met"] or "not measured"])
    return table(["work", "value", "goal", "at least", "met"], body)


def comparisons(figures: Figures) -> dict[str, Mapping[str, Any]]:
    """All works that several contestants did, by the heading of their column."""
    found: dict[str, Mapping[str, Any]] = {}
    for count, runs in figures.get("questions", {}).items():
        found[f"1 image, {count} yes/no"] = runs
    amounts = figures["amounts"]
    batches = {"images": "{} × {} yes/no", "train": "training step, {} × {}"}
    headings = {
        part: heading.format(*amounts["training" if part == "train" else part]) for part, heading in batches.items()
    }
    for count, runs in figures.get("generate", {}).items():
        found[f"{count} tokens"] = runs
    headings["load"] = "load from disk"
    return found | {heading: figures[part] for part, heading in headings.items() if part in figures}


def _cell(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return "–"
    if "error" in run:
        return "failed"
    return seconds(run["seconds"]) + (f" ({run['ratio']:.2f})" if "ratio" in run else "")


def _times(figures: Figures) -> list[str]:
    columns = comparisons(figures)
    names = dict.fromkeys(name for runs in columns.values() for name in runs)
    rows = [[name, *(_cell(runs.get(name)) for runs in columns.values())] for name in names]
    return [table(["", *columns], rows)] if columns else []


def _operations(figures: Figures) -> list[str]:
    columns = {
        heading: {name: run["flops"] for name, run in runs.items() if "flops" in run}
        for heading, runs in comparisons(figures).items()
    }
    columns = {heading: counts for heading, counts in columns.items() if OURS in counts}
    names = dict.fromkeys(name for counts in columns.values() for name in counts)
    rows = [[name] for name in names]
    for counts in columns.values():
        for row in rows:
            count = counts.get(row[0])
            row.append("–" if count is None else f"{count / 1e9:.4g} ({count / counts[OURS]:.2f})")
    text = "GFLOP, and in brackets how many times ours: the ratio of times if all computed at the same rate."
    return [text, table(["", *columns], rows)] if rows else []


def _compiled(figures: Figures) -> list[str]:
    """In brackets stands the time over that of ours compiled, in both columns."""
    runs = figures.get("compiled", {})
    names = [name for name in runs if not name.endswith(", plain")]
    rows = [[name, _cell(runs[name]), _cell(runs[f"{name}, plain"])] for name in names]
    errors = [f"{name}: `{run['error']}`" for name, run in runs.items() if "error" in run]
    head = [f"{figures['amounts']['compiled_tokens']} tokens", "static cache, compiled", "plain"]
    return [table(head, rows), *errors] if rows else []


def _onnx(figures: Figures) -> list[str]:
    works = figures.get("onnx", {})
    names = list(next(iter(works.values()))) if works else []
    rows = [[name, *(_cell(runs[name]) for runs in works.values())] for name in names]
    return [table(["", *(f"1 image, {count} yes/no" for count in works)], rows)] if rows else []


def _per_second(runs: Mapping[str, Any], count: int) -> dict[str, float]:
    return {name: count / run["seconds"] for name, run in runs.items() if "seconds" in run}


def _throughput(figures: Figures) -> list[str]:
    columns: dict[str, dict[str, float]] = {}
    if "images" in figures:
        images, questions = figures["amounts"]["images"]
        columns["images"] = _per_second(figures["images"], images)
        columns["questions about them"] = _per_second(figures["images"], images * questions)
    if "generate" in figures:
        count, runs = list(figures["generate"].items())[-1]
        columns[f"tokens, of {count}"] = _per_second(runs, int(count))
    if "train" in figures:
        images, questions = figures["amounts"]["training"]
        columns["questions trained on"] = _per_second(figures["train"], images * questions)
    names = dict.fromkeys(name for values in columns.values() for name in values)
    rows = [
        [name, *(f"{values[name]:.4g}" if name in values else "–" for values in columns.values())] for name in names
    ]
    return [table(["per second", *columns], rows)] if columns else []


def _memory(figures: Figures) -> list[str]:
    works = figures.get("memory", {})
    if not works:
        return []

    def cell(run: Mapping[str, Any]) -> str:
        if "error" in run:
            return "failed"
        return f"{run['peak'] / MEGABYTE:.0f} (+{(run['peak'] - run['before']) / MEGABYTE:.0f})"

    names = list(next(iter(works.values())))
    rows = [[name, *(cell(runs[name]) for runs in works.values())] for name in names]
    text = "The most memory in MB, and in brackets how much of it the work itself added; a process for each."
    return [text, table(["", *works], rows)]


def _cache(figures: Figures) -> list[str]:
    parts = []
    if runs := figures.get("cached"):
        rows = []
        for count, pair in runs.items():
            times = (seconds(pair[name]["seconds"]) for name in ("cached", "uncached"))
            rows.append([count, *times, f"{pair['uncached']['ratio']:.2f}"])
        parts.append(table(["tokens", "cached", "uncached", "ratio"], rows))
    if sizes := figures.get("cache_bytes"):
        rows = [[heads, *(f"{one[name]:,}" for name in ("text", "image", "together"))] for heads, one in sizes.items()]
        parts.append(table(["key/value heads", "bytes for text", "for the image", "together"], rows))
    return parts


def _split(figures: Figures) -> list[str]:
    names = ("whole", "vision", "decoder", "overhead")
    rows = [
        [work, *(f"{seconds(one[name])} ({one[name] / one['whole']:.0%})" for name in names)]
        for work, one in figures.get("split", {}).items()
    ]
    text = "Vision and decoder are timed alone, so together they may take longer than the whole."
    return [text, table(["ours", *names], rows)] if rows else []


def _rate(figures: Figures) -> list[str]:
    if "rate" not in figures:
        return []
    runs, memory = figures["rate"]["runs"], figures["rate"]["memory"]
    rows = []
    for name, run in runs.items():
        giga = (f"{run[key] / 1e9:.4g}" for key in ("flops", "flops_per_second"))
        rows.append([name, *giga, seconds(run["seconds"]), f"{run['share']:.2f}"])
    limit = (
        f"Memory is read at {memory['bytes_per_second'] / 1e9:.3g} GB/s, so a token, which needs all "
        f"{memory['decoder_bytes'] / MEGABYTE:.3g} MB of the decoder's weights, takes at least "
        f"{seconds(memory['token_limit'])} where they do not stay in a cache."
    )
    return [table(["", "GFLOP", "GFLOP/s", "time", "share of the fastest product"], rows), limit]


def _growth(figures: Figures) -> list[str]:
    rows = []
    for name, series in figures.get("growth", {}).items():
        for key, line in series["lines"].items():
            span = f"{series['numbers'][0]} to {series['numbers'][-1]} {name}, {key.replace('_', ' ')}"
            rows.append([span, *(f"{line[part]:.4g}" for part in ("slope", "intercept", "r_squared"))])
    return [table(["ours", "slope", "intercept", "R²"], rows)] if rows else []


SECTIONS: dict[str, Callable[[Figures], list[str]]] = {
    "Times": _times,
    "Operations": _operations,
    "Compiled generation": _compiled,
    "ONNX Runtime": _onnx,
    "Throughput": _throughput,
    "Memory": _memory,
    "Cache": _cache,
    "Where our time goes": _split,
    "Rate of the vision tower": _rate,
    "Growth": _growth,
}

"""Pictures of a benchmark: time against questions, tokens, and how cost grows; a column for each setting."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..evaluation.plots import save
from .contestants import CONTESTANTS
from .parts import OURS, TOWER


COLORS = dict(zip(CONTESTANTS, ("#2166ac", "#67a9cf", "#b2182b", "#ef8a62", "#1b7837", "#762a83")))


def draw(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the pictures that the report has figures for; their paths."""
    paths = []
    for part, draw_one in PICTURES.items():
        settings = {name: s["figures"][part] for name, s in report["settings"].items() if part in s["figures"]}
        if not settings:
            continue
        figure = Figure(figsize=(5.6 * len(settings), 4.4), layout="constrained")
        for axes, (name, figures) in zip(figure.subplots(1, len(settings), squeeze=False)[0], settings.items()):
            draw_one(axes, figures)
            axes.set_title(name)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#e6e6e6", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.legend(frameon=False, fontsize=8)
        paths.append(folder / f"{part}.png")
        save(figure, paths[-1])
    return paths


def _lines(axes: Axes, figures: Mapping[str, Any], label: str) -> None:
    """Milliseconds of every contestant against the numbers that the figures are for."""
    numbers = list(map(int, figures))
    for name in next(iter(figures.values())):
        if name == TOWER:
            continue
        found = {number: runs[name] for number, runs in zip(numbers, figures.values()) if "seconds" in runs[name]}
        times = [1e3 * run["seconds"] for run in found.values()]
        axes.plot(
            list(found), times, marker="o", markersize=4, color=COLORS[name], label=name, zorder=2 + (name == OURS)
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(numbers, list(map(str, numbers)))
    axes.set(xlabel=label, ylabel="milliseconds")


def _questions(axes: Axes, figures: Mapping[str, Any]) -> None:
    _lines(axes, figures, "yes/no questions about one image")
    tower = 1e3 * next(iter(figures.values()))[TOWER]["seconds"]
    axes.axhline(tower, color="#555555", linewidth=1, linestyle=(0, (4, 3)), label=f"our {TOWER}")


def _tokens(axes: Axes, figures: Mapping[str, Any]) -> None:
    _lines(axes, figures, "generated tokens")


def _cached(axes: Axes, figures: Mapping[str, Any]) -> None:
    numbers = list(map(int, figures))
    for name, color in (("cached", "#2166ac"), ("uncached", "#b2182b")):
        times = [1e3 * pair[name]["seconds"] for pair in figures.values()]
        axes.plot(numbers, times, marker="o", markersize=4, color=color, label=name)
    axes.set(xlabel="generated tokens", ylabel="milliseconds", ylim=(0, None))


def _growth(axes: Axes, figures: Mapping[str, Any]) -> None:
    for (name, series), color in zip(figures.items(), ("#2166ac", "#b2182b")):
        numbers, line = series["numbers"], series["lines"]["seconds"]
        axes.scatter(numbers, [1e3 * value for value in series["points"]["seconds"]], s=16, color=color)
        ends = [numbers[0], numbers[-1]]
        fitted = [1e3 * (line["slope"] * number + line["intercept"]) for number in ends]
        label = f"{name}: {1e3 * line['slope']:.3g} ms each, R² {line['r_squared']:.3f}"
        axes.plot(ends, fitted, color=color, linewidth=1, label=label)
    axes.set(xlabel="number", ylabel="milliseconds", xlim=(0, None), ylim=(0, None))


PICTURES: dict[str, Callable[[Axes, Mapping[str, Any]], None]] = {
    "questions": _questions,
    "generate": _tokens,
    "cached": _cached,
    "growth": _growth,
}

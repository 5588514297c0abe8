"""Pictures of a report: reliability, accuracy by kind, examples with attention. Each file is whole or not there."""

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..images_traffic_vlm import to_rgb
from .pointing import find_targets, word_maps
from .predict import encode


MODEL, BLIND, OTHER = "#2166ac", "#b8bfc7", "#d6604d"
RIGHT, WRONG = "#1b7837", "#b2182b"
WIDTH = 34  # characters below an example
STRONG = 10  # times the even share of attention: so much and more is shown in full, the even share and less not at all


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file that is complete or not there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=130, facecolor="white")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def draw_reliability(calibration: Mapping[str, Any], path: Path) -> None:
    """The share of yes against P(yes), before and after the fitted temperature, and below how many questions."""
    before = calibration["bins_before"] or calibration["bins"]
    curves = [(f"temperature {calibration['temperature']:.2f}", before, OTHER)]
    errors = [calibration["ece_before"] or calibration["ece"], calibration["ece_after"]]
    if calibration["bins_after"]:
        curves.append((f"fitted, {calibration['half_temperature']:.2f}", calibration["bins_after"], MODEL))
    figure = Figure(figsize=(5.2, 6.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    upper.plot([0, 1], [0, 1], color="#888888", linewidth=1, linestyle=(0, (4, 3)))
    for number, ((name, bins, color), error) in enumerate(zip(curves, errors)):
        known = [one for one in bins if one["questions"]]
        points = [one["probability"] for one in known], [one["yes_rate"] for one in known]
        upper.plot(*points, marker="o", markersize=4, color=color, linewidth=1, label=f"{name}: error {error:.3f}")
        most = max(one["questions"] for one in bins)
        sizes = [20 + 160 * one["questions"] / most for one in known]
        upper.scatter(*points, s=sizes, color=color, alpha=0.35, clip_on=False)
        width = 1 / len(bins) / len(curves)
        places = [one["low"] + (number + 0.5) * width for one in bins]
        lower.bar(places, [one["questions"] for one in bins], width=0.9 * width, color=color)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="share of yes", title="Reliability of P(yes)")
    upper.legend(frameon=False, loc="upper left")
    lower.set(xlabel="P(yes)", ylabel="questions")
    for axes in (upper, lower):
        _clean(axes)
        axes.grid(color="#e6e6e6", linewidth=0.8)
    save(figure, path)


def draw_kinds(yes_no: Mapping[str, Any], path: Path) -> None:
    """Balanced accuracy of each kind, the model's above that of the blind model."""
    rows = {kind: row for kind, row in yes_no["by_kind"].items() if row["balanced_accuracy"] is not None}
    rows = dict(sorted(rows.items(), key=lambda item: item[1]["balanced_accuracy"]))
    rows["all together"] = yes_no["all"]
    figure = Figure(figsize=(7, 1.2 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0.5, color="#555555", linewidth=1, linestyle=(0, (4, 3)), zorder=0.5)
    places = np.arange(len(rows))
    for key, name, color, shift in (("balanced_accuracy", "model", MODEL, 0.19), ("blind", "blind", BLIND, -0.19)):
        values = [row[key] or 0.0 for row in rows.values()]
        axes.barh(places + shift, values, height=0.36, color=color, label=name)
    for place, row in enumerate(rows.values()):
        value, error = row["balanced_accuracy"] or 0.0, row["error"] or 0.0
        axes.errorbar(value, place + 0.19, xerr=error, color="#222222", linewidth=1, capsize=2)
        axes.text(1.02, place, f"{value:.2f}  ({row['difference'] or 0.0:+.2f})", va="center", fontsize=9)
    names = [f"{kind.replace('_', ' ')} ({row['facts']})" for kind, row in rows.items()]
    axes.set_yticks(places, names)
    axes.set(xlim=(0, 1), xlabel="balanced accuracy, with its standard error; in brackets the number of facts")
    axes.set_title("By kind of question", loc="left")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.995), ncols=2, borderaxespad=0)
    _clean(axes)
    axes.tick_params(axis="y", length=0)
    save(figure, path)


def draw_examples(
    model: Any, processor: Any, rows: Any, examples: Sequence[Mapping[str, Any]], path: Path, columns: int = 6
) -> None:
    """Right answers above wrong ones, with the boxes that make a yes and the attention of the asked word."""
    groups = [[one for one in examples if one["is_right"] == is_right] for is_right in (True, False)]
    lines = [group[start : start + columns] for group in groups for start in range(0, len(group), columns)]
    if not lines:
        return
    figure = Figure(figsize=(2.5 * columns, 3.45 * len(lines)), layout="constrained")
    grid = figure.subplots(len(lines), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for line, group in zip(grid, lines):
        for axes, example in zip(line, group):
            _draw_example(axes, model, processor, rows[example["row"]], example)
    save(figure, path)


def _draw_example(axes: Axes, model: Any, processor: Any, row: Mapping[str, Any], example: Mapping[str, Any]) -> None:
    image = to_rgb(row["image"])
    encoded, index = encode(model, processor, [image])
    [weights] = word_maps(model, processor, encoded, index, [example["question"]], [example["label"]], or_last=True)
    axes.imshow(image, extent=(0, 1, 1, 0), aspect="auto")
    if weights is not None:
        # A scale of its own for each map would make much of the noise of an even one.
        heat = ((weights * weights.numel() - 1) / (STRONG - 1)).clamp(0, 1).numpy()
        look: dict[str, Any] = {"cmap": "autumn", "vmin": 0, "vmax": 1, "interpolation": "bilinear"}
        axes.imshow(heat, extent=(0, 1, 1, 0), aspect="auto", alpha=0.75 * heat, **look)
    asked = {name + "s": [example[name]] for name in ("question", "answer", "label", "fact")}
    for target in find_targets({**row, **asked}):
        for left, top, right, bottom in target.boxes:
            width, height = target.size
            corner, size = (left / width, top / height), ((right - left) / width, (bottom - top) / height)
            axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="white", linewidth=1.2))
    color = RIGHT if example["is_right"] else WRONG
    axes.add_patch(Rectangle((0, 0), 1, 1, fill=False, edgecolor=color, linewidth=4))
    sure = "" if example["probability"] is None else f", P(yes) {example['probability']:.2f}"
    lines = textwrap.wrap(example["question"], WIDTH)
    lines += textwrap.wrap(f"truth: {example['answer']}", WIDTH, max_lines=2)
    lines += textwrap.wrap(f"model: {example['said']}{sure}", WIDTH, max_lines=2)
    axes.text(0, 1.03, "\n".join(lines), transform=axes.transData, va="top", fontsize=8.5, color=color)
    axes.set_ylim(1.42, 0)

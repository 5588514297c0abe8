"""Plots of a report: reliability, accuracy by question type, examples with attention maps."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..files import atomic_write
from ..images_traffic_vlm import to_rgb
from .grounding import grounded_questions, word_maps
from .predict import encode


MODEL, BASELINE, BEFORE = "#2166ac", "#b8bfc7", "#d6604d"
RIGHT, WRONG = "#1b7837", "#b2182b"
TEXT_WIDTH = 34  # characters
OPAQUE = 10  # attention, as a multiple of an even map's, that is drawn in full


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file that is either complete or absent."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def draw_reliability(calibration: Mapping[str, Any], path: Path) -> None:
    """Plot the yes rate against P(yes), before and after fitting the temperature, above the number of questions.

    Args:
        calibration: of a report.
    """
    fitted = calibration["half_temperature"] or calibration["fitted_temperature"]
    curves = {
        f"temperature {calibration['temperature']:.2f}": ("before", BEFORE),
        f"fitted, {fitted:.2f}": ("after", MODEL),
    }
    figure = Figure(figsize=(5.2, 6.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    upper.plot([0, 1], [0, 1], color="gray", linestyle="--")
    for i, (name, (key, color)) in enumerate(curves.items()):
        bins = pd.DataFrame(calibration[f"bins_{key}"]).astype(float)
        known = bins[bins["questions"] > 0]
        label = f"{name}: error {calibration[f'ece_{key}']:.3f}"
        upper.plot(known["p_yes"], known["yes_rate"], marker="o", color=color, label=label)
        width = 1 / len(bins) / len(curves)
        lower.bar(bins["low"] + (i + 0.5) * width, bins["questions"], width=0.9 * width, color=color)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="yes rate", title="Reliability of P(yes)")
    upper.legend(loc="upper left")
    lower.set(xlabel="P(yes)", ylabel="questions")
    save(figure, path)


def draw_question_types(table: pd.DataFrame, path: Path) -> None:
    """Plot the balanced accuracy of each question type above that of the mean image.

    Args:
        table: "yes_no_by_question_type" of a report.
    """
    table = table[["balanced accuracy", "±", "mean image", "question ids"]].astype(float)
    table = table.dropna(subset="balanced accuracy").sort_values("balanced accuracy").fillna(0)
    figure = Figure(figsize=(7, 2 + 0.42 * len(table)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0.5, color="gray", linestyle="--", zorder=0.5)
    y = np.arange(len(table))
    axes.barh(
        y + 0.19, table["balanced accuracy"], height=0.36, color=MODEL, label="model", xerr=table["±"], capsize=2
    )
    axes.barh(y - 0.19, table["mean image"], height=0.36, color=BASELINE, label="mean image")
    axes.set_yticks(
        y, [f"{name.replace('_', ' ')} ({count:.0f})" for name, count in zip(table.index, table["question ids"])]
    )
    axes.set(xlim=(0, 1), xlabel="balanced accuracy ± standard error (number of question ids in brackets)")
    axes.set_title("By question type", loc="left")
    axes.legend(loc="lower right")
    save(figure, path)


def draw_examples(
    model: Any, processor: Any, rows: Any, examples: Sequence[Mapping[str, Any]], path: Path, columns: int = 6
) -> None:
    """Plot right answers above wrong ones, with the boxes of a yes and the attention map of the asked word."""
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
    encoded = encode(model, processor, [image])
    [[weights]] = word_maps(model, processor, encoded, [[(example["question"], example["category"])]], or_last=True)
    axes.imshow(image, extent=(0, 1, 1, 0), aspect="auto")
    if weights is not None:
        # One scale for all maps: a scale of its own would magnify the noise of an even map.
        heat = ((weights * weights.numel() - 1) / (OPAQUE - 1)).clamp(0, 1).numpy()
        style: dict[str, Any] = {"cmap": "autumn", "vmin": 0, "vmax": 1, "interpolation": "bilinear"}
        axes.imshow(heat, extent=(0, 1, 1, 0), aspect="auto", alpha=0.75 * heat, **style)
    names = {"questions": "question", "answers": "truth", "categories": "category", "question_ids": "question_id"}
    asked = {column: [example[name]] for column, name in names.items()}
    for grounded in grounded_questions({**row, **asked}):
        width, height = grounded.size
        for left, top, right, bottom in grounded.boxes:
            corner, size = (left / width, top / height), ((right - left) / width, (bottom - top) / height)
            axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="white"))
    color = RIGHT if example["is_right"] else WRONG
    axes.add_patch(Rectangle((0, 0), 1, 1, fill=False, edgecolor=color, linewidth=4))
    score = "" if example["score"] is None else f", {example['score']:.2f}"
    lines = textwrap.wrap(example["question"], TEXT_WIDTH)
    lines += textwrap.wrap(f"truth: {example['truth']}", TEXT_WIDTH, max_lines=2)
    lines += textwrap.wrap(f"model: {example['answer'] or 'no answer'}{score}", TEXT_WIDTH, max_lines=2)
    axes.text(0, 1.03, "\n".join(lines), va="top", fontsize=8.5, color=color)
    axes.set_ylim(1.42, 0)

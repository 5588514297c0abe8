"""Plots of a report: reliability, and accuracy by question type."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..files import atomic_write


MODEL, BASELINE, BEFORE = "#2166ac", "#b8bfc7", "#d6604d"


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

"""Plots of a report: reliability, and accuracy by question type."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure


AFTER, BEFORE, BASELINE = "#2166ac", "#d6604d", "#b8bfc7"


def draw_reliability(calibration: Mapping[str, Any], path: Path) -> None:
    """Plot the yes rate against P(yes), before and after fitting the temperature, above the number of questions.

    Args:
        calibration: of a report.
    """
    figure = Figure(figsize=(5.2, 6.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    upper.plot([0, 1], [0, 1], color="gray", linestyle="--")
    for key, name, color in (("before", "temperature", BEFORE), ("after", "fitted_temperature", AFTER)):
        bins = pd.DataFrame(calibration[f"bins_{key}"]).astype(float)
        known = bins[bins["questions"] > 0]
        label = f"{key}: temperature {calibration[name]:.2f}, error {calibration[f'ece_{key}']:.3f}"
        upper.plot(known["p_yes"], known["yes_rate"], marker="o", color=color, label=label)
        lower.stairs(bins["questions"], [*bins["low"], 1.0], color=color)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="yes rate", title="Reliability of P(yes)")
    upper.legend(loc="upper left")
    lower.set(xlabel="P(yes)", ylabel="questions")
    figure.savefig(path, dpi=130)


def draw_question_types(types: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Plot the balanced accuracy of each question type, with its standard error, and that of the mean image.

    Args:
        types: "yes_no_by_question_type" of a report.
    """
    table = pd.DataFrame.from_dict(types, orient="index")[["balanced accuracy", "±", "mean image"]].astype(float)
    table = table.dropna(subset="balanced accuracy").sort_values("balanced accuracy").fillna(0)
    figure = Figure(figsize=(7, 2 + 0.3 * len(table)), layout="constrained")
    axes = figure.subplots()
    names = table.index.str.replace("_", " ")
    axes.barh(names, table["balanced accuracy"], xerr=table["±"], capsize=2, color=AFTER, label="model")
    axes.plot(table["mean image"], names, "o", color=BASELINE, label="mean image")
    axes.set(xlim=(0, 1), xlabel="balanced accuracy ± standard error", title="By question type")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=130)

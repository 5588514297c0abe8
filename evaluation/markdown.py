"""A report as Markdown. docs/evaluation.md explains the metrics."""

from collections.abc import Mapping
from typing import Any

import pandas as pd


HEADLINE = ("balanced accuracy", "±", "right where it is there", "AUC", "calibration error", "questions")
PLOTS = {
    "yes_no_by_question_type": "![Balanced accuracy, and that of the mean image](question_types.png)",
    "calibration": "![Reliability](reliability.png)",
}


def format_value(value: Any) -> str:
    """Text of a cell: three decimals for a float, "–" for None and NaN."""
    if pd.isna(value):
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of {row: {column: value}}, with `title` above the names of the rows."""
    columns = list(next(iter(rows.values()), []))
    lines = [[title, *columns], ["---", *["--:"] * len(columns)]]
    lines += [[name, *(format_value(row[column]) for column in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def headline(report: Mapping[str, Any]) -> str:
    """The table of README.md: known sources, unseen sources and rendered scenes, with the columns that matter most."""
    kinds = report["tables"].get("yes_no_by_kind", {})
    return table("sources", {kind: {column: row[column] for column in HEADLINE} for kind, row in kinds.items()})


def to_markdown(report: Mapping[str, Any]) -> str:
    """All tables of a report of `evaluate_model`, with the names of model and datasets if it has them."""
    about = {name: report[name] for name in ("model", "datasets", "images_by_source") if name in report}
    if "repeated" in report:
        about["near-duplicates of training images, whose figures are too high"] = report["repeated"] or "none"
    calibration = {name: {"": value} for name, value in report["calibration"].items() if "bins" not in name}
    parts = ["# Evaluation", "docs/evaluation.md of Traffic VLM explains the metrics."]
    parts += ["\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in about.items())]
    for name, rows in {**report["tables"], "calibration": calibration}.items():
        parts += [f"## {name.replace('_', ' ')}", PLOTS.get(name, ""), table("", rows)] if rows else []
    return "\n\n".join(filter(None, parts)) + "\n"

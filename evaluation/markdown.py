"""A report as Markdown. docs/evaluation.md explains the metrics."""

from collections.abc import Mapping
from typing import Any

import pandas as pd


HEADLINE = ("balanced accuracy", "±", "right where it is there", "AUC", "calibration error", "questions")
# What stands above a table.
NOTES = {
    "yes_no_by_kind": "Training has other images of known sources, and none of unseen ones: expect their figures on a "
    "camera of your own. ± is one standard error. A model that is shown the mean image sees nothing. –: too few "
    "questions to tell.",
    "yes_no_by_question_type": "![Balanced accuracy, and that of the mean image](question_types.png)",
    "words_by_kind": '"None" is right if the asked object is not there.',
    "contradictions": "Fraction of images for which two answers contradict each other by more than 0.1.",
    "paraphrases": "Of all pairs of paraphrases of a yes/no question.",
    "locating": "One point for each box, of classes whose every object is labeled. The score from which objects are "
    "reported gives a precision of 0.8 on one half of the images; recall, also by the shorter side of the box, is of "
    "the other.",
    "calibration": "half_temperature is fitted to one half of the images; on the other, ece_before and ece_after are "
    "the errors at the model's temperature and at this one.\n\n![Reliability](reliability.png)",
}


def format_value(value: Any) -> str:
    """Text of a cell: three decimals for a float, "–" for None and NaN."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
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
    parts = ["# Evaluation", "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in about.items())]
    for name, rows in {**report["tables"], "calibration": calibration}.items():
        parts += [f"## {name.replace('_', ' ')}", NOTES.get(name, ""), table("", rows)] if rows else []
    return "\n\n".join(filter(None, parts)) + "\n"

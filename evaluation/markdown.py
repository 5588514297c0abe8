"""A report as Markdown. docs/evaluation.md explains the metrics."""

from collections.abc import Mapping
from typing import Any

import pandas as pd


CALIBRATION = (
    "half_temperature is fitted to one half of the images; ece_before and ece_after are the calibration errors on the "
    "other half at the model's temperature and at this one.\n\n![Reliability](reliability.png)"
)
# Sections: what the tables show, and the tables by name with the heading of their first column.
SECTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "Yes or no": (
        "Known sources are those that training has other images of; it has none of unseen ones, which tell what to "
        "expect on a camera of your own. ± is one standard error, with images as clusters. The mean image is that of "
        "all images: a model that is shown it sees nothing.\n\n"
        "![Balanced accuracy by question type, beside that of the mean image](question_types.png)",
        {
            "yes_no_by_kind": "sources",
            "yes_no_by_source": "source",
            "yes_no_by_question_type": "question type",
            "yes_no_by_category": "category",
        },
    ),
    "Words": (
        'Own type: answers that are a value of the question type. "None" is right if the asked object is not there.',
        {
            "words_by_kind": "sources",
            "words_by_source": "source",
            "words_by_question_type": "question type",
            "words_by_answer": "question type / answer",
        },
    ),
    "Perplexity": ("Of the true answers, [EOS] included.", {"perplexity": "source"}),
    "Contradictions": (
        "Fraction of images for which two answers contradict each other by more than 0.1.",
        {"contradictions": "the worst pairs"},
    ),
    "Paraphrases": ("Of all pairs of paraphrases of a yes/no question.", {"paraphrases": "question type"}),
    "Corrupted images": ("Some of the images, at the model's input size.", {"robustness": "condition"}),
    "Grounding": (
        "How often the patch with the highest cross-attention of an object's word lies in one of its boxes.",
        {"pointing_by_source": "source", "pointing_by_category": "category"},
    ),
}


def format_value(value: Any, is_signed: bool = False) -> str:
    """Text of a cell: three decimals for a float, "–" for None and NaN."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if pd.isna(value):
        return "–"
    if isinstance(value, float):
        return f"{value:+.3f}" if is_signed else f"{value:.3f}"
    return str(value)


def table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of {row: {column: value}}, with `title` above the names of the rows."""
    columns = list(next(iter(rows.values()), []))
    lines = [[title, *columns], ["---", *["--:"] * len(columns)]]
    for name, row in rows.items():
        lines.append([name, *(format_value(row[column], column == "difference") for column in columns)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def headline(report: Mapping[str, Any]) -> str:
    """The table of README.md: known sources, unseen sources and rendered scenes, with the columns that matter most."""
    columns = ("balanced accuracy", "±", "AUC", "calibration error", "questions")
    kinds = report["tables"].get("yes_no_by_kind", {})
    return table("sources", {kind: {column: row[column] for column in columns} for kind, row in kinds.items()})


def to_markdown(report: Mapping[str, Any]) -> str:
    """All tables of a report of `evaluate_model`, with the names of model and datasets if it has them."""
    about = {name: report[name] for name in ("model", "graphs", "datasets", "images_by_source") if report.get(name)}
    if "repeated" in report:
        about["near-duplicates of training images, whose figures are too high"] = report["repeated"] or "none"
    parts = ["# Evaluation", "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in about.items())]
    for title, (text, headings) in SECTIONS.items():
        if found := [name for name in headings if name in report["tables"]]:
            parts += [f"## {title}", text, *(table(headings[name], report["tables"][name]) for name in found)]
    if calibration := report["calibration"]:
        figures = {name: {"": value} for name, value in calibration.items() if not name.startswith("bins_")}
        parts += ["## Calibration", CALIBRATION, table("", figures)]
    return "\n\n".join(parts) + "\n"

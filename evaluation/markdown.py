"""A report as Markdown. docs/evaluation.md explains the metrics."""

from collections.abc import Mapping
from typing import Any

import pandas as pd


WORST_PAIRS = 10  # of contradictions that are listed
# Sections: what the tables show, and the tables by name with the heading of their first column.
SECTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "Yes or no": (
        "Known sources are those that training has other images of; it has none of unseen ones, which tell what to "
        "expect on a camera of your own. ± is one standard error, with images as clusters. The mean image is that of "
        "all images: a model that is shown it sees nothing.\n\n"
        "![Balanced accuracy by question type, beside that of the mean image](question_types.png)\n\n"
        "![Right and wrong answers with the attention of the asked word](examples.png)",
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
    if pd.isna(value):
        return "–"
    if isinstance(value, float):
        return f"{value:+.3f}" if is_signed else f"{value:.3f}"
    return str(value)


def table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of {row: {column: value}}, with `title` above the names of the rows."""
    columns = list(next(iter(rows.values())))
    lines = [[title, *columns], ["---", *["--:"] * len(columns)]]
    for name, row in rows.items():
        lines.append([name, *(format_value(row[column], column == "difference") for column in columns)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def headline(report: Mapping[str, Any]) -> str:
    """The table of README.md: known sources, unseen sources and rendered scenes, with the columns that matter most."""
    columns = ("balanced accuracy", "±", "AUC", "calibration error", "questions")
    kinds = report["tables"]["yes_no_by_kind"]
    return table("sources", {kind: {column: row[column] for column in columns} for kind, row in kinds.items()})


def to_markdown(report: Mapping[str, Any]) -> str:
    """All tables of a report of `evaluate_model`, and the names of model and datasets if it has them."""
    questions, tables = report["questions"], report["tables"]
    parts = ["# Evaluation"]
    if "model" in report:
        exported = f", exported to `{report['graphs']}`," if report.get("graphs") else ""
        datasets = ", ".join(f"`{name}`" for name in report["datasets"])
        parts.append(f"Model `{report['model']}`{exported} on {datasets}.")
    sources = ", ".join(f"{name} {count}" for name, count in report["images_by_source"].items())
    parts.append(
        f"{report['images']} images ({sources}), {questions['yes_no']} yes/no questions and {questions['words']} "
        "questions with answers in words."
    )
    if "repeated" in report:
        repeated = ", ".join(f"{name} {count}" for name, count in report["repeated"].items())
        parts.append(f"Near-duplicates of training images, whose figures are too high: {repeated or 'none'}.")
    for title, (text, headings) in SECTIONS.items():
        if found := [name for name in headings if name in tables]:
            parts += [f"## {title}", text, *(table(headings[name], _head(name, tables[name])) for name in found)]
        if title == "Yes or no" and report["calibration"]:
            parts += ["## Calibration", _calibration(report["calibration"]), "![Reliability](reliability.png)"]
    return "\n\n".join(parts) + "\n"


def _head(name: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    return dict(list(rows.items())[: WORST_PAIRS if name == "contradictions" else None])


def _calibration(found: Mapping[str, Any]) -> str:
    text = f"The model's temperature of P(yes) is {found['temperature']:.3f}. "
    if found["half_temperature"] is None:
        text += "There are too few images to fit a temperature to one half and test it on the other. "
    else:
        errors = [format_value(found[f"ece_{name}"]) for name in ("before", "after")]
        text += (
            f"A temperature of {found['half_temperature']:.3f}, fitted to {found['questions_fitted']} questions about "
            f"one half of the images, changes the calibration error on {found['questions_tested']} questions about "
            f"the other half from {errors[0]} to {errors[1]}. "
        )
    text += f"Fitted to all images, it is {found['fitted_temperature']:.3f}. Sources: {', '.join(found['fitted_on'])}."
    if found["at_limit"]:
        text += " That is a limit of the search: all answers are right, or they are unrelated to the truth."
    return text

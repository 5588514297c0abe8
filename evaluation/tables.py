"""A report as Markdown tables, for people."""

from collections.abc import Mapping, Sequence
from typing import Any


PICTURES = {
    "reliability.png": "Reliability of P(yes)",
    "kinds.png": "Balanced accuracy by kind, beside the blind baseline",
    "examples.png": "Right and wrong answers, and where the asked word looks",
}
BASELINES = {
    "training": "The mean image and the most frequent answers are those of the training set.",
    "evaluated": "No training set was given: the mean image and the most frequent answers are those of the evaluated "
    "images themselves. The majority has so seen the answers, and stands too high.",
}
YES_NO = {
    "balanced accuracy": "balanced_accuracy",
    "±": "error",
    "blind": "blind",
    "difference": "difference",
    "plain accuracy": "accuracy",
    "blind, plain": "blind_accuracy",
    "majority, plain": "majority_accuracy",
    "questions": "all_questions",
    "facts counted": "facts",
    "left out": "facts_left_out",
}
WORDS = {
    "exact match": "exact_match",
    "±": "error",
    "blind": "blind",
    "difference": "difference",
    "majority": "majority",
    "questions": "questions",
}


def number(value: Any, signed: bool = False) -> str:
    """Three digits of a share, whole numbers as they are, "–" for what is not known."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:+.3f}" if signed else f"{value:.3f}"
    return str(value)


def table(title: str, columns: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each of `rows`; `columns` are headings and the keys of what stands under them."""
    lines = [[title, *columns]]
    for name, row in rows.items():
        lines.append([name, *(number(row.get(key), signed=key == "difference") for key in columns.values())])
    lines.insert(1, ["---", *["--:"] * len(columns)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_markdown(report: Mapping[str, Any]) -> str:
    """The whole report of `evaluate_model`; names of model and datasets stand in it if the caller added them."""
    questions = report["questions"]
    parts = ["# Evaluation"]
    if "model" in report:
        exported = f", exported to `{report['graphs']}`," if report.get("graphs") else ""
        datasets = ", ".join(f"`{name}`" for name in report["datasets"])
        parts.append(f"Model `{report['model']}`{exported} on {datasets}.")
    sources = ", ".join(f"{name} {count}" for name, count in report["images_by_source"].items())
    parts.append(
        f"{report['images']} images ({sources}), {questions['yes_no']} yes/no questions and {questions['words']} that "
        'are answered in words. "Blind" is the same model, shown the mean image. ' + BASELINES[report["baselines"]]
    )
    for section in (_yes_no, _words, _calibration, _perplexity, _phrasings, _robustness, _pointing):
        parts += section(report)
    return "\n\n".join(parts) + "\n"


def _picture(name: str) -> str:
    return f"![{PICTURES[name]}]({name})"


def _grouped(found: Mapping[str, Any], columns: Mapping[str, str], groups: Sequence[tuple[str, str]]) -> list[str]:
    """A table for sources and for each group; what one source alone would only repeat is left out."""
    several = len(found["by_source"]) > 1
    totals = {"mean over sources": found["mean_over_sources"], "all together": found["all"]} if several else {}
    return [
        table("source", columns, totals | found["by_source"]),
        *(table(title, columns, found[key]) for title, key in groups if several or "source" not in title),
    ]


def _yes_no(report: Mapping[str, Any]) -> list[str]:
    found = report["yes_no"]
    if not found:
        return []
    text = (
        "Balanced accuracy: of each question (a fact, in all its wordings, within a source) the mean of the share "
        "right among yes and among no; then the mean over facts. Facts with only one of the two truths are left out. "
        "Who does not look stands at 0.5. Plain accuracy is the share right of all questions; the majority always "
        "gives the most frequent answer to a question. ± is one standard error, as if facts, or questions, were "
        "independent."
    )
    groups = (("kind", "by_kind"), ("class", "by_class"), ("source / kind", "by_source_and_kind"))
    return ["## Yes or no", text, _picture("kinds.png"), *_grouped(found, YES_NO, groups), _picture("examples.png")]


def _words(report: Mapping[str, Any]) -> list[str]:
    if not report["words"]:
        return []
    groups = (("kind", "by_kind"), ("source / kind", "by_source_and_kind"))
    text = "The share of questions that are answered with exactly the words of the truth."
    return ["## Words", text, *_grouped(report["words"], WORDS, groups)]


def _calibration(report: Mapping[str, Any]) -> list[str]:
    found = report["calibration"]
    if not found:
        return []
    text = (
        f"Expected calibration error of P(yes) in {len(found['bins'])} bins: {number(found['ece'])} at the model's "
        f"temperature of {found['temperature']:.3f}. "
    )
    if found["half_temperature"] is None:
        text += "There are too few images to fit a temperature on one half and judge it on the other. "
    else:
        text += (
            f"A temperature of {found['half_temperature']:.3f}, fitted on {found['questions_fitted']} questions about "
            f"one half of the images, takes the error on the {found['questions_judged']} about the other half from "
            f"{number(found['ece_before'])} to {number(found['ece_after'])}. "
        )
    text += f"Over all, the temperature would be {found['fitted_temperature']:.3f}."
    if found["at_limit"]:
        text += " That is a limit of the search: the answers are all right, or have nothing to do with the truth."
    rows = {name: {"ece": value} for name, value in found["ece_by_source"].items()}
    return ["## Calibration", text, _picture("reliability.png"), table("source", {"calibration error": "ece"}, rows)]


def _perplexity(report: Mapping[str, Any]) -> list[str]:
    found = report["perplexity"]
    if not found:
        return []
    one = found["all"]
    text = (
        f"exp of the mean cross-entropy of the true answers, their ends included: {one['words']:.2f}. So many equally "
        f"likely words is the model choosing between; who knows nothing chooses between all {one['of']}."
    )
    columns = {"effective words": "words", "cross-entropy": "cross_entropy", "tokens": "tokens"}
    return ["## Perplexity", text, table("source", columns, found)]


def _phrasings(report: Mapping[str, Any]) -> list[str]:
    if not report["phrasings"]:
        return []
    text = "The same yes/no question in other words: the share of pairs of wordings with the same answer."
    columns = {"same answer": "same", "mean change of P(yes)": "change", "pairs": "pairs", "facts": "questions"}
    return ["## Other wordings", text, table("kind", columns, report["phrasings"])]


def _robustness(report: Mapping[str, Any]) -> list[str]:
    found = report["robustness"]
    if not found:
        return []
    text = f"Balanced accuracy of {found['images']} of the images, worsened at the size that the model sees."
    sources = list(next(iter(found["conditions"].values()))["by_source"])
    columns = {"mean over sources": "balanced_accuracy", "difference": "difference"}
    rows = {name: row | row["by_source"] for name, row in found["conditions"].items()}
    return ["## Worse images", text, table("condition", columns | {name: name for name in sources}, rows)]


def _pointing(report: Mapping[str, Any]) -> list[str]:
    found = report["pointing"]
    if not found:
        return []
    text = (
        "Of questions whose answer is a yes because of objects in boxes: how often the strongest cell of the "
        "cross-attention of the word for them (all layers and heads) lies in one of the boxes, and how often the "
        "central cell or one taken at random would."
    )
    columns = {"hit": "hit", "central cell": "centre", "random cell": "random", "questions": "questions"}
    totals = {"all together": found["all"]} if len(found["by_source"]) > 1 else {}
    rows = totals | found["by_source"]
    return ["## Pointing game", text, table("source", columns, rows), table("class", columns, found["by_class"])]

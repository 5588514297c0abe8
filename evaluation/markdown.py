"""Write a report as Markdown tables."""

from collections.abc import Mapping
from typing import Any


BASELINES = {
    "training": "The mean image and the most frequent answers are those of the training set.",
    "evaluated": "Without --train_dataset, the mean image and the most frequent answers are those of the evaluated "
    "images; the majority is too high then, because it has seen the answers.",
}
YES_NO = {
    "balanced accuracy": "balanced_accuracy",
    "±": "error",
    "mean image": "mean_image",
    "difference": "difference",
    "10 of each": "macro",
    "accuracy": "accuracy",
    "precision": "precision",
    "recall": "recall",
    "mean image, accuracy": "blind_accuracy",
    "majority, accuracy": "majority_accuracy",
    "questions": "all_questions",
    "question ids": "question_ids",
    "left out": "question_ids_left_out",
}
WORDS = {
    "exact match": "exact_match",
    "±": "error",
    "mean recall": "mean_recall",
    "mean image": "mean_image",
    "difference": "difference",
    "majority": "majority",
    "questions": "questions",
}
PERPLEXITY = {"perplexity": "words", "cross-entropy": "cross_entropy", "tokens": "tokens"}
PARAPHRASES = {"same answer": "same", "mean change of P(yes)": "change", "pairs": "pairs", "questions": "questions"}
NONE_ANSWERS = {
    '"none" if not there': "none_if_absent",
    '"none" if there': "none_if_present",
    "not there": "absent",
    "there": "present",
}
ANSWER_TYPES = {"value of its own type": "own_type", "questions": "questions"}
POINTING = {
    "pointing accuracy": "pointing_accuracy",
    "central patch": "central_patch",
    "random patch": "random",
    "questions": "questions",
}


def format_value(value: Any, signed: bool = False) -> str:
    """Three decimals for a float, "–" for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:+.3f}" if signed else f"{value:.3f}"
    return str(value)


def table(title: str, columns: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with one line per row; `columns` maps headings to keys of the rows."""
    lines = [[title, *columns], ["---", *["--:"] * len(columns)]]
    for name, row in rows.items():
        lines.append([name, *(format_value(row.get(key), key == "difference") for key in columns.values())])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_markdown(report: Mapping[str, Any]) -> str:
    """All tables of a report of `evaluate_model`, and the names of model and datasets if it has them."""
    questions = report["questions"]
    parts = ["# Evaluation"]
    if "model" in report:
        exported = f", exported to `{report['graphs']}`," if report.get("graphs") else ""
        datasets = ", ".join(f"`{name}`" for name in report["datasets"])
        parts.append(f"Model `{report['model']}`{exported} on {datasets}.")
    sources = ", ".join(f"{name} {count}" for name, count in report["images_by_source"].items())
    parts.append(
        f"{report['images']} images ({sources}), {questions['yes_no']} yes/no questions and {questions['words']} "
        'questions with answers in words. "Mean image" is the same model, asked about the mean image. '
        + BASELINES[report["baselines"]]
    )
    sections = {
        "yes_no": _yes_no,
        "words": _words,
        "calibration": _calibration,
        "perplexity": _perplexity,
        "trust": _trust,
        "paraphrases": _paraphrases,
        "robustness": _robustness,
        "pointing": _pointing,
    }
    for key, section in sections.items():
        if report[key]:
            parts += section(report[key])
    return "\n\n".join(parts) + "\n"


def _tables(found: Mapping[str, Any], columns: Mapping[str, str], groups: Mapping[str, str]) -> list[str]:
    """One table by source and one for each of `groups`, without those that repeat a single source."""
    several = len(found["by_source"]) > 1
    totals = {
        "mean over sources": found.get("mean_over_sources"),
        "mean over sources of photographs": found.get("mean_over_photographs"),
        "all together": found["all"],
    }
    totals = {name: row for name, row in totals.items() if row and several}
    return [
        table("source", columns, totals | found["by_source"]),
        *(table(title, columns, found[key]) for title, key in groups.items() if several or "source" not in title),
    ]


def _yes_no(found: Mapping[str, Any]) -> list[str]:
    text = (
        "Balanced accuracy: for each question id (all paraphrases of a question within a source) the mean of the "
        "accuracy where the ground truth is yes and where it is no; then the mean over question ids. Question ids "
        'with only one of the two answers are left out. A model that sees no image scores 0.5. "10 of each" is the '
        "same for question ids with at least 10 of each answer, which are less noisy. Accuracy is the "
        "fraction of all questions that are answered right; precision is the fraction of the answers yes that are "
        "right, and recall that of the true yes that are found. The majority always gives the most frequent answer to "
        "a question. ± is one standard error, as if question ids, or questions, were independent."
    )
    groups = {
        "question type": "by_question_type",
        "category": "by_category",
        "source / question type": "by_source_and_question_type",
    }
    by_type = "![Balanced accuracy by question type, beside the mean-image baseline](question_types.png)"
    examples = "![Right and wrong answers with the attention of the asked word](examples.png)"
    return ["## Yes or no", text, by_type, *_tables(found, YES_NO, groups), examples]


def _words(found: Mapping[str, Any]) -> list[str]:
    groups = {"question type": "by_question_type", "source / question type": "by_source_and_question_type"}
    groups["question type / answer"] = "by_answer"
    text = (
        "Exact match is the fraction of questions that are answered with exactly the words of the ground truth. Mean "
        "recall is the mean of this fraction over the answers of a question type (those with at least 10 questions), "
        "then over question types, so that rare answers count as much as frequent ones. Sources differ in the answers "
        "that have so many questions, so it compares models, not sources."
    )
    return ["## Words", text, *_tables(found, WORDS, groups)]


def _calibration(found: Mapping[str, Any]) -> list[str]:
    text = (
        f"Expected calibration error of P(yes) in {len(found['bins'])} bins: {format_value(found['ece'])} at the "
        f"model's temperature of {found['temperature']:.3f}. "
    )
    if found["half_temperature"] is None:
        text += "There are too few images to fit a temperature on one half and test it on the other. "
    else:
        text += (
            f"A temperature of {found['half_temperature']:.3f}, fitted on {found['questions_fitted']} questions about "
            f"one half of the images, changes the error on the {found['questions_judged']} about the other half from "
            f"{format_value(found['ece_before'])} to {format_value(found['ece_after'])}. "
        )
    text += f"Fitted on all images, the temperature is {found['fitted_temperature']:.3f}."
    if found["at_limit"]:
        text += " That is a limit of the search: all answers are right, or they are unrelated to the ground truth."
    rows = {name: {"ece": value} for name, value in found["ece_by_source"].items()}
    columns = {"calibration error": "ece"}
    return ["## Calibration", text, "![Reliability of P(yes)](reliability.png)", table("source", columns, rows)]


def _perplexity(found: Mapping[str, Any]) -> list[str]:
    text = (
        f"exp of the mean cross-entropy of the ground-truth answers, [EOS] included: {found['all']['words']:.2f}. The "
        f"model is as uncertain as between so many equally likely words, of {found['all']['of']}."
    )
    return ["## Perplexity", text, table("source", PERPLEXITY, found)]


def _trust(found: Mapping[str, Any]) -> list[str]:
    parts = ["## Trust"]
    if found["presuppositions"]:
        text = 'Open questions about something that is not there ("What color is the traffic light?") should be '
        text += 'answered "none", and only these.'
        parts += [text, table("question type", NONE_ANSWERS, found["presuppositions"])]
    if found["answer_types"]:
        text = "The fraction of open questions that are answered with a value of their own type."
        parts += [text, table("question type", ANSWER_TYPES, found["answer_types"])]
    if pairs := found["contradictions"]:
        worst = sorted(pairs["by_pair"].items(), key=lambda pair: -pair[1])[:10]
        rows = {name: {"violated": value} for name, value in worst}
        text = (
            f"Pairs of answers about an image that contradict each other by more than 0.1: {pairs['violated']:.1%} of "
            f"{pairs['pairs']} on {pairs['images']} images. The ten worst:"
        )
        parts += [text, table("pair", {"contradict": "violated"}, rows)]
    words = found["taught_words"]
    parts += [f"{name.capitalize()}: {len(listed)} words. {', '.join(listed)}" for name, listed in words.items()]
    if not words:
        parts.append("Which words the weights were taught is unknown.")
    if asked := found["untaught_questions"]:
        parts.append(
            f"{asked['questions']} questions with untaught words: mean P(yes) {asked['mean']:.2f}, above 0.9 or below "
            f"0.1 in {asked['confident']:.1%}."
        )
    return parts


def _paraphrases(found: Mapping[str, Any]) -> list[str]:
    text = "The fraction of pairs of paraphrases of a yes/no question with the same answer."
    return ["## Paraphrases", text, table("question type", PARAPHRASES, found)]


def _robustness(found: Mapping[str, Any]) -> list[str]:
    text = f"Balanced accuracy on {found['images']} of the images, corrupted at the model's input size."
    rows = {name: row | row["by_source"] for name, row in found["conditions"].items()}
    columns = {"mean over sources": "balanced_accuracy", "difference": "difference"}
    columns |= {source: source for source in found["conditions"]["as it is"]["by_source"]}
    return ["## Corrupted images", text, table("condition", columns, rows)]


def _pointing(found: Mapping[str, Any]) -> list[str]:
    text = (
        "For questions with the answer yes because of objects in boxes, pointing accuracy is how often the patch with "
        "the highest cross-attention of the objects' word (mean over layers and heads) lies in one of the boxes. "
        "Beside it: how often the central patch or a random patch does."
    )
    return ["## Grounding", text, *_tables(found, POINTING, {"category": "by_category"})]

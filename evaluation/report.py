"""All metrics of a model on a dataset, as one dictionary for JSON, Markdown and plots.

    answers, also about the mean image → tables of metrics, calibration
    more questions about a few images  → contradictions, paraphrases

`answer_metrics` computes the few that training follows, with the same functions.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd

from ..data.datasets import select_evenly
from ..pipeline_traffic_vlm import TrafficVLMPipeline
from . import MIN_ANSWERS, metrics
from .consistency import agreement, contradictions, paraphrase
from .locating import locating_table, match_objects
from .metrics import WITHOUT_IMAGE, WORDS, YES_NO, by_group, is_yes_no
from .predict import KINDS, UNSEEN, Row, mean_image, predict


MEAN_IMAGES = 1000  # for the mean image


def answer_metrics(answers: pd.DataFrame) -> dict[str, float]:
    """Metrics of a table of `predict`; a metric without questions is missing.

    Returns:
        "balanced_accuracy", and "balanced_accuracy_SOURCE" of each source; "exact_match" of answers in words; "ece",
        the calibration error of P(yes).
    """
    groups = {"balanced_accuracy": answers}
    groups |= {f"balanced_accuracy_{name}": members for name, members in answers.groupby("source")}
    found = {name: metrics.balanced_accuracy(members, even_few=True) for name, members in groups.items()}
    found |= {"exact_match": metrics.exact_match(answers), "ece": metrics.calibration_error(answers)}
    return {name: value for name, value in found.items() if value is not None}


def evaluate_model(
    model: Any,
    processor: Any,
    rows: Sequence[Row],
    answers: pd.DataFrame,
    batch_size: int = 16,
    paraphrased_images: int = 100,
) -> dict[str, Any]:
    """The report: all metrics, as values for JSON.

    Args:
        model, processor, rows, batch_size: as for `predict`.
        answers: the table of `predict` for `rows`.
        paraphrased_images: number of images to ask about in paraphrases, and for contradictions; 0 leaves this out.

    Returns:
        "images", "images_by_source"; "tables": {name: {row: {column: value}}}, without empty ones;
        "calibration", empty without yes/no questions. A metric without questions is None.

    Raises:
        ValueError: no questions.
    """
    if answers.empty:
        raise ValueError("no image has a question to evaluate")
    ask = partial(predict, model, processor, batch_size=batch_size)
    without_image = ask(rows, image=mean_image(select_evenly(rows, MEAN_IMAGES), processor))["is_right"]
    tables = answer_tables(answers.assign(**{WITHOUT_IMAGE: without_image}))
    if paraphrased_images:
        few = select_evenly(rows, paraphrased_images)
        tables["contradictions"] = contradictions(ask, few)
        tables["paraphrases"] = agreement(ask(map(paraphrase, few)))
    if getattr(model.config.vision_config, "located", None):
        pipe = TrafficVLMPipeline(model=model, processor=processor, device=model.device)
        tables["locating"] = locating_table(match_objects(pipe, rows))
    return {
        "images": len(rows),
        "images_by_source": answers.groupby("source")["image_id"].nunique().to_dict(),
        "tables": {name: to_values(table) for name, table in tables.items() if len(table)},
        "calibration": calibrate(answers, model.config.yes_no_temperature),
    }


def answer_tables(answers: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tables of the metrics of answers, which also have the column WITHOUT_IMAGE."""
    yes_no, words = answers[is_yes_no(answers)], answers[~is_yes_no(answers)]
    columns = ("kind", "source", "question_type", "category")
    tables = {f"yes_no_by_{column}": by_group(yes_no, YES_NO, column) for column in columns}
    tables |= {f"words_by_{column}": by_group(words, WORDS, column) for column in columns[:3]}
    for name in ("yes_no_by_kind", "words_by_kind"):
        tables[name] = tables[name].loc[[kind for kind in KINDS if kind in tables[name].index]]
    by_answer = by_group(words, {"exact match": metrics.exact_match, "questions": len}, "question_type", "truth")
    tables["words_by_answer"] = by_answer[by_answer["questions"] >= MIN_ANSWERS]
    return tables


def rows_to_fit(answers: pd.DataFrame) -> pd.DataFrame:
    """The answers about unseen sources; all without any: temperature and thresholds are fitted to them.

    On known sources a model is right, and sure, more often than on a user's camera.
    """
    is_unseen = answers["kind"] == UNSEEN
    return answers[is_unseen] if is_unseen.any() else answers


def calibrate(answers: pd.DataFrame, temperature: float) -> dict[str, Any]:
    """Calibration of P(yes) at the model's temperature and at a fitted one; empty without yes/no questions.

    Returns:
        "temperature"; "fitted_temperature"; "ece_before" and "bins_before" at the model's temperature, "ece_after" and
        "bins_after" at the fitted one.
    """
    rows = metrics.with_probability(rows_to_fit(answers))
    if rows.empty:
        return {}
    fitted = metrics.fit_temperature(rows)
    found: dict[str, Any] = {"temperature": temperature, "fitted_temperature": fitted}
    for name, some in {"before": rows, "after": metrics.at_temperature(rows, fitted)}.items():
        found[f"ece_{name}"] = metrics.calibration_error(some)
        found[f"bins_{name}"] = list(to_values(metrics.reliability(some)).values())
    return found


def to_values(table: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """{row: {column: value}} of a table, for JSON; NaN becomes None."""
    return table.astype(object).where(table.notna(), None).to_dict("index")

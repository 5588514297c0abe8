"""All metrics of a model on a dataset, as one dictionary for JSON, Markdown and plots.

    rows → answers, also about the mean image → tables of metrics, calibration
         → perplexity, contradictions, paraphrases, corrupted images, pointing accuracy

`quick_metrics` computes the few that training follows, with the same functions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..data.folders import select_evenly
from ..options import option
from . import metrics
from .grounding import POINTING, score_pointing
from .metrics import MIN_ANSWERS, WITHOUT_IMAGE, WORDS, YES_NO, by_group, is_yes_no
from .predict import KNOWN, RENDERED, UNSEEN, mean_image, perplexity, predict
from .robustness import contradictions, corrupted_accuracy, paraphrase_agreement
from .taught import word_gains


Rows = Sequence[Mapping[str, Any]]
MEAN_IMAGES = 1000  # for the mean image


@dataclass
class Options:
    """Options of `evaluate_model`.

    Raises:
        ValueError: a number is too small.
    """

    batch_size: int = option(16, "images at once")
    paraphrased_images: int = option(100, "ask in paraphrases, and for contradictions, about at most so many images")
    corrupted_images: int = option(200, "corrupt at most so many images; 0 skips it")
    grounding_images: int = option(1000, "measure pointing accuracy on at most so many images; 0 skips it")
    perplexity: bool = option(True, "measure the perplexity of the answers")

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "paraphrased_images": 0, "corrupted_images": 0, "grounding_images": 0}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ValueError(f"--{name} must be at least {limit}, got {getattr(self, name)}")


def quick_metrics(
    model: Any, processor: Any, rows: Rows, batch_size: int = 16, answers: pd.DataFrame | None = None
) -> dict[str, float]:
    """The metrics that training follows: those of `answer_metrics`, and of the words of the answers.

    Args:
        answers: the table of `predict` for `rows`, if it is known.

    Returns:
        also "answer_loss", the mean cross-entropy of the words of the answers, and "words", exp of it.
    """
    found = answer_metrics(predict(model, processor, rows, batch_size) if answers is None else answers)
    for entropy in perplexity(model, processor, rows, batch_size)["cross-entropy"][:1]:  # of all
        found |= {"answer_loss": float(entropy), "words": math.exp(entropy)}
    return found


def answer_metrics(answers: pd.DataFrame) -> dict[str, float]:
    """Metrics of a table of `predict`. Those that it has no questions for are missing.

    Returns:
        "balanced_accuracy", beside "balanced_accuracy_SOURCE" of each source; "exact_match" of answers in words;
        "accuracy" over all questions; "ece", the calibration error of P(yes).
    """
    groups = {"balanced_accuracy": answers}
    groups |= {f"balanced_accuracy_{name}": members for name, members in answers.groupby("source")}
    found = {name: metrics.balanced_accuracy(members, even_few=True) for name, members in groups.items()}
    found |= {"exact_match": metrics.exact_match(answers), "accuracy": metrics.accuracy(answers)}
    found |= {"ece": metrics.calibration_error(answers)}
    return {name: value for name, value in found.items() if value is not None}


def evaluate_model(
    model: Any,
    processor: Any,
    rows: Rows,
    options: Options | None = None,
    answers: pd.DataFrame | None = None,
    fit_on: str | None = None,
) -> dict[str, Any]:
    """The report: all metrics, as values for JSON.

    Args:
        model, processor, rows: as for `predict`; rows have a length and can be indexed.
        options: on how many images.
        answers: the table of `predict` for `rows`, if it is known.
        fit_on: the kind of sources that a temperature is fitted to, see `rows_to_fit`.

    Returns:
        "images", "images_by_source", "questions"; "tables": {name: {row: {column: value}}}, without those that have
        no rows; "calibration", empty without yes/no questions; "word_gains". A metric without questions is None.

    Raises:
        ValueError: no images, no questions, or a row that lacks a column.
    """
    options = options or Options()
    if not len(rows):
        raise ValueError("there are no images to evaluate")
    asking: dict[str, Any] = {"model": model, "processor": processor, "batch_size": options.batch_size}
    if answers is None:
        answers = predict(rows=rows, **asking)
    if answers.empty:
        raise ValueError(f"none of the {len(rows)} images has a question to evaluate")
    average = mean_image(select_evenly(rows, MEAN_IMAGES), processor)
    without_image = predict(rows=rows, image=average, **asking)["is_right"]
    tables = answer_tables(answers.assign(**{WITHOUT_IMAGE: without_image}))
    if options.perplexity:
        tables["perplexity"] = perplexity(rows=rows, **asking)
    if options.paraphrased_images:
        few = select_evenly(rows, options.paraphrased_images)
        tables["contradictions"] = contradictions(rows=few, **asking)
        tables["paraphrases"] = paraphrase_agreement(rows=few, **asking)
    if options.corrupted_images:
        few = select_evenly(rows, options.corrupted_images)
        tables["robustness"] = corrupted_accuracy(rows=few, answers=answers, **asking)
    if options.grounding_images:
        pointing = score_pointing(rows=select_evenly(rows, options.grounding_images), **asking)
        tables["pointing_by_source"] = by_group(pointing, POINTING, "source")
        tables["pointing_by_category"] = by_group(pointing, POINTING, "category")
    in_words = len(answers) - int(is_yes_no(answers).sum())
    return {
        "images": len(rows),
        "images_by_source": answers.groupby("source")["image_id"].nunique().to_dict(),
        "questions": {"yes_no": len(answers) - in_words, "words": in_words},
        "tables": {name: to_values(table) for name, table in tables.items() if len(table)},
        "calibration": calibrate(answers, model.config.yes_no_temperature, fit_on),
        "word_gains": word_gains(answers, without_image, processor),
    }


def answer_tables(answers: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tables of the metrics of answers, which have the column WITHOUT_IMAGE too."""
    yes_no, words = answers[is_yes_no(answers)], answers[~is_yes_no(answers)]
    groups = {"kind": ["kind"], "source": ["source"], "question_type": ["question_type"], "category": ["category"]}
    tables = {f"yes_no_by_{name}": by_group(yes_no, YES_NO, *columns) for name, columns in groups.items()}
    groups = {name: groups[name] for name in ("kind", "source", "question_type")} | {
        "answer": ["question_type", "truth"]
    }
    tables |= {f"words_by_{name}": by_group(words, WORDS, *columns) for name, columns in groups.items()}
    for name in ("yes_no_by_kind", "words_by_kind"):
        tables[name] = tables[name].reindex([kind for kind in (KNOWN, UNSEEN, RENDERED) if kind in tables[name].index])
    by_answer = tables["words_by_answer"]
    tables["words_by_answer"] = by_answer.loc[by_answer["questions"] >= MIN_ANSWERS, ["exact match", "questions"]]
    return tables


def rows_to_fit(answers: pd.DataFrame, fit_on: str | None = None) -> pd.DataFrame:
    """The answers that temperature and thresholds are fitted to.

    Args:
        fit_on: "unseen", "known", "rendered" or "all"; None: unseen sources if there are any, otherwise all. On the
            sources that it knows a model is right more often than on a user's camera, and may be as sure as it is.

    Raises:
        ValueError: there is no source of this kind.
    """
    if fit_on is None:
        fit_on = UNSEEN if (answers["kind"] == UNSEEN).any() else "all"
    chosen = answers if fit_on == "all" else answers[answers["kind"] == fit_on]
    if chosen.empty:
        kinds = ", ".join(sorted(answers["kind"].unique()))
        raise ValueError(f"--fit_on {fit_on}: there are no such sources, only {kinds}")
    return chosen


def calibrate(answers: pd.DataFrame, temperature: float, fit_on: str | None = None) -> dict[str, Any]:
    """Calibration of P(yes) at the model's temperature and at a fitted one; empty without yes/no questions.

    Returns:
        "temperature", "fitted_on": the sources; "fitted_temperature", of all their images, and "at_limit", whether it
        is one of TEMPERATURES; "half_temperature", fitted to one half of their images and tested on the other, None
        with too few: "ece_before", "bins_before" of that half at the model's temperature, "..._after" at the fitted.
    """
    rows = metrics.with_probability(rows_to_fit(answers, fit_on))
    if rows.empty:
        return {}
    half = pd.Series([metrics.image_half(*image) for image in zip(rows["source"], rows["image_id"])], rows.index)
    fitted, tested = rows[half == 0], rows[half == 1]
    best = metrics.fit_temperature(rows)
    found: dict[str, Any] = {
        "temperature": temperature,
        "fitted_on": sorted(rows["source"].unique()),
        "fitted_temperature": best,
        "at_limit": min(abs(best / limit - 1) for limit in metrics.TEMPERATURES) < 0.01,
        "half_temperature": None,
        "questions_fitted": len(fitted),
        "questions_tested": len(tested),
    }
    if fitted.empty or tested.empty:
        fitted, tested = rows, rows
    else:
        found["half_temperature"] = metrics.fit_temperature(fitted)
    after = metrics.at_temperature(tested, found["half_temperature"] or best)
    for name, some in {"before": tested, "after": after}.items():
        found[f"ece_{name}"] = metrics.calibration_error(some)
        found[f"bins_{name}"] = list(to_values(metrics.reliability(some)).values())
    return found


def to_values(table: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """{row: {column: value}} of a table, for JSON; NaN becomes None."""
    return {str(name): dict(zip(table, map(_plain, values))) for name, *values in table.itertuples()}


def _plain(value: Any) -> Any:
    return None if pd.isna(value) else value.item() if hasattr(value, "item") else value

"""All figures of a model on a dataset, as one dictionary that goes to JSON, to tables and to pictures.

    rows → predictions, and those of the blind model → accuracy, calibration
         → other wordings, worse images, attention, perplexity

`quick_metrics` gives the few that training follows; they are computed by the same functions.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .baselines import Majority, mean_image
from .metrics import (
    TEMPERATURES,
    Score,
    accuracy,
    balanced_accuracy,
    by_group,
    calibration_error,
    exact_match,
    fit_temperature,
    group,
    half,
    mean,
    reliability,
    yes_probability,
)
from .perplexity import perplexity
from .pointing import Pointed, point
from .predict import COLUMNS, Prediction, predict
from .robustness import corruptions, phrasing_agreement


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Options:
    """How much is looked at; 0 images leave a part out.

    Attributes:
        batch_size: images at once.
        mean_images: at most so many make the mean image.
        reworded_images, corrupted_images, pointing_images: at most so many, evenly spread over the rows.
        perplexity: whether it is measured.
        examples: right and wrong answers each, for the picture.
        progress: show bars.
    """

    batch_size: int = 16
    mean_images: int = 1000
    reworded_images: int = 100
    corrupted_images: int = 200
    pointing_images: int = 1000
    perplexity: bool = True
    examples: int = 6
    progress: bool = True


def quick_metrics(model: Any, processor: Any, rows: Rows, batch_size: int = 16) -> dict[str, float]:
    """What training follows: balanced accuracy, exact match, accuracy over all questions, calibration error.

    "balanced_accuracy" is the mean over sources, beside it stands that of each; "balanced_accuracy_all" is the mean
    over the facts of all, which varies less where a source has few. Figures that the rows cannot give are not there.
    """
    predictions = predict(model, processor, rows, batch_size, progress=False)
    by_source = by_group(balanced_accuracy, predictions, "source")
    figures = {
        "balanced_accuracy": mean(score.value for score in by_source.values()),
        "balanced_accuracy_all": balanced_accuracy(predictions).value,
        **{f"balanced_accuracy_{source}": score.value for source, score in by_source.items()},
        "exact_match": exact_match(predictions).value,
        "accuracy": mean(one.is_right for one in predictions),
        "ece": calibration_error(*_probabilities(predictions)),
    }
    return {name: value for name, value in figures.items() if value is not None}


def evaluate_model(
    model: Any, processor: Any, rows: Rows, options: Options | None = None, train_rows: Rows | None = None
) -> dict[str, Any]:
    """Everything that is measured; see the keys of the result.

    Args:
        model, processor, rows: as for `predict`; rows can be indexed and have a length.
        options: how much is looked at.
        train_rows: give the mean image and the most frequent answers; by default `rows` themselves do.

    Returns:
        values of JSON: "images", "questions", "baselines", "yes_no", "words", "calibration", "perplexity",
        "phrasings", "robustness", "pointing", "examples". A figure that cannot be given is None.

    Raises:
        ValueError: there is nothing to evaluate; rows that lack a column.
    """
    options = options or Options()
    how: dict[str, Any] = {"batch_size": options.batch_size, "progress": options.progress}
    if not len(rows):
        raise ValueError("there are no images to evaluate")
    baseline_rows = rows if train_rows is None else train_rows
    average = mean_image(spread(baseline_rows, options.mean_images), processor)
    majority = Majority(texts(baseline_rows), processor)
    predictions = predict(model, processor, rows, **how)
    if not predictions:
        raise ValueError(f"none of the {len(rows)} images has a question to evaluate")
    blind = predict(model, processor, rows, transform=lambda _: average, description="blind", **how)
    yes_no = [one for one in predictions if one.is_yes_no]
    uncertainty = perplexity(model, processor, rows, **how) if options.perplexity else {}
    return {
        "images": len(rows),
        "images_by_source": {name: len(members) for name, members in _by_image(predictions).items()},
        "questions": {"yes_no": len(yes_no), "words": len(predictions) - len(yes_no)},
        "baselines": "training" if train_rows is not None else "evaluated",
        "yes_no": _compare(_yes_no_figures, _is_yes_no, predictions, blind, majority),
        "words": _compare(_word_figures, _is_words, predictions, blind, majority),
        "calibration": calibration(predictions, model.config.yes_no_temperature),
        "perplexity": {
            name: asdict(one) | {"of": model.config.get_text_config().vocab_size} for name, one in uncertainty.items()
        },
        "phrasings": {
            kind: asdict(one)
            for kind, one in phrasing_agreement(model, processor, spread(rows, options.reworded_images), **how).items()
            if one.pairs
        },
        "robustness": robustness(model, processor, spread(rows, options.corrupted_images), predictions, how),
        "pointing": pointing(point(model, processor, spread(rows, options.pointing_images), **how)),
        "examples": choose_examples(predictions, rows, options.examples),
    }


def spread(rows: Any, count: int) -> Rows:
    """At most `count` rows, evenly spread over all."""
    if count >= len(rows):
        return rows
    numbers = [i * len(rows) // count for i in range(count)]
    return rows.select(numbers) if hasattr(rows, "select") else [rows[i] for i in numbers]


def texts(rows: Any) -> Rows:
    """The rows without images, which take long to read, where they can be left out."""
    if hasattr(rows, "select_columns"):
        return rows.select_columns([name for name in COLUMNS if name != "image"])
    return rows


def _is_yes_no(one: Prediction) -> bool:
    return one.is_yes_no


def _is_words(one: Prediction) -> bool:
    return one.text is not None


def _by_image(predictions: Sequence[Prediction]) -> dict[str, set[str]]:
    return {name: {one.image_id for one in members} for name, members in group(predictions, "source").items()}


def _probabilities(predictions: Sequence[Prediction]) -> tuple[list[float], list[bool]]:
    """P(yes) and truth of yes/no questions."""
    pairs = [(one.probability, one.answer == "yes") for one in predictions if one.probability is not None]
    return [probability for probability, _ in pairs], [truth for _, truth in pairs]


def _margins(predictions: Sequence[Prediction]) -> tuple[list[float], list[bool]]:
    pairs = [(one.logit_margin, one.answer == "yes") for one in predictions if one.logit_margin is not None]
    return [margin for margin, _ in pairs], [truth for _, truth in pairs]


# Beside the baselines

Figures = dict[str, Any]  # floats, numbers or None
COUNTS = ("facts", "facts_left_out", "questions", "all_questions")
Compare = Callable[[list[Prediction], list[Prediction], Majority], Figures]


def _yes_no_figures(predictions: list[Prediction], blind: list[Prediction], majority: Majority) -> Figures:
    seen, unseen = balanced_accuracy(predictions), balanced_accuracy(blind)
    return {
        "balanced_accuracy": seen.value,
        "blind": unseen.value,
        "difference": _minus(seen, unseen),
        "error": seen.error,
        "accuracy": accuracy(predictions).value,
        "blind_accuracy": accuracy(blind).value,
        "majority_accuracy": majority.share_right(predictions),
        "facts": seen.facts,
        "facts_left_out": seen.left_out,
        "questions": seen.questions,
        "all_questions": len(predictions),
    }


def _word_figures(predictions: list[Prediction], blind: list[Prediction], majority: Majority) -> Figures:
    seen, unseen = exact_match(predictions), exact_match(blind)
    return {
        "exact_match": seen.value,
        "blind": unseen.value,
        "difference": _minus(seen, unseen),
        "error": seen.error,
        "majority": majority.share_right(predictions),
        "questions": seen.questions,
    }


def _minus(one: Score, other: Score) -> float | None:
    return None if one.value is None or other.value is None else one.value - other.value


def _compare(
    figures: Compare,
    chosen: Callable[[Prediction], bool],
    predictions: list[Prediction],
    blind: list[Prediction],
    majority: Majority,
) -> dict[str, Any]:
    """Figures of all and of each group, those of the model beside those of the baselines."""
    predictions, blind = list(filter(chosen, predictions)), list(filter(chosen, blind))
    if not predictions:
        return {}

    def of(*names: str) -> dict[str, Figures]:
        unseen = group(blind, *names)
        return {name: figures(members, unseen[name], majority) for name, members in group(predictions, *names).items()}

    by_source = of("source")
    return {
        "mean_over_sources": _over_sources(list(by_source.values())),
        "all": figures(predictions, blind, majority),
        "by_source": by_source,
        "by_kind": of("kind"),
        "by_class": of("label"),
        "by_source_and_kind": of("source", "kind"),
    }


def _over_sources(rows: list[Figures]) -> Figures:
    """Means of figures, sums of counts; the error is that of a mean, unknown where that of one source is."""
    totals: Figures = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        totals[name] = sum(values) if name in COUNTS else mean(values)
    errors = [row["error"] for row in rows if row["questions"]]
    totals["error"] = None if None in errors or not errors else math.hypot(*errors) / len(errors)
    return totals


# Calibration, robustness, pointing


def calibration(predictions: Sequence[Prediction], temperature: float) -> dict[str, Any]:
    """Calibration error at the model's temperature, and at one fitted on half of the images, judged on the other."""
    yes_no = [one for one in predictions if one.is_yes_no]
    if not yes_no:
        return {}
    fitting = [one for one in yes_no if half(one.source, one.image_id) == 0]
    judged = [one for one in yes_no if half(one.source, one.image_id) == 1]
    probabilities, truths = _probabilities(yes_no)
    best = fit_temperature(*_margins(yes_no))
    result: dict[str, Any] = {
        "temperature": temperature,
        "ece": calibration_error(probabilities, truths),
        "ece_by_source": {
            name: calibration_error(*_probabilities(members)) for name, members in group(yes_no, "source").items()
        },
        "bins": [asdict(one) for one in reliability(probabilities, truths)],
        "fitted_temperature": best,
        "at_limit": min(abs(best / limit - 1) for limit in TEMPERATURES) < 0.01,
        "half_temperature": None,
        "questions_fitted": len(fitting),
        "questions_judged": len(judged),
        "ece_before": None,
        "ece_after": None,
        "bins_before": [],
        "bins_after": [],
    }
    if fitting and judged:
        margins, truths = _margins(judged)
        fitted = fit_temperature(*_margins(fitting))
        before = _probabilities(judged)[0]
        after = [yes_probability(margin, fitted) for margin in margins]
        result |= {
            "half_temperature": fitted,
            "ece_before": calibration_error(before, truths),
            "ece_after": calibration_error(after, truths),
            "bins_before": [asdict(one) for one in reliability(before, truths)],
            "bins_after": [asdict(one) for one in reliability(after, truths)],
        }
    return result


def robustness(
    model: Any, processor: Any, rows: Rows, predictions: Sequence[Prediction], how: dict[str, Any]
) -> dict[str, Any]:
    """Balanced accuracy, mean over sources, of `rows` as they are (among `predictions`) and worsened."""
    if not len(rows):
        return {}
    found = {
        name: predict(model, processor, rows, generate_words=False, transform=worsen, description=name, **how)
        for name, worsen in corruptions(processor).items()
    }
    kept = {(one.source, one.image_id) for members in found.values() for one in members}
    clean = [one for one in predictions if (one.source, one.image_id) in kept]
    conditions = {name: over_sources(members) for name, members in {"as it is": clean, **found}.items()}
    base = conditions["as it is"]["balanced_accuracy"]
    for row in conditions.values():
        value = row["balanced_accuracy"]
        row["difference"] = None if value is None or base is None else value - base
    return {"images": len(rows), "conditions": conditions}


def over_sources(predictions: Sequence[Prediction]) -> dict[str, Any]:
    by_source = by_group(balanced_accuracy, predictions, "source")
    return {
        "balanced_accuracy": mean(score.value for score in by_source.values()),
        "by_source": {name: score.value for name, score in by_source.items()},
        "questions": sum(score.questions for score in by_source.values()),
    }


def pointing(results: Sequence[Pointed]) -> dict[str, Any]:
    """Mean scores, of all, by source and by class."""
    if not results:
        return {}

    def figures(members: Sequence[Pointed]) -> dict[str, Any]:
        scores = {name: mean(getattr(one, name) for one in members) for name in ("hit", "centre", "random")}
        return scores | {"questions": len(members)}

    return {
        "all": figures(results),
        "by_source": {name: figures(members) for name, members in group(results, "source").items()},
        "by_class": {name: figures(members) for name, members in group(results, "label").items()},
    }


def choose_examples(predictions: Sequence[Prediction], rows: Rows, count: int) -> list[dict[str, Any]]:
    """At most `count` right and `count` wrong answers, of different images and of as many kinds as there are.

    Of the right ones those that are no "no" come first: they show where the model looks.
    """
    numbers = {(str(row["source"]), str(row["image_id"])): number for number, row in enumerate(texts(rows))}
    shuffled = random.Random(0).sample(list(predictions), len(predictions))
    examples: list[dict[str, Any]] = []
    images: set[tuple[str, str]] = set()
    for is_right in (True, False):
        candidates = [one for one in shuffled if one.said is not None and one.is_right == is_right]
        if is_right:
            candidates.sort(key=lambda one: one.answer == "no")
        kinds: Counter[str] = Counter()
        order: list[tuple[int, int, Prediction]] = []
        for one in candidates:  # the first of every kind, then the second of every kind, ...
            order.append((kinds[one.kind], len(order), one))
            kinds[one.kind] += 1
        left = count
        for _, _, one in sorted(order, key=lambda entry: entry[:2]):
            image = (one.source, one.image_id)
            if left and image not in images:
                left -= 1
                images.add(image)
                examples.append(asdict(one) | {"row": numbers[image], "said": one.said, "is_right": is_right})
    return examples

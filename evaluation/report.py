"""All metrics of a model on a dataset, as one dictionary for JSON, tables and plots.

    rows → predictions, and those for the mean image → accuracy, calibration
         → perplexity, paraphrases, corrupted images, pointing accuracy

`quick_metrics` computes the few that training follows, with the same functions.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..data.folders import COLUMNS, select_evenly
from ..data.scene import SYNTHETIC
from .baselines import Majority, mean_image
from .grounding import pointing_accuracy, score_pointing
from .metrics import (
    MIN_QUESTIONS,
    accuracy,
    balanced_accuracy,
    by_group,
    calibration,
    calibration_error,
    exact_match,
    group,
    mean,
    mean_recall,
    precision,
    probabilities,
    recall,
)
from .predict import Prediction, perplexity, predict
from .robustness import corruptions, paraphrase_agreement
from .trust import (
    answer_types,
    contradictions,
    presuppositions,
    taught_coverage,
    untaught_questions,
    word_gains,
)


Rows = Sequence[Mapping[str, Any]]
Metrics = dict[str, Any]  # floats, ints or None
COUNTS = ("question_ids", "question_ids_left_out", "questions", "all_questions")
MEAN_IMAGES = 1000  # for the mean image
EXAMPLES = 6  # right and wrong answers each, for the plot


@dataclass
class Options:
    batch_size: int = field(default=16, metadata={"help": "images at once"})
    paraphrased_images: int = field(
        default=100, metadata={"help": "ask in paraphrases about at most so many images; 0 skips it"}
    )
    corrupted_images: int = field(default=200, metadata={"help": "corrupt at most so many images; 0 skips it"})
    grounding_images: int = field(
        default=1000, metadata={"help": "measure pointing accuracy on at most so many images; 0 skips it"}
    )
    perplexity: bool = field(default=True, metadata={"help": "measure the perplexity of the answers"})
    progress: bool = field(default=True, metadata={"help": "show progress bars"})

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch_size must be at least 1, got {self.batch_size}")
        for name in ("paraphrased_images", "corrupted_images", "grounding_images"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must be at least 0, got {getattr(self, name)}")


def quick_metrics(model: Any, processor: Any, rows: Rows, batch_size: int = 16) -> dict[str, float]:
    """Compute the metrics that training follows. Those that `rows` have no questions for are missing.

    Returns:
        "balanced_accuracy": mean over sources, beside "balanced_accuracy_SOURCE" of each; "balanced_accuracy_all":
        mean over all question ids, which varies less if a source has few; "exact_match" of answers in words;
        "accuracy" over all questions; "ece", the calibration error of P(yes); "answer_loss", the mean cross-entropy
        of the words of the answers, and "words", exp of it.
    """
    predictions = predict(model, processor, rows, batch_size)
    by_source = by_group(balanced_accuracy, predictions, "source")
    answers = perplexity(model, processor, rows, batch_size).get("all", {})
    metrics = {
        "balanced_accuracy": mean(score.value for score in by_source.values()),
        "balanced_accuracy_all": balanced_accuracy(predictions).value,
        **{f"balanced_accuracy_{source}": score.value for source, score in by_source.items()},
        "exact_match": exact_match(predictions).value,
        "accuracy": accuracy(predictions).value,
        "ece": calibration_error(*probabilities(predictions)),
        "answer_loss": answers.get("cross_entropy"),
        "words": answers.get("words"),
    }
    return {name: value for name, value in metrics.items() if value is not None}


def evaluate_model(
    model: Any,
    processor: Any,
    rows: Rows,
    options: Options | None = None,
    train_rows: Rows | None = None,
    predictions: list[Prediction] | None = None,
) -> dict[str, Any]:
    """Compute all metrics.

    Args:
        model, processor, rows: as for `predict`; rows have a length and can be indexed.
        options: on how many images.
        train_rows: rows for the mean image and the most frequent answers; by default `rows`.
        predictions: those of `predict` for `rows`, if they are known.

    Returns:
        values for JSON: "images", "questions", "baselines", "yes_no", "words", "calibration", "perplexity",
        "trust", "paraphrases", "robustness", "pointing", "examples". A metric without questions is None.

    Raises:
        ValueError: no images, no questions, or a row that lacks a column.
    """
    options = options or Options()
    if not len(rows):
        raise ValueError("there are no images to evaluate")

    def settings(title: str) -> dict[str, Any]:
        return {"batch_size": options.batch_size, "progress": title if options.progress else None}

    baseline_rows = rows if train_rows is None else train_rows
    majority = Majority(without_images(baseline_rows), processor)
    average = mean_image(select_evenly(baseline_rows, MEAN_IMAGES), processor)
    if predictions is None:
        predictions = predict(model, processor, rows, **settings("questions"))
    if not predictions:
        raise ValueError(f"none of the {len(rows)} images has a question to evaluate")
    baseline = predict(model, processor, rows, image=average, **settings("mean image"))
    paraphrased = select_evenly(rows, options.paraphrased_images)
    grounded = select_evenly(rows, options.grounding_images)
    vocabulary = {"of": model.config.get_text_config().vocab_size}
    uncertainty = perplexity(model, processor, rows, **settings("perplexity")) if options.perplexity else {}
    is_yes_no = [one.is_yes_no for one in predictions]
    gains = word_gains(predictions, baseline, processor)
    return {
        "images": len(rows),
        "images_by_source": {
            source: len({one.image_id for one in members}) for source, members in group(predictions, "source").items()
        },
        "questions": {"yes_no": sum(is_yes_no), "words": is_yes_no.count(False)},
        "baselines": "training" if train_rows is not None else "evaluated",
        "yes_no": _compare(predictions, baseline, majority, is_yes_no=True),
        "words": _compare(predictions, baseline, majority, is_yes_no=False),
        "calibration": calibration(predictions, model.config.yes_no_temperature),
        "perplexity": {name: found | vocabulary for name, found in uncertainty.items()},
        "trust": {
            "presuppositions": presuppositions(predictions),
            "answer_types": answer_types(predictions),
            "contradictions": contradictions(model, processor, paraphrased, **settings("contradictions")),
            "taught_words": taught_coverage(processor),
            "untaught_questions": untaught_questions(model, processor, paraphrased, **settings("untaught words")),
            "word_gains": gains,
        },
        "paraphrases": paraphrase_agreement(model, processor, paraphrased, **settings("paraphrases")),
        "robustness": _robustness(
            model, processor, select_evenly(rows, options.corrupted_images), predictions, settings
        ),
        "pointing": pointing_accuracy(score_pointing(model, processor, grounded, **settings("pointing accuracy"))),
        "examples": choose_examples(predictions, rows),
    }


def without_images(rows: Any) -> Rows:
    """Drop the column of images, which is slow to read."""
    if hasattr(rows, "select_columns"):
        return rows.select_columns([name for name in COLUMNS if name != "image"])
    return rows


def _metrics(
    predictions: list[Prediction], baseline: list[Prediction], majority: Majority, is_yes_no: bool
) -> Metrics:
    """Metrics of the predictions beside those of the baselines."""
    metric = balanced_accuracy if is_yes_no else exact_match
    score, base = metric(predictions), metric(baseline).value
    value = score.value
    metrics: Metrics = {
        metric.__name__: value,
        "mean_image": base,
        "difference": None if value is None or base is None else value - base,
        "error": score.error,
        "majority_accuracy" if is_yes_no else "majority": majority.accuracy(predictions),
        "questions": score.questions,
    }
    if is_yes_no:
        metrics |= {
            "macro": balanced_accuracy(predictions, MIN_QUESTIONS).value,
            "accuracy": accuracy(predictions).value,
            "precision": precision(predictions).value,
            "recall": recall(predictions).value,
            "blind_accuracy": accuracy(baseline).value,
            "question_ids": score.question_ids,
            "question_ids_left_out": score.left_out,
            "all_questions": len(predictions),
        }
    else:
        metrics["mean_recall"] = mean_recall(predictions).value
    return metrics


def _compare(
    predictions: list[Prediction], baseline: list[Prediction], majority: Majority, is_yes_no: bool
) -> dict[str, Any]:
    """Metrics beside those of the baselines, of all yes/no questions (or of all others) and of each group."""
    predictions = [one for one in predictions if one.is_yes_no == is_yes_no]
    baseline = [one for one in baseline if one.is_yes_no == is_yes_no]
    if not predictions:
        return {}

    def by(*names: str) -> dict[str, Metrics]:
        groups = group(baseline, *names)
        return {
            name: _metrics(members, groups[name], majority, is_yes_no)
            for name, members in group(predictions, *names).items()
        }

    by_source = by("source")
    photographs = [row for name, row in by_source.items() if name != SYNTHETIC]
    found = {
        "mean_over_sources": _mean_over_sources(list(by_source.values())),
        "mean_over_photographs": _mean_over_sources(photographs) if 0 < len(photographs) < len(by_source) else {},
        "all": _metrics(predictions, baseline, majority, is_yes_no),
        "by_source": by_source,
        "by_question_type": by("question_type"),
        "by_category": by("category"),
        "by_source_and_question_type": by("source", "question_type"),
    }
    if not is_yes_no:
        answers = by("question_type", "ground_truth")
        found["by_answer"] = {name: row for name, row in answers.items() if row["questions"] >= MIN_QUESTIONS}
    return found


def _mean_over_sources(rows: list[Metrics]) -> Metrics:
    """Means of metrics and sums of counts. The error is that of the mean; None if that of a source is unknown."""
    totals: Metrics = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        totals[name] = sum(values) if name in COUNTS else mean(values)
    errors = [row["error"] for row in rows if row["questions"]]
    totals["error"] = None if None in errors or not errors else math.hypot(*errors) / len(errors)
    return totals


def _robustness(
    model: Any,
    processor: Any,
    rows: Rows,
    predictions: list[Prediction],
    settings: Callable[[str], dict[str, Any]],
) -> dict[str, Any]:
    """Balanced accuracy, mean over sources, of `rows` as they are (among `predictions`) and corrupted."""
    if not len(rows):
        return {}
    corrupted = {
        name: predict(model, processor, rows, generate_words=False, transform=corrupt, **settings(name))
        for name, corrupt in corruptions(processor).items()
    }
    images = {(one.source, one.image_id) for members in corrupted.values() for one in members}
    original = [one for one in predictions if (one.source, one.image_id) in images]
    conditions: dict[str, Metrics] = {}
    for name, members in {"as it is": original, **corrupted}.items():
        scores = by_group(balanced_accuracy, members, "source")
        value = mean(score.value for score in scores.values())
        base = value if name == "as it is" else conditions["as it is"]["balanced_accuracy"]
        conditions[name] = {
            "balanced_accuracy": value,
            "by_source": {source: score.value for source, score in scores.items()},
            "questions": sum(score.questions for score in scores.values()),
            "difference": None if value is None or base is None else value - base,
        }
    return {"images": len(rows), "conditions": conditions}


def choose_examples(predictions: Sequence[Prediction], rows: Rows, count: int = EXAMPLES) -> list[dict[str, Any]]:
    """Choose at most `count` right and `count` wrong answers, of different images and many question types.

    Right answers other than "no" come first: their attention maps have something to show.
    """
    indices = {(str(row["source"]), str(row["image_id"])): index for index, row in enumerate(without_images(rows))}
    shuffled = random.Random(0).sample(list(predictions), len(predictions))
    right = sorted((one for one in shuffled if one.is_right), key=lambda one: one.ground_truth == "no")
    examples: list[dict[str, Any]] = []
    images: set[tuple[str, str]] = set()
    for candidates in (right, [one for one in shuffled if not one.is_right]):
        seen: Counter[str] = Counter()
        ranked = []  # the first of every question type, then the second of every type, ...
        for one in candidates:
            ranked.append((seen[one.question_type], one))
            seen[one.question_type] += 1
        chosen = 0
        for _, one in sorted(ranked, key=lambda pair: pair[0]):
            image = (one.source, one.image_id)
            if chosen < count and image not in images:
                chosen += 1
                images.add(image)
                examples.append(asdict(one) | {"is_right": one.is_right, "row": indices[image]})
    return examples

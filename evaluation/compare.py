"""A verdict with an error bar: did training make the model better?

    answers before ─┐
    answers after ──┴→ difference, question by question → its standard error, with images as clusters → a sentence

Both tables hold the same questions, answered in the same precision: rounding to bfloat16 alone moves the balanced
accuracy on 20 images by 0.02.
"""

from dataclasses import dataclass

import pandas as pd

from . import MIN_ANSWERS, STANDARD_ERRORS
from .metrics import clustered_error, counted, is_yes_no, placements


KEYS = ["source", "image_id", "question", "truth"]


@dataclass(frozen=True)
class Comparison:
    """A metric before and after.

    Attributes:
        metric: "balanced accuracy", or "exact match" if no question is answered yes or no.
        before, after: its values in 0..1.
        error: standard error of their difference; None if there are too few images or answers to tell.
        is_guess: the model is not shown to be better than one that sees no image: 0.5, or no exact match at all.
        questions, images: numbers of those compared.
    """

    metric: str
    before: float
    after: float
    error: float | None
    is_guess: bool
    questions: int
    images: int

    @property
    def is_shown(self) -> bool:
        """Whether the difference exceeds two standard errors."""
        return self.error is not None and abs(self.after - self.before) > STANDARD_ERRORS * self.error

    def verdict(self, model: str = "the model") -> str:
        """A sentence on whether training made `model` better."""
        figures = f"{self.metric} {self.before:.3f} before, {self.after:.3f} after"
        if self.error is None:
            figures += f", on too few questions to tell ({self.questions})"
        else:
            difference = f"difference {self.after - self.before:+.3f} ± {self.error:.3f}"
            figures += f" ({difference}, {self.questions} questions about {self.images} images)"
        if self.is_shown and self.after < self.before:
            return (
                f"Training made {model} WORSE: {figures}. The weights that it started from are better on these images."
            )
        if self.is_guess:
            return f"The answers of {model} are no better than a guess: {figures}. It needs more images or epochs."
        return (
            f"Training made {model} better: {figures}."
            if self.is_shown
            else f"No difference shown for {model}: {figures}."
        )


def compare_presence(before: pd.DataFrame, after: pd.DataFrame) -> dict[str, tuple[float, float, float | None]]:
    """{metric: (before, after, standard error of the difference)} of two tables of `training.tower.answer_presence`.

    Pictures of one group (camera) are not independent: groups are the clusters.

    Raises:
        ValueError: the questions differ.
    """
    keys = ["source", "group", "image_id", "question_id", "truth"]
    if len(before) != len(after) or not (before[keys].to_numpy() == after[keys].to_numpy()).all():
        raise ValueError(f"only answers to the same questions can be compared, got {len(before)} and {len(after)}")
    clusters = (table.reset_index(drop=True).assign(image_id=list(table["group"])) for table in (before, after))
    was, now = map(counted, clusters)
    found = {}
    for name, old, new, factor in (
        ("balanced accuracy", was["is_right"].astype(float), now["is_right"].astype(float), 1),
        ("AUC", placements(was), placements(now), 2),  # a placement counts in the areas of yes and of no
    ):
        error = clustered_error(was, new - old)
        found[name] = float(was["weight"] @ old), float(was["weight"] @ new), error and factor * error
    return found


def compare(before: pd.DataFrame, after: pd.DataFrame) -> Comparison | None:
    """Comparison of two tables of `predict` of the same questions in the same order; None without questions.

    Raises:
        ValueError: the questions differ.
    """
    if len(before) != len(after) or not (before[KEYS].to_numpy() == after[KEYS].to_numpy()).all():
        raise ValueError(f"only answers to the same questions can be compared, got {len(before)} and {len(after)}")
    chosen, metric = counted(before, even_few=True), "balanced accuracy"
    if chosen.empty:
        in_words = before[~is_yes_no(before)]
        chosen, metric = in_words.assign(group="", unit="", truth="", weight=1 / max(1, len(in_words))), "exact match"
    if chosen.empty:
        return None
    was, now = (table["is_right"].astype(float).loc[chosen.index] for table in (before, after))
    images = len(chosen[["source", "image_id"]].drop_duplicates())
    # Fewer answers of one kind than this may all change in the same way by chance: their spread would say nothing.
    is_enough = min(images, chosen["truth"].value_counts().min()) >= MIN_ANSWERS
    score = float(chosen["weight"] @ now)
    margin = STANDARD_ERRORS * (clustered_error(chosen, now) or 0.0)
    return Comparison(
        metric,
        float(chosen["weight"] @ was),
        score,
        clustered_error(chosen, now - was) if is_enough else None,
        score == 0 if metric == "exact match" else is_enough and score <= 0.5 + margin,
        len(chosen),
        images,
    )

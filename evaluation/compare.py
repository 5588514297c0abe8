"""A verdict with an error bar: did training make the model better?

    answers before ─┐
    answers after ──┴→ difference, question by question → its standard error, with images as clusters → a sentence

Both tables hold the same questions, answered in the same precision: rounding to bfloat16 alone moves the balanced
accuracy on 20 images by 0.02.
"""

from dataclasses import dataclass

import pandas as pd

from . import MIN_ANSWERS, STANDARD_ERRORS
from .metrics import clustered_error, counted


@dataclass(frozen=True)
class Comparison:
    """The balanced accuracy before and after.

    Attributes:
        before, after: its values in 0..1.
        error: standard error of the difference; None if there are too few images or answers to tell.
        is_guess: the model is not shown to be better than a guess.
        questions, images: numbers of compared questions, and of their images.
    """

    before: float
    after: float
    error: float | None
    is_guess: bool
    questions: int
    images: int

    def verdict(self) -> str:
        """A sentence on whether training made the model better, by a difference of more than two standard errors."""
        difference, figures = self.after - self.before, f"balanced accuracy {self.before:.3f} before"
        figures += f", {self.after:.3f} after"
        if self.error is None:
            figures += f", on too few questions to tell ({self.questions})"
        else:
            figures += f" (difference {difference:+.3f} ± {self.error:.3f}, {self.questions} questions about "
            figures += f"{self.images} images)"
        is_shown = self.error is not None and abs(difference) > STANDARD_ERRORS * self.error
        if is_shown and difference < 0:
            return f"Training made the model WORSE: {figures}. The weights it started from are better on these images."
        if self.is_guess:
            return f"The answers of the model are no better than a guess: {figures}. It needs more images or epochs."
        return f"{'Training made the model better' if is_shown else 'No difference shown for the model'}: {figures}."


def compare(before: pd.DataFrame, after: pd.DataFrame) -> Comparison | None:
    """Comparison of two tables of `predict` of the same questions in the same order; None without yes/no questions.

    Raises:
        ValueError: the questions differ.
    """
    columns = ["source", "image_id", "question", "truth"]
    if len(before) != len(after) or not (before[columns].to_numpy() == after[columns].to_numpy()).all():
        raise ValueError(f"only answers to the same questions can be compared, got {len(before)} and {len(after)}")
    chosen = counted(before, even_few=True)
    if chosen.empty:
        return None
    was, now = (table["is_right"].astype(float).loc[chosen.index] for table in (before, after))
    images = len(chosen[["source", "image_id"]].drop_duplicates())
    # Fewer answers of one kind than this may all change in the same way by chance: their spread would say nothing.
    is_enough = min(images, chosen["truth"].value_counts().min()) >= MIN_ANSWERS
    score, margin = float(chosen["weight"] @ now), STANDARD_ERRORS * (clustered_error(chosen, now) or 0.0)
    return Comparison(
        float(chosen["weight"] @ was),
        score,
        clustered_error(chosen, now - was) if is_enough else None,
        is_enough and score <= 0.5 + margin,
        len(chosen),
        images,
    )

"""A verdict with an error bar: did training make the model better?

    answers before ─┐
    answers after ──┴→ difference, question by question → its standard error, with images as clusters → a sentence

Both tables hold the same questions, answered in the same precision: rounding to bfloat16 alone moves the balanced
accuracy on 20 images by 0.02.
"""

import pandas as pd

from . import MIN_ANSWERS, STANDARD_ERRORS
from .metrics import clustered_error, counted


def compare(before: pd.DataFrame, after: pd.DataFrame) -> str | None:
    """A sentence on whether training made the model better, by a difference of more than two standard errors.

    Args:
        before, after: tables of `predict` of the same questions in the same order.

    Returns:
        the verdict; None without yes/no questions.

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
    score, difference = float(chosen["weight"] @ now), float(chosen["weight"] @ (now - was))
    images = len(chosen[["source", "image_id"]].drop_duplicates())
    error, figures = 0.0, f"balanced accuracy {score - difference:.3f} before, {score:.3f} after"
    # Fewer answers of one kind than this may all change in the same way by chance: their spread would say nothing.
    is_enough = min(images, chosen["truth"].value_counts().min()) >= MIN_ANSWERS
    if is_enough:
        error = clustered_error(chosen, now - was) or 0.0
        about = f"{len(chosen)} questions about {images} images"
        figures += f" (difference {difference:+.3f} ± {error:.3f}, {about})"
    else:
        figures += f", on too few questions to tell ({len(chosen)})"
    is_shown = is_enough and abs(difference) > STANDARD_ERRORS * error
    if is_shown and difference < 0:
        return f"Training made the model WORSE: {figures}. The weights it started from are better on these images."
    if is_enough and score <= 0.5 + STANDARD_ERRORS * (clustered_error(chosen, now) or 0.0):
        return f"The answers of the model are no better than a guess: {figures}. It needs more images or epochs."
    return f"{'Training made the model better' if is_shown else 'No difference shown for the model'}: {figures}."

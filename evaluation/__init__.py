"""Evaluation: answers as a table, metrics of it, the report with its plots, thresholds, and verdicts."""

from hashlib import sha256


MIN_ANSWERS = 10  # of yes and of no, or of one value: rates of fewer are too noisy
STANDARD_ERRORS = 2.0  # that a difference must exceed to be shown


def half_of(source: str, image_id: str) -> int:
    """0 or 1, the half of its source that an image is in: by a hash, so that it is the same in every run."""
    return sha256(f"{source}/{image_id}".encode()).digest()[0] % 2

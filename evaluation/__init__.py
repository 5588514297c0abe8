"""Evaluation: answers as a table, metrics of it, the report with its plots, thresholds, and verdicts."""

MIN_ANSWERS = 10  # of yes and of no, or of one value: rates of fewer are too noisy
STANDARD_ERRORS = 2.0  # that a difference must exceed to be shown

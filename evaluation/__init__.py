"""Evaluation: answers as a table, metrics of it, the report with its plots, thresholds, and verdicts."""

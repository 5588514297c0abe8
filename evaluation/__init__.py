"""Evaluate a model: predictions, metrics, baselines, and the report with its plots."""

"""Comparison of runs: a page, its figures, its tables. Only run directories are read; nothing is recomputed."""

from fedloom.experiment.report.page import build, comparison_picture

__all__ = ["build", "comparison_picture"]

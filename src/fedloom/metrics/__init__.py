"""Metrics of predictions, clients, curves and generated data, as pure functions of numbers.

>>> rounds_to_target([0.5, 0.8], [1, 2], target=0.8)
2
"""

from fedloom.metrics.curves import (
    Direction,
    Values,
    best_round,
    fedavg_rounds,
    final_round,
    final_smoothed,
    parameters_to_target,
    rounds_to_target,
    smoothed,
)  # fmt: skip
from fedloom.metrics.fairness import (
    best,
    divergence_from_uniform,
    gini,
    hardest_weight,
    parity_gap,
    quantiles,
    summary,
    weighted_mean,
    worst,
)
from fedloom.metrics.measures import Predictions, direction, predictions
from fedloom.metrics.prediction import auroc, ece, mce, reliability, top_k

__all__ = [
    "Direction", "Predictions", "Values", "auroc", "best", "best_round", "direction", "divergence_from_uniform", "ece",
    "fedavg_rounds", "final_round", "final_smoothed", "gini", "hardest_weight", "mce", "parameters_to_target",
    "parity_gap", "predictions", "quantiles", "reliability", "rounds_to_target", "smoothed", "summary", "top_k",
    "weighted_mean", "worst",
]  # fmt: skip

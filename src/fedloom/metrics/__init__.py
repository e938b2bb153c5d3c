"""Metrics of predictions, clients, curves and generated data, as pure functions of numbers.

>>> rounds_to_target([0.5, 0.8], [1, 2], target=0.8)
2

``@metric(direction="min")`` registers a function of predictions and targets as a metric of runs.
"""

from fedloom.metrics.curves import (
    Direction,
    Values,
    best_round,
    fedavg_rounds,
    final_smoothed,
    parameters_to_target,
    rounds_to_target,
    seconds_to_target,
    smoothed,
)  # fmt: skip
from fedloom.metrics.fairness import (
    best,
    divergence_from_uniform,
    gini,
    hardest_weight,
    quantiles,
    summary,
    weighted_mean,
    worst,
)
from fedloom.metrics.prediction import (
    Predictions,
    auprc,
    auroc,
    balanced_accuracy,
    ece,
    exact_match,
    f1,
    mce,
    predictions,
    r2,
    reliability,
    top_k,
)
from fedloom.metrics.registry import Metric, direction, lookup, metric, names

__all__ = [
    "Direction", "Metric", "Predictions", "Values", "auprc", "auroc", "balanced_accuracy", "best", "best_round",
    "direction", "divergence_from_uniform", "ece", "exact_match", "f1", "fedavg_rounds",
    "final_smoothed", "gini", "hardest_weight", "lookup", "mce", "metric", "names", "parameters_to_target",
    "predictions", "quantiles", "r2", "reliability", "rounds_to_target",
    "seconds_to_target", "smoothed", "summary", "top_k",
    "weighted_mean", "worst",
]  # fmt: skip

"""Figures that a run or a report states: pure functions on numbers, which know nothing of runs.

>>> rounds_to_target([0.5, 0.8], [1, 2], target=0.8)
2
"""

from fedloom.metrics.communication import fedavg_rounds, parameters_to_target, rounds_to_target
from fedloom.metrics.curves import best_round, final_round, final_smoothed, smoothed
from fedloom.metrics.fairness import best, gini, parity_gap, quantiles, summary, weighted_mean, worst
from fedloom.metrics.values import Direction, Values

__all__ = [
    "Direction",
    "Values",
    "best",
    "best_round",
    "fedavg_rounds",
    "final_round",
    "final_smoothed",
    "gini",
    "parameters_to_target",
    "parity_gap",
    "quantiles",
    "rounds_to_target",
    "smoothed",
    "summary",
    "weighted_mean",
    "worst",
]

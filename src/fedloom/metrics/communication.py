"""What it cost to get there: rounds and parameters transmitted until a curve reaches a target."""

from __future__ import annotations

import numpy as np

from fedloom.core.errors import ConfigError
from fedloom.metrics.values import Direction, Values, sign, vector


def _first(values: Values, target: float, direction: Direction, others: Values, what: str) -> int | None:
    """Position of the first value at least as good as the target."""
    v, other = vector(values), vector(others)
    if len(v) != len(other):
        raise ConfigError(f"there are {len(v)} values but {len(other)} {what}.")
    s = sign(direction)
    reached = np.flatnonzero(s * v >= s * target)  # NaN reaches nothing
    return int(reached[0]) if len(reached) else None


def rounds_to_target(values: Values, rounds: Values, target: float, direction: Direction = "max") -> int | None:
    """The first round at which the curve is at least as good as the target; None when it never is.

    Args:
        values: the curve, NaN where it was not evaluated.
        rounds: the round of each value.
        target: the value to reach; reaching it exactly counts.
        direction: ``max`` to reach it from below (accuracy), ``min`` from above (loss).

    Example:
        >>> rounds_to_target([0.5, 0.79, 0.81, 0.78], [10, 20, 30, 40], target=0.8)
        30
        >>> rounds_to_target([0.5, 0.6], [10, 20], target=0.8) is None
        True
    """
    at = _first(values, target, direction, rounds, "rounds")
    return None if at is None else int(vector(rounds)[at])


def parameters_to_target(
    values: Values, parameters: Values, target: float, direction: Direction = "max"
) -> float | None:
    """Parameters transmitted until the curve is at least as good as the target; None when it never is.

    Args:
        values: the curve, NaN where it was not evaluated.
        parameters: parameters transmitted up to each value, cumulated.
        target: the value to reach.
        direction: ``max`` for accuracy, ``min`` for loss.

    Example:
        >>> parameters_to_target([0.5, 0.9], [1000, 2000], target=0.8)
        2000.0
    """
    at = _first(values, target, direction, parameters, "counts of parameters")
    return None if at is None else float(vector(parameters)[at])


def fedavg_rounds(uploaded: float, model: int, cohort: float) -> float:
    """Uploads in units of one FedAvg round, in which each client of the cohort sends one model up.

    uploaded / (model · cohort). FedAvg after t rounds has the value t, SCAFFOLD, which sends a second model, 2t.

    Args:
        uploaded: parameters sent up so far, by all clients together.
        model: parameters of one model.
        cohort: clients a round.

    Example:
        >>> fedavg_rounds(uploaded=2 * 100 * 10 * 7, model=100, cohort=10)
        14.0
    """
    if model <= 0 or cohort <= 0:
        raise ConfigError(f"a FedAvg round needs a model and a cohort, not {model} parameters and {cohort} clients.")
    return uploaded / (model * cohort)

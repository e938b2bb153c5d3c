"""One number for a curve over rounds: its last, its best, its smoothed value. They are different figures.

Rounds without a value (not evaluated, or NaN) are passed over.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedloom.core.errors import ConfigError
from fedloom.metrics.values import Direction, Values, sign, vector


def _points(values: Values, rounds: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The values that exist and their rounds."""
    v, r = vector(values), vector(rounds)
    if len(v) != len(r):
        raise ConfigError(f"there are {len(v)} values but {len(r)} rounds.")
    known = ~np.isnan(v)
    return v[known], r[known]


def final_round(values: Values, rounds: Values) -> tuple[int, float] | None:
    """The last round with a value, and the value: what is reported unless something else is said.

    Example:
        >>> final_round([0.5, 0.8, float("nan")], [1, 2, 3])
        (2, 0.8)
    """
    v, r = _points(values, rounds)
    return (int(r[-1]), float(v[-1])) if len(v) else None


def best_round(values: Values, rounds: Values, direction: Direction = "max") -> tuple[int, float] | None:
    """The first round with the best value, and the value: optimistic, since the test set chose the round.

    Example:
        >>> best_round([0.5, 0.9, 0.8, 0.9], [1, 2, 3, 4])
        (2, 0.9)
        >>> best_round([2.0, 1.5], [10, 20], direction="min")
        (20, 1.5)
    """
    v, r = _points(values, rounds)
    if not len(v):
        return None
    at = int(np.argmax(sign(direction) * v))
    return int(r[at]), float(v[at])


def smoothed(values: Values, decay: float = 0.9) -> NDArray[np.float64]:
    """Exponential moving average: s_1 = v_1, s_t = decay · s_{t−1} + (1 − decay) · v_t.

    A missing value leaves the average as it was; before the first value it is NaN.

    Args:
        values: the curve.
        decay: weight of the past, in [0, 1).

    Example:
        >>> smoothed([1.0, 0.0, float("nan"), 1.0], decay=0.5)
        array([1.  , 0.5 , 0.5 , 0.75])
    """
    if not 0 <= decay < 1:
        raise ConfigError(f"the decay of a moving average lies in [0, 1), not {decay}.")
    result = vector(values)
    state = float("nan")
    for i, value in enumerate(result):
        if not np.isnan(value):
            state = value if np.isnan(state) else decay * state + (1 - decay) * value
        result[i] = state
    return result


def final_smoothed(values: Values, rounds: Values, decay: float = 0.9) -> tuple[int, float] | None:
    """The last round with a value, and the moving average there.

    Example:
        >>> final_smoothed([1.0, 0.0], [1, 2], decay=0.5)
        (2, 0.5)
    """
    v, r = _points(values, rounds)
    return (int(r[-1]), float(smoothed(v, decay)[-1])) if len(v) else None

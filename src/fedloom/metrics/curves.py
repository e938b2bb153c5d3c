"""Statistics of a curve over rounds: best and smoothed values, and the rounds and communication to a target.

Rounds without a value (not evaluated, or NaN) are skipped. ``paired`` compares two methods over seeds.

>>> gain = paired({1: 0.8, 2: 0.9, 3: 1.0}, {1: 0.7, 2: 0.8, 3: 0.8})
>>> f"{gain['mean']:.3f} ± {gain['se']:.3f}"
'0.133 ± 0.033'
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.base.checks import one_of

Values: TypeAlias = Sequence[float] | NDArray[np.floating] | NDArray[np.integer] | Tensor
Direction: TypeAlias = Literal["max", "min"]
"""``max`` if higher values are better (accuracy), ``min`` if lower ones are (loss)."""


def vector(values: Values) -> NDArray[np.float64]:
    """A float64 copy of the values, [N]; None becomes NaN.

    >>> vector([1, None, 3.5])
    array([1. , nan, 3.5])
    """
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.array(values, dtype=np.float64).reshape(-1)


def sign(direction: str) -> float:
    """1 for ``max`` and -1 for ``min``, so that ``sign * value`` is to be maximised.

    >>> sign("max"), sign("min")
    (1.0, -1.0)
    """
    one_of("a metric has no direction", direction, ("max", "min"))
    return 1.0 if direction == "max" else -1.0


def points(values: Values, partners: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The values that are not NaN, and their partners at the same positions."""
    v = vector(values)
    has_value = ~np.isnan(v)
    return v[has_value], vector(partners)[has_value]


def best_round(values: Values, rounds: Values, direction: Direction = "max") -> tuple[int, float] | None:
    """The first round with the best value, and the value: optimistic, since the test set selects the round.

    >>> best_round([0.5, 0.9, 0.8, 0.9], [1, 2, 3, 4])
    (2, 0.9)
    >>> best_round([2.0, 1.5], [10, 20], direction="min")
    (20, 1.5)
    """
    v, r = points(values, rounds)
    if not len(v):
        return None
    at = int(np.argmax(sign(direction) * v))
    return int(r[at]), float(v[at])


def smoothed(values: Values, decay: float = 0.9) -> NDArray[np.float64]:
    """Exponential moving average s_1 = v_1, s_t = decay · s_{t-1} + (1 - decay) · v_t.

    A missing value repeats the average; before the first value it is NaN.

    Args:
        values: the curve.
        decay: weight of the past, in [0, 1).

    >>> smoothed([1.0, 0.0, float("nan"), 1.0], decay=0.5)
    array([1.  , 0.5 , 0.5 , 0.75])
    """
    result = vector(values)
    state = float("nan")
    for i, value in enumerate(result):
        if not np.isnan(value):
            state = value if np.isnan(state) else decay * state + (1 - decay) * value
        result[i] = state
    return result


def final_smoothed(values: Values, rounds: Values, decay: float = 0.9) -> tuple[int, float] | None:
    """The last round with a value, and the moving average there; None if there is none.

    >>> final_smoothed([1.0, 0.0], [1, 2], decay=0.5)
    (2, 0.5)
    """
    v, r = points(values, rounds)
    return (int(r[-1]), float(smoothed(v, decay)[-1])) if len(v) else None


def _at_target(values: Values, costs: Values, target: float, direction: Direction) -> float | None:
    v, cost = points(values, costs)
    s = sign(direction)
    reached = np.flatnonzero(s * v >= s * target)
    return float(cost[reached[0]]) if len(reached) else None


def rounds_to_target(values: Values, rounds: Values, target: float, direction: Direction = "max") -> int | None:
    """The first round in which the curve reaches the target (equality counts); None if it never does.

    Args:
        values: the curve, NaN where it was not evaluated.
        rounds: the round of each value.
        target: the value to reach.
        direction: ``max`` to reach it from below (accuracy), ``min`` from above (loss).

    >>> rounds_to_target([0.5, 0.79, 0.81, 0.78], [10, 20, 30, 40], target=0.8)
    30
    >>> rounds_to_target([0.5, 0.6], [10, 20], target=0.8) is None
    True
    """
    reached = _at_target(values, rounds, target, direction)
    return None if reached is None else int(reached)


def parameters_to_target(
    values: Values, parameters: Values, target: float, direction: Direction = "max"
) -> float | None:
    """Number of parameters transmitted until the curve reaches the target; None if it never does.

    Args:
        values: the curve, NaN where it was not evaluated.
        parameters: cumulative number of parameters transmitted up to each value.
        target: the value to reach.
        direction: ``max`` for accuracy, ``min`` for loss.

    >>> parameters_to_target([0.5, 0.9], [1000, 2000], target=0.8)
    2000.0
    """
    return _at_target(values, parameters, target, direction)


def seconds_to_target(values: Values, clock: Values, target: float, direction: Direction = "max") -> float | None:
    """Time until the curve reaches the target, given the clock at each value; None if it never does.

    >>> seconds_to_target([0.5, 0.9], [60.0, 90.0], target=0.8)
    90.0
    """
    return _at_target(values, clock, target, direction)


def fedavg_rounds(uploaded: float, model: int, cohort: float) -> float:
    """Uploads in units of one FedAvg round, uploaded / (model · cohort).

    FedAvg has the value t after t rounds; SCAFFOLD, which uploads a second model, 2t.

    Args:
        uploaded: total number of parameters uploaded by all clients.
        model: number of parameters of a model.
        cohort: clients per round.

    >>> fedavg_rounds(uploaded=2 * 100 * 10 * 7, model=100, cohort=10)
    14.0
    """
    return uploaded / (model * cohort)


Seed = TypeVar("Seed", bound=Hashable)
LEVEL = 0.95
"""The level of intervals."""
EQUAL = 1e-12
"""Differences are equal if they differ by no more than this, relative to the compared values."""


def paired(a: Mapping[Seed, float], b: Mapping[Seed, float], comparisons: int = 1) -> dict[str, float]:
    """Mean of a - b over common seeds, its standard error, and the interval and two-sided p of the paired t test.

    Seeds with a value that is not finite are left out. The level of the interval is 95 % for all ``comparisons``
    together (Bonferroni); p is that of a single one, NaN if all differences are equal.

    >>> gain = paired({1: 0.8, 2: 0.9, 3: 1.0}, {1: 0.7, 2: 0.8, 3: 0.8})
    >>> round(gain["mean"], 3), round(gain["se"], 3), round(gain["low"], 2), round(gain["p"], 3), gain["seeds"]
    (0.133, 0.033, -0.01, 0.057, 3)
    """
    from scipy.special import stdtr, stdtrit  # slow to import

    seeds = [seed for seed in a if seed in b and math.isfinite(a[seed] - b[seed])]
    d = np.array([a[seed] - b[seed] for seed in seeds])
    if len(d) < 2:
        unknown = dict.fromkeys(("mean", "se", "low", "high", "p"), math.nan)
        return unknown | ({"mean": float(d[0])} if len(d) else {}) | {"seeds": len(d)}
    se = float(d.std(ddof=1) / math.sqrt(len(d)))
    if se <= EQUAL * max(abs(values[seed]) for values in (a, b) for seed in seeds):
        se = 0.0
    half = float(stdtrit(len(d) - 1, 1 - (1 - LEVEL) / (2 * comparisons))) * se
    mean = float(d.mean())
    p = 2 * float(stdtr(len(d) - 1, -abs(mean) / se)) if se else math.nan
    return {"mean": mean, "se": se, "low": mean - half, "high": mean + half, "p": p, "seeds": len(d)}

"""Summaries of a metric over clients: weighted mean, worst and best clients, Gini coefficient, gap, quantiles.

Clients without a value (NaN: they have no test samples) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

import numpy as np
from numpy.typing import NDArray

from fedloom.base.errors import ConfigError
from fedloom.metrics.curves import Direction, Values, points, sign, vector

NAN = float("nan")


def _without_nan(values: Values) -> NDArray[np.float64]:
    array = vector(values)
    return array[~np.isnan(array)]


def weighted_mean(values: Values, weights: Values) -> float:
    """Weighted mean Σ w_i x_i / Σ w_i; with the clients' sample counts as w, the mean over samples.

    Example:
        >>> weighted_mean([0.5, 1.0, float("nan")], [3, 1, 9])
        0.625
    """
    x, w = points(values, weights)
    return float((w * x).sum() / w.sum()) if w.sum() > 0 else NAN


def _count(share: float, clients: int) -> int:
    """max(1, ⌊share · K⌋)."""
    if not 0 < share <= 1:
        raise ConfigError(f"a share of the clients lies in (0, 1], not {share}.")
    return max(1, floor(share * clients + 1e-9))


def worst(values: Values, share: float = 0.1, direction: Direction = "max") -> float:
    """Mean over the worst fraction ``share`` of the K clients with a value: max(1, ⌊share · K⌋) of them.

    Raises:
        ConfigError: if the share is outside (0, 1].

    Example:
        >>> worst([0.9, 0.2, 0.4, 0.8], share=0.5)
        0.30000000000000004
        >>> worst([0.9, 0.2, 0.4, 0.8])  # one client
        0.2
    """
    s = sign(direction)
    ordered = np.sort(s * _without_nan(values))
    count = _count(share, len(ordered))
    return float(s * ordered[:count].mean()) if len(ordered) else NAN


def best(values: Values, share: float = 0.1, direction: Direction = "max") -> float:
    """Mean over the best fraction ``share`` of the K clients with a value: max(1, ⌊share · K⌋) of them.

    Example:
        >>> best([0.9, 0.2, 0.4, 0.8])
        0.9
    """
    return worst(values, share, "min" if sign(direction) > 0 else "max")


def gini(values: Values) -> float:
    """Gini coefficient Σ_i Σ_j |x_i − x_j| / (2 K² x̄) of non-negative values, 0 if all are equal.

    It is NaN if there is no client, the mean is 0, or a value is negative, as an R² may be. Tables often print it times
    100.

    Example:
        >>> gini([1.0, 1.0, 1.0]), gini([0.0, 0.0, 0.0, 1.0])
        (0.0, 0.75)
        >>> gini([-0.5, 1.0])
        nan
    """
    x = np.sort(_without_nan(values))
    if not len(x) or x[0] < 0 or x.sum() <= 0:
        return NAN
    ranks = np.arange(1, len(x) + 1)
    return float(np.maximum(((2 * ranks - len(x) - 1) * x).sum() / (len(x) * x.sum()), 0.0))  # not below by rounding


def quantiles(values: Values, at: Sequence[float] = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)) -> dict[float, float]:
    """Quantiles over the clients, linearly interpolated.

    Example:
        >>> quantiles([0.0, 1.0, 2.0], at=(0.0, 0.5, 0.75))
        {0.0: 0.0, 0.5: 1.0, 0.75: 1.5}
    """
    x = np.sort(_without_nan(values))
    if np.isinf(x).any():  # np.quantile multiplies differences of neighbours, infinite ones by 0
        result = np.interp(np.multiply(at, len(x) - 1), np.arange(len(x)), x)
    else:
        result = np.quantile(x, list(at)) if len(x) else np.full(len(at), NAN)
    return {float(q): float(v) for q, v in zip(at, result, strict=True)}


def divergence_from_uniform(p: Values, left_out: float = 0) -> float:
    """KL(p ‖ uniform) = Σ p_i log(n p_i) of n coefficients, in nats: 0 for equal ones, log n for all weight on one.

    Args:
        p: the coefficients.
        left_out: how many of them are 0 because the client's update did not arrive; these do not count as n.

    Example:
        >>> divergence_from_uniform([0.25] * 4), round(divergence_from_uniform([1.0, 0.0]), 4)
        (0.0, 0.6931)
        >>> divergence_from_uniform([0.5, 0.0, 0.5], left_out=1)
        0.0
    """
    x = vector(p)
    x = x / x.sum()
    used = x[x > 0]
    return float((used * np.log(max(len(x) - left_out, len(used)) * used)).sum())


def hardest_weight(values: Values, weights: Values, share: float = 0.1, direction: Direction = "max") -> float:
    """The share of all weight on the hardest clients: the worst max(1, ⌊share · K⌋) of the K with a value.

    With the clients' coefficients summed over rounds as ``weights``, equal coefficients give about ``share``.

    Example:
        >>> hardest_weight([0.9, 0.2, 0.4, 0.8], [1, 2, 1, 1], share=0.25)
        0.4
    """
    x, w = points(values, weights)
    hardest = np.argsort(sign(direction) * x, kind="stable")[: _count(share, len(x))]
    return float(w[hardest].sum() / w.sum()) if w.sum() > 0 else NAN


@np.errstate(invalid="ignore")  # of infinite values there is a mean, but no standard deviation
def summary(values: Values, weights: Values | None = None, direction: Direction = "max") -> dict[str, float]:
    """All summaries by the names under which a run stores them (``clients/accuracy/<name>``).

    Args:
        values: the metric of each client [K]; NaN for a client without one.
        weights: sample count of each client [K], for ``weighted``; by default equal.
        direction: whether higher or lower values are better.

    Returns:
        ``clients`` (the number with a value), ``mean``, ``weighted``, ``std`` (of the population, divided by K),
        ``worst10``, ``best10``, ``worst``, ``best``, ``gini``, ``gap`` (best minus worst client), and
        the quantiles ``q10``, ``q25``, ``q50``, ``q75``, ``q90``.

    Example:
        >>> figures = summary([0.5, 1.0], weights=[3, 1])
        >>> figures["mean"], figures["weighted"], figures["std"], figures["worst10"], figures["gap"]
        (0.75, 0.625, 0.25, 0.5, 0.5)
    """
    x = vector(values)
    valid = _without_nan(x)
    everyone = 1 / max(len(valid), 1)
    return {
        "clients": float(len(valid)),
        "mean": float(valid.mean()) if len(valid) else NAN,
        "weighted": weighted_mean(x, np.ones(len(x)) if weights is None else weights),
        "std": float(valid.std()) if len(valid) else NAN,
        "worst10": worst(valid, 0.1, direction),
        "best10": best(valid, 0.1, direction),
        "worst": worst(valid, everyone, direction),
        "best": best(valid, everyone, direction),
        "gini": gini(valid),
        "gap": float(np.ptp(valid)) if len(valid) else NAN,
        **{f"q{round(100 * q)}": v for q, v in quantiles(valid, (0.1, 0.25, 0.5, 0.75, 0.9)).items()},
    }


POOLED = "pooled"
"""The name of a metric over the samples of all clients, beside the summaries of it over clients."""
FIGURES = (*summary([0.0]), POOLED)
"""The names of all summaries."""

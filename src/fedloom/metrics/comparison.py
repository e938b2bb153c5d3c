"""Two methods compared over seeds.

>>> found = paired({1: 0.8, 2: 0.9, 3: 1.0}, {1: 0.7, 2: 0.8, 3: 0.8})
>>> f"{found['mean']:.3f} ± {found['se']:.3f}"
'0.133 ± 0.033'
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

Seed = TypeVar("Seed", bound=Hashable)
LEVEL = 0.95
"""The level of intervals."""
EQUAL = 1e-12
"""Differences are equal if they differ by no more than this, relative to the compared values."""


def paired(a: Mapping[Seed, float], b: Mapping[Seed, float], comparisons: int = 1) -> dict[str, float]:
    """Mean of a - b over common seeds, its standard error, and the interval and two-sided p of the paired t test.

    The level of the interval is 95 % for all ``comparisons`` together (Bonferroni); p is that of a single one, NaN if
    all differences are equal.

    >>> found = paired({1: 0.8, 2: 0.9, 3: 1.0}, {1: 0.7, 2: 0.8, 3: 0.8})
    >>> round(found["mean"], 3), round(found["se"], 3), round(found["low"], 2), round(found["p"], 3), found["seeds"]
    (0.133, 0.033, -0.01, 0.057, 3)
    """
    from scipy.special import stdtr, stdtrit  # slow to import

    d = np.array([a[seed] - b[seed] for seed in a if seed in b])
    d = d[np.isfinite(d)]
    if len(d) < 2:
        return {
            "mean": float(d.mean()) if len(d) else math.nan,
            "se": math.nan,
            "low": math.nan,
            "high": math.nan,
            "p": math.nan,
            "seeds": len(d),
        }
    se = float(d.std(ddof=1) / math.sqrt(len(d)))
    if se <= EQUAL * max(abs(values[seed]) for values in (a, b) for seed in a if seed in b):
        se = 0.0
    half = float(stdtrit(len(d) - 1, 1 - (1 - LEVEL) / (2 * comparisons))) * se
    mean = float(d.mean())
    p = 2 * float(stdtr(len(d) - 1, -abs(mean) / se)) if se else math.nan
    return {"mean": mean, "se": se, "low": mean - half, "high": mean + half, "p": p, "seeds": len(d)}

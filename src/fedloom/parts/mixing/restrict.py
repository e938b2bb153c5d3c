"""Decisions over all K clients, restricted to a cohort."""

from __future__ import annotations

import numpy as np

from fedloom.core.context import RoundInfo
from fedloom.parts.mixing.simplex import Vector


def by_samples(info: RoundInfo) -> Vector:
    """n_i/n of all K clients [K]; where only the cohort's sizes are known, others count with the mean of those.

    >>> by_samples(RoundInfo.of_cohort([0, 2], [10, 30], clients=3)).round(3)
    array([0.167, 0.333, 0.5  ])
    """
    n = np.full(info.facts.clients, info.samples.mean()) if info.sizes is None else info.sizes.astype(np.float64)
    n[info.cohort] = info.samples
    return n / n.sum()


def restrict_to_cohort(p: Vector, cohort: np.ndarray) -> Vector:
    """p [K] restricted to the cohort and normalised, [|S|].

    If all of these are 0, the coefficients are NaN, and the round leaves the model unchanged.

    >>> restrict_to_cohort(np.array([0.5, 0.2, 0.3]), np.array([1, 2]))
    array([0.4, 0.6])
    >>> restrict_to_cohort(np.array([1.0, 0.0, 0.0]), np.array([1, 2]))
    array([nan, nan])
    """
    own = p[cohort]
    return own / own.sum() if own.sum() > 0 else np.full(len(own), np.nan)

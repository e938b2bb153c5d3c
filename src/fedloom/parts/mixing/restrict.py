"""Decisions over all K clients and over those that are here this round."""

from __future__ import annotations

import numpy as np

from fedloom.core.parts import Cohort
from fedloom.parts.mixing.simplex import Vector


def by_samples(cohort: Cohort) -> Vector:
    """n_i/n of all K clients; one that is not here counts as the mean of those that are.

    >>> by_samples(Cohort(np.array([0, 2]), np.array([10, 30]), total_clients=3)).round(3)
    array([0.167, 0.333, 0.5  ])
    """
    n = np.full(cohort.total_clients, cohort.samples.mean())
    n[cohort.clients] = cohort.samples
    return n / n.sum()


def here(p: Vector, cohort: Cohort) -> Vector:
    """p [K] restricted to the cohort and made to sum to 1 [|S|]; equal shares where the cohort has no weight at all.

    >>> here(np.array([0.5, 0.2, 0.3]), Cohort(np.array([1, 2]), np.array([10, 30]), total_clients=3))
    array([0.4, 0.6])
    """
    own = p[cohort.clients]
    return own / own.sum() if own.sum() > 0 else np.full(len(own), 1 / len(own))

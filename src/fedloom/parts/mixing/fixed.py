"""Constant mixing coefficients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.base.errors import ConfigError
from fedloom.base.tree import Tree
from fedloom.core.context import Facts, RoundInfo
from fedloom.core.local import Local
from fedloom.core.parts import Mixing
from fedloom.core.simplex import restrict_to_cohort


@dataclass(frozen=True)
class Fixed(Mixing):
    """p_i ∝ w_i for given weights of all K clients: empirical risk minimisation of a fixed mixture.

    A round in which all clients of the cohort have the weight 0 has no effect.

    Args:
        weights: w [K], non-negative, not all 0.

    Raises:
        ConfigError: if the weights are invalid, or there is not one per client.

    >>> Fixed((1.0, 2.0, 1.0)).coefficients({}, RoundInfo.of_cohort([0, 1], [9, 9], clients=3))[1].round(3)
    array([0.333, 0.667])
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        w = np.asarray(self.weights, dtype=np.float64)
        if not (w.ndim == 1 and w.size and np.isfinite(w).all() and (w >= 0).all() and w.any()):
            raise ConfigError("mixing 'fixed' needs finite weights of at least 0, one for each client and not all 0.")

    def check(self, local: Local, facts: Facts) -> None:
        if len(self.weights) != facts.clients:
            raise ConfigError(f"mixing 'fixed' has {len(self.weights)} weights, but there are {facts.clients} clients.")

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """The weights of the clients present, normalised."""
        return state, restrict_to_cohort(np.asarray(self.weights, dtype=np.float64), info.cohort)

"""Uniform mixing coefficients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Mixing


@dataclass(frozen=True)
class Uniform(Mixing):
    """p_i = 1/|S_t|, whatever the clients' sizes.

    >>> Uniform().coefficients({}, RoundInfo.of_cohort([3, 8], [10, 30], clients=9))[1]
    array([0.5, 0.5])
    """

    is_uniform = True

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        return state, np.full(len(info.cohort), 1 / len(info.cohort))

"""FedDisco: coefficients that fall with the distance of a client's label distribution from the uniform one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedloom.base.ranges import NonNegative
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Mixing, Needs
from fedloom.core.targets import CLASSES


@dataclass(frozen=True)
class Discrepancy(Mixing):
    """p_k ∝ max(0, n_k/n - a·d_k + b) with d_k the distance of client k's class shares from equal ones.

    n is the number of samples of the cohort, and d_k = ‖D_k - T‖₂ or KL(D_k‖T), where D_k [C] are the shares of the
    classes among the client's samples and T = 1/C. With a = b = 0, or if all of these are 0, p_k is n_k/n. All K
    clients send the server their C class counts before the first round; its bytes include them. Ye, Xu, Wang, Xu, Chen
    & Wang, ICML 2023 (FedDisco), equation (9).

    Args:
        a: a ≥ 0, the weight of the discrepancy.
        b: b ≥ 0, added to all clients.
        distance: ``l2`` or ``kl``.

    >>> info = RoundInfo.of_cohort([3, 8], [10, 30], clients=9, label_counts=[[5, 5], [0, 30]])
    >>> Discrepancy(a=0.5).coefficients({}, info)[1].round(3)
    array([0.413, 0.587])
    """

    a: NonNegative = 0.5
    b: NonNegative = 0.1
    distance: Literal["l2", "kl"] = "l2"

    needs = Needs(label_counts=True, common_classes=True)
    targets = CLASSES
    citation = "ye2023feddisco"

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        assert info.label_counts is not None
        shares = info.label_counts / np.maximum(info.label_counts.sum(1, keepdims=True), 1)
        uniform = 1 / shares.shape[1]
        if self.distance == "l2":
            discrepancy = np.sqrt(((shares - uniform) ** 2).sum(1))
        else:
            discrepancy = (shares * np.log(np.where(shares > 0, shares, 1) / uniform)).sum(1)
        size = info.samples / info.samples.sum()
        weight = np.maximum(size - self.a * discrepancy + self.b, 0.0)
        return state, weight / weight.sum() if weight.sum() > 0 else size

"""Server SGD, with momentum (FedAvgM)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.ranges import Decay, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Facts, RoundInfo
from fedloom.core.parts import Halves, ServerOptimizer


@dataclass(frozen=True)
class SGD(ServerOptimizer):
    """m ← βm + Δ, θ ← θ - ηm; the momentum m [P] persists across rounds. η = 1 and β = 0 give plain averaging.

    With Nesterov's momentum the step is θ ← θ - η(Δ + βm), with the new m. Hsu, Qi & Brown 2019 (FedAvgM), §4.3, whose
    experiments use it.

    Args:
        lr: server learning rate η > 0.
        momentum: β in [0, 1).
        nesterov: use Nesterov momentum.
    """

    lr: Positive = 1.0
    momentum: Decay = 0.0
    nesterov: bool = False

    citation = "hsu2019fedavgm"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """m = 0."""
        return {"m": torch.zeros_like(theta)}

    def step(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The step ηm, or η(Δ + βm)."""
        m = self.momentum * state["m"] + update
        return {"m": m}, self.lr * (update + self.momentum * m if self.nesterov else m)

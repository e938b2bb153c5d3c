"""Local work that starts where the server's momentum leads (FedACG)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.ranges import Decay, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Facts, RoundInfo
from fedloom.core.parts import Halves, ServerOptimizer


@dataclass(frozen=True)
class Accelerated(ServerOptimizer):
    """m ← λm + Δ, θ ← θ - ηm, and clients receive θ - ηλm: the point to which the momentum alone leads.

    Updates are displacements from there, and whatever reads the received model reads that point, such as the pull of
    ``proximal``; θ is evaluated and deployed. A round costs FedAvg's communication. Clients receive the same models
    from ``sgd`` with ``nesterov``, whose θ they are. Kim, Kim & Han, CVPR 2024 (FedACG), algorithm 1, where η = 1.

    Args:
        lr: server learning rate η > 0.
        momentum: λ in [0, 1).
    """

    lr: Positive = 1.0
    momentum: Decay = 0.85

    citation = "kim2024fedacg"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """m = 0."""
        return {"m": torch.zeros_like(theta)}

    def broadcast(self, state: Tree, theta: Tensor) -> Tensor:
        """θ - ηλm."""
        return theta - self.lr * self.momentum * state["m"]

    def step(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The step ηm."""
        m = self.momentum * state["m"] + update
        return {"m": m}, self.lr * m

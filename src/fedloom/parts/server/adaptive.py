"""The adaptive server optimisers of Reddi et al.: Adam, Yogi and Adagrad.

m ← β₁m + (1-β₁)Δ, v ← a rule of v and Δ², θ ← θ - η m/(√v + τ), elementwise; m and v [P] persist across rounds. As in
the paper there is no bias correction, and v starts at τ². Reddi et al., ICLR 2021, algorithm 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedloom.base.ranges import Decay, Positive, Range
from fedloom.base.tree import Tree
from fedloom.core.context import Facts, RoundInfo
from fedloom.core.parts import Halves, ServerOptimizer

Adaptivity = Annotated[float, Range(0, 1e18, above=True)]  # float32 holds its square


class Adaptive(ServerOptimizer, ABC):
    """The step that Adam, Yogi and Adagrad share; they differ in the rule ``second`` of v."""

    lr: Positive
    beta1: Decay
    tau: Adaptivity
    citation = "reddi2021adaptive"

    @abstractmethod
    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        """The new v [P] from v and Δ²."""

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """m = 0, v = τ²."""
        return {"m": torch.zeros_like(theta), "v": torch.full_like(theta, self.tau**2)}

    def step(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The step η m/(√v + τ)."""
        m = self.beta1 * state["m"] + (1 - self.beta1) * update
        v = self.second(state["v"], update.square())
        return {"m": m, "v": v}, self.lr * m / (v.sqrt() + self.tau)


@dataclass(frozen=True)
class Adam(Adaptive):
    """θ ← θ - η m/(√v + τ) with v ← β₂v + (1-β₂)Δ².

    Args:
        lr: server learning rate η.
        beta1: decay β₁ of the first moment.
        beta2: decay β₂ of the second moment.
        tau: adaptivity τ.
    """

    lr: Positive = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: Adaptivity = 1e-3

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class Yogi(Adam):
    """θ ← θ - η m/(√v + τ) with v ← v - (1-β₂)Δ² sign(v - Δ²): v decreases slowly when updates become small."""

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)


@dataclass(frozen=True)
class Adagrad(Adaptive):
    """θ ← θ - η m/(√v + τ) with v ← v + Δ²: step sizes never increase.

    Args:
        lr: server learning rate η.
        beta1: decay β₁ of the first moment; 0 in the paper's experiments.
        tau: adaptivity τ.
    """

    lr: Positive = 0.1
    beta1: Decay = 0.0
    tau: Adaptivity = 1e-3

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared

"""The adaptive server optimisers of Reddi et al.: Adam, Yogi and Adagrad.

m ← β₁m + (1-β₁)Δ, v ← a rule of v and Δ², θ ← θ - η m/(√v + τ), elementwise; m and v [P] persist across rounds. As in
the paper there is no bias correction, and v starts at τ². Reddi et al., ICLR 2021, algorithm 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.checks import positive
from fedloom.core.context import Facts, RoundInfo
from fedloom.core.errors import ConfigError
from fedloom.core.parts import Halves, ServerOptimizer
from fedloom.core.slots import servers
from fedloom.core.tree import Tree

REDDI = "reddi2021adaptive"


class Adaptive(ServerOptimizer, ABC):
    """The step that Adam, Yogi and Adagrad share; they differ in the rule ``second`` of v."""

    lr: float
    beta1: float
    tau: float
    citation = REDDI

    def __post_init__(self) -> None:
        positive("the server's ", lr=self.lr, tau=self.tau)
        if self.tau > 1e18:
            raise ConfigError(
                f"the server's tau must be at most 1e18, so that float32 holds its square, not {self.tau}."
            )
        for name, value in vars(self).items():
            if name.startswith("beta") and not 0 <= value < 1:
                raise ConfigError(f"the server's {name} is {value:g}, but it must lie in [0, 1).")

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


@servers.register
@dataclass(frozen=True)
class Adam(Adaptive):
    """θ ← θ - η m/(√v + τ) with v ← β₂v + (1-β₂)Δ².

    Args:
        lr: server learning rate η.
        beta1: decay β₁ of the first moment.
        beta2: decay β₂ of the second moment.
        tau: adaptivity τ.

    Raises:
        ConfigError: if η or τ is not positive and finite, or a decay is outside [0, 1).
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@servers.register
@dataclass(frozen=True)
class Yogi(Adaptive):
    """θ ← θ - η m/(√v + τ) with v ← v - (1-β₂)Δ² sign(v - Δ²): v decreases slowly when updates become small.

    Args:
        lr: server learning rate η.
        beta1: decay β₁ of the first moment.
        beta2: decay β₂ of the second moment.
        tau: adaptivity τ.

    Raises:
        ConfigError: if η or τ is not positive and finite, or a decay is outside [0, 1).
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)


@servers.register
@dataclass(frozen=True)
class Adagrad(Adaptive):
    """θ ← θ - η m/(√v + τ) with v ← v + Δ²: step sizes never increase.

    Args:
        lr: server learning rate η.
        beta1: decay β₁ of the first moment; 0 in the paper's experiments.
        tau: adaptivity τ.

    Raises:
        ConfigError: if η or τ is not positive and finite, or a decay is outside [0, 1).
    """

    lr: float = 0.1
    beta1: float = 0.0
    tau: float = 1e-3

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared

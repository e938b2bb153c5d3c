"""The adaptive server optimisers of Reddi et al.: Adam, Yogi and Adagrad.

m ← β₁m + (1-β₁)Δ, v ← a rule of v and Δ², θ ← θ - η m/(√v + τ), elementwise; m and v [P] persist across rounds. As in
the paper there is no bias correction, and v starts at τ². Reddi et al., ICLR 2021, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.context import Facts, RoundInfo
from fedloom.core.errors import ConfigError
from fedloom.core.parts import Halves, ServerOptimizer
from fedloom.core.slots import servers
from fedloom.core.tree import Tree

REDDI = """@inproceedings{reddi2021adaptive, title={Adaptive Federated Optimization},
  author={Reddi, Sashank and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and Rush, Keith and
  Kone{\\v{c}}n{\\'y}, Jakub and Kumar, Sanjiv and McMahan, H. Brendan},
  booktitle={International Conference on Learning Representations}, year={2021}}"""


@servers.register
@dataclass(frozen=True)
class Adam(ServerOptimizer):
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
    citation = REDDI

    def __post_init__(self) -> None:
        _check(self.lr, self.tau, self.beta1, self.beta2)

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """m = 0, v = τ²."""
        return _start(theta, self.tau)

    def step(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The step η m/(√v + τ)."""
        return _step(self, state, update, lambda v, d2: self.beta2 * v + (1 - self.beta2) * d2)


@servers.register
@dataclass(frozen=True)
class Yogi(ServerOptimizer):
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
    citation = REDDI

    def __post_init__(self) -> None:
        _check(self.lr, self.tau, self.beta1, self.beta2)

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """m = 0, v = τ²."""
        return _start(theta, self.tau)

    def step(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The step η m/(√v + τ)."""
        return _step(self, state, update, lambda v, d2: v - (1 - self.beta2) * d2 * torch.sign(v - d2))


@servers.register
@dataclass(frozen=True)
class Adagrad(ServerOptimizer):
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
    citation = REDDI

    def __post_init__(self) -> None:
        _check(self.lr, self.tau, self.beta1)

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """m = 0, v = τ²."""
        return _start(theta, self.tau)

    def step(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The step η m/(√v + τ)."""
        return _step(self, state, update, lambda v, d2: v + d2)


def _check(lr: float, tau: float, *betas: float) -> None:
    for name, value in {"lr": lr, "tau": tau}.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"the server needs a positive, finite {name}, not {value:g}.")
    for number, value in enumerate(betas, start=1):
        if not 0 <= value < 1:
            raise ConfigError(f"the server's beta{number} is {value:g}, but it must lie in [0, 1).")


def _start(theta: Tensor, tau: float) -> Tree:
    return {"m": torch.zeros_like(theta), "v": torch.full_like(theta, tau**2)}


def _step(
    part: Adam | Yogi | Adagrad, state: Tree, update: Tensor, second: Callable[[Tensor, Tensor], Tensor]
) -> Halves:
    m = part.beta1 * state["m"] + (1 - part.beta1) * update
    v = second(state["v"], update.square())
    return {"m": m, "v": v}, part.lr * m / (v.sqrt() + part.tau)

"""The adaptive server optimisers of Reddi et al."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedloom.core.errors import ConfigError, nearest
from fedloom.core.parts import ServerOptimizer
from fedloom.core.slots import servers
from fedloom.core.tree import Tree

RULES = {
    "adam": lambda v, d2, beta2: beta2 * v + (1 - beta2) * d2,
    "yogi": lambda v, d2, beta2: v - (1 - beta2) * d2 * torch.sign(v - d2),
    "adagrad": lambda v, d2, beta2: v + d2,
}


@servers.register(name="adaptive")
@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """m ← β₁m + (1-β₁)Δ, v ← rule(v, Δ²), θ ← θ - η m/(√v + τ), all element by element, kept across rounds.

    The rules: ``adam`` v ← β₂v + (1-β₂)Δ²; ``yogi`` v ← v - (1-β₂)Δ² sign(v - Δ²); ``adagrad`` v ← v + Δ².
    No bias correction, and v starts at τ², as in the paper. Reddi et al., ICLR 2021, algorithm 2.

    Args:
        rule: adam, yogi or adagrad.
        lr: server learning rate η.
        beta1: decay β₁ of the first moment.
        beta2: decay β₂ of the second moment (adam, yogi).
        tau: adaptivity τ.
    """

    rule: str = "adam"
    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    citation = """@inproceedings{reddi2021adaptive, title={Adaptive Federated Optimization},
  author={Reddi, Sashank and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and Rush, Keith and
  Kone{\\v{c}}n{\\'y}, Jakub and Kumar, Sanjiv and McMahan, H. Brendan},
  booktitle={International Conference on Learning Representations}, year={2021}}"""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"unknown rule {self.rule!r} for the server; {nearest(self.rule, RULES)}")
        for name, value in {"lr": self.lr, "tau": self.tau}.items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"the server needs a positive, finite {name}, not {value:g}.")
        for name, value in {"beta1": self.beta1, "beta2": self.beta2}.items():
            if not 0 <= value < 1:
                raise ConfigError(f"the server's {name} is {value:g}, but it must lie in [0, 1).")

    def init_server(self, shared: Tree) -> Tree:
        """m = 0, v = τ²."""
        m = {f"m/{k}": torch.zeros_like(x) for k, x in shared.items()}
        return m | {f"v/{k}": torch.full_like(x, self.tau**2) for k, x in shared.items()}

    def server(self, state: Tree, update: Tree, reduced: Mapping[str, Tree]) -> tuple[Tree, Tree]:
        """The step η m/(√v + τ)."""
        new: Tree = {}
        step: Tree = {}
        for k, delta in update.items():
            m = self.beta1 * state[f"m/{k}"] + (1 - self.beta1) * delta
            v = RULES[self.rule](state[f"v/{k}"], delta.square(), self.beta2)
            step[k] = self.lr * m / (v.sqrt() + self.tau)
            new |= {f"m/{k}": m, f"v/{k}": v}
        return new, step

"""APPLE: a client's model combines all clients' models; the client trains its own one and the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative, Probability
from fedloom.base.tree import Tree
from fedloom.core.context import Context, Heard, Model
from fedloom.core.message import ClientEnd
from fedloom.core.parts import Needs, Personal

LEAST = 1e-3  # ε: the fraction of the pull that is left at the end of its exponential decay


@dataclass(frozen=True)
class Combined(Personal):
    """APPLE: local steps train the client's core model w_i and the weights p_i in x_i = Σ_j p_ij w_j.

    ::

        min over w_i, p_i of  F_i(x_i) + λ(t) (μ/2) ‖p_i - p⁰‖²                   x_i = Σ_j p_ij w_j,  p⁰_j = n_j / Σ n

        w_i ← w_i - η p_ii ∇F_i(x_i)          p_ij ← p_ij - η₂ (⟨∇F_i(x_i), w_j⟩ + λ(t) μ (p_ij - p⁰_j))

    Both steps are taken at the old x_i, and the others' w_j stay as they are. p_i may be any numbers; it is kept at the
    client, takes plain steps whatever the optimiser of w_i, and starts as p⁰ (with a mixing that is uniform, 1/K). λ(t)
    falls from 1 in the first L rounds, exponentially as ε^(t/L) with ε = 0.001 or as (1 + cos(πt/L))/2, and is 0 from
    round L on. The client uploads w_i, and keeps and deploys x_i; if it never participated, it deploys w_i = θ⁰. Batch
    statistics are those of its own passes.

    The topology says which w_j a client receives. Where it receives only some of them, it keeps copies of all
    [K, P], and uses the last one that it has received, at first θ⁰.

    Luo & Wu, IJCAI 2022, algorithm 1; η₂, μ and L/T are those of the authors' code, in which λ(t) μ has no factor 1/2,
    p_i moves with momentum, and with limited downloads all are sent once and then M others at random.

    Args:
        rate: η₂ ≥ 0 of the weights, the same in all rounds whatever ``local.schedule``; with 0 they stay p⁰.
        mu: μ ≥ 0.
        decay: of λ(t): ``exponential`` or ``cosine``.
        span: L/T, the part of all rounds in which p_i is drawn to p⁰.
    """

    rate: NonNegative = 0.001
    mu: NonNegative = 0.1
    decay: Literal["exponential", "cosine"] = "exponential"
    span: Probability = 0.1

    needs = Needs(heard=True, rounds="number")
    citation = "luo2022apple"

    def pull(self, t: int, rounds: int) -> float:
        """λ(t) μ in round t of ``rounds``.

        >>> part = Combined(mu=1.0, span=0.5, decay="cosine")
        >>> [round(part.pull(t, 8), 3) for t in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
        """
        last = int(self.span * rounds)
        if t >= last:
            return 0.0
        decay = LEAST ** (t / last) if self.decay == "exponential" else (1 + math.cos(math.pi * t / last)) / 2
        return self.mu * decay

    def begin(self, ctx: Context) -> Tree:
        """p_i, and the others' models by number."""
        heard, copies = _heard(ctx), ctx.state.get("models")
        models = {
            str(n): heard.models[n] if n in heard.models else ctx.received if copies is None else copies[n]
            for n in range(len(heard.shares))
            if n != heard.number
        }
        return {"weights": ctx.state.get("weights", heard.shares), **models}

    def point(self, w: Tensor, ctx: Context) -> Tensor:
        """x_i."""
        number, x = _heard(ctx).number, torch.zeros_like(w)
        for n, weight in enumerate(ctx.local["weights"].tolist()):
            x.add_(w if n == number else ctx.local[str(n)], alpha=weight)
        return x

    def chain(self, grad: Tensor, w: Tensor, ctx: Context) -> tuple[Tree, Tensor]:
        """The step of p_i, and p_ii ∇F_i."""
        heard, weights = _heard(ctx), ctx.local["weights"]
        models = (w if n == heard.number else ctx.local[str(n)] for n in range(len(weights)))
        slope = torch.stack([torch.dot(grad, model) for model in models])
        slope += self.pull(ctx.round, ctx.facts.rounds) * (weights - heard.shares)
        return {**ctx.local, "weights": weights - self.rate * slope}, grad.mul_(weights[heard.number])

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """p_i is kept, and the others' models if not all of them come in every round."""
        heard, state = _heard(ctx), {"weights": ctx.local["weights"]}
        if len(heard.models) < len(heard.shares) - 1:
            state["models"] = torch.stack([ctx.local.get(str(n), ctx.received) for n in range(len(heard.shares))])
        return ClientEnd(state, {}, update)


def _heard(ctx: Context) -> Heard:
    assert ctx.heard is not None
    return ctx.heard

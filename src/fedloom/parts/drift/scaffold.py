"""SCAFFOLD's control variates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.tree import Tree
from fedloom.core.context import Context, Facts, Model, RoundInfo
from fedloom.core.parts import ClientEnd, Drift, Halves, Needs, Reduce


@dataclass(frozen=True)
class Scaffold(Drift):
    """Local steps go along g - c_i + c, where c_i and c estimate the client's and the global gradient.

    After k local steps with learning rate η_t (option II of the paper)::

        c_i⁺ = c_i - c + (θ^t - θ_i) / (a η_t)           c ← c + (1/K) Σ_{i∈S} (c_i⁺ - c_i)

    a is k, as published, or with local momentum FedNova's ‖a‖₁ (``ctx.effective_steps``): a constant gradient then
    moves the model by a η_t times the gradient, so that c_i⁺ still equals it.

    c [P] is broadcast and c_i⁺ - c_i [P] uploaded, so a round costs twice FedAvg's communication. η_t is the decayed
    rate of the round. With zero control variates (the first round) it is FedAvg. Karimireddy et al., ICML 2020,
    algorithm 1.

    Where it stops, all Δ_i and c vanish, so that the objective is the paper's (1/K) Σ L_i, whatever the mixing.
    ``size_weighted=True`` minimises Σ (n_i/n̄) L_i: c is the mean of (n_i/n̄) c_i, and a client reads c·n̄/n_i in the
    place of c and uploads (n_i/n̄)(c_i⁺ - c_i). That is the rule above for L_i' = (n_i/n̄) L_i, divided by n_i/n̄, as
    FedDyn's authors run it.

    Args:
        size_weighted: weight clients by samples rather than equally.
    """

    size_weighted: bool = False

    needs = Needs(sgd=True)
    uploads = {"control": Reduce.SHARE}  # noqa: RUF012
    downloads = ("c",)
    boundable = ("control",)
    affine = True
    linear = True
    citation = "karimireddy2020scaffold"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """c = 0."""
        return {"c": torch.zeros_like(theta)}

    def init_client(self, theta: Tensor) -> Tree:
        """c_i = 0."""
        return {"c": torch.zeros_like(theta)}

    def begin(self, ctx: Context) -> Tree:
        """c/w_i - c_i, constant over the local steps; the weight w_i is 1, or n_i/n̄."""
        return {"correction": (ctx.down["c"] / self._weight(ctx)).sub_(ctx.state["c"])}

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        """g - c_i + c/w_i."""
        return grad.add_(ctx.local["correction"])

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """c_i⁺, and w_i (c_i⁺ - c_i) for the server."""
        change = (update / (ctx.effective_steps * ctx.lr)).mul_(self._weight(ctx)).sub_(ctx.down["c"])
        sent = {"control": change}
        return ClientEnd(self.after_send(ctx, {}, update, sent), sent, update)

    def after_send(self, ctx: Context, state: Tree, update: Tensor, uploads: Tree) -> Tree:
        """c_i⁺, by the difference that the server reads."""
        return {"c": (uploads["control"] / self._weight(ctx)).add_(ctx.state["c"])}

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """c ← c + (1/K) Σ w_i (c_i⁺ - c_i)."""
        return {"c": state["c"] + uploads["control"]}, update

    def _weight(self, ctx: Context) -> float:
        return ctx.relative_size if self.size_weighted else 1.0

"""The last update of every client stands in for those that are absent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.tree import Tree
from fedloom.core.context import Context, Facts, Model, RoundInfo
from fedloom.core.parts import ClientEnd, Drift, Halves, Reduce


@dataclass(frozen=True)
class CachedUpdates(Drift):
    """Every client counts with its last update: h_i ← Δ_i at the clients of a step, h = (1/K) Σ_i h_i at the server.

    The server steps along their mean over all K clients, as MIFA does (Gu et al., NeurIPS 2021, algorithm 1), or along
    h plus what the clients of the step have changed, which is unbiased over their draw and has less variance, as CA²FL
    does (Wang et al., ICLR 2024, algorithm 2)::

        MIFA     Δ = h⁺                                   h⁺ = h + (1/K) Σ_{i∈S} (Δ_i - h_i)
        CA²FL    Δ = h + (1/|S|) Σ_{i∈S} (Δ_i - h_i)

    A client that has never taken part counts with 0. Δ_i - h_i [P] is uploaded beside Δ_i, since mixing may not be
    uniform; a client whose uplinks change Δ_i keeps what the server reads.

    Args:
        mean: whether the server steps along the mean over all clients (MIFA), else CA²FL's estimate.
    """

    mean: bool = False

    uploads = {"change": Reduce.SHARE}  # noqa: RUF012
    boundable = ("change",)
    citation = "gu2021mifa, wang2024ca2fl"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """h = 0."""
        return {"h": torch.zeros_like(theta)}

    def init_client(self, theta: Tensor) -> Tree:
        """h_i = 0."""
        return {"h": torch.zeros_like(theta)}

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """Δ_i - h_i for the server, and h_i ← Δ_i."""
        sent = {"change": update - ctx.state["h"]}
        return ClientEnd(self.after_send(ctx, {}, update, sent), sent, update)

    def after_send(self, ctx: Context, state: Tree, update: Tensor, uploads: Tree) -> Tree:
        """h_i, by the difference that the server reads."""
        return {"h": ctx.state["h"] + uploads["change"]}

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """h⁺, or h + (K/|S|) (h⁺ - h)."""
        h = state["h"] + uploads["change"]
        if self.mean:
            return {"h": h}, h
        return {"h": h}, state["h"] + (info.facts.clients / len(info.cohort)) * uploads["change"]

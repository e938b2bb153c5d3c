"""FedDBE's mean regularisation: the mean feature of a client stays near a consensus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative, Probability
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Facts, Model, Output, RoundInfo
from fedloom.core.parts import ClientEnd, Halves, Needs, Reduce, Term


@dataclass(frozen=True)
class FeatureMean(Term):
    """(κ/d) ‖m_i - m̄‖²: keeps the mean m_i [d] of features r(x), as they are trained on, near a consensus m̄ [d].

    ::

        m_i ← (1 - μ) m_i + μ mean_b r(x_b)          in every local step, from 0 at the start of a round
        m̄ = Σ p_i mean_{x at i} r_i(x)               over the clients of the first round, after their local work

    The gradient is that of the mini-batch's mean; older parts of m_i are constant. In the first round there is no
    consensus and no term; afterwards m̄ stays what it is. With μ < 1 each local step takes a second pass over the body.

    Zhang, Hua, Cao, Wang, Song, Xue, Ma & Guan, NeurIPS 2023 (FedDBE), mean regularisation and algorithm 1. Deviations:
    there all clients train once before the first round, for m̄ alone and without a memory b_i; here the first round
    does it, its models are averaged like any others, and b_i (``bias_memory``) is trained from the start. m̄ is the
    mean over all samples, where the authors' code takes m_i after the last step; it also halves κ. The d numbers are
    sent in all rounds.

    Args:
        kappa: κ ≥ 0, weight of the term.
        mu: μ in [0, 1]; with 1 only the mini-batch counts.
    """

    kappa: NonNegative = 1.0
    mu: Probability = 1.0

    needs = Needs(features=True, model="evaluated")
    per_sample = False
    uploads = {"mean": Reduce.MIX}  # noqa: RUF012
    downloads = ("consensus",)
    citation = "zhang2023feddbe"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {}  # the number of features is known when the first means arrive

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        """m_i after the last step, and after this one, for the next."""
        if self.mu == 1 or "consensus" not in ctx.down:
            return ctx.local
        mean = _rows(model.features(batch.x)).mean(0)  # pyright: ignore
        older = ctx.local.get("newer", torch.zeros_like(mean))
        return {"older": older, "newer": torch.lerp(older, mean, self.mu)}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """A scalar for the mini-batch, []."""
        assert out.features is not None
        mean = _rows(out.features).mean(0)
        if "consensus" not in ctx.down:
            return 0 * mean.sum()
        if "older" in ctx.local:
            mean = torch.lerp(ctx.local["older"], mean, self.mu)
        return self.kappa * (mean - ctx.down["consensus"]).square().mean()

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """The mean feature of the trained model; the consensus itself, once there is one."""
        mean = ctx.down.get("consensus")
        if mean is None:
            mean = ctx.over_samples(model, lambda x: _rows(model.features(x))).mean(0)  # pyright: ignore
        return ClientEnd(ctx.state, {"mean": mean}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The first round's mean."""
        return state or {"consensus": uploads["mean"]}, update


def _rows(features: Tensor) -> Tensor:
    """Features [rows, d]; every position of a sample is a row.

    >>> _rows(torch.zeros(2, 3, 4)).shape
    torch.Size([6, 4])
    """
    return features.flatten(0, -2)

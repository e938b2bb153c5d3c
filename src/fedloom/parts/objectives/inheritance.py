"""FedPHP's transfer from a client's historical model to the one that it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import NonNegative, Positive
from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Needs, Term
from fedloom.parts.objectives import divergence


@dataclass(frozen=True)
class Inheritance(Term):
    """λ R(h_i, θ), which pulls the trained model's outputs or features towards those of the historical model h_i.

    ::

        outputs      R = τ² KL(softmax(z(h_i)/τ) ‖ softmax(z(θ)/τ)),  z the logits [B, C]
        features     R = MMD²(r(h_i), r(θ)) = mean k(a, a') + mean k(b, b') - 2 mean k(a, b)  of features [B, d]
                     with k(a, b) = Σ_{n=-2}^{2} exp(-‖a - b‖² / (2ⁿ s)), s the mean of ‖·‖² between two rows, constant

    h_i is what the personal part has put into ``ctx.own`` as ``history``, such as ``inherited``. The losses of the
    received model that fair mixing policies use are without the term. Li et al., ECML PKDD 2021 (FedPHP), who minimise
    (1 - λ) times the loss + λR: the same with λ/(1 - λ) and the learning rate (1 - λ)η. In the authors' code τ = 4
    divides the logits of h_i alone, and there is no factor τ². For a mini-batch of one sample s is that sample's own
    distance, so that slopes of ``features`` grow without bound as θ nears h_i; leave out the last, smaller batch.

    Args:
        lam: λ ≥ 0, weight of the term.
        by: what is compared, ``outputs`` or ``features``.
        tau: τ > 0, the temperature of outputs.
    """

    lam: NonNegative = 0.1
    by: Literal["outputs", "features"] = "outputs"
    tau: Positive = 4.0

    citation = "li2021fedphp"

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Features, where they are compared."""
        return Needs(received=True, features=self.by == "features")

    @property
    def per_sample(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether samples have losses of their own: distributions of features are those of a mini-batch."""
        return self.by == "outputs"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        if ctx.evaluates:
            return torch.zeros(())
        if "history" not in ctx.own:
            raise ConfigError(
                "objective 'inheritance' learns from a historical model of the client, but its personal part keeps "
                "none; set personal=inherited."
            )
        assert out.at is not None
        past = out.at(ctx.own["history"])
        if self.by == "outputs":
            return self.lam * divergence.kl(past.logits, out.logits, self.tau)
        weight = torch.ones(len(batch.x)) if batch.mask is None else batch.mask
        return self.lam * _discrepancy(past.vectors, out.vectors, weight.to(out.vectors))


def _discrepancy(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """MMD² of two sets of rows [B, d] with weights [B]."""
    rows, share = torch.cat([a, b]), weight / weight.sum().clamp(min=1)
    square = rows.square().sum(1)
    distances = square[:, None] + square - 2 * rows @ rows.T
    # by rounding, distances of equal rows may be negative; MAML needs their curvature
    distances = distances - distances.detach().clamp(max=0)
    signs, weights = torch.cat([share, -share]), torch.cat([weight, weight])
    pairs = weights.sum() ** 2 - weights.sum()
    scale = ((weights @ distances.detach() @ weights) / pairs.clamp(min=1)).clamp(min=1e-30)
    kernel = torch.stack([torch.exp(-distances / (scale * 2.0**n)) for n in range(-2, 3)]).sum(0)
    return signs @ kernel @ signs

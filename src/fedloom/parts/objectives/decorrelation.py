"""FedDecorr's penalty on correlated features."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.base.ranges import NonNegative, Positive
from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Needs, Term


@dataclass(frozen=True)
class Decorrelation(Term):
    """β (1/d²) ‖K‖_F², where K [d, d] is the correlation matrix of the d features over a mini-batch.

    The term keeps the spectrum of the features from collapsing under heterogeneous labels. K = (1/B) Σ_b z_b z_bᵀ with
    features z_b standardised over the batch, (h - mean)/√(var + eps): a feature that is constant on the batch has
    correlation 0, also with itself. Shi et al., ICLR 2023. The diagonal, 1 for all other features, only adds a
    constant. The published code instead averages the squared off-diagonal entries of B·K and divides by B, which is
    about B·d/(d-1) times this term for the same β.

    If samples have several positions (features [B, T, d]), every position is a row.

    >>> import torch
    >>> h = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])  # one feature is twice the other: K is all ones
    >>> round(float(Decorrelation(0.1).loss(Output(h, h), Batch(h, h), None)), 4)
    0.1

    Args:
        beta: β ≥ 0; 0 gives FedAvg.
        eps: eps > 0, added to variances.
    """

    beta: NonNegative = 0.1
    eps: Positive = 1e-8

    needs = Needs(features=True)
    per_sample = False
    citation = "shi2023feddecorr"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """A scalar for the batch, []."""
        assert out.features is not None
        h = out.features.flatten(0, -2)  # [rows, d]
        weights = h.new_ones(len(h), 1)
        if batch.mask is not None:
            weights = batch.mask.to(h.dtype).repeat_interleave(len(h) // len(batch.mask))[:, None]
        count = weights.sum().clamp(min=1)
        centred = (h - (weights * h).sum(0) / count) * weights
        z = centred / (centred.square().sum(0) / count + self.eps).sqrt()
        gram = z @ z.T if len(z) < z.shape[1] else z.T @ z  # zzᵀ and zᵀz have the same norm
        return self.beta * (gram / count).square().sum() / z.shape[1] ** 2

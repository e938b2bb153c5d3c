"""Proportional fairness as an objective: the logarithm of the distance to a baseline loss."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from torch import Tensor

from fedloom.base.ranges import Positive
from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Term
from fedloom.core.targets import CLASSES
from fedloom.parts.objectives.divergence import cross_entropy


@dataclass(frozen=True)
class PropFair(Term):
    """-log_ε(M - ℓ) of a batch's mean cross entropy ℓ, with log_ε(u) = log u for u ≥ ε and a straight line below.

    The gradient is that of ℓ divided by M - ℓ: clients with larger losses take larger steps. Where M - ℓ < ε it is that
    of ℓ divided by M, as in the authors' code, or by ε, the tangent, with which a model whose loss starts beyond M
    takes 1/ε times FedAvg's steps. The term replaces cross entropy. Zhang, Malekmohammadi, Chen & Yu, 2022.

    Args:
        M: M > 0, an upper bound of the losses.
        eps: ε > 0.
        beyond: the slope where M - ℓ < ε: ``published`` (1/M) or ``tangent`` (1/ε).
    """

    M: Positive = 2.0
    eps: Positive = 0.2
    beyond: Literal["published", "tangent"] = "published"

    targets, per_sample = CLASSES, False
    citation = "zhang2022propfair"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """A scalar for the batch, []."""
        return self._log_room(batch.mean(cross_entropy(out.logits, batch.y)))

    def test_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """-log_ε(M - ℓ) with the mean ℓ over all samples, []."""
        return self._log_room(cross_entropy(out, y).mean())

    def _log_room(self, mean: Tensor) -> Tensor:
        """-log_ε(M - ℓ) of a mean loss ℓ."""
        room = self.M - mean
        line = log(self.eps) + (room - self.eps) / (self.M if self.beyond == "published" else self.eps)
        return -torch.where(room >= self.eps, room.clamp(min=self.eps).log(), line)

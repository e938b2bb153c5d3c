"""Squared error, the objective's data term for regression."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Term
from fedloom.core.targets import NUMBERS


@dataclass(frozen=True)
class SquaredError(Term):
    """ℓ(θ; x, y) = ½‖f_θ(x) - y‖², outputs [B, d] (or [B]) against targets of the same shape."""

    targets = NUMBERS

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return self.test_loss(out.logits, batch.y)

    def test_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """½‖out - y‖² of each sample, [B]."""
        return 0.5 * (out.reshape(len(out), -1) - y.reshape(len(y), -1)).square().sum(1)

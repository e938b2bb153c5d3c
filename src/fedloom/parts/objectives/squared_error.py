"""Squared error, the objective's data term for regression."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Term
from fedloom.core.slots import objectives


@objectives.register(name="squared_error")
@dataclass(frozen=True)
class SquaredError(Term):
    """ℓ(θ; x, y) = ½‖f_θ(x) - y‖², outputs [B, d] (or [B]) against targets of the same shape."""

    targets = "numbers"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return 0.5 * (out.logits.flatten(1) - batch.y.reshape(len(batch.y), -1)).square().sum(1)

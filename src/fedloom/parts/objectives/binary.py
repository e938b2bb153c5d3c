"""Binary cross entropy, the data term of models with one logit per truth value."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedloom.base.ranges import Positive
from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Term
from fedloom.core.targets import TRUTHS, aligned, row_means


@dataclass(frozen=True)
class BinaryCrossEntropy(Term):
    """-(1/L) Σ_l [a y_l log ς(z_l) + (1 - y_l) log(1 - ς(z_l))] with logits z [B, L], truth values y [B, L] and ς(z) =
    1/(1 + e^{-z}).

    For two classes with one logit (L = 1, labels [B]), and for several labels that may hold at once.

    Args:
        positive_weight: a > 0, the weight of positive targets.
    >>> import torch
    >>> BinaryCrossEntropy().loss(Output(torch.zeros(1, 1)), Batch(torch.zeros(1), torch.tensor([1])), None)
    tensor([0.6931])
    """

    positive_weight: Positive = 1.0

    targets = TRUTHS

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return self.test_loss(out.logits, batch.y)

    def test_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """The mean over a sample's truth values, [B]."""
        weight = None if self.positive_weight == 1 else out.new_tensor(self.positive_weight)
        losses = F.binary_cross_entropy_with_logits(*aligned(out, y, TRUTHS), pos_weight=weight, reduction="none")
        return row_means(losses)

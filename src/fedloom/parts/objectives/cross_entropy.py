"""Cross entropy, the objective's data term for classification."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Term
from fedloom.core.slots import objectives


@objectives.register(name="cross_entropy")
@dataclass(frozen=True)
class CrossEntropy(Term):
    """ℓ(θ; x, y) = -log softmax(f_θ(x))_y, the mean over positions for sequences.

    Logits are [B, C] with labels [B], or [B, T, C] with labels [B, T]. The identity of the objective slot.

    >>> import torch
    >>> CrossEntropy().loss(Output(torch.zeros(1, 4)), Batch(torch.zeros(1), torch.tensor([2])), None)
    tensor([1.3863])
    """

    targets, is_cross_entropy = "classes", True

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        if out.logits.ndim == 2:
            return F.cross_entropy(out.logits, batch.y, reduction="none")
        return F.cross_entropy(out.logits.movedim(-1, 1), batch.y, reduction="none").flatten(1).mean(1)

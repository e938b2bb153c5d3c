"""Robustness: consistent predictions for two augmentations of a sample."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.base.ranges import Positive, Probability
from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Needs, Term
from fedloom.core.targets import CLASSES
from fedloom.parts.objectives import divergence


@dataclass(frozen=True)
class Robustness(Term):
    """α·ℓ(θ; ẋ, y) + (1 - α)·E τ² KL(w^τ(ẋ)‖w^τ(x̂)) over augmentations ẋ, x̂ of x, with w^τ = softmax(logits/τ).

    Acar, thesis 2023, §7.2.1, eq. (7.2). The term includes cross entropy ℓ, on the view ẋ that any method would train
    on, and therefore replaces it; α = 1 is cross entropy alone.

    Neither view is a fixed target: the equation is differentiated through both predictions (no stop-gradient). As ẋ and
    x̂ have the same distribution, both directions of the divergence have the same expectation; their mean is used,
    which is the same objective with less variance at no cost.

    Args:
        alpha: α in [0, 1], weight of the labels relative to consistency.
        tau: τ > 0, temperature of both.
        labels: whether α·ℓ is part of the term; False beside a term that includes it, as in the sum of eq. (7.4).
    >>> import torch
    >>> out = Output(torch.zeros(1, 2), twin=torch.zeros(1, 2))
    >>> Robustness(alpha=0.5).loss(out, Batch(torch.zeros(1), torch.tensor([1])), None)
    tensor([0.3466])
    """

    alpha: Probability = 0.5
    tau: Positive = 3.5
    labels: bool = True

    needs = Needs(twin=True)
    targets = CLASSES

    @property
    def learns(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the term includes the loss on the labels."""
        return self.labels

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        assert out.twin is not None
        consistency = (1 - self.alpha) * divergence.symmetric_kl(out.logits, out.twin, self.tau)
        return self.alpha * divergence.cross_entropy(out.logits, batch.y) + consistency if self.labels else consistency

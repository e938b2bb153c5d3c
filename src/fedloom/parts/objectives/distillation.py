"""Distillation from a fixed teacher."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.base.ranges import Positive, Probability
from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Needs, Term
from fedloom.core.targets import CLASSES
from fedloom.parts.objectives import divergence


@dataclass(frozen=True)
class Distillation(Term):
    """α·ℓ(θ; x, y) + (1 - α)·τ² KL(w̄^τ(x)‖w^τ(x)), w^τ = softmax(logits/τ) of the model and w̄^τ of the teacher.

    The term includes cross entropy ℓ and therefore replaces it; α = 1 is cross entropy alone. Teacher and student see
    the same (augmented) inputs. Acar, thesis 2023, §7.2.1, eq. (7.3), after Hinton et al., 2015.

    Args:
        alpha: α in [0, 1], weight of the labels relative to the teacher.
        tau: τ > 0, temperature of both.
    >>> import torch
    >>> out = Output(torch.zeros(1, 2), teacher=torch.zeros(1, 2))
    >>> Distillation(alpha=0.5).loss(out, Batch(torch.zeros(1), torch.tensor([1])), None)
    tensor([0.3466])
    """

    alpha: Probability = 0.1
    tau: Positive = 3.5

    needs = Needs(teacher=True, common_classes=True)
    targets, learns = CLASSES, True
    citation = "hinton2015distilling"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        assert out.teacher is not None
        labels = divergence.cross_entropy(out.logits, batch.y)
        return self.alpha * labels + (1 - self.alpha) * divergence.kl(out.teacher, out.logits, self.tau)

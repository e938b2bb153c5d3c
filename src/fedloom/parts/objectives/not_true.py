"""FedNTD: distillation from the received model over the classes other than the true one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.base.ranges import NonNegative, Positive
from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Needs, Term
from fedloom.core.targets import CLASSES
from fedloom.parts.objectives import divergence

EXCLUDED = -1e9  # logit of the true class


@dataclass(frozen=True)
class NotTrueDistillation(Term):
    """β τ² KL(q̃_glob‖q̃), where q̃_c = e^{z_c/τ} / Σ_{c'≠y} e^{z_c'/τ} leaves the true class y out.

    z are the logits [B, C] of the model being trained; q̃_glob is computed in the same way from the logits of the
    received model θ^t on the same mini-batch. The term is used beside cross entropy: that fits the true class, this
    preserves what the received model predicts for the other classes, of which the client may have no samples. Its
    gradient is zero in the first local step of a round, and with two classes. The factor τ² keeps the scale of
    gradients independent of τ; it is 1 at the default. Lee, Jeong, Shin, Bae & Yun, NeurIPS 2022.

    Args:
        beta: β ≥ 0, weight of the term; with 0 it is FedAvg.
        tau: τ > 0, temperature of both models.
    >>> import torch
    >>> z, received = torch.tensor([[9.0, 4.0, 0.0]]), torch.tensor([[-9.0, 0.0, 4.0]])
    >>> out = Output(z, at=lambda theta: Output(received))
    >>> ctx = Context(torch.zeros(1), {}, {}, {}, 1.0, 1, 0.1, 0, None)
    >>> NotTrueDistillation().loss(out, Batch(z, torch.tensor([0])), ctx)  # the KL of (.018, .982) from (.982, .018)
    tensor([3.8561])
    """

    beta: NonNegative = 1.0
    tau: Positive = 1.0

    needs = Needs(received=True)
    targets = CLASSES
    citation = "lee2022fedntd"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        assert out.at is not None
        logits = out.at(ctx.received).logits, out.logits
        received, trained = (z.scatter(-1, batch.y[..., None], EXCLUDED) for z in logits)
        return self.beta * divergence.kl(received, trained, self.tau)

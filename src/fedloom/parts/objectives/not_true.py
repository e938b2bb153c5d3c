"""FedNTD's term: the received model is not forgotten on the classes that a sample does not have."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.core.context import Batch, Context, Output
from fedloom.core.errors import ConfigError
from fedloom.core.parts import Needs, Term
from fedloom.core.slots import objectives
from fedloom.parts.objectives import divergence

LEFT_OUT = -1e9  # the logit of the true class


@objectives.register(name="not_true")
@dataclass(frozen=True)
class NotTrueDistillation(Term):
    """β τ² KL(q̃_glob‖q̃), where q̃_c = e^{z_c/τ} / Σ_{c'≠y} e^{z_c'/τ} leaves the true class y out.

    z are the logits [B, C] of the model that is trained, and q̃_glob is made of those of the received model θ^t, on the
    same mini-batch. A term beside cross entropy: that learns the true class, this keeps what the received model says
    of the others, which a client may have no samples of. In a round's first step it has no gradient; with two classes
    it is zero. Lee, Jeong, Shin, Bae & Yun, NeurIPS 2022; the factor τ² is that of their code, whose τ is 1.

    Args:
        beta: β ≥ 0; with 0 it is FedAvg.
        tau: τ > 0, the temperature.

    >>> import torch
    >>> z, received = torch.tensor([[9.0, 4.0, 0.0]]), torch.tensor([[-9.0, 0.0, 4.0]])
    >>> out = Output(z, at=lambda theta: Output(received))
    >>> ctx = Context(torch.zeros(1), {}, {}, {}, 1.0, 1, 0.1, 0, None)
    >>> NotTrueDistillation().loss(out, Batch(z, torch.tensor([0])), ctx)  # the KL of (.018, .982) from (.982, .018)
    tensor([3.8561])
    """

    beta: float = 1.0
    tau: float = 1.0

    needs = Needs(received=True, shared=True)
    citation = """@inproceedings{lee2022fedntd,
  title={Preservation of the Global Knowledge by Not-True Distillation in Federated Learning},
  author={Lee, Gihun and Jeong, Minchan and Shin, Yongjin and Bae, Sangmin and Yun, Se-Young},
  booktitle={Advances in Neural Information Processing Systems}, year={2022}}"""

    def __post_init__(self) -> None:
        if not 0 <= self.beta < float("inf"):
            raise ConfigError(f"objective 'not_true' needs a finite beta of at least 0, not {self.beta:g}.")
        divergence.check("not_true", 0.0, self.tau)

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """Per-sample losses [B]."""
        assert out.at is not None
        there, here = (z.scatter(-1, batch.y[..., None], LEFT_OUT) for z in (out.at(ctx.received).logits, out.logits))
        return self.beta * divergence.kl(there, here, self.tau)

"""MOON's model-contrastive term."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.base.ranges import NonNegative, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Model, Output
from fedloom.core.parts import ClientEnd, Needs, Term


@dataclass(frozen=True)
class Contrastive(Term):
    """-μ log[e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ})] on features z of the trained model.

    z_glob are the features of the sample in the received model θ^t, and z_prev in the model θ_i at the end of the
    client's previous local work; all are [B, d]. The term equals μ·softplus((cos(z, z_prev) - cos(z, z_glob))/τ) and is
    added to cross entropy. Li, He & Song, CVPR 2021, eq. (3).

    A client that has not participated yet has θ_i = θ^t: then z_prev = z_glob, and the term is the constant μ log 2,
    without gradient. The same holds in the losses of the received model that fair mixing policies use, which are
    computed as for a client that has not participated. For θ_i only shared parameters are kept (one model per client);
    private ones are the current ones.

    Args:
        mu: μ ≥ 0; the authors use 1 to 10; 0 gives FedAvg.
        tau: τ > 0, the temperature.
    """

    mu: NonNegative = 0.1
    tau: Positive = 0.5

    needs = Needs(features=True, received=True)
    citation = "li2021moon"

    def init_client(self, theta: Tensor) -> Tree:
        """θ_i = θ^t."""
        return {"previous": theta.clone()}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        assert out.at is not None
        models = out, out.at(ctx.received), out.at(ctx.state.get("previous", ctx.received))
        z, z_glob, z_prev = (_unit(model.features) for model in models)
        return self.mu * F.softplus(((z * z_prev).sum(1) - (z * z_glob).sum(1)) / self.tau)

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """θ_i ← θ^t - Δ_i."""
        return ClientEnd({"previous": ctx.received - update}, {}, update)


def _unit(z: Tensor | None) -> Tensor:
    """z/‖z‖ per row, features flattened; zero stays zero, with a bounded gradient."""
    assert z is not None
    z = z.flatten(1)
    square = z.square().sum(1, keepdim=True)
    return z * torch.where(square > 0, square, 1).rsqrt()

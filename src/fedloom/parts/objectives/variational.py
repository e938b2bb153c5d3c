"""The negative evidence lower bound of a conditional variational autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import Count, NonNegative, Positive
from fedloom.base.tree import Float, Tree
from fedloom.core.context import Batch, Context, Model, Output
from fedloom.core.parts import Needs, Term


@dataclass(frozen=True)
class Variational(Term):
    """-log p(x | z, y) + β KL(q(z | x, y)‖N(0, I)) with z = μ + exp(v/2) ε, ε ~ N(0, I), one ε per sample.

    The model must support ``model(x, y, part="encode")``, which returns μ and v [B, latent], q's mean and log-variance,
    and ``model(z, y, part="decode")``, which returns images x̂ [B, ...] in the data's range. With x and x̂ rescaled
    from that range to [0, 1],

        bernoulli:  -log p = -Σ_d [x_d log x̂_d + (1 - x_d) log(1 - x̂_d)]
        gaussian:   -log p = ‖x - x̂‖² / 2s² + (D/2) log(2πs²)
        KL = ½ Σ_k (μ_k² + exp(v_k) - v_k - 1)

    Kingma and Welling, ICLR 2014; conditional on labels, Sohn et al., NeurIPS 2015; β after Higgins et al., ICLR 2017.
    Data other than images have no range and are not rescaled; for them only ``gaussian`` is a likelihood.

    Args:
        latent: length of z; must equal the model's.
        beta: β ≥ 0, weight of the divergence.
        likelihood: ``bernoulli`` or ``gaussian``.
        variance: s² > 0, variance per pixel of the Gaussian.

    Raises:
        ConfigError: if a setting is out of range, or (before a run) the model has another ``latent``.

    >>> parts = {"encode": (torch.tensor([[2.0]]), torch.tensor([[0.0]])), "decode": torch.tensor([[0.5, 0.5]])}
    >>> out = Output(torch.zeros(0), model=lambda x, y, part: parts[part])
    >>> from fedloom.core.context import Facts
    >>> facts = Facts((2,), 2, torch.zeros(()), torch.ones(()), clients=1, rounds=1, seed=0)
    >>> ctx = Context(torch.zeros(1), {}, {}, {"eps": torch.zeros(1, 1)}, 1.0, 1, 0.1, 0, facts)
    >>> batch = Batch(torch.tensor([[1.0, 0.0]]), torch.zeros(1))
    >>> Variational(latent=1).loss(out, batch, ctx)  # 2 log 2 + 2²/2
    tensor([3.3863])
    """

    latent: Count = 64
    beta: NonNegative = 1.0
    likelihood: Literal["bernoulli", "gaussian"] = "bernoulli"
    variance: Positive = 0.1

    needs = Needs(model="generator")
    citation = "sohn2015cvae"

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        """ε [B, latent]."""
        return {"eps": batch.x.new_tensor(draws.normal(size=(len(batch.x), self.latent)))}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        assert out.model is not None
        mean, logvar = out.model(batch.x, batch.y, part="encode")
        z = mean + (0.5 * logvar).exp() * ctx.local["eps"].reshape(mean.shape)
        low, high = ctx.facts.low, ctx.facts.high
        real, decoded = ((x - low) / (high - low) for x in (batch.x, out.model(z, batch.y, part="decode")))
        if self.likelihood == "bernoulli":
            least = torch.finfo(decoded.dtype).eps
            decoded = decoded.clamp(least, 1 - least)
            errors = -(real * decoded.log() + (1 - real) * (1 - decoded).log())
        else:
            errors = (real - decoded).square() / (2 * self.variance) + 0.5 * log(2 * pi * self.variance)
        return errors.flatten(1).sum(1) + self.beta * divergence(mean, logvar)


def divergence(mean: Float[Tensor, "B latent"], logvar: Float[Tensor, "B latent"]) -> Float[Tensor, "B"]:
    """KL(N(μ, diag exp v)‖N(0, I)) per row of μ and v.

    >>> import torch
    >>> divergence(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2))
    tensor([0.5000])
    """
    return 0.5 * (mean.square() + logvar.exp() - logvar - 1).sum(1)

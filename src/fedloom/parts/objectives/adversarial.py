"""The game between a conditional generator and its discriminator, as a single loss with one gradient for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.base.ranges import Count, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Model, Output
from fedloom.core.parts import Needs, Term


@dataclass(frozen=True)
class Adversarial(Term):
    """Simultaneous gradient steps: of D along ∇ℓ_D and of G along κ∇ℓ_G, both at the current networks.

    For a real sample (x, y) and a generated one, x̂ = G(z, y') with z ~ N(0, I), with D(x, y) the logit that x is real
    and ς(a) = log(1 + e^a), the losses are those of Goodfellow et al. (2014), with the non-saturating generator loss,
    conditioned on labels as by Mirza and Osindero (2014):

        ℓ_D = ς(-D(x, y)) + ς(D(x̂, y')),    ℓ_G = ς(-D(x̂, y'))

    A client descends a single loss, but here each network has its own. Let [·] be the stop-gradient. ς(-D(x̂)) has the
    gradient of ℓ_G in G, and an unwanted one in D; the latter is also that of ς(-D([x̂])), which has none in G. So the
    gradient of

        ς(-D(x)) + ς(D([x̂])) + κ (ς(-D(x̂)) - ς(-D([x̂])) + [ς(-D(x̂))])

    is ∇ℓ_D for D and κ∇ℓ_G for G, and its value, which is reported, is ℓ_D + κℓ_G: 3 log 2 for κ = 1 and an
    uninformative D. The model must support ``model(z, y, part="generate")``, samples x̂ [B, ...] in the data's range,
    and ``model(x, y, part="discriminate")``, logits [B]; it must not use batch statistics.

    If that returns [B, 1 + C], the last C logits are those of an *auxiliary classifier* c (``model=acgan``; Odena, Olah
    and Shlens, ICML 2017), and both losses get cross entropies (CE): ℓ_D those of c(x) and y and of c(x̂) and ỹ, ℓ_G
    that of c(x̂) and y'.

    All clients train both networks and the server averages both: the simultaneous local updates of Rasouli et al.
    (FedGAN, 2020), with labels. There κ is the ratio of two time scales. Adam is invariant to the scale of gradients,
    so κ only matters for ``sgd``.

    Args:
        latent: length of z; must equal the model's.
        labels: ``own``: y' are the labels of the mini-batch, so that D compares samples of the same class; ``uniform``:
            y' are drawn from all classes, and a client without real samples of a class teaches D that it is always
            generated.
        auxiliary: ỹ, the classes that an auxiliary classifier learns for generated samples: their ``own`` y', as
            published for AC-GAN, or ``random`` ones, as in the code of FedEvg's author, whose FedCGAN this then is.
        speed: κ > 0, the generator's learning rate relative to the discriminator's.

    >>> out = Output(torch.zeros(0), model=lambda x, y, part: 0 * x[:, 0] if part == "discriminate" else x)
    >>> nothing = torch.zeros(1)
    >>> from fedloom.core.context import Facts
    >>> facts = Facts((1,), 2, nothing, nothing, clients=1, rounds=1, seed=0)
    >>> ctx = Context(nothing, {}, {}, {"z": torch.ones(1, 1)}, 1.0, 1, 0.1, 0, facts)
    >>> Adversarial(latent=1).loss(out, Batch(torch.ones(1, 1), nothing), ctx)  # an uninformative discriminator
    tensor([2.0794])
    """

    latent: Count = 100
    labels: Literal["own", "uniform"] = "own"
    speed: Positive = 1.0
    auxiliary: Literal["own", "random"] = "own"

    needs = Needs(model="generator")
    citation = "rasouli2020fedgan"

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        """z [B, latent], with ``uniform`` labels y' [B], and with ``random`` auxiliary ones ỹ [B]."""

        def random_labels() -> Tensor:
            return torch.as_tensor(draws.integers(ctx.facts.classes, size=len(batch.x))).to(batch.y)

        random_inputs = {"z": batch.x.new_tensor(draws.normal(size=(len(batch.x), self.latent)))}
        if self.labels == "uniform":
            random_inputs["y"] = random_labels()
        if self.auxiliary == "random":
            random_inputs["auxiliary"] = random_labels()
        return random_inputs

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """Per-sample losses [B], with one generated sample per real one."""
        assert out.model is not None
        model, y = out.model, ctx.local.get("y", batch.y)
        generated = model(ctx.local["z"], y, part="generate")
        rows = torch.cat([batch.x, generated.detach(), generated]), torch.cat([batch.y, y, y])
        real, detached, differentiable = model(*rows, part="discriminate").chunk(3)
        constant = game(detached, 1.0, y)
        generator_loss = game(differentiable, 1.0, y) - constant + constant.detach()
        discriminator_loss = game(real, 1.0, batch.y) + game(detached, -1.0, ctx.local.get("auxiliary", y))
        return discriminator_loss + self.speed * generator_loss


def game(logits: Tensor, sign: float, y: Tensor) -> Tensor:
    """ς(∓D) [B] of logits D [B], plus CE(c, y) if a classifier's logits c follow them, [B, 1 + C].

    >>> game(torch.zeros(1), 1.0, torch.tensor([0])), game(torch.zeros(1, 3), 1.0, torch.tensor([0]))
    (tensor([0.6931]), tensor([1.3863]))
    """
    if logits.ndim == 1:
        return F.softplus(-sign * logits)
    return F.softplus(-sign * logits[:, 0]) + F.cross_entropy(logits[:, 1:], y, reduction="none")

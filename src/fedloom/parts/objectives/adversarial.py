"""The game between a conditional generator and its discriminator, as one gradient for both."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.context import Batch, Context, Model, Output
from fedloom.core.errors import ConfigError, nearest
from fedloom.core.parts import Needs, Term
from fedloom.core.slots import objectives
from fedloom.core.tree import Tree

LABELS = ("own", "uniform")


@objectives.register(name="adversarial")
@dataclass(frozen=True)
class Adversarial(Term):
    """Simultaneous steps: of D along ∇ℓ_D, of G along κ∇ℓ_G, both at the two networks as they stand.

    For a real sample (x, y) and a made one, x̂ = G(z, y') with z ~ N(0, I), with logits D(x, y) that x is real and
    ς(a) = log(1 + e^a), the losses are those of Goodfellow et al. (2014), the generator's being the one that does not
    saturate, given labels as by Mirza and Osindero (2014):

        ℓ_D = ς(-D(x, y)) + ς(D(x̂, y')),    ℓ_G = ς(-D(x̂, y'))

    A client descends one number, whereas here each network has a loss of its own. Let [·] be held fixed. ς(-D(x̂)) has
    the gradient of ℓ_G in G, and one in D that must not be followed; but the latter is also that of ς(-D([x̂])), which
    has none in G. So the gradient of

        ς(-D(x)) + ς(D([x̂])) + κ (ς(-D(x̂)) - ς(-D([x̂])) + [ς(-D(x̂))])

    is ∇ℓ_D for D and κ∇ℓ_G for G, and its value, which is reported, is ℓ_D + κℓ_G: 3 log 2 for κ = 1 where D can tell
    nothing. The model is one that makes and judges: ``model(z, y, part="generate")`` are samples x̂ [B, ...] in the
    data's range, and ``model(x, y, part="judge")`` logits [B]; it must not take statistics over a batch.

    All clients train both networks and the server averages both: the simultaneous local updates of Rasouli et al.
    (FedGAN, 2020), with labels. There κ is the ratio of two time scales. Adam does not see the scale of a gradient, so
    that κ counts with ``sgd`` only.

    Args:
        latent: length of z, which is the model's.
        labels: y' is ``own``, the labels of the mini-batch, so that D compares like with like; or ``uniform``, any of
            the classes, where a client without real samples of one teaches D that this class is always made up.
        speed: κ > 0, how fast the generator learns relative to the discriminator.

    Raises:
        ConfigError: if a setting is out of its range.

    >>> out = Output(torch.zeros(0), model=lambda x, y, part: 0 * x[:, 0] if part == "judge" else x)
    >>> nothing = torch.zeros(1)
    >>> from fedloom.core.context import Facts
    >>> facts = Facts((1,), 2, nothing, nothing, clients=1, rounds=1, seed=0)
    >>> ctx = Context(nothing, {}, {}, {"z": torch.ones(1, 1)}, 1.0, 1, 0.1, 0, facts)
    >>> Adversarial(latent=1).loss(out, Batch(torch.ones(1, 1), nothing), ctx)  # a judge that cannot tell
    tensor([2.0794])
    """

    latent: int = 100
    labels: str = "own"
    speed: float = 1.0

    needs = Needs(output=False, model=True)
    citation = """@article{rasouli2020fedgan,
  title={FedGAN: Federated Generative Adversarial Networks for Distributed Data},
  author={Rasouli, Mohammad and Sun, Tao and Rajagopal, Ram}, journal={arXiv:2006.07228}, year={2020}}"""

    def __post_init__(self) -> None:
        if self.labels not in LABELS:
            raise ConfigError(f"objective 'adversarial' has no labels {self.labels!r}; {nearest(self.labels, LABELS)}")
        if self.latent < 1 or not 0 < self.speed < inf:
            raise ConfigError(
                "objective 'adversarial' needs a latent of at least 1 and a positive, finite speed, "
                f"not {self.latent} and {self.speed:g}."
            )

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        """z [B, latent] and, where they are not the mini-batch's, labels y' [B]."""
        z = batch.x.new_tensor(draws.normal(size=(len(batch.x), self.latent)))
        if self.labels == "own":
            return {"z": z}
        return {"z": z, "y": torch.as_tensor(draws.integers(ctx.facts.classes, size=len(batch.x))).to(batch.y)}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """Per-sample losses [B]; a made sample belongs to each real one."""
        assert out.model is not None
        model, y = out.model, batch.y if self.labels == "own" else ctx.local["y"]
        made = model(ctx.local["z"], y, part="generate")
        rows = torch.cat([batch.x, made.detach(), made]), torch.cat([batch.y, y, y])
        real, still, moving = model(*rows, part="judge").chunk(3)
        of_maker = F.softplus(-still)
        followed = F.softplus(-moving) - of_maker + of_maker.detach()
        return F.softplus(-real) + F.softplus(still) + self.speed * followed

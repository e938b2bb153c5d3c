"""FedEvg's term: clients learn energies, and labelled synthetic samples at the server descend their mixture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.context import Batch, Context, Facts, Model, Output, RoundInfo
from fedloom.core.errors import ConfigError, nearest
from fedloom.core.parts import ClientEnd, Halves, Needs, Reduce, Term
from fedloom.core.slots import objectives
from fedloom.core.tree import Tree
from fedloom.parts.objectives import divergence, langevin

WEIGHTS = ("signed", "raw")
LARGEST = 60.0  # of |E| in raw weights: e^60 times a gradient still fits into 32 bits
AT_ONCE = 500  # synthetic samples whose slopes are taken together


@objectives.register(name="energy")
@dataclass(frozen=True)
class Energy(Term):
    """mean E(x, y) - mean E(x̆, y̆) + λ CE(f(x̃), y̆) with E(x, y) = -f(x)[y]; the server's samples follow Σ p_i exp(-E_i).

    The server holds M = per_class · classes labelled samples x̃, standard normal at first, which every client receives.
    At the client they begin a chain of their own. Each local step takes as many of them as its mini-batch has rows (all
    M if those are fewer), without replacement, and moves them by R steps of Langevin's dynamics, x̆ ← x̆ + γ ∇f(x̆)[y̆] +
    σε, from where the client's last step left them (eq. (4.9), persistent contrastive divergence). Then the model
    lowers the energy of its real samples and raises that of x̆ (eq. (4.4)). At the end the client says, for the samples
    as it received them, e_i = exp(sign(-E_i)) and e_i ∇E_i, so that the server's sums are (eqs. (4.13), (4.14))

        x ← clip(x - β_t [Σ p_i e_i ∇E_i / Σ p_i e_i - ρ φ(x)] + δε),   β_t from β to ``beta_final`` along a cosine,

    with p_i = n_i/n under the default mixing. No parameter need cross: with ``reinitialised`` or ``local_only`` as
    personal part only the samples and their labels go down, and M numbers and M gradients up. The cross entropy of real
    samples is another term.

    Hahn 2024 (thesis), chapter IV. The first bracket of algorithm 4.2 as printed has the other sign and would raise the
    energy of real data; eq. (4.4) is right. φ is no part of the thesis, but costs no communication: the samples of a
    class would otherwise follow the same slope to the same picture; see ``fedloom.parts.objectives.langevin.apart``.
    Nor is the ``magnitude``, α(mean E(x, y)² + mean E(x̆, y̆)²): models that are kept from round to round need it, or
    else energies grow without bound (Du and Mordatch, 2019). Steps are in the units of the inputs, and published ones
    are for pixels from 0 to 1; as functions of inputs (pixel - mean)/std, the same energies take γ and β that are
    1/std² as large, σ and δ that are 1/std.

    The model must not take statistics over a batch. A client whose energies are not finite has failed.

    Args:
        per_class: samples of each class.
        lam: λ ≥ 0, the weight of the samples' cross entropy.
        gamma: γ > 0, Langevin step size at clients.
        sigma: σ ≥ 0, noise at clients.
        steps: R ≥ 1, Langevin steps at clients before each local step.
        beta: β > 0, first step size of the server.
        beta_final: its last one, reached along a cosine.
        delta: δ ≥ 0, noise at the server.
        weights: ``signed``, or ``raw``, e_i = exp(-E_i), which is eq. (4.13) itself; |E_i| counts up to 60. Signed ones
            differ by a factor e² at most: where one client alone has a class, the others together outweigh it.
        repulsion: ρ ≥ 0, how strongly samples of a class push each other apart; 0 in the thesis.
        blur: how far images are blurred, in pixels, before they are told apart.
        magnitude: α ≥ 0, the weight of squared energies in the clients' loss; 0 in the thesis.
        clip: whether samples are kept in the range of images, 0 to 1 or what became of it when they were normalised;
            other inputs may lie outside.

    Raises:
        ConfigError: if a setting is out of its range.
    """

    per_class: int = 10
    lam: float = 0.1
    gamma: float = 1.0
    sigma: float = 0.01
    steps: int = 1
    beta: float = 10.0
    beta_final: float = 0.01
    delta: float = 0.01
    weights: str = "signed"
    repulsion: float = 0.0
    blur: float = 1.0
    magnitude: float = 0.0
    clip: bool = True

    needs = Needs(model=True)
    uploads = {"pull": Reduce.MIX, "weight": Reduce.MIX}  # noqa: RUF012
    downloads = ("x", "y")
    citation = """@phdthesis{hahn2024thesis,
  title={Algorithms for Collaborative Machine Learning under Statistical Heterogeneity},
  author={Hahn, Seok-Ju}, school={Ulsan National Institute of Science and Technology}, year={2024}}"""

    def __post_init__(self) -> None:
        for name in ("per_class", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"objective 'energy' needs {name} of at least 1, not {getattr(self, name)}.")
        for name in ("gamma", "beta", "beta_final"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"objective 'energy' needs a finite {name} > 0, not {getattr(self, name):g}.")
        for name in ("lam", "sigma", "delta", "repulsion", "blur", "magnitude"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"objective 'energy' needs a finite {name} >= 0, not {getattr(self, name):g}.")
        if self.weights not in WEIGHTS:
            raise ConfigError(f"objective 'energy' has no weights {self.weights!r}; {nearest(self.weights, WEIGHTS)}")

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """The samples x [M, ...] and y [M] in order of class."""
        count = facts.classes * self.per_class
        x = rng.stream(facts.seed, "synthetic").normal(size=(count, *facts.inputs))
        y = torch.arange(facts.classes, device=theta.device).repeat_interleave(self.per_class)
        return {"x": facts.low.new_tensor(x), "y": y}

    def samples(self, state: Tree) -> tuple[Tensor, Tensor]:
        """The synthetic samples x [M, ...] and their labels y [M]."""
        return state["x"], state["y"]

    def begin(self, ctx: Context) -> Tree:
        """The client's own chain."""
        return {"chain": ctx.down["x"].clone()}

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        """The chain after R steps, and the samples of this local step before and after them, [min(B, M), ...]."""
        if "chain" not in ctx.local:  # the loss of a received model
            return ctx.local
        rows, chain = len(batch.x), ctx.local["chain"]
        at = torch.as_tensor(draws.permutation(len(chain))[:rows], device=chain.device)
        noise = chain.new_tensor(draws.normal(size=(rows, self.steps, *chain.shape[1:])))[: len(at)]
        y, before = ctx.down["y"][at], chain[at]
        after = before
        for r in range(self.steps):
            after = langevin.step(after, langevin.slope(model, after, y)[0], self.gamma, self.sigma * noise[:, r])
        return {"chain": chain.index_add(0, at, after - before), "before": before, "after": after, "y": y}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """One number []; 0 where no chain has been begun, as for the loss of a received model."""
        if "after" not in ctx.local:
            return out.logits.new_zeros(())
        assert out.model is not None
        before, after, y = (ctx.local[name] for name in ("before", "after", "y"))
        then, now = out.model(torch.cat([before, after])).chunk(2)
        real, made = langevin.energy(out.logits, batch.y), langevin.energy(now, y)
        value = batch.mean(real) - made.mean()
        if self.lam:
            value = value + self.lam * divergence.cross_entropy(then, y).mean()
        if self.magnitude:
            value = value + self.magnitude * (batch.mean(real.square()) + made.square().mean())
        return value

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """e [M] and e ∇E [M, ...] of the samples as they were received."""
        x, y = ctx.down["x"], ctx.down["y"]
        found = [langevin.slope(model, *part) for part in zip(x.split(AT_ONCE), y.split(AT_ONCE), strict=True)]
        pull, said = (torch.cat(parts) for parts in zip(*found, strict=True))
        weight = torch.exp((-said).sign() if self.weights == "signed" else (-said).clamp(-LARGEST, LARGEST))
        return ClientEnd(ctx.state, {"pull": _each(weight, pull) * pull, "weight": weight}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """One step of all samples along the slope of the mixture's energy."""
        x, facts = state["x"], info.facts
        pull = uploads["pull"] / _each(uploads["weight"], uploads["pull"])
        if self.repulsion:
            away = langevin.apart(x.unflatten(0, (-1, self.per_class)), self.blur if x.ndim > 3 else 0.0)
            pull = pull - self.repulsion * away.flatten(0, 1)
        noise = x.new_tensor(rng.stream(facts.seed, "synthetic", info.t).normal(size=tuple(x.shape)))
        x = langevin.step(
            x, pull, langevin.cosine(self.beta, self.beta_final, info.t, facts.rounds), self.delta * noise
        )
        if self.clip:
            x = x.clamp(facts.low, facts.high)
        return {**state, "x": x}, update


def _each(numbers: Tensor, like: Tensor) -> Tensor:
    """One number a sample [M], to be multiplied with samples [M, ...]."""
    return numbers.view(-1, *(1,) * (like.ndim - 1))

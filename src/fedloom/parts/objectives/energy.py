"""FedEvg: clients learn energies, and labelled synthetic samples at the server follow their mixture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Bound, Count, NonNegative, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Facts, Model, Output, RoundInfo
from fedloom.core.local import Local
from fedloom.core.parts import ClientEnd, Halves, Needs, Reduce, Term
from fedloom.core.targets import CLASSES
from fedloom.parts.objectives import divergence, langevin

LARGEST = 60.0  # bound of |E| in raw weights: e^60 times a gradient still fits into float32
AT_ONCE = 500  # synthetic samples per gradient computation


@dataclass(frozen=True)
class Energy(Term):
    """E(x, y) - E(x̆, y̆) + λ CE(f(x̃), y̆), E(x, y) = -f(x)[y], batch means; the samples follow Σ p_i e^{-E_i}.

    The server holds M = per_class · classes labelled samples x̃ [M, ...], initially standard normal, which every client
    receives. At the client a chain starts from them. Each local step takes as many of them as its mini-batch has rows
    (all M if those are fewer), without replacement, and moves them by R Langevin steps, x̆ ← x̆ + γ ∇f(x̆)[y̆] + σε,
    from where the client's last step left them (eq. (4.9), persistent contrastive divergence), with ∇f clipped and x̆
    kept in the range of images. Then the model lowers the energy of its real samples and raises that of x̆ (eq. (4.4)).
    At the end the client uploads, for the samples as received, e_i = exp(sign(-E_i)) and e_i ∇E_i, so that the server's
    step is (eqs. (4.13), (4.14))

        x ← clip(x - β_t [Σ p_i e_i ∇E_i / Σ p_i e_i - ρ φ(x)] + δε),   β_t from β to ``beta_final``,

    with p_i = n_i/n under the default mixing. No model parameters need to be communicated: with ``reinitialised`` or
    ``local_only`` as the personal part, only the samples and labels go down, and M scalars and M gradients up. The
    cross entropy of real samples is a separate term.

    Hahn 2024 (thesis), chapter IV. The first bracket of algorithm 4.2 as printed has the opposite sign and would raise
    the energy of real data; eq. (4.4) is right. Two additions that the thesis does not have: φ, which costs no
    communication and keeps the samples of a class from collapsing to one image (see
    ``fedloom.parts.objectives.langevin.repulsion``), and ``magnitude``, α(mean E(x, y)² + mean E(x̆, y̆)²), without
    which the energies of models that persist between rounds grow without bound (Du and Mordatch, 2019). Step sizes are
    in units of the inputs, and the published ones are for pixels in [0, 1]; for inputs (pixel - mean)/std, the same
    dynamics need γ and β times 1/std², and σ and δ times 1/std.

    The model must not use batch statistics. A client whose energies are not finite fails.

    Args:
        per_class: synthetic samples per class.
        lam: λ ≥ 0, weight of the synthetic samples' cross entropy.
        gamma: γ > 0, Langevin step size at clients.
        sigma: σ ≥ 0, noise at clients.
        steps: R ≥ 1, Langevin steps at clients before each local step.
        beta: β > 0, initial step size at the server.
        beta_final: final step size at the server.
        schedule: of β_t: ``ddpm``, as in the author's code, which stays near β until the last rounds, or ``half``, half
            a period of a cosine. See ``fedloom.parts.objectives.langevin``.
        delta: δ ≥ 0, noise at the server.
        weights: ``signed``, as above, or ``raw``, e_i = exp(-E_i), which is eq. (4.13) itself, with |E_i| clipped at
            60. Signed weights differ by a factor of e² at most: if only one client has a class, the others together
            outweigh it.
        repulsion: ρ ≥ 0, strength of the repulsion between samples of a class; 0 in the thesis.
        blur: standard deviation of the blur under which images are compared for the repulsion, in pixels.
        magnitude: α ≥ 0, weight of squared energies in the clients' loss; 0 in the thesis.
        clip: keep samples in the range of images, [0, 1] before normalisation; use False for other inputs.
        clip_chain: keep the clients' chains in it as well, if ``clip``, as in the author's code.
        clip_gradient: largest absolute value of each component of ∇f in the clients' Langevin steps; None for none. The
            author's scripts have 3.
        labelled: the samples x̃ of the synthetic cross entropy: those of the ``chain`` before this step's moves, as in
            line 16 of algorithm 4.2; as ``received`` from the server; or after the moves, ``moved``, as in the author's
            code.
    """

    per_class: Count = 10
    lam: NonNegative = 0.1
    gamma: Positive = 1.0
    sigma: NonNegative = 0.01
    steps: Count = 1
    beta: Positive = 10.0
    beta_final: Positive = 0.01
    delta: NonNegative = 0.01
    weights: Literal["signed", "raw"] = "signed"
    repulsion: NonNegative = 0.0
    blur: NonNegative = 1.0
    magnitude: NonNegative = 0.0
    clip: bool = True
    schedule: langevin.Schedule = "ddpm"
    clip_chain: bool = True
    clip_gradient: Bound | None = 3.0
    labelled: Literal["chain", "received", "moved"] = "chain"

    needs = Needs(model="inputs", common_classes=True, rounds="number")
    targets = CLASSES
    uploads = {"pull": Reduce.MIX, "weight": Reduce.MIX}  # noqa: RUF012
    downloads = ("x", "y")
    citation = "hahn2024thesis"

    def check(self, local: Local, facts: Facts) -> None:
        """Raise ``ConfigError`` if there is no memory for the samples."""
        try:
            np.empty((facts.classes * self.per_class, *facts.inputs))
        except (MemoryError, ValueError) as error:  # ValueError: more than can be addressed
            raise ConfigError(
                f"objective 'energy' starts from per_class={self.per_class:,} samples of each of {facts.classes} "
                "classes, for which there is not enough memory; choose a smaller per_class."
            ) from error

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """The samples x [M, ...] and their labels y [M], sorted by class."""
        x = rng.stream(facts.seed, "synthetic").normal(size=(facts.classes * self.per_class, *facts.inputs))
        y = torch.arange(facts.classes, device=theta.device).repeat_interleave(self.per_class)
        return {"x": facts.low.new_tensor(x), "y": y}

    def begin(self, ctx: Context) -> Tree:
        """The client's chain, which starts at the received samples."""
        return {"chain": ctx.down["x"].clone()}

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        """The chain after R steps, the samples of this local step after them, and x̃, [min(B, M), ...]."""
        if ctx.evaluates:
            return ctx.local
        if not batch.x.is_floating_point():
            raise ConfigError(
                "objective 'energy' moves inputs along gradients, but these are tokens; give real numbers."
            )
        rows, chain = len(batch.x), ctx.local["chain"]
        positions = torch.as_tensor(draws.permutation(len(chain))[:rows], device=chain.device)
        noise = chain.new_tensor(draws.normal(size=(rows, self.steps, *chain.shape[1:])))[: len(positions)]
        y, before = ctx.down["y"][positions], chain[positions]
        after = before
        for r in range(self.steps):
            pull = langevin.slope(model, after, y)[0]
            if self.clip_gradient is not None:
                pull = pull.clamp(-self.clip_gradient, self.clip_gradient)
            after = langevin.step(after, pull, self.gamma, self.sigma * noise[:, r])
            if self.clip and self.clip_chain:
                after = after.clamp(ctx.facts.low, ctx.facts.high)
        labelled = {"chain": before, "received": ctx.down["x"][positions], "moved": after}[self.labelled]
        return {"chain": chain.index_copy(0, positions, after), "labelled": labelled, "after": after, "y": y}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """A scalar []; 0 if there is no chain, as in the loss of the received model."""
        if "after" not in ctx.local:
            return out.logits.new_zeros(())
        assert out.model is not None
        labelled, after, y = (ctx.local[name] for name in ("labelled", "after", "y"))
        labelled_logits, after_logits = out.model(torch.cat([labelled, after])).chunk(2)
        real, synthetic = langevin.energy(out.logits, batch.y), langevin.energy(after_logits, y)
        value = batch.mean(real) - synthetic.mean()
        if self.lam:
            value = value + self.lam * divergence.cross_entropy(labelled_logits, y).mean()
        if self.magnitude:
            value = value + self.magnitude * (batch.mean(real.square()) + synthetic.square().mean())
        return value

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """e [M] and e ∇E [M, ...] of the samples as received."""
        x, y = ctx.down["x"], ctx.down["y"]
        slopes = [langevin.slope(model, *chunk) for chunk in zip(x.split(AT_ONCE), y.split(AT_ONCE), strict=True)]
        pull, energies = (torch.cat(chunks) for chunks in zip(*slopes, strict=True))
        weight = torch.exp((-energies).sign() if self.weights == "signed" else (-energies).clamp(-LARGEST, LARGEST))
        return ClientEnd(ctx.state, {"pull": _per_sample(weight, pull) * pull, "weight": weight}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """One step of all samples along the gradient of the mixture's energy."""
        x, facts = state["x"], info.facts
        pull = uploads["pull"] / _per_sample(uploads["weight"], uploads["pull"])
        if self.repulsion:
            force = langevin.repulsion(x.unflatten(0, (-1, self.per_class)), self.blur if x.ndim > 3 else 0.0)
            pull = pull - self.repulsion * force.flatten(0, 1)
        noise = x.new_tensor(rng.stream(facts.seed, "synthetic", info.t).normal(size=tuple(x.shape)))
        size = langevin.SCHEDULES[self.schedule](self.beta, self.beta_final, info.t, facts.rounds)
        x = langevin.step(x, pull, size, self.delta * noise)
        if self.clip:
            x = x.clamp(facts.low, facts.high)
        return {**state, "x": x}, update


def _per_sample(numbers: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per sample [M] for broadcasting with samples [M, ...]."""
    return numbers.view(-1, *(1,) * (like.ndim - 1))

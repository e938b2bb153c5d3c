"""Interpolation of a shared and a private model, W = (1 - λ)w + λv: SuPerFed and APFL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.ranges import NonNegative, NonNegativeInt, Probability
from fedloom.base.tree import Tree
from fedloom.core.context import Context
from fedloom.core.parts import Paired, Use
from fedloom.core.views import Pair, RegGrad, StepInfo, View

GRID = tuple(round(0.1 * i, 1) for i in range(11))


@dataclass(frozen=True)
class Subspace(Paired):
    """SuPerFed: a mini-batch's loss at (1 - λ)w + λv with λ ~ U(0, 1) trains both end points at once.

    ::

        min over w, v of  E_λ F_i((1 - λ)w + λv) + (μ/2)‖w - θ^t‖² + ν cos²(w, v)

    λ is one number for the whole model (model mixing, -MM) or one per layer (layer mixing, -LM); a layer is a module
    with its weight and bias. The cosine is over all parameters as one vector [P]; its square has the gradient 2ν c
    (v/(‖w‖‖v‖) - c w/‖w‖²) in w, and likewise in v. Before round ``start_round`` λ is 0 and only w is trained, without
    the ν term. Each client's v starts from its own random initialisation, and only w is communicated. Hahn 2024,
    algorithms 2.3 and 2.4, eqs. (2.3)-(2.6); Hahn, Jeong & Lee, KDD 2022.

    A client with at least ``min_validation`` validation samples deploys the λ in {0, 0.1, ..., 1} that is best on them,
    others λ = 0.5, since a handful of samples cannot distinguish eleven values. A client whose v was never trained
    deploys w. Batch statistics are those of the passes at all λ together, and shared like w: the server's mean of them
    is deployed with every λ.

    Args:
        layers: use one λ per layer.
        mu: μ ≥ 0.
        nu: ν ≥ 0.
        start_round: L, the round from which v is trained; the paper uses about 0.4 of all rounds.
        min_validation: validation samples that a client needs to choose its λ.
    """

    layers: bool = False
    mu: NonNegative = 0.01
    nu: NonNegative = 1.0
    start_round: NonNegativeInt = 0
    min_validation: NonNegativeInt = 50

    citation = "hahn2022superfed"

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        """One view at a random interpolation; at w alone before round L."""
        if step.round < self.start_round:
            return (View(private=0.0),)
        return (View(list(step.draws) if self.layers else step.draws[0]),)

    def regulariser_grad(self, view: View, at: Pair, ctx: Context) -> RegGrad:
        """The gradients of both regularisers."""
        if not (self.nu and view.private):
            return RegGrad((self.mu, 0.0, -self.mu))
        ww, vv, wv = at.products()
        if not (ww and vv):  # the angle with a model of zeros, like a logistic regression's first: no pull
            return RegGrad((self.mu, 0.0, -self.mu))
        coupling = 2 * self.nu * wv / (ww * vv)  # 2νc / (‖w‖‖v‖)
        return RegGrad((self.mu - coupling * wv / ww, coupling, -self.mu), (-coupling * wv / vv, coupling, 0.0))

    def private_start(
        self, received: Tensor, initial: Tensor, private: Tensor | None, initialise: Callable[[], Tensor]
    ) -> Tensor:
        """At first another initialisation."""
        return initialise() if private is None else private

    def uses(self, client: int, load_state: Callable[[], Tree | None], samples: int) -> tuple[Use, ...]:
        """λ = 0, 0.1, ..., 1, with enough samples."""
        if load_state() is None:
            return (Use(lam=0.0),)
        grid = GRID if samples >= max(self.min_validation, 1) else (0.5,)
        return tuple(Use(lam=lam) for lam in grid)


@dataclass(frozen=True)
class APFL(Paired):
    """APFL: w takes a step at w, and v one at v̄ = αv + (1 - α)w, where only v moves.

    ::

        w ← w - η∇F_i(w)        v ← v - ηα∇F_i(v̄)        α ← α - η⟨∇F_i(v̄), v - w⟩        with v̄ = αv + (1 - α)w

    α is fixed, or learnt at each client by the third rule and clipped to [0, 1]; the authors update it once per round,
    here it is updated at every step. A client deploys v̄, or w if it never participated. With α = 0 this is FedAvg.
    The mean of two models has no batch statistics that follow from theirs, so those of the passes at v̄ are taken: the
    client keeps them beside v, and deploys v̄ with them, unless α = 0 and v̄ is the server's model.
    Both gradients are taken at the old w and v, unless w moves first. Deng, Kamani & Mahdavi 2020, algorithm 1.

    Args:
        alpha: α in [0, 1], or its initial value if learnt; 0 gives FedAvg.
        learn: learn α at each client.
        w_first: v's gradient is taken at the w that has just moved.
        initial: v starts as the run's first model θ⁰, also at clients that join later.
    """

    alpha: Probability = 0.25
    learn: bool = False
    w_first: bool = False
    initial: bool = False

    citation = "deng2020apfl"

    def private_start(
        self, received: Tensor, initial: Tensor, private: Tensor | None, initialise: Callable[[], Tensor]
    ) -> Tensor:
        """v, and α if it is learnt."""
        scalars = [self.alpha] if self.learn else []
        first = initial if self.initial else received
        return torch.cat([first, first.new_tensor(scalars)]) if private is None else private

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        """v at the interpolation, which leaves w where it is, and w at w; or the other way round."""
        w, v = View(private=0.0), View(float(extra[0]) if self.learn else self.alpha, shared=0.0)
        return (w, v) if self.w_first else (v, w)

    def regulariser_grad(self, view: View, at: Pair, ctx: Context) -> RegGrad:
        """The gradient of α."""
        return RegGrad(extra=at.slope()[None] if self.learn and view.private else None)

    def uses(self, client: int, load_state: Callable[[], Tree | None], samples: int) -> tuple[Use, ...]:
        """The fixed α, or the client's learnt one; w if it never participated."""
        if (state := load_state()) is None:
            return (Use(lam=0.0),)
        return (Use(lam=float(state["private"][-1]) if self.learn else self.alpha),)

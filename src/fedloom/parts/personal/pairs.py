"""A shared model and a private one kept close to it: Ditto and pFedMe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, NonNegative, Positive
from fedloom.core.context import Context, Facts
from fedloom.core.local import Local
from fedloom.core.parts import Paired
from fedloom.core.views import Pair, RegGrad, StepInfo, View


@dataclass(frozen=True)
class Ditto(Paired):
    """w is trained as in FedAvg; on the same mini-batches v minimises F_i(v) + (λ/2)‖v - θ^t‖².

    v [P] starts as the first model that the client received, or as θ⁰, and is deployed; a client that never
    participated deploys w. The client keeps the batch statistics of v's passes beside v, and deploys it with them: with
    λ = 0 it is local training. The trajectory of w is that of FedAvg, batch statistics included, bitwise with
    ``compute=live``, and up to rounding in batched passes, unless layers draw random numbers (dropout), since v's
    pass draws, too. Li et al., ICML 2021, algorithm 1.

    Args:
        lam: λ ≥ 0, weight of the proximal term.
        initial: v starts as the run's first model θ⁰, also at clients that join later.
    """

    lam: NonNegative = 0.1
    initial: bool = False

    citation = "li2021ditto"

    def private_start(
        self, received: Tensor, initial: Tensor, private: Tensor | None, initialise: Callable[[], Tensor]
    ) -> Tensor:
        """v."""
        return (initial if self.initial else received) if private is None else private

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        """First w at w, then v at v."""
        return View(private=0.0), View(1.0, shared=0.0)

    def regulariser_grad(self, view: View, at: Pair, ctx: Context) -> RegGrad:
        """λ(v - θ^t), added to the gradient of v."""
        return RegGrad(v=(self.lam, 0.0, -self.lam))


@dataclass(frozen=True)
class PFedMe(Paired):
    """pFedMe: v approximates argmin_v F_i(v) + (λ/2)‖v - w‖² by K steps on one mini-batch, then w ← w - ηλ(w - v).

    The second step is a gradient step on the Moreau envelope of F_i, whose gradient is λ(w - v̂). At the start of a
    round w and v are both θ^t [P], and within the round v continues from the previous mini-batch. Both loops are
    plain gradient descent, whatever the momentum or optimiser of local training. Clipping and weight decay act on the
    steps of v alone: ∇F_i(v) + λ(v - w) is clipped as a whole, and the decay is added to it. A client deploys v (w, if
    it never participated). All passes are at v: their batch statistics start as the received ones, are deployed
    with v, and are uploaded as those of w. The server's part of the method is θ ← (1 - β)θ + β·mean, which is server
    SGD with learning rate β. T. Dinh, Tran & Nguyen, NeurIPS 2020, algorithm 1.

    Args:
        lam: λ > 0; the published runs use 15.
        steps: K ≥ 1, inner steps per mini-batch.
        personal_lr: learning rate of v, which does not decay; below 2/λ. With λ = 15, the authors' .09 overshoots: the
            pull alone turns v - w into -.35 times itself.

    Raises:
        ConfigError: if a setting is out of range, or a loop cannot converge whatever F_i is: personal_lr·λ ≥ 2, ηλ ≥ 2.
    """

    lam: Positive = 15.0
    steps: Count = 5
    personal_lr: Positive = 0.03

    citation = "dinh2020pfedme"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rate("personal_lr", self.personal_lr)

    def check(self, local: Local, facts: Facts) -> None:
        """Raise ``ConfigError`` if ηλ ≥ 2."""
        self._check_rate("the local learning rate", local.lr)

    def private_start(
        self, received: Tensor, initial: Tensor, private: Tensor | None, initialise: Callable[[], Tensor]
    ) -> Tensor:
        """θ^t, in every round."""
        return received

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        """K steps of v at v, then one of w without data."""
        inner = View(1.0, shared=0.0, private=self.personal_lr / ctx.lr)
        return (*[inner] * self.steps, View(private=0.0, data=False))

    def regulariser_grad(self, view: View, at: Pair, ctx: Context) -> RegGrad:
        """λ(v - w) for v or λ(w - v) for w, whichever moves."""
        return RegGrad((self.lam, -self.lam, 0.0), (self.lam, -self.lam, 0.0))

    def _check_rate(self, name: str, rate: float) -> None:
        if rate * self.lam >= 2:
            raise ConfigError(
                f"personal 'pfedme': {name} is {rate:g}, but with lam {self.lam:g} steps of {2 / self.lam:.3g} or more "
                "diverge; lower one of them."
            )

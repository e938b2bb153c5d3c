"""Methods for a target by name: its class shares, another head, or a mixture of the clients' models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedloom.core.ranges import Count, NonNegativeInt, Positive
from fedloom.core.registry import Ranged, Registry
from fedloom.parts.mixing.ssa import SelfSupervised
from fedloom_apps.customise.calibration import CCVR
from fedloom_apps.customise.fit import TargetFit
from fedloom_apps.customise.model import ClassModels, TargetModel

SAERENS = "saerens2002adjusting"
ALEXANDARI = "alexandari2020"


class TargetMethod(Ranged, ABC):
    """Base class: makes a model from unlabelled inputs and the clients' statistics; a frozen dataclass of settings.

    Attributes:
        citation: BibTeX of the paper.
        makes_model: whether there is a model other than the server's.
    """

    citation: ClassVar[str] = f"{SAERENS}, {ALEXANDARI}"
    makes_model: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, known: ClassModels, x: Any) -> TargetModel:
        """The result for inputs x [N, ...], as ``DeployedModel.predict`` takes them."""


target_methods = Registry[TargetMethod | CCVR](
    "method for a target",
    shared={
        "resamples": "number of bootstrap samples of the inputs, for the intervals of the shares.",
        "seed": "seed of the bootstrap.",
    },
)
"""The methods that ``fedloom target method=…`` chooses from."""


@target_methods.register(name="target_head")
@dataclass(frozen=True)
class TargetHead(TargetMethod):
    """The server's features with the head w_c = W⁻¹(μ_c - μ̄)/T, b_c = log π_c + β_c - ½ (μ_c + μ̄)ᵀw_c.

    For ``fedloom target``. π are the target's class shares by EM, as in ``target_prior``; μ_c, W, T and β are those of
    a linear discriminant on sums that clients send, tempered and calibrated on their samples, and μ̄ is the mean of all
    samples. Heads of several targets differ in b alone.
    """

    resamples: NonNegativeInt = 200
    seed: int = 0

    def __call__(self, known: ClassModels, x: Any) -> TargetModel:
        return known.target_head(x, self.resamples, self.seed)


@target_methods.register(name="target_fit")
@dataclass(frozen=True)
class TargetMixture(TargetMethod):
    """Σ p_k θ_k of the clients' last models, p fitted through the merged network, for ``fedloom target``.

    The minimum over (a, τ, b) of the mean of CE(r(x), softmax(τ f(x; Σ p_k θ_k) + b)), p = softmax(a), with the
    probable classes r_c(x) ∝ π_c e^{l_c(x)} of each input and π as in ``target_prior``. The run must have kept its
    clients' last models (``evaluation.what=[global,average]``).

    Args:
        steps: steps of Adam, from p_k = n_k / Σ n, τ = 1 and b = 0.
        lr: learning rate of Adam.
        batch_size: inputs per step.
    """

    steps: NonNegativeInt = TargetFit.steps
    lr: Positive = TargetFit.lr
    batch_size: Count = TargetFit.batch_size
    resamples: NonNegativeInt = 200
    seed: int = 0

    def __call__(self, known: ClassModels, x: Any) -> TargetModel:
        return known.target_fit(x, TargetFit(self.steps, self.lr, self.batch_size), self.resamples, self.seed)


@target_methods.register(name="fedssa")
@dataclass(frozen=True)
class TargetSelfSupervised(TargetMethod):
    """FedSSA learnt once, for ``fedloom target``: Σ p_k θ_k of the clients' last models, with p by self-supervision.

    The run may be of any method and must have kept its clients' last models (``evaluation.what=[global,average]``). For
    the same inputs p is that of ``method.mixing=ssa`` in the run's last round. FedSSA, table 3. Use it with care: its
    loss measures how confident a client is, not whether it is right.

    Args:
        variance: λ_var ≥ 0, weight of confidence.
        entropy: λ_we ≥ 0, weight of collaboration.
        optimiser: ``sgd``, or ``adam``, whose steps do not depend on the scale of the loss.
        lr: learning rate of the optimiser.
        steps: number of its steps.
        batch_size: inputs per step.
        draws: number of times that views are drawn, at most once per pass.
        views: augmentations that make two views of each input.
    """

    variance: float = SelfSupervised.variance
    entropy: float = SelfSupervised.entropy
    optimiser: Literal["adam", "sgd"] = SelfSupervised.optimiser
    lr: float = SelfSupervised.lr
    steps: int = SelfSupervised.steps
    batch_size: int = SelfSupervised.batch_size
    draws: int = SelfSupervised.draws
    views: tuple[str | Mapping[str, Any], ...] = ("jitter", "blur")
    resamples: NonNegativeInt = 200
    seed: int = 0
    citation: ClassVar[str] = SelfSupervised.citation

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy()

    def policy(self) -> SelfSupervised:
        """The mixing policy."""
        return SelfSupervised(
            self.variance, self.entropy, self.optimiser, self.lr, self.steps, self.batch_size, self.draws
        )

    def __call__(self, known: ClassModels, x: Any) -> TargetModel:
        return known.fedssa(x, self.policy(), self.views, self.resamples, self.seed)


@target_methods.register(name="target_prior")
@dataclass(frozen=True)
class TargetShares(TargetMethod):
    """The target's class shares alone, for ``fedloom target``: π maximises Σ_x log Σ_c π_c e^{l_c(x)}, by EM.

    l are the scores of a tempered linear discriminant on sums that clients send. Under label shift, p_U(x) = Σ π_c
    p(x | c), the log-likelihood is concave in π. The result reports shares, intervals, clients and the check; the model
    is the server's. Saerens, Latinne & Decaestecker, 2002.
    """

    resamples: NonNegativeInt = 200
    seed: int = 0
    makes_model: ClassVar[bool] = False

    def __call__(self, known: ClassModels, x: Any) -> TargetModel:
        return known.target_prior(x, self.resamples, self.seed)


target_methods.register(name="ccvr")(CCVR)  # takes no inputs, only a finished run

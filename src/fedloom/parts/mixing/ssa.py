"""FedSSA: mixing coefficients learnt at the server by self-supervision on unlabelled target inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedloom.base.errors import ConfigError, user_stacklevel
from fedloom.base.ranges import Count, NonNegative, NonNegativeInt, Positive
from fedloom.base.tree import Float, Tree
from fedloom.core.context import Facts, RoundInfo
from fedloom.core.local import Local
from fedloom.core.parts import Halves, Mixing, Needs
from fedloom.core.server_data import usable, view_logits
from fedloom.core.targets import CLASSES

CITATION = "fedssa"
DOMINANT = 0.9  # a weight above which a single client decides the mixture
OPTIMISERS: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def combined(p: Float[Tensor, "... K"], logits: Float[Tensor, "... N K C"]) -> Float[Tensor, "... N C"]:
    """ŷ = softmax(Σ_k p_k ŷ_k) [..., N, C] from logits ŷ_k [..., N, K, C]; p is [K], or [N, K] (eq. 4).

    >>> combined(torch.tensor([0.5, 0.5]), torch.tensor([[[2.0, 0.0], [0.0, 2.0]]]))
    tensor([[0.5000, 0.5000]])
    """
    return torch.softmax((p[..., None, :] @ logits).squeeze(-2), -1)


def ssa_loss(a: Tensor, first: Tensor, second: Tensor, variance: float = 1.0, entropy: float = 1e-3) -> Tensor:
    """-cos(ŷ¹, ŷ²) - λ_var (var ŷ¹ + var ŷ²)/2 + λ_we Σ_k p_k log p_k per sample [..., N], p = softmax(a).

    The variance is over the C probabilities of a prediction, (1/C) Σ_c (ŷ_c - 1/C)²; eqs. (4)-(8).

    Args:
        a: [K] for all samples, or [N, K].
        first: the K models' logits on the first view, [..., N, K, C].
        second: logits on the second view, likewise.
        variance: λ_var.
        entropy: λ_we.

    >>> same = torch.zeros(1, 2, 4)  # two uninformative models: cos = 1, var = 0, Σ p log p = -log 2
    >>> ssa_loss(torch.zeros(2), same, same, entropy=1.0)
    tensor([-1.6931])
    """
    log_p = torch.log_softmax(a, -1)
    p = log_p.exp()
    y1, y2 = combined(p, first), combined(p, second)
    confidence = (y1.var(-1, correction=0) + y2.var(-1, correction=0)) / 2
    return -cosine_similarity(y1, y2, dim=-1) - variance * confidence + entropy * (p * log_p).sum(-1)


@dataclass(frozen=True)
class SelfSupervised(Mixing):
    """p = softmax(a), a = argmin of -cos(ŷ¹, ŷ²) - λ_var var ŷ + λ_we Σ p log p, with ŷ = softmax(Σ p_k logits_k).

    ŷ¹ and ŷ² are the mixed predictions on two random views of an unlabelled target input; they should agree, be
    confident, and use more than one client. The client models are frozen; a [|S|] is optimised from zero (uniform p),
    so there is no state and rounds are independent. The networks are evaluated on 2 · ``draws`` views, whatever the
    number of steps. A model with non-finite logits gets weight 0.

    By default clients train as in FedAvg, and only the last round's models are mixed with p: θ^T = Σ p_k θ_k, without
    that round's corrections and server step, where the method has any; FedDF's distillation starts from it. The
    mixture is then a read-out that no client trains on, so that one federation serves any number of targets.
    Algorithm 1 of the paper is ``feed_back=True``: every round's mixture is the next round's model.

    FedSSA, sections 4.1-4.2 and algorithm 1. Choices that the paper leaves open: softmax keeps p on the simplex; the
    optimiser; the variance has divisor C. Deviations: by default nothing is fed back, because the loss measures how
    confident the clients are, not whether they are right, and with feedback p may jump to a client that was rebuilt
    with large logits; the number of steps is a setting, so that p does not depend on the number of inputs (ten epochs
    of 64 on 2000 inputs are 320 steps). Defaults are those that were never distinguishably below FedAvg on any of five
    targets (``recipes/ssa/results/defaults.md``); SGD at .01 is the one optimiser that the paper names.

    Args:
        variance: λ_var ≥ 0, weight of confidence.
        entropy: λ_we ≥ 0, weight of collaboration.
        optimiser: ``sgd``, a ← a - ``lr`` ∇, or ``adam``, whose steps do not depend on the scale of the loss: it ends
            at one client whatever the target, which suits targets that one client knows and ruins the others.
        lr: learning rate of the optimiser.
        steps: number of its steps.
        batch_size: inputs per step; the inputs are passed through in a new order each time.
        draws: number of times that views are drawn, at most once per pass; with 1, all passes use the same views.
        start: first round, from 0, whose p is learnt if mixtures are fed back; before it, p_k = n_k / Σ n.
        feed_back: whether clients continue from the mixture. If not, p_k = n_k / Σ n in all rounds but the last.

    Raises:
        ConfigError: if a setting is out of range, ``start`` is set without ``feed_back``, or no round follows it.
    """

    variance: NonNegative = 10.0
    entropy: NonNegative = 1e-3
    optimiser: Literal["adam", "sgd"] = "sgd"
    lr: Positive = 0.01
    steps: Count = 300
    batch_size: Count = 64
    draws: Count = 1
    start: NonNegativeInt = 0
    feed_back: bool = False

    targets = CLASSES
    citation = CITATION

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start and not self.feed_back:
            raise ConfigError("mixing 'ssa': start has an effect only if mixtures are fed back; set feed_back=true.")

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Views of target inputs and all updates at once; without feedback, also the last round."""
        last = "" if self.feed_back else "last"
        return Needs(target="views", updates=True, common_classes=True, rounds=last)

    def check(self, local: Local, facts: Facts) -> None:
        if facts.rounds and self.start >= facts.rounds:
            raise ConfigError(
                f"mixing 'ssa': p is learnt from round {self.start} on, counted from 0, but there are {facts.rounds} "
                f"rounds; choose a start below {facts.rounds}."
            )

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        assert info.server_data is not None
        if not self.learns(info.t, info.facts.rounds):
            return state, info.samples / info.samples.sum()
        data, models = info.server_data, info.models()
        passes = -(-self.steps // -(-len(data.inputs) // self.batch_size))
        draws = min(self.draws, passes)
        views = [view_logits(data, models, info.buffers, info.t, draw) for draw in range(draws)]
        finite = usable(*(z for pair in views for z in pair))
        if not finite.any():
            return state, info.samples / info.samples.sum()
        if not finite.all():
            views = [(first[:, finite], second[:, finite]) for first, second in views]
        batches = (
            (z[rows].double() for z in views[number * draws // passes])
            for number, rows in data.batches(info.t, self.batch_size)
        )
        a = torch.zeros(views[0][0].shape[1], dtype=torch.float64, device=finite.device)
        p = np.zeros(len(models))
        p[finite.cpu().numpy()] = self.learnt(a, islice(batches, self.steps)).cpu().numpy()
        if not self.feed_back and p.max() > DOMINANT:
            warnings.warn(
                f"FedSSA gives client {info.cohort[p.argmax()]} {p.max():.0%} of the weight. Its loss measures how "
                "sure a client is, not whether it is right: check the model on a few labelled inputs of the target.",
                stacklevel=user_stacklevel(),
            )
        return state, p

    def refine(self, state: Tree, theta: Tensor, buffers: Tensor, info: RoundInfo) -> Halves:
        """The read-out: Σ p_k θ_k itself after the last round, unless mixtures are fed back."""
        reads_out = not self.feed_back and self.learns(info.t, info.facts.rounds)
        return state, info.mixture() if reads_out else theta

    def learns(self, t: int, rounds: int) -> bool:
        """Whether p is learnt in round t of ``rounds``, from 0.

        >>> [SelfSupervised().learns(t, 3) for t in range(3)]
        [False, False, True]
        >>> [SelfSupervised(feed_back=True, start=1).learns(t, 3) for t in range(3)]
        [False, True, True]
        """
        return t >= self.start if self.feed_back else t == rounds - 1

    def learnt(self, a: Tensor, batches: Iterable[Iterable[Tensor]]) -> Tensor:
        """p = softmax(a), float64, after one step of the optimiser per pair of logits [..., N, K, C] on the two views.

        Args:
            a: the starting point: [K], or [N, K] for per-sample coefficients.
            batches: the pairs, in order.
        """
        a = a.clone().requires_grad_()
        optimiser = OPTIMISERS[self.optimiser]([a], lr=self.lr)
        with torch.enable_grad():
            for first, second in batches:
                optimiser.zero_grad()
                loss = ssa_loss(a, first, second, self.variance, self.entropy)
                (loss.mean() if a.ndim == 1 else loss.mean(tuple(range(loss.ndim - 1))).sum()).backward()
                optimiser.step()
        return torch.softmax(a.detach(), -1)

"""Hedge: a mixture of experts, weighted by their cumulative losses."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Annotated

import torch
from torch import Tensor

from fedloom.core.ranges import Fraction, Range, within


@dataclass(frozen=True)
class Hedge:
    """p_i^{t+1} ∝ p_i^t γ^{ℓ_i^t} from uniform p^1: an expert's weight falls exponentially with its loss.

    The loss of the mixture is Σ p_i ℓ_i. For losses in [0, 1] its sum over tasks is at most
    (L_best log(1/γ) + log G) / (1 - γ), where L_best is that of the best of G experts. Freund and Schapire, 1997; Acar,
    thesis 2023, algorithm 10, with γ = .1.

    The state is the experts' cumulative loss [G]; a loss that is not finite counts as infinite, so that this expert's
    weight stays 0.

    >>> hedge = Hedge()
    >>> total = hedge.update(hedge.init(2), torch.tensor([0.0, 1.0]))
    >>> hedge.p(total)
    tensor([0.9091, 0.0909], dtype=torch.float64)

    Args:
        gamma: γ, in (0, 1); near 1 all weights stay equal.
        retire: an expert whose weight falls below this threshold is dropped: it is no longer trained or evaluated. 0
            drops none. The reported mixture changes by no more than this times the number of experts, unless one of
            the dropped experts would have recovered.

    Raises:
        ConfigError: if γ is not strictly between 0 and 1, or ``retire`` is outside [0, .001).
    """

    gamma: Fraction = 0.1
    retire: Annotated[float, Range(0, 1e-3, below=True)] = 0.0

    citation = "freund1997decision"

    def __post_init__(self) -> None:
        within(self, "hedge.")

    def init(self, experts: int) -> Tensor:
        """The initial cumulative losses, zeros, float64 [G]."""
        return torch.zeros(experts, dtype=torch.float64)

    def p(self, total: Tensor) -> Tensor:
        """The weights p [G] given cumulative losses ``total`` [G]; uniform if all of them are infinite."""
        if bool(torch.isinf(total).all()):
            return torch.full_like(total, 1 / len(total))
        return torch.softmax(log(self.gamma) * total, 0)

    def update(self, total: Tensor, losses: Tensor) -> Tensor:
        """The cumulative losses [G] after another task."""
        losses = losses.to(total)
        total = total + torch.where(torch.isfinite(losses), losses, float("inf"))
        return torch.where(self.p(total) < self.retire, float("inf"), total)

    def active(self, total: Tensor) -> list[int]:
        """The experts with finite cumulative loss; all of them if there is none.

        >>> Hedge().active(torch.tensor([1.0, float("inf")]))
        [0]
        """
        active = torch.isfinite(total).nonzero().flatten().tolist()
        return active or list(range(len(total)))

    def bound(self, best: float, experts: int) -> float:
        """The upper bound of the mixture's cumulative loss, given that of the best expert; for losses in [0, 1].

        >>> round(Hedge().bound(10.0, 24), 2)
        29.12
        """
        return (best * log(1 / self.gamma) + log(experts)) / (1 - self.gamma)


def mixed(p: Tensor, values: Tensor) -> float:
    """Σ p_i v_i over the experts with p_i > 0; the others may have no value.

    >>> mixed(torch.tensor([1.0, 0.0]), torch.tensor([0.5, float("nan")]))
    0.5
    """
    trusted = p > 0
    return float((p[trusted] * values.to(p)[trusted]).sum())

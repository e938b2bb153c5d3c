"""Alternating training: FedRep and FedPAC train the head first, then the body."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Probability
from fedloom.core.context import Context, Facts
from fedloom.core.local import Local
from fedloom.core.parts import Personal
from fedloom.core.views import StepInfo, View


@dataclass(frozen=True)
class Alternating(Personal):
    """The head is private, the body shared; the first steps of a round train the head alone, the others the body alone.

    A fraction between 0 and 1 leaves at least one step to either; a client with a single step trains both in it. A
    client that never participated deploys the shared body with the initial head. Collins et al., ICML 2021 (FedRep),
    algorithm 1, where the head is trained for ten epochs and the body for one.

    Args:
        head_fraction: in [0, 1], the fraction of a round's steps that train the head, rounded down; 0: none, 1: all.
    """

    head_fraction: Probability = 0.9

    citation = "collins2021fedrep"

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Whether the parameter belongs to the model's ``head``."""
        return name.startswith("head.")

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        """The head while step + 1 ≤ head_fraction · steps, then the body."""
        if ctx.steps == 1 and 0 < self.head_fraction < 1:
            return (View(shared=1.0, private=1.0),)
        head = float(step.step < head_steps(self.head_fraction, ctx.steps))
        return (View(shared=1 - head, private=head),)


@dataclass(frozen=True)
class InTurn(Personal):
    """The head and the body are both shared; the first steps of a round train the head alone, the others the body.

    A fraction between 0 and 1 leaves at least one step to either; a client with a single step trains both in it. In
    FedPAC (Xu, Tong & Huang, ICLR 2023, algorithm 1) the head is trained for one epoch and the body for five. There
    the head has another rate, like ``local.rates={head: 10}``.

    Args:
        head_fraction: in [0, 1], the fraction of a round's steps that train the head, rounded down; 0: none, 1: all.
    """

    head_fraction: Probability = 1 / 6

    citation = "xu2023fedpac"

    def check(self, local: Local, facts: Facts) -> None:
        if not facts.head:
            raise ConfigError(
                "personal 'in_turn' trains head and body in turn, but the model's last parameters are not those of a "
                "module 'head'; give it one."
            )

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        """The head while step + 1 ≤ head_fraction · steps, then the body."""
        if ctx.steps == 1 and 0 < self.head_fraction < 1:
            return (View(),)
        head, layers = float(step.step < head_steps(self.head_fraction, ctx.steps)), ctx.facts.layers
        body = sum(layers) - ctx.facts.head
        return (View(shared=[head if end > body else 1 - head for end in accumulate(layers)]),)


def head_steps(fraction: float, steps: int) -> int:
    """The number of a round's steps that train the head."""
    if not 0 < fraction < 1 or steps == 1:
        return steps if fraction == 1 else 0
    return min(max(int(fraction * steps + 1e-9), 1), steps - 1)

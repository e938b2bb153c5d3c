"""Alternating training of private and shared parameters: FedRep trains the head first, then the body."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.core.context import Context
from fedloom.core.parts import Personal
from fedloom.core.ranges import Probability
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
        head = float(step.step < self._head_steps(ctx.steps))
        return (View(shared=1 - head, private=head),)

    def _head_steps(self, steps: int) -> int:
        """The number of a round's steps that train the head."""
        if not 0 < self.head_fraction < 1 or steps == 1:
            return steps if self.head_fraction == 1 else 0
        return min(max(int(self.head_fraction * steps + 1e-9), 1), steps - 1)

"""Buffers (batch statistics) during forward passes: which passes change them, and those of a second model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fedloom.core.plan import ClientPlan
from fedloom.core.tree import Tree
from fedloom.core.views import View


@contextmanager
def untouched(buffers: Tensor) -> Iterator[None]:
    """Restore the buffers after forward passes that do not train the received model, such as a second model's."""
    before = buffers.clone()
    yield
    if len(before):
        buffers.copy_(before)


class SecondBuffers:
    """The buffers of v in a paired method, which a client keeps beside v.

    Passes in which v alone moves update them.

    They start as the received ones, like v in Ditto, and are the deployed model's, unless it is w alone. Passes in
    which w moves, too, change w's buffers, which are sent; in a method without any other passes, v's are sent as w's.

    Attributes:
        own: v's buffers [buffers]; empty before its first pass, and for models without buffers.
        received: w's buffers [buffers] at the start of the round.
    """

    def __init__(self, plan: ClientPlan, kept: Tree, received: Tensor) -> None:
        self.own = kept.get("buffers", plan.buffers0[:0]) if plan.method.continues else plan.buffers0[:0]
        self.received = received

    @contextmanager
    def during(self, view: View, apart: bool, buffers: Tensor) -> Iterator[None]:
        """The module's ``buffers`` during a pass of the view: v's if it moves v alone, and w has passes (``apart``)."""
        if view.shared:
            yield
            return
        with untouched(buffers if apart else buffers[:0]):
            if apart:
                buffers.copy_(self.own if len(self.own) else self.received)
            yield
            if view.private:
                self.own = buffers.clone()

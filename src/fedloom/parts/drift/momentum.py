"""Local momentum that outlives a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.tree import Tree
from fedloom.core.context import Context, Facts, Model, RoundInfo
from fedloom.core.parts import ClientEnd, Drift, Halves, Needs, Reduce


@dataclass(frozen=True)
class KeptMomentum(Drift):
    """The buffer v of local momentum continues where the last round ended, instead of starting at zero.

    ::

        v ← βv + g,  w ← w - ηv             in every step, with β = local.momentum
        v at the start of a round:  v_i of the client's own last round, or with ``average`` Σ p_j v_j of the last round

    v [P] is the buffer of the shared parameters, and zero at first. A client's own v_i costs no communication and is as
    old as its last round, as in code that creates each client's optimiser once. With ``average`` buffers are sent and
    mixed like models, which doubles communication: Yu, Jin & Yang, ICML 2019, algorithm 1, where all clients take part.

    Args:
        average: start from the mean of the last cohort's buffers, instead of the client's own.
    """

    average: bool = False

    needs = Needs(momentum=True)
    citation = "yu2019momentum"

    @property
    def uploads(self) -> Mapping[str, Reduce]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """v, if it is averaged."""
        return {"momentum": Reduce.MIX} if self.average else {}

    @property
    def downloads(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The mean of v."""
        return ("momentum",) if self.average else ()

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {"momentum": torch.zeros_like(theta)} if self.average else {}

    def init_client(self, theta: Tensor) -> Tree:
        return {} if self.average else {"momentum": torch.zeros_like(theta)}

    def begin(self, ctx: Context) -> Tree:
        """v, which the first step takes up."""
        return {"momentum": (ctx.down if self.average else ctx.state)["momentum"]}

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """v after the last step."""
        return ClientEnd({}, ctx.local, update) if self.average else ClientEnd(ctx.local, {}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return uploads if self.average else state, update

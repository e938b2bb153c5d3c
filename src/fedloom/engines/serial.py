"""The reference engine: blocks of clients one after the other, in this process."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import numpy as np

from fedloom.core.aggregate import Fold
from fedloom.core.client import Broadcast
from fedloom.core.engine import ComputeFactory, Engine, States
from fedloom.core.errors import ClientError
from fedloom.core.missing_needs import as_loss_error
from fedloom.core.plan import ClientPlan


class Serial(Engine):
    """The single-process engine, for the CPU or a GPU."""

    def __init__(self, plan: ClientPlan, compute: ComputeFactory) -> None:
        self.computes = [compute(level) for level in plan.levels]

    def run(
        self, down: Broadcast, clients: np.ndarray, states: States, weights: np.ndarray | None, level: int = 0
    ) -> Generator[Fold]:
        compute = self.computes[level]
        for block in compute.blocks(len(clients)):
            members = clients[block.start : block.stop].tolist()
            part = None if weights is None else weights[block.start : block.stop]
            yield compute.fold(down, members, [states(client) for client in members], part)

    def losses(
        self, down: Broadcast, clients: np.ndarray, states: States, level: int = 0, held_out: bool = False
    ) -> np.ndarray:
        work = partial(self.computes[level].losses, down, clients, states, held_out)
        if isinstance(found := as_loss_error(work), ClientError):
            raise found
        return found

    def close(self) -> None:
        """Do nothing; there is nothing to release."""

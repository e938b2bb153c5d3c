"""The reference engine: one client after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np

from fedloom.compute.live import LiveClient, no_state
from fedloom.core.aggregate import Fold, folds
from fedloom.core.client import Broadcast, State
from fedloom.core.plan import Plan


class Serial:
    """Runs clients one by one in a single live module, on the CPU or on a GPU."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.live = plan, LiveClient(plan)

    def run(
        self, down: Broadcast, clients: np.ndarray, states: Callable[[int], State], weights: np.ndarray | None
    ) -> Generator[Fold]:
        """The folds of the clients' blocks, each made when it is asked for."""
        results = (self.live.work(down, int(client), states(int(client))) for client in clients)
        yield from folds(self.plan, results, len(clients), weights)

    def losses(self, down: Broadcast, clients: np.ndarray, states: Callable[[int], State] = no_state) -> np.ndarray:
        """Training losses of the received model, float64 [clients]."""
        return self.live.losses(down, clients, states)

    def close(self) -> None:
        """Nothing to release."""

"""The reference engine: one client after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fedloom.core.client import Broadcast, Plan, Result, State
from fedloom.engines.live import LiveClient


class Serial:
    """Runs clients one by one in a single live module, on the CPU or on a GPU."""

    def __init__(self, plan: Plan) -> None:
        self.live = LiveClient(plan)

    def run(self, down: Broadcast, clients: np.ndarray, states: Callable[[int], State]) -> Iterator[Result]:
        """Results in the order of ``clients``, each made when it is asked for."""
        for client in clients:
            yield self.live.work(down, int(client), states(int(client)))

    def losses(self, down: Broadcast, clients: np.ndarray) -> np.ndarray:
        """Training losses of the received model, float64 [clients]."""
        return self.live.losses(down, clients)

    def close(self) -> None:
        """Nothing to release."""

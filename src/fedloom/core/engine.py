"""Where × how: an engine says where clients' work runs, a compute how a block of clients is stepped."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

import numpy as np

from fedloom.core.aggregate import Fold
from fedloom.core.client import Broadcast, Result, State
from fedloom.core.plan import ClientPlan

States = Callable[[int], State]  # the state of a client, by its number


class Compute(Protocol):
    """Does the work of blocks of clients of one plan, in one process. A block's bits depend on the block alone."""

    @property
    def longest(self) -> int:
        """Largest number of clients in a block."""
        ...

    @property
    def shortest(self) -> int:
        """How many members a block has at least, where the cohort allows it."""
        ...

    @property
    def together(self) -> bool:
        """Whether a block's members are worked on at once, so that one that kills its process cannot be told apart."""
        ...

    def work(self, down: Broadcast, clients: Sequence[int], states: Sequence[State]) -> Iterator[Result]:
        """The results of a block's members, in their order; what fails becomes a failure."""
        ...

    def fold(
        self, down: Broadcast, clients: Sequence[int], states: Sequence[State], weights: np.ndarray | None
    ) -> Fold:
        """The fold of a block's results, for which a compute need not make every member's own."""
        ...

    def losses(self, down: Broadcast, clients: np.ndarray, states: States) -> np.ndarray:
        """Training losses F_i of the received model, with what of it is the clients' own, float64 [clients]."""
        ...


class Engine(Protocol):
    """Runs clients' work. Folds come in the order of ``clients``, so that sums have one order on all engines."""

    def run(
        self, down: Broadcast, clients: np.ndarray, states: States, weights: np.ndarray | None, level: int = 0
    ) -> Generator[Fold]:
        """Local work of clients of one level, one fold for each of their blocks; ``weights`` p as far as known."""
        ...

    def losses(self, down: Broadcast, clients: np.ndarray, states: States, level: int = 0) -> np.ndarray:
        """Training losses of the received model, float64 [clients]."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


ComputeFactory = Callable[[ClientPlan], Compute]  # makes a compute for one plan, in the process that will use it
EngineFactory = Callable[[ClientPlan, ComputeFactory], Engine]

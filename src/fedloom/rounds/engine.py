"""The interfaces of engines (where client work runs) and computes (how a block of clients is stepped)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from fedloom.rounds.aggregate import Fold
from fedloom.rounds.exchange import Broadcast, Result, State
from fedloom.rounds.plan import ClientPlan

FEW = 4  # clients from which a model has calls of its own
States = Callable[[int], State]  # client number -> its state


class StateFiles(Protocol):
    """Files, which all workers see, of the states of a block's clients; sent instead of the states themselves."""

    @property
    def files(self) -> Mapping[int, object]:
        """The files of the current states, by client; a client without one has no entry."""
        ...

    def load(self, device: str) -> Mapping[int, State]:
        """The current states that are in files."""
        ...

    def save(self, states: Mapping[int, State]) -> Mapping[int, State]:
        """Write the next states; return the references that the store adopts instead of them."""
        ...


class Compute(Protocol):
    """The execution of blocks of clients of one plan in one process; a block's bits depend on the block alone."""

    @property
    def longest(self) -> int:
        """Largest number of clients in a block."""
        ...

    def blocks(self, members: int) -> list[range]:
        """The blocks of a cohort, as a function of its size alone."""
        ...

    @property
    def together(self) -> bool:
        """Whether the members of a block run at once, so that a member that kills its process cannot be identified."""
        ...

    @property
    def joint(self) -> Callable[[int], list[range]] | None:
        """A function that cuts a number of clients with many models into calls; None if each model has its own call.

        A call may get up to ``FEW`` - 2 clients more.
        """
        ...

    def work(self, down: Broadcast, clients: Sequence[int], states: Sequence[State]) -> Iterator[Result]:
        """The results of the members of a block, in order; an exception becomes a failure."""
        ...

    def fold(
        self, down: Broadcast, clients: Sequence[int], states: Sequence[State], weights: np.ndarray | None
    ) -> Fold:
        """The fold of a block's results, which may be computed without every member's own result."""
        ...

    def losses(self, down: Broadcast, clients: np.ndarray, states: States, on_validation: bool = False) -> np.ndarray:
        """F_i of the received model on training or validation samples, with private parameters, float64 [clients].

        It is the loss of the output that the client deploys, the last one of a network with several exits.
        """
        ...


@dataclass(frozen=True)
class Traits:
    """Properties of an engine that a run depends on.

    Attributes:
        devices: kinds of devices on which the driver may hold data and models.
        computes: the computes it can run.
        states: whether the driver or the clients themselves keep client states, and with them the clients' data.
        tolerance: largest absolute difference from the serial engine with the same compute; 0 for the same bits.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    computes: tuple[str, ...] = ("live", "batched")
    states: Literal["driver", "clients"] = "driver"
    tolerance: float = 0.0


class Group(NamedTuple):
    """Clients of one level that received the same message.

    Attributes:
        down: the message.
        clients: their numbers, int64 [n].
        states: the states of clients.
        weights: their coefficients p, float64 [n], if they are known already.
        level: their level.
    """

    down: Broadcast
    clients: np.ndarray
    states: States
    weights: np.ndarray | None = None
    level: int = 0

    def blocks(self, compute: Compute) -> list[range]:
        """Its cut into blocks; clients of several models are one block."""
        return [range(len(self.clients))] if self.down.models else compute.blocks(len(self.clients))

    @classmethod
    def of_models(cls, groups: Sequence[Group]) -> Group:
        """The work of several models in one call; the work of a single model is unchanged."""
        if len(groups) == 1:
            return groups[0]
        owner = {client: group for group in groups for client in group.clients.tolist()}
        weights = [group.weights for group in groups if group.weights is not None]
        return cls(
            Broadcast.of_models([group.clients.tolist() for group in groups], [group.down for group in groups]),
            np.concatenate([group.clients for group in groups]), lambda client: owner[client].states(client),
            np.concatenate(weights) if weights else None, groups[0].level,
        )  # fmt: skip


def calls(groups: Sequence[Group], joint: Callable[[int], list[range]] | None) -> list[list[int]]:
    """The groups, by number, that share a call: consecutive ones of few clients, if these can be stepped together.

    That takes one network, one rate, and one round, by which mini-batches are drawn.
    """

    def alike(number: int) -> tuple[bool, int, int, float]:
        clients, down = groups[number].clients, groups[number].down
        return len(clients) < FEW, groups[number].level, down.round, down.lr

    result: list[list[int]] = []
    for (few, *_), run in groupby(range(len(groups)), key=alike):
        numbers = list(run)
        if joint is None or not few:
            result += [[number] for number in numbers]
            continue
        ends = np.cumsum([len(groups[number].clients) for number in numbers])
        stops = [block.stop for block in joint(int(ends[-1]))]
        shares = np.searchsorted(stops, ends)
        result += [[numbers[n] for n in np.flatnonzero(shares == share)] for share in np.unique(shares)]
    return result


class Engine(Protocol):
    """Runs client work. Folds come in the order of ``clients``, so that sums have the same order on all engines.

    Attributes:
        traits: what a run depends on.
        files: the files of a block's client states, for engines whose workers can read and write them; None if states
            go through the driver.
        joint: its compute's ``joint``: how clients with different models share calls, if they can.
        remark: a sentence for the user on how the engine works here; empty if there is nothing to say.
    """

    traits: ClassVar[Traits] = Traits()
    files: Callable[[Sequence[int]], StateFiles] | None = None
    joint: Callable[[int], list[range]] | None = None
    remark: str = ""

    def run(self, groups: Sequence[Group]) -> Generator[tuple[int, Fold]]:
        """Run the clients of a server step: the number of the group and the fold of each block, in order.

        Groups are given together so that an engine with workers keeps them busy from one group to the next.
        """
        ...

    def losses(
        self, down: Broadcast, clients: np.ndarray, states: States, level: int = 0, on_validation: bool = False
    ) -> np.ndarray:
        """Losses of the received model on training or, if ``on_validation``, validation samples, float64 [clients]."""
        ...

    def committed(self, round: int, accepted: np.ndarray) -> None:
        """Take note that round t was committed with the results of the accepted clients, int64 [accepted].

        A result that was returned but not accepted must leave no trace in states that the engine keeps.
        """

    def evaluate(self, down: Broadcast, clients: np.ndarray) -> Mapping[str, np.ndarray] | None:
        """Evaluate the deployed models of clients on test samples that only they hold.

        Returns:
            One row per client that answered: ``client`` and ``n`` (its test samples), int64, then ``loss`` and every
            metric of the evaluation, float64; None if the driver holds these samples.
        """

    def close(self) -> None:
        """Release workers and memory, if there are any."""


ComputeFactory = Callable[[ClientPlan], Compute]  # called in the process that uses the compute


@dataclass(frozen=True)
class EngineFactory:
    """A factory of engines for plans; the engine's traits are known before there is a plan."""

    make: Callable[[ClientPlan, ComputeFactory], Engine]
    traits: Traits = Traits()

    def __call__(self, plan: ClientPlan, compute: ComputeFactory) -> Engine:
        """The engine."""
        return self.make(plan, compute)

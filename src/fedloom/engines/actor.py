"""The worker of the Ray engine: it holds the plan, does the work of blocks, and may keep their folds for a chain.

Messages are packed (``fedloom.engines.packed``). This module does not import Ray.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from fedloom.core.aggregate import Fold
from fedloom.core.client import Broadcast
from fedloom.core.engine import Compute, ComputeFactory
from fedloom.core.errors import ClientError
from fedloom.core.plan import ClientPlan
from fedloom.engines.packed import Packed, pack, unpack
from fedloom.engines.worker import Block, or_error


@dataclass
class RemoteBlock(Block):
    """A block at a worker on some node.

    Attributes:
        keep: whether its sums stay with the worker.
    """

    keep: bool = False


class Actor:
    """A worker on some node; Ray calls its methods one after the other.

    Args:
        path: the driver's module search path, for modules that are not installed.
        device: the device of local work.
    """

    def __init__(self, path: Sequence[str], device: str = "cpu") -> None:
        sys.path += [place for place in path if place not in sys.path]
        self.device = device
        self.plan: ClientPlan | None = None
        self.computes: list[Compute] = []
        self.round = -1  # the number of the broadcast that ``down`` is
        self.down: Broadcast | None = None
        self.kept: dict[int, Fold] = {}  # sums by number of the block

    def alive(self) -> None:
        """Answer."""

    def prepare(self, plan: Packed, data: Packed) -> None:
        """Receive the plan and its data, which stay in the node's shared memory unless they go to a GPU."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its workers
        torch.set_num_threads(1)
        made: tuple[ClientPlan, ComputeFactory] = unpack(plan, self.device)
        train, validation = unpack(data, self.device, in_place=True)
        self.plan = replace(made[0], data=train, validation=validation, device=self.device)
        self.computes = [made[1](level) for level in self.plan.levels]
        self.round, self.down, self.kept = -1, None, {}

    def fold(self, round: int, down: Packed, block: Packed) -> Packed:
        """The fold of a block; without its sums if these stay here."""
        received = self._receive(round, down)
        task: RemoteBlock = unpack(block, self.device)
        compute = self.computes[task.level]
        work = partial(compute.fold, received, task.clients, task.states, task.weights)
        return pack(self._kept(task, or_error(work, f"round {received.round}: uploads do not fold")))

    def work(self, round: int, down: Packed, block: Packed) -> Packed:
        """The results of a block's members."""
        received = self._receive(round, down)
        task: RemoteBlock = unpack(block, self.device)
        work = partial(self.computes[task.level].work, received, task.clients, task.states)
        return pack(or_error(lambda: list(work()), f"round {received.round}: local work failed"))

    def chain(self, total: Packed | None, numbers: Sequence[int], sums: Packed | None = None) -> Packed:
        """The running total over earlier blocks, with the kept sums of the given blocks, or given ones, added."""
        running = Fold() if total is None else Fold(unpack(total, self.device))
        for number in numbers:
            add(running, self.kept[number])
        if sums is not None:
            add(running, Fold(unpack(sums, self.device)))
        return pack(running.sums)

    def losses(self, round: int, down: Packed, block: Packed) -> Packed:
        """Training losses of the received model."""
        received = self._receive(round, down)
        task: RemoteBlock = unpack(block, self.device)
        states = dict(zip(task.clients, task.states, strict=True))
        work = partial(self.computes[task.level].losses, received, np.array(task.clients), states.__getitem__)
        return pack(or_error(work, f"round {received.round}: training losses cannot be computed"))

    def _receive(self, round: int, down: Packed) -> Broadcast:
        """Unpack a broadcast, once; the sums of the one before are no longer needed."""
        if round != self.round:
            self.round, self.down, self.kept = round, unpack(down, self.device), {}
        assert self.down is not None
        return self.down

    def _kept(self, task: RemoteBlock, folded: Fold | ClientError) -> Fold | ClientError:
        if task.keep and isinstance(folded, Fold):
            self.kept[task.number] = Fold(folded.sums)
            return replace(folded, sums={})
        return folded


def add(running: Fold, sums: Fold) -> None:
    """Add the sums of the next block, and leave them as they are, in case the chain must begin again."""
    running.merge(Fold({slot: v if slot in running.sums else v.clone() for slot, v in sums.sums.items()}))

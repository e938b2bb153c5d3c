"""The worker of the multi-process engine: receive a block, do its work, return its fold."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch

from fedloom.core import fork_safety
from fedloom.core.aggregate import Fold, fold
from fedloom.core.client import Broadcast, Result, State
from fedloom.core.engine import Compute
from fedloom.core.missing_needs import as_client_error, as_loss_error
from fedloom.core.plan import ClientPlan
from fedloom.engines.shared import Segment

PR_SET_PDEATHSIG = 1


@dataclass
class Block:
    """The work of one block.

    Attributes:
        number: the block's position in its cohort.
        level: the level of its members.
        clients: its members.
        weights: their mixing coefficients, float64 [members], if known.
        states: their states.
    """

    number: int
    level: int
    clients: list[int]
    weights: np.ndarray | None
    states: list[State]


@dataclass
class BlockTask(Block):
    """A block, and the slot through which its data go.

    Attributes:
        slot: index of the slot, whose mark is the position of the member being worked on.
        deaths: number of workers that died, by position of the member.
        lost: the failures of members that killed too many workers.
        alone: whether members run one by one, to find the one that kills its worker.
        places: places in the arena for their new states, as far as there is room.
    """

    slot: int
    deaths: Counter[int] = field(default_factory=Counter)
    lost: dict[int, Result] = field(default_factory=dict)
    alone: bool = False
    places: list[int] = field(default_factory=list)


def die_with_parent(parent: int) -> None:
    """Ask the system to kill this process when its parent ends; elsewhere, a closed pipe tells a worker."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def serve(
    plan: ClientPlan,
    computes: list[Compute],
    segment: Segment,
    slots: list[Segment],
    pipe: Connection,
    inherited: list[Connection],
    parent: int,
) -> None:
    """The main loop of a worker: receive tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    fork_safety.hide_gpus()  # else the first backward pass starts a thread for each
    with contextlib.suppress(EOFError, ConnectionError):
        _work(plan, computes, segment, slots, pipe)


def _work(plan: ClientPlan, computes: list[Compute], segment: Segment, slots: list[Segment], pipe: Connection) -> None:
    down: Broadcast | None = None
    while True:
        kind, content = pipe.recv()
        if kind == "round":
            down = segment.load(content)
            continue
        assert down is not None
        if kind == "losses":
            level, clients, states, held_out = content
            own = lambda client, states=states: states.get(client, {})  # noqa: E731
            work = partial(computes[level].losses, down, clients, own, held_out)
            pipe.send(as_loss_error(work))
        else:
            number, message, end = content
            task: BlockTask = slots[number].load(message)
            work = partial(_folded, plan.levels[task.level], computes[task.level], down, task, slots[number])
            pipe.send_bytes(
                slots[number].dump(as_client_error(work, f"round {down.round + 1}: uploads do not fold"), end)[0]
            )


def _folded(plan: ClientPlan, compute: Compute, down: Broadcast, task: BlockTask, slot: Segment) -> Fold:
    """The fold of a task's block, states in their places; members run together unless one killed a worker before."""
    if compute.together and not (task.lost or task.alone):
        folded = compute.fold(down, task.clients, task.states, task.weights)
    else:
        folded = fold(plan, _results(compute, down, task, slot), task.weights)
    for result, place in zip(folded.results, task.places, strict=False):
        result.state = slot.arena.put(place, result.state)
    return folded


def _results(compute: Compute, down: Broadcast, task: BlockTask, slot: Segment) -> Iterator[Result]:
    """The results of a block's members in order; the slot's mark tells which one is running."""
    members = [n for n in range(len(task.clients)) if n not in task.lost]
    groups = [[n] for n in members] if task.alone else [members]
    results = (
        result
        for group in groups
        for result in compute.work(down, [task.clients[n] for n in group], [task.states[n] for n in group])
    )
    for at in range(len(task.clients)):
        if at in task.lost:
            yield task.lost[at]
        else:
            slot.mark = at
            yield next(results)

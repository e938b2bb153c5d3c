"""A process a core: forked workers, each with a compute of its own and one thread, around shared memory.

Data, model and method are inherited by fork and never copied. The cohort's blocks are dealt out in order; a worker does
the work of a block's members one after the other and hands over their fold: sums travel, not updates, and pipes carry
only addresses. The broadcast lies in one shared segment; each task owns a slot, a segment through which clients' states
go in and the fold comes out. Folds are handed on in the order of the cohort, whoever finishes first: sums have the
order of the serial engine, hence the same bits. A worker that dies is replaced and its blocks are redone; a client that
kills its worker twice counts as failed, and the others of its block are done without it.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from fedloom.core.aggregate import Fold, blocks, fold
from fedloom.core.client import Broadcast, Failure, FailureKind, Result, State
from fedloom.core.engine import Compute, ComputeFactory, States
from fedloom.core.errors import ClientError, ConfigError
from fedloom.core.plan import ClientPlan
from fedloom.engines.shared import Segment

QUEUED = 2  # tasks a worker holds: one under way, one waiting, so that it never idles
ATTEMPTS = 2
VECTORS = 8  # room for what a client brings and leaves behind, each as long as the model


@dataclass
class Task:
    """A block's work, and the slot through which it goes.

    Attributes:
        number: of the block in its cohort.
        level: of its members.
        clients: its members.
        weights: their mixing coefficients, if they are known.
        states: what they bring along.
        slot: number of the slot, whose mark says which member is under way.
        deaths: how many workers died at each member.
        lost: what stands for the members at which too many did.
        alone: whether members are worked on one by one, to find the one that kills its worker.
    """

    number: int
    level: int
    clients: list[int]
    weights: np.ndarray | None
    states: list[State]
    slot: int
    deaths: Counter[int] = field(default_factory=Counter)
    lost: dict[int, Result] = field(default_factory=dict)
    alone: bool = False


@dataclass
class Worker:
    """A forked process and what it has to do."""

    process: Any
    pipe: Connection
    tasks: deque[Task] = field(default_factory=deque)


class Processes:
    """Runs a cohort on several processes; see the module's docstring.

    Args:
        plan: the work.
        compute: how a worker steps its blocks.
        workers: number of processes; 0 takes one for each core this process may use.

    Raises:
        ConfigError: where processes cannot be forked, or the plan is for a GPU.
    """

    def __init__(self, plan: ClientPlan, compute: ComputeFactory, workers: int = 0) -> None:
        if "fork" not in mp.get_all_start_methods():
            raise ConfigError("engine 'processes' needs a system that can fork; use engine=serial here.")
        if plan.device != "cpu":
            raise ConfigError("engine 'processes' runs on the CPU; use engine=serial on a GPU.")
        if workers < 0:
            raise ConfigError(f"engine 'processes': workers is {workers}, but it must be at least 0.")
        self.plan = plan
        self.computes = [compute(level) for level in plan.levels]  # workers inherit them
        self.context: Any = mp.get_context("fork")
        self.count = workers or len(os.sched_getaffinity(0))
        numbers = plan.layout.shared_size + plan.private_size + plan.layout.buffer_size
        vectors = VECTORS * numbers * plan.layout.dtype.itemsize
        self.down = Segment(vectors + (1 << 20))
        longest = max(compute.longest for compute in self.computes)
        self.slots = [Segment(longest * (vectors + (1 << 20))) for _ in range(QUEUED * self.count)]
        self.workers = [self._fork() for _ in range(self.count)]

    def _fork(self) -> Worker:
        ours, theirs = self.context.Pipe()
        args = self.plan, self.computes, self.down, self.slots, theirs
        process = self.context.Process(target=_serve, args=args, daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def run(
        self, down: Broadcast, clients: np.ndarray, states: States, weights: np.ndarray | None, level: int = 0
    ) -> Generator[Fold]:
        """The folds of the clients' blocks, in order; they are the caller's own."""
        self._announce(down)
        cut = blocks(len(clients), self.computes[level].longest, self.computes[level].shortest)
        waiting, free = deque(enumerate(cut)), deque(range(len(self.slots)))
        done: dict[int, Fold] = {}

        def deal() -> None:
            """Give waiting blocks to workers that have room, the least busy first."""
            while waiting and free:
                worker = min(self.workers, key=lambda w: len(w.tasks))
                if len(worker.tasks) >= QUEUED:
                    return
                number, block = waiting.popleft()
                slot = free.pop()  # the one used last: its memory is still in the caches
                members = clients[block.start : block.stop].tolist()
                part = None if weights is None else weights[block.start : block.stop]
                self._give(worker, Task(number, level, members, part, [states(client) for client in members], slot))

        try:
            deal()
            for turn in range(len(cut)):
                while turn not in done:
                    for task, found in self._collect(down):
                        done[task.number] = found
                        free.append(task.slot)
                    deal()
                yield done.pop(turn)
        finally:
            if any(worker.tasks for worker in self.workers):  # the round is broken off, and nothing of it shall stay
                self.close()

    def losses(self, down: Broadcast, clients: np.ndarray, states: States, level: int = 0) -> np.ndarray:
        """Training losses of the received model, float64 [clients]."""
        self._announce(down)
        shares = []
        for share in np.array_split(clients, len(self.workers)):
            own = {int(c): {k: v for k, v in states(int(c)).items() if k == "personal"} for c in share}
            shares.append((level, share, own if self.plan.has_private else {}))
        for attempt in range(ATTEMPTS):
            try:
                for worker, share in zip(self.workers, shares, strict=True):
                    worker.pipe.send_bytes(pickle.dumps(("losses", share)))
                return np.concatenate([worker.pipe.recv() for worker in self.workers])
            except (EOFError, OSError):
                if attempt + 1 == ATTEMPTS:
                    raise
                for number in range(len(self.workers)):
                    self._replace(number)
            except BaseException:  # broken off: no answer shall be left in a pipe
                self.close()
                raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the workers; another round would begin with new ones."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.process.kill()
            worker.pipe.close()
        for worker in workers:
            worker.process.join()

    def _announce(self, down: Broadcast) -> None:
        """Tell all workers of a round, those too that will be forked during it."""
        self.workers = self.workers or [self._fork() for _ in range(self.count)]
        self.announcement = ("round", self.down.dump(down)[0])
        for worker in self.workers:
            self._send(worker, self.announcement)

    def _give(self, worker: Worker, task: Task) -> None:
        slot = self.slots[task.slot]
        slot.mark = next(n for n in range(len(task.clients)) if n not in task.lost)
        worker.tasks.append(task)
        self._send(worker, ("work", (task.slot, *slot.dump(task))))

    def _send(self, worker: Worker, message: tuple) -> None:
        with contextlib.suppress(OSError):  # the worker died; _collect finds out and gives its tasks to another
            worker.pipe.send_bytes(pickle.dumps(message))  # ``send`` would build a pickler for each message

    def _collect(self, down: Broadcast) -> list[tuple[Task, Fold]]:
        """Wait for workers and take what they have: a finished task, or their death."""
        found: list[tuple[Task, Fold]] = []
        busy = {worker.pipe: number for number, worker in enumerate(self.workers) if worker.tasks}
        for pipe in wait(list(busy)):
            number = busy[pipe]  # type: ignore[index]
            worker = self.workers[number]
            try:
                message = worker.pipe.recv_bytes()
            except (EOFError, OSError):
                found += self._after_death(number, down)
                continue
            task = worker.tasks.popleft()
            folded = self.slots[task.slot].load(message, copy=True)
            if isinstance(folded, ClientError):
                raise folded
            found.append((task, folded))
        return found

    def _after_death(self, number: int, down: Broadcast) -> list[tuple[Task, Fold]]:
        """Replace a dead worker and hand its tasks on; the client it was at is tried once more."""
        tasks = self._replace(number)
        found: list[tuple[Task, Fold]] = []
        if tasks:
            task = tasks[0]
            at = self.slots[task.slot].mark
            task.deaths[at] += 1
            if task.deaths[at] == ATTEMPTS and self.computes[task.level].together and not task.alone:
                task.alone, task.deaths = True, Counter()
            elif task.deaths[at] == ATTEMPTS:
                reason = f"its worker process died {ATTEMPTS} times"
                failure = Failure(down.round, task.clients[at], FailureKind.DIED, reason)
                task.lost[at] = Result(task.clients[at], failure=failure)
            if len(task.lost) == len(task.clients):
                results = (task.lost[n] for n in range(len(task.clients)))
                found.append((tasks.popleft(), fold(self.plan.levels[task.level], results, task.weights)))
        for task in tasks:
            self._give(self.workers[number], task)
        return found

    def _replace(self, number: int) -> deque[Task]:
        old = self.workers[number]
        old.pipe.close()
        old.process.kill()
        old.process.join()
        self.workers[number] = self._fork()
        self._send(self.workers[number], self.announcement)
        return old.tasks


def _serve(plan: ClientPlan, computes: list[Compute], segment: Segment, slots: list[Segment], pipe: Connection) -> None:
    """A worker's life: receive tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    down: Broadcast | None = None
    while True:
        try:
            kind, content = pipe.recv()
        except EOFError:
            return
        if kind == "round":
            down = segment.load(content)
            continue
        assert down is not None
        if kind == "losses":
            level, clients, states = content
            pipe.send(computes[level].losses(down, clients, lambda client, states=states: states.get(client, {})))
        else:
            number, message, end = content
            task: Task = slots[number].load(message)
            try:
                folded = _folded(plan.levels[task.level], computes[task.level], down, task, slots[number])
            except Exception as error:  # a fault in what a part uploads, which no other worker would mend
                sentence = f"round {down.round}: uploads do not fold: {type(error).__name__}: {error}."
                folded = ClientError(sentence, "".join(traceback.format_exception(error)))
            pipe.send_bytes(slots[number].dump(folded, end)[0])


def _folded(plan: ClientPlan, compute: Compute, down: Broadcast, task: Task, slot: Segment) -> Fold:
    """The fold of a task's block; members that are worked on together, if nothing has happened to any of them."""
    if compute.together and not (task.lost or task.alone):
        return compute.fold(down, task.clients, task.states, task.weights)
    return fold(plan, _results(compute, down, task, slot), task.weights)


def _results(compute: Compute, down: Broadcast, task: Task, slot: Segment) -> Iterator[Result]:
    """The results of a block's members in order; the slot's mark says who is under way."""
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

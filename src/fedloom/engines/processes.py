"""One process per core: forked workers around shared memory, each with one thread and its own compute.

Data, model and method are inherited by fork and never copied. A worker does the work of a block's members one after the
other and returns their fold: sums travel instead of updates, and pipes carry only addresses. The broadcast is in one
shared segment; each task owns a slot, a segment through which client states go in and the fold comes out. Folds are
yielded in cohort order, whichever worker finishes first, so sums have the order, and the bits, of the serial engine.

A worker that dies is replaced and its blocks are redone. The client need not be at fault: the worker may have been
killed from outside, or by the system when memory ran out. A client at which workers died twice is therefore tried once
more on its own, after a pause, while no other worker runs. Only if the worker dies again is it a failure; the rest of
its block is done without it. Workers die with their parent, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
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

QUEUED = 2  # tasks per worker: one running, one waiting, so that it never idles
ATTEMPTS = 2  # before the last one, alone
PAUSE = 0.2  # seconds before the last attempt, in which memory may become free
WORKERS = 64  # largest number of workers; on large machines four per core
PR_SET_PDEATHSIG = 1
VECTORS = 8  # model-sized vectors reserved per client for its state and results


@dataclass
class BlockTask:
    """The work of one block, and the slot through which its data go.

    Attributes:
        number: the block's position in its cohort.
        level: the level of its members.
        clients: its members.
        weights: their mixing coefficients, float64 [members], if known.
        states: their states.
        slot: index of the slot, whose mark is the position of the member being worked on.
        deaths: number of workers that died, by position of the member.
        lost: the failures of members at which too many workers died.
        alone: whether members run one by one, to find the one that kills its worker.
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
    """A forked process and its tasks."""

    process: Any
    pipe: Connection
    tasks: deque[BlockTask] = field(default_factory=deque)


class Processes:
    """The multi-process engine; see the module's docstring.

    Args:
        plan: the client plan.
        compute: makes the compute of a worker.
        workers: number of processes; 0 means one per core available to this process.

    Raises:
        ConfigError: if processes cannot be forked, the plan is for a GPU, or the number of workers is out of range.
    """

    def __init__(self, plan: ClientPlan, compute: ComputeFactory, workers: int = 0) -> None:
        if reason := reason_against_forking():
            raise ConfigError(f"engine 'processes' forks its workers, but {reason}; use engine=serial here.")
        if plan.device != "cpu":
            raise ConfigError("engine 'processes' runs on the CPU; use engine=serial on a GPU.")
        cores = len(os.sched_getaffinity(0))
        most = max(WORKERS, 4 * cores)
        if not 0 <= workers <= most:
            raise ConfigError(
                f"engine 'processes': workers is {workers}, but it must be at least 0 and at most {most}, since each "
                f"is a process with its own model and there are {cores} cores; 0 means one per core."
            )
        self.plan = plan
        self.computes = [compute(level) for level in plan.levels]  # inherited by the workers
        self.context: Any = mp.get_context("fork")
        self.count = workers or cores
        numbers = plan.layout.shared_size + plan.private_size + plan.layout.buffer_size
        vectors = VECTORS * numbers * plan.layout.dtype.itemsize
        self.down = Segment(vectors + (1 << 20))
        longest = max(compute.longest for compute in self.computes)
        self.slots = [Segment(longest * (vectors + (1 << 20))) for _ in range(QUEUED * self.count)]
        self.suspects: deque[BlockTask] = deque()
        self.workers: list[Worker] = []
        self._fill()

    def _fill(self) -> None:
        while len(self.workers) < self.count:
            self.workers.append(self._fork())

    def _fork(self) -> Worker:
        ours, theirs = self.context.Pipe()
        inherited = [ours, *(worker.pipe for worker in self.workers)]  # ends held by a child would never report EOF
        args = self.plan, self.computes, self.down, self.slots, theirs, inherited, os.getpid()
        process = self.context.Process(target=_serve, args=args, daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def run(
        self, down: Broadcast, clients: np.ndarray, states: States, weights: np.ndarray | None, level: int = 0
    ) -> Generator[Fold]:
        """The folds of the clients' blocks, in order; the caller owns them."""
        self._announce(down)
        cut = blocks(len(clients), self.computes[level].longest, self.computes[level].shortest)
        waiting, free = deque(enumerate(cut)), deque(range(len(self.slots)))
        self.suspects.clear()
        done: dict[int, Fold] = {}

        def deal() -> None:
            """Assign waiting blocks to workers that have room, the least busy first."""
            while waiting and free:
                worker = min(self.workers, key=lambda w: len(w.tasks))
                if len(worker.tasks) >= QUEUED:
                    return
                number, block = waiting.popleft()
                slot = free.pop()  # the most recently used one: its memory is still cached
                members = clients[block.start : block.stop].tolist()
                part = None if weights is None else weights[block.start : block.stop]
                self._give(
                    worker, BlockTask(number, level, members, part, [states(client) for client in members], slot)
                )

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
            if any(worker.tasks for worker in self.workers):  # the round was interrupted: discard its work
                self.close()

    def losses(self, down: Broadcast, clients: np.ndarray, states: States, level: int = 0) -> np.ndarray:
        """Training losses of the received model, float64 [clients]."""
        self._announce(down)
        shares = []
        for share in np.array_split(clients, len(self.workers)):
            own = {int(c): {k: v for k, v in states(int(c)).items() if k == "personal"} for c in share}
            shares.append((level, share, own if self.plan.has_private else {}))
        try:
            for worker, share in zip(self.workers, shares, strict=True):
                self._send(worker, ("losses", share))
            return np.concatenate([self._losses(number, share) for number, share in enumerate(shares)])
        except BaseException:  # interrupted: leave no answer in a pipe
            self.close()
            raise

    def _losses(self, number: int, share: tuple[int, np.ndarray, States]) -> np.ndarray:
        """A worker's answer, or that of the worker that replaces it."""
        for attempt in range(ATTEMPTS + 1):
            try:
                found = self.workers[number].pipe.recv()
            except (EOFError, OSError):
                if attempt:
                    time.sleep(PAUSE)
                self._replace(number)
                self._send(self.workers[number], ("losses", share))
                continue
            if isinstance(found, ClientError):
                raise found
            return found
        raise ClientError(
            f"round {self.round}: the training losses of clients {share[1][0]} to {share[1][-1]} could not be "
            f"computed: the worker process died {ATTEMPTS + 1} times."
        )

    def close(self) -> None:
        """Stop the workers; another round would start new ones."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.process.kill()
            worker.pipe.close()
        for worker in workers:
            worker.process.join()

    def _announce(self, down: Broadcast) -> None:
        """Send the broadcast to all workers, and remember it for those forked during the round."""
        self._fill()
        self.round, self.announcement = down.round, ("round", self.down.dump(down)[0])
        for worker in self.workers:
            self._send(worker, self.announcement)

    def _give(self, worker: Worker, task: BlockTask) -> None:
        slot = self.slots[task.slot]
        slot.mark = next(n for n in range(len(task.clients)) if n not in task.lost)
        worker.tasks.append(task)
        self._send(worker, ("work", (task.slot, *slot.dump(task))))

    def _send(self, worker: Worker, message: tuple) -> None:
        with contextlib.suppress(OSError):  # the worker died; _collect notices and reassigns its tasks
            worker.pipe.send_bytes(pickle.dumps(message))  # ``send`` would build a new pickler per message

    def _collect(self, down: Broadcast) -> list[tuple[BlockTask, Fold]]:
        """Wait until a worker finishes a task or dies; return the finished tasks with their folds."""
        found: list[tuple[BlockTask, Fold]] = []
        busy = {worker.pipe: number for number, worker in enumerate(self.workers) if worker.tasks}
        if not busy:
            return [self._by_itself(self.suspects.popleft(), down)]
        for pipe in wait(list(busy)):
            worker = self.workers[busy[pipe]]  # type: ignore[index]
            try:
                folded = self._receive(worker)
            except (EOFError, OSError):
                self._after_death(busy[pipe])  # type: ignore[index]
                continue
            found.append((worker.tasks.popleft(), folded))
        return found

    def _receive(self, worker: Worker) -> Fold:
        """The fold of the worker's first task."""
        folded = self.slots[worker.tasks[0].slot].load(worker.pipe.recv_bytes(), copy=True)
        if isinstance(folded, ClientError):
            raise folded
        return folded

    def _after_death(self, number: int) -> None:
        """Replace a dead worker and reassign its tasks; a task whose client died twice becomes a suspect."""
        tasks = self._replace(number)
        task = tasks[0]
        at = self.slots[task.slot].mark
        task.deaths[at] += 1
        if task.deaths[at] == ATTEMPTS and self.computes[task.level].together and not task.alone:
            task.alone, task.deaths = True, Counter()
        elif task.deaths[at] == ATTEMPTS:
            self.suspects.append(tasks.popleft())
        for task in tasks:
            self._give(self.workers[number], task)

    def _by_itself(self, task: BlockTask, down: Broadcast) -> tuple[BlockTask, Fold]:
        """The last attempt at a task, while no other worker runs; a member at which the worker dies is left out."""
        task.alone = True
        while len(task.lost) < len(task.clients):
            time.sleep(PAUSE)
            self._replace(0)
            self._give(self.workers[0], task)
            try:
                folded = self._receive(self.workers[0])
            except (EOFError, OSError):
                at = self.slots[task.slot].mark
                task.deaths[at] += 1
                if task.deaths[at] > ATTEMPTS:
                    reason = f"its worker process died {task.deaths[at]} times"
                    failure = Failure(down.round, task.clients[at], FailureKind.DIED, reason)
                    task.lost[at] = Result(task.clients[at], failure=failure)
                self.workers[0].tasks.clear()
                continue
            self.workers[0].tasks.clear()
            return task, folded
        results = (task.lost[n] for n in range(len(task.clients)))
        return task, fold(self.plan.levels[task.level], results, task.weights)

    def _replace(self, number: int) -> deque[BlockTask]:
        old = self.workers[number]
        old.pipe.close()
        old.process.kill()
        old.process.join()
        self.workers[number] = self._fork()
        self._send(self.workers[number], self.announcement)
        return old.tasks


def reason_against_forking() -> str | None:
    """Why workers cannot be forked on this system, in words; None if they can."""
    if "fork" not in mp.get_all_start_methods():
        return "this system cannot fork"
    if sys.platform == "darwin":
        return "on macOS a forked process may crash in system libraries that use threads"
    return None


def _die_with_parent(parent: int) -> None:
    """Ask the system to kill this process when its parent ends; elsewhere, a closed pipe tells a worker."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def _serve(
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
    _die_with_parent(parent)
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
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
            level, clients, states = content
            work = partial(computes[level].losses, down, clients, lambda client, states=states: states.get(client, {}))
            pipe.send(_or_error(work, f"round {down.round}: training losses cannot be computed"))
        else:
            number, message, end = content
            task: BlockTask = slots[number].load(message)
            work = partial(_folded, plan.levels[task.level], computes[task.level], down, task, slots[number])
            pipe.send_bytes(slots[number].dump(_or_error(work, f"round {down.round}: uploads do not fold"), end)[0])


def _or_error(work: Callable[[], Any], sentence: str) -> Any:
    """The result of ``work``, or a ``ClientError`` for an exception in a part, which any worker would raise."""
    try:
        return work()
    except Exception as error:
        message = f"{sentence}: {type(error).__name__}: {error}."
        return ClientError(message, "".join(traceback.format_exception(error)))


def _folded(plan: ClientPlan, compute: Compute, down: Broadcast, task: BlockTask, slot: Segment) -> Fold:
    """The fold of a task's block; members run together unless one of them killed a worker before."""
    if compute.together and not (task.lost or task.alone):
        return compute.fold(down, task.clients, task.states, task.weights)
    return fold(plan, _results(compute, down, task, slot), task.weights)


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

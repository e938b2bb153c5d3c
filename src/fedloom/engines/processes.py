"""A process a core: forked workers, each a live module with one thread, around shared memory.

Data, model and method are inherited by fork and never copied. The broadcast lies in one shared segment; each task owns
a slot, a segment through which a client's state goes in and its result comes out, so that pipes carry only addresses.
Clients are dealt out in cohort order and their results are handed on in that order, whoever finishes first: sums have
the order of the serial engine, hence the same bits. A worker that dies is replaced and its clients are redone; a client
that kills its worker twice counts as failed.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from fedloom.core.client import Broadcast, Failure, Plan, Result, State
from fedloom.core.errors import ConfigError
from fedloom.engines.live import LiveClient
from fedloom.engines.shared import Segment, Spec, flatten, nest

QUEUED = 2  # tasks a worker holds: one under way, one waiting, so that it never idles
SLOTS_PER_WORKER = 4
ATTEMPTS = 2


@dataclass
class Task:
    """One client's work, and the slot through which it goes."""

    position: int
    client: int
    slot: int
    inputs: Spec
    attempts: int = 0


@dataclass
class Worker:
    """A forked process and what it has to do."""

    process: Any
    pipe: Connection
    tasks: deque[Task] = field(default_factory=deque)
    heard: Spec = field(default_factory=list)  # where its last result lay, which most results share


class Processes:
    """Runs a cohort on several processes; see the module's docstring.

    Args:
        plan: the work.
        workers: number of processes; 0 takes one for each core this process may use.

    Raises:
        ConfigError: where processes cannot be forked, or the plan is for a GPU.
    """

    def __init__(self, plan: Plan, workers: int = 0) -> None:
        if "fork" not in mp.get_all_start_methods():
            raise ConfigError("engine 'processes' needs a system that can fork; use engine=serial or vmap here.")
        if plan.device != "cpu":
            raise ConfigError("engine 'processes' runs on the CPU; use engine=serial or vmap on a GPU.")
        if workers < 0:
            raise ConfigError(f"engine 'processes': workers is {workers}, but it must be at least 0.")
        self.plan = plan
        self.context: Any = mp.get_context("fork")
        count = workers or len(os.sched_getaffinity(0))
        model = 8 * (plan.layout.size + plan.layout.buffer_size)
        self.down = Segment(16 * model + (1 << 20))
        self.slots = [Segment(32 * model + (1 << 20)) for _ in range(SLOTS_PER_WORKER * count)]
        self.workers = [self._fork() for _ in range(count)]

    def _fork(self) -> Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(self.plan, self.down, self.slots, theirs), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def run(self, down: Broadcast, clients: np.ndarray, states: Callable[[int], State]) -> Iterator[Result]:
        """Results in the order of ``clients``; valid until the next one is asked for, but for the client's state."""
        announce = ("round", down.round, down.lr, self._publish(down))
        for worker in self.workers:
            self._send(worker, announce)
        free = deque(range(len(self.slots)))
        todo = deque(enumerate(int(c) for c in clients))
        done: dict[int, tuple[Result, int | None]] = {}
        turn = 0
        try:
            while turn < len(clients):
                self._deal(todo, free, states)
                if turn in done:
                    result, slot = done.pop(turn)
                    turn += 1
                    yield result
                    if slot is not None:
                        free.append(slot)
                    continue
                if not free and todo and done:
                    self._make_room(done, free)
                    continue
                for position, result, slot in self._collect(down, announce):
                    done[position] = (result, slot)
        finally:  # also when the round is broken off: let workers come to rest, so that slots are nobody's
            while any(worker.tasks for worker in self.workers):
                self._collect(down, announce)

    def losses(self, down: Broadcast, clients: np.ndarray) -> np.ndarray:
        """Training losses of the received model, float64 [clients]."""
        announce = ("round", down.round, down.lr, self._publish(down))
        shares = np.array_split(clients, len(self.workers))
        for worker in self.workers:
            self._send(worker, announce)
        for attempt in range(ATTEMPTS):
            found: list[np.ndarray] = []
            try:
                for worker, share in zip(self.workers, shares, strict=True):
                    worker.pipe.send(("losses", share))
                for worker in self.workers:
                    found.append(worker.pipe.recv())
                return np.concatenate(found)
            except (EOFError, OSError):
                if attempt + 1 == ATTEMPTS:
                    raise
                for number in range(len(self.workers)):
                    self._replace(number, announce)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.process.terminate()
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join()
        self.workers = []

    def _publish(self, down: Broadcast) -> Spec:
        trees = {"shared": down.shared, "buffers": {"": down.buffers}, "parts": down.parts}
        return self.down.pack(flatten(trees))[0]

    def _deal(self, todo: deque[tuple[int, int]], free: deque[int], states: Callable[[int], State]) -> None:
        """Give waiting clients to workers that have room, the least busy first."""
        while todo and free:
            worker = min(self.workers, key=lambda w: len(w.tasks))
            if len(worker.tasks) >= QUEUED:
                return
            position, client = todo.popleft()
            slot = free.pop()  # the one used last: its memory is still in the caches
            spec, _ = self.slots[slot].pack(flatten(states(client)))
            task = Task(position, client, slot, spec)
            worker.tasks.append(task)
            self._send(worker, ("work", task))

    def _send(self, worker: Worker, message: tuple) -> None:
        with contextlib.suppress(OSError):  # the worker died; _collect finds out and gives its tasks to another
            worker.pipe.send(message)

    def _collect(self, down: Broadcast, announce: tuple) -> list[tuple[int, Result, int | None]]:
        """Wait for a worker and take what it has: a finished task, or its death."""
        found: list[tuple[int, Result, int | None]] = []
        busy = {w.pipe: number for number, w in enumerate(self.workers) if w.tasks}
        for pipe in wait(list(busy)):
            number = busy[pipe]  # type: ignore[index]
            worker = self.workers[number]
            try:
                client, loss, steps, failure, spec = worker.pipe.recv()
            except (EOFError, OSError):
                found += self._after_death(number, down, announce)
                continue
            task = worker.tasks.popleft()
            worker.heard = spec or worker.heard
            trees = nest(self.slots[task.slot].unpack(worker.heard))
            state: State = trees.get("state", {})
            result = Result(
                client,
                trees.get("update", {}),
                trees["buffers"][""],
                trees.get("uploads", {}),
                {place: {k: v.clone() for k, v in t.items()} for place, t in state.items()},
                trees.get("moved", {}),
                loss,
                steps,
                failure,
            )
            found.append((task.position, result, task.slot))
        return found

    def _after_death(self, number: int, down: Broadcast, announce: tuple) -> list[tuple[int, Result, int | None]]:
        """Replace a dead worker and hand its tasks on; the one it was at is tried once more."""
        tasks = self._replace(number, announce)
        found: list[tuple[int, Result, int | None]] = []
        if tasks:
            tasks[0].attempts += 1
            if tasks[0].attempts >= ATTEMPTS:
                task = tasks.popleft()
                failure = Failure(down.round, task.client, f"its worker process died {ATTEMPTS} times")
                found.append((task.position, Result(task.client, failure=failure), task.slot))
        for task in tasks:
            self.workers[number].tasks.append(task)
            self._send(self.workers[number], ("work", task))
        return found

    def _replace(self, number: int, announce: tuple) -> deque[Task]:
        old = self.workers[number]
        old.pipe.close()
        old.process.kill()
        old.process.join()
        self.workers[number] = self._fork()
        self._send(self.workers[number], announce)
        return old.tasks

    def _make_room(self, done: dict[int, tuple[Result, int | None]], free: deque[int]) -> None:
        """Copy results that wait for their turn out of their slots, when a slow client holds up the order."""
        for position, (result, slot) in done.items():
            if slot is not None:
                result.update = {k: v.clone() for k, v in result.update.items()}
                result.moved = {k: v.clone() for k, v in result.moved.items()}
                result.buffers = result.buffers.clone()
                result.uploads = {p: {k: v.clone() for k, v in t.items()} for p, t in result.uploads.items()}
                done[position] = (result, None)
                free.append(slot)


def _serve(plan: Plan, segment: Segment, slots: list[Segment], pipe: Connection) -> None:
    """A worker's life: receive tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    live = LiveClient(plan)
    down: Broadcast | None = None
    told: Spec = []  # the last address list that was sent; it is sent again only when it changes
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message[0] == "round":
            _, number, lr, spec = message
            trees = nest(segment.unpack(spec))
            down = Broadcast(number, lr, trees["shared"], trees["buffers"][""], trees.get("parts", {}))
        elif message[0] == "losses":
            assert down is not None
            pipe.send(live.losses(down, message[1]))
        else:
            assert down is not None
            task: Task = message[1]
            slot = slots[task.slot]
            result = live.work(down, task.client, nest(slot.unpack(task.inputs)))
            start = max((at + int(np.prod(s)) * t.itemsize for _, s, t, at in task.inputs), default=0)
            trees = {
                "update": result.update,
                "moved": result.moved,
                "buffers": {"": result.buffers},
                "uploads": result.uploads,
                "state": result.state,
            }
            spec, _ = slot.pack(flatten(trees), -(-start // 64) * 64)
            pipe.send((result.client, result.loss, result.steps, result.failure, spec if spec != told else None))
            told = spec

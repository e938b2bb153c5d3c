"""One process per core: workers around shared memory, each with one thread and its own compute.

Data, model and method are inherited by fork and never copied. Where processes cannot be forked, or not safely, workers
are started afresh ("spawned"): they get model and method as a message, and the data once for all in shared memory.

A worker does the work of a block's members one after the other and returns their fold: sums travel instead of updates,
and pipes carry only addresses. A broadcast is in one shared segment; each task owns a slot, a segment through which
client states go in and the fold comes out. Folds are yielded in cohort order, whichever worker finishes first, so sums
have the order, and the bits, of the serial engine. Clients that received different messages work at the same
time, as far as there are segments for their broadcasts.

Workers may be placed on GPUs, one or more on each: they have a copy of the plan there, and what they return comes
through shared memory as on the CPU. Blocks do not depend on how many GPUs there are, so that sums have the same bits on
any number.

A worker that dies is replaced and its blocks are redone. The client need not be at fault: the worker may have been
killed from outside, or by the system when memory ran out. A client on which workers died twice is therefore tried once
more on its own, after a pause, while no other worker runs. Only if the worker dies again is it a failure; the rest of
its block is done without it. Workers die with their parent, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import pickle
import re
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fedloom.base import fork_safety
from fedloom.base.determinism import exact_gpu, prepare_gpu
from fedloom.base.errors import ClientError, ConfigError, LossError, first_line, with_type
from fedloom.core.missing_needs import as_client_error, as_loss_error
from fedloom.engines.shared import Arena, Segment, segments
from fedloom.rounds.aggregate import EVEN, Fold, even_blocks, fold
from fedloom.rounds.engine import Compute, ComputeFactory, Engine, Group, States, Traits
from fedloom.rounds.exchange import Broadcast, Failure, FailureKind, Result, State
from fedloom.rounds.plan import ClientPlan

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Announcement:
    """A broadcast in a segment: its number in the life of the engine, the segment, the message to read it, and t."""

    number: int
    segment: int
    message: bytes
    round: int


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
        down: what its members receive; without a message for a worker that has read it.
        deaths: number of workers that died, by position of the member.
        lost: the failures of members that killed too many workers.
        alone: whether members run one by one, to find the one that kills its worker.
        places: places in the arena for their new states, as far as there is room.
        models: which of several models each member has received; None for one model.
    """

    slot: int
    down: Announcement
    deaths: Counter[int] = field(default_factory=Counter)
    lost: dict[int, Result] = field(default_factory=dict)
    alone: bool = False
    places: list[int] = field(default_factory=list)
    models: list[int] | None = None


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
    downs: list[Segment],
    slots: list[Segment],
    pipe: Connection,
    inherited: list[Connection],
    parent: int,
    device: str = "cpu",
) -> None:
    """The main loop of a worker: receive tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError), ExitStack() as exact:
        if device == "cpu":
            fork_safety.hide_gpus()  # else the first backward pass starts a thread for each
        else:
            exact.enter_context(exact_gpu())
        _work(plan, computes, downs, slots, pipe, device)


def begin(
    segment: Segment,
    messages: tuple[bytes, ...],
    downs: list[Segment],
    slots: list[Segment],
    pipe: Connection,
    parent: int,
    device: str,
) -> None:
    """The main function of a worker that was not forked: it reads the plan, says whether it could, and serves."""
    if device == "cpu":
        fork_safety.hide_gpus()
    try:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        plan, compute = segment.load(messages[0], copy=True, device=device)
        data, validation = segment.load(messages[1], device=device)
        plan = replace(plan, data=data, validation=validation, device=device)
        computes = [compute(level) for level in plan.levels]
    except Exception as error:  # what a plan consists of may fail to be imported in any way
        pipe.send(with_type(error))
        return
    pipe.send("")
    serve(plan, computes, downs, slots, pipe, [], parent, device)


def _work(
    plan: ClientPlan, computes: list[Compute], downs: list[Segment], slots: list[Segment], pipe: Connection, device: str
) -> None:
    broadcasts: dict[int, Broadcast] = {}  # by segment

    def read(announcement: Announcement) -> Broadcast:
        if announcement.message:
            broadcasts[announcement.segment] = downs[announcement.segment].load(announcement.message, device=device)
        return broadcasts[announcement.segment]

    while True:
        kind, content = pipe.recv()
        if kind == "losses":
            announcement, level, clients, states, on_validation = content
            work = partial(computes[level].losses, read(announcement), clients, states.__getitem__, on_validation)
            pipe.send(as_loss_error(work))
        else:
            number, message, end = content
            slot, task = slots[number], slots[number].load(message, device=device)
            down = read(task.down)
            work = partial(_task_fold, plan.levels[task.level], computes[task.level], down, task, slot)
            folded = as_client_error(work, f"round {down.round + 1}: uploads do not fold")
            pipe.send_bytes(slot.dump(folded, end)[0])


def _task_fold(plan: ClientPlan, compute: Compute, down: Broadcast, task: BlockTask, slot: Segment) -> Fold:
    """The fold of a task's block, states in their places; members run together unless one killed a worker before."""
    if compute.together and not (task.lost or task.alone):
        folded = compute.fold(down, task.clients, task.states, task.weights)
    else:
        folded = fold(plan, _results(compute, down, task, slot), task.weights, task.models)
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


DOWNS = 4  # broadcasts whose clients work at the same time
QUEUED = 2  # tasks per worker: one running, one waiting, so that it never idles
ATTEMPTS = 2  # before the last one, alone
PAUSE = 0.2  # seconds before the last attempt, in which memory may become free
WORKERS = 64  # largest number of workers; on large machines four per core
VECTORS = 8  # model-sized vectors reserved per client for its state and results
LARGE = 1 << 16  # bytes of a model from which client states are kept in the arena
ADDRESSES = 1 << 36  # largest address space of the arena, in bytes
PIPE = 1 << 16  # bytes of a message that a pipe takes while nobody reads it


@dataclass
class Worker:
    """A process and its tasks."""

    process: Any
    pipe: Connection
    tasks: deque[BlockTask] = field(default_factory=deque)
    backlog: deque[bytes] = field(default_factory=deque)  # sent once it is idle: it may be sending a long one itself
    read: dict[int, int] = field(default_factory=dict)  # by segment, the number of the broadcast that it has read


ELSEWHERE = (
    "define models, losses and parts in a module that can be imported, install cloudpickle, or use engine=serial"
)


class Processes(Engine):
    """The multi-process engine; see the module's docstring."""

    traits = Traits(devices=("cpu",))

    def __init__(
        self, plan: ClientPlan, compute: ComputeFactory, workers: int = 0, start: str = "auto",
        devices: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.start, self.message, self.devices = start, None, [gpu_name(device) for device in devices]
        reason = self.reason_to_spawn()
        transferable = reason is not None or fork_safety.sees_gpu()  # with one in sight, forks may become unsafe
        if reason and start == "auto":
            self.remark = f"engine=processes starts its workers afresh, which takes seconds, since {reason}."
        if plan.device != "cpu":
            raise ConfigError(
                "engine 'processes': its main process works on the CPU; name GPUs by engine.devices alone, or use "
                "engine=serial."
            )
        cores = count_cores()
        most = max(WORKERS, 4 * cores)
        if not 0 <= workers <= most:
            raise ConfigError(
                f"engine 'processes': workers is {workers}, but it must be at least 0 and at most {most}, since each "
                f"is a process with its own model and there are {cores} cores; 0 means one per core."
            )
        self.plan = plan
        self.compute = compute
        levels = [replace(level, device=self.devices[0]) for level in plan.levels] if self.devices else plan.levels
        self.computes = [compute(level) for level in levels]  # inherited by forked workers
        self.joint = self.computes[0].joint
        self.count = workers or len(self.devices) or cores
        numbers = plan.layout.shared_size + plan.private_size + plan.layout.buffer_size
        vectors = VECTORS * numbers * plan.layout.dtype.itemsize
        longest, slots = max(compute.longest for compute in self.computes), QUEUED * self.count
        broadcast = vectors * (1 if plan.models == 1 else longest) + (1 << 20)
        self.downs = segments(DOWNS, broadcast, transferable=transferable)
        self.broadcasts = 0  # broadcasts so far
        stateful = bool(plan.method.hooks["init_client"] or plan.private_size) and vectors >= VECTORS * LARGE
        places = plan.population.clients + slots * longest if stateful else 0
        self.arena = Arena(min(places, ADDRESSES // max(vectors, 1)), vectors, transferable)
        self.slots = segments(slots, longest * (vectors + (1 << 20)), self.arena, transferable)
        self.owners: list[list[memoryview]] = [[] for _ in range(slots)]  # of the places that a task fills
        self.suspects: deque[BlockTask] = deque()
        self.workers: list[Worker] = []
        self._fill()

    def reason_to_spawn(self) -> str | None:
        """Why workers are not forked now; None if they are."""
        if self.start == "spawn":
            return "engine.start=spawn"
        reason = "they work on GPUs" if self.devices else reason_against_forking()
        if reason and self.start == "fork":
            raise ConfigError(f"engine 'processes' cannot fork its workers: {reason}; leave out engine.start=fork.")
        return reason

    def _fill(self) -> None:
        """Start the workers that are missing: all at first, and after they were stopped."""
        numbers = range(len(self.workers), self.count)
        spawned = [self._spawn(number) for number in numbers] if numbers and self.reason_to_spawn() else []
        self.workers += [self._ready(worker) for worker in spawned]  # they get ready at the same time
        while len(self.workers) < self.count:
            self.workers.append(self._fork())

    def _fork(self) -> Worker:
        parent_end, child_end = mp.Pipe()
        # a child closes all of them: ends that it holds would never report EOF
        inherited = [parent_end, *(worker.pipe for worker in self.workers)]
        args = self.plan, self.computes, self.downs, self.slots, child_end, inherited, os.getpid()
        process: Any = mp.get_context("fork").Process(target=serve, args=args, daemon=True)
        process.start()
        child_end.close()
        return Worker(process, parent_end)

    def _spawn(self, number: int) -> Worker:
        self.message = self.message or pack_plan(self.plan, self.compute)
        parent_end, child_end = mp.Pipe()
        device = self.devices[number % len(self.devices)] if self.devices else "cpu"
        args = *self.message, self.downs, self.slots, child_end, os.getpid(), device
        process: Any = mp.get_context("spawn").Process(target=begin, args=args, daemon=True)
        with without_main():
            process.start()
        child_end.close()
        return Worker(process, parent_end)

    def _ready(self, worker: Worker) -> Worker:
        """The worker, once it has read the plan."""
        try:
            trouble = worker.pipe.recv()
        except (EOFError, OSError):
            trouble = "it ended at once"
        if trouble:
            worker.process.kill()
            raise ConfigError(f"engine 'processes' could not start a worker ({trouble}); {ELSEWHERE}.")
        return worker

    def run(self, groups: Sequence[Group]) -> Generator[tuple[int, Fold]]:
        """The folds of each group's blocks, in order; the caller owns them."""
        self._fill()
        blocks = [(n, block) for n, group in enumerate(groups) for block in self._blocks(group)]
        pending = deque(enumerate(blocks))
        free_slots, free_segments = deque(range(len(self.slots))), deque(range(len(self.downs)))
        remaining = Counter(number for number, _ in blocks)  # blocks that are not done
        announcements: dict[int, Announcement] = {}
        self.suspects.clear()
        folds: dict[int, Fold] = {}

        def assign() -> None:
            """Assign waiting blocks to workers that have room, the least busy first."""
            while pending and free_slots:
                worker = min(self.workers, key=lambda w: len(w.tasks))
                turn, (number, block) = pending[0]
                if len(worker.tasks) >= QUEUED or not (free_segments or number in announcements):
                    return
                pending.popleft()
                down, clients, states, weights, level = groups[number]
                if number not in announcements:
                    announcements[number] = self._announce(down, free_segments.popleft())
                slot = free_slots.pop()  # the most recently used one: its memory is still cached
                members = clients[block.start : block.stop].tolist()
                part = None if weights is None else weights[block.start : block.stop]
                member_states = [states(client) for client in members]
                task = BlockTask(turn, level, members, part, member_states, slot, announcements[number])
                task.models = down.places(members)
                self._give(worker, task)

        try:
            assign()
            for turn, (number, _) in enumerate(blocks):
                while turn not in folds:
                    for task, result in self._collect():
                        folds[task.number] = result
                        free_slots.append(task.slot)
                        of_group = blocks[task.number][0]
                        remaining[of_group] -= 1
                        if not remaining[of_group]:
                            free_segments.append(announcements[of_group].segment)
                    assign()
                yield number, folds.pop(turn)
        finally:
            if any(worker.tasks for worker in self.workers):  # the round was interrupted: discard its work
                self.close()

    def _blocks(self, group: Group) -> list[range]:
        """A group's blocks; what one GPU would take as a whole is shared, however many there are."""
        compute, members = self.computes[group.level], len(group.clients)
        blocks = group.blocks(compute)
        shared = self.devices and not group.down.models and len(blocks) < EVEN
        return even_blocks(members, compute.longest) if shared else blocks

    def losses(
        self, down: Broadcast, clients: np.ndarray, states: States, level: int = 0, on_validation: bool = False
    ) -> np.ndarray:
        """Losses of the received model, float64 [clients]."""
        self._fill()
        announcement = self._announce(down, 0)
        shares = []
        for share in np.array_split(clients, len(self.workers)):
            private_states = {client: self.plan.private_state(states, client) for client in share.tolist()}
            shares.append((announcement, level, share, private_states, on_validation))
        try:
            for worker, share in zip(self.workers, shares, strict=True):
                self._send_bytes(worker, pickle.dumps(("losses", share)))
            return np.concatenate([self._losses(number, share) for number, share in enumerate(shares)])
        except BaseException:  # interrupted: leave no answer in a pipe
            self.close()
            raise

    def _losses(
        self, number: int, share: tuple[Announcement, int, np.ndarray, Mapping[int, State], bool]
    ) -> np.ndarray:
        """The losses from a worker, or from the worker that replaces it."""
        for attempt in range(ATTEMPTS + 1):
            try:
                answer = self.workers[number].pipe.recv()
            except (EOFError, OSError):
                if attempt:
                    time.sleep(PAUSE)
                self._replace(number)
                self._send_bytes(self.workers[number], pickle.dumps(("losses", share)))
                continue
            if isinstance(answer, ClientError):
                raise answer
            return answer
        raise LossError(
            f"its loss of the received model cannot be computed: the worker process died {ATTEMPTS + 1} times."
        )

    def close(self) -> None:
        """Stop the workers; another round would start new ones."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.process.kill()
            worker.pipe.close()
        for worker in workers:
            worker.process.join()

    def _announce(self, down: Broadcast, segment: int) -> Announcement:
        """Put a broadcast into a segment; workers read it with their first task of it."""
        self.broadcasts += 1
        return Announcement(self.broadcasts, segment, self.downs[segment].dump(down)[0], down.round)

    def _give(self, worker: Worker, task: BlockTask) -> None:
        slot, down = self.slots[task.slot], task.down
        slot.mark = next(n for n in range(len(task.clients)) if n not in task.lost)
        places = [free for _ in task.clients if (free := self.arena.take())]
        task.places, self.owners[task.slot] = [place for place, _ in places], [owner for _, owner in places]
        has_read = worker.read.get(down.segment) == down.number
        task.down = replace(down, message=b"") if has_read else down
        worker.read[down.segment] = down.number
        message = pickle.dumps(("work", (task.slot, *slot.dump(task))))
        task.down = down  # another worker may have to do it
        if worker.tasks and (worker.backlog or len(message) > PIPE):
            worker.backlog.append(message)
        else:
            self._send_bytes(worker, message)
        worker.tasks.append(task)

    def _send_bytes(self, worker: Worker, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the worker died; _collect notices and reassigns its tasks
            worker.pipe.send_bytes(message)

    def _collect(self) -> list[tuple[BlockTask, Fold]]:
        """Wait until a worker finishes a task or dies; return the finished tasks with their folds."""
        results: list[tuple[BlockTask, Fold]] = []
        busy = {worker.pipe: number for number, worker in enumerate(self.workers) if worker.tasks}
        if not busy:
            return [self._last_attempts(self.suspects.popleft())]
        for pipe in wait(list(busy)):
            worker = self.workers[busy[pipe]]  # type: ignore[index]
            try:
                folded = self._receive(worker)
            except (EOFError, OSError):
                self._after_death(busy[pipe])  # type: ignore[index]
                continue
            results.append((worker.tasks.popleft(), folded))
            if worker.backlog and len(worker.backlog) == len(worker.tasks):
                self._send_bytes(worker, worker.backlog.popleft())
        return results

    def _receive(self, worker: Worker) -> Fold:
        """The fold of the worker's first task."""
        slot = worker.tasks[0].slot
        folded = self.slots[slot].load(worker.pipe.recv_bytes(), copy=True)
        self.owners[slot] = []
        if isinstance(folded, ClientError):
            raise folded
        return folded

    def _after_death(self, number: int) -> None:
        """Replace a dead worker and reassign its tasks; a task whose client died twice becomes a suspect."""
        tasks = self._replace(number)
        task = tasks[0]
        at = self.slots[task.slot].mark
        task.deaths[at] += 1
        if task.deaths[at] == ATTEMPTS:
            self.suspects.append(tasks.popleft())
        for task in tasks:
            self._give(self.workers[number], task)

    def _last_attempts(self, task: BlockTask) -> tuple[BlockTask, Fold]:
        """The last attempts at a task, while no other worker runs; a member on which the worker dies is left out.

        Members that are stepped together give the serial engine's bits only together, so they are tried one by one
        only if the worker dies again.
        """
        task.alone = not self.computes[task.level].together
        while len(task.lost) < len(task.clients):
            time.sleep(PAUSE)
            self._replace(0)
            self._give(self.workers[0], task)
            try:
                folded = self._receive(self.workers[0])
            except (EOFError, OSError):
                at = self.slots[task.slot].mark
                task.deaths[at] += 1
                if not task.alone:
                    task.alone, task.deaths = True, Counter(dict.fromkeys(range(len(task.clients)), 1))
                elif task.deaths[at] > ATTEMPTS:
                    reason = f"its worker process died {task.deaths[at]} times"
                    failure = Failure(task.down.round, task.clients[at], FailureKind.DIED, reason)
                    task.lost[at] = Result(task.clients[at], failure=failure)
                self.workers[0].tasks.clear()
                continue
            self.workers[0].tasks.clear()
            return task, folded
        results = (task.lost[n] for n in range(len(task.clients)))
        return task, fold(self.plan.levels[task.level], results, task.weights, task.models)

    def _replace(self, number: int) -> deque[BlockTask]:
        old = self.workers[number]
        old.pipe.close()
        old.process.kill()
        old.process.join()
        # this process may have run a backward pass since, as the evaluation of adapted models does
        self.workers[number] = self._ready(self._spawn(number)) if self.reason_to_spawn() else self._fork()
        return old.tasks


def gpu_name(device: str) -> str:
    """The name of a GPU, as PyTorch has it."""
    name = re.sub("^gpu(?=:)", "cuda", device)
    number, count = re.fullmatch(r"cuda:(\d+)", name), torch.cuda.device_count()
    if number is None or int(number[1]) >= count:
        raise ConfigError(
            f"engine 'processes': devices has {device!r}, but it must name GPUs, like [cuda:0,cuda:1], and PyTorch "
            f"sees {count}."
        )
    prepare_gpu()  # before workers, which inherit its setting, are started
    return name


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pack_plan(plan: ClientPlan, compute: ComputeFactory) -> tuple[Segment, tuple[bytes, ...]]:
    """A plan and its compute in shared memory, and the messages to read them: plan and compute, then its data.

    What was defined in the program's main module is sent whole if cloudpickle is installed.
    """
    try:
        pickler: Any = import_module("cloudpickle").Pickler
    except ImportError:
        pickler = pickle.Pickler
    small = replace(plan.without_data(), make=plan.make if plan.method.draws_models else None)
    try:
        return Segment.holding((small, compute), (plan.data, plan.validation), pickler=pickler)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # of a closure, a lambda or an open file
        raise ConfigError(
            f"engine 'processes' cannot send the plan to its workers ({first_line(error)}); {ELSEWHERE}."
        ) from error


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Start processes that do not run the program's main module again, and that Ctrl-C does not reach.

    So a program needs no ``if __name__ == "__main__"``.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    mask = getattr(signal, "pthread_sigmask", None)
    before = mask(signal.SIG_BLOCK, {signal.SIGINT}) if mask else None
    try:
        yield
    finally:
        if mask:
            mask(signal.SIG_SETMASK, before)
        sys.modules["__main__"] = main


def reason_against_forking() -> str | None:
    """The reason why workers cannot be forked from this process; None if they can."""
    if "fork" not in mp.get_all_start_methods():
        return "this system has no fork"
    if sys.platform == "darwin":
        return "on macOS a forked process may crash in system libraries that use threads"
    if not fork_safety.backward_works():
        return "PyTorch, which sees a GPU, runs no backward pass in forked processes after one in this process"
    return None

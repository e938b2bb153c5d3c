"""Workers on a Ray cluster: the nodes hold the federation, take blocks of clients and return folds, or chain them.

The plan and its data are in every node's shared memory once. Each worker is an actor with one core, or a GPU or a share
of one. Blocks are a function of the cohort alone, and folds are added in cohort order, so that sums have the order, and
the bits, of the serial engine with the same compute (between machines with the same processors and PyTorch).

Sums come back in one of two ways. ``fold``: every block's fold goes to the driver, which receives O(blocks·|θ|) bytes
per round. ``chain``: folds stay with the workers, each of which has a range of consecutive blocks, and a running total
goes from worker to worker in cohort order: O(workers·|θ|) bytes, of which |θ| reach the driver. ``auto`` chains where
that saves enough bytes.

Client states travel with blocks, or workers read and write them in files that all nodes see, and only file names and
checksums travel. A file counts once its round is committed, so that a block may be done twice.

When a worker or a node dies, its blocks are redone by others. A block on which workers died several times is done
member by member, and members on which a worker dies again are left out by name.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import numpy as np

from fedloom.base.errors import ClientError, FedLoomError, LossError
from fedloom.base.ranges import NonNegative, NonNegativeInt
from fedloom.engines import engines
from fedloom.rounds.aggregate import Fold, fold
from fedloom.rounds.engine import Compute, ComputeFactory, Engine, EngineFactory, Group, StateFiles, States, Traits
from fedloom.rounds.exchange import Broadcast, Failure, FailureKind, Result
from fedloom.rounds.plan import ClientPlan
from fedloom_apps.ray.actor import Packed, RemoteBlock, nbytes, pack, unpack
from fedloom_apps.ray.cluster import QUEUED, Cluster, Member, RemoteJob, TaskQueue

CHAINS = 10  # in a round, of which all but the last were lost with a worker or an answer
ATTEMPTS = 2  # at a block, before its members are done on their own
SAVED = 16 << 20  # bytes that a chain must save a round for ``auto`` to choose it; below, its hops cost as much
LIGHT = 2 << 20  # bytes of an answer up to which a worker does several blocks before it answers; a call costs 3 to 6 ms


class Ray(Engine):
    """The engine for Ray clusters; see the module's docstring."""

    traits = Traits(devices=("cpu",))

    def __init__(
        self,
        plan: ClientPlan,
        compute: ComputeFactory,
        workers: int = 0,
        address: str = "",
        gpus: float = 0.0,
        gather: str = "auto",
    ) -> None:
        self.plan, self.gather = plan, gather
        self.computes: list[Compute] = [compute(level) for level in plan.levels]  # for the shapes of blocks
        self.joint = self.computes[0].joint
        self.sent = 0  # bytes of blocks and their states that left the driver, broadcasts aside
        self.received = 0  # bytes that came back to it
        self.sums = 0  # bytes of a block's sums, as seen last
        self.light = False  # whether the last answer was small, see ``LIGHT``
        self.numbers = itertools.count()
        self.told = False
        self.cluster = Cluster(workers, address, gpus)
        self.cluster.died = self._tell
        try:
            cloud = import_module("ray.cloudpickle").Pickler  # for models and computes that are closures
            self.cluster.prepare(pack((plan.without_data(), compute), cloud), pack((plan.data, plan.validation)))
        except BaseException:
            self.close()
            raise

    def run(self, groups: Sequence[Group]) -> Generator[tuple[int, Fold]]:
        """The folds of each group's blocks, in order; of a chain, first those without sums, then the sums."""
        for number, group in enumerate(groups):
            work = _Blocks(self, group, self.files)
            chains = not group.down.models and self._chains(len(work.cut), group.weights)
            for result in work.chained() if chains else work.folds():
                yield number, result

    def _chains(self, blocks: int, weights: np.ndarray | None) -> bool:
        """Whether a total goes from worker to worker; where p is not known, single updates come back anyway."""
        if self.gather != "auto":
            return self.gather == "chain"
        return weights is not None and (blocks - len(self.cluster.ready) - 1) * self.sums > SAVED

    def losses(
        self, down: Broadcast, clients: np.ndarray, states: States, level: int = 0, on_validation: bool = False
    ) -> np.ndarray:
        """Losses of the received model, float64 [clients]."""
        group = Group(down, clients, partial(self.plan.private_state, states), None, level)
        return _Blocks(self, group, self.files if self.plan.has_private else None).losses(on_validation)

    def receive(self, answer: Packed) -> Any:
        """Unpack an answer, and raise it if it is an error."""
        self.received += nbytes(answer)
        result = unpack(answer)
        if isinstance(result, FedLoomError):
            raise result
        return result

    def receive_folds(self, job: RemoteJob, answer: Packed) -> dict[int, Fold]:
        """The folds in an answer, by number of the block."""
        self.light = nbytes(answer) <= LIGHT * len(job.numbers)
        return dict(zip(job.numbers, self.receive(answer), strict=True))

    def _tell(self) -> None:
        if not self.told:
            self.told = True
            warnings.warn("a worker of the cluster died; its clients were redone by others.", stacklevel=2)

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started for this run."""
        self.cluster.close()


class _Blocks:
    """The blocks of one call, and which worker has which results."""

    def __init__(self, engine: Ray, group: Group, files: Callable[[Sequence[int]], StateFiles] | None) -> None:
        down, self.clients, self.states, self.weights, self.level = group
        self.files = files
        self.engine, self.cluster, self.t = engine, engine.cluster, down.round
        self.compute = engine.computes[self.level]
        self.cut, self.models = group.blocks(self.compute), down.places(self.clients.tolist())
        self.broadcast = next(engine.numbers), engine.cluster.ray.put(pack(down))

    def block(self, number: int, members: range, keep: bool = False) -> RemoteBlock:
        """Consecutive members of the cohort, with their states or the files of these."""
        clients = self.clients[members.start : members.stop].tolist()
        part = None if self.weights is None else self.weights[members.start : members.stop]
        files = None if self.files is None else self.files(clients)
        states = [{} if files is not None and client in files.files else self.states(client) for client in clients]
        return RemoteBlock(number, self.level, clients, part, states, keep, files)

    def job(
        self, method: str, parts: Mapping[int, range], keep: bool = False, more: tuple[bool, ...] = ()
    ) -> RemoteJob:
        """The call of a worker's method for members, by number of the block; states are read when it is dealt."""

        def arguments() -> tuple[Any, ...]:
            blocks = pack([self.block(number, members, keep) for number, members in parts.items()])
            self.engine.sent += nbytes(blocks)
            return (*self.broadcast, blocks, *more)

        return RemoteJob([*parts], method, arguments)

    def fold_jobs(self, numbers: Sequence[int], workers: int, keep: bool = False) -> deque[RemoteJob]:
        """Calls for the folds of blocks; several blocks in one if answers are light."""
        cut = groups(numbers, workers) if self.engine.light else [[number] for number in numbers]
        return deque(self.job("fold", {number: self.cut[number] for number in group}, keep) for group in cut)

    def folds(self) -> Generator[Fold]:
        """Every block's fold, in order."""
        jobs = self.fold_jobs(range(len(self.cut)), len(self.cluster.living()))
        folds: dict[int, Fold] = {}
        suspects: list[int] = []
        turn = 0
        for job, _, answer in self.cluster.answers(TaskQueue(jobs), ATTEMPTS):
            if answer is None:
                suspects += job.numbers
                continue
            folds |= self.engine.receive_folds(job, answer)
            self._weigh(folds[job.numbers[0]])
            while turn in folds:
                yield folds.pop(turn)
                turn += 1
        folds |= {number: self.one_by_one(number) for number in suspects}
        yield from (folds[number] for number in sorted(folds))

    def chained(self) -> Generator[Fold]:
        """Every block's fold without sums, in order, and at last the sums over all blocks."""
        homes: dict[int, Member | Fold] = {}  # who has a block's sums: a worker, or the driver
        rest: dict[int, Fold] = {}
        total: Fold | None = None
        for _ in range(CHAINS):
            missing = [number for number in range(len(self.cut)) if not _is_there(homes.get(number))]
            suspects: list[int] = []
            for job, member, answer in self.cluster.answers(self._ranges(missing), ATTEMPTS):
                if answer is None:
                    suspects += job.numbers
                else:
                    homes |= dict.fromkeys(job.numbers, member)
                    rest |= self.engine.receive_folds(job, answer)
            for number in suspects:
                fold = self.one_by_one(number)
                homes[number], rest[number] = Fold(fold.sums), replace(fold, sums={})
            if all(map(_is_there, homes.values())) and (total := self._total(homes)) is not None:
                break
        else:
            raise ClientError(
                f"round {self.t + 1}: the sums of the blocks were lost {CHAINS} times; look at the workers and their "
                "memory, or set engine.gather=fold, and continue with resume=…"
            )
        self._weigh(total)
        yield from (rest[number] for number in range(len(self.cut)))
        yield total

    def _total(self, homes: dict[int, Member | Fold]) -> Fold | None:
        """The sums over all blocks in order; None if a worker died, after it was replaced."""
        ray, total = self.cluster.ray, None
        for _, run in itertools.groupby(sorted(homes), key=lambda number: id(homes[number])):
            numbers = list(run)
            home = homes[numbers[0]]
            if isinstance(home, Member):
                total = home.actor.chain.remote(total, numbers)
            else:
                total = self.cluster.living()[0].actor.chain.remote(total, [], pack(home.sums))
        try:
            return Fold(self.engine.receive(ray.get(total)))
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if cause is not None and not isinstance(cause, ray.exceptions.RayError):
                reason = f"{type(cause).__name__}: {cause}"
                raise ClientError(f"round {self.t + 1}: sums cannot be added: {reason}.") from None
            self.cluster.reap()
            return None

    def _ranges(self, numbers: Sequence[int]) -> TaskQueue:
        """Consecutive blocks for every worker, with about equally many samples."""
        sizes = self.engine.plan.population.sizes[self.clients]
        samples = np.array([sizes[self.cut[n].start : self.cut[n].stop].sum() for n in numbers], dtype=float)
        middle = np.cumsum(samples) - samples / 2
        members = self.cluster.living()
        places = (middle / samples.sum() * len(members)).astype(int)
        numbers_by_member: dict[Member, list[int]] = {member: [] for member in members}
        for number, place in zip(numbers, places.tolist(), strict=True):
            numbers_by_member[members[place]].append(number)
        return TaskQueue(
            deque(), {member: self.fold_jobs(part, 1, keep=True) for member, part in numbers_by_member.items()}
        )

    def _weigh(self, folded: Fold) -> None:
        self.engine.sums = sum(value.nbytes for value in folded.sums.values()) or self.engine.sums

    def one_by_one(self, number: int) -> Fold:
        """The fold of a block on which workers died; a member on which they die again is left out.

        Members that are stepped together have the same bits only together, so that they are tried together once more.
        """
        cut = self.cut[number]
        if self.compute.together:
            ((_, _, answer),) = self.cluster.answers(TaskQueue(deque([self.job("fold", {number: cut})])), 1)
            if answer is not None:
                return self.engine.receive(answer)[0]
        results: list[Result] = []
        for at, client in zip(cut, self.clients[cut.start : cut.stop].tolist(), strict=True):
            ((job, _, answer),) = self.cluster.answers(
                TaskQueue(deque([self.job("work", {number: range(at, at + 1)})])), ATTEMPTS
            )
            if answer is None:
                reason = f"its worker process or its result was lost {ATTEMPTS + job.losses} times"
                results.append(Result(client, failure=Failure(self.t, client, FailureKind.DIED, reason)))
            else:
                results += self.engine.receive(answer)[0]
        weights = None if self.weights is None else self.weights[cut.start : cut.stop]
        models = None if self.models is None else self.models[cut.start : cut.stop]
        return fold(self.engine.plan.levels[self.level], results, weights, models)

    def losses(self, on_validation: bool) -> np.ndarray:
        """Losses of the received model, float64 [clients]."""
        members = len(self.cluster.living())
        ends = [round(len(self.clients) * n / members) for n in range(members + 1)]
        cuts = enumerate(itertools.pairwise(ends))
        jobs = [self.job("losses", {n: range(*pair)}, more=(on_validation,)) for n, pair in cuts]
        results: dict[int, np.ndarray] = {}
        for job, _, answer in self.cluster.answers(TaskQueue(deque(jobs)), ATTEMPTS + 1):
            if answer is None:
                raise LossError(
                    "its loss of the received model cannot be computed: the worker or its answer was lost "
                    f"{job.losses} times."
                )
            results[job.numbers[0]] = self.engine.receive(answer)[0]
        return np.concatenate([results[number] for number in sorted(results)])


def groups(numbers: Sequence[int], workers: int) -> Iterator[Sequence[int]]:
    """Consecutive blocks that a worker does in one call: fewer and fewer, so that all workers finish together.

    >>> [len(group) for group in groups(range(4), 2)], [len(group) for group in groups(range(24), 2)]
    ([2, 2], [6, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1])
    """
    if len(numbers) <= QUEUED * workers:  # all are dealt at once
        ends = [round(len(numbers) * n / workers) for n in range(workers + 1)]
        yield from (numbers[slice(*pair)] for pair in itertools.pairwise(ends) if pair[0] < pair[1])
        return
    while numbers:
        size = max(len(numbers) // (2 * workers), 1)
        yield numbers[:size]
        numbers = numbers[size:]


def _is_there(home: Member | Fold | None) -> bool:
    return isinstance(home, Fold) or (home is not None and home.ready)


@engines.register
def ray(
    workers: NonNegativeInt = 0, address: str = "", gpus: NonNegative = 0.0,
    gather: Literal["auto", "fold", "chain"] = "auto",
) -> EngineFactory:  # fmt: skip
    """Run workers on a Ray cluster, on this machine or many, with CPUs or GPUs; results equal ``serial`` bitwise.

    Args:
        workers: number of workers, of one core each; 0 means as many as there is room for.
        address: ``host:port`` of the cluster to join, or ``auto`` for the one that runs on this machine; empty starts
            one for the run.
        gpus: GPUs, or the share of one, per worker; 0 for work on the CPU.
        gather: how sums come back: every block's ``fold`` to the driver, a ``chain`` of running totals from worker to
            worker, or ``auto``, which chooses by bytes.
    """
    return EngineFactory(partial(Ray, workers=workers, address=address, gpus=gpus, gather=gather), Ray.traits)

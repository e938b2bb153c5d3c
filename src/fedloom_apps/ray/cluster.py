"""A Ray cluster, started on this machine or joined, with one actor per worker.

An actor that dies is replaced, if not on its node then wherever there is room. A replacement gets no work before it is
ready, so that work continues with the others; a node that comes back to the cluster is used again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from fedloom.base.errors import ClientError, ConfigError, first_line, import_extra
from fedloom_apps.ray.actor import Actor, Packed

QUEUED = 2  # jobs per worker: one running, one waiting, so that it never idles
REACH = 5.0  # seconds in which the address of a cluster must answer
START = 300.0  # seconds in which a worker must be ready
STARTS = 10  # workers that die one after the other before they are ready
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns about a change to come otherwise
    "RAY_worker_niceness": "0",  # Ray's 15 would stop the run for whatever else the machine does
}


@dataclass(eq=False)
class Member:
    """A worker."""

    actor: Any
    joining: Any
    ready: bool = False
    jobs: dict[Any, RemoteJob] = field(default_factory=dict)


@dataclass(eq=False)
class RemoteJob:
    """A call of an actor's method."""

    numbers: Sequence[int]
    method: str
    arguments: Callable[[], tuple[Any, ...]]
    losses: int = 0  # of its worker, or of its answer


class TaskQueue:
    """The distribution of jobs to workers: each has its own range, and helps out where most jobs are left.

    >>> one, two = Member(None, None), Member(None, None)
    >>> queue = TaskQueue(deque(), {one: deque("ab"), two: deque("c")})
    >>> [queue.take(two), queue.take(two), queue.take(one), queue.take(one)]
    ['c', 'b', 'a', None]
    """

    def __init__(self, common: deque[Any], ranges: dict[Member, deque[Any]] | None = None) -> None:
        self.common, self.ranges = common, ranges or {}

    def take(self, member: Member) -> Any:
        """The next job for a member: of its own range, of the common ones, or the last one of the longest range."""
        for jobs in (self.ranges.get(member), self.common):
            if jobs:
                return jobs.popleft()
        longest = max(self.ranges.values(), key=len, default=None)
        return longest.pop() if longest else None

    def __bool__(self) -> bool:
        return bool(self.common or any(self.ranges.values()))


class Cluster:
    """Workers on a Ray cluster; see the module's docstring."""

    def __init__(self, workers: int = 0, address: str = "", gpus: float = 0.0) -> None:
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        self.ray: Any = import_extra("ray", "ray", "engine 'ray'")
        self.address, self.gpus = address, gpus
        self.device = "cuda" if gpus else "cpu"  # of local work
        self.folder = ""  # of the files of a cluster started here
        self.members: list[Member] = []
        self.prepared: tuple[Any, ...] = ()
        self.started = 0  # workers that died before they were ready, since the last that became ready
        self.died: Callable[[], None] = lambda: None
        self.owned = not self.ray.is_initialized()
        try:
            if self.owned:
                self._connect(workers)
            self.count = self._room(workers)
            self.actors = self.ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(Actor)
        except BaseException:
            self.close()
            raise

    def _connect(self, workers: int) -> None:
        """Start a cluster or join one."""
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
        if self.address:
            _reach(self.address)
            options |= {"address": self.address}
        else:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            if workers > cores:
                raise ConfigError(
                    f"engine 'ray': workers is {workers}, but this machine has {cores} cores; lower it, or join a "
                    "cluster with engine.address=…."
                )
            self.folder = tempfile.mkdtemp(prefix="fedloom-", dir="/tmp")  # the paths of its sockets must be short
            options |= {"num_cpus": workers or cores, "include_dashboard": False, "_temp_dir": self.folder}
        with contextlib.suppress(ImportError):
            inside: Any = import_module("ray._private.worker")
            inside.print_to_stdstream = _discard  # would write on the terminal what nodes report
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(**options)
        except Exception as error:
            what = f"join the cluster at {self.address!r}" if self.address else "start a cluster on this machine"
            raise ConfigError(f"engine 'ray' cannot {what}: {first_line(error)}.") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray's own leaves without a checkpoint

    def _room(self, workers: int) -> int:
        """The number of workers, if there is room for them."""
        where = f"the cluster at {self.address!r}" if self.address else "the cluster"
        needs = "one CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "") + " each"
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        places = sum(map(self._places, nodes))
        count = workers or places
        if count > places or not places:
            raise ConfigError(
                f"engine 'ray': workers is {count or 1}, but {where} has room for {places}, with {needs}; lower it, or "
                "add nodes."
            )
        free = self._places(self.ray.available_resources()) if self.address or not self.owned else places
        if count > free:
            raise ConfigError(
                f"engine 'ray': workers is {count}, but {where} has room for {free} now, with {needs}; lower it with "
                "engine.workers=…, or wait until others are done."
            )
        return count

    def _places(self, resources: dict[str, float]) -> int:
        """The number of workers that fit into resources."""
        cpus = int(resources.get("CPU", 0))
        return min(cpus, int(resources.get("GPU", 0) / self.gpus + 1e-9)) if self.gpus else cpus

    def prepare(self, plan: Packed, data: Packed) -> None:
        """Put the plan and its data into shared memory, and start the workers; returns when all are ready."""
        self.prepared = self.ray.put(plan), self.ray.put(data)
        self.members = [self._start() for _ in range(self.count)]
        while any(not member.ready for member in self.members):
            self.settle(START)

    def _start(self) -> Member:
        actor = self.actors.remote(sys.path, self.device)
        return Member(actor, actor.prepare.remote(*self.prepared))

    @property
    def ready(self) -> list[Member]:
        """The members that take work."""
        return [member for member in self.members if member.ready]

    def living(self) -> list[Member]:
        """The members that take work; waits until there is one."""
        while not self.ready:
            self.settle(START)
        return self.ready

    def settle(self, timeout: float = 0.0) -> None:
        """Admit the members that have become ready; wait for one of them if there is a timeout."""
        joining = {member.joining: member for member in self.members if not member.ready}
        if not joining:
            return
        ready, _ = self.ray.wait(list(joining), num_returns=1 if timeout else len(joining), timeout=timeout)
        if timeout and not ready:
            raise ClientError(f"engine 'ray': no worker was ready within {timeout:.0f} s.")
        for ref in ready:
            try:
                self.ray.get(ref)
            except self.ray.exceptions.RayTaskError as error:
                reason = f"{type(error.cause).__name__}: {error.cause}"
                raise ClientError(f"engine 'ray': a worker cannot start ({reason}).", str(error)) from None
            except self.ray.exceptions.RayError as error:
                self.started += 1
                if self.started >= STARTS:
                    raise ClientError(f"engine 'ray': {STARTS} workers died while they started.", str(error)) from None
                self.replace(joining[ref])
            else:
                joining[ref].ready, self.started = True, 0

    def replace(self, member: Member) -> list[RemoteJob]:
        """Start another worker in place of one that died; returns its unfinished jobs, the oldest first."""
        self._kill(member)
        if member in self.members:
            self.members[self.members.index(member)] = self._start()
        jobs = list(member.jobs.values())
        member.ready, member.jobs = False, {}
        return jobs

    def answers(self, queue: TaskQueue, limit: int) -> Generator[tuple[RemoteJob, Member, Packed | None]]:
        """Deal the jobs and yield them with their answers, as they are done.

        A job whose worker dies, or whose answer is lost, is dealt again; after ``limit`` losses it is yielded without
        an answer. Jobs that are not done when the generator is closed are forgotten.
        """
        try:
            while queue or any(member.jobs for member in self.members):
                self.settle()
                self.living()
                self._assign(queue)
                flying = {ref: member for member in self.ready for ref in member.jobs}
                joining = [member.joining for member in self.members if not member.ready]
                for ref in self.ray.wait([*flying, *joining], num_returns=1)[0]:
                    if ref in flying and ref in flying[ref].jobs:
                        yield from self._answer(flying[ref], ref, queue, limit)
        finally:
            for member in self.members:
                member.jobs.clear()

    def _assign(self, queue: TaskQueue) -> None:
        """Give jobs to the members that have room, one each in turn."""
        for room in range(QUEUED):
            free = [member for member in self.ready if len(member.jobs) <= room]
            dealt = [(member, job, job.arguments()) for member in free if (job := queue.take(member)) is not None]
            for member, job, arguments in dealt:  # calls come last: a worker that begins may take the driver's core
                member.jobs[getattr(member.actor, job.method).remote(*arguments)] = job

    def _answer(
        self, member: Member, ref: Any, queue: TaskQueue, limit: int
    ) -> Generator[tuple[RemoteJob, Member, Packed | None]]:
        """The answer to a job, which is dealt again if its worker died or the answer was lost."""
        errors = self.ray.exceptions
        try:
            answer = self.ray.get(ref)
        except errors.RayTaskError as error:
            reason = f"{type(error.cause).__name__}: {error.cause}"
            raise ClientError(f"engine 'ray': a worker failed ({reason}).", str(error)) from None
        except errors.RayError as error:
            if isinstance(error, errors.RayActorError):
                job, *remaining = self.replace(member)
                self.died()
                queue.common.extendleft(reversed(remaining))
            else:  # the answer was lost with its node, or found no room
                job = member.jobs.pop(ref)
            job.losses += 1
            if job.losses >= limit:
                yield job, member, None
            else:
                queue.common.appendleft(job)
        else:
            yield member.jobs.pop(ref), member, answer

    def reap(self) -> None:
        """Replace the members that do not answer."""
        alive = {member: member.actor.alive.remote() for member in self.ready}
        for member, ref in alive.items():
            try:
                self.ray.get(ref, timeout=START)
            except self.ray.exceptions.RayError:
                self.replace(member)
                self.died()

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started for this run."""
        members, self.members = self.members, []
        for member in members:
            self._kill(member)
        if self.owned:
            self.ray.shutdown()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _kill(self, member: Member) -> None:
        with contextlib.suppress(Exception):  # it is dead already
            self.ray.kill(member.actor)


def _discard(data: Any, ignore_prefix: bool = False) -> None:
    """Print nothing."""


def _reach(address: str) -> None:
    """Raise ``ConfigError`` if nothing answers at an address, for which Ray would wait."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError(
            f"engine 'ray': address is {address!r}, but it must be host:port, like 10.0.0.1:6379, or auto."
        )
    try:
        socket.create_connection((host, int(port)), REACH).close()
    except OSError as error:
        raise ConfigError(
            f"engine 'ray': nothing answers at {address} ({error.strerror or error}); start a cluster there with "
            f"ray start --head --port={port}."
        ) from error

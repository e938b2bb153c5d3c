"""Workers that are killed during their work."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from pickle import Pickler
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deaths import child
from helpers.federations import SIZES, classes
from helpers.marks import kinds
from helpers.networks import linear_layers, tanh_net
from helpers.runs import assert_same_run, assert_same_state, experiment, go
from helpers.trouble import MARK, guarded_net, stumble, with_marked_client, worker_death
from torch import Tensor, nn

from fedloom import methods
from fedloom.base.errors import ClientError, ConfigError, LossError
from fedloom.base.tree import Tree
from fedloom.compute import computes
from fedloom.compute.live import Live
from fedloom.config import build, resolve
from fedloom.core.context import Context, Model
from fedloom.core.local import Local
from fedloom.core.parts import ClientEnd, Drift
from fedloom.engines import Serial, engines
from fedloom.engines.processes import Processes, Worker, pack_plan
from fedloom.engines.shared import Segment, TransferableMemory
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, run
from fedloom.rounds.aggregate import blocks
from fedloom.rounds.engine import Engine, Group, States
from fedloom.rounds.exchange import Broadcast, Result
from fedloom.rounds.round import federated_round

VICTIM = 2
MODULE = import_module("fedloom.engines.processes")  # a factory has the same name


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper"])
def test_clients_of_a_killed_worker_are_redone(name: str, workers: int, tmp_path: Path) -> None:
    diary = tmp_path / "deaths"
    settings = {"federation": with_marked_client(VICTIM), "model": guarded_net(worker_death(1, diary))}
    reference = go(name, **settings)
    assert not diary.exists()
    result = go(name, engine="processes", engine_settings={"workers": workers}, **settings)
    assert diary.read_text() == "x", "no worker died, so nothing was tested"
    assert not result.failures
    assert_same_run(reference, result)


@pytest.mark.parametrize("name", ["fedavg", "feddyn"])
@pytest.mark.exhaustive
def test_a_client_that_always_kills_its_worker_is_named_and_left_out(name: str, tmp_path: Path) -> None:
    diary = tmp_path / "deaths"
    settings = {"federation": with_marked_client(VICTIM), "model": guarded_net(worker_death(10**6, diary)), "rounds": 2}
    result = go(name, engine="processes", engine_settings={"workers": 2}, **settings)
    assert [(f.round, f.client) for f in result.failures] == [(0, VICTIM), (1, VICTIM)]
    assert str(result.failures[0]) == f"round 1, client {VICTIM}: its worker process died 3 times"
    assert diary.read_text() == 6 * "x"
    assert [record["failures"] for record in result.history] == [1, 1]
    assert VICTIM not in dict(result.snapshot.store)
    assert (len(result.snapshot.store) == len(SIZES) - 1) == (name == "feddyn")
    left = {record["comm/up_params"] for record in result.history}
    assert left == {27 * (len(SIZES) - 1)}


def test_a_worker_killed_between_rounds_is_replaced() -> None:
    plan = FederatedTask(experiment("scaffold")).plan
    engine = Processes(plan, Live, workers=2)
    server = FederatedTask(experiment("scaffold")).state.server
    down, cohort = server.broadcast(plan), np.arange(len(SIZES))
    state = {"drift": {"c": server.parts["drift"]["c"]}}

    def updates() -> list[bytes]:
        folds = engine.run([Group(down, cohort, lambda i: state, np.ones(len(SIZES)))])
        return [fold.sums["update"].numpy().tobytes() for _, fold in folds]

    try:
        before = updates()
        for worker in engine.workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        time.sleep(0.05)
        assert updates() == before
        os.kill(engine.workers[0].process.pid, signal.SIGKILL)
        losses = engine.losses(down, cohort, lambda i: state)
        assert losses.shape == (len(SIZES),)
        assert np.isfinite(losses).all()
    finally:
        engine.close()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("sizes", [SIZES, tuple(2 + i % 3 for i in range(110))], ids=["alone", "in a block"])
def test_a_worker_killed_from_outside_is_not_its_clients_failure(
    times: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """Twice at the same client, as when memory is short while others work: by itself it does its work."""
    diary = tmp_path / "deaths"
    settings = {
        "federation": with_marked_client(VICTIM, MARK, sizes),
        "model": guarded_net(worker_death(times, diary)),
        "rounds": 1,
    }
    reference = go("scaffold", **settings)
    result = go("scaffold", engine="processes", engine_settings={"workers": 2}, **settings)
    assert diary.read_text() == times * "x", "no worker died, so nothing was tested"
    assert not result.failures
    assert_same_run(reference, result)


@dataclass(frozen=True)
class Hoarding(Drift):
    """Keeps more of a client than there is shared memory for, so that it goes through pipes."""

    def init_client(self, theta: Tensor) -> Tree:
        return {"memory": theta.new_zeros(1_500_000)}

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd({"memory": ctx.state["memory"] + 1}, {}, update)


def test_states_that_fill_pipes_in_both_directions_block_no_worker() -> None:
    """A worker that is about to send a long answer does not read its next task."""

    def late(number: int, frame: object) -> None:
        raise AssertionError("the engine and its workers wait for each other")

    method = replace(methods.make("fedavg"), name="hoarding", drift=Hoarding())
    settings = {"federation": classes(sizes=(3,) * 12), "rounds": 2}
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        result = go(method, engine="processes", engine_settings={"workers": 1}, **settings)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert_same_run(go(method, **settings), result)


def test_without_shared_memory_everything_goes_through_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch systems limit address space (ulimit -v), or grant no more of it than there is memory."""
    settings = {"federation": classes(sizes=(3,) * 12), "rounds": 2}
    expected, granted = go("scaffold", **settings), mmap.mmap

    def limited_mmap(handle: int, size: int, *flags: int) -> mmap.mmap:
        if size > mmap.PAGESIZE:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return granted(handle, size, *flags)

    monkeypatch.setattr(mmap, "mmap", limited_mmap)
    assert_same_run(expected, go("scaffold", engine="processes", engine_settings={"workers": 2}, **settings))


class Deadly(Live):
    """Kills its process when losses are asked for, the first so many times."""

    act: Callable[[], None]

    def losses(self, down: Broadcast, clients: np.ndarray, states: States, on_validation: bool = False) -> np.ndarray:
        self.act()
        return super().losses(down, clients, states, on_validation)


@pytest.mark.parametrize("deaths", [2, 10**6])
def test_workers_that_die_over_losses(deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deadly, "act", staticmethod(worker_death(deaths, tmp_path / "deaths")), raising=False)
    task = FederatedTask(experiment("scaffold"))
    plan, down = task.plan, task.state.server.broadcast(task.plan)
    engine, cohort = Processes(plan, Deadly, workers=1), np.arange(len(SIZES))
    try:
        if deaths == 2:
            expected = Serial(plan, Live).losses(down, cohort, lambda i: {})
            np.testing.assert_array_equal(engine.losses(down, cohort, lambda i: {}), expected)
        else:
            sentence = r"^its loss of the received model cannot be computed: the worker process died 3 times\.$"
            with pytest.raises(LossError, match=sentence):
                engine.losses(down, cohort, lambda i: {})
    finally:
        engine.close()


def test_an_error_over_losses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deadly, "act", staticmethod(stumble), raising=False)
    task = FederatedTask(experiment())
    engine = Processes(task.plan, Deadly, workers=1)
    try:
        with pytest.raises(LossError, match="model cannot be computed: RuntimeError: the sample is cursed"):
            engine.losses(task.state.server.broadcast(task.plan), np.arange(2), lambda i: {})
    finally:
        engine.close()


@pytest.mark.parametrize("with_signal", [True, False], ids=["signal", "end of the pipe"])
def test_workers_die_with_their_parent(with_signal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system sends no signal for it, they see the end of their pipe: no sibling holds the other end."""
    if not with_signal:
        monkeypatch.setattr("fedloom.engines.processes.die_with_parent", lambda parent: None)

    def parent() -> None:
        task = FederatedTask(experiment())
        engine = Processes(task.plan, Live, workers=3)
        engine._replace(0)
        (tmp_path / "part").write_text(" ".join(str(worker.process.pid) for worker in engine.workers))
        (tmp_path / "part").rename(tmp_path / "pids")
        os.kill(os.getpid(), signal.SIGKILL)

    assert child(parent) == -signal.SIGKILL
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in pids if alive(pid)], "workers outlived their parent"


def alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("lack", ["no fork", "macOS"])
def test_where_processes_cannot_be_forked(lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are started afresh, by ``auto`` for long runs alone, and refused in a sentence if they are to be forked."""
    started: list[Processes] = []
    monkeypatch.setattr(Processes, "_spawn", lambda engine, number: started.append(engine) or Worker(None, Pipe("")))  # type: ignore[arg-type]
    monkeypatch.setattr(Processes, "close", lambda engine: None)
    plan = FederatedTask(experiment(rounds=10**6)).plan
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    if lack == "macOS":
        monkeypatch.setattr(MODULE.sys, "platform", "darwin")
    else:
        monkeypatch.setattr(MODULE.mp, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ConfigError, match=r"engine 'processes' cannot fork its workers: .*; leave out engine\.start"):
        Processes(plan, Live, start="fork")
    engine = engines.make("auto")(plan, Live)
    assert started == [engine] * 4
    assert "starts its workers afresh, which takes seconds, since" in engine.remark
    assert isinstance(engines.make("auto")(replace(plan, rounds=100), Live), Serial)
    monkeypatch.setattr(Processes, "_spawn", lambda engine, number: Worker(Killed(), Pipe("no module")))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"could not start a worker \(no module\); define models"):
        Processes(plan, Live)
    assert isinstance(engines.make("auto")(plan, Live), Serial)


@dataclass
class Pipe:
    """A pipe with a message of a worker that has started, or could not."""

    message: str

    def recv(self) -> str:
        return self.message


class Killed:
    def kill(self) -> None: ...


def test_what_cannot_be_sent_to_workers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # which may be there, and would send it
    plan = FederatedTask(experiment("superfed_mm")).plan
    with pytest.raises(ConfigError, match=r"engine 'processes' cannot send the plan to its workers \(.*\); define"):
        pack_plan(replace(plan, make=lambda: nn.Linear(2, 3)), Live)
    assert pack_plan(FederatedTask(build(resolve(["method=superfed_mm", "clients=2"]))).plan, computes.make("auto"))


def test_a_message_and_its_tensors_reach_another_process_as_they_are() -> None:
    """What is handed over is a descriptor; the memory has no name that could be left behind."""
    layer = nn.Linear(2, 2, dtype=torch.float64)
    segment, (first, second) = Segment.holding({"net": layer, "n": 1}, [torch.arange(3), None], pickler=Pickler)
    peer = Segment.__new__(Segment)
    peer.memory = TransferableMemory.at(os.dup(segment.memory.handle), len(segment.memory))  # type: ignore[attr-defined]
    peer.arena = segment.arena
    net = peer.load(first, copy=True)["net"]
    assert isinstance(net.weight, nn.Parameter)
    assert torch.equal(net.weight, layer.weight)
    x = peer.load(second)[0]
    segment.load(second)[0][1] = 7
    assert x.tolist() == [0, 7, 2], "the other process does not see this one's memory"


@pytest.mark.exhaustive
def test_workers_that_are_started_afresh_have_the_bits_of_forked_ones_and_end_with_their_parent(tmp_path: Path) -> None:
    plan = FederatedTask(experiment("scaffold")).plan
    server, cohort = FederatedTask(experiment("scaffold")).state.server, np.arange(len(SIZES))
    down, state = server.broadcast(plan), {"drift": {"c": server.parts["drift"]["c"]}}

    def updates(engine: Engine) -> list[bytes]:
        folds = engine.run([Group(down, cohort, lambda i: state, np.ones(len(SIZES)))])
        return [fold.sums["update"].numpy().tobytes() for _, fold in folds]

    def parent() -> None:
        engine = Processes(plan, Live, workers=1, start="spawn")
        are_same = updates(engine) == updates(Serial(plan, Live))
        os.kill(engine.workers[0].process.pid, signal.SIGKILL)
        are_same = are_same and updates(engine) == updates(Serial(plan, Live))
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        (tmp_path / "result").write_text(f"{are_same} {children}")
        os.kill(os.getpid(), signal.SIGKILL)

    before = {*Path("/dev/shm").iterdir()}
    assert child(parent) == -signal.SIGKILL
    are_same, *pids = (tmp_path / "result").read_text().split()
    assert are_same == "True"
    assert len(pids) == 2, "a worker and Python's tracker of resources"
    deadline = time.monotonic() + 20
    while any(alive(int(pid)) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in pids if alive(int(pid))]
    assert not [path for path in {*Path("/dev/shm").iterdir()} - before if "fedloom" in path.name or "psm" in path.name]


MANY = tuple(2 + i % 3 for i in range(110))  # sizes: such a cohort is cut into blocks of six and less
IN_BLOCKS = {"model": tanh_net, "local": Local(batch_size=2), "rounds": 2, "evaluation": Evaluation(what=("average",))}


@pytest.mark.parametrize("method", kinds(["fedavg", "scaffold", "fedper", "q_ffl", "fedmgda"], ["scaffold", "fedmgda"]))
def test_blocks_of_several_clients_have_the_bits_of_serial(method: str) -> None:
    """Clients drop out and one diverges in the midst of its block; folds, states and models agree all the same."""
    settings = IN_BLOCKS | {
        "federation": with_marked_client(VICTIM, 1e160, MANY),
        "model": linear_layers,
        "drop_rate": 0.1,
    }
    assert len(blocks(len(MANY))[0]) == 6
    reference = go(method, **settings)
    assert VICTIM in {f.client for f in reference.failures}
    assert_same_run(reference, go(method, engine="processes", engine_settings={"workers": 3}, **settings))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_block_is_redone_when_its_worker_dies(name: str, workers: int, tmp_path: Path) -> None:
    diary = tmp_path / "deaths"
    settings = IN_BLOCKS | {
        "federation": with_marked_client(VICTIM, MARK, MANY),
        "model": guarded_net(worker_death(1, diary)),
    }
    reference = go(name, **settings)
    result = go(name, engine="processes", engine_settings={"workers": workers}, **settings)
    assert diary.read_text() == "x", "no worker died, so nothing was tested"
    assert not result.failures
    assert_same_run(reference, result)


@pytest.mark.exhaustive
def test_the_others_of_a_block_count_when_one_always_kills_its_worker(tmp_path: Path) -> None:
    """The run is the one in which that client raises an error instead."""
    diary = tmp_path / "deaths"
    settings = IN_BLOCKS | {"federation": with_marked_client(VICTIM, MARK, MANY)}
    reference = go("scaffold", model=guarded_net(stumble), **{k: v for k, v in settings.items() if k != "model"})
    settings |= {"model": guarded_net(worker_death(10**6, diary))}
    result = go("scaffold", engine="processes", engine_settings={"workers": 2}, **settings)
    assert [str(f) for f in result.failures] == [
        f"round {t}, client {VICTIM}: its worker process died 3 times" for t in (1, 2)
    ]
    assert diary.read_text() == 6 * "x"
    assert_same_run(reference, result)


@pytest.mark.exhaustive
def test_two_clients_of_a_block_that_kill_their_workers_are_both_named(tmp_path: Path) -> None:
    diary = tmp_path / "deaths"
    federation = with_marked_client(VICTIM, MARK, MANY)
    federation.train.arrays.x[torch.from_numpy(federation.train.index[VICTIM + 2]), 0] = MARK
    settings = IN_BLOCKS | {"federation": federation, "model": guarded_net(worker_death(10**6, diary)), "rounds": 1}
    result = go(engine="processes", engine_settings={"workers": 2}, **settings)
    assert [f.client for f in result.failures] == [VICTIM, VICTIM + 2]
    assert diary.read_text() == 6 * "x"


def test_a_round_that_is_given_up_leaves_nothing_to_the_next() -> None:
    task = FederatedTask(experiment("scaffold", federation=classes(MANY)))
    engine, server, cohort = Processes(task.plan, Live, workers=2), task.state.server, np.arange(len(MANY))

    def go_round() -> bytes:
        moved, _ = federated_round(task.plan, engine, server, task.state.store, cohort)
        return moved.theta.numpy().tobytes()

    def interrupt(result: Result, received: Any) -> None:
        raise KeyboardInterrupt

    try:
        before, workers = go_round(), [worker.process for worker in engine.workers]
        with pytest.raises(KeyboardInterrupt):
            federated_round(task.plan, engine, server, task.state.store, cohort, observe=interrupt)
        assert not any(process.is_alive() for process in workers), "a worker goes on with a round that is over"
        assert go_round() == before
    finally:
        engine.close()


class Slow(Callback):
    """Leaves time for being killed."""

    def on_round(self, record: Mapping[str, Any]) -> None:
        time.sleep(0.03)


@pytest.mark.exhaustive
def test_workers_killed_at_random_moments_change_no_bit() -> None:
    settings = {"rounds": 12, "cohort": 5, "seed": 9}
    reference = go("scaffold", **settings)
    parallel = experiment("scaffold", engine="processes", engine_settings={"workers": 2}, **settings)
    killed: list[int] = []
    over = threading.Event()

    def hunt() -> None:
        draw = np.random.default_rng(0)
        while not over.wait(float(draw.uniform(0.01, 0.06))):
            children = [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
            if children:
                victim = children[int(draw.integers(len(children)))]
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
            if len(killed) >= 5:
                return

    thread = threading.Thread(target=hunt)
    thread.start()
    try:
        result = run(parallel, callbacks=[Slow()])
    finally:
        over.set()
        thread.join()
    assert killed, "nobody was killed, so nothing was tested"
    if not result.failures:  # the same client's workers may have died three times
        assert_same_state(reference.snapshot, result.snapshot)
    assert all("died 3 times" in f.reason for f in result.failures)


def test_an_error_in_every_worker_ends_the_run_with_a_sentence() -> None:
    federation = with_marked_client(0)
    federation.train.arrays.x[:, 0] = MARK
    with pytest.raises(
        ClientError, match=r"round 1, client 0: failed in step 1 of 4: RuntimeError: the sample is cursed"
    ):
        run(experiment(federation=federation, model=guarded_net(stumble), engine="processes"))

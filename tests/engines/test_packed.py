"""Messages between machines, and the worker that receives them, tested without a cluster."""

from __future__ import annotations

import sys
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.federations import with_validation
from helpers.runs import experiment, go
from torch import nn

from fedloom import methods
from fedloom.base.errors import ClientError, ConfigError, LossError
from fedloom.compute.live import Live
from fedloom.engines import Serial
from fedloom.experiment.federated import FederatedTask
from fedloom.rounds.aggregate import Fold, blocks
from fedloom.rounds.cohort import client_states
from fedloom.rounds.engine import Group
from fedloom_apps.ray.actor import LARGE, Actor, RemoteBlock, nbytes, pack, unpack
from fedloom_apps.ray.cluster import Cluster, Member, RemoteJob, TaskQueue
from fedloom_apps.ray.engine import _Blocks


def test_content_arrives_aligned_wherever_it_lay() -> None:
    """A view that begins anywhere arrives in memory of its own, as tensors of PyTorch's allocator do."""
    store = torch.arange(50.0)
    sent = {"a": store[3:40], "b": [store[::7], torch.zeros(0), torch.tensor(True)], "n": np.arange(5)}
    message, arrays = pack(sent)
    shifted = []
    for array in arrays:  # as a transport may deliver it
        raw = np.zeros(array.nbytes + 1, np.uint8)
        raw[1:] = np.frombuffer(array.tobytes(), np.uint8)
        shifted.append(np.frombuffer(raw.data, array.dtype, array.size, 1).reshape(array.shape))
    received = unpack((message, shifted))
    assert torch.equal(received["a"], sent["a"])
    assert torch.equal(received["b"][0], sent["b"][0])
    assert received["b"][2].dtype is torch.bool
    assert bool(received["b"][2])
    assert received["n"].tolist() == [0, 1, 2, 3, 4]
    assert not received["a"].data_ptr() % 64
    received["a"].add_(1)
    assert store[3] == 3, "a message shares no memory with what was sent"


def test_a_tensor_is_sent_once_and_a_module_keeps_its_parameters() -> None:
    x, model = torch.ones(1000), nn.Linear(2, 2)
    assert nbytes(pack([x, x, {"again": x}])) < 5000
    (received,) = unpack(pack([model]))
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in received.parameters())
    assert torch.equal(received.weight, model.weight)


def test_large_data_are_used_in_place() -> None:
    x = torch.arange(LARGE // 4, dtype=torch.float32)
    message, arrays = pack([x, x[:10]])
    large, small = unpack((message, arrays), in_place=True)
    assert large.data_ptr() == arrays[0].ctypes.data
    assert small.data_ptr() != arrays[1].ctypes.data


@pytest.mark.parametrize("name", ["feddyn", "scaffold", "fedper"])
def test_a_chain_of_workers_has_the_sums_of_folds_in_order(name: str) -> None:
    """Blocks lie with two workers by turns; a chain that begins again finds them as they were."""
    task = FederatedTask(experiment(name))
    plan, server = task.plan, task.state.server
    down, states = server.broadcast(plan), client_states(plan, server.theta, task.state.store)
    cohort, weights = np.arange(6), np.linspace(0.1, 0.3, 6)
    expected = Fold()
    for _, block_fold in Serial(plan, Live).run([Group(down, cohort, states, weights)]):
        expected.merge(block_fold)
    workers = Actor([]), Actor([])
    for worker in workers:
        worker.plan, worker.computes = plan, [Live(plan)]
    for number, cut in enumerate(blocks(6)):
        members = cohort[cut.start : cut.stop].tolist()
        block = RemoteBlock(number, 0, members, weights[cut.start : cut.stop], [states(c) for c in members], keep=True)
        (rest,) = unpack(workers[number % 2].fold(0, pack(down), pack([block])))
        assert not rest.sums
        assert [result.client for result in rest.results] == members
    for _ in range(2):
        total = None
        for number in range(len(blocks(6))):
            total = workers[number % 2].chain(total, [number])
        sums = unpack(total)  # type: ignore[arg-type]
        assert sums.keys() == expected.sums.keys()
        assert all(torch.equal(sums[slot], value) for slot, value in expected.sums.items())


def test_a_worker_answers_faults_in_a_part_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    task = FederatedTask(experiment())
    worker = Actor([])
    worker.plan, worker.computes = task.plan, [Live(task.plan)]

    def stumble(*_: object) -> None:
        raise RuntimeError("the sample is cursed")

    monkeypatch.setattr(worker.computes[0], "losses", stumble)
    down = pack(task.state.server.broadcast(task.plan))
    error = unpack(worker.losses(0, down, pack([RemoteBlock(0, 0, [1], None, [{}])])))
    assert isinstance(error, LossError)
    assert str(error) == "its loss of the received model cannot be computed: RuntimeError: the sample is cursed."


def test_a_worker_knows_losses_on_training_and_on_validation_samples() -> None:
    task = FederatedTask(experiment(methods.term(response="validation"), federation=with_validation(shift=1.0)))
    plan, down = task.plan, task.state.server.broadcast(task.plan)
    worker = Actor([])
    worker.plan, worker.computes = plan, [Live(plan)]
    losses = []
    for on_validation in (False, True):
        (answer,) = unpack(worker.losses(0, pack(down), pack([RemoteBlock(0, 0, [1], None, [{}])]), on_validation))
        np.testing.assert_array_equal(
            answer, Serial(plan, Live).losses(down, np.array([1]), dict, on_validation=on_validation)
        )
        losses.append(float(answer[0]))
    assert losses[0] != losses[1]


class WorkerError(Exception):
    """As Ray's errors of workers that died."""


class FullError(WorkerError):
    """As Ray's error of an object store without room."""


def without_answers(error: type[Exception]) -> Cluster:
    """A cluster of one worker, whose answers are all lost with an error."""

    def lost(ref: object) -> None:
        raise error

    def wait(refs: list[object], **_: object) -> tuple[list[object], list[object]]:
        return refs[:1], refs[1:]

    cluster, method = Cluster.__new__(Cluster), SimpleNamespace(remote=lambda: object())
    died = type("ActorDiedError", (WorkerError,), {})
    errors = SimpleNamespace(RayError=WorkerError, RayTaskError=(), RayActorError=died)
    cluster.ray = SimpleNamespace(exceptions=errors, get=lost, wait=wait)
    cluster.members = [Member(SimpleNamespace(fold=method), None, ready=True)]
    return cluster


def test_an_answer_that_finds_no_room_is_not_asked_for_without_end() -> None:
    cluster, job = without_answers(FullError), RemoteJob([0], "fold", tuple)
    ((lost_job, _, answer),) = cluster.answers(TaskQueue(deque([job])), 3)
    assert lost_job is job
    assert answer is None
    assert job.losses == 3


def test_sums_that_are_lost_each_time_end_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    work = _Blocks.__new__(_Blocks)
    work.cut, work.t, totals = [range(1)], 0, []
    home = Fold()
    work.cluster = SimpleNamespace(answers=lambda queue, limit: [(RemoteJob([0], "fold", tuple), home, None)])  # type: ignore[assignment]
    work.engine = SimpleNamespace(receive_folds=lambda job, answer: {0: Fold()})  # type: ignore[assignment]
    monkeypatch.setattr(work, "_ranges", lambda missing: None, raising=False)
    monkeypatch.setattr(work, "one_by_one", lambda number: Fold(), raising=False)
    monkeypatch.setattr(work, "_total", totals.append, raising=False)
    with pytest.raises(ClientError, match=r"sums of the blocks were lost 10 times; .* engine.gather=fold"):
        list(work.chained())
    assert len(totals) == 10


def test_tensors_arrive_on_the_device_of_the_worker() -> None:
    content = unpack(pack({"x": torch.ones(3), "n": np.arange(2), "net": nn.Linear(2, 2)}), "meta")
    assert content["x"].device.type == content["net"].weight.device.type == "meta"
    assert content["n"].tolist() == [0, 1]


def test_without_ray_the_engine_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"engine 'ray' needs the package ray, .*: pip install 'fedloom\[ray\]'\."):
        go(engine="ray")


def test_every_block_is_dealt_once_whoever_asks() -> None:
    members = [Member(None, None) for _ in range(4)]
    queues = {member: deque(range(10 * n, 10 * n + 3 * n)) for n, member in enumerate(members[:3])}
    queue = TaskQueue(deque([99]), queues)
    jobs = [queue.take(members[n % 4]) for n in range(12)]
    assert sorted(job for job in jobs if job is not None) == [10, 11, 12, 20, 21, 22, 23, 24, 25, 99]
    assert not queue

"""A node cannot end a run, nor move a number beyond what it can mean: what is out of range is left out and named."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.deploying import InProcess, config, in_process

from fedloom.core.context import RoundInfo
from fedloom.experiment.federated import RunResult
from fedloom.parts.objectives import HeadOnMeans, TrainablePrototypes
from fedloom_apps.deploy.flower import LARGEST
from fedloom_apps.deploy.flower.superlink import HEADER, Guard
from fedloom_apps.deploy.messages import Delivered
from fedloom_apps.deploy.server import Recipe, run
from fedloom_apps.deploy.wire import pack, unpack


def lying(tmp_path: Path, words: tuple[str, ...], facts: dict[str, Any], change: Any = None, at: int = 1) -> RunResult:
    """A run in which every answer of node 0 from its first order for work on has other facts and tensors."""
    transport = in_process(made := config(*words), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if name != "node-0" or number < at:
            return [blob]
        packet = unpack(blob)
        tensors = dict(packet.tensors) if change is None else change(dict(packet.tensors))
        return [pack("answer", packet.facts | facts, tensors)]

    transport.route = route
    result = run(Recipe.of(made), transport, 4)
    transport.close()
    return result


def asked(path: str, size: int, token: bytes = b"") -> tuple[int, int, int]:
    """The status that a guarded SuperLink answers to a request, the bytes that it read, and those Flower was given."""
    statuses, given, left = [200], [0], [size]

    async def flower(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            given[0] += len(message["body"])
            more = message.get("more_body", False)

    async def receive() -> dict[str, Any]:
        part = min(left[0], 1 << 20)
        left[0] -= part
        return {"type": "http.request", "body": bytes(part), "more_body": left[0] > 0}

    async def send(message: dict[str, Any]) -> None:
        statuses[0] = message.get("status", statuses[0])

    scope = {"type": "http", "path": path, "headers": [(HEADER.encode(), token)]}
    asyncio.run(Guard(flower, b"secret")(scope, receive, send))
    return statuses[0], size - left[0], given[0]


def test_a_stranger_cannot_fill_the_memory_of_the_superlink_with_a_request() -> None:
    """Flower reads a request whole before it looks at the signature."""
    huge, message = 1 << 30, 6 << 20  # one of Flower's chunks
    assert asked("/v1/fleet/push-object", message) == (200, message, message)
    assert asked("/v1/fleet/push-object", huge) == (413, LARGEST + (1 << 20), 0)
    assert asked("/v1/control/start-run", huge) == (403, 0, 0)
    assert asked("/v1/runtime/push-object", 2 * LARGEST, b"secret") == (200, 2 * LARGEST, 2 * LARGEST)


@pytest.mark.parametrize("method", ["q_ffl", "aaggff_d", "term"])
@pytest.mark.parametrize("loss", [-5.0, 1e308, "low", True])
def test_a_loss_that_no_client_can_have_does_not_end_the_run(method: str, loss: object, tmp_path: Path) -> None:
    result = lying(tmp_path, (f"method={method}", "rounds=2"), {"loss_received": loss})
    assert [(f.client, f.kind.value) for f in result.failures] == [(0, "refused")] * 2
    assert "the loss in its answer is out of its range" in result.failures[0].reason


@pytest.mark.parametrize("factor", [3e38, 1e11, 1e6])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_finite_update_beyond_all_others_does_not_end_the_run(method: str, factor: float, tmp_path: Path) -> None:
    def blown(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        place = "update" if method == "fedavg" else next(k for k in tensors if k.startswith("uploads|"))
        return tensors | {place: torch.ones_like(tensors[place]) * factor} if "update" in tensors else tensors

    result = lying(tmp_path, (f"method={method}", "rounds=2"), {}, blown)
    assert [(f.client, f.kind.value) for f in result.failures] == [(0, "refused")] * 2
    assert "no model has" in result.failures[0].reason or "where the cohort's median is" in result.failures[0].reason
    assert float(result.snapshot.server.theta.abs().max()) < 10


@pytest.mark.parametrize("method", ["fedtgp", "fedgh"])
def test_classes_that_are_fewer_than_none_do_not_end_the_run(method: str, tmp_path: Path) -> None:
    """Which classes a client has are its own word, and need not be zeros and ones."""

    def fewer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: -t if name.endswith("|has") else t for name, t in tensors.items()}

    result = lying(tmp_path, (f"method={method}", "rounds=2"), {}, fewer)
    assert len(result.history) == 2
    assert result.snapshot.server.theta.isfinite().all()


@pytest.mark.parametrize("term", [TrainablePrototypes(), HeadOnMeans()])
def test_clients_that_say_they_have_no_class_change_nothing(term: TrainablePrototypes | HeadOnMeans) -> None:
    info = replace(RoundInfo.of_cohort([0, 1], [10, 10], 2), received=torch.ones(12))
    state, update = term.correct({}, torch.zeros(12), {"means": torch.ones(2, 3, 4), "has": torch.zeros(2, 3)}, info)
    assert not state
    assert not update.any()


def test_variances_are_not_negative(tmp_path: Path) -> None:
    words = ("method=fedavg", "rounds=1", "model.norm=batch")
    result = lying(tmp_path, words, {}, lambda t: t | {"buffers": -t["buffers"].abs()} if "buffers" in t else t)
    assert "the variance body.2.running_var in its answer is negative" in result.failures[0].reason


def test_a_training_loss_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    for number, loss in enumerate((1e308, -3.0)):
        result = lying(tmp_path / str(number), ("method=fedavg", "rounds=1"), {"loss": loss})
        assert result.history[0]["train/loss"] < 10
        assert [f.client for f in result.failures] == [0]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"values": {"accuracy": 500.0, "loss": 1.0}}, "its accuracy is out of its range, 0 to 1"),
        ({"values": {"accuracy": -0.1, "loss": 1.0}}, "its accuracy is out of its range"),
        ({"values": {"accuracy": 0.5, "loss": 1e308}}, "its loss is out of its range"),
        ({"values": {"accuracy": 0.5, "loss": -1.0}}, "its loss is out of its range"),
        ({"n": 2**39}, "test samples, but declared"),
        ({"n": 1}, "test samples, but declared"),
    ],
)
def test_metrics_are_believed_within_their_ranges_and_counts_as_declared(
    wrong: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    words = ("method=fedavg", "rounds=2", "evaluation.what=[clients]", "evaluation.metric=clients/accuracy/mean")
    with pytest.warns(UserWarning, match=f"node-0: .*{sentence}"):
        result = lying(tmp_path, (*words, "evaluation.target=0.99", "evaluation.stop_at_target=true"), wrong, at=2)
    assert [record["deploy/unmeasured"] for record in result.history] == [1, 1]
    assert all(0 <= record["clients/accuracy/mean"] <= 1 for record in result.history)


def test_a_time_longer_than_has_passed_is_not_believed(tmp_path: Path) -> None:
    result = lying(tmp_path, ("method=fedavg", "rounds=1"), {"seconds": 1e300})
    assert result.history[0]["deploy/work_seconds"] < 600


OVERLAPPING = ("method=scaffold", "schedule=buffered", "schedule.k=2", "cohort=3", "rounds=4", "deploy.deadline=9")


def test_answers_for_no_version_twice_or_by_others_move_nothing(tmp_path: Path) -> None:
    """Where steps overlap, too: a ticket is of one order, of one version to one node."""
    found = []
    for hostile in (False, True):
        transport = in_process(made := config(*OVERLAPPING), tmp_path / str(hostile))
        answers: dict[str, bytes] = {}

        def route(name: str, number: int, blob: bytes, transport: InProcess = transport, answers: Any = answers) -> Any:
            answers[name] = blob
            packet = unpack(blob)
            never = pack("answer", packet.facts | {"ticket": 32 * "7"}, packet.tensors)
            if number:
                other = "node-1" if name == "node-0" else "node-0"
                transport.waiting.append(Delivered(other, blob))  # the node that was not asked is faster
            return [never, blob, blob] if number else [blob]

        if hostile:
            transport.route = route
        found.append(run(Recipe.of(made), transport, 4))
        transport.close()
    plain, disturbed = found
    assert torch.equal(plain.snapshot.server.theta, disturbed.snapshot.server.theta)
    assert not disturbed.failures
    assert sum(record["deploy/late"] for record in disturbed.history) > 3 * 2 * 3


@pytest.mark.parametrize("schedule", ["rounds", "buffered"])
def test_a_state_of_another_order_is_refused(schedule: str, tmp_path: Path) -> None:
    words = ("method=scaffold", f"schedule={schedule}", "rounds=2", "cohort=4")
    result = lying(tmp_path, words, {"version": f"{7:09d}-{32 * '7'}"})
    assert [(f.client, f.kind.value) for f in result.failures] == [(0, "refused")] * 2
    assert "the state in its answer is not that of the order" in result.failures[0].reason


def test_a_norm_is_that_of_earlier_steps_where_a_step_has_one_client(tmp_path: Path) -> None:
    def blown(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"update": 1e6 * tensors["update"]} if "update" in tensors else tensors

    words = ("method=fedavg", "schedule=asynchronous", "cohort=3", "rounds=12")
    result = lying(tmp_path, words, {}, blown, at=2)
    assert {(f.client, f.kind.value) for f in result.failures} == {(0, "refused")}
    assert float(result.snapshot.server.theta.abs().max()) < 10

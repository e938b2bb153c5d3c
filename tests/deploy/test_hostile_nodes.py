"""A node cannot end a run, nor move a number beyond what it can mean: what is out of range is left out and named."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.deploying import InProcess, config, in_process

from fedloom.compute.live import Live
from fedloom.core.context import RoundInfo
from fedloom.experiment.federated import RunResult
from fedloom.methods import methods
from fedloom.parts.objectives import Decorrelation, HeadOnMeans, TrainablePrototypes
from fedloom.rounds.exchange import Broadcast
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import Server, first_state
from fedloom_apps.deploy.answers import least_loss, read_metrics, read_result, same_scale, same_shapes
from fedloom_apps.deploy.assignment import Forms, forms, prepare_without_data
from fedloom_apps.deploy.flower import LARGEST
from fedloom_apps.deploy.flower.superlink import HEADER, Guard
from fedloom_apps.deploy.messages import Delivered, Order
from fedloom_apps.deploy.server import Recipe, _read_join, run
from fedloom_apps.deploy.settings import Deployment
from fedloom_apps.deploy.wire import LARGEST_LOSS, Packet, WireError, pack, unpack


def lying(tmp_path: Path, words: tuple[str, ...], facts: dict[str, Any], change: Any = None, at: int = 1) -> RunResult:
    """A run in which every answer of node 0 from its first order for work on has other facts and tensors."""
    transport = in_process(settings := config(*words), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if name != "node-0" or number < at:
            return [blob]
        packet = unpack(blob)
        tensors = dict(packet.tensors) if change is None else change(dict(packet.tensors))
        return [pack("answer", packet.facts | facts, tensors)]

    transport.route = route
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    return result


def guarded_request(path: str, size: int, token: bytes = b"") -> tuple[int, int, int]:
    """The status that a guarded SuperLink answers to a request, the bytes that it read, and those Flower was given."""
    statuses, flower_bytes, left = [200], [0], [size]

    async def flower(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            flower_bytes[0] += len(message["body"])
            more = message.get("more_body", False)

    async def receive() -> dict[str, Any]:
        part = min(left[0], 1 << 20)
        left[0] -= part
        return {"type": "http.request", "body": bytes(part), "more_body": left[0] > 0}

    async def send(message: dict[str, Any]) -> None:
        statuses[0] = message.get("status", statuses[0])

    scope = {"type": "http", "path": path, "headers": [(HEADER.encode(), token)]}
    asyncio.run(Guard(flower, b"secret")(scope, receive, send))
    return statuses[0], size - left[0], flower_bytes[0]


def test_a_stranger_cannot_fill_the_memory_of_the_superlink_with_a_request() -> None:
    """Flower reads a request whole before it looks at the signature."""
    huge, message = 1 << 30, 6 << 20  # one of Flower's chunks
    assert guarded_request("/v1/fleet/push-object", message) == (200, message, message)
    assert guarded_request("/v1/fleet/push-object", huge) == (413, LARGEST + (1 << 20), 0)
    assert guarded_request("/v1/control/start-run", huge) == (403, 0, 0)
    assert guarded_request("/v1/runtime/push-object", 2 * LARGEST, b"secret") == (200, 2 * LARGEST, 2 * LARGEST)


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
        ({"values": {"loss": 1.0, f"top{5000 * '9'}": 0.5}}, "contains a metric that was not requested"),
        ({"status": "left out", "kind": "absent"}, "it was left out"),
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


@pytest.fixture(scope="module")
def honest() -> tuple[ClientPlan, Broadcast, Packet, Forms]:
    """A plan of SCAFFOLD with batch normalisation, a broadcast, a node's answer to it, and the forms of uploads."""
    assignment = Recipe.of(config("method=scaffold", "model.norm=batch", "local.steps=1")).assignment("trial")
    workspace = prepare_without_data(assignment)
    plan = workspace.plan.levels[0]
    server = Server.initial(plan, plan.theta0, plan.buffers0)
    down = server.broadcast(plan)
    (result,) = Live(plan).work(down, [0], [first_state(plan, server.theta)])
    uploads = {f"uploads|{place}|{name}": t for place, slices in result.uploads.items() for name, t in slices.items()}
    tensors = {"update": result.update, "buffers": result.buffers, **uploads}
    return plan, down, Packet("answer", {"loss": 1.0, "sent": [9, 36]}, tensors), forms(result.uploads)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: {name: tensor for name, tensor in t.items() if "|" not in name}, "other slices than the parts"),
        (lambda t: t | {"uploads|drift|more": torch.ones(2)}, "other slices than the parts"),
        (lambda t: t | {"uploads": torch.ones(2)}, None),
        (lambda t: t | {"uploads|drift": torch.ones(2)}, "holds uploads without places"),
        (lambda t: {name: tensor for name, tensor in t.items() if name != "buffers"}, "the buffers in its answer has"),
        (lambda t: t | {"buffers": t["buffers"][:-1]}, "the buffers in its answer has another shape or type"),
        (lambda t: t | {"update": t["update"].double()}, "the update in its answer has another shape or type"),
        (lambda t: t | {"update": t["update"] + float("inf")}, "no model has, or that are not finite"),
        (lambda t: t | {"update": t["update"] + 2e12}, "no model has, or that are not finite"),
    ],
)
def test_an_answer_holds_what_the_parts_upload(change: Any, sentence: str | None, honest: Any) -> None:
    plan, down, packet, upload_forms = honest
    changed = packet._replace(tensors=change(packet.tensors))
    if sentence is None:
        assert torch.equal(read_result(0, changed, down, plan, upload_forms).update, packet.tensors["update"])
        return
    with pytest.raises(WireError, match=sentence):
        read_result(0, changed, down, plan, upload_forms)


@pytest.mark.parametrize("has_forms", [True, False])
def test_a_slice_has_the_form_that_clients_upload(has_forms: bool, honest: Any) -> None:
    plan, down, packet, upload_forms = honest
    (place,) = (name for name in packet.tensors if "|" in name)
    for changed in (packet.tensors[place][:-1], packet.tensors[place].to(torch.float8_e4m3fn)):
        answer = packet._replace(tensors=packet.tensors | {place: changed})
        if not has_forms and changed.dtype == torch.float32:  # it is compared with those of others
            assert read_result(0, answer, down, plan, None).failure is None
            continue
        with pytest.raises(WireError, match="has another shape or type than clients upload"):
            read_result(0, answer, down, plan, upload_forms if has_forms else None)


@pytest.mark.parametrize("sent", [[10**9, 1], [1, 10**9], [-1, 1], [1.5, 1], [1], [True, 1], "many", None])
def test_traffic_that_no_answer_has_is_counted_by_the_server(sent: object, honest: Any) -> None:
    plan, down, packet, upload_forms = honest
    assert read_result(0, packet, down, plan, upload_forms).traffic == (9, 36)
    assert read_result(0, packet._replace(facts={"loss": 1.0, "sent": sent}), down, plan, upload_forms).traffic is None


def test_metrics_come_with_a_loss(honest: Any) -> None:
    """Also those of the only node that has test samples, with which no others can be compared."""
    plan, *_ = honest
    values = {"loss": 1.0, "accuracy": 0.5}
    assert read_metrics(Packet("answer", {"n": 2, "values": values}, {}), plan) == {"n": 2, **values}
    assert read_metrics(Packet("answer", {"n": 2, "values": {"accuracy": 0.5}}, {}), plan) == "its answer holds no loss"


def test_what_differs_from_most_is_left_out(honest: Any) -> None:
    """Another shape, where forms are not known before; and norms, of what moves the buffers, too."""
    plan, down, packet, upload_forms = honest
    good = [read_result(client, packet, down, plan, upload_forms) for client in range(3)]
    ((place, slices),) = good[0].uploads.items()
    cut = replace(good[1], uploads={place: {name: t[:-1] for name, t in slices.items()}})
    far = replace(good[1], buffers=down.buffers + 1e8)
    for refuse, wrong, sentence in (
        (same_shapes, cut, "the shapes of its uploads differ"),
        (partial(same_scale, earlier_norms={}), far, "the norm of its buffers is"),
    ):
        results = refuse([good[0], wrong, good[2]], 3 * [down])
        assert [result.failure is None for result in results] == [True, False, True]
        assert sentence in str(results[1].failure)
        assert all(result.failure is None for result in refuse([good[0], wrong][:1], [down]))


def test_a_loss_is_not_negative_where_the_objective_or_the_mixing_forbids_it(honest: Any) -> None:
    plan, *_ = honest
    signed = replace(plan, method=replace(plan.method, objective=(*plan.method.objective, Decorrelation())))
    weighing = replace(signed, method=replace(signed.method, mixing=methods.make("q_ffl").mixing))
    assert [least_loss(variant) for variant in (plan, signed, weighing)] == [0.0, -LARGEST_LOSS, 0.0]


@pytest.mark.parametrize(
    "facts",
    [
        {"sizes": [0, 1, 1]}, {"sizes": [-1, 0, 0]}, {"sizes": [1.5, 0, 0]}, {"sizes": [True, 0, 0]}, {"sizes": [1, 1]},
        {"sizes": [2**40, 0, 0]}, {"sizes": "many"}, {"status": "done"}, {},
    ],
)  # fmt: skip
def test_numbers_of_samples_that_no_node_has_do_not_join(facts: dict[str, Any]) -> None:
    good = {"status": "joined", "sizes": [5, 0, 2], "threads": "many"}
    assert _read_join(pack("answer", good), Deployment()) == ((5, 0, 2), "")
    if facts:
        assert _read_join(pack("answer", good | facts), Deployment())[0] is None


def test_more_samples_than_local_steps_are_allowed_do_not_join(tmp_path: Path) -> None:
    """Their number would be the length of lists, at the server and at honest nodes."""
    transport = in_process(settings := config("method=fednova", "rounds=1", "local.steps=null"), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        lie = pack("answer", unpack(blob).facts | {"sizes": [2**39, 0, 0]})
        return [lie if name == "node-0" else blob]

    transport.route, messages = route, list[str]()
    result = run(Recipe.of(settings), transport, 3, tell=messages.append)
    assert not result.failures
    sentence = "node-0 declares 549,755,813,888 training samples, which take 54,975,581,389 local steps"
    assert any(sentence in message for message in messages)
    order, broadcast = transport.sent["node-1"][-1]
    request = Order.read(order, 10**7)
    assigned = replace(request, ticket=32 * "a", assignment={**request.assignment, "mean_size": 2.0**38})
    node = transport.nodes["node-1"]
    assert node is not None
    assert unpack(node.answer(assigned.packed(), broadcast)).facts["code"] == "settings"
    transport.close()


@pytest.mark.parametrize("facts", [*({"status": "left out", "kind": kind} for kind in ("nonsense", "absent", [])), {}])
def test_a_status_that_no_node_gives_is_a_refusal(facts: dict[str, Any], tmp_path: Path) -> None:
    """Also where a node could not read its order, whose ticket it then does not know."""
    result = lying(
        tmp_path, ("method=fedavg", "rounds=1"), {"status": "refused", "code": "message", "ticket": ""} | facts
    )
    assert [(f.client, f.kind.value) for f in result.failures] == [(0, "refused")]
    assert ("it was left out" if facts else "it cannot read the message") in result.failures[0].reason


OVERLAPPING = ("method=scaffold", "schedule=buffered", "schedule.k=2", "cohort=3", "rounds=4", "deploy.deadline=9")


def test_answers_for_no_version_twice_or_by_others_move_nothing(tmp_path: Path) -> None:
    """Where steps overlap, too: a ticket is of one order, of one version to one node."""
    results = []
    for hostile in (False, True):
        transport = in_process(settings := config(*OVERLAPPING), tmp_path / str(hostile))
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
        results.append(run(Recipe.of(settings), transport, 4))
        transport.close()
    plain, disturbed = results
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

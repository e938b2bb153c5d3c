"""Batch statistics of a client's second model: those of its own passes, kept beside it and deployed with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import FEATURES, classes
from helpers.networks import BodyAndHead, fixed, tanh_net, with_norm
from helpers.resuming import back_to
from helpers.runs import assert_same_run, experiment, go, leaves, theta
from torch import Tensor, nn

from fedloom.core.federation import Federation
from fedloom.core.local import Local, draw_cohort
from fedloom.core.method import Method
from fedloom.core.parts import Paired
from fedloom.core.views import StepInfo, View
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.store import state_bytes
from fedloom.methods import make
from fedloom.parts.objectives import CrossEntropy

LOCAL = Local(epochs=2, batch_size=3, lr=0.1, momentum=0.5, weight_decay=0.01)
SIZES = (6, 9, 8, 12)  # no mini-batch of one sample, which has no variance
EVALUATION = Evaluation(what=("clients",), metrics=("accuracy",))
OWN = [("ditto", {}), ("pfedme", {"lam": 3.0}), ("apfl", {"alpha": 0.4}), ("apfl", {"learn": True})]
IDS = ["ditto", "pfedme", "apfl", "learnt"]


def batch_normed() -> nn.Module:
    return with_norm(tanh_net(), nn.BatchNorm1d)


def at_inputs() -> nn.Module:
    """A net whose batch statistics are of its inputs, whatever its parameters."""
    return fixed(BodyAndHead(nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Tanh()), FEATURES))


def federation() -> Federation:
    """Clients whose inputs are far apart."""
    data = classes(SIZES)
    arrays = data.train.arrays
    for client in range(len(SIZES)):
        arrays.x[data.train.index[client]] += 3.0 * client
    return data


def client_buffers(result: Any) -> dict[int, Tensor]:
    """The buffers that the clients keep."""
    return {client: state["personal"]["buffers"] for client, state in result.snapshot.store}


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_ditto_without_its_pull_is_local_training_statistics_included(compute: str) -> None:
    conditions = {"federation": federation(), "model": batch_normed, "rounds": 4, "compute": compute}
    ditto, local = (
        go(method, local=LOCAL, evaluation=EVALUATION, **conditions) for method in (make("ditto", lam=0.0), "local")
    )
    assert not torch.equal(ditto.snapshot.server.buffers, client_buffers(ditto)[0])
    for client, state in local.snapshot.store:
        ditto_state = ditto.snapshot.store.get(client)["personal"]
        for name in ("private", "buffers"):
            assert torch.equal(ditto_state[name], state["personal"][name]), f"client {client}: {name}"
        deployed, expected = (run.trained.client(client).module.state_dict() for run in (ditto, local))
        assert all(torch.equal(value, expected[name]) for name, value in deployed.items())
    for key in ("clients/accuracy/mean", "clients/loss/mean", "clients/accuracy/std"):
        assert ditto.history[-1][key] == local.history[-1][key]


@dataclass
class Means:
    """Running means of inputs [d] as the server's and the clients' passes leave them."""

    server: np.ndarray
    clients: dict[int, np.ndarray]


def means(method: str, passes: int, rounds: int, cohort: int, seed: int, data: Federation) -> Means:
    """m ← .9 m + .1 (mean of the batch) in every pass, from zero; the server's is the mean by numbers of samples.

    Those of a second model go on from visit to visit; pFedMe's begin with the server's, and are sent.
    """
    x, index = data.train.arrays.x.numpy(), data.train.index
    running = Means(np.zeros(FEATURES), {})
    for t in range(rounds):
        sent, n = [], []
        for i in draw_cohort(len(SIZES), cohort, seed, t):
            w = running.server
            v = w if method == "pfedme" else running.clients.get(i, w)
            for rows in LOCAL.batches(index[i], seed, t, i):
                w = 0.9 * w + 0.1 * x[rows].mean(0)
                for _ in range(passes):
                    v = 0.9 * v + 0.1 * x[rows].mean(0)
            running.clients[i] = v
            sent.append(v if method == "pfedme" else w)
            n.append(len(index[i]))
        running.server = np.average(sent, axis=0, weights=n)
    return running


@pytest.mark.parametrize(("name", "settings"), OWN, ids=IDS)
def test_the_statistics_are_those_of_the_passes_at_the_deployed_model(name: str, settings: dict[str, Any]) -> None:
    data, rounds, seed = federation(), 5, 3
    method = make(name, **settings)
    result = go(method, federation=data, model=at_inputs, rounds=rounds, cohort=2, seed=seed, local=LOCAL)
    expected = means(name, getattr(method.personal, "steps", 1), rounds, 2, seed, data)
    np.testing.assert_allclose(result.snapshot.server.buffers[:FEATURES], expected.server, rtol=0, atol=1e-12)
    buffers_of = client_buffers(result)
    assert buffers_of.keys() == expected.clients.keys()
    assert 1 < len(buffers_of) <= len(SIZES)
    for client, buffers in buffers_of.items():
        np.testing.assert_allclose(buffers[:FEATURES], expected.clients[client], rtol=0, atol=1e-12)
        deployed = result.trained.client(client)
        used = buffers if deployed.lam else result.snapshot.server.buffers  # a learnt α may end at 0
        assert torch.equal(deployed.module.body[0].running_mean, used[:FEATURES])  # type: ignore[index, union-attr]
    assert any(result.trained.client(client).lam for client in buffers_of)


@pytest.mark.parametrize(("name", "settings"), OWN, ids=IDS)
def test_a_client_that_never_took_part_deploys_the_servers_statistics(name: str, settings: dict[str, Any]) -> None:
    result = go(
        make(name, **settings), federation=federation(), model=batch_normed, rounds=2, cohort=1, local=LOCAL,
        evaluation=EVALUATION,
    )  # fmt: skip
    strangers = set(range(len(SIZES))) - client_buffers(result).keys()
    assert strangers
    server = result.snapshot.server
    for client in strangers:
        module = result.trained.client(client).module
        assert torch.equal(module.body[1].running_mean, server.buffers[:3])  # type: ignore[index, union-attr]
        assert torch.equal(module.body[1].running_var, server.buffers[3:6])  # type: ignore[index, union-attr]


@pytest.mark.parametrize("method", [make("apfl", alpha=0.0), make("superfed_mm")], ids=["at w", "of all mixtures"])
def test_mixtures_without_statistics_of_their_own_have_the_servers(method: Method) -> None:
    """With α = 0 APFL is FedAvg; SuPerFed's passes train both models at once, and their statistics are sent."""
    conditions = {"federation": federation(), "model": batch_normed, "local": LOCAL, "evaluation": EVALUATION}
    result = go(method, **conditions)
    for client in range(len(SIZES)):
        module = result.trained.client(client).module
        assert torch.equal(module.body[1].running_mean, result.snapshot.server.buffers[:3])  # type: ignore[index, union-attr]
    if method.name == "apfl":
        shared = go("fedavg", **conditions).history[-1]
        assert result.history[-1]["clients/accuracy/mean"] == shared["clients/accuracy/mean"]
    else:
        assert not any(map(len, client_buffers(result).values()))


@pytest.mark.parametrize(("name", "settings"), OWN, ids=IDS)
def test_they_are_state_and_no_traffic(name: str, settings: dict[str, Any]) -> None:
    """Every one of a client's bytes is foreseen, and a round sends one model with its buffers."""
    setup = experiment(make(name, **settings), federation=federation(), model=batch_normed, local=LOCAL, rounds=1)
    plan = (task := FederatedTask(setup)).plan
    result = run(setup)
    for client, _ in result.snapshot.store:
        tensors = [value for path, value in leaves(result.snapshot) if path.startswith(f"client {client}/")]
        assert sum(value.nbytes for value in tensors) == state_bytes(plan, task.state.server)
    record = result.history[0]
    size = plan.layout.size + plan.layout.buffer_size
    assert record["comm/up_params"] == record["comm/down_params"] == len(SIZES) * size


@pytest.mark.parametrize(("name", "settings"), OWN, ids=IDS)
def test_they_are_the_same_in_processes_on_disk_and_after_a_pause(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    method = make(name, **settings)
    changes = {"federation": federation(), "model": batch_normed, "local": LOCAL, "rounds": 4, "cohort": 2}
    setup = experiment(method, evaluation=EVALUATION, **changes)
    full_run = run(setup)
    other = replace(setup, engine="processes", engine_settings={"workers": 2}, client_state="disk")
    assert_same_run(full_run, run(other, tmp_path / "other"))
    run(setup, tmp_path / "paused", checkpoint_every=2, keep=4)
    back_to(tmp_path / "paused", 2)
    assert_same_run(full_run, run(setup, tmp_path / "paused", resume=True))


def test_models_evaluated_together_and_in_turn_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    records = []
    for small in (0, 1000):
        monkeypatch.setattr("fedloom.experiment.passes.SMALL", small)
        conditions = {"federation": federation(), "model": batch_normed, "cohort": 3, "rounds": 2, "local": LOCAL}
        records.append(go("ditto", evaluation=EVALUATION, **conditions).history[-1])
    assert records[0]["clients/loss/mean"] == pytest.approx(records[1]["clients/loss/mean"], abs=1e-12)


def test_a_pass_that_moves_neither_model_leaves_both_statistics() -> None:
    """A method may look at v without training it."""

    @dataclass(frozen=True)
    class Looking(Paired):
        def views(self, step: StepInfo, extra: Tensor, ctx: Any) -> tuple[View, ...]:
            return View(private=0.0), View(1.0, shared=0.0, private=float(step.round == 0)), View(1.0, 0.0, 0.0)

    method = Method("looking", (CrossEntropy(),), personal=Looking())
    conditions = {"federation": federation(), "model": batch_normed, "local": LOCAL}
    short, long = (go(method, rounds=rounds, **conditions) for rounds in (1, 3))
    for client, buffers in client_buffers(short).items():
        assert torch.equal(buffers, client_buffers(long)[client])
    shared = go("fedavg", rounds=3, **conditions)
    assert torch.equal(long.snapshot.server.buffers, shared.snapshot.server.buffers)
    assert np.array_equal(theta(long), theta(shared))

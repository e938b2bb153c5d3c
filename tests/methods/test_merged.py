"""FedALA: local work that starts between the received model and the client's last one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.networks import tanh_net, with_norm
from helpers.rounds import facts
from helpers.runs import experiment, go, leaves, theta
from torch import nn

import fedloom as fl
from fedloom.base.errors import ClientError, ConfigError
from fedloom.core.context import NO_ROUND, Batch
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Adaptation, Personal, Start
from fedloom.core.slots import label
from fedloom.experiment.evaluation import Evaluation
from fedloom.methods import make
from fedloom.parts.adaptation import FineTune, Maml, Neighbours, PersonalHead, Prototypes
from fedloom.parts.drift import FedDynDrift, FedNovaDrift, Scaffold
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import Merged

LOCAL = Local(epochs=2, batch_size=4, lr=0.2, momentum=0.8, weight_decay=0.01, clip=0.9)
ON = Evaluation(what=("global", "clients"))
CE = (CrossEntropy(),)


@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("drift", [None, FedDynDrift(0.4)])
def test_weights_of_one_are_federated_averaging(drift: Any, layers: int) -> None:
    """To the last bit of the server's model and its record; clients deploy that model."""
    more = {} if drift is None else {"drift": drift}
    conditions = {"local": LOCAL, "cohort": 4, "rounds": 4, "seed": 3, "evaluation": ON}
    merged = go(Method("a", CE, personal=Merged(layers, rate=0.0), **more), **conditions)
    usual = go(Method("b", CE, **more), **conditions)
    assert np.array_equal(theta(merged), theta(usual))
    for record, expected in zip(merged.history, usual.history, strict=True):
        shared = [key for key in expected if key.startswith(("global/", "train/"))]
        assert [record[key] for key in shared] == [expected[key] for key in shared]
        assert record["clients/loss/mean"] == pytest.approx(expected["clients/loss/mean"], rel=1e-12)


def test_weights_of_zero_are_local_training() -> None:
    """To the last bit of every client's model and its record."""
    conditions = {"local": LOCAL, "rounds": 4, "seed": 3, "evaluation": Evaluation(what=("clients",))}
    merged = go(make("fedala", layers=0, rate=0.0, initial=0.0), **conditions)
    alone = go("local", **conditions)
    models = {client: state["personal"]["private"] for client, state in alone.snapshot.store}
    assert len(models) == 6
    for client, state in merged.snapshot.store:
        assert torch.equal(state["personal"]["private"], models[client])
    for record, expected in zip(merged.history, alone.history, strict=True):
        clients = [key for key in expected if key.startswith("clients/")]
        assert [record[key] for key in clients] == [expected[key] for key in clients]


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("adaptation", [Maml(0.2), FineTune(), Neighbours(), PersonalHead(), Prototypes()], ids=label)
def test_weights_of_one_are_federated_averaging_with_every_adaptation(adaptation: Adaptation, compute: str) -> None:
    conditions = {"local": LOCAL, "cohort": 4, "rounds": 3, "seed": 3, "evaluation": ON, "compute": compute}
    merged = go(Method("a", CE, personal=Merged(0, rate=0.0), adaptation=adaptation), **conditions)
    usual = go(Method("b", CE, adaptation=adaptation), **conditions)
    np.testing.assert_allclose(theta(merged), theta(usual), rtol=0, atol=1e-12)
    assert merged.history[-1]["clients/loss/mean"] == pytest.approx(usual.history[-1]["clients/loss/mean"], rel=1e-10)


def test_weights_are_learnt_through_the_adaptation_that_training_anticipates() -> None:
    """Class means of features need no head, so that one of another size changes neither weights nor features."""

    def body(scale: float) -> Any:
        def model() -> nn.Module:
            net = tanh_net()
            with torch.no_grad():
                net.head.weight.mul_(scale)  # pyright: ignore
            return net

        method = Method("a", CE, personal=Merged(0, initial=0.5), adaptation=Prototypes())
        run = go(method, model=model, local=replace(LOCAL, clip=None, weight_decay=0.0), rounds=3, seed=3)
        head = sum(p.numel() for p in tanh_net().head.parameters())  # pyright: ignore
        return theta(run)[:-head]

    assert np.array_equal(body(1.0), body(5.0))


def test_weights_with_no_inner_step_are_those_without_an_adaptation() -> None:
    conditions = {"local": LOCAL, "rounds": 3, "seed": 3}
    through = go(Method("a", CE, personal=Merged(0, initial=0.5), adaptation=Maml(0.2, steps=0)), **conditions)
    plain = go(Method("b", CE, personal=Merged(0, initial=0.5)), **conditions)
    weights = [dict(run.snapshot.store)[0]["personal"]["weights"] for run in (through, plain)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


def test_passes_before_local_steps_leave_batch_statistics_alone() -> None:
    """With a rate too small to move a weight, passes are taken, and all else is that of FedAvg."""
    conditions = {"local": Local(epochs=1, batch_size=5, lr=0.1), "rounds": 3}
    conditions["model"] = lambda: with_norm(tanh_net(), nn.BatchNorm1d)
    merged, usual = go(make("fedala", rate=1e-300, most=3), **conditions), go("fedavg", **conditions)
    assert torch.equal(merged.snapshot.server.buffers, usual.snapshot.server.buffers)
    np.testing.assert_allclose(theta(merged), theta(usual), atol=1e-12)


def test_weights_of_a_convex_loss_go_to_the_best_mixture() -> None:
    """Least squares F = ½(θ - x)ᵀA(θ - x): at the end W fulfils the conditions of a minimum over the box [0, 1]^p."""
    draw, size = np.random.default_rng(0), 7
    root = draw.normal(size=(size, size))
    a, best = torch.from_numpy(root @ root.T / size + np.eye(size)), torch.from_numpy(draw.normal(size=size))
    last, received = (torch.from_numpy(draw.normal(size=size)) for _ in range(2))
    samples = Batch(torch.zeros(5, 1), torch.zeros(5))
    part = Merged(0, rate=0.04, batch_size=0, tolerance=0.0, most=2500)
    ctx = NO_ROUND._replace(facts=facts()._replace(layers=(3, 4)), read=lambda: samples, state=part.init_client(last))
    work = part.start(ctx, received, {"private": last}, draw)
    point, _ = next(work)
    local: Any = None
    while local is None:
        try:
            point, batch = work.send((a @ (point - best), (point - best) @ a @ (point - best) / 2))
            assert len(batch.x) == 4
        except StopIteration as stop:
            local, at = stop.value
    w, slope = local["weights"], (a @ (at - best)) * (received - last)
    assert torch.equal(at, torch.lerp(last, received, w))
    inside = (w > 0) & (w < 1)
    assert inside.any()
    assert not inside.all()
    assert slope[inside].abs().max() < 1e-8
    assert (slope[w == 0] > 0).all()
    assert (slope[w == 1] < 0).all()
    assert int(local["epochs"]) == 2500


def test_weights_are_learnt_until_they_converge_and_then_once_a_round() -> None:
    epochs = {}
    for rounds in (1, 2, 4):
        result = go(make("fedala", tolerance=1e9), local=LOCAL, rounds=rounds)
        epochs[rounds] = {int(v) for key, v in leaves(result.snapshot) if key.endswith("personal/epochs")}
    assert epochs == {1: {0}, 2: {11}, 4: {13}}
    most = go(make("fedala", tolerance=0.0, most=3), local=LOCAL, rounds=2)
    assert {int(v) for key, v in leaves(most.snapshot) if key.endswith("personal/epochs")} == {3}


def test_clients_deploy_the_mixture_with_the_servers_last_model() -> None:
    method = make("fedala", layers=0, rate=5.0)
    result = go(method, local=LOCAL, rounds=4, cohort=3, evaluation=Evaluation(what=("clients",)))
    server, store = result.snapshot.server.theta, result.snapshot.store
    assert 0 < sum(store.get(client) is None for client in range(6)) < 6
    x = experiment(method).federation.test.x
    for client in range(6):
        state = store.get(client)
        expected = server
        if state is not None:
            entries = state["personal"]
            expected = entries["private"] + (server - entries["private"]) * entries["weights"]
        module = result.trained.client(client).module
        deployed_model = torch.cat([p.detach().flatten() for p in module.parameters()])
        torch.testing.assert_close(deployed_model, expected, rtol=0, atol=1e-12)
        assert module(x).shape == (len(x), 3)


@pytest.mark.parametrize("drift", [Scaffold(), FedNovaDrift()])
def test_drifts_that_read_gradients_from_displacements_are_refused(drift: Any) -> None:
    with pytest.raises(ConfigError, match="local steps start elsewhere"):
        replace(make("fedala"), drift=drift)


def test_a_start_of_another_shape_is_a_failure() -> None:
    class Short(Personal):
        def start(self, ctx: Any, received: Any, state: Any, draws: Any) -> Start:
            yield from ()
            return {}, received[:1]

    with pytest.raises(
        ClientError, match=r"failed in start: .* returned a tensor of the shape \[1\] instead of \[27\]"
    ):
        go(Method("short", CE, personal=Short()), rounds=1)


@pytest.mark.exhaustive
def test_it_learns_what_clients_need() -> None:
    """Two classes a client: mixtures are far better than the mean, and not worse than models of one's own."""
    federation = fl.data.federate("digits", "pathological", clients=10, held_out=0.2)
    local = Local(epochs=2, lr=0.1, batch_size=20)
    accuracy = {}
    for method in ("fedavg", "local", "fedala"):
        result = fl.run(method, federation, "mlp", rounds=6, local=local, engine="serial")
        accuracy[method] = result.history[-1]["clients/accuracy/mean"]
    assert accuracy["fedala"] > accuracy["fedavg"] + 0.1
    assert accuracy["fedala"] > accuracy["local"] - 0.02
    assert accuracy["fedala"] > 0.9

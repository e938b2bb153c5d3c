"""FedBN, FedBABU and FedProto: which layers stay private, what is never trained, and what is deployed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.networks import images, tanh_net, with_norm
from helpers.personal import Normed
from helpers.reference import World, fedavg_on_slice
from helpers.runs import GENTLE, assert_same_run, go, theta
from torch import nn

from fedloom.base.errors import ConfigError
from fedloom.core.context import RoundInfo
from fedloom.core.federation import Federation
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import federate, partitions
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy, PrototypeAlignment, TrainablePrototypes
from fedloom.parts.personal import PrivateNorm

LOCAL = Local(epochs=2, batch_size=3, lr=0.2, lr_decay=0.8, weight_decay=0.01, clip=0.9)
SIZES = (6, 9, 8)  # no mini-batch of one sample, which has no variance


def batch_normed() -> nn.Module:
    return with_norm(tanh_net(), nn.BatchNorm1d)


def test_fedbn_on_a_net_without_normalisation_shares_everything_and_is_refused() -> None:
    """It would be FedAvg under another name."""
    plain = tanh_net()
    assert Layout.of(plain) == Layout.of(plain, make("fedbn").private_in(plain))
    with pytest.raises(ConfigError, match=r"'private_norm' keeps no parameter.*normalisation layers are recognised"):
        go("fedbn", model=lambda: tanh_net(4))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_fedbn_keeps_parameters_and_statistics_of_normalisation_alone(norm: str) -> None:
    model = images(norm)()
    layout = Layout.of(model, make("fedbn").private_in(model))
    private = [leaf.name for leaf in layout.parameters if leaf.name.startswith("body.1.")]
    assert [leaf.name for leaf in layout.parameters][-2:] == private
    assert layout.size - layout.shared_size == 8
    assert layout.shared_buffers == 0


def test_fedbn_with_batch_normalisation_follows_its_equations() -> None:
    """And clients keep running means of their own, which nobody else sees."""
    federation, rounds = classes(SIZES), 3
    result = go("fedbn", federation=federation, model=batch_normed, rounds=rounds, cohort=2, local=LOCAL, seed=7)
    start = np.concatenate([p.detach().double().numpy().ravel() for p in tanh_net().parameters()])
    world = Normed.of(World(federation, start, 3, rounds, 2, LOCAL, 7))
    world.axis = 0
    oracle = fedavg_on_slice(world, slice(0, len(start)))
    np.testing.assert_allclose(theta(result), oracle.theta[: len(start)], rtol=0, atol=1e-11)
    states = dict(result.snapshot.store)
    for client, state in states.items():
        private = state["personal"]["private"].numpy()
        np.testing.assert_allclose(private, oracle.private[client][len(start) :], rtol=0, atol=1e-11)
    means = [state["personal"]["buffers"][:3].numpy() for state in states.values()]
    assert len(means) > 1
    assert np.abs(means[0] - means[1]).max() > 1e-3
    assert not len(result.snapshot.server.buffers)
    sent = 2 * len(start)
    assert result.history[0]["comm/up_params"] == result.history[0]["comm/down_params"] == sent


def test_a_batch_of_one_sample_is_left_out_with_the_setting_to_change() -> None:
    (failure,) = go("fedbn", federation=classes((7, 9, 8)), model=batch_normed, rounds=1, local=LOCAL).failures
    assert failure.client == 0
    assert "one sample has no variance for batch normalisation: choose another local.batch_size" in failure.reason


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_fedbn_with_feddyn(engine: str) -> None:
    """Two parts that nobody combined: h is as long as what is shared, and the result is neither's own."""
    combined = Method("both", (CrossEntropy(),), FedDynDrift(0.3), PrivateNorm(), mixing=Uniform())
    same: dict[str, Any] = {
        "federation": classes(SIZES), "local": LOCAL, "cohort": 2, "rounds": 4,
        "evaluation": Evaluation(("clients", "global")),
    }  # fmt: skip
    result = go(combined, model=batch_normed, engine=engine, **same)
    assert_same_run(result, go(combined, model=batch_normed, **same))
    size = len(theta(result))
    assert len(result.snapshot.server.parts["drift"]["h"]) == size
    for other in ("fedbn", make("feddyn", alpha=0.3)):
        assert np.abs(theta(result) - theta(go(other, model=batch_normed, **same))[:size]).max() > 1e-3


def frozen_head() -> nn.Module:
    net = tanh_net()
    net.head.requires_grad_(False)
    return net


def test_fedbabu_trains_the_body_of_fedavg_with_a_frozen_head() -> None:
    same: dict[str, Any] = {"local": Local(epochs=2, batch_size=4, lr=0.3, momentum=0.6, clip=0.8), "cohort": 4}
    body = go("fedavg", model=frozen_head, **same)
    result = go("fedbabu", **same)
    np.testing.assert_allclose(theta(result), theta(body), rtol=0, atol=1e-14)
    start = tanh_net().head.weight.detach().double().numpy().ravel()
    for _, state in result.snapshot.store:
        np.testing.assert_array_equal(state["personal"]["private"].numpy()[: len(start)], start)


def test_fedbabu_deploys_the_whole_model_after_its_steps() -> None:
    """No steps: the shared body and the common head, which is the server's model."""
    same: dict[str, Any] = {"local": LOCAL, "evaluation": Evaluation(("clients", "global"))}
    none = go(make("fedbabu", steps=0), **same).history[-1]
    tuned = go(make("fedbabu", steps=20, lr=0.3), **same).history[-1]
    assert none["global/loss"] == tuned["global/loss"]
    assert none["clients/loss/mean"] != tuned["clients/loss/mean"]


@pytest.mark.parametrize("model", [tanh_net, batch_normed])
@pytest.mark.parametrize("name", ["fedproto", "fedtgp", "feddistill"])
def test_prototypes_without_lambda_are_local_training(name: str, model: Callable[[], nn.Module]) -> None:
    same: dict[str, Any] = {"local": LOCAL, "cohort": 3, "rounds": 4, "model": model, "federation": classes(SIZES)}
    zero = {"gamma" if name == "feddistill" else "lam": 0.0}
    alone, none, aligned = (
        go(method, **same) for method in ("local", make(name, **zero, **GENTLE.get(name, {})), name)
    )
    for (client, state), (_, without), (_, pulled) in zip(
        *(r.snapshot.store for r in (alone, none, aligned)), strict=True
    ):
        for key in ("private", "buffers"):
            np.testing.assert_array_equal(state["personal"][key], without["personal"][key], err_msg=str(client))
        assert not torch.equal(state["personal"]["private"], pulled["personal"]["private"])


def test_fedproto_sends_a_mean_of_features_for_each_class_and_no_model() -> None:
    result = go("fedproto", cohort=4, rounds=2)
    classes, width = 3, 3
    up = 4 * classes * (width + 1)
    assert [record["comm/up_params"] for record in result.history] == [up, up]
    assert [record["comm/down_params"] for record in result.history] == [0, up]


def test_prototypes_that_are_trained_lie_further_apart_than_means() -> None:
    """Of clients whose means are close, by the margin; the contrast moves them from where they were drawn."""
    means = torch.tensor([[0.1, 0.0], [0.0, 0.1], [-0.1, -0.1]], dtype=torch.float64)
    uploads = {"means": means.expand(4, 3, 2), "has": torch.ones(4, 3, dtype=torch.float64)}
    info = replace(RoundInfo.of_cohort([0, 1, 2, 3], [1] * 4, 4), received=torch.zeros(0, dtype=torch.float64))
    state, _ = TrainablePrototypes(epochs=100, lr=0.1).correct({}, torch.zeros(0), uploads, info)
    assert (torch.pdist(state["prototypes"]) > torch.pdist(means)).all()
    assert torch.cdist(means, state["prototypes"]).argmin(0).tolist() == [0, 1, 2], "each is nearest to its class"


def test_a_class_that_nobody_in_the_cohort_has_keeps_its_prototype() -> None:
    part, before = PrototypeAlignment(), {"prototypes": torch.full((3, 2), 9.0), "known": torch.tensor([1.0, 0.0, 0.0])}
    uploads = {"sums": torch.tensor([[0.0, 0.0], [4.0, 6.0], [0.0, 0.0]]), "counts": torch.tensor([0.0, 2.0, 0.0])}
    state, _ = part.correct(before, torch.zeros(0), uploads, None)  # type: ignore[arg-type]
    assert state["prototypes"][:2].tolist() == [[9.0, 9.0], [2.0, 3.0]]
    assert state["known"].tolist() == [1.0, 1.0, 0.0]


def on_digits(method: Method, federation: Federation, **model: str) -> dict[str, float]:
    return run(Experiment(
        method, federation, lambda: models.make("mlp", classes=10, inputs=(1, 8, 8), **model), rounds=15,
        local=Local(epochs=2, batch_size=20, lr=0.1), evaluation=Evaluation(("clients", "global"), every=15), seed=1,
    )).history[-1]  # fmt: skip


@pytest.mark.exhaustive
def test_fedbn_helps_where_every_client_has_a_camera_of_its_own() -> None:
    """Digits at ten contrasts, some of them negatives: one set of statistics fits nobody."""
    federation = federate("digits", "iid", clients=10, seed=0)
    for split in (federation.train, federation.held_out):
        for client in range(10):
            rows = torch.from_numpy(split.index[client])
            split.arrays.x[rows] = split.arrays.x[rows] * (-1) ** client * (0.2 + 0.3 * client) + 0.5 * client
    records = {name: on_digits(make(name), federation, norm="batch") for name in ("fedavg", "fedbn")}
    assert records["fedbn"]["clients/accuracy/mean"] > records["fedavg"]["clients/accuracy/mean"] + 0.1, records


@pytest.mark.exhaustive
def test_fedbabu_learns_a_body_that_clients_make_their_own() -> None:
    federation = federate("digits", partitions.make("pathological", classes=2), clients=10, seed=0)
    record = on_digits(make("fedbabu", steps=20), federation)
    assert record["global/accuracy"] > 0.5, record
    assert record["clients/accuracy/mean"] > 0.9, record


@pytest.mark.exhaustive
def test_fedproto_learns_and_clients_come_to_mean_the_same_by_a_class() -> None:
    """Their models start apart and stay apart; features of a class draw together."""
    federation = federate("digits", partitions.make("dirichlet", alpha=0.5), clients=8, seed=0)
    records = {name: on_digits(make(name), federation) for name in ("local", "fedproto")}
    assert records["fedproto"]["clients/accuracy/mean"] > 0.85, records
    assert records["fedproto"]["clients/accuracy/mean"] > records["local"]["clients/accuracy/mean"] - 0.02, records


@pytest.mark.parametrize(("name", "judged"), [("local", "clients"), ("fedproto", "clients"), ("fedbn", "global")])
def test_a_server_whose_model_nobody_trains_is_not_judged(name: str, judged: str) -> None:
    result = go(make(name), evaluation=Evaluation(), rounds=2)
    final = result.summary["final"]
    assert any(key.startswith("clients/") for key in final)
    assert any(key.startswith("global/") for key in final) == (judged == "global")

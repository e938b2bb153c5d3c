"""FedPAC: combined heads, halves that are trained in turn, and class means that several models have in common."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import CLASSES, classes, federation
from helpers.networks import BodyAndHead, tanh_net, with_norm
from helpers.runs import assert_same_state, experiment, go
from torch import Tensor, nn

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Personal, Reduce
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import RunResult, run
from fedloom.methods import make
from fedloom.parts.objectives import CrossEntropy, ElasticNet, PrototypeAlignment
from fedloom.parts.personal import InTurn
from fedloom.parts.topology import Attention, CombinedHeads
from fedloom.parts.topology.heads import combined

BODY = 15  # parameters of ``tanh_net`` before its head


def models(result: RunResult) -> Tensor:
    """θ_i of all clients, [K, P]."""
    server = result.snapshot.server
    return torch.stack([server.model(client).theta for client in range(result.trained.plan.models)])


def alike(clients: int = 3) -> Federation:
    """Clients with the same samples."""
    original = classes((9,))
    return federation(original.train.arrays, [[*range(9)]] * clients, original.test)


def test_heads_of_like_clients_have_equal_weights_and_those_of_others_none() -> None:
    draw = np.random.default_rng(0)
    m, n = draw.standard_normal(6), 4
    np.testing.assert_allclose(
        combined(np.tile(m, (n, 1)), np.full(n, 0.3)), np.full((n, n), 1 / n), rtol=0, atol=1e-12
    )
    variance = np.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(combined(np.tile(m, (3, 1)), variance)[0], np.array([4, 2, 1]) / 7, rtol=0, atol=1e-12)
    np.testing.assert_allclose(combined(1e6 * np.eye(3), variance), np.eye(3), rtol=0, atol=1e-9)
    assert np.isfinite(combined(np.zeros((2, 3)), np.zeros(2))).all(), "a sample each, and no features"
    usual = combined(np.array([[1.0], [2.0]]), np.ones(2))
    for far in (1e8, 1e30, 1e200):  # of classes that the others lack
        near = combined(np.array([[far, 0.0], [0.0, 1.0], [0.0, 2.0]]), np.ones(3))[1:]
        np.testing.assert_allclose(near, np.column_stack([np.zeros(2), usual]), rtol=0, atol=1e-7)


def test_clients_with_the_same_samples_train_one_model() -> None:
    """Whatever the order of their samples: the mean of bodies and heads, with FedProto's term, is FedAvg on it."""
    terms = (CrossEntropy(), PrototypeAlignment(lam=0.7))
    setting: dict[str, Any] = {"federation": alike(), "local": Local(epochs=2, batch_size=4, lr=0.2, momentum=0.5)}
    single = go(Method("one", terms, personal=InTurn()), **setting).snapshot.server
    several = go(make("fedpac", lam=0.7), **setting)
    torch.testing.assert_close(models(several), single.theta.expand(3, -1), rtol=0, atol=1e-11)
    for name, value in single.parts["objective.1"].items():
        torch.testing.assert_close(several.snapshot.server.parts["objective.1"][name], value, rtol=0, atol=1e-11)


def test_reading_features_leaves_the_loss_of_the_received_model_as_it_is() -> None:
    """That is the loss in evaluation mode; in training mode statistics would be those of the samples."""
    same: dict[str, Any] = {
        "model": lambda: with_norm(tanh_net(), nn.BatchNorm1d), "federation": alike(), "rounds": 1,
        "local": Local(batch_size=3, lr=0.1),
        "evaluation": Evaluation(("clients", "received")),
    }  # fmt: skip
    fedpac, fedavg = (go(name, **same).history[0]["mixing/objective"] for name in ("fedpac", "fedavg"))
    assert fedpac == pytest.approx(fedavg, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "settings"), [("fedproto", {}), ("fedtgp", {"epochs": 3}), ("feddistill", {}), ("fedmd", {})]
)
def test_what_clients_exchange_by_class_is_common_to_the_models_of_a_server(name: str, settings: Any) -> None:
    """Models that nobody mixes are private ones."""
    method = make(name, **settings)
    several = go(replace(method, personal=Personal(), topology=Attention(alpha=0.0)), cohort=4)
    private = go(method, cohort=4)
    for client, state in private.snapshot.store:
        torch.testing.assert_close(models(several)[client], state["personal"]["private"], rtol=0, atol=1e-12)
    common, expected = several.snapshot.server.parts["objective.1"], private.snapshot.server.parts["objective.1"]
    for key, value in expected.items():
        torch.testing.assert_close(common[key], value, rtol=0, atol=1e-12)
    assert all("objective.1" not in state for _, state in several.snapshot.rows or ()), "kept once, not by every model"


def test_common_parts_do_not_mix_by_coefficients() -> None:
    class Mixed(PrototypeAlignment):
        uploads = {"sums": Reduce.MIX, "counts": Reduce.MEAN}  # noqa: RUF012

    with pytest.raises(ConfigError, match="common to several models, between which coefficients p do not compare"):
        Method("mixed", (CrossEntropy(), Mixed()))


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_of_one_client_it_makes_no_difference_where_the_head_is(compute: str) -> None:
    setting: dict[str, Any] = {"federation": classes((8,)), "compute": compute}
    setting["local"] = Local(epochs=3, batch_size=3, lr=0.1, momentum=0.6, weight_decay=0.02, clip=0.5)
    fedrep = go(make("fedrep", head_fraction=0.4), **setting)
    sent = go(Method("sent", (CrossEntropy(),), personal=InTurn(0.4)), **setting).snapshot.server.theta
    private = fedrep.snapshot.store.get(0)["personal"]["private"]  # type: ignore[index]
    torch.testing.assert_close(sent, torch.cat([fedrep.snapshot.server.theta, private]), rtol=0, atol=1e-12)


def test_the_half_that_is_not_trained_stays_whatever_the_penalty() -> None:
    start = nn.utils.parameters_to_vector(tanh_net().parameters()).double()
    for fraction, stays, moves in ((1.0, slice(0, BODY), slice(BODY, None)), (0.0, slice(BODY, None), slice(0, BODY))):
        method = Method("half", (CrossEntropy(), ElasticNet(l1=0.1)), personal=InTurn(fraction))
        theta = go(method, rounds=1, local=Local(steps=2, lr=0.1, momentum=0.5)).snapshot.server.theta
        assert torch.equal(theta[stays], start[stays].to(torch.float32).double())
        assert (theta[moves] != start[moves]).all()


def test_it_resumes_to_the_same_bits_with_class_means(tmp_path: Path) -> None:
    full_run = run(experiment("fedpac", rounds=3, cohort=4))
    run(experiment("fedpac", rounds=2, cohort=4), tmp_path / "a")
    assert_same_state(
        full_run.snapshot, run(experiment("fedpac", rounds=3, cohort=4), tmp_path / "a", resume=True).snapshot
    )


def test_statistics_are_counted_and_absent_clients_receive_the_body() -> None:
    result = go("fedpac", cohort=4, rounds=1)
    thetas, size, width = models(result), 27, 3
    assert size == thetas.shape[1]
    up = size + (CLASSES * width + 1) + CLASSES * (width + 1)
    assert result.history[-1]["comm/bytes"] == 8 * 4 * (size + up)
    assert (thetas[:, :BODY] == thetas[0, :BODY]).all()
    start = go("fedavg", rounds=1, local=Local(lr=1e-300)).snapshot.server.theta
    assert sum(torch.equal(theta[BODY:], start[BODY:]) for theta in thetas) == 2


class HeadFirst(BodyAndHead):
    """A net whose head is registered before its body."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.head, self.body = nn.Linear(3, CLASSES), nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        (Method("a", (CrossEntropy(),), personal=InTurn()), HeadFirst, "'in_turn' trains head and body in turn, but"),
        (Method("a", (CrossEntropy(),), topology=CombinedHeads()), HeadFirst, "'combined_heads' mixes the heads of"),
        (replace(make("fedper"), topology=CombinedHeads()), tanh_net, "'combined_heads' mixes the heads of"),
    ],
)
def test_a_head_must_be_last_and_shared(method: Method, model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        go(method, model=model)


@pytest.mark.exhaustive
def test_it_learns_what_clients_need() -> None:
    """Two classes a client: combined heads are far better than the mean of all."""
    data = fl.data.federate("digits", "pathological", clients=10, held_out=0.2)
    local = Local(epochs=2, lr=0.1, batch_size=20)
    records = {
        name: fl.run(make(name, **settings), data, "mlp", rounds=4, local=local, engine="serial").history[-1]
        for name, settings in (("fedavg", {}), ("fedpac", {"head_fraction": 0.5}))
    }
    assert records["fedpac"]["clients/accuracy/mean"] > records["fedavg"]["clients/accuracy/mean"] + 0.05, records
    assert records["fedpac"]["clients/accuracy/mean"] > 0.9, records

"""IFCA: clients find the model that suits them, and everything that refers to a client's model uses that one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers.federations import with_validation
from helpers.networks import tanh_net
from helpers.runs import assert_same_run, experiment, go, theta

import fedloom as fl
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import RunResult, run
from fedloom.methods import make
from fedloom.parts.adaptation import PersonalHead
from fedloom.parts.mixing import TERM, Uniform
from fedloom.parts.objectives import CrossEntropy, NotTrueDistillation
from fedloom.parts.server import Adam
from fedloom.parts.topology import Clusters

LOCAL = Local(epochs=2, batch_size=4, lr=0.2, momentum=0.5)
EVALUATION = Evaluation(("clients", "global"), metrics=("accuracy",))


def models(result: RunResult) -> list[torch.Tensor]:
    """θ_r of all models, [P] each."""
    return [result.snapshot.server.model(number).theta for number in range(result.trained.plan.models)]


def test_one_cluster_is_fedavg() -> None:
    single = go(make("ifca", clusters=1), local=LOCAL, cohort=4)
    plain = go(Method("m", (CrossEntropy(),), mixing=Uniform()), local=LOCAL, cohort=4)
    np.testing.assert_array_equal(theta(single), theta(plain))


def test_a_client_receives_all_models_and_sends_one() -> None:
    result = go(make("ifca", clusters=3), local=LOCAL, cohort=4, rounds=1)
    size = sum(p.numel() for p in tanh_net().parameters())
    assert [len(theta) for theta in models(result)] == 3 * [size]
    assert result.history[0]["comm/down_params"] == 4 * 3 * size
    assert result.history[0]["comm/up_params"] == 4 * size


def test_all_models_have_the_constants_of_the_experiments() -> None:
    """What is frozen, like a pretrained body, is no start of training to be drawn again."""
    net = tanh_net()
    for parameter in net.get_submodule("body").parameters():
        parameter.requires_grad_(False)
    result = go("ifca", model=lambda: net, rounds=0)
    (first, second), sizes = models(result), [net.head.weight.numel(), net.head.bias.numel()]  # type: ignore[union-attr, operator]
    assert len(first) == sum(sizes)
    for a, b in zip(first.split(sizes), second.split(sizes), strict=True):
        assert a.sort().values.equal(b.sort().values)
    assert not torch.equal(first, second)


def test_a_model_that_nobody_chooses_stays_as_it_is() -> None:
    """Of equal models the first is taken."""

    def same() -> torch.nn.Module:
        net = tanh_net()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.1)
        return net

    first, second = (model.numpy() for model in models(go("ifca", model=same, local=LOCAL, rounds=1)))
    np.testing.assert_allclose(second, 0.1, rtol=1e-6)
    assert np.abs(first - 0.1).max() > 0.01


def test_clients_choose_among_adapted_models() -> None:
    """An adaptation of no steps changes neither choice nor model."""
    settings: dict[str, Any] = {"local": LOCAL, "cohort": 4, "rounds": 2, "evaluation": EVALUATION}
    plain, still, moved = (
        go(replace(make("ifca"), **{"adaptation": PersonalHead(steps=steps)} if steps >= 0 else {}), **settings)
        for steps in (-1, 0, 5)
    )
    assert_same_run(plain, still)
    assert moved.history[-1]["clients/loss/mean"] != plain.history[-1]["clients/loss/mean"]


def two_kinds() -> Federation:
    """Pairs of digits, which even clients call 0 to 4 and odd ones 5 to 9: no model is right for both."""
    federation = fl.data.federate("digits", "iid", clients=8, seed=0)
    names = torch.arange(10)[None] // 2 + 5 * (torch.arange(8)[:, None] % 2)
    train, held_out = (replace(split, relabel=names) for split in (federation.train, federation.held_out))
    return replace(federation, train=train, held_out=held_out)


def leaning() -> torch.nn.Module:
    """A start that suits even clients, so that odd ones find any other order of its biases better."""
    net = fl.models.mlp(classes=10, inputs=(1, 8, 8))
    with torch.no_grad():
        net.head.bias.copy_(torch.tensor([2.0] * 5 + [-2.0] * 5))  # type: ignore[union-attr, operator]
    return net


def test_clients_of_two_kinds_find_each_other(tmp_path: Path) -> None:
    """Clients that never take part are served by the model of their kind all the same; one model has half the marks."""
    settings: dict[str, Any] = {
        "rounds": 6, "cohort": 4, "local": Local(epochs=3, batch_size=10, lr=0.2), "seed": 2,
        "evaluation": Evaluation(("clients", "global"), every=6),
    }  # fmt: skip
    result = run(fl.Experiment(make("ifca"), two_kinds(), leaning, **settings), tmp_path / "run")
    table = pq.read_table(tmp_path / "run" / "clients.parquet").to_pandas()
    assert table["model"].tolist() == [0, 1] * 4
    record = result.history[-1]
    assert min(record[f"clients/{kind}/accuracy/mean"] for kind in ("model_0", "model_1")) > 0.8
    assert result.summary["headline"] == "clients/accuracy/mean"
    single = run(fl.Experiment(make("ifca", clusters=1), two_kinds(), leaning, **settings)).history[-1]
    assert single["clients/accuracy/mean"] < 0.6
    trained = result.trained
    for client in (0, 1):
        test, train = (split.client(client) for split in (trained.federation.held_out, trained.federation.train))
        accuracy = trained.client(client).evaluate(test.x, test.y)["accuracy"]
        assert accuracy == pytest.approx(table["accuracy"][client])
        assert trained.adapt(train.x, train.y).evaluate(test.x, test.y)["accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_clusters_with_distillation_and_adam_at_the_server(compute: str, tmp_path: Path) -> None:
    """Three ideas of three papers, with the same bits on both engines, and after an interruption."""
    method = Method(
        "a", (CrossEntropy(), NotTrueDistillation()), topology=Clusters(3), mixing=Uniform(), server=Adam(0.05)
    )
    same: dict[str, Any] = {"local": LOCAL, "cohort": 4, "evaluation": EVALUATION, "compute": compute, "rounds": 4}
    full_run = go(method, **same)
    assert_same_run(full_run, go(method, engine="processes", **same))
    setup = experiment(method, **same)
    run(replace(setup, rounds=2), tmp_path)
    assert_same_run(run(setup, tmp_path, resume=True), full_run)


def test_clients_choose_by_training_losses_whatever_the_policy_sees() -> None:
    """Coefficients without a tilt do not depend on responses, and neither does the choice of a cluster."""
    method = replace(make("ifca", clusters=2), mixing=TERM(lam=0.0, response="validation"))
    ends = [models(go(method, local=LOCAL, federation=with_validation(shift))) for shift in (0.0, -5.0)]
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))

"""Adaptation combined with engines, clients' own class names, dropout, statistics, other terms, memory, newcomers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.federations import CLASSES, FEATURES, classes
from helpers.marks import kinds
from helpers.networks import BodyAndHead, fixed, tanh_net
from helpers.runs import assert_same_run, assert_same_state, experiment, go, theta
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.compute.live import Live
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Adaptation
from fedloom.data import federate, partitions, sources
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.experiment.setup import make_plan
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.adaptation import FineTune, Maml, Prototypes, gradient
from fedloom.parts.objectives import CrossEntropy, SquaredError
from fedloom.rounds import meta as adapting
from fedloom.rounds.server import Server

LOCAL = Local(epochs=2, batch_size=4, lr=0.2, lr_decay=0.9, weight_decay=0.01, clip=0.9)
CLIENTS = Evaluation(what=("clients",))
LEARNT = [Maml(0.3, 2), Maml(0.3, 1, second_order=False), Prototypes()]


def adapted(part: Adaptation, **parts: object) -> Method:
    return Method("a", (CrossEntropy(),), adaptation=part, **parts)  # type: ignore[arg-type]


def renamed(seed: int = 5) -> Federation:
    """The usual clients with names of their own for the classes."""
    usual = classes()
    names = torch.from_numpy(np.random.default_rng(seed).permuted(np.tile(np.arange(CLASSES), (len(usual), 1)), axis=1))
    return replace(
        usual, **{name: replace(getattr(usual, name), relabel=names) for name in ("train", "validation", "held_out")}
    )


def dropping(p: float) -> nn.Module:
    return fixed(BodyAndHead(nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Dropout(p)), 6))


def counting() -> nn.Module:
    """A net with batch normalisation, whose buffers are statistics."""
    return fixed(BodyAndHead(nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh()), 5))


@pytest.mark.parametrize("part", LEARNT, ids=repr)
def test_engines_agree_where_clients_have_names_of_their_own(part: Adaptation) -> None:
    same = {"federation": renamed(), "local": LOCAL, "cohort": 4, "evaluation": CLIENTS}
    serial = go(adapted(part), **same)
    assert_same_run(serial, go(adapted(part), engine="processes", engine_settings={"workers": 2}, **same))


def test_prototypes_do_not_see_what_classes_are_called() -> None:
    """Training and every client's accuracy are the same under any relabelling; MAML's are not."""
    for part, equal in ((Prototypes(), True), (Maml(0.3), False)):
        a, b = (go(adapted(part), federation=f, local=LOCAL, evaluation=CLIENTS) for f in (classes(), renamed()))
        assert np.allclose(theta(a), theta(b), rtol=0, atol=1e-12) == equal
        if equal:
            assert a.history[-1]["clients/accuracy/mean"] == b.history[-1]["clients/accuracy/mean"]


@pytest.mark.parametrize("part", LEARNT, ids=repr)
def test_dropout_goes_through_adaptation(part: Adaptation) -> None:
    """Masks are functions of seed, round and client."""
    same = {"model": lambda: dropping(0.4), "local": LOCAL}
    serial = go(adapted(part), **same)
    if part is LEARNT[0]:
        assert_same_run(serial, go(adapted(part), engine="processes", engine_settings={"workers": 2}, **same))
    assert not serial.failures
    assert np.isfinite(theta(serial)).all()
    assert not np.allclose(theta(serial), theta(go(adapted(part), model=lambda: dropping(0.0), local=LOCAL)))


@pytest.mark.parametrize("part", [FineTune(0.3, 3), Maml(0.3, 2, training=False), Prototypes(False)], ids=repr)
def test_nothing_is_dropped_when_a_deployed_model_is_adapted(part: Adaptation) -> None:
    still = Local(epochs=1, batch_size=4, lr=1e-12)
    records = [
        go(adapted(part), model=lambda p=p: dropping(p), local=still, evaluation=CLIENTS).history[-1]
        for p in (0.0, 0.5)
    ]
    assert records[0]["clients/loss/mean"] == pytest.approx(records[1]["clients/loss/mean"], abs=1e-9)


def test_a_private_head_is_adapted_where_it_lives() -> None:
    """With steps of length 0 the deployed model is the client's own; with longer ones it starts from there."""
    head = {"personal": make("fedper").personal}
    runs = {
        lr: go(adapted(FineTune(lr, 2), **head), local=LOCAL, evaluation=CLIENTS, engine=kind)
        for lr, kind in ((0.0, "serial"), (0.5, "processes"))
    }
    plain = go("fedper", local=LOCAL, evaluation=CLIENTS)
    assert_same_state(runs[0.0].snapshot, plain.snapshot)
    assert_same_state(runs[0.5].snapshot, plain.snapshot)
    losses = [r.history[-1]["clients/loss/mean"] for r in (runs[0.0], plain, runs[0.5])]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert losses[2] != pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("part", kinds(LEARNT, LEARNT[:1]))
def test_fair_policies_agree_on_all_engines(part: Adaptation) -> None:
    method = adapted(part, mixing=make("term", lam=3.0).mixing)
    same = {"local": LOCAL, "federation": renamed(), "cohort": 5}
    serial = go(method, **same)
    assert_same_run(serial, go(method, engine="processes", engine_settings={"workers": 2}, **same))


def worker_of(part: Adaptation) -> tuple[Live, Server]:
    federation = renamed()
    plan = make_plan(experiment(adapted(part), federation=federation), federation, "cpu")
    return Live(plan), Server.initial(plan, plan.theta0, plan.buffers0)


def test_the_loss_of_prototypes_by_hand() -> None:
    """F_i(θ^t) of a client: class means on all its samples, and the cross entropy of the distances on the same."""
    worker, server = worker_of(Prototypes())
    losses = worker.losses(server.broadcast(worker.plan), np.arange(6), lambda client: {})
    body = tanh_net().double().get_submodule("body")
    for client in range(6):
        samples = renamed().train.client(client)
        with torch.no_grad():
            z = body(samples.x).numpy()
        y = samples.y.numpy()
        names = np.unique(y)
        centres = np.array([z[y == k].mean(0) for k in names])
        logits = -((z[:, None] - centres) ** 2).sum(2)
        log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        assert losses[client] == pytest.approx(-log_p[np.arange(len(y)), np.searchsorted(names, y)].mean(), abs=1e-12)


@pytest.mark.parametrize("part", [Maml(0.3, 2), FineTune(0.3, 3), Prototypes()], ids=repr)
def test_no_forward_pass_grows_with_a_client(part: Adaptation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation and a policy's losses go through large clients in pieces, and come to the same."""
    batch_sizes: list[int] = []

    class Watched(BodyAndHead):
        def features(self, x: Tensor) -> Tensor:
            batch_sizes.append(len(x))
            return super().features(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x))

    def watched() -> nn.Module:
        net = Watched(nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh()), 3)
        net.load_state_dict(tanh_net().state_dict())
        return net

    method = adapted(part, mixing=make("term", lam=3.0).mixing)
    same = {"model": watched, "evaluation": CLIENTS, "local": Local(epochs=1, batch_size=3, lr=0.2)}
    reference = go(method, **same)
    assert max(batch_sizes) == 16, "the largest client at once"
    batch_sizes.clear()
    monkeypatch.setattr(adapting, "PIECE", 3)
    monkeypatch.setattr(gradient, "PIECE", 3)
    monkeypatch.setattr("fedloom.compute.live.EVALUATION_BATCH", 3)
    pieces = go(method, **same)
    assert max(batch_sizes) == 3
    assert_same_run(reference, pieces, 1e-12)


@pytest.mark.parametrize(
    "name",
    kinds(["distill", "robust", "distill_robust", "moon", "feddecorr", "propfair", "fedprox"], ["moon", "fedprox"]),
)
def test_other_terms_of_the_objective_adapt_too(name: str) -> None:
    """With no inner steps MAML is the method itself; with some it runs, in processes, too, and as a deployed model."""
    plain = make(name)
    same = {"local": LOCAL, "rounds": 2}
    still = go(replace(plain, adaptation=Maml(steps=0)), **same)
    np.testing.assert_allclose(theta(still), theta(go(plain, **same)), rtol=0, atol=1e-12)
    for part in (Maml(0.3), Prototypes(), FineTune(0.3)):
        serial = go(replace(plain, adaptation=part), evaluation=CLIENTS, **same)
        assert not serial.failures
        assert abs(serial.history[-1]["train/loss"]) < 10, "classes that nobody can know do not count"
        assert 0 <= serial.history[-1]["clients/accuracy/mean"] <= 1
        if isinstance(part, Maml):
            other = go(replace(plain, adaptation=part), evaluation=CLIENTS, engine="processes", **same)
            assert_same_run(serial, other)


def test_running_statistics_move_with_adapted_training() -> None:
    """As in FedAvg: by the mini-batches that the loss is taken on, at the model as it stands."""
    plain = go("fedavg", model=counting, local=LOCAL)
    still = go(adapted(Maml(steps=0)), model=counting, local=LOCAL)
    assert_same_state(still.snapshot, plain.snapshot, 1e-12)
    first = go("fedavg", model=counting, local=Local(steps=1, batch_size=4, lr=1e-12), rounds=1).snapshot.server.buffers
    for part in (Maml(0.3), Prototypes()):
        moved = go(adapted(part), model=counting, local=LOCAL, evaluation=CLIENTS)
        assert moved.snapshot.server.buffers[-1] == plain.snapshot.server.buffers[-1], "batches tracked"
        assert (moved.snapshot.server.buffers[:-1] - first[:-1]).abs().min() > 1e-6


def test_prototypes_of_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="'squared_error' is defined for numbers, but adaptation 'proto' for classes"):
        Method("a", (SquaredError(),), adaptation=Prototypes())


@pytest.mark.filterwarnings("ignore:partition:UserWarning")
@pytest.mark.exhaustive
def test_clients_that_never_took_part_adapt_to_their_own_samples() -> None:
    """Real digits under names of their own: prototypes serve newcomers as well as members, a plain model nobody."""
    alid = partitions.make("alid", classes=4, samples=60, test_samples=16)
    federation = federate(sources.make("digits"), alid, clients=20, seed=1, unseen=0.25)
    plain, proto = (
        run(
            Experiment(
                make(name),
                federation,
                lambda: models.make("mlp", classes=10, inputs=(1, 8, 8)),
                rounds=10,
                participation=0.5,
                local=Local(steps=15, batch_size=20, lr=0.1, clip=10),
                evaluation=Evaluation(what=("clients",), every=10),
            )
        ).history[-1]
        for name in ("fedavg", "p_avg_proto")
    )
    assert proto["unseen/accuracy/clients"] == 5
    assert proto["unseen/accuracy/mean"] > 0.85
    assert abs(proto["unseen/accuracy/mean"] - proto["seen/accuracy/mean"]) < 0.08
    assert plain["unseen/accuracy/mean"] < 0.4

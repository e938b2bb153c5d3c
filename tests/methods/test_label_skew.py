"""Losses that depend on a client's class counts: what they reduce to, and which clients benefit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.networks import tanh_net
from helpers.runs import go, theta

from fedloom import methods
from fedloom.core.context import NO_ROUND, Batch, Output
from fedloom.core.federation import Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import federate, partitions
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models
from fedloom.parts.adaptation import FineTune
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.mixing import TERM, Uniform
from fedloom.parts.objectives import BalancedSoftmax, CalibratedLogits, CrossEntropy
from fedloom.parts.personal import PrivateHead
from fedloom.rounds.client import client_contexts
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import Server

HARD = Local(epochs=2, batch_size=4, lr=0.3, lr_decay=0.9, weight_decay=0.02, clip=0.9)
CONDITIONS: dict[str, Any] = {"cohort": 4, "rounds": 4, "drop_rate": 0.1, "local": HARD, "seed": 3}
SKEWED = [CalibratedLogits, BalancedSoftmax]


@pytest.mark.parametrize("term", SKEWED)
def test_at_zero_it_is_cross_entropy(term: Any) -> None:
    none, plain = (theta(go(Method("a", (loss,)), **CONDITIONS)) for loss in (term(0.0), CrossEntropy()))
    np.testing.assert_array_equal(none, plain)
    assert np.abs(theta(go(Method("a", (term(),)), **CONDITIONS)) - plain).max() > 1e-3


@pytest.mark.parametrize("term", SKEWED)
def test_with_equal_counts_it_is_cross_entropy(term: Any) -> None:
    z, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(5) % 3
    ctx = NO_ROUND._replace(label_counts=torch.full((3,), 7.0, dtype=torch.float64))
    losses, plain = (part.loss(Output(z), Batch(z, y), ctx) for part in (term(1.5), CrossEntropy()))
    torch.testing.assert_close(losses, plain, rtol=0, atol=1e-12)


def test_the_balanced_softmax_finds_the_balanced_odds() -> None:
    """On one input that is class 0 in 9 of 10 samples, of which a client has three times as many of class 0.

    The logits that fit say what is left of the odds when those of the classes are divided out: 9/3.
    """
    z = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    ctx = NO_ROUND._replace(label_counts=torch.tensor([75.0, 25.0], dtype=torch.float64))
    y = torch.tensor([0] * 9 + [1])
    for _ in range(400):
        (slope,) = torch.autograd.grad(BalancedSoftmax().loss(Output(z.expand(10, 2)), Batch(y, y), ctx).mean(), z)
        z = (z - 2.0 * slope).detach().requires_grad_()
    assert float((z[0, 0] - z[0, 1]).detach().exp()) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("term", SKEWED)
def test_a_class_that_a_client_has_none_of_gets_no_gradient(term: Any) -> None:
    z = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    ctx = NO_ROUND._replace(label_counts=torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64))
    (slope,) = torch.autograd.grad(term().loss(Output(z), Batch(z, torch.tensor([0, 0, 0, 1])), ctx).sum(), z)
    assert slope[:, 2].abs().max() < 1e-7
    assert slope[:, :2].abs().min() > 0.1


def test_labels_are_counted_as_the_client_calls_them() -> None:
    """A client with other names for the classes has the counts of its own names."""
    federation = classes()
    turned = torch.tensor([[1, 2, 0]]).repeat(6, 1)
    renamed = Split(federation.train.arrays, federation.train.index, turned)
    plan = ClientPlan.of(tanh_net().double(), methods.fedlc(), renamed, HARD)
    down = Server.initial(plan, plan.theta0, plan.buffers0).broadcast(plan)
    counts = client_contexts(plan, down, {}, 3, 1)["objective.0"].label_counts
    assert counts is not None
    rows = torch.from_numpy(federation.train.index[3])
    plain = torch.bincount(federation.train.arrays.y[rows], minlength=3)
    assert counts.tolist() == plain.roll(1).tolist()
    assert counts.sum() == 9


COMPOSED = {
    "fedlc, private heads and feddyn": Method("a", (CalibratedLogits(2.0),), FedDynDrift(0.1), PrivateHead()),
    "balanced, mixed by losses": Method("b", (BalancedSoftmax(),), mixing=TERM(2.0)),
    "fedlc, fine-tuned": Method("c", (CalibratedLogits(),), adaptation=FineTune(), mixing=Uniform()),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_compositions_agree_on_every_engine(name: str) -> None:
    settings = CONDITIONS | {"evaluation": Evaluation(what=("clients",))}
    runs = [go(COMPOSED[name], engine=engine, **settings) for engine in ("serial", "processes")]
    np.testing.assert_array_equal(theta(runs[0]), theta(runs[1]))
    assert runs[0].history[-1]["clients/accuracy/mean"] == runs[1].history[-1]["clients/accuracy/mean"]


@pytest.mark.exhaustive
def test_they_beat_fedavg_where_clients_have_two_digits_each() -> None:
    """Real digits, few rounds, long local work."""
    federation = federate("digits", partitions.make("pathological", classes=2), clients=10, seed=0)
    accuracy = {}
    for name, method in {
        "fedavg": methods.fedavg(), "fedlc": methods.fedlc(), "balanced": Method("b", (BalancedSoftmax(),)),
        "fedntd": methods.fedntd(),
    }.items():  # fmt: skip
        result = run(Experiment(
            method, federation, lambda: models.make("mlp", classes=10, inputs=(1, 8, 8)), rounds=10, participation=0.5,
            local=Local(epochs=5, batch_size=20, lr=0.1), evaluation=Evaluation(("global",), every=10), seed=1,
        ))  # fmt: skip
        accuracy[name] = result.history[-1]["global/accuracy"]
    assert min(accuracy["fedlc"], accuracy["balanced"], accuracy["fedntd"]) > accuracy["fedavg"] + 0.05, accuracy

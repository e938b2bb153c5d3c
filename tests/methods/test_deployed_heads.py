"""FedRoD and kNN-Per: one common model, and what each client deploys, derived independently in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.reference import forward as through
from helpers.reference import softmax
from helpers.runs import assert_same_run, experiment, go, theta

from fedloom.base.errors import ConfigError
from fedloom.core.context import Batch, Output
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import federate, partitions
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.adaptation import Neighbours, PersonalHead
from fedloom.parts.drift import Scaffold
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import BalancedSoftmax
from fedloom.parts.personal import PrivateNorm

LOCAL = Local(epochs=2, batch_size=4, lr=0.2, clip=0.9)
CONDITIONS: dict[str, Any] = {"local": LOCAL, "evaluation": Evaluation(("clients",)), "cohort": 4}


def cross_entropy(result: Any, name: str) -> float:
    """The clients' mean cross entropy, which is the objective of FedAvg and kNN-Per, and not FedRoD's."""
    return result.history[-1][f"clients/{'cross_entropy' if name == 'fedrod' else 'loss'}/mean"]


def head_logits(r: np.ndarray, z: np.ndarray, y: np.ndarray, new: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Full-batch gradient descent on W and b of z + Wr + b, sample by sample."""
    w, b = np.zeros((z.shape[1], r.shape[1])), np.zeros(z.shape[1])
    for _ in range(7):
        errors = softmax(z + r @ w.T + b) - np.eye(z.shape[1])[y]
        w = w - 0.3 * sum(np.outer(e, features) for e, features in zip(errors, r, strict=True)) / len(y)
        b = b - 0.3 * errors.mean(0)
    return new[1] + new[0] @ w.T + b


def neighbour_logits(r: np.ndarray, z: np.ndarray, y: np.ndarray, new: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """One query after the other, its neighbours by sorting."""
    logits = []
    for query, own_logits in zip(*new, strict=True):
        far = np.sqrt(np.sum((r - query) ** 2, 1))
        votes = np.zeros(z.shape[1])
        for i in np.argsort(far)[:5]:
            votes[y[i]] += np.exp(-far[i] / 0.7)
        logits.append(np.log(0.6 * votes / votes.sum() + 0.4 * softmax(own_logits[None])[0]))
    return np.array(logits)


@pytest.mark.parametrize(
    ("method", "oracle"),
    [
        (make("fedrod", lr=0.3, steps=7), head_logits),
        (make("knn_per", k=5, lam=0.6, scale=0.7), neighbour_logits),
    ],
    ids=["fedrod", "knn_per"],
)
def test_what_clients_deploy_follows_its_equations(method: Method, oracle: Any) -> None:
    """Clients of 4 to 16 samples, some with fewer than k, which go through together, padded to one length."""
    setup = experiment(method, **CONDITIONS)
    result = run(setup)
    at, train, held_out = theta(result), setup.federation.train, setup.federation.held_out
    losses = []
    for client in range(len(train)):
        samples, tested = train.client(client), held_out.client(client)
        (r, z), (q, o) = (through(at, part.x.numpy(), 3)[:2] for part in (samples, tested))
        p = softmax(oracle(r, z, samples.y.numpy(), (q, o)))
        losses.append(-np.log(p[np.arange(len(tested)), tested.y.numpy()]).mean())
    assert cross_entropy(result, method.name) == pytest.approx(np.mean(losses), abs=1e-9)


def test_without_their_own_part_both_deploy_the_model_of_fedavg() -> None:
    plain = go("fedavg", **CONDITIONS)
    expected = pytest.approx(cross_entropy(plain, "fedavg"), abs=1e-9)
    for method in (make("fedrod", gamma=0.0, steps=0), make("knn_per", lam=0.0)):
        result = go(method, **CONDITIONS)
        np.testing.assert_array_equal(theta(result), theta(plain))
        assert cross_entropy(result, method.name) == expected


def forward(theta: torch.Tensor, x: torch.Tensor) -> Output:
    return Output(torch.zeros(len(x), 4), x * theta)


def test_a_neighbour_is_believed_and_the_farther_one_less() -> None:
    support = Batch(torch.tensor([[0.0], [3.0], [50.0]]), torch.tensor([2, 1, 3]))
    predict, predictable = Neighbours(k=2, lam=1.0).adapt(
        forward, torch.ones(1), support, lambda out, batch: out.logits.sum()
    )
    assert predictable is None
    p = predict(torch.tensor([[1.0]])).logits.exp()[0]
    torch.testing.assert_close(p[2] / p[1], torch.tensor(1.0).exp())
    assert p[0] < 1e-30
    assert p[3] < 1e-30


@pytest.mark.parametrize("scale", [0.1, 10.0, 1e4])
def test_no_step_of_a_personal_head_increases_the_loss_however_large_the_features_are(scale: float) -> None:
    draw = np.random.default_rng(0)
    x = torch.from_numpy(scale * draw.normal(size=(40, 6)))
    support = Batch(x, torch.from_numpy(draw.integers(0, 4, 40)))
    losses = []
    for steps in (0, 1, 2, 5, 40, 41):
        predict, _ = PersonalHead(lr=0.5, steps=steps).adapt(
            forward, torch.ones(6), support, lambda out, batch: out.logits
        )
        losses.append(float(torch.nn.functional.cross_entropy(predict(x).logits, support.y)))
    assert (np.diff(losses) <= 0).all(), losses
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("part", [Neighbours(k=3), PersonalHead(steps=3)])
def test_rows_that_do_not_count_change_nothing(part: Neighbours | PersonalHead) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    y, mask = torch.tensor([0, 1, 1, 3, 3]), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    short, long = (
        part.adapt(forward, torch.ones(3), support, lambda out, batch: out.logits.sum())[0](x).logits
        for support in (Batch(x[:3], y[:3]), Batch(x, y, mask))
    )
    torch.testing.assert_close(short, long)


def test_a_personal_head_with_scaffold_and_private_normalisation() -> None:
    """Four ideas of four papers in four slots, with the same bits on both engines."""
    method = Method("a", (BalancedSoftmax(),), Scaffold(), PrivateNorm(), PersonalHead(), mixing=Uniform())
    same = CONDITIONS | {"local": Local(epochs=2, batch_size=4, lr=0.2)}
    assert_same_run(go(method, **same), go(method, engine="processes", **same))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fedrod", "knn_per"])
def test_clients_with_two_digits_are_served_better_than_by_the_shared_model(name: str) -> None:
    federation = federate("digits", partitions.make("pathological", classes=2), clients=10, seed=0)
    record = run(Experiment(
        make(name), federation, lambda: models.make("mlp", classes=10, inputs=(1, 8, 8)), rounds=10, participation=0.5,
        local=Local(epochs=2, batch_size=20, lr=0.1), evaluation=Evaluation(("clients", "global"), every=10), seed=1,
    )).history[-1]  # fmt: skip
    assert record["clients/accuracy/mean"] > 0.95, record
    assert record["clients/accuracy/mean"] > record["global/accuracy"] + 0.05, record


def test_what_makes_no_sense_is_refused() -> None:
    numbers = Batch(torch.zeros(2, 1), torch.zeros(2))
    for part in (Neighbours(), PersonalHead()):
        with pytest.raises(ConfigError, match="needs one class per sample"):
            part.adapt(forward, torch.ones(1), numbers, lambda out, batch: out.logits.sum())

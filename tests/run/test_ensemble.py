"""Uses of the client models of a finished run: mixing them for a target, and votes on every sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import target
from helpers.federations import SIZES, Shaken, as_images, classes
from helpers.networks import Flattening, images, tanh_net
from helpers.runs import experiment

from fedloom.base.errors import ConfigError
from fedloom.core.parts import Mixing
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult, run
from fedloom.experiment.setup import make_plan
from fedloom.experiment.store import StateStore
from fedloom.parts.mixing import AFL, Confidence, SelfSupervised, Uniform
from fedloom_apps.customise.ensemble import (
    accuracy,
    after_training,
    ensemble,
    last_models,
    sample_coefficients,
    sample_wise,
)

KEPT = Evaluation(what=("global", "average"))


def finished_run(method: Any = "fedavg", **changes: Any) -> tuple[Experiment, RunResult]:
    settings = {
        "federation": as_images(classes()), "model": lambda: Flattening(tanh_net()), "views": (Shaken(),),
        "evaluation": KEPT, "rounds": 2, "seed": 4,
    } | changes  # fmt: skip
    setup = experiment(method, **settings)
    return setup, run(setup)


def test_equal_shares_after_training_give_the_average_of_the_last_models() -> None:
    setup, result = finished_run(rounds=1)
    mixture = after_training(setup, result, Uniform())
    assert mixture.clients.tolist() == list(range(len(SIZES)))
    np.testing.assert_allclose(mixture.p, 1 / len(SIZES))
    weights = torch.cat([t.reshape(-1) for t in mixture.model.parameters()])
    assert result.snapshot.last is not None
    np.testing.assert_allclose(weights.detach().numpy(), result.snapshot.last.mean().numpy(), atol=1e-12)
    assert mixture.accuracy == pytest.approx(result.history[-1]["average/accuracy"])
    assert mixture.before == pytest.approx(result.history[-1]["global/accuracy"])


def test_shares_by_samples_after_one_round_give_the_server_model_back() -> None:
    setup, result = finished_run(rounds=1)
    mixture = after_training(setup, result, Mixing())
    for value, expected in zip(mixture.model.parameters(), result.model.parameters(), strict=True):
        np.testing.assert_allclose(value.detach().numpy(), expected.detach().numpy(), atol=1e-12)
    assert mixture.accuracy == mixture.before


def test_a_mixture_that_is_not_fed_back_is_the_one_learnt_after_training() -> None:
    policy = SelfSupervised(variance=1.0, optimiser="adam", lr=0.1, steps=8, batch_size=8, draws=2)
    setup, result = finished_run(rounds=3)
    mixed = run(replace(setup, method=replace(setup.method, mixing=policy)))
    mixture = after_training(setup, result, policy)
    assert np.ptp(mixture.p) > 0.05
    theta = torch.cat([t.reshape(-1) for t in mixture.model.parameters()]).detach().numpy()
    np.testing.assert_allclose(theta, mixed.snapshot.server.theta.numpy(), rtol=0, atol=1e-12)
    assert mixture.accuracy == pytest.approx(mixed.history[-1]["global/accuracy"])
    again = after_training(setup, mixed, policy)  # clients saw nothing of the mixture
    np.testing.assert_allclose(mixture.p, again.p, rtol=1e-12)


@pytest.mark.parametrize("name", ["feddyn", "scaffold", "feddc", "fedadam", "fedper", "local"])
def test_any_method_can_be_customised(name: str) -> None:
    setup, result = finished_run(name)
    mixture = after_training(setup, result)
    assert np.ptp(mixture.p) > 1e-3
    assert 0 <= mixture.accuracy <= 1
    votes = sample_wise(setup, result)
    assert votes.p.shape == (20, len(SIZES))


@pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "local", "fedavg"])
def test_last_models_are_the_ones_that_clients_trained(name: str) -> None:
    """Private parts come from the clients' states, shared ones from their last uploads: here, of the last round."""
    setup, result = finished_run(name, rounds=1, cohort=3)
    plan = make_plan(setup, setup.federation, "cpu")
    clients, models, _ = last_models(plan, result.snapshot)
    assert len(clients) == 3
    losses = []
    for client, theta in zip(clients, models, strict=True):
        rows = torch.from_numpy(setup.federation.train.index[int(client)])
        data = setup.federation.train.arrays.take(rows)
        for point in (plan.theta0, theta):
            net = setup.model().double()
            plan.layout.write(net, point, plan.buffers0)
            losses.append(torch.nn.functional.cross_entropy(net(data.x), data.y).item())
    before, after = np.array(losses).reshape(3, 2).T
    assert (after < before).all()


def test_buffers_are_mixed_like_parameters() -> None:
    federation = classes(shape=(2, 5, 5))
    setup, result = finished_run(federation=federation, model=images("batch"), rounds=1)
    mixture = after_training(setup, result, Mixing())
    for name, expected in result.model.named_buffers():
        if name.endswith("num_batches_tracked"):  # a whole number in the model
            continue
        np.testing.assert_allclose(mixture.model.get_buffer(name).numpy(), expected.numpy(), atol=1e-6, err_msg=name)


def test_votes_are_those_of_the_definitions() -> None:
    setup, result = finished_run()
    votes = sample_wise(setup, result, SelfSupervised(variance=1.0, optimiser="adam", lr=0.2, steps=5, draws=2))
    plan = make_plan(setup, setup.federation, "cpu")
    clients, models, buffers = last_models(plan, result.snapshot)
    x, y = setup.federation.test.x, setup.federation.test.y
    logits = []
    for theta, values in zip(models, buffers, strict=True):
        net = setup.model().double()
        plan.layout.write(net, theta, values)
        logits.append(net(x).detach().numpy())
    z = np.stack(logits, 1)
    right = [(z[:, k].argmax(-1) == y.numpy()).mean() for k in range(len(clients))]
    np.testing.assert_allclose(votes.alone, right)
    assert votes.local == pytest.approx(np.mean(right))
    assert votes.ensemble == pytest.approx((z.mean(1).argmax(-1) == y.numpy()).mean())
    assert votes.server == pytest.approx(result.history[-1]["global/accuracy"])
    weighted = (votes.p[..., None] * z).sum(1)
    assert votes.sample_wise == pytest.approx((weighted.argmax(-1) == y.numpy()).mean())
    np.testing.assert_allclose(votes.p.sum(1), 1)
    assert np.ptp(votes.p, axis=0).max() > 1e-2, "every sample got the same coefficients"


def test_samples_are_learnt_as_if_each_were_alone() -> None:
    draw = np.random.default_rng(0)
    first, second = (2 * torch.tensor(draw.normal(size=(1, 7, 4, 3))) for _ in range(2))
    policy = SelfSupervised(variance=2.0, optimiser="adam", entropy=0.05, lr=0.2, steps=6)
    coefficients = sample_coefficients(first, second, policy).numpy()
    for m in range(7):
        a, adam = np.zeros(4), target.Adam(0.2)
        for _ in range(6):
            first_view, second_view = (z[0, m : m + 1].numpy() for z in (first, second))
            a = a - adam.step(target.ssa_gradient(a, first_view, second_view, 2.0, 0.05))
        np.testing.assert_allclose(coefficients[m], target.softmax(a), atol=1e-12)


def test_several_draws_count_in_the_mean() -> None:
    draw = np.random.default_rng(1)
    first, second = (2 * torch.tensor(draw.normal(size=(3, 5, 4, 3))) for _ in range(2))
    policy = SelfSupervised(variance=1.0, optimiser="adam", lr=0.1, steps=4)
    coefficients = sample_coefficients(first, second, policy).numpy()
    a, adam = np.zeros(4), target.Adam(0.1)
    for _ in range(4):
        a = a - adam.step(target.ssa_gradient(a, first[:, 2].numpy(), second[:, 2].numpy(), 1.0, 1e-3))
    np.testing.assert_allclose(coefficients[2], target.softmax(a), atol=1e-12)


def test_the_sample_that_one_model_knows_is_given_to_it() -> None:
    """Sample m is said surely and steadily by model m alone; the others guess, and guess otherwise on each view."""
    draw = np.random.default_rng(2)
    first, second = (torch.tensor(draw.normal(size=(4, 4, 4, 3))) for _ in range(2))
    for m in range(4):
        first[:, m, m] = second[:, m, m] = torch.tensor([6.0, 0.0, 0.0], dtype=torch.float64)
    p = sample_coefficients(first, second, SelfSupervised(lr=0.1, steps=40))
    assert p.argmax(1).tolist() == [0, 1, 2, 3]


def test_ensembles_of_one_model_are_that_model() -> None:
    z = torch.tensor(np.random.default_rng(0).normal(size=(6, 1, 3)))
    np.testing.assert_allclose(ensemble(z).numpy(), torch.softmax(z[:, 0], -1).numpy())
    np.testing.assert_array_equal(sample_coefficients(z[None], z[None]).numpy(), 1)
    assert accuracy(z[:, 0], z[:, 0].argmax(-1)) == 1.0


def test_labels_decide_nothing_but_accuracies() -> None:
    setup, result = finished_run()
    wrong = replace(setup.federation.test, y=setup.federation.test.y.roll(1))
    poisoned = replace(setup, federation=replace(setup.federation, test=wrong))
    for policy in (SelfSupervised(), Confidence()):
        np.testing.assert_array_equal(
            after_training(setup, result, policy).p, after_training(poisoned, result, policy).p
        )
    np.testing.assert_array_equal(sample_wise(setup, result).p, sample_wise(poisoned, result).p)


def test_a_run_directory_is_read_back(tmp_path: Path) -> None:
    setup, _ = finished_run()
    first = after_training(setup, run(setup, tmp_path / "run"))
    again = after_training(setup, run(setup, tmp_path / "run", resume=True))
    np.testing.assert_array_equal(first.p, again.p)
    assert first.accuracy == again.accuracy


def test_what_cannot_be_done_is_refused_in_a_sentence() -> None:
    setup, result = finished_run(evaluation=Evaluation(what=("global",)))
    for task in (after_training, sample_wise):
        with pytest.raises(ConfigError, match="last models were not stored; run with 'average'"):
            task(setup, result)
    setup, result = finished_run()
    with pytest.raises(ConfigError, match="'afl' needs losses of a round"):
        after_training(setup, result, AFL())
    blind = replace(setup, federation=replace(setup.federation, unlabelled=None))
    with pytest.raises(ConfigError, match="no unlabelled inputs of a target"):
        after_training(blind, result)
    assert sample_wise(blind, result).p.shape == (20, len(SIZES))  # each sample is its own target
    plain, plain_result = finished_run("fedavg", federation=classes(), model=tanh_net)
    with pytest.raises(ConfigError, match="needs images"):
        after_training(plain, plain_result)


def test_nobody_took_part() -> None:
    setup, result = finished_run("fedavg")
    assert result.snapshot.last is not None
    result.snapshot.last.models = StateStore()
    with pytest.raises(ConfigError, match="no client has participated"):
        after_training(setup, result)

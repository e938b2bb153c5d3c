"""A mixture for a target: weights, scale and biases fitted through the merged network, against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.reference import softmax
from helpers.target import Adam
from torch import nn

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.base.rng import stream
from fedloom.core.layout import Layout
from fedloom.core.server_data import ServerData
from fedloom.data.labels import Skew, UniformLabels
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.trained import TrainedRun
from fedloom.parts.mixing import SelfSupervised
from fedloom_apps.customise.ensemble import Fitted, TargetFit, after_training
from fedloom_apps.customise.model import ClassModels

K, D, H, C, M = 4, 3, 5, 3, 23


def problem() -> tuple[ServerData, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A network with one hidden layer, four clients' parameters, classes of 23 inputs, and weights to start from."""
    draw = np.random.default_rng(0)
    net = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C)).double()
    layout = Layout.of(net)
    models = torch.tensor(draw.normal(size=(K, layout.size)))
    r, p = (torch.tensor(draw.dirichlet(np.ones(n), m)) for n, m in ((C, M), (K, 1)))
    none = torch.zeros(0, dtype=torch.float64)
    return ServerData(net, layout, models[0], none, torch.tensor(draw.normal(size=(M, D))), seed=3), models, r, p[0]


def fit(data: ServerData, models: torch.Tensor, r: torch.Tensor, p: torch.Tensor, **settings: float) -> Fitted:
    return TargetFit(**settings)(data, models, models[:, :0], r, p)  # type: ignore[arg-type]


def test_the_steps_are_those_of_the_definition() -> None:
    data, models, r, p = problem()
    steps, lr, size = 7, 0.3, 10
    fitted = fit(data, models, r, p, steps=steps, lr=lr, batch_size=size)
    x, thetas = data.inputs.numpy(), models.numpy()
    state, adam = np.concatenate([np.log(p.numpy()), [0.0], np.zeros(C)]), Adam(lr)
    rows = np.concatenate([stream(3, "target order", 0, n).permutation(M) for n in range(3)])
    cuts = [rows[M * n + a : min(M * n + a + size, M * (n + 1))] for n in range(3) for a in range(0, M, size)]
    for batch in cuts[:steps]:
        a, log_tau, b = state[:K], state[K], state[K + 1 :]
        weights, tau = softmax(a), np.exp(log_tau)
        theta = weights @ thetas
        w1, b1, w2, b2 = np.split(theta, np.cumsum([H * D, H, C * H]))
        w1, w2 = w1.reshape(H, D), w2.reshape(C, H)
        hidden = np.tanh(x[batch] @ w1.T + b1)
        f = hidden @ w2.T + b2
        away = (softmax(tau * f + b) - r.numpy()[batch]) / len(batch)
        back = (tau * away @ w2) * (1 - hidden**2)
        in_theta = [(back.T @ x[batch]).ravel(), back.sum(0), (tau * away.T @ hidden).ravel(), tau * away.sum(0)]
        in_p = thetas @ np.concatenate(in_theta)
        slope = np.concatenate([weights * (in_p - weights @ in_p), [tau * (away * f).sum()], away.sum(0)])
        state = state - adam.step(slope)
    np.testing.assert_allclose(fitted.p.numpy(), softmax(state[:K]), atol=1e-12)
    np.testing.assert_allclose(fitted.tau, np.exp(state[K]), atol=1e-12)
    np.testing.assert_allclose(fitted.b.numpy(), state[K + 1 :], atol=1e-12)


def test_laws_of_the_weights() -> None:
    data, models, r, p = problem()
    fitted = fit(data, models, r, p)
    order = torch.tensor([2, 0, 3, 1])
    permuted = fit(data, models[order], r, p[order])
    np.testing.assert_allclose(permuted.p.numpy(), fitted.p[order].numpy(), atol=1e-9)
    np.testing.assert_allclose(permuted.b.numpy(), fitted.b.numpy(), atol=1e-9)
    assert fit(data, models[:1], r, torch.ones(1)).p.tolist() == [1]
    still = fit(data, models, r, p, steps=0)
    np.testing.assert_allclose(still.p.numpy(), p.numpy(), atol=1e-15)
    assert (still.tau, still.b.tolist()) == (1, [0] * C)
    absent = torch.tensor([0.5, 0.0, 0.25, 0.25])
    assert fit(data, models, r, absent).p[1] == 0
    assert bool(torch.isfinite(fit(data, models, r, absent).p).all())


def test_the_client_that_made_the_classes_is_found() -> None:
    """The teacher is one client's network: all weight goes there, and no scale or bias is left over."""
    data, models, _, _ = problem()
    r = torch.softmax(data.logits(models[2], models[2, :0], data.inputs), -1)
    fitted = fit(data, models, r, torch.full((K,), 0.25), steps=300, lr=0.2)
    assert fitted.p[2] > 0.99
    assert fitted.tau == pytest.approx(1, abs=0.05)
    assert (fitted.b - fitted.b.mean()).abs().max() < 0.05


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"lr": 0.0}, {"batch_size": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="target_fit: "):
        TargetFit(**wrong)  # type: ignore[arg-type]


def test_a_mixture_for_every_clients_classes(digits_run: TrainedRun) -> None:
    """The right client weighs most, the mixture is better than the server's model, and its file says the same."""
    class_models, test = ClassModels(digits_run), digits_run.federation.test
    for j in (0, 3):
        rows = torch.from_numpy(np.flatnonzero(np.isin(test.y.numpy(), [2 * j, 2 * j + 1])))
        x, y = test.x[rows], test.y[rows]
        mixture = class_models.target_fit(x, resamples=0)
        assert mixture.p is not None
        assert (mixture.p.argmax(), mixture.p.sum()) == (j, pytest.approx(1))
        accuracy = mixture.model.evaluate(x, y)["accuracy"]
        assert accuracy > digits_run.server.evaluate(x, y)["accuracy"] - 0.02
        assert accuracy > 0.9
        assert class_models.target_head(x, resamples=0).p is None


def test_no_step_is_the_mean_of_the_last_models(digits_run: TrainedRun) -> None:
    class_models, x = ClassModels(digits_run), digits_run.federation.test.x
    still = class_models.target_fit(x[:40], TargetFit(steps=0), resamples=0)
    sizes = digits_run.federation.train.index.sizes
    np.testing.assert_allclose(still.p, sizes / sizes.sum(), atol=1e-12)
    assert (still.model.outputs(x) - digits_run.server.outputs(x)).abs().max() < 1e-4


def test_labels_of_the_target_change_nothing() -> None:
    for target in (Skew(), UniformLabels()):
        federation = fl.data.federate("digits", "niid1", clients=5, seed=1, target=target, held_out=0.0)
        run = fl.run("fedavg", federation, "mlp", rounds=1, evaluation=Evaluation(what=("average",))).trained
        hidden, test = run.federation.unlabelled, run.federation.test
        assert hidden is not None
        first = ClassModels(run).target_fit(hidden.x, resamples=0)
        run.federation = replace(run.federation, test=replace(test, y=test.y.roll(1)))
        again = ClassModels(run).target_fit(hidden.x, resamples=0)
        np.testing.assert_array_equal(first.p, again.p)  # type: ignore[arg-type]
        assert torch.equal(first.model.module.head.bias, again.model.module.head.bias)  # type: ignore[union-attr, arg-type]


def test_models_that_were_not_kept_are_missed_in_a_sentence(digits_run: TrainedRun) -> None:
    run = fl.run("fedavg", digits_run.federation, "mlp", rounds=1).trained
    with pytest.raises(ConfigError, match="last models were not stored; run with 'average'"):
        ClassModels(run).target_fit(run.federation.test.x)


def test_fedssa_for_a_buyer_is_fedssa_after_training() -> None:
    """The same inputs, views and settings give the same weights, whoever brings the inputs."""
    setup = fl.Experiment(
        fl.methods.fedavg(),
        fl.data.federate("digits", "niid1", clients=5, target="skew"),
        lambda: fl.models.make("mlp", classes=10, inputs=(1, 8, 8), hidden=(16,)),
        rounds=2,
        local=fl.Local(epochs=2, batch_size=16, lr=0.1),
        views=("blur",),
        evaluation=Evaluation(what=("global", "average")),
    )
    result, policy = fl.run(setup), SelfSupervised(optimiser="adam", steps=40)
    expected = after_training(setup, result, policy)
    unlabelled = setup.federation.unlabelled
    assert unlabelled is not None
    mixture = ClassModels(result.trained).fedssa(unlabelled.x, policy, views=("blur",))
    assert mixture.p is not None
    np.testing.assert_allclose(mixture.p, expected.p, rtol=1e-9)
    test = setup.federation.test
    assert mixture.model.evaluate(test.x, test.y)["accuracy"] == pytest.approx(expected.accuracy)

"""CCVR: Gaussians of the clients' features from sums, and a head trained on draws from them."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.reference import softmax
from torch import nn

import fedloom as fl
from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.parts.uplink import SecureSum
from fedloom_apps.customise.calibration import CCVR, ClassGaussians, class_moments, statistics


def clients(classes: int = 4, d: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """Three clients, one with a single sample, the only one of its class; nobody has the last class."""
    draw = np.random.default_rng(0)
    pairs = [(draw.normal(size=(n, d)), draw.integers(0, classes - 2, n)) for n in (9, 6)]
    return [*pairs, (draw.normal(size=(1, d)), np.array([classes - 2]))]


def gaussians_of(parts: list[tuple[np.ndarray, np.ndarray]], classes: int = 4) -> ClassGaussians:
    moments = [class_moments(torch.from_numpy(x), torch.from_numpy(y), classes) for x, y in parts]
    return ClassGaussians.of(**{name: torch.stack([m[name] for m in moments]).sum(0) for name in moments[0]})


def test_sums_of_clients_give_the_moments_of_the_pooled_features() -> None:
    parts = clients()
    gaussians, x, y = gaussians_of(parts), *(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    for c in (0, 1):
        np.testing.assert_allclose(gaussians.mean[c], x[y == c].mean(0), atol=1e-12)
        np.testing.assert_allclose(gaussians.covariance[c], np.cov(x[y == c].T), atol=1e-12)
    np.testing.assert_allclose(gaussians.mean[2], x[y == 2][0], atol=1e-12)
    np.testing.assert_allclose(gaussians.covariance[2:], 0, atol=1e-12)
    assert gaussians.n.tolist() == [*np.bincount(y, minlength=4)]


def test_they_are_those_of_the_papers_equations() -> None:
    """Its server has each client's own mean and unbiased covariance."""
    parts = [(x, np.arange(len(x)) % 2) for x, _ in clients()[:2]]
    gaussians = gaussians_of(parts)
    for c in (0, 1):
        features = [x[y == c] for x, y in parts]
        n = sum(map(len, features))
        mu = sum(len(x) / n * x.mean(0) for x in features)
        sigma = sum((len(x) - 1) / (n - 1) * np.cov(x.T) for x in features)
        sigma = sigma + sum(len(x) / (n - 1) * np.outer(x.mean(0), x.mean(0)) for x in features)
        np.testing.assert_allclose(gaussians.mean[c], mu, atol=1e-12)
        np.testing.assert_allclose(gaussians.covariance[c], sigma - n / (n - 1) * np.outer(mu, mu), atol=1e-12)


def test_virtual_features_have_these_moments() -> None:
    """Of 40 000 draws a mean is known to .005 standard deviations; a feature that never varies does not vary."""
    gaussians = gaussians_of(clients())
    gaussians.covariance[0, 2] = gaussians.covariance[0, :, 2] = 0
    features, y = gaussians.draw(40_000, seed=1)
    assert sorted(set(y.tolist())) == [0, 1, 2]
    for c in (0, 1, 2):
        samples = features[y == c].numpy()
        np.testing.assert_allclose(samples.mean(0), gaussians.mean[c], atol=0.03)
        np.testing.assert_allclose(np.cov(samples.T), gaussians.covariance[c], atol=0.05)
    assert features[y == 0][:, 2].std() < 1e-7
    assert torch.equal(features, gaussians.draw(40_000, seed=1)[0])


def test_the_head_takes_the_steps_of_sgd_on_the_cross_entropy() -> None:
    part = CCVR(epochs=3, batch_size=5, lr=0.3, seed=4)
    head, draw = nn.Linear(3, 4), np.random.default_rng(0)
    x, y = draw.normal(size=(12, 3)), draw.integers(0, 3, 12)
    weight, bias = part.fit(head, torch.from_numpy(x), torch.from_numpy(y))
    w, b = (t.detach().double().numpy() for t in (head.weight, head.bias))
    for epoch in range(3):
        order = rng.stream(4, "virtual order", epoch).permutation(12)
        for rows in (order[:5], order[5:10], order[10:]):
            p = softmax(x[rows] @ w.T + b)
            slope_w, slope_b = np.zeros_like(w), np.zeros_like(b)
            for i, row in enumerate(rows):
                error = p[i] - np.eye(4)[y[row]]
                slope_w, slope_b = slope_w + np.outer(error, x[row]), slope_b + error
            w, b = w - 0.3 * slope_w / len(rows), b - 0.3 * slope_b / len(rows)
    np.testing.assert_allclose(weight, w, atol=1e-12)
    np.testing.assert_allclose(bias, b, atol=1e-12)
    before = CCVR(epochs=0).fit(head, torch.from_numpy(x), torch.from_numpy(y))
    assert torch.equal(before[0], head.weight.detach().double())


@pytest.fixture(scope="module")
def pathological_run() -> fl.TrainedRun:
    federation = fl.data.federate("digits", "pathological", clients=5)
    return fl.run("feddyn", federation, "mlp", rounds=3, local=fl.Local(epochs=5, lr=0.1)).trained


def test_the_calibrated_model_serves_all_classes_and_the_body_is_the_same(pathological_run: fl.TrainedRun) -> None:
    test, model = pathological_run.federation.test, CCVR()(pathological_run)
    before, after = (candidate.evaluate(test.x, test.y)["accuracy"] for candidate in (pathological_run.server, model))
    assert after > before + 0.05
    for (name, old), new in zip(
        pathological_run.server.module.named_parameters(), model.module.parameters(), strict=True
    ):
        assert torch.equal(old, new) != name.startswith("head."), name


def test_statistics_pass_the_uplinks_of_the_method(pathological_run: fl.TrainedRun) -> None:
    """Masks cancel in the sums, and a method whose uplink hides single uploads is calibrated alike."""
    masked = copy.copy(pathological_run)
    masked.plan = replace(pathological_run.plan, method=replace(pathological_run.plan.method, uplink=(SecureSum(),)))
    for name in ("n", "mean", "covariance"):
        plain, hidden = (getattr(statistics(run, 10), name) for run in (pathological_run, masked))
        torch.testing.assert_close(hidden, plain, rtol=1e-5, atol=1e-5)


def test_clipped_sums_have_the_means_of_the_samples() -> None:
    """Clipping scales all that a client sends by one factor."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=draw), torch.arange(40) % 4
    sums = class_moments(x, y, 4)
    unclipped, clipped = (ClassGaussians.of(**{name: by * value for name, value in sums.items()}) for by in (1.0, 0.07))
    torch.testing.assert_close(clipped.mean, unclipped.mean)
    with pytest.raises(ConfigError, match="count no sample of any class: there are none, or uplinks hide them"):
        ClassGaussians.of(**{name: 0.04 * value for name, value in sums.items()}).draw(5)


def test_unseen_clients_send_nothing() -> None:
    federation = fl.data.federate("digits", "iid", clients=4, seed=1, held_out=0.0, unseen=0.5)
    trained = fl.run("fedavg", federation, "mlp", rounds=1).trained
    assert int(statistics(trained, 10).n.sum()) == sum(federation.train.index.sizes[:2])


def test_what_makes_no_sense_is_refused(pathological_run: fl.TrainedRun) -> None:
    with pytest.raises(ConfigError, match="the server has no whole model"):
        CCVR()(fl.run("fedper", pathological_run.federation, "mlp", rounds=1).trained)


def test_sums_over_samples_that_were_kept_private_are_refused(pathological_run: fl.TrainedRun) -> None:
    private = copy.copy(pathological_run)
    private.plan = replace(pathological_run.plan, local=replace(pathological_run.plan.local, dp_clip=1.0))
    with pytest.raises(ConfigError, match=r"local\.dp_clip keeps single samples private"):
        CCVR()(private)

"""The share of the mixing weight of the worst-off clients, and its distance from equal shares."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.runs import go

from fedloom.experiment.evaluation import Evaluation
from fedloom.metrics import divergence_from_uniform, hardest_weight

RECEIVED = Evaluation(what=("clients", "received"))


def test_divergence_is_zero_at_equal_weights_alone_and_log_n_at_a_corner() -> None:
    draw = np.random.default_rng(0)
    assert divergence_from_uniform(np.full(7, 0.2)) == pytest.approx(0.0, abs=1e-15)
    for _ in range(20):
        p = draw.dirichlet(np.ones(7))
        assert 0 < divergence_from_uniform(p) < np.log(7)
        assert divergence_from_uniform(p) == pytest.approx(float(np.sum(p * np.log(7 * p))), rel=1e-12)
    assert divergence_from_uniform([0.0, 3.0, 0.0]) == pytest.approx(np.log(3))


def test_the_hardest_clients_weight() -> None:
    accuracy = np.linspace(1, 0, 20)
    assert hardest_weight(accuracy, np.ones(20)) == pytest.approx(0.1)
    assert hardest_weight(accuracy, np.arange(20)) == pytest.approx((18 + 19) / np.arange(20).sum())
    assert hardest_weight(-accuracy, np.arange(20), direction="min") == pytest.approx(37 / 190)
    assert hardest_weight([0.5, float("nan"), 0.1], [1, 7, 3], share=0.5) == 0.75
    assert np.isnan(hardest_weight([0.5], [0.0]))


def test_runs_record_the_divergence() -> None:
    assert all(r["mixing/kl"] == pytest.approx(0, abs=1e-12) for r in go("scaffold", evaluation=RECEIVED).history)
    dropped = go("scaffold", evaluation=RECEIVED, drop_rate=0.3).history
    assert {r["failures"] for r in dropped} != {0}
    assert all(r["mixing/kl"] == pytest.approx(0, abs=1e-12) for r in dropped), "who is missing is no choice of weights"
    by_samples = go("fedavg", evaluation=RECEIVED).history[-1]
    assert 0.05 < by_samples["mixing/kl"] < np.log(6)
    assert "clients/accuracy/weighted" in by_samples

"""Membership inference against hand computations, and where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from fedloom.base.errors import ConfigError
from fedloom_apps.audit.inference import inference, lira, logit_confidence, loss_threshold


def test_the_figures_by_hand() -> None:
    scores = np.array([5.0, 4.0, 4.0, 3.0, 2.0, 1.0])
    member = np.array([True, True, False, True, False, False])
    figures = inference(scores, member, fpr=0.3)
    assert figures.auc == pytest.approx((3 + 2.5 + 2) / 9)
    assert figures.advantage == pytest.approx(2 / 3)  # at 3: all members, one of three others
    assert figures.tpr == pytest.approx(1 / 3)  # at 5, with no other
    assert inference(scores, member, fpr=0.34).tpr == 1.0
    assert inference(-scores, member).advantage == 0.0
    assert loss_threshold(np.array([0.1, 2.0])).tolist() == [-0.1, -2.0]


def test_lira_is_the_likelihood_ratio_sample_by_sample() -> None:
    draw = np.random.default_rng(0)
    shadows, inside = draw.normal(size=(6, 4)), np.array([[1, 0, 1, 0], [0, 1, 0, 1]] * 3, dtype=bool)
    target = draw.normal(size=4)
    expected = np.zeros(4)
    deviations = {}
    for kind in (True, False):
        rest = [shadows[inside[:, j] == kind, j] - shadows[inside[:, j] == kind, j].mean() for j in range(4)]
        deviations[kind] = np.sqrt(np.concatenate(rest) @ np.concatenate(rest) / (12 - 4))
    for j in range(4):
        for kind, sign in ((True, 1), (False, -1)):
            mean = shadows[inside[:, j] == kind, j].mean()
            expected[j] += sign * norm.logpdf(target[j], mean, deviations[kind])
    np.testing.assert_allclose(lira(target, shadows, inside), expected, rtol=1e-12)


def test_lira_beats_a_threshold_where_samples_differ_in_difficulty() -> None:
    draw = np.random.default_rng(1)
    n, s = 2000, 16
    hard, inside = draw.normal(scale=3, size=n), draw.random((s, n)) < 0.5
    inside[0], inside[1] = True, False
    phi = hard + 1.5 * inside + draw.normal(size=(s, n))
    member = draw.random(n) < 0.5
    target = hard + 1.5 * member + draw.normal(size=n)
    threshold, ratio = inference(target, member), inference(lira(target, phi, inside), member)
    assert threshold.auc < 0.68
    assert ratio.auc > 0.8
    same = inference(lira(hard + draw.normal(size=n), phi - 1.5 * inside, inside), member)
    assert abs(same.auc - 0.5) < 0.05


def test_rates_of_many_scores_are_those_of_each_threshold() -> None:
    """Also where scores are as many as samples, whose products no memory and no patience holds."""
    draw = np.random.default_rng(2)
    scores, member = draw.normal(size=300).round(1), draw.random(300) < 0.3
    rates = [[(scores[rows] >= t).mean() for rows in (member, ~member)] for t in np.unique(scores)]
    figures = inference(scores, member, fpr=0.1)
    assert figures.advantage == max(true - false for true, false in rates)
    assert figures.tpr == max(true for true, false in rates if false <= 0.1)
    many = np.arange(10**6, dtype=float)
    assert inference(many, many >= 10**6 / 2) == (1.0, 1.0, 1.0)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="give both"):
        inference(np.zeros(3), np.ones(3, dtype=bool))
    with pytest.raises(ConfigError, match="some are NaN; leave these out"):
        inference(np.array([np.nan, 1.0]), np.array([True, False]))
    with pytest.raises(ConfigError, match="more shadows"):
        lira(np.zeros(2), np.zeros((3, 2)), np.ones((3, 2), dtype=bool))
    with pytest.raises(ConfigError, match="several shadow models with some sample"):
        lira(np.zeros(2), np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[True, False], [False, True]]))
    assert np.isfinite(logit_confidence(np.array([0.0, 1.0]))).all()

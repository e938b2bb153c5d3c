"""Copies of training images among synthetic ones, against derivations in NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.samples import digits, normal
from scipy.spatial.distance import cdist
from scipy.stats import hypergeom, mannwhitneyu

from fedloom_apps.synthesis.generation import membership


@pytest.mark.parametrize("most", [2000, 5])
def test_membership_is_its_definition(most: int) -> None:
    training, held_out, synthetic = normal(25, 5, seed=1), normal(14, 5, seed=2), normal(9, 5, seed=3)
    t, h, m = (x.double().numpy() for x in (training, held_out, synthetic))
    figures = membership(training, held_out, synthetic, quantile=0.25, most=most)
    rows = np.linspace(0, 13, min(most, 14)).astype(int)
    dt, dh = cdist(m, t), cdist(m, h)
    between = cdist(h, h) + np.where(np.eye(14), np.inf, 0)
    r = dt.min(1) / (dt.min(1) + dh.min(1))
    to_training = cdist(h, t).min(1)[rows]
    fresh = to_training / (to_training + between.min(1)[rows])
    np.testing.assert_allclose(figures.to_training, dt.min(1))
    np.testing.assert_allclose(figures.to_held_out, dh.min(1))
    np.testing.assert_allclose(figures.held_out_to_training, to_training)
    np.testing.assert_array_equal(figures.index, dt.argmin(1))
    assert figures.copies == pytest.approx((r < np.quantile(fresh, 0.25)).mean())
    assert figures.near == pytest.approx((dt.min(1) < np.quantile(to_training, 0.25)).mean())
    assert figures.auc == pytest.approx(mannwhitneyu(fresh, r).statistic / (len(r) * len(fresh)))
    of_training = {int(i) for i, nearer in zip(dt.argmin(1), dt.min(1) < dh.min(1), strict=True) if nearer}
    of_held = {int(i) for i, nearer in zip(dh.argmin(1), dt.min(1) < dh.min(1), strict=True) if not nearer}
    count = len(of_training) + len(of_held)
    assert figures.members == len(of_training) / count
    assert figures.expected == 25 / 39
    chance = sum(hypergeom.pmf(i, 39, 25, count) for i in range(len(of_training), count + 1))
    assert figures.p_value == pytest.approx(chance)


def test_copies_are_found_and_fresh_images_are_not() -> None:
    x, _ = digits(shuffled=True)
    training, held_out, fresh = x[:900], x[900:1600], x[1600:1700]
    exact = membership(training, held_out, training[:100])
    assert exact.copies == exact.near == exact.auc == exact.members == 1
    assert exact.p_value < 1e-20
    assert exact.to_training.max() == 0
    assert exact.index.tolist() == list(range(100))
    noisy = membership(training, held_out, (training[:100] + 0.05 * normal(100, 1, 8, 8)).clamp(0, 1))
    assert noisy.copies > 0.9
    assert noisy.p_value < 1e-10
    half = membership(training, held_out, torch.cat([training[:50], fresh[:50]]))
    assert 0.45 < half.copies < 0.6
    assert half.p_value < 1e-3
    clean = membership(training, held_out, fresh)
    assert clean.copies < 0.06
    assert 0.4 < clean.auc < 0.6
    assert clean.p_value > 0.05


def test_a_smooth_average_is_near_and_no_copy() -> None:
    x, y = digits(shuffled=True)
    training, held_out = x[::2], x[1::2]
    means = torch.stack([training[y[::2] == c].mean(0) for c in range(10)])
    figures = membership(training, held_out, means, quantile=0.1)
    assert figures.copies <= 0.3
    assert figures.p_value > 0.01


def test_the_p_value_keeps_its_level_also_where_images_are_alike() -> None:
    """Forty synthetic sets of ten images, each ten times over: a test that counted images would refuse most of them."""
    levels = []
    for seed in range(60):
        x = normal(400, 6, seed=seed)
        base = normal(10, 6, seed=1000 + seed).repeat_interleave(10, 0)
        levels.append(membership(x[:200], x[200:], base + 1e-3 * normal(100, 6, seed=2000 + seed)).p_value)
    assert np.mean(np.array(levels) <= 0.05) <= 0.1
    assert np.mean(np.array(levels) <= 0.5) <= 0.65

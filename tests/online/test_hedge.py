"""Hedge: its bound on arbitrary sequences, and its handling of experts that fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedloom.base.errors import ConfigError
from fedloom_apps.online.learners import Hedge, weighted_sum

LOSSES = st.tuples(st.integers(1, 40), st.integers(1, 8)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.floats(0, 1, width=32))
)


@given(LOSSES, st.sampled_from([0.1, 0.5, 0.9]))
def test_the_mixture_loses_little_more_than_the_best_expert(losses: np.ndarray, gamma: float) -> None:
    hedge = Hedge(gamma)
    total, suffered = hedge.init(losses.shape[1]), 0.0
    p = np.full(losses.shape[1], 1 / losses.shape[1])
    for row in losses:
        np.testing.assert_allclose(hedge.p(total).numpy(), p, atol=1e-9)
        suffered += weighted_sum(hedge.p(total), torch.from_numpy(row))
        total = hedge.update(total, torch.from_numpy(row))
        p = p * gamma**row / (p * gamma**row).sum()  # algorithm 10, as it is written
    best = float(losses.sum(0).min())
    assert suffered <= hedge.bound(best, losses.shape[1]) + 1e-9
    assert hedge.bound(best, losses.shape[1]) == pytest.approx(
        (best * math.log(1 / gamma) + math.log(losses.shape[1])) / (1 - gamma)
    )


def test_an_expert_that_diverges_is_never_trusted_again() -> None:
    hedge = Hedge()
    total = hedge.update(hedge.init(3), torch.tensor([0.5, float("nan"), 0.5]))
    total = hedge.update(total, torch.tensor([0.5, 0.0, 0.5]))
    assert hedge.p(total).tolist() == [0.5, 0.0, 0.5]
    assert hedge.active(total) == [0, 2]
    assert weighted_sum(hedge.p(total), torch.tensor([1.0, float("nan"), 0.0])) == 0.5


def test_experts_are_given_up_below_the_threshold() -> None:
    hedge = Hedge(retire=1e-4)
    total = hedge.init(2)
    for _ in range(4):
        total = hedge.update(total, torch.tensor([0.0, 1.0]))
    assert hedge.active(total) == [0]
    assert Hedge().active(4 * torch.tensor([0.0, 1.0])) == [0, 1]


@pytest.mark.parametrize("settings", [{"gamma": 0.0}, {"gamma": 1.0}, {"retire": 0.5}, {"retire": -1.0}])
def test_impossible_settings(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Hedge(**settings)

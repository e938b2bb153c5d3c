"""Regret against definitions, a general solver and a closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedloom.base.errors import ConfigError
from fedloom.metrics.regret import (
    best_fixed,
    device_bound,
    lipschitz,
    played,
    regret,
    regret_of_losses,
    silo_bound,
)
from fedloom.parts.mixing.responses import respond

SEEDS = st.integers(0, 10_000)


def value(p: np.ndarray, responses: np.ndarray) -> float:
    return float(-np.log(1 + responses @ p).sum())


def solver(responses: np.ndarray) -> float:
    """The best value by sequential quadratic programming, from several starts."""
    k = responses.shape[1]
    sums = {"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones(k)}
    values = [
        minimize(
            value, start, (responses,), jac=lambda p, r: -(r / (1 + r @ p)[:, None]).sum(0), bounds=[(0, 1)] * k,
            constraints=sums, method="SLSQP", options={"ftol": 1e-14, "maxiter": 500},
        ).fun
        for start in (np.full(k, 1 / k), 0.9 * np.eye(k)[0] + 0.1 / k)
    ]  # fmt: skip
    return min(values)


@given(SEEDS, st.integers(1, 7), st.integers(1, 40), st.sampled_from([1e-3, 1.0, 20.0]))
def test_best_fixed_decision_is_that_of_a_general_solver(seed: int, k: int, rounds: int, scale: float) -> None:
    responses = scale * np.random.default_rng(seed).random((rounds, k))
    p = best_fixed(responses)
    assert (p >= 0).all()
    assert abs(p.sum() - 1) < 1e-12
    assert abs(value(p, responses) - solver(responses)) <= 1e-6 * max(1, scale)
    assert value(p, responses) <= solver(responses) + 1e-8


@given(SEEDS, st.integers(1, 30), st.integers(1, 60))
def test_best_fixed_decision_satisfies_its_optimality_conditions(seed: int, k: int, rounds: int) -> None:
    """(1/T) Σ R_i/⟨p, R⟩ ≤ 1 for all clients, with equality where p > 0; on extremes and duplicates as well."""
    draw = np.random.default_rng(seed)
    responses = draw.random((rounds, k)) * 10.0 ** draw.integers(-9, 9, (rounds, 1))
    responses[:, -1] = responses[:, 0]
    responses[draw.random(rounds) < 0.3] = np.eye(k)[draw.integers(k)]
    p = best_fixed(responses)
    gain = ((1 + responses) / (1 + responses @ p)[:, None]).mean(0)
    assert gain.max() <= 1 + 1e-9
    assert abs(p @ gain - 1) < 1e-9


def test_best_of_two_clients_in_closed_form() -> None:
    """Client 1 responds in a share q of the rounds, client 2 in the others: p_1 = 3q - 1, cut to [0, 1]."""
    for wins in range(11):
        responses = np.array([[1.0, 0.0]] * wins + [[0.0, 1.0]] * (10 - wins))
        assert best_fixed(responses)[0] == pytest.approx(np.clip(3 * wins / 10 - 1, 0, 1), abs=1e-6)
    assert np.isfinite(best_fixed(np.zeros((0, 3)))).all()


def test_two_hundred_clients_over_a_thousand_rounds() -> None:
    responses = np.random.default_rng(0).random((1000, 200)) / 200
    p = best_fixed(responses)
    assert ((1 + responses) / (1 + responses @ p)[:, None]).mean(0).max() <= 1 + 1e-10


@given(SEEDS)
def test_the_curves_agree_where_they_mean_the_same(seed: int) -> None:
    draw = np.random.default_rng(seed)
    decisions, responses = draw.dirichlet(np.ones(4), 12), draw.random((12, 4))
    curve, prefixes = regret(decisions, responses), regret(decisions, responses, every_prefix=True)
    assert curve[-1] == pytest.approx(prefixes[-1], abs=1e-9)
    assert (prefixes >= curve - 1e-9).all()  # the best of a prefix is at least as good there as the best of all
    for t in (1, 5, 12):
        assert prefixes[t - 1] == pytest.approx(regret(decisions[:t], responses[:t])[-1], abs=1e-9)
    fixed = np.tile(decisions[:1], (12, 1))
    assert (regret(fixed, responses, every_prefix=True) >= -1e-9).all()
    assert regret(np.tile(best_fixed(responses), (12, 1)), responses)[-1] == pytest.approx(0, abs=1e-9)


def test_regret_from_losses_is_that_of_their_responses() -> None:
    draw = np.random.default_rng(1)
    decisions, losses = draw.dirichlet(np.ones(3), 9), draw.random((9, 3))

    def cdf(f: np.ndarray) -> np.ndarray:
        return respond(f, "normal", 1.0, 0.0, 0.0, 1 / 3)

    responses = np.array([cdf(f) for f in losses])
    expected = np.cumsum(-np.log(1 + (decisions * responses).sum(1)) + np.log(1 + responses @ best_fixed(responses)))
    np.testing.assert_allclose(regret_of_losses(decisions, losses, cdf), expected, atol=1e-12)


def test_decisions_used_are_played_one_round_later() -> None:
    decisions = np.random.default_rng(2).dirichlet(np.ones(4), 5)
    np.testing.assert_array_equal(played(decisions)[1:], decisions[:-1])
    np.testing.assert_array_equal(played(decisions)[0], 0.25)
    np.testing.assert_array_equal(played(decisions, decisions[3])[0], decisions[3])


def test_bounds_in_numbers_and_growth() -> None:
    assert silo_bound(0, 7, 0.5) == pytest.approx(7.0)
    assert silo_bound(160, 10, 0.1) == pytest.approx(2 * (1 + np.log(2)))
    assert device_bound(100, 3, 2.0) == pytest.approx(40 * np.sqrt(np.log(3)))
    assert device_bound(400, 3, 2.0) == pytest.approx(2 * device_bound(100, 3, 2.0))
    assert device_bound(9, 1, 1.0) == 0
    assert lipschitz(0.5, 0.75) == pytest.approx(0.5)


@given(SEEDS, st.integers(1, 6), st.floats(0, 1), st.floats(0.01, 3))
def test_no_entry_of_a_gradient_is_larger_than_the_lipschitz_constant(
    seed: int, k: int, low: float, span: float
) -> None:
    draw = np.random.default_rng(seed)
    responses = low + span * draw.choice([0.0, 1.0, draw.random()], (50, k))
    decisions = draw.dirichlet(np.full(k, 0.2), 50)
    gradients = responses / (1 + (decisions * responses).sum(1))[:, None]
    assert gradients.max() <= lipschitz(low, low + span) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: regret([[1.0]], [[1.0, 1.0]]), "not of the same rounds and clients"),
        (lambda: regret([[0.5, 0.5]] * 3, [[1.0, 0.0]]), r"decisions \[3, 2\] and responses \[1, 2\]"),
        (lambda: best_fixed([1.0, 2.0]), r"numbers \[rounds, clients\], not an array of shape \[2\]"),
        (lambda: best_fixed([[np.nan, 2.0]]), "responses must be finite, but 1 of 2 are not"),
        (lambda: best_fixed([[-1.0, 2.0]]), "a response is greater than -1, not -1"),
    ],
)
def test_impossible_arrays_end_in_one_sentence(call, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()

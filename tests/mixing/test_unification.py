"""Static policies as one exponentiated-gradient step from n_i/n (Hahn 2024, table 3.2), derived and direct."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.rounds import round_info
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedloom.core.parts import Mixing
from fedloom.core.simplex import exponentiated
from fedloom.parts.mixing import QFFL, TERM, Proportional

Of = Callable[[np.ndarray], np.ndarray]

TABLE: dict[str, tuple[Mixing, Of, float, Of]] = {  # part, response, ζ, and the new p over n_i as it is defined
    "FedAvg": (Mixing(), np.zeros_like, 1.0, np.ones_like),
    "q-FedAvg, q 0.1": (QFFL(0.1), lambda f: 0.1 * np.log(f), 1.0, lambda f: f**0.1),
    "q-FedAvg, q 5": (QFFL(5.0), lambda f: 5 * np.log(f), 1.0, lambda f: f**5),
    "TERM, λ 0.1": (TERM(0.1), lambda f: f, 10.0, lambda f: np.exp(0.1 * f)),
    "TERM, λ 10": (TERM(10.0), lambda f: f, 0.1, lambda f: np.exp(10 * f)),
    "PropFair, M 5": (Proportional(5.0), lambda f: -np.log(5 - f), 1.0, lambda f: 1 / (5 - f)),
    "PropFair, M 2": (Proportional(2.0, 1e-9), lambda f: -np.log(2 - f), 1.0, lambda f: 1 / (2 - f)),
}


def clients(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(1, 500, size), draw.uniform(0.01, 1.99, size)


@pytest.mark.parametrize("name", TABLE)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_parts_derived_and_direct_forms_are_one(name: str, seed: int, size: int) -> None:
    part, response, step, factor = TABLE[name]
    n, f = clients(seed, size)
    direct = n * factor(f) / (n * factor(f)).sum()
    np.testing.assert_allclose(exponentiated(n / n.sum(), response(f), step), direct, rtol=1e-10)
    state, p = part.coefficients({}, round_info(n, f, clients=size + 3))
    np.testing.assert_allclose(p, direct, rtol=1e-10)
    again = part.coefficients(state, round_info(n, f, clients=size + 3))[1]
    np.testing.assert_array_equal(again, p, "a static policy has no memory")


def lowest(value: Callable[[np.ndarray], float], size: int) -> np.ndarray:
    sums = {"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones(size)}
    optimum = minimize(
        value, np.full(size, 1 / size), bounds=[(1e-12, 1)] * size, constraints=sums, method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )  # fmt: skip
    return optimum.x


@pytest.mark.parametrize("name", TABLE)
def test_derived_forms_minimise_their_objective(name: str) -> None:
    """-⟨p, r⟩ + ζ Σ p log(p/last): the distance to the last decision makes eq. (3.2) of eq. (3.1)."""
    _, response, step, _ = TABLE[name]
    n, f = clients(7, 5)
    last, r = n / n.sum(), response(f)
    p = exponentiated(last, r, step)
    optimum = lowest(lambda q: float(-q @ r + step * (q * np.log(q / last)).sum()), 5)
    np.testing.assert_allclose(p, optimum, atol=2e-5)


def test_the_negative_entropy_alone_forgets_the_last_decision() -> None:
    """Eq. (3.1) read literally, with R(p) = Σ p log p, gives p_i ∝ exp(r_i/ζ), which is (3.2) for equal n_i alone."""
    n, f = clients(7, 5)
    optimum = lowest(lambda q: float(-q @ f + 0.7 * (q * np.log(q)).sum()), 5)
    np.testing.assert_allclose(optimum, exponentiated(np.ones(5), f, 0.7), atol=2e-5)
    assert np.abs(optimum - exponentiated(n / n.sum(), f, 0.7)).max() > 0.04


@given(st.integers(0, 10_000))
def test_two_steps_are_one_with_the_sum_of_the_responses(seed: int) -> None:
    """What a policy with a memory would do: the last decision carries all responses before."""
    draw = np.random.default_rng(seed)
    last, first, second = draw.dirichlet(np.ones(6)) + 1e-6, draw.normal(size=6), draw.normal(size=6)
    twice = exponentiated(exponentiated(last, first, 0.4), second, 0.4)
    np.testing.assert_allclose(twice, exponentiated(last, first + second, 0.4), rtol=1e-10)


@given(st.integers(0, 10_000), st.floats(-50, 50))
def test_a_shift_of_all_responses_changes_nothing(seed: int, shift: float) -> None:
    draw = np.random.default_rng(seed)
    last, r = draw.dirichlet(np.ones(4)) + 1e-6, draw.normal(size=4)
    np.testing.assert_allclose(exponentiated(last, r + shift), exponentiated(last, r), rtol=1e-9)

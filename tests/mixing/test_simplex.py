"""The simplex against definitions and independent solvers."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
from helpers.fair import shortest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedloom.core.simplex import exponentiated, min_norm_box_qp, minimise, project

SEEDS = st.integers(0, 10_000)


def on_simplex(p: np.ndarray) -> bool:
    return bool((p >= 0).all() and abs(p.sum() - 1) < 1e-12)


@given(SEEDS, st.integers(1, 30), st.sampled_from([1e-6, 1.0, 1e3, 1e30]))
def test_projection_satisfies_its_optimality_conditions(seed: int, size: int, scale: float) -> None:
    """⟨v - p, q - p⟩ ≤ 0 for every corner q: only the nearest point has it."""
    v = scale * np.random.default_rng(seed).normal(size=size)
    p = project(v)
    assert on_simplex(p)
    inner = (v - p) - (v - p) @ p
    assert inner.max() <= 1e-9 * max(1, np.abs(v).max())


def test_projection_leaves_the_simplex_alone_and_ignores_shifts() -> None:
    p = np.array([0.2, 0.0, 0.8])
    np.testing.assert_allclose(project(p), p, atol=1e-15)
    np.testing.assert_allclose(project(p + 7), p, atol=1e-15)


@given(SEEDS, st.sampled_from([0.1, 1.0, 5.0]))
def test_exponentiated_gradient_minimises_its_problem(seed: int, step: float) -> None:
    draw = np.random.default_rng(seed)
    last, r = draw.dirichlet(np.ones(5)) + 1e-3, draw.normal(size=5)
    last /= last.sum()
    p = exponentiated(last, r, step)
    slope = -r + step * (np.log(p / last) + 1)  # of the problem's value: the same in every direction
    np.testing.assert_allclose(slope, slope.mean(), atol=1e-9)
    assert on_simplex(p)


@pytest.mark.parametrize("big", [1e-30, 1e30, 1e300])
def test_exponentiated_gradient_does_not_overflow(big: float) -> None:
    assert on_simplex(exponentiated(np.array([1.0, 2.0, 3.0]), np.array([0.0, big, -big])))
    assert on_simplex(exponentiated(np.array([1.0, 2.0]), np.array([0.0, -np.inf])))


def exhaustive(quadratic: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """The best of the stationary points of all faces: 2^K - 1 systems of equations."""
    size = len(linear)
    best, lowest = np.zeros(size), np.inf
    for rows in chain.from_iterable(combinations(range(size), n) for n in range(1, size + 1)):
        at = list(rows)
        system = np.block(
            [[quadratic[np.ix_(at, at)], np.ones((len(at), 1))], [np.ones((1, len(at))), np.zeros((1, 1))]]
        )
        inner = np.linalg.solve(system, np.append(-linear[at], 1.0))[:-1]
        p = np.zeros(size)
        p[at] = inner
        value = 0.5 * p @ quadratic @ p + linear @ p
        if (inner >= -1e-12).all() and value < lowest:
            best, lowest = p, value
    return best


@given(SEEDS, st.integers(1, 7), st.sampled_from([0.01, 1.0, 30.0]))
def test_quadratic_programme_is_the_best_face(seed: int, size: int, scale: float) -> None:
    draw = np.random.default_rng(seed)
    root = draw.normal(size=(size, size + 1))
    quadratic, linear = root @ root.T + 0.05 * np.eye(size), scale * draw.normal(size=size)
    starts = [np.full(size, 1 / size), np.eye(size)[draw.integers(size)], draw.dirichlet(np.full(size, 0.3))]
    for start in starts:
        p = minimise(quadratic, linear, start)
        assert on_simplex(p)
        np.testing.assert_allclose(p, exhaustive(quadratic, linear), atol=1e-9)


def test_quadratic_programme_agrees_with_a_general_solver() -> None:
    draw = np.random.default_rng(0)
    root = draw.normal(size=(25, 40))
    quadratic, linear = root @ root.T, 20 * draw.normal(size=25)
    p = minimise(quadratic, linear, np.full(25, 0.04))
    optimum = minimize(
        lambda p: 0.5 * p @ quadratic @ p + linear @ p,
        np.full(25, 0.04),
        jac=lambda p: quadratic @ p + linear,
        bounds=[(0, 1)] * 25,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones(25)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    np.testing.assert_allclose(p, optimum.x, atol=5e-6)
    assert 0.5 * p @ quadratic @ p + linear @ p <= optimum.fun + 1e-8
    assert (p == 0).any()


@given(SEEDS)
def test_one_by_one_ends_at_the_same_point(seed: int) -> None:
    """Ill-conditioned problems, where changing all coordinates at once may cycle."""
    draw = np.random.default_rng(seed)
    root = draw.normal(size=(8, 2))
    quadratic, linear = root @ root.T * 100 + 1e-3 * np.eye(8), draw.normal(size=8)
    p = minimise(quadratic, linear, np.full(8, 1 / 8))
    np.testing.assert_allclose(p, exhaustive(quadratic, linear), atol=1e-6)


@given(SEEDS, st.integers(2, 5), st.integers(1, 7), st.sampled_from([0.0, 0.1, 0.4, 1.0]))
def test_shortest_mixture_between_bounds(seed: int, size: int, dimension: int, eps: float) -> None:
    """Against all faces; with fewer dimensions than vectors only the length is determined."""
    draw = np.random.default_rng(seed)
    units = draw.normal(size=(size, dimension))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    start = draw.dirichlet(np.full(size, 2.0))
    low, high = np.maximum(start - eps, 0), np.minimum(start + eps, 1)
    p = min_norm_box_qp(units @ units.T, start, low, high)
    assert abs(p.sum() - 1) < 1e-9
    assert (p >= low - 1e-12).all()
    assert (p <= high + 1e-12).all()
    gram = units @ units.T + 1e-9 * np.eye(size)  # the faces' systems of equations need it
    q = shortest(gram, low, high)
    assert np.linalg.norm(p @ units) <= np.linalg.norm(q @ units) + 1e-6
    if eps == 1.0:  # common descent: no vector points against the shortest mixture
        assert (units @ (p @ units)).min() >= np.sum((p @ units) ** 2) - 1e-6

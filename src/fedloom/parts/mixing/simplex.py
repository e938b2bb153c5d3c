"""The probability simplex Δ = {p ≥ 0, Σ p = 1}: projection, exponentiated gradient, quadratic programmes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def project(v: Vector) -> Vector:
    """The Euclidean projection of v [K] onto the simplex, by sorting: max(v - τ, 0) with τ such that the sum is 1.

    >>> project(np.array([0.5, 0.5, 1.0])).round(3)
    array([0.167, 0.167, 0.667])
    >>> project(np.array([0.0, 1e30, 1.0]))
    array([0., 1., 0.])
    """
    v = v - v.max()  # does not change the projection, and keeps the sums small
    ordered = np.sort(v)[::-1]
    thresholds = (np.cumsum(ordered) - 1) / np.arange(1, len(v) + 1)
    tau = thresholds[np.flatnonzero(ordered > thresholds)[-1]]
    p = np.maximum(v - tau, 0)
    return p / p.sum()


def exponentiated(last: Vector, response: Vector, step: float = 1.0) -> Vector:
    """p_i ∝ last_i exp(r_i/ζ) [K]: the minimiser over the simplex of -⟨p, r⟩ + ζ KL(p‖last).

    This is one step of exponentiated gradient, which covers the static family: with last_i = n_i/n, r = 0 gives FedAvg,
    r = q log F q-FedAvg, r = F with ζ = 1/λ TERM, and r = -log(M - F) PropFair (Hahn 2024, table 3.2).

    Args:
        last: the previous decision [K], up to a factor.
        response: r [K], finite, or -inf for a coefficient of zero.
        step: ζ > 0.

    >>> exponentiated(np.array([1.0, 3.0]), np.zeros(2))
    array([0.25, 0.75])
    """
    score = np.log(last) + (response - response.max()) / step
    p = np.exp(score - score.max())
    return p / p.sum()


def minimise(quadratic: NDArray[np.float64], linear: Vector, start: Vector, tolerance: float = 1e-12) -> Vector:
    """argmin over the simplex of ½pᵀHp + ⟨c, p⟩ [K], exact, by an active-set method.

    The equations of the free coordinates are solved; coordinates that become negative are fixed at zero, and those that
    gain by leaving zero are freed. This is done first for all coordinates at once (few solves, but it may cycle), then,
    if necessary, one by one from ``start``; the value then decreases, which guarantees termination for strictly convex
    H.

    Args:
        quadratic: H [K, K], positive definite.
        linear: c [K].
        start: a point of the simplex; the closer to the solution, the fewer solves.
        tolerance: relative tolerance of the optimality conditions.

    >>> minimise(np.eye(3), np.array([0.0, -1.0, 5.0]), np.full(3, 1 / 3))
    array([0., 1., 0.])
    """
    slack_allowed = tolerance * max(np.abs(linear).max(), 1e-300)

    def solve(free: NDArray[np.bool_]) -> tuple[NDArray[np.intp], Vector, float]:
        """The free rows, the minimiser on Σ p = 1 with all others at zero, and the common gradient entry there."""
        rows = np.flatnonzero(free)
        ones_and_c = np.stack([np.ones(len(rows)), linear[rows]], 1)
        u, v = np.linalg.solve(quadratic[np.ix_(rows, rows)], ones_and_c).T
        level = (1 + v.sum()) / u.sum()
        return rows, level * u - v, level

    def gains(free: NDArray[np.bool_], rows: NDArray[np.intp], target: Vector, level: float) -> NDArray[np.bool_]:
        """Mask of the coordinates at zero that would decrease the objective by becoming positive."""
        return ~free & (quadratic[:, rows] @ target + linear < level - slack_allowed - tolerance * abs(level))

    free, fewest, tries = start > 0, len(start) + 1, 5
    while tries and free.any():
        rows, target, level = solve(free)
        leave = gains(free, rows, target, level)
        wrong = int((target < 0).sum() + leave.sum())
        if not wrong:
            return _point(len(start), rows, target)
        tries = 5 if wrong < fewest else tries - 1
        fewest = min(fewest, wrong)
        free[rows[target < 0]] = False
        free |= leave

    p, free = start.copy(), start > 0
    for _ in range(100 * len(p)):
        rows, target, level = solve(free)
        low = target < 0
        if low.any():
            shares = p[rows][low] / (p[rows][low] - target[low])
            p[rows] += shares.min() * (target - p[rows])
            stop = rows[low][shares.argmin()]
            p[stop], free[stop] = 0.0, False
            continue
        p = _point(len(p), rows, target)
        if not gains(free, rows, target, level).any():
            break
        free[(quadratic @ p + linear - level + np.where(free, np.inf, 0)).argmin()] = True
    return p


def _point(size: int, rows: NDArray[np.intp], values: Vector) -> Vector:
    p = np.zeros(size)
    p[rows] = np.maximum(values, 0)
    return p / p.sum()

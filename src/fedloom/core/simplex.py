"""The probability simplex Δ = {p ≥ 0, Σ p = 1}: projection, exponentiated gradient, quadratic programmes, cohorts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedloom.core.context import RoundInfo

Vector = NDArray[np.float64]
TOLERANCE = 1e-12  # relative, of the optimality conditions of ``minimise``
RIDGE = 1e-12  # relative ridge on the diagonal; linearly dependent vectors have no unique solution


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


def minimise(quadratic: NDArray[np.float64], linear: Vector, start: Vector) -> Vector:
    """argmin over the simplex of ½pᵀHp + ⟨c, p⟩ [K], exact, by an active-set method.

    The equations of the free coordinates are solved; coordinates that become negative are fixed at zero, and those that
    gain by leaving zero are freed. This is done first for all coordinates at once (few solves, but it may cycle), then,
    if necessary, one by one from ``start``; the value then decreases, which guarantees termination for strictly convex
    H.

    Args:
        quadratic: H [K, K], positive definite.
        linear: c [K].
        start: a point of the simplex; the closer to the solution, the fewer solves.

    >>> minimise(np.eye(3), np.array([0.0, -1.0, 5.0]), np.full(3, 1 / 3))
    array([0., 1., 0.])
    """
    slack_allowed = TOLERANCE * max(np.abs(linear).max(), 1e-300)

    def solve(free: NDArray[np.bool_]) -> tuple[NDArray[np.intp], Vector, float]:
        """The free rows, the minimiser on Σ p = 1 with all others at zero, and the common gradient entry there."""
        rows = np.flatnonzero(free)
        ones_and_c = np.stack([np.ones(len(rows)), linear[rows]], 1)
        u, v = np.linalg.solve(quadratic[np.ix_(rows, rows)], ones_and_c).T
        level = (1 + v.sum()) / u.sum()
        return rows, level * u - v, level

    def gains(free: NDArray[np.bool_], rows: NDArray[np.intp], target: Vector, level: float) -> NDArray[np.bool_]:
        """Mask of the coordinates at zero that would decrease the objective by becoming positive."""
        return ~free & (quadratic[:, rows] @ target + linear < level - slack_allowed - TOLERANCE * abs(level))

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


def min_norm_box_qp(gram: NDArray[np.float64], start: Vector, low: Vector, high: Vector) -> Vector:
    """argmin ½pᵀGp subject to Σ p = 1 and low ≤ p ≤ high [n], exact, by an active-set method.

    From ``start``, the free coordinates move to the minimiser on their plane, or to the first bound on the way, which
    then becomes active. When no bound blocks, the pair of coordinates that violates optimality most is freed.

    Args:
        gram: G [n, n], positive semidefinite.
        start: a feasible point [n].
        low: lower bounds [n].
        high: upper bounds [n].

    >>> min_norm_box_qp(np.diag([1.0, 3.0]), np.array([0.5, 0.5]), np.zeros(2), np.ones(2))
    array([0.75, 0.25])
    >>> min_norm_box_qp(np.diag([1.0, 3.0]), np.array([0.5, 0.5]), np.full(2, 0.4), np.full(2, 0.6))
    array([0.6, 0.4])
    """
    gram = gram + RIDGE * max(np.trace(gram), 1.0) * np.eye(len(start))
    p, free = start.copy(), high > low
    for _ in range(100 * len(p)):
        rows = np.flatnonzero(free)
        if len(rows) > 1:
            constants = gram[np.ix_(rows, ~free)] @ p[~free]
            u, v = np.linalg.solve(gram[np.ix_(rows, rows)], np.stack([np.ones(len(rows)), constants], 1)).T
            target = (p[rows].sum() + v.sum()) / u.sum() * u - v
            move = target - p[rows]
            bound = np.where(move > 0, high[rows], low[rows])
            share = np.divide(bound - p[rows], move, out=np.full(len(rows), np.inf), where=np.abs(move) > 1e-15)
            first = int(share.argmin())
            if share[first] < 1:
                p[rows] += max(share[first], 0.0) * move
                p[rows[first]], free[rows[first]] = bound[first], False
                continue
            p[rows] = target
        slope = gram @ p
        up, down = (high > low) & (p < high), (high > low) & (p > low)
        if not (up.any() and down.any()):
            break
        rising = np.where(up, slope, np.inf).argmin()
        falling = np.where(down, slope, -np.inf).argmax()
        if slope[falling] - slope[rising] <= 1e-12 * max(1.0, np.abs(slope).max()):
            break
        free[[rising, falling]] = True
    return p


def by_samples(info: RoundInfo) -> Vector:
    """n_i/n of all K clients [K]; where only the cohort's sizes are known, others count with the mean of those.

    >>> by_samples(RoundInfo.of_cohort([0, 2], [10, 30], clients=3)).round(3)
    array([0.167, 0.333, 0.5  ])
    """
    n = np.full(info.facts.clients, info.samples.mean()) if info.sizes is None else info.sizes.astype(np.float64)
    n[info.cohort] = info.samples
    return n / n.sum()


def restrict_to_cohort(p: Vector, cohort: np.ndarray) -> Vector:
    """p [K] restricted to the cohort and normalised, [|S|].

    If all of these are 0, the coefficients are NaN, and the round leaves the model unchanged.

    >>> restrict_to_cohort(np.array([0.5, 0.2, 0.3]), np.array([1, 2]))
    array([0.4, 0.6])
    >>> restrict_to_cohort(np.array([1.0, 0.0, 0.0]), np.array([1, 2]))
    array([nan, nan])
    """
    weights = p[cohort]
    return weights / weights.sum() if weights.sum() > 0 else np.full(len(weights), np.nan)

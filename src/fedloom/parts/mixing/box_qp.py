"""The minimum-norm convex combination of vectors, with bounds on every coefficient."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedloom.parts.mixing.simplex import Vector

RIDGE = 1e-12  # relative ridge on the diagonal; linearly dependent vectors have no unique solution


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
            held = gram[np.ix_(rows, ~free)] @ p[~free]
            u, v = np.linalg.solve(gram[np.ix_(rows, rows)], np.stack([np.ones(len(rows)), held], 1)).T
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

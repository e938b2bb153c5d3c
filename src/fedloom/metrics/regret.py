"""Regret of mixing coefficients against the best fixed decision.

In round t a policy commits to p^t, then sees the response r^t and suffers ℓ_t(p^t) = -log(1 + ⟨p^t, r^t⟩) (Hahn 2024,
eq. 3.3). Its regret after T rounds is Σ ℓ_t(p^t) - min_p Σ ℓ_t(p) over the simplex (eq. 3.5). Responses come from
losses by ``fedloom.parts.mixing.responses.respond``.

>>> always_first, responses = np.array([[1.0, 0.0]] * 4), np.array([[0.0, 1.0]] * 4)
>>> regret(always_first, responses).round(3)
array([0.693, 1.386, 2.079, 2.773])
>>> bool(regret(always_first, responses)[-1] <= device_bound(4, 2, lipschitz(0.0, 1.0)))
True
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedloom.base.errors import ConfigError

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


def _rounds(values: ArrayLike, what: str) -> Matrix:
    """Finite numbers [rounds, clients]."""
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2 or not matrix.shape[1]:
        raise ConfigError(f"{what} are numbers [rounds, clients], not an array of shape {list(matrix.shape)}.")
    if not np.isfinite(matrix).all():
        raise ConfigError(f"{what} must be finite, but {(~np.isfinite(matrix)).sum()} of {matrix.size} are not.")
    return matrix


def _responses(values: ArrayLike) -> Matrix:
    responses = _rounds(values, "responses")
    if (responses <= -1).any():
        raise ConfigError(f"a response is greater than -1, not {responses.min():g}: there is no log(1 + ⟨p, r⟩).")
    return responses


def decision_losses(decisions: ArrayLike, responses: ArrayLike) -> Vector:
    """ℓ_t(p^t) = -log(1 + ⟨p^t, r^t⟩) [T]; Hahn 2024, eq. (3.3).

    Args:
        decisions: p [T, K], or one decision [1, K] for all rounds.
        responses: r [T, K].

    >>> decision_losses([[0.5, 0.5]], [[0.0, 1.0], [1.0, 1.0]]).round(3)
    array([-0.405, -0.693])
    """
    p, r = _rounds(decisions, "decisions"), _responses(responses)
    if p.shape[1] != r.shape[1] or len(p) not in (1, len(r)):  # one of them could be broadcast
        shapes = f"decisions {list(p.shape)} and responses {list(r.shape)}"
        raise ConfigError(f"{shapes} are not of the same rounds and clients.")
    return -np.log1p((p * r).sum(1))


def played(used: ArrayLike, prior: ArrayLike | None = None) -> Matrix:
    """The decisions in the order of commitment, [T, K]: p^1, then all recorded ones but the last.

    AAggFF decides after it sees a round's responses and mixes the same round with the result: p^{t+1} is recorded in
    round t, and regret is that of p^t.

    Args:
        used: the recorded decisions [T, K].
        prior: p^1 [K]; None for 1/K.

    >>> played([[0.2, 0.8], [0.0, 1.0]])
    array([[0.5, 0.5],
           [0.2, 0.8]])
    """
    p = _rounds(used, "decisions")
    first = np.full(p.shape[1], 1 / p.shape[1]) if prior is None else np.asarray(prior, np.float64)
    return np.concatenate([first[None], p[:-1]])


def best_fixed(responses: ArrayLike) -> Vector:
    """argmin over the simplex of -Σ_t log(1 + ⟨p, r^t⟩) [K], by an interior-point method.

    With R = 1 + r, maximising Σ log⟨p, R^t⟩ - T Σ p over p ≥ 0 has the same solution without the constraint Σ p = 1.
    The optimality gap at p is at most T(max_i (1/T) Σ R^t_i/⟨p, R^t⟩ - 1), which is the stopping criterion.

    Args:
        responses: r [T, K] > -1.

    >>> best_fixed([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]).round(6)
    array([0.8, 0.2])
    """
    growth = 1 + _responses(responses)
    rounds, clients = growth.shape
    p = np.full(clients, 1 / clients)
    if not rounds:
        return p
    slack = np.ones(clients)
    for _ in range(200):
        ratios = growth / (growth @ p)[:, None]
        gain = ratios.mean(0)  # Σ_i p_i gain_i = 1
        if p.sum() * gain.max() - 1 <= 1e-11:
            break
        target = 0.1 * (p @ slack) / clients
        hessian = ratios.T @ ratios / rounds
        hessian[np.diag_indices(clients)] += slack / p
        step = np.linalg.solve(hessian, gain - 1 + target / p)
        change = (target - slack * step) / p - slack
        p = p + _inside(p, step) * step
        slack = slack + _inside(slack, change) * change
    return p / p.sum()


def _inside(at: Vector, step: Vector) -> float:
    """The largest step size, at most 1, that keeps everything positive."""
    falling = step < 0
    return min(1.0, 0.99 * float((-at[falling] / step[falling]).min())) if falling.any() else 1.0


def regret(decisions: ArrayLike, responses: ArrayLike, every_prefix: bool = False) -> Vector:
    """R_t = Σ_{τ≤t} ℓ_τ(p^τ) - Σ_{τ≤t} ℓ_τ(p*) [T]; Hahn 2024, eq. (3.5).

    Args:
        decisions: p [T, K], each committed before the round's response was seen (see ``played``).
        responses: r [T, K].
        every_prefix: whether p* is the best for rounds 1..t (T convex programmes) instead of 1..T. With one p* for all
            rounds only R_T is a regret, and R_t may be negative.

    Raises:
        ConfigError: for shapes that do not match, or responses of -1 and below.

    >>> regret([[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]).round(6) + 0.0
    array([0., 0.])
    >>> regret([[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]], every_prefix=True).round(3) + 0.0
    array([0.288, 0.   ])
    """
    suffered = np.cumsum(decision_losses(decisions, responses))
    r = _responses(responses)
    if not every_prefix:
        return suffered - np.cumsum(decision_losses(best_fixed(r)[None], r))
    best = [decision_losses(best_fixed(r[:t])[None], r[:t]).sum() for t in range(1, len(r) + 1)]
    return suffered - np.array(best)


def regret_of_losses(decisions: ArrayLike, losses: ArrayLike, respond: Callable[[Vector], Vector]) -> Vector:
    """``regret`` from the losses F_i(θ^t) of all clients, for policies that see losses.

    Args:
        decisions: p [T, K], each committed before the round's losses were seen (see ``played``).
        losses: F [T, K].
        respond: maps a round's losses [K] to responses [K], usually by a CDF of F_i/F̄.

    Raises:
        ConfigError: for shapes that do not match, losses that are not finite, or responses of -1 and below.

    >>> regret_of_losses([[0.5, 0.5], [0.0, 1.0]], [[0.1, 0.4], [0.2, 0.2]], lambda f: f / f.max()).round(3)
    array([0.208, 0.208])
    """
    responses = np.array([respond(f) for f in _rounds(losses, "losses")])
    return regret(decisions, responses)


def lipschitz(low: float, high: float) -> float:
    """L = C2/(1 + C1), the largest entry of the gradient -r/(1 + ⟨p, r⟩) for r in [C1, C2] (Hahn 2024, lemma 3.1).

    >>> lipschitz(0.0, 0.25)
    0.25
    """
    return high / (1 + low)


def silo_bound(rounds: float, clients: int, lipschitz: float) -> float:
    """Regret bound 2LK(1 + log(1 + T/(16K))) of AAggFF-S after T rounds (Hahn 2024, theorem 3.1).

    L is that of lemma 3.1 (``lipschitz``). The proof uses ℓ(q) ≥ ℓ(p) + ⟨g, q - p⟩ + (β/2)⟨g, q - p⟩² from lemma 3.10,
    which requires β ≤ 1/2, while β = 1/(4L): it covers L ≥ 1/2. The inequality itself holds for L > 0.3 with C1 = 0, so
    for up to three clients with the usual C2 = 1/K. For smaller L the bound can fail: decision losses become linear as
    L → 0, and the regret of linear losses grows as √T. It exceeds the bound at K = 2, L = 1e-4, T = 5000.

    >>> round(silo_bound(100, 5, lipschitz(0.0, 1 / 5)), 3)
    3.622
    """
    return 2 * lipschitz * clients * (1 + float(np.log1p(rounds / (16 * clients))))


def device_bound(rounds: float, clients: int, lipschitz: float) -> float:
    """Regret bound 2L√(T log K) of AAggFF-D after T rounds with all clients (Hahn 2024, theorem 3.2).

    The proof covers p^{t+1} ∝ exp(-Σ_τ g_τ √(log K)/(L√(t+1))) with the exact gradient g and the L of lemma 3.1. The
    algorithm uses Ľ for L and, even with all clients, the gradient linearised at r̄, whose direction does not depend on
    p. What always holds for it is therefore the bound 2Ľ√(T log K) on the linear losses ⟨p, g̃⟩; its regret in the
    decision loss may grow linearly with T.

    >>> round(device_bound(100, 5, lipschitz(0.0, 1.0)), 3)
    25.373
    """
    return 2 * lipschitz * float(np.sqrt(rounds * np.log(clients)))

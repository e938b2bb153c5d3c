"""NumPy derivations of the methods that choose mixing coefficients from losses, beside those of ``reference``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from math import erf
from typing import Any

import numpy as np

from helpers.reference import FinalState, Vector, World, average


def propfair(world: World, M: float = 2.0, eps: float = 0.2, beyond: str = "published") -> FinalState:
    theta = world.start
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            batches = iter(world.local.batches(world.federation.train.index[i], world.seed, t, i))

            def correct(g: Vector, w: Vector, batches: Any = batches) -> Vector:
                room = M - world.loss_on(w, next(batches))
                return g / (room if room >= eps else M if beyond == "published" else eps)

            models[i], _ = world.train(theta, i, t, rate, correct)
        theta = average(world, theta, models)
    return FinalState(theta)


def cumulative(name: str, x: Vector) -> Vector:
    if name == "normal":
        return np.array([(1 + erf((v - 1) / np.sqrt(2))) / 2 for v in x])
    return {"weibull": 1 - np.exp(-(x**2)), "frechet": np.exp(-1 / x), "gumbel": np.exp(-np.exp(1 - x))}[name]


def faces_of(h: Vector, c: Vector, otherwise: Vector) -> Vector:
    """The minimum of pᵀhp/2 + cᵀp over the simplex, by trying every face."""
    best, lowest, k = otherwise, np.inf, len(c)
    for face in (list(f) for n in range(1, k + 1) for f in combinations(range(k), n)):
        system = np.ones((len(face) + 1,) * 2)
        system[:-1, :-1], system[-1, -1] = h[np.ix_(face, face)], 0
        inner = np.linalg.solve(system, np.append(-c[face], 1))[:-1]
        p = np.zeros(k)
        p[face] = inner
        if (inner >= 0).all() and (value := p @ h @ p / 2 + c @ p) < lowest:
            best, lowest = p, value
    return best


def doubly_robust(r: np.ndarray, members: np.ndarray, clients: int, level: float | None = None) -> np.ndarray:
    """ř [K] from the members' responses r [|S|]: (1 - 1[i∈S]/C)·r̄ + 1[i∈S]/C·r_i with C = |S|/K.

    Its mean over all cohorts of that size is r if ``level``, used in place of r̄, does not depend on the cohort. The
    default, the cohort's mean, does: the estimate then shrinks towards the mean R̄ of all clients, E[ř_i] - r_i = -(r_i
    - R̄)(K - |S|)/(|S|(K - 1)), which preserves the order of the clients.
    """
    level = float(r.mean()) if level is None else level
    estimate = np.full(clients, level)
    estimate[members] += clients / len(members) * (r - level)
    return estimate


def linearised_gradient(p: np.ndarray, r: np.ndarray, level: float) -> np.ndarray:
    """g̃ [K], the gradient of -log(1 + ⟨p, r⟩) linearised in r at r0 = level·1, where ⟨p, r0⟩ = level."""
    return -r / (1 + level) + level * (p @ r - level) / (1 + level) ** 2


def shortest(gram: Vector, low: Vector, high: Vector) -> Vector:
    """Every coordinate at its lower bound, at its upper bound, or between: 3^n systems of equations."""
    n = len(low)
    best, least = low, np.inf
    for places in product((0, 1, 2), repeat=n):
        free = [i for i in range(n) if places[i] == 2]
        p = np.where(np.array(places) == 1, high, low)
        p[free] = 0
        if free:
            system = np.ones((len(free) + 1,) * 2)
            system[:-1, :-1], system[-1, -1] = gram[np.ix_(free, free)], 0
            p[free] = np.linalg.solve(system, np.append(-(gram @ p)[free], 1 - p.sum()))[:-1]
        fits = abs(p.sum() - 1) < 1e-9 and (p >= low - 1e-9).all() and (p <= high + 1e-9).all()
        if fits and (value := p @ gram @ p) < least - 1e-14:
            best, least = p, value
    return best


def feddisco(world: World, a: float = 0.5, b: float = 0.1, distance: str = "l2") -> FinalState:
    theta, classes = world.start, int(world.y.max()) + 1
    for t, rate, cohort in world.schedule():
        weights, total = {}, sum(world.n[i] for i in cohort)
        for i in cohort:
            labels = world.y[world.federation.train.index[i]].tolist()
            share = [labels.count(c) / len(labels) for c in range(classes)]
            d = np.sqrt(sum((s - 1 / classes) ** 2 for s in share))
            if distance == "kl":
                d = sum(s * np.log(s * classes) for s in share if s)
            weights[i] = max(world.n[i] / total - a * d + b, 0.0)
        if not any(weights.values()):
            weights = {i: world.n[i] for i in cohort}
        models = {i: world.train(theta, i, t, rate)[0] for i in cohort}
        theta = sum(weights[i] * models[i] for i in cohort) / sum(weights.values())
    return FinalState(theta)


ORACLES: dict[str, Callable[..., FinalState]] = {f.__name__: f for f in (propfair, feddisco)}

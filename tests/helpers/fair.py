"""NumPy derivations of the methods that choose mixing coefficients from losses, beside those of ``reference``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from math import erf
from typing import Any

import numpy as np

from helpers.reference import Found, Vector, World, average


def term(world: World, lam: float = 1.0) -> Found:
    theta = world.start
    for t, rate, cohort in world.schedule():
        weight = {i: world.n[i] * np.exp(lam * world.loss(theta, i)) for i in cohort}
        models = {i: world.train(theta, i, t, rate)[0] for i in cohort}
        theta = sum(weight[i] * models[i] for i in cohort) / sum(weight.values())
    return Found(theta)


def q_ffl(world: World, q: float = 1.0) -> Found:
    """Algorithm 2 of the paper, with n_i: Δw_i = L(θ - θ_i), Δ_i = F^q Δw_i, θ ← θ - Σ n_i Δ_i / Σ n_i h_i."""
    theta = world.start
    for t, rate, cohort in world.schedule():
        above, below = np.zeros_like(theta), 0.0
        for i in cohort:
            f = world.loss(theta, i)
            gradient = (theta - world.train(theta, i, t, rate)[0]) / rate
            above = above + world.n[i] * f**q * gradient
            below += world.n[i] * (q * f ** (q - 1) * np.sum(gradient**2) + f**q / rate)
        theta = theta - above / below
    return Found(theta)


def propfair(world: World, M: float = 2.0, eps: float = 0.2, beyond: str = "published") -> Found:
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
    return Found(theta)


def chosen(world: World, decide: Callable[[Vector], Vector]) -> Found:
    """Every client in every round, mixed with what is decided from all losses."""
    world = replace(world, cohort=world.clients)
    theta = world.start
    for t, rate, cohort in world.schedule():
        p = decide(np.array([world.loss(theta, i) for i in cohort]))
        theta = sum(p[i] * world.train(theta, i, t, rate)[0] for i in cohort)
    return Found(theta)


def afl(world: World, step: float = 0.1) -> Found:
    p = world.n / world.n.sum()

    def decide(losses: Vector) -> Vector:
        """Projection by bisection of the threshold."""
        nonlocal p
        v = p + step * losses
        low, high = v.min() - 1, v.max()
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
        p = np.maximum(v - low, 0)
        return p

    return chosen(world, decide)


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


def aaggff_s(world: World, cdf: str = "normal", prior: str = "uniform") -> Found:
    """The whole history is kept, and the programme solved by trying every face of the simplex."""
    k = world.clients
    bound = 1 / k
    first = world.n / world.n.sum() if prior == "samples" else np.full(k, 1 / k)
    decisions, gradients = [first], []

    def decide(losses: Vector) -> Vector:
        r = cumulative(cdf, losses / losses.mean()) / k
        gradients.append(-r / (1 + decisions[-1] @ r))
        h = 4 * k * bound * np.eye(k) + sum(np.outer(g, g) for g in gradients) / (4 * bound)
        c = (
            sum(g - g * (g @ q) / (4 * bound) for g, q in zip(gradients, decisions, strict=True))
            - 4 * k * bound * first
        )
        decisions.append(faces_of(h, c, decisions[-1]))
        return decisions[-1]

    return chosen(world, decide)


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


def aaggff_d(world: World, cdf: str = "weibull", prior: str = "uniform", step: str = "published") -> Found:
    k, size = world.clients, world.cohort
    share = size / k
    p, total, theta = np.full(k, 1 / k), np.zeros(k), world.start
    for t, rate, cohort in world.schedule():
        losses = np.array([world.loss(theta, i) for i in cohort])
        r = share * cumulative(cdf, losses / losses.mean())
        mean = r.mean()
        estimate = np.full(k, mean)
        for i, response in zip(cohort, r, strict=True):
            estimate[i] = (1 - 1 / share) * mean + response / share
        level = p.sum() * mean
        total = total - estimate / (1 + level) + mean * (p @ (estimate - mean)) / (1 + level) ** 2
        eta = np.sqrt(np.log(k)) / ((share + 2) * np.sqrt(t + 2))
        if step == "visits":  # t + 1 rounds, each with its share of the clients
            eta = min(1.0, np.sqrt(np.log(k) / ((t + 1) * share)))
        p = np.exp(-eta * total)
        p = p / p.sum()
        own, p = p, p * world.n if prior == "samples" else p
        models = {i: world.train(theta, i, t, rate)[0] for i in cohort}
        theta = sum(p[i] * models[i] for i in cohort) / sum(p[i] for i in cohort)
        p = own
    return Found(theta)


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


def fedmgda(world: World, eps: float = 0.1, lr: float = 1.0) -> Found:
    theta = world.start
    for t, rate, cohort in world.schedule():
        deltas = [theta - world.train(theta, i, t, rate)[0] for i in cohort]
        units = np.array([d / np.sqrt(np.sum(d**2)) for d in deltas])
        n = np.array([world.n[i] for i in cohort])
        static = n / n.sum()
        mixture = shortest(units @ units.T, np.maximum(static - eps, 0), np.minimum(static + eps, 1))
        theta = theta - lr * mixture @ units
    return Found(theta)


ORACLES: dict[str, Callable[..., Found]] = {
    f.__name__: f for f in (term, q_ffl, propfair, fedmgda, afl, aaggff_s, aaggff_d)
}

"""NumPy derivations of the methods that decouple drift, split operators, or decorrelate features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from helpers.reference import Found, Vector, World, average


def feddc(
    world: World, alpha: float = 0.01, gradient: bool = True, average_over_all: bool = True, control: bool = False
) -> Found:
    """Updates are θ_i - θ^t; the server mixes models, not displacements.

    With ``control``, own and g are the control variates of the authors' code, for clients of equal weight.
    """
    theta, g = world.start, np.zeros_like(world.start)
    own = {i: np.zeros_like(theta) for i in range(world.clients)}
    drift = {i: np.zeros_like(theta) for i in range(world.clients)}
    for t, rate, cohort in world.schedule():
        models, slopes = {}, {}
        for i in cohort:
            steps = world.reach(len(world.local.batches(world.federation.train.index[i], world.seed, t, i)))

            def correct(slope: Vector, w: Vector, i: int = i, at: Vector = theta, k: float = steps) -> Vector:
                pull = (g - own[i] if control else (own[i] - g) / (rate * k)) if gradient else 0.0  # noqa: B023
                return slope + alpha * (drift[i] + w - at) + pull

            models[i], _ = world.train(theta, i, t, rate, correct)
            slopes[i] = (theta - models[i]) / (rate * steps)
        before = dict(own)
        for i in cohort:
            own[i] = own[i] - g + slopes[i] if control else models[i] - theta
            drift[i] = drift[i] + models[i] - theta
        if control:
            g = g + sum(own[i] - before[i] for i in cohort) / world.clients
        else:
            g = np.mean([own[i] for i in cohort], axis=0)
        theta = np.mean([models[i] for i in cohort], axis=0)
        theta = theta + np.mean([drift[i] for i in (drift if average_over_all else cohort)], axis=0)
    states = {f"client {i}/drift/h": v for i, v in drift.items()}
    if gradient:
        states |= {"server/drift/g": g} | {f"client {i}/drift/g": v for i, v in own.items()}
    return Found(theta, states=states)


def fedsplit(world: World, s: float = 10.0, active: bool = False) -> Found:
    """Every z_i, those of absent clients too, is kept in one place; the server's model is their mean."""
    z = np.array([world.start] * world.clients)
    x, seen = world.start, set()
    for t, rate, cohort in world.schedule():
        for i in cohort:
            centre = 2 * x - z[i]
            u, _ = world.train(x, i, t, rate, lambda g, w, c=centre: g + (w - c) / s)
            z[i] = z[i] + 2 * (u - x)
        x = z[cohort].mean(0) if active else z.mean(0)
        seen |= set(cohort)
    return Found(x, states={f"client {i}/drift/z": z[i] for i in seen})


def penalty_gradient(world: World, theta: Vector, rows: Vector, eps: float) -> Vector:
    """The gradient of (1/d²)‖K‖_F² by hand, for the features tanh(W₁x + b₁)."""
    x, n = world.x[rows], len(rows)
    d, h = x.shape[1], world.width
    a = np.tanh(x @ theta[: h * d].reshape(h, d).T + theta[h * d : h * d + h])
    c = a - a.mean(0)
    sd = np.sqrt((c**2).mean(0) + eps)
    z = c / sd
    by_z = 4 / (n * h**2) * z @ (z.T @ z / n)
    by_c = by_z / sd - c * (c * by_z).sum(0) / (n * sd**3)
    back = (by_c - by_c.mean(0)) * (1 - a**2)
    found = np.zeros_like(theta)
    found[: h * d], found[h * d : h * d + h] = (back.T @ x).ravel(), back.sum(0)
    return found


def feddecorr(world: World, beta: float = 0.1, eps: float = 1e-8) -> Found:
    theta = world.start
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            batches = iter(world.local.batches(world.federation.train.index[i], world.seed, t, i))

            def correct(g: Vector, w: Vector, batches: Any = batches) -> Vector:
                return g + beta * penalty_gradient(world, w, next(batches), eps)

            models[i], _ = world.train(theta, i, t, rate, correct)
        theta = average(world, theta, models)
    return Found(theta)


def fedcm(world: World, alpha: float = 0.1) -> Found:
    """The server keeps the gradient-like direction of its last step; τ is the mixed mean of the numbers of steps."""
    theta, direction = world.start, np.zeros_like(world.start)
    for t, rate, cohort in world.schedule():
        total = sum(world.n[i] for i in cohort)
        moved, steps = np.zeros_like(theta), 0.0
        for i in cohort:
            model, taken = world.train(theta, i, t, rate, lambda g, w, d=direction: alpha * g + (1 - alpha) * d)
            moved = moved + world.n[i] / total * (theta - model)
            steps += world.n[i] / total * world.reach(taken)
        direction = moved / (rate * steps)
        theta = theta - moved
    return Found(theta, states={"server/drift/direction": direction})


ORACLES: dict[str, Callable[..., Found]] = {f.__name__: f for f in (feddc, fedsplit, feddecorr, fedcm)}

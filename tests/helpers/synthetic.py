"""NumPy derivation of the method whose server holds samples, and moves them along what clients say of their energy.

Only data are shared with the code under test: the first samples, which of them a local step takes, and all noise.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from fedloom.base.rng import stream
from helpers.reference import FinalState, Vector, World, backward, forward, softmax

ENERGY = "objective.1"


def slopes(world: World, theta: Vector, x: Vector, y: Vector) -> tuple[Vector, Vector]:
    """∇_x E and E = -o_y of each sample: the slope of o_y = W₂[y] tanh(W₁x + b₁) + b₂[y] is W₁ᵀ((1 - a²) W₂[y])."""
    a, o, w2 = forward(theta, x, world.width)
    w1 = theta[: world.width * x.shape[1]].reshape(world.width, -1)
    return -((1 - a**2) * w2[y]) @ w1, -o[np.arange(len(y)), y]


def push(x: Vector, y: Vector) -> Vector:
    """Σ_k over the other samples of the class, one pair after the other."""
    force = np.zeros_like(x)
    for c in set(y.tolist()):
        rows = np.flatnonzero(y == c)
        squares = sorted(np.sum((x[i] - x[j]) ** 2) for i in rows for j in rows if i < j)
        if not squares:
            continue
        h = max(squares[(len(squares) - 1) // 2] / np.log(len(rows)), 1e-4 * x.shape[1])
        for j in rows:
            for k in rows:
                force[j] += 2 / h * (x[j] - x[k]) * np.exp(-np.sum((x[j] - x[k]) ** 2) / h) / len(rows)
    return force


def fedevg(
    world: World, per_class: int = 10, lam: float = 0.1, gamma: float = 1.0, sigma: float = 0.01, steps: int = 1,
    beta: float = 10.0, beta_final: float = 0.01, delta: float = 0.01, weights: str = "signed", repulsion: float = 0.0,
    blur: float = 1.0, magnitude: float = 0.0, clip: bool = True, schedule: str = "ddpm", clip_chain: bool = True,
    clip_gradient: float | None = 3.0, labelled: str = "chain", keep_models: bool = False,
) -> FinalState:  # fmt: skip
    classes, d = world.federation.classes, world.x.shape[1]
    many = classes * per_class
    x = stream(world.seed, "synthetic").normal(size=(many, d))
    y = np.arange(many) // per_class
    models: dict[int, Vector] = {}
    for t, rate, cohort in world.schedule():
        reports = {}
        for i in cohort:
            chain, numbers = x.copy(), count()

            def gradient(
                theta: Vector, rows: Vector, chain=chain, numbers=numbers, x=x, t: int = t, i: int = i
            ) -> Vector:
                draws = stream(world.seed, ENERGY, t, i, next(numbers))
                at = draws.permutation(many)[: len(rows)]
                noise = draws.normal(size=(len(rows), steps, d))[: len(at)]
                before = chain[at].copy()
                for r in range(steps):
                    slope = slopes(world, theta, chain[at], y[at])[0]
                    slope = slope if clip_gradient is None else np.clip(slope, -clip_gradient, clip_gradient)
                    chain[at] += -gamma * slope + sigma * noise[:, r]
                    if clip and clip_chain:
                        chain[at] = np.clip(chain[at], 0, 1)
                after = chain[at].copy()
                before = {"chain": before, "received": x[at], "moved": after}[labelled]
                real, chain_logits = world.x[rows], forward(theta, after, world.width)[1]
                logits = forward(theta, real, world.width)[1]
                up, down = np.eye(classes)[world.y[rows]], np.eye(classes)[y[at]]
                at_real = softmax(logits) - up - up + 2 * magnitude * up * logits  # cross entropy, E = -o_y, E²
                at_chain = down + 2 * magnitude * down * chain_logits
                at_before = lam * (softmax(forward(theta, before, world.width)[1]) - down)
                return (
                    backward(theta, real, world.width, at_real / len(rows))
                    + backward(theta, after, world.width, at_chain / len(at))
                    + backward(theta, before, world.width, at_before / len(at))
                )

            start = models.get(i, world.start) if keep_models else world.start
            model, _ = world.train(start, i, t, rate, gradient=gradient)
            if keep_models:
                models[i] = model
            slope, energy = slopes(world, model, x, y)
            reports[i] = np.exp(np.sign(-energy) if weights == "signed" else -energy), slope
        top = sum(world.n[i] * e[:, None] * g for i, (e, g) in reports.items())
        bottom = sum(world.n[i] * e[:, None] for i, (e, _) in reports.items())
        size = beta_final + (beta - beta_final) / 2 * (1 + np.cos(np.pi * t / (world.rounds - 1)))
        if schedule == "ddpm":
            left = np.cos((np.arange(world.rounds + 1) / world.rounds + 0.008) / 1.008 * np.pi / 2) ** 2
            size = beta + (beta_final - beta) * (1 - left[t + 1] / left[t])
        noise = stream(world.seed, "synthetic", t).normal(size=x.shape)
        x = x - size * (top / bottom - (repulsion * push(x, y) if repulsion else 0)) + delta * noise
        x = np.clip(x, 0, 1) if clip else x
    return FinalState(world.start, models, {f"server/{ENERGY}/x": x, f"server/{ENERGY}/y": y})


def fedevg_kept(world: World, magnitude: float = 0.1, **settings: Any) -> FinalState:
    return fedevg(world, magnitude=magnitude, keep_models=True, **settings)


ORACLES = {"fedevg": fedevg, "fedevg_kept": fedevg_kept}

"""NumPy derivations of the methods that learn at the server from unlabelled inputs.

Only data are shared with the code under test: the noise that makes a view, and the order of the unlabelled inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.base.rng import stream
from helpers.federations import Shaken
from helpers.reference import FinalState, Vector, World, average, backward, forward, softmax

NOISE = Shaken().by


@dataclass
class Adam:
    """Kingma & Ba, algorithm 1."""

    lr: float
    m: Any = 0.0
    v: Any = 0.0
    t: int = 0

    def step(self, g: Vector, factor: float = 1.0) -> Vector:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g**2
        return self.lr * factor * (self.m / (1 - 0.9**self.t)) / (np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8)


def ssa_gradient(a: Vector, first: Vector, second: Vector, variance: float, entropy: float) -> Vector:
    """The slope of the mean SSA loss in a [K], by hand; logits on either view are [N, K, C]."""
    p = softmax(a)
    y1, y2 = softmax(np.einsum("k,nkc->nc", p, first)), softmax(np.einsum("k,nkc->nc", p, second))
    r1, r2 = (np.sqrt((y**2).sum(1, keepdims=True)) for y in (y1, y2))
    cos = (y1 * y2).sum(1, keepdims=True) / (r1 * r2)
    in_p = entropy * (np.log(p) + 1)
    for z, y, r, y_other, r_other in ((first, y1, r1, y2, r2), (second, y2, r2, y1, r1)):
        along = -(y_other / (r * r_other) - cos * y / r**2)  # of -cos in y
        along = along - variance / 2 * 2 * (y - 1 / y.shape[1]) / y.shape[1]  # of -(λ/2)(1/C) Σ (y_c - 1/C)²
        in_z = y * (along - (y * along).sum(1, keepdims=True))
        in_p = in_p + np.einsum("nkc,nc->k", z, in_z) / len(y)
    return p * (in_p - p @ in_p)


def unlabelled(world: World) -> Vector:
    assert world.federation.unlabelled is not None
    return world.federation.unlabelled.x.numpy()


def views(world: World, t: int, draw: int) -> list[Vector]:
    """Two noisy versions of the unlabelled inputs, all of them in the first chunk."""
    x = unlabelled(world)
    return [x + stream(world.seed, "target view", t, v, draw, 0).normal(scale=NOISE, size=x.shape) for v in (0, 1)]


def orders(world: World, t: int, epoch: int, size: int) -> list[Vector]:
    rows = stream(world.seed, "target order", t, epoch).permutation(len(unlabelled(world)))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def logits(world: World, theta: Vector, x: Vector) -> Vector:
    return forward(theta, x, world.width)[1]


def cohort_logits(world: World, models: dict[int, Vector], x: Vector) -> Vector:
    """Logits [N, K, C] of the cohort."""
    return np.stack([logits(world, model, x) for model in models.values()], 1)


def fedavg_with_weights(world: World, decide: Callable[[int, dict[int, Vector]], Vector]) -> FinalState:
    """θ ← Σ p_k θ_k with p from the round's models."""
    theta = world.start
    for t, rate, cohort in world.schedule():
        models = {i: world.train(theta, i, t, rate)[0] for i in cohort}
        p = decide(t, models)
        theta = sum(p[k] * models[i] for k, i in enumerate(cohort))
    return FinalState(theta)


def fedssa(
    world: World, variance: float = 10.0, entropy: float = 1e-3, optimiser: str = "sgd", lr: float = 0.01,
    steps: int = 300, batch_size: int = 64, draws: int = 1, start: int = 0, feed_back: bool = False,
) -> FinalState:  # fmt: skip
    """Algorithm 1, where it is fed back; otherwise FedAvg whose last models are mixed."""
    last = len(list(world.schedule())) - 1

    def decide(t: int, models: dict[int, Vector]) -> Vector:
        if t < start if feed_back else t != last:
            n = np.array([len(world.federation.train.index[i]) for i in models], dtype=float)
            return n / n.sum()
        a, adam = np.zeros(len(models)), Adam(lr)
        passes = int(np.ceil(steps / np.ceil(len(unlabelled(world)) / batch_size)))
        view_draws, step = min(draws, passes), 0
        for turn in range(passes):
            first, second = (cohort_logits(world, models, x) for x in views(world, t, turn * view_draws // passes))
            for rows in orders(world, t, turn, batch_size)[: steps - step]:
                slope = ssa_gradient(a, first[rows], second[rows], variance, entropy)
                a = a - (lr * slope if optimiser == "sgd" else adam.step(slope))
                step += 1
        return softmax(a)

    return fedavg_with_weights(world, decide)


def fedssa_similarity(world: World) -> FinalState:
    def decide(t: int, models: dict[int, Vector]) -> Vector:
        first, second = (softmax(cohort_logits(world, models, x)) for x in views(world, t, 0))
        cos = (first * second).sum(-1) / np.sqrt((first**2).sum(-1) * (second**2).sum(-1))
        return cos.sum(0) / cos.sum()

    return fedavg_with_weights(world, decide)


def fedssa_confidence(world: World) -> FinalState:
    def decide(t: int, models: dict[int, Vector]) -> Vector:
        y = softmax(cohort_logits(world, models, unlabelled(world)))
        sure = (y**2).mean(-1) - y.mean(-1) ** 2
        return sure.sum(0) / sure.sum()

    return fedavg_with_weights(world, decide)


def feddf(
    world: World, steps: int = 100, lr: float = 1e-3, batch_size: int = 128, temperature: float = 1.0
) -> FinalState:
    theta, x = world.start, unlabelled(world)
    for t, rate, cohort in world.schedule():
        models = {i: world.train(theta, i, t, rate)[0] for i in cohort}
        theta = average(world, theta, models)
        teacher = softmax(cohort_logits(world, models, x).mean(1) / temperature)
        epochs = -(-steps * batch_size // len(x)) + 1
        batches = [rows for epoch in range(epochs) for rows in orders(world, t, epoch, batch_size)]
        adam = Adam(lr)
        for step, rows in enumerate(batches[:steps]):
            student = softmax(logits(world, theta, x[rows]) / temperature)
            delta = temperature * (student - teacher[rows]) / len(rows)
            slope = backward(theta, x[rows], world.width, delta)
            theta = theta - adam.step(slope, (1 + np.cos(np.pi * step / steps)) / 2)
    return FinalState(theta)


def fedmd(
    world: World, size: int = 500, epochs: int = 1, batch_size: int = 50, lam: float = 1.0, distance: str = "absolute"
) -> FinalState:
    """Communicate, aggregate, distribute, digest, revisit; the inputs of each round, and their order, are drawn."""
    models, x = dict.fromkeys(range(world.clients), world.start), unlabelled(world)
    subsets: list[Vector] = []
    scores: list[Vector] = []
    for t, rate, cohort in world.schedule():
        for i in cohort:
            if scores:  # digest
                public, consensus = x[subsets[-2]], scores[-1]

                def slope(w: Vector, rows: Vector, public=public, consensus=consensus) -> Vector:
                    differences = logits(world, w, public[rows]) - consensus[rows]
                    of_each = np.sign(differences) if distance == "absolute" else 2 * differences
                    return backward(w, public[rows], world.width, lam * of_each / differences.size)

                draws = stream(world.seed, "objective.1", t, i)
                orders = [draws.permutation(len(public)) for _ in range(epochs)]
                rows = [order[n : n + batch_size] for order in orders for n in range(0, len(order), batch_size)]
                models[i] = world.descend(models[i], rows, rate, lambda g, w: g, slope)
            models[i], _ = world.train(models[i], i, t, rate)  # revisit
        if subsets:
            scores.append(np.mean([logits(world, models[i], x[subsets[-1]]) for i in cohort], axis=0))
        subsets.append(stream(world.seed, "public inputs", t).permutation(len(x))[:size])
    states = {"inputs": x[subsets[-2]], "scores": scores[-1], "next": x[subsets[-1]]}
    return FinalState(world.start, models, {f"server/objective.1/{name}": value for name, value in states.items()})


ORACLES: dict[str, Callable[..., FinalState]] = {
    f.__name__: f for f in (fedssa, fedssa_similarity, fedssa_confidence, feddf, fedmd)
}

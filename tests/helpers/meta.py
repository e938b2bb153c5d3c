"""NumPy derivations of methods that train through an adaptation: two mini-batches a step, hand-written gradients.

The Hessian of MAML is taken by the complex step, Hv = Im ∇L(θ + ihv)/h, which is exact to rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedloom.base import rng
from helpers.reference import Correct, FinalState, Vector, World, average, backward, forward, softmax

Slope = Callable[[Vector, Vector, Vector], Vector]  # (θ, rows of the support, rows of the query) -> gradient


def supports(world: World, client: int, t: int) -> list[Vector]:
    """The rows of the support batches: permutations from a stream of their own."""
    rows = world.federation.train.index[client]
    size, draw = world.local.batch_size or len(rows), rng.stream(world.seed, "support", t, client)
    batches: list[Vector] = []
    while len(batches) < world.local.steps_for(len(rows)):
        order = draw.permutation(rows)
        batches += [order[start : start + size] for start in range(0, len(order), size)]
    return batches


def maml(world: World, lr: float, steps: int, second_order: bool) -> Slope:
    def slope(theta: Vector, support: Vector, query: Vector) -> Vector:
        path = [theta]
        for _ in range(steps):
            path.append(path[-1] - lr * world.gradient(path[-1], support))
        g = world.gradient(path[-1], query)
        for at in reversed(path[:-1]):
            if second_order:  # (I - ηH)g, step by step backwards
                g = g - lr * world.gradient(at + 1e-30j * g, support).imag / 1e-30
        return g

    return slope


def proto(world: World) -> Slope:
    def slope(theta: Vector, support: Vector, query: Vector) -> Vector:
        classes = np.unique(world.y[support])
        query = query[np.isin(world.y[query], classes)]
        if not len(query):
            return np.zeros_like(theta)
        xs, xq, h = world.x[support], world.x[query], world.width
        zs, zq = (forward(theta, x, h)[0] for x in (xs, xq))
        centre = np.array([zs[world.y[support] == k].mean(0) for k in classes])
        differences = zq[:, None, :] - centre[None]  # [Q, C, h]
        delta = softmax(-np.sum(differences**2, 2)) - (world.y[query][:, None] == classes)
        pull = -2 * delta[:, :, None] * differences / len(query)  # d loss / d zq, by class
        counts = np.array([(world.y[support] == k).sum() for k in classes])
        pull_s = -(pull.sum(0) / counts[:, None])[np.searchsorted(classes, world.y[support])]
        return backward(theta, xq, h, 0.0, pull.sum(1)) + backward(theta, xs, h, 0.0, pull_s)

    return slope


def train(world: World, slope: Slope, theta: Vector, i: int, t: int, rate: float, shift: Correct) -> Vector:
    """Local SGD on the adapted loss, with a correction of the gradient."""
    pending = iter(supports(world, i, t))
    return world.train(theta, i, t, rate, shift, gradient=lambda at, query: slope(at, next(pending), query))[0]


def fedavg_through(world: World, slope: Slope) -> FinalState:
    theta = world.start
    for t, rate, cohort in world.schedule():
        models = {i: train(world, slope, theta, i, t, rate, lambda g, w: g) for i in cohort}
        theta = average(world, theta, models)
    return FinalState(theta)


def per_fedavg(world: World, lr: float = 0.1, steps: int = 1, second_order: bool = True) -> FinalState:
    return fedavg_through(world, maml(world, lr, steps, second_order))


def p_avg_proto(world: World) -> FinalState:
    return fedavg_through(world, proto(world))


def pfldyn(world: World, alpha: float = 0.1) -> FinalState:
    theta, h, slope = world.start, np.zeros_like(world.start), proto(world)
    client_h = {i: np.zeros_like(theta) for i in range(world.clients)}
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            size = world.n[i] / world.n.mean()

            def shift(g: Vector, w: Vector, i: int = i, at: Vector = theta, size: float = size) -> Vector:
                return g - client_h[i] / size + alpha / size * (w - at)

            models[i] = train(world, slope, theta, i, t, rate, shift)
        for i in cohort:
            client_h[i] = client_h[i] - alpha * (models[i] - theta)
        h = h - alpha / world.clients * sum(models[i] - theta for i in cohort)
        theta = average(world, theta, models, uniform=True) - h / alpha
    return FinalState(theta, states={"server/drift/h": h} | {f"client {i}/drift/h": v for i, v in client_h.items()})


def pflscaf(world: World) -> FinalState:
    theta, c, slope = world.start, np.zeros_like(world.start), proto(world)
    client_c = {i: np.zeros_like(theta) for i in range(world.clients)}
    for t, rate, cohort in world.schedule():
        models, new = {}, {}
        for i in cohort:
            gap = c - client_c[i]
            models[i] = train(world, slope, theta, i, t, rate, lambda g, w, gap=gap: g + gap)
            steps = world.reach(world.local.steps_for(int(world.n[i])))
            new[i] = client_c[i] - c + (theta - models[i]) / (steps * rate)
        c = c + sum(new[i] - client_c[i] for i in cohort) / world.clients
        client_c |= new
        theta = average(world, theta, models, uniform=True)
    return FinalState(theta, states={"server/drift/c": c} | {f"client {i}/drift/c": v for i, v in client_c.items()})


ORACLES = {f.__name__: f for f in (per_fedavg, p_avg_proto, pfldyn, pflscaf)}

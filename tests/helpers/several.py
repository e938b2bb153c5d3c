"""Methods with several models, in NumPy: B θ in matrices, whoever takes part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from fedloom.base import rng
from helpers.personal import Pace, batches
from helpers.reference import FinalState, Vector, World

Neighbours = Callable[[int, int], set[int]]  # (client, round) -> others


def ring(clients: int) -> Neighbours:
    return lambda i, t: {(i + 1) % clients, (i - 1) % clients} - {i}


def pairs(clients: int, seed: int) -> Neighbours:
    """Who meets whom is drawn, and so is data."""

    def met(i: int, t: int) -> set[int]:
        order = rng.stream(seed, "random_pairs", t).permutation(clients).tolist()
        at = order.index(i) ^ 1
        return {order[at]} if at < clients else set()

    return met


def matrix(clients: int, t: int, who: list[int], neighbours: Neighbours) -> Vector:
    """Metropolis-Hastings weights; absent neighbours leave theirs to the client."""
    b, degree = np.eye(clients), [len(neighbours(i, t)) for i in range(clients)]
    for i in who:
        for j in neighbours(i, t) & {*who}:
            b[i, j] = 1 / (1 + max(degree[i], degree[j]))
            b[i, i] -= b[i, j]
    return b


def final_models(world: World, thetas: Vector, shares: Vector | None = None) -> FinalState:
    """The mean model, and those of all that took part at least once, as states."""
    mean = np.average(thetas, axis=0, weights=shares)
    moved = [r for r, theta in enumerate(thetas) if np.abs(theta - world.start).max() > 0]
    return FinalState(mean, states={f"model {r}/model/theta": thetas[r] for r in moved})


def graph(
    world: World, neighbours: Neighbours, combine_first: bool = False, track: bool = False
) -> tuple[Vector, Vector]:
    """θ_i and c_i of all clients, [K, P]."""
    thetas = np.tile(world.start, (world.clients, 1))
    c, z = np.zeros_like(thetas), np.zeros_like(thetas)
    for t, rate, who in world.schedule():
        after, b = thetas.copy(), matrix(world.clients, t, who, neighbours)
        for i in who:
            after[i], steps = world.train(thetas[i], i, t, rate, lambda g, w, i=i: g + track * c[i])
            z[i] = (thetas[i] - after[i]) / (world.reach(steps) * rate)
        c[who] += ((b - np.eye(world.clients)) @ z)[who]
        thetas = b @ thetas + after - thetas if combine_first else b @ after
    return thetas, c


def dpsgd(world: World) -> FinalState:
    return final_models(world, graph(world, ring(world.clients), combine_first=True)[0])


def dfedavgm(world: World) -> FinalState:
    return final_models(world, graph(world, ring(world.clients))[0])


def gossip(world: World, seed: int = 0) -> FinalState:
    return final_models(world, graph(world, pairs(world.clients, seed))[0])


def sgp(world: World, one_peer: bool = True) -> FinalState:
    """x, w and z = x/w as in the algorithm's box: z is trained, x takes the step, x and w are pushed."""
    k = world.clients
    x, w = np.tile(world.start, (k, 1)), np.ones(k)
    hops = [2**n for n in range(int(np.ceil(np.log2(k))))]
    for t, rate, who in world.schedule():
        used = [hops[t % len(hops)]] if one_peer else hops
        push = np.eye(k)  # column j: what becomes of j's share
        for j in who:
            hear = {(j - d) % k for d in used}
            for i in hear & {*who}:
                push[i, j] = 1 / (1 + len(hear))
            push[j, j] = 1 - push[:, j].sum() + push[j, j]
        z = x / w[:, None]
        for i in who:
            x[i] -= z[i] - world.train(z[i], i, t, rate)[0]
        x, w = push @ x, push @ w
    result = final_models(world, x / w[:, None])
    return FinalState(result.theta, states=result.states | {"server/topology/weights": w})


def kgt(world: World) -> FinalState:
    return final_models(world, graph(world, ring(world.clients), track=True)[0])


def hierfavg(world: World, edges: int = 2, cloud_every: int = 1, members: str = "blocks") -> FinalState:
    k = np.arange(world.clients)
    edge = k * edges // world.clients if members == "blocks" else k % edges
    thetas, mass = np.tile(world.start, (edges, 1)), np.bincount(edge, world.n)
    for t, rate, who in world.schedule():
        models = {i: world.train(thetas[edge[i]], i, t, rate)[0] for i in who}
        for e in {edge[i] for i in who}:
            here = [i for i in who if edge[i] == e]
            thetas[e] = np.average([models[i] for i in here], axis=0, weights=world.n[here])
        if (t + 1) % cloud_every == 0:
            thetas[:] = np.average(thetas, axis=0, weights=mass)
    return final_models(world, thetas, np.bincount(edge))


def cfl(world: World, mean_below: float = 0.4, some_above: float = 1.6, gamma: float = 0.0) -> FinalState:
    """Every way to divide a cluster is tried."""
    world = replace(world, cohort=world.clients)
    clusters = [list(range(world.clients))]
    thetas = np.tile(world.start, (world.clients, 1))
    for t, rate, _ in world.schedule():
        delta = {i: thetas[i] - world.train(thetas[i], i, t, rate)[0] for i in range(world.clients)}
        after = []
        for c in clusters:
            mean = np.average([delta[i] for i in c], axis=0, weights=world.n[c])
            thetas[c] -= mean
            parts = [c]
            if (
                np.linalg.norm(mean) < mean_below
                and max(np.linalg.norm(delta[i]) for i in c) > some_above
                and len(c) > 1
            ):
                ways = [{c[0], *rest} for n in range(len(c) - 1) for rest in combinations(c[1:], n)]

                def cross(half: set[int], c: Any = c, delta: Any = delta) -> float:
                    pairs = [(delta[i], delta[k]) for i in half for k in {*c} - half]
                    return max(a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in pairs)

                best = min(ways, key=cross)
                if gamma < np.sqrt((1 - cross(best)) / 2):
                    parts = [sorted(best), sorted({*c} - best)]
            after += parts
        clusters = after
    return final_models(world, thetas)


def fedamp(world: World, mu: float = 1.0, alpha: float = 1.0, sigma: float = 1.0) -> FinalState:
    u, private = np.tile(world.start, (world.clients, 1)), dict[int, Vector]()
    for t, rate, who in world.schedule():
        for i in who:
            pull: Any = lambda g, w, i=i: g + mu * (w - u[i])  # noqa: E731
            private[i] = world.train(private.get(i, u[i]), i, t, rate, pull)[0]
        for i in who:
            xi = {j: alpha / sigma * np.exp(-np.sum((private[i] - private[j]) ** 2) / sigma) for j in who if j != i}
            large = max(sum(xi.values()), 1.0)
            u[i] = private[i] + sum(x / large * (private[j] - private[i]) for j, x in xi.items())
    result = final_models(world, u)
    return FinalState(
        result.theta, states=result.states | {f"client {i}/personal/private": w for i, w in private.items()}
    )


def pfedgraph(world: World, lam: float = 0.01, alpha: float = 0.8) -> FinalState:
    """A row of the graph fulfils the conditions of the minimum, with a multiplier that is found by bisection."""
    u = np.tile(world.start, (world.clients, 1))
    for t, rate, who in world.schedule():
        w = {}
        for i in who:

            def pull(g: Vector, v: Vector, to: Vector = u[i]) -> Vector:
                v_norm, to_norm = np.linalg.norm(v), np.linalg.norm(to)
                return g - lam * (to / (v_norm * to_norm) - (v @ to) * v / (v_norm**3 * to_norm))

            w[i] = world.train(u[i], i, t, rate, pull)[0]
        moved = {i: (v - world.start) / np.linalg.norm(v - world.start) for i, v in w.items()}
        share = world.n[who] / world.n[who].sum()
        for i in who:
            targets = share + np.array([moved[i] @ moved[j] for j in who]) / (2 * alpha)
            low, high = targets.min() - 1, targets.max()
            for _ in range(100):
                middle = (low + high) / 2
                low, high = (middle, high) if np.maximum(targets - middle, 0).sum() > 1 else (low, middle)
            u[i] = sum(b * w[j] for b, j in zip(np.maximum(targets - low, 0), who, strict=True))
    result = final_models(world, u)
    return FinalState(result.theta, states=result.states | {"server/topology/first": world.start})


def apple(
    world: World, rate: float = 0.001, mu: float = 0.1, decay: str = "exponential", span: float = 0.1,
    models: int | None = None,
) -> FinalState:  # fmt: skip
    """Luo & Wu 2022, algorithm 1: w^p_i = Σ_j p_ij w^c_j of the cores that i has downloaded last."""
    cores, first = np.tile(world.start, (world.clients, 1)), world.n / world.n.sum()
    p, downloads, states, last = np.tile(first, (world.clients, 1)), {}, {}, int(span * world.rounds)
    for t, eta, who in world.schedule():
        after, lam = cores.copy(), 0.0
        if t < last:
            lam = 0.001 ** (t / last) if decay == "exponential" else (1 + np.cos(np.pi * t / last)) / 2
        for i in who:
            w, pace = downloads.setdefault(i, np.tile(world.start, (world.clients, 1))), Pace(world, eta)
            heard = [j for j in range(world.clients) if j != i]
            if models is not None:
                heard = rng.stream(world.seed, "heard", t, i).choice(heard, models, replace=False)
            w[heard], w[i] = cores[heard], cores[i]
            for rows in batches(world, i, t):
                g = world.gradient(p[i] @ w, rows)
                slope = w @ g + lam * mu * (p[i] - first)
                (w[i],) = pace.step({"w": (w[i], p[i, i] * g)})
                p[i] = p[i] - rate * slope
            after[i] = w[i]
            states |= {f"client {i}/personal/private": p[i] @ w, f"client {i}/personal/weights": p[i].copy()}
        cores = after
    result = final_models(world, cores)
    return FinalState(result.theta, states=result.states | states)


ORACLES: dict[str, Callable[..., FinalState]] = {
    f.__name__: f for f in (dpsgd, dfedavgm, gossip, sgp, kgt, hierfavg, cfl, fedamp, pfedgraph, apple)
}

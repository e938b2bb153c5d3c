"""NumPy derivations of the methods whose clients keep a model, or half of one, for themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import combinations

import numpy as np

from fedloom.base import rng
from helpers.reference import (
    FinalState,
    Vector,
    World,
    average,
    backward,
    cross_entropy_gradient,
    fedavg,
    fedavg_on_slice,
    forward,
    softmax,
)


class Pace:
    """Clipping, weight decay and momentum of one client's round, for vectors that are stepped separately."""

    def __init__(self, world: World, rate: float) -> None:
        self.local, self.rate = world.local, rate
        self.velocity: dict[str, Vector] = {}

    def step(self, pairs: dict[str, tuple[Vector, Vector]], speed: float = 1.0) -> list[Vector]:
        """New vectors from pairs (θ, gradient); they are clipped together."""
        local, vectors = self.local, []
        norm = np.sqrt(sum(np.sum(g**2) for _, g in pairs.values()))
        shrink = 1.0 if local.clip is None else min(1.0, local.clip / (norm + 1e-6))
        for name, (theta, g) in pairs.items():
            g = shrink * g + local.weight_decay * theta
            m = local.momentum * self.velocity.get(name, 0.0) + g
            self.velocity[name] = m
            vectors.append(theta - self.rate * speed * (g + local.momentum * m if local.nesterov else m))
        return vectors


Work = Callable[[World, int, int, float, Vector, Vector], tuple[Vector, Vector]]


def rounds(
    world: World, work: Work, extras: tuple[float, ...] = (), lr: float = 1.0, fresh: bool = False
) -> FinalState:
    """FedAvg on w, where ``work`` takes a client from (w, v) to new ones.

    v starts as the model first received, or as a fresh one, which here is always ``world.start``.
    """
    theta, private = world.start, {}
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            v = private.get(i, np.concatenate([world.start if fresh else theta, extras]))
            models[i], new = work(world, i, t, rate, theta, v)
            if new is not v:  # a model that was not trained is not kept
                private[i] = new
        theta = theta - lr * (theta - average(world, theta, models))
    return FinalState(theta, states={f"client {i}/personal/private": v for i, v in private.items()})


def batches(world: World, client: int, t: int) -> list[Vector]:
    return world.local.batches(world.federation.train.index[client], world.seed, t, client)


def pfedme(world: World, lam: float = 15.0, steps: int = 5, personal_lr: float = 0.03, beta: float = 1.0) -> FinalState:
    """T. Dinh et al. 2020, algorithm 1: w_{i,0} = w^t; θ̃ solves min h_i(θ; w_{i,r}, D) by K steps of gradient descent.

    The first solution starts at w^t, each other one at the last. F_i has the weight decay; the rest of ∇h_i is clipped.
    """
    decay, clip = world.local.weight_decay, world.local.clip

    def work(world: World, i: int, t: int, eta: float, received: Vector, last_visit: Vector) -> tuple[Vector, Vector]:
        w = solution = received
        for rows in batches(world, i, t):
            for _ in range(steps):
                g = world.gradient(solution, rows) + lam * (solution - w)
                g = g if clip is None else g * min(1.0, clip / (np.linalg.norm(g) + 1e-6))
                solution = solution - personal_lr * (g + decay * solution)
            w = w - eta * lam * (w - solution)
        return w, solution

    return rounds(world, work, lr=beta)


def apfl(
    world: World, alpha: float = 0.25, learn: bool = False, w_first: bool = False, initial: bool = False
) -> FinalState:
    def work(world: World, i: int, t: int, rate: float, theta: Vector, private: Vector) -> tuple[Vector, Vector]:
        w, v, a = theta, private[: len(theta)], private[len(theta)] if learn else alpha
        pace = Pace(world, rate)
        for rows in batches(world, i, t):
            old = w
            (w,) = pace.step({"w": (w, world.gradient(w, rows))})
            at = w if w_first else old
            g = world.gradient(a * v + (1 - a) * at, rows)
            slope = g @ (v - at)
            (v,) = pace.step({"v": (v, a * g)})
            a = np.clip(a - rate * slope, 0, 1) if learn else a
        return w, np.append(v, a) if learn else v

    return rounds(world, work, (alpha,) if learn else (), fresh=initial)


def superfed(world: World, mu: float, nu: float, start: int, layers: bool) -> FinalState:
    sizes = [world.body, len(world.start) - world.body]

    def work(world: World, i: int, t: int, rate: float, theta: Vector, v: Vector) -> tuple[Vector, Vector]:
        w, pace = theta, Pace(world, rate)
        draw = rng.stream(world.seed, "views", t, i)
        for rows in batches(world, i, t):
            near = mu * (w - theta)
            lams = draw.random(2)
            if t < start:
                (w,) = pace.step({"w": (w, world.gradient(w, rows) + near)})
                continue
            at = np.repeat(lams, sizes) if layers else lams[0]
            g = world.gradient((1 - at) * w + at * v, rows)
            norm_w, norm_v = np.linalg.norm(w), np.linalg.norm(v)
            cosine = w @ v / (norm_w * norm_v)
            turn_w = 2 * nu * cosine * (v / (norm_w * norm_v) - cosine * w / norm_w**2)
            turn_v = 2 * nu * cosine * (w / (norm_w * norm_v) - cosine * v / norm_v**2)
            w, v = pace.step({"w": (w, (1 - at) * g + near + turn_w), "v": (v, at * g + turn_v)})
        return w, v

    return rounds(world, work, fresh=True)


def superfed_mm(world: World, mu: float = 0.01, nu: float = 1.0, start_round: int = 0) -> FinalState:
    return superfed(world, mu, nu, start_round, layers=False)


def superfed_lm(world: World, mu: float = 0.01, nu: float = 1.0, start_round: int = 0) -> FinalState:
    return superfed(world, mu, nu, start_round, layers=True)


def fedrep(world: World, head_fraction: float = 0.9) -> FinalState:
    theta, heads = world.start.copy(), dict.fromkeys(range(world.clients), world.start[world.body :])
    body = slice(0, world.body)
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            w, h, pace, todo = theta[body], heads[i], Pace(world, rate), batches(world, i, t)
            first = int(np.floor(head_fraction * len(todo) + 1e-9))
            if 0 < head_fraction < 1:
                first = max(min(max(first, 1), len(todo) - 1), 0)
            for number, rows in enumerate(todo):
                g = world.gradient(np.concatenate([w, h]), rows)
                if len(todo) == 1 and 0 < head_fraction < 1:
                    w, h = pace.step({"w": (w, g[body]), "h": (h, g[world.body :])})
                elif number < first:
                    (h,) = pace.step({"h": (h, g[world.body :])})
                else:
                    (w,) = pace.step({"w": (w, g[body])})
            models[i], heads[i] = np.concatenate([w, h]), h
        theta[body] = average(world, theta, models)[body]
    private = {i: np.concatenate([theta[body], h]) for i, h in heads.items()}
    return FinalState(theta, private)


class Normed(World):
    """The net with features γ ⊙ (a - mean)/sd + β in the place of a = tanh(W₁x + b₁); γ and β are last in θ.

    ``axis`` is 1 for a mean over a sample's features, 0 for one of a feature over the mini-batch.
    """

    axis = 1

    @classmethod
    def of(cls, world: World) -> Normed:
        normed = cls(**{f.name: getattr(world, f.name) for f in fields(world)})
        normed.start = np.concatenate([world.start, np.ones(world.width), np.zeros(world.width)])
        return normed

    def gradient(self, theta: Vector, rows: Vector) -> Vector:
        x, y, h, d = self.x[rows], self.y[rows], self.width, self.x.shape[1]
        w1, b1 = theta[: h * d].reshape(h, d), theta[h * d : h * d + h]
        rest, gamma, beta = theta[h * d + h : -2 * h], theta[-2 * h : -h], theta[-h:]
        c = len(rest) // (h + 1)
        w2 = rest[: c * h].reshape(c, h)
        a = np.tanh(x @ w1.T + b1)

        def mean(v: Vector) -> Vector:
            return v.mean(self.axis, keepdims=True)

        sd = np.sqrt(mean((a - mean(a)) ** 2) + 1e-5)
        z = (a - mean(a)) / sd
        o = (gamma * z + beta) @ w2.T + rest[c * h :]
        delta = cross_entropy_gradient(o, y)
        by_f = delta @ w2
        by_z = by_f * gamma
        back = (by_z - mean(by_z) - z * mean(by_z * z)) / sd * (1 - a**2)
        by_w2 = delta.T @ (gamma * z + beta)
        pieces = back.T @ x, back.sum(0), by_w2, delta.sum(0), (by_f * z).sum(0), by_f.sum(0)
        return np.concatenate([piece.ravel() for piece in pieces])


def fedbn(world: World) -> FinalState:
    return fedavg_on_slice(Normed.of(world), slice(0, len(world.start)))


def fedbabu(world: World, lr: float = 0.1, steps: int = 5) -> FinalState:
    """The head has no gradient; what clients fit before they deploy changes nothing in training."""
    body = np.arange(len(world.start)) < world.body
    theta = world.start
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            w, pace = theta[body], Pace(world, rate)
            for rows in batches(world, i, t):
                g = world.gradient(np.concatenate([w, world.start[~body]]), rows)
                (w,) = pace.step({"w": (w, g[body])})
            models[i] = np.concatenate([w, world.start[~body]])
        theta = average(world, theta, models)
    return FinalState(theta)


def knn_per(world: World, k: int = 10, lam: float = 0.5, scale: float = 1.0) -> FinalState:
    """Trained as ever."""
    return fedavg(world)


def local_aggregation(
    world: World, i: int, t: int, received: Vector, last: Vector, weights: Vector, free: Vector, first: bool,
    slope: Callable[[Vector, Vector], Vector], rate: float, fraction: float, size: int, tolerance: float, most: int,
) -> tuple[Vector, Vector]:  # fmt: skip
    """Zhang et al. 2023, algorithm 1: W by eqs. (5) and (6) on s % of the samples, then θ̂ by eq. (4); W [P], θ̂ [P].

    W is 1 and stays so in the lower layers, which are not ``free``.
    """
    rows = rng.stream(world.seed, "start", t, i).permutation(int(world.n[i]))
    rows = world.federation.train.index[i][rows[: max(round(fraction * world.n[i]), 1)]]
    size, losses = size or len(rows), []
    while rate and len(losses) < (most if first else 1):
        if len(losses) > 10 and np.std(losses[-10:]) < tolerance:
            break
        values = []
        for at in range(0, len(rows), size):
            batch, mixed = rows[at : at + size], last + (received - last) * weights
            values.append(world.loss_on(mixed, batch))
            step = rate * slope(mixed, batch) * (received - last)
            weights = np.where(free, np.clip(weights - step, 0, 1), weights)
        losses.append(np.mean(values))
    return weights, last + (received - last) * weights


def fedala(
    world: World, layers: int = 1, rate: float = 1.0, initial: float = 1.0, fraction: float = 0.8,
    batch_size: int = 10, tolerance: float = 0.1, most: int = 100,
) -> FinalState:  # fmt: skip
    free = np.arange(len(world.start)) >= (world.body if layers == 1 else 0)
    theta, last, learnt = world.start, {}, set()
    weights = dict.fromkeys(range(world.clients), np.where(free, initial, 1.0))
    for t, lr, cohort in world.schedule():
        starts = dict.fromkeys(cohort, theta)
        for i in (i for i in cohort if i in last):
            weights[i], starts[i] = local_aggregation(
                world, i, t, theta, last[i], weights[i], free, i not in learnt, world.gradient, rate, fraction,
                batch_size, tolerance, most,
            )  # fmt: skip
            learnt.add(i)
        models = {i: world.train(starts[i], i, t, lr)[0] for i in cohort}
        last |= models
        theta = average(world, theta, models)
    states = {f"client {i}/personal/private": v for i, v in last.items()}
    return FinalState(theta, states=states | {f"client {i}/personal/weights": weights[i] for i in last})


def fedfomo(world: World, models: int | None = None, explore: float = 0.3) -> FinalState:
    """Only such ``models`` and ``explore`` as leave nothing to chance: all of the round, or the best so far."""
    assert models is None or not explore
    private = [world.start.copy() for _ in range(world.clients)]
    affinity = np.zeros((world.clients, world.clients))
    for t, lr, cohort in world.schedule():
        new = {i: world.train(private[i], i, t, lr)[0] for i in cohort}
        mixed = {}
        for i in sorted(cohort):
            rows, before = world.federation.train.index[i], private[i]
            ranking = sorted((n for n in cohort if n != i), key=lambda n, i=i: (-affinity[i, n], n))
            senders = [i, *ranking[:models]]
            slopes = [
                max(0.0, (world.loss_on(before, rows) - world.loss_on(new[n], rows)) / np.linalg.norm(new[n] - before))
                for n in senders
            ]
            affinity[i, senders] += slopes
            slopes = slopes if sum(slopes) else [1.0] + [0.0] * (len(senders) - 1)
            mixed[i] = sum(s * new[n] for s, n in zip(slopes, senders, strict=True)) / sum(slopes)
        for i, theta in mixed.items():
            private[i] = theta
    return FinalState(np.mean(private, axis=0))


def fedpac(world: World, lam: float = 1.0, head_fraction: float = 1 / 6) -> FinalState:
    """Each programme by all supports that its solution may have; μ and V as moments of single samples' e_y rᵀ."""
    body, h, classes = slice(0, world.body), world.width, int(world.y.max()) + 1
    private, centres = np.tile(world.start, (world.clients, 1)), dict[int, Vector]()
    for t, rate, cohort in world.schedule():
        new, mean, variance, features = {}, [], [], dict[int, list[Vector]]()
        for i in cohort:
            client_rows = world.federation.train.index[i]
            r, y = forward(private[i], world.x[client_rows], h)[0], world.y[client_rows]
            moments = np.einsum("nc,nd->ncd", np.eye(classes)[y], r).reshape(len(y), -1)
            mean.append(moments.mean(0))
            variance.append(moments.var(0).sum() / len(y))
            w, v, pace, todo = private[i][body], private[i][world.body :], Pace(world, rate), batches(world, i, t)
            first = min(max(int(np.floor(head_fraction * len(todo) + 1e-9)), 1), len(todo) - 1)
            for number, rows in enumerate(todo):
                theta = np.concatenate([w, v])
                z, pull = forward(theta, world.x[rows], h)[0], np.zeros((len(rows), h))
                for row, label in enumerate(world.y[rows]):
                    if label in centres:
                        pull[row] = 2 * lam / len(rows) / h * (z[row] - centres[label])
                g = world.gradient(theta, rows) + backward(theta, world.x[rows], h, 0.0, pull)
                if len(todo) == 1:
                    w, v = pace.step({"w": (w, g[body]), "v": (v, g[world.body :])})
                elif number < first:
                    (v,) = pace.step({"v": (v, g[world.body :])})
                else:
                    (w,) = pace.step({"w": (w, g[body])})
            new[i] = np.concatenate([w, v])
            for label, z in zip(y, forward(new[i], world.x[client_rows], h)[0], strict=True):
                features.setdefault(label, []).append(z)
        centres = centres | {label: np.mean(z, axis=0) for label, z in features.items()}
        private[:, body] = average(world, world.start, new)[body]
        for at, i in enumerate(cohort):
            differences = np.array(mean) - mean[at]
            q, best = np.diag(variance) + differences @ differences.T, (np.inf, np.zeros(len(cohort)))
            for size in range(1, len(cohort) + 1):
                for some in combinations(range(len(cohort)), size):
                    alpha = np.zeros(len(cohort))
                    alpha[[*some]] = np.linalg.solve(q[np.ix_(some, some)], np.ones(size))
                    alpha /= alpha.sum()
                    if (alpha >= 0).all():
                        best = min(best, (float(alpha @ q @ alpha), alpha), key=lambda pair: pair[0])
            private[i, world.body :] = best[1] @ np.array([new[j][world.body :] for j in cohort])
    prototypes = np.array([centres[label] for label in sorted(centres)])
    states = {f"model {i}/model/theta": theta for i, theta in enumerate(private)}
    return FinalState(private.mean(0), states={**states, "server/objective.1/prototypes": prototypes})


def feddbe(world: World, kappa: float = 1.0, mu: float = 1.0) -> FinalState:
    """Zhang et al. 2023, algorithm 1, on θ and every client's z̄ᵖ; the first round is the one without a consensus."""
    theta, h, consensus = world.start, world.width, list[Vector]()
    memory = dict.fromkeys(range(world.clients), np.zeros(h))
    for t, rate, cohort in world.schedule():
        models, means = {}, {}
        for i in cohort:
            w, z, m, pace = theta, memory[i], np.zeros(h), Pace(world, rate)
            for rows in batches(world, i, t):
                features, o, w2 = forward(w, world.x[rows], h)
                m = (1 - mu) * m + mu * features.mean(0)
                at = cross_entropy_gradient(o + w2 @ z, world.y[rows])
                pull = 2 * kappa / h * (m - consensus[0]) * mu / len(rows) if consensus else 0.0
                g = backward(w, world.x[rows], h, at, pull)
                g[world.body : world.body + w2.size] += np.outer(at.sum(0), z).ravel()
                w, z = pace.step({"w": (w, g), "z": (z, at.sum(0) @ w2)})
            models[i], memory[i] = w, z
            means[i] = forward(w, world.x[world.federation.train.index[i]], h)[0].mean(0)
        theta = average(world, theta, models)
        consensus = consensus or [average(world, theta, means)]
    private = {i: np.append(theta, z) for i, z in memory.items()}
    return FinalState(np.append(theta, np.zeros(h)), private, {"server/objective.1/consensus": consensus[0]})


def discrepancy_slope(a: Vector, b: Vector) -> Vector:
    """The slope of MMD² at the rows b, kernel by kernel and row by row; the bandwidth counts as constant."""
    rows, sign = np.concatenate([a, b]), np.repeat([1 / len(a), -1 / len(b)], len(a))
    scale = np.mean([np.sum((p - q) ** 2) for n, p in enumerate(rows) for m, q in enumerate(rows) if n != m])
    slope = np.zeros_like(b)
    for width in scale * np.array([0.25, 0.5, 1.0, 2.0, 4.0]):
        for j in range(len(b)):
            differences = b[j] - rows
            k = np.exp(-np.sum(differences**2, axis=1) / width)
            slope[j] += 2 * sign[-1] * (sign * k) @ (-2 * differences / width)
    return slope


def fedphp(world: World, mu: float = 0.9, lam: float = 0.1, by: str = "outputs", tau: float = 4.0) -> FinalState:
    """Li et al. 2021: every client keeps its inherited model, which grows older round by round."""
    theta, inherited, states = world.start, {}, {}
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            todo, teacher = iter(batches(world, i, t)), inherited.get(i, theta)

            def correct(g: Vector, w: Vector, todo=todo, teacher=teacher) -> Vector:
                x = world.x[next(todo)]
                (r, z, _), (past, teacher_logits, _) = (forward(v, x, world.width) for v in (w, teacher))
                if by == "features":
                    return g + backward(w, x, world.width, 0.0, lam * discrepancy_slope(past, r))
                towards = softmax(z / tau) - softmax(teacher_logits / tau)
                return g + backward(w, x, world.width, lam * tau * towards / len(x))

            models[i], _ = world.train(theta, i, t, rate, correct)
            weight = mu * t / world.rounds if i in inherited else 0.0
            inherited[i] = weight * teacher + (1 - weight) * models[i]
            state = {"private": models[i], "history": teacher, "weight": np.array(weight)}
            states |= {f"client {i}/personal/{name}": value for name, value in state.items()}
        theta = average(world, theta, models)
    return FinalState(theta, states=states)


ORACLES = {
    f.__name__: f
    for f in (
        fedala, fedfomo, fedpac, feddbe, fedphp, pfedme, apfl, superfed_mm, superfed_lm, fedrep, fedbn, fedbabu,
        knn_per,
    )
}  # fmt: skip

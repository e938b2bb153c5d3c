"""NumPy derivations of the methods with a stronger local loss, beside those of ``reference``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np

from fedloom.base import rng
from helpers.federations import Shaken
from helpers.networks import teacher_net
from helpers.reference import FinalState, Vector, World, average, backward, cross_entropy_gradient, forward, softmax


def teacher_logits(x: Vector) -> Vector:
    net = teacher_net()
    parameters = [p.detach().double().numpy().ravel() for p in net.parameters()]
    return forward(np.concatenate(parameters), x, len(parameters[1]))[1]


def cosine_and_slope(z: Vector, to: Vector) -> tuple[Vector, Vector]:
    """cos(z, to) of each row, and its gradient at z."""
    z_norm, to_norm = np.sqrt((z**2).sum(1, keepdims=True)), np.sqrt((to**2).sum(1, keepdims=True))
    cos = (z * to).sum(1, keepdims=True) / (z_norm * to_norm)
    return cos[:, 0], to / (z_norm * to_norm) - cos * z / z_norm**2


def moon(world: World, mu: float = 0.1, tau: float = 0.5) -> FinalState:
    """The derivative of -log σ((cos_glob - cos_prev)/τ) is (1 - σ)(cos'_prev - cos'_glob)/τ."""
    theta, previous = world.start, {}
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            batches = iter(world.local.batches(world.federation.train.index[i], world.seed, t, i))
            anchors = theta, previous.get(i, theta)

            def correct(g: Vector, w: Vector, batches=batches, anchors=anchors) -> Vector:
                x = world.x[next(batches)]
                z, there, before = (forward(v, x, world.width)[0] for v in (w, *anchors))
                (glob, to_glob), (prev, to_prev) = cosine_and_slope(z, there), cosine_and_slope(z, before)
                push = 1 / (1 + np.exp((glob - prev) / tau))
                pull = mu / tau / len(x) * push[:, None] * (to_prev - to_glob)
                return g + backward(w, x, world.width, 0.0, pull)

            models[i], _ = world.train(theta, i, t, rate, correct)
        previous |= models
        theta = average(world, theta, models)
    return FinalState(theta, states={f"client {i}/objective.1/previous": v for i, v in previous.items()})


def fedntd(world: World, beta: float = 1.0, tau: float = 1.0) -> FinalState:
    """τ² KL over the classes that are not y has the slope τ(q̃ - q̃_glob) at their logits, and none at that of y."""
    theta = world.start
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            batches = iter(world.local.batches(world.federation.train.index[i], world.seed, t, i))

            def correct(g: Vector, w: Vector, batches=batches, at: Vector = theta) -> Vector:
                rows = next(batches)
                x, y = world.x[rows], world.y[rows]
                here, there = (forward(v, x, world.width)[1] for v in (w, at))
                push = np.zeros_like(here)
                for row in range(len(rows)):
                    other_classes = np.delete(np.arange(here.shape[1]), y[row])
                    p, p_global = (softmax(o[row : row + 1, other_classes] / tau)[0] for o in (here, there))
                    push[row, other_classes] = beta * tau * (p - p_global) / len(rows)
                return g + backward(w, x, world.width, push)

            models[i], _ = world.train(theta, i, t, rate, correct)
        theta = average(world, theta, models)
    return FinalState(theta)


def fedavg_with_logit_shift(
    world: World, shift: Callable[[Vector], Vector], scale: Callable[[Vector], Vector] = np.ones_like
) -> FinalState:
    """FedAvg on the cross entropy of scale(n) o + shift(n), n the client's samples of each class, at least 1e-8."""
    classes = len(world.start[world.body :]) // (world.width + 1)

    def gradient(w: Vector, rows: Vector, t: int, client: int, step: int) -> Vector:
        n = np.maximum(np.bincount(world.y[world.federation.train.index[client]], minlength=classes), 1e-8)
        o = forward(w, world.x[rows], world.width)[1] * scale(n) + shift(n)
        return backward(w, world.x[rows], world.width, cross_entropy_gradient(o, world.y[rows]) * scale(n))

    return fedavg_along(world, gradient)


def fedlc(world: World, tau: float = 1.0) -> FinalState:
    return fedavg_with_logit_shift(world, lambda n: -tau / np.sqrt(np.sqrt(n)))


def fedrs(world: World, alpha: float = 0.5) -> FinalState:
    return fedavg_with_logit_shift(world, np.zeros_like, lambda n: np.where(n > 0.5, 1.0, alpha))


def fedrod(world: World, gamma: float = 1.0, lr: float = 0.1, steps: int = 50) -> FinalState:
    """What clients fit before they deploy changes nothing in training."""
    return fedavg_with_logit_shift(world, lambda n: gamma * np.log(n))


def fedproto(world: World, lam: float = 1.0) -> FinalState:
    """Every client keeps a net of its own; the server knows means of features, class by class."""
    models, centres = dict.fromkeys(range(world.clients), world.start), {}
    for t, rate, cohort in world.schedule():
        features: dict[int, list[Vector]] = {}
        for i in cohort:
            batches = iter(world.local.batches(world.federation.train.index[i], world.seed, t, i))

            def correct(g: Vector, w: Vector, batches=batches, centres=centres) -> Vector:
                rows = next(batches)
                z = forward(w, world.x[rows], world.width)[0]
                pull = np.zeros_like(z)
                for number, label in enumerate(world.y[rows]):
                    if label in centres:
                        pull[number] = 2 * lam / len(rows) / world.width * (z[number] - centres[label])
                return g + backward(w, world.x[rows], world.width, 0.0, pull)

            models[i], _ = world.train(models[i], i, t, rate, correct)
            rows = world.federation.train.index[i]
            for label, z in zip(world.y[rows], forward(models[i], world.x[rows], world.width)[0], strict=True):
                features.setdefault(label, []).append(z)
        centres = centres | {label: np.mean(z, axis=0) for label, z in features.items()}
    prototypes = np.array([centres[label] for label in sorted(centres)])
    return FinalState(world.start, models, {"server/objective.1/prototypes": prototypes})


def class_means(world: World, model: Vector, client: int) -> list[tuple[int, Vector]]:
    """The mean of a client's features for each class that it has, in the classes' order."""
    rows = world.federation.train.index[client]
    z, y = forward(model, world.x[rows], world.width)[0], world.y[rows]
    return [(int(label), z[y == label].mean(0)) for label in np.unique(y)]


def shuffled_batches(world: World, t: int, epochs: int, batch_size: int, count: int) -> Iterator[Vector]:
    """The rows of the mini-batches with which a server trains: what is drawn is data."""
    for epoch in range(epochs):
        order = rng.stream(world.seed, "class means", t, epoch).permutation(count)
        yield from (order[start : start + batch_size] for start in range(0, count, batch_size))


def fedtgp(
    world: World, lam: float = 1.0, margin: float = 100.0, epochs: int = 100, lr: float = 0.01, batch_size: int = 10
) -> FinalState:
    """The server's network and its contrastive loss, with slopes by hand."""
    models, h, classes = dict.fromkeys(range(world.clients), world.start), world.width, int(world.y.max()) + 1
    draws = rng.stream(world.seed, "prototypes")
    w1, w2 = draws.uniform(-(h**-0.5), h**-0.5, (2, h, h))
    b1, b2 = draws.uniform(-(h**-0.5), h**-0.5, (2, h))
    e, centres = draws.normal(size=(classes, h)), None
    for t, rate, cohort in world.schedule():
        sent: list[tuple[int, Vector]] = []
        for i in cohort:
            batches = iter(world.local.batches(world.federation.train.index[i], world.seed, t, i))

            def correct(g: Vector, w: Vector, batches=batches, centres=centres) -> Vector:
                rows = next(batches)
                if centres is None:
                    return g
                z = forward(w, world.x[rows], h)[0]
                return g + backward(w, world.x[rows], h, 0.0, 2 * lam / len(rows) / h * (z - centres[world.y[rows]]))

            models[i], _ = world.train(models[i], i, t, rate, correct)
            sent += class_means(world, models[i], i)
        y, points = np.array([label for label, _ in sent]), np.array([z for _, z in sent])
        middle = [points[y == label].mean(0) for label in np.unique(y)]
        delta = min(margin, max(float(np.sqrt(((a - b) ** 2).sum())) for a in middle for b in middle))
        for rows in shuffled_batches(world, t, epochs, batch_size, len(y)):
            hidden = e @ w1.T + b1
            prototypes = np.maximum(hidden, 0) @ w2.T + b2
            way = prototypes[None] - points[rows, None]
            far = np.sqrt((way**2).sum(-1))
            right = np.eye(classes)[y[rows]]
            at_far = (right - softmax(-far - delta * right)) / len(rows)
            at_prototypes = (at_far[..., None] * way / far[..., None]).sum(0)
            at_hidden = (at_prototypes @ w2) * (hidden > 0)
            steps = (
                at_prototypes.T @ np.maximum(hidden, 0),
                at_prototypes.sum(0),
                at_hidden.T @ e,
                at_hidden.sum(0),
                at_hidden @ w1,
            )
            w2, b2, w1, b1, e = (v - lr * step for v, step in zip((w2, b2, w1, b1, e), steps, strict=True))
        centres = np.maximum(e @ w1.T + b1, 0) @ w2.T + b2
    assert centres is not None
    return FinalState(world.start, models, {"server/objective.1/prototypes": centres})


def fedgh(world: World, epochs: int = 1, lr: float = 0.01, batch_size: int = 1) -> FinalState:
    """Own bodies, and a head that learns from class means at the server alone."""
    theta, models, head = world.start.copy(), dict.fromkeys(range(world.clients), world.start), slice(world.body, None)
    for t, rate, cohort in world.schedule():
        sent: list[tuple[int, Vector]] = []
        for i in cohort:
            models[i], _ = world.train(np.concatenate([models[i][: world.body], theta[head]]), i, t, rate)
            sent += class_means(world, models[i], i)
        y, points = np.array([label for label, _ in sent]), np.array([z for _, z in sent])
        weight = theta[head].reshape(-1)[: -(len(theta[head]) // (world.width + 1))].reshape(-1, world.width)
        bias = theta[head][weight.size :]
        for rows in shuffled_batches(world, t, epochs, batch_size, len(y)):
            at = cross_entropy_gradient(points[rows] @ weight.T + bias, y[rows])
            weight, bias = weight - lr * at.T @ points[rows], bias - lr * at.sum(0)
        theta[head] = np.concatenate([weight.ravel(), bias])
    return FinalState(theta, models)


def side_by_side(
    world: World, slopes: Callable[[Vector, Vector, Vector, Vector], tuple[Vector, ...]], further: Vector
) -> FinalState:
    """FedAvg of a net, trained at once with a net of each client's own and further numbers that stay there.

    ``slopes`` returns the gradients at the shared net, the own one and the further numbers, for rows.
    """
    theta, size = world.start, len(world.start)
    private = dict.fromkeys(range(world.clients), np.concatenate([world.start, further]))
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:

            def gradient(at: Vector, rows: Vector) -> Vector:
                return np.concatenate(slopes(at[:size], at[size : 2 * size], at[2 * size :], rows))

            joint, _ = world.train(np.concatenate([theta, private[i]]), i, t, rate, gradient=gradient)
            models[i], private[i] = joint[:size], joint[size:]
        theta = average(world, theta, models)
    return FinalState(theta, {i: np.concatenate([theta, model]) for i, model in private.items()})


def fml(world: World, alpha: float = 0.5, beta: float = 0.5) -> FinalState:
    """The slope of KL(q‖p) at the logits of p is p - q."""

    def slopes(w: Vector, v: Vector, further: Vector, rows: Vector) -> tuple[Vector, ...]:
        x, h = world.x[rows], world.width
        o_w, o_v = forward(w, x, h)[1], forward(v, x, h)[1]
        gap = (softmax(o_w) - softmax(o_v)) / len(rows)
        at_shared = beta * cross_entropy_gradient(o_w, world.y[rows]) + (1 - beta) * gap
        at_own = alpha * cross_entropy_gradient(o_v, world.y[rows]) - (1 - alpha) * gap
        return backward(w, x, h, at_shared), backward(v, x, h, at_own), further

    return side_by_side(world, slopes, np.zeros(0))


def fedkd(world: World) -> FinalState:
    """Divided by the sum of both losses of a sample: the divergences, and the distance of features after a map."""

    def slopes(w: Vector, v: Vector, further: Vector, rows: Vector) -> tuple[Vector, ...]:
        x, h = world.x[rows], world.width
        (r, o, _), (own_r, own_o, _), to = forward(w, x, h), forward(v, x, h), further.reshape(h, h)
        q, p = softmax(o), softmax(own_o)
        right = np.arange(len(rows)), world.y[rows]
        s = 1 / (-np.log(p[right]) - np.log(q[right]))[:, None] / len(rows)
        gap = 2 / h * s * (own_r - r @ to.T)
        at_shared = backward(w, x, h, cross_entropy_gradient(o, world.y[rows]) + s * (q - p), -gap @ to)
        at_own = backward(v, x, h, cross_entropy_gradient(own_o, world.y[rows]) + s * (p - q), gap)
        return at_shared, at_own, (-gap.T @ r).ravel()

    return side_by_side(world, slopes, np.eye(world.width).ravel())


def feddistill(world: World, gamma: float = 1.0) -> FinalState:
    """Every client keeps a net of its own, and hears the mean output of the others for each class."""
    models, outputs = dict.fromkeys(range(world.clients), world.start), {}
    classes = int(world.y.max()) + 1
    for t, rate, cohort in world.schedule():
        fresh: dict[int, dict[int, Vector]] = {}
        for i in cohort:
            batches = iter(world.local.batches(world.federation.train.index[i], world.seed, t, i))

            def correct(g: Vector, w: Vector, i=i, batches=batches, outputs=outputs) -> Vector:
                rows = next(batches)
                p = softmax(forward(w, world.x[rows], world.width)[1])
                at = np.zeros_like(p)
                for number, label in enumerate(world.y[rows]):
                    if means_of_others := [mean for j, mean in outputs.get(label, {}).items() if j != i]:
                        at[number] = gamma / len(rows) * (p[number] - np.mean(means_of_others, axis=0))
                return g + backward(w, world.x[rows], world.width, at)

            models[i], _ = world.train(models[i], i, t, rate, correct)
            rows = world.federation.train.index[i]
            p = softmax(forward(models[i], world.x[rows], world.width)[1])
            for label in np.unique(world.y[rows]):
                fresh.setdefault(label, {})[i] = p[world.y[rows] == label].mean(0)
        outputs = outputs | fresh
    sums = np.zeros((classes, classes))
    for label, means in outputs.items():
        sums[label] = np.sum([*means.values()], axis=0)
    return FinalState(world.start, models, {"server/objective.1/outputs": sums})


def teacher_gradient(x: Vector, o: Vector, tau: float) -> Vector:
    """The gradient of the mean τ² KL(teacher‖model) at the logits."""
    return tau * (softmax(o / tau) - softmax(teacher_logits(x) / tau)) / len(x)


def symmetric_kl_gradient(o: Vector, o_other: Vector, tau: float) -> Vector:
    """The gradient of the mean (τ²/2) (KL(p‖q) + KL(q‖p)) at the logits of p."""
    p, q = softmax(o / tau), softmax(o_other / tau)
    ratio = np.log(p / q)
    return tau / 2 * (p * (ratio - (p * ratio).sum(1, keepdims=True)) + p - q) / len(p)


def views(world: World, rows: Vector, t: int, client: int, step: int) -> tuple[Vector, Vector]:
    """Both augmentations of a mini-batch: what is drawn is data."""
    x = world.x[rows]
    streams = (rng.stream(world.seed, "augment", t, client, step, view) for view in (0, 1))
    first, second = (x + draw.normal(scale=Shaken().by, size=x.shape) for draw in streams)
    return first, second


def fedavg_along(world: World, gradient: Callable[[Vector, Vector, int, int, int], Vector]) -> FinalState:
    """FedAvg along another gradient(θ, rows, round, client, step)."""
    theta = world.start
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            batches = zip(world.local.batches(world.federation.train.index[i], world.seed, t, i), count(), strict=False)

            def instead(g: Vector, w: Vector, batches=batches, t: int = t, i: int = i) -> Vector:
                rows, step = next(batches)
                return gradient(w, rows, t, i, step)

            models[i], _ = world.train(theta, i, t, rate, instead)
        theta = average(world, theta, models)
    return FinalState(theta)


def distill(world: World, alpha: float = 0.1, tau: float = 3.5) -> FinalState:
    def gradient(w: Vector, rows: Vector, t: int, client: int, step: int) -> Vector:
        x = world.x[rows]
        o = forward(w, x, world.width)[1]
        return backward(
            w,
            x,
            world.width,
            alpha * cross_entropy_gradient(o, world.y[rows]) + (1 - alpha) * teacher_gradient(x, o, tau),
        )

    return fedavg_along(world, gradient)


def robust(world: World, alpha: float = 0.5, tau: float = 3.5, teach: float = 0.0) -> FinalState:
    """``teach`` is the weight of a teacher on the first view."""

    def gradient(w: Vector, rows: Vector, t: int, client: int, step: int) -> Vector:
        x1, x2 = views(world, rows, t, client, step)
        o1, o2 = (forward(w, x, world.width)[1] for x in (x1, x2))
        first = alpha * cross_entropy_gradient(o1, world.y[rows]) + (1 - alpha) * symmetric_kl_gradient(o1, o2, tau)
        if teach:
            first = first + teach * teacher_gradient(x1, o1, tau)
        second = (1 - alpha) * symmetric_kl_gradient(o2, o1, tau)
        return backward(w, x1, world.width, first) + backward(w, x2, world.width, second)

    return fedavg_along(world, gradient)


def distill_robust(world: World, alpha: float = 0.1, tau: float = 3.5) -> FinalState:
    return robust(world, alpha, tau, teach=1 - alpha)


def top_classes(x: Vector, top: int) -> Vector:
    """Which classes the teacher finds most likely, as ones and zeros."""
    ranks = (-teacher_logits(x)).argsort(1).argsort(1)
    return (ranks < top).astype(float)


def disk(
    world: World, alpha: float = 0.1, tau: float = 3.5, top_k: int = 2, delta: float = 0.1, lam_min: float = 0.1,
    lam_max: float = 50.0, lam_period: int = 50, guide_lr: float = 0.02,
) -> FinalState:  # fmt: skip
    """Three steps of the guide σ(⟨a, t⟩ + b) before each step of the model, along slopes derived by hand."""
    theta, guide = world.start, np.zeros(world.y.max() + 2)
    for r, lr, cohort in world.schedule():
        first = max(world.rounds // lam_period - 1, 0) * lam_period
        u = (r - first) / (world.rounds - first) if r >= first else (r % lam_period) / lam_period
        lam = lam_min + (lam_max - lam_min) * (1 - np.cos(np.pi * u)) / 2
        models, guides = {}, {}
        for i in cohort:
            batches = iter(world.local.batches(world.federation.train.index[i], world.seed, r, i))
            guides[i] = guide

            def instead(g: Vector, w: Vector, batches=batches, guides=guides, i: int = i, lam: float = lam) -> Vector:
                rows = next(batches)
                x, y = world.x[rows], world.y[rows]
                t, o, m = softmax(teacher_logits(x) / tau), forward(w, x, world.width)[1], top_classes(x, top_k)
                s, cost = softmax(o / tau), -np.log(softmax(o)[np.arange(len(y)), y])
                inputs, wrong = np.column_stack([t, np.ones(len(y))]), max((o.argmax(1) != y).sum(), 1)
                for _ in range(3):
                    help = 1 / (1 + np.exp(-inputs @ guides[i]))
                    slope = -(1 - alpha) * tau**2 * (m * t / (s + m * help[:, None])).sum(1) / len(y)
                    slope = slope + (lam * cost / wrong if (help * cost).sum() / wrong > delta else 0.0)
                    guides[i] = guides[i] - guide_lr * (slope * help * (1 - help)) @ inputs
                help = 1 / (1 + np.exp(-inputs @ guides[i]))
                at = -(tau**2) * t / (s + m * help[:, None])  # the slope at s
                far = s * (at - (s * at).sum(1, keepdims=True)) / tau / len(y)
                return backward(w, x, world.width, alpha * cross_entropy_gradient(o, world.y[rows]) + (1 - alpha) * far)

            models[i], _ = world.train(theta, i, r, lr, instead)
        theta, guide = average(world, theta, models), average(world, guide, guides)
    return FinalState(theta, states={"server/objective.0/guide": guide})


def penalty_gradient(world: World, theta: Vector, rows: Vector, eps: float) -> Vector:
    """The gradient of (1/d²)‖K‖_F² by hand, for the features tanh(W₁x + b₁)."""
    x, n, h = world.x[rows], len(rows), world.width
    a, _, _ = forward(theta, x, h)
    c = a - a.mean(0)
    sd = np.sqrt((c**2).mean(0) + eps)
    z = c / sd
    by_z = 4 / (n * h**2) * z @ (z.T @ z / n)
    by_c = by_z / sd - c * (c * by_z).sum(0) / (n * sd**3)
    return backward(theta, x, h, 0.0, by_c - by_c.mean(0))


def feddecorr(world: World, beta: float = 0.1, eps: float = 1e-8) -> FinalState:
    theta = world.start
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            batches = iter(world.local.batches(world.federation.train.index[i], world.seed, t, i))

            def correct(g: Vector, w: Vector, batches: Any = batches) -> Vector:
                return g + beta * penalty_gradient(world, w, next(batches), eps)

            models[i], _ = world.train(theta, i, t, rate, correct)
        theta = average(world, theta, models)
    return FinalState(theta)


ORACLES: dict[str, Callable[..., FinalState]] = {
    f.__name__: f
    for f in (
        feddecorr,
        moon,
        fedntd,
        fedlc,
        fedrs,
        fedrod,
        fedproto,
        feddistill,
        fedtgp,
        fedgh,
        fml,
        fedkd,
        distill,
        disk,
        robust,
        distill_robust,
    )
}

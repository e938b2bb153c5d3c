"""A second derivation in NumPy: hand-written gradients of a small net, local SGD, and every method's equations.

Nothing of FedLoom's arithmetic is used. Only what is *data* is shared: which clients come and which rows a batch holds.
The net is o = W₂ tanh(W₁x + b₁) + b₂ with cross entropy; its parameters lie end to end in the order W₁, b₁, W₂, b₂.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedloom.core.federation import Federation
from fedloom.core.local import Local, cohort_size, draw_cohort

Vector = np.ndarray
Correct = Callable[[Vector, Vector], Vector]  # (gradient of the loss, θ) -> gradient that is followed


def forward(theta: Vector, x: Vector, width: int) -> tuple[Vector, Vector, Vector]:
    """Features tanh(W₁x + b₁), logits, and W₂, of a net whose parameters lie end to end."""
    d, h = x.shape[1], width
    w1, b1, rest = theta[: h * d].reshape(h, d), theta[h * d : h * d + h], theta[h * d + h :]
    c = len(rest) // (h + 1)
    w2 = rest[: c * h].reshape(c, h)
    a = np.tanh(x @ w1.T + b1)
    return a, a @ w2.T + rest[c * h :], w2


def backward(theta: Vector, x: Vector, width: int, logits: Vector | float, features: Vector | float = 0.0) -> Vector:
    """The gradient at θ, from those at logits and features, which may be 0."""
    a, o, w2 = forward(theta, x, width)
    at_logits = np.zeros_like(o) + logits
    back = (at_logits @ w2 + features) * (1 - a**2)
    return np.concatenate([(back.T @ x).ravel(), back.sum(0), (at_logits.T @ a).ravel(), at_logits.sum(0)])


def softmax(o: Vector) -> Vector:
    e = np.exp(o - o.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def cross_entropy_gradient(o: Vector, y: Vector) -> Vector:
    """The gradient of the mean cross entropy at the logits [N, C]."""
    return (softmax(o) - np.eye(o.shape[1])[y]) / len(y)


@dataclass
class World:
    """The conditions: data, starting point, rounds, local training."""

    federation: Federation
    start: Vector
    width: int
    rounds: int
    cohort: int
    local: Local
    seed: int

    @cached_property
    def x(self) -> Vector:
        return self.federation.train.arrays.x.numpy()

    @cached_property
    def y(self) -> Vector:
        return self.federation.train.arrays.y.numpy()

    @cached_property
    def n(self) -> Vector:
        return self.federation.train.index.sizes.astype(float)

    @property
    def clients(self) -> int:
        return len(self.n)

    @cached_property
    def body(self) -> int:
        """Length of W₁ and b₁: what lies before the head."""
        return self.width * (self.x.shape[1] + 1)

    def schedule(self) -> Iterator[tuple[int, float, list[int]]]:
        """Round, learning rate, cohort."""
        size = cohort_size(self.clients, 1.0, self.cohort)
        for t in range(self.rounds):
            rate = self.local.lr * self.local.lr_decay ** (t // self.local.decay_every)
            yield t, rate, draw_cohort(self.clients, size, self.seed, t).tolist()

    def gradient(self, theta: Vector, rows: Vector) -> Vector:
        at_logits = cross_entropy_gradient(self.logits(theta, rows), self.y[rows])
        return backward(theta, self.x[rows], self.width, at_logits)

    def logits(self, theta: Vector, rows: Vector) -> Vector:
        return forward(theta, self.x[rows], self.width)[1]

    def loss(self, theta: Vector, client: int) -> float:
        """F_i(θ) on all training rows of a client."""
        return self.loss_on(theta, self.federation.train.index[client])

    def loss_on(self, theta: Vector, rows: Vector) -> float:
        """The mean cross entropy."""
        y, o = self.y[rows], self.logits(theta, rows)
        return float(np.mean(np.log(np.exp(o).sum(1)) - o[np.arange(len(y)), y]))

    def reach(self, steps: int) -> float:
        """How far so many steps go along a constant unit gradient, in learning rates: SGD itself, on one number."""
        at, velocity, beta = 0.0, 0.0, self.local.momentum
        for _ in range(steps):
            velocity = beta * velocity + 1
            at += 1 + beta * velocity if self.local.nesterov else velocity
        return at

    def train(
        self, theta: Vector, client: int, t: int, rate: float, correct: Correct = lambda g, theta: g, rows: Any = None,
        gradient: Callable[[Vector, Vector], Vector] | None = None,
    ) -> tuple[Vector, int]:  # fmt: skip
        """Local SGD from θ on the client's mini-batches of the round. Returns θ_i and the steps taken."""
        rows = self.federation.train.index[client] if rows is None else rows
        batches = self.local.batches(rows, self.seed, t, client)
        return self.descend(theta, batches, rate, correct, gradient or self.gradient), len(batches)

    def descend(
        self, theta: Vector, batches: Sequence[Vector], rate: float, correct: Correct,
        gradient: Callable[[Vector, Vector], Vector],
    ) -> Vector:  # fmt: skip
        """SGD from θ with its settings: correction, clipping, weight decay, momentum, step."""
        local, theta = self.local, theta.copy()
        velocity = np.zeros_like(theta)
        for batch in batches:
            g = correct(gradient(theta, batch), theta)
            if local.clip is not None:
                norm = np.sqrt(np.sum(g**2))
                g = g * min(1.0, local.clip / (norm + 1e-6))
            g = g + local.weight_decay * theta
            velocity = local.momentum * velocity + g
            direction = g + local.momentum * velocity if local.nesterov else velocity
            theta = theta - rate * direction
        return theta


@dataclass
class FinalState:
    """Where a derivation ends: θ [P] at the server, each client's own θ_i [P] where it keeps one, and named states."""

    theta: Vector
    private: dict[int, Vector] = field(default_factory=dict)
    states: dict[str, Vector] = field(default_factory=dict)


def average(world: World, theta: Vector, models: dict[int, Vector], uniform: bool = False) -> Vector:
    """Mean of the cohort's models, by samples or uniform."""
    weight = {i: 1.0 if uniform else world.n[i] for i in models}
    return sum(weight[i] * models[i] for i in models) / sum(weight.values())


def fedavg(world: World) -> FinalState:
    theta = world.start
    for t, rate, cohort in world.schedule():
        theta = average(world, theta, {i: world.train(theta, i, t, rate)[0] for i in cohort})
    return FinalState(theta)


def local(world: World) -> FinalState:
    models = dict.fromkeys(range(world.clients), world.start)
    for t, rate, cohort in world.schedule():
        models |= {i: world.train(models[i], i, t, rate)[0] for i in cohort}
    return FinalState(world.start, models)


def centralised(world: World) -> FinalState:
    theta = world.start
    rows = np.concatenate([world.federation.train.index[i] for i in range(world.clients)])
    for t, rate, _ in world.schedule():
        theta, _ = world.train(theta, 0, t, rate, rows=rows)
    return FinalState(theta)


def fedavg_on_slice(world: World, shared: slice) -> FinalState:
    """FedAvg on a slice of θ; the rest stays at each client."""
    theta = world.start.copy()
    private = dict.fromkeys(range(world.clients), world.start)
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            model = private[i].copy()
            model[shared] = theta[shared]
            models[i], _ = world.train(model, i, t, rate)
        private |= models
        theta[shared] = average(world, theta, models)[shared]
    return FinalState(theta, private)


def fedper(world: World) -> FinalState:
    return fedavg_on_slice(world, slice(0, world.body))


def lg_fedavg(world: World) -> FinalState:
    return fedavg_on_slice(world, slice(world.body, None))


def fedadmm(world: World, rho: float = 0.01, server_lr: float = 1.0) -> FinalState:
    """Primal and dual variables of all clients from the start on; θ by the changes of w + y/ρ."""
    theta, w = world.start, dict.fromkeys(range(world.clients), world.start)
    y = dict.fromkeys(range(world.clients), np.zeros_like(world.start))
    for t, rate, cohort in world.schedule():
        change = np.zeros_like(theta)
        for i in cohort:
            before = w[i] + y[i] / rho
            w[i], _ = world.train(theta, i, t, rate, lambda g, v, i=i, theta=theta: g + y[i] + rho * (v - theta))
            y[i] = y[i] + rho * (w[i] - theta)
            change += w[i] + y[i] / rho - before
        theta = theta + server_lr * change / len(cohort)
    return FinalState(theta, states={f"client {i}/drift/y": y[i] for i in y})


ORACLES: dict[str, Callable[..., FinalState]] = {
    f.__name__: f
    for f in (
        fedavg,
        local,
        centralised,
        fedper,
        lg_fedavg,
        fedadmm,
    )
}

"""Least squares at every client, where what methods do is linear algebra."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedloom.base.tree import Tree
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Drift, Mixing
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.federated import RunResult, run
from fedloom.parts.objectives import SquaredError
from helpers.federations import regression
from helpers.networks import line
from helpers.runs import experiment

Vector = np.ndarray
SIZES = (6, 14, 8, 20)
DIM = 3
EXACT = Local(steps=20, batch_size=0, lr=0.48)  # with α = .7 all directions shrink by more than half a step
NEAR = Local(steps=8, batch_size=0, lr=0.48)  # as good where methods stop, since displacements vanish there
FEW = Local(steps=5, batch_size=0, lr=0.2)


class Track(Callback):
    """The server's models θ^t, states and the clients' states, round by round."""

    def __init__(self) -> None:
        self.theta: list[Vector] = []
        self.server: list[dict[str, Tree]] = []
        self.clients: list[dict[int, Any]] = []

    def on_step(self, step: Any) -> dict[str, Any]:
        self.theta.append(step.server.theta.numpy().copy())
        self.server.append(dict(step.server.parts))
        self.clients.append((self.clients[-1] if self.clients else {}) | step.report.states)
        return {}


@dataclass(frozen=True)
class Problem:
    """F_i(θ) = ½θᵀA_iθ - b_iᵀθ + const, from data X_i with X_iᵀX_i/n_i = A_i."""

    a: tuple[Vector, ...]
    b: tuple[Vector, ...]
    x: tuple[Vector, ...]
    y: tuple[Vector, ...]

    @cached_property
    def n(self) -> Vector:
        return np.array([len(y) for y in self.y], dtype=float)

    def solution(self, weights: Vector) -> Vector:
        """The minimiser of Σ w_i F_i."""
        return np.linalg.solve(
            sum(w * a for w, a in zip(weights, self.a, strict=True)),
            sum(w * b for w, b in zip(weights, self.b, strict=True)),
        )

    def gradient(self, client: int, at: Vector) -> Vector:
        return self.a[client] @ at - self.b[client]

    def run(self, method: Method, rounds: int, local: Local, callbacks: Any = (), **changes: Any) -> RunResult:
        settings = {"federation": regression(self.x, self.y), "model": line(self.x[0].shape[1]), "compute": "batched"}
        return run(experiment(method, rounds=rounds, local=local, **settings | changes), callbacks=callbacks)


def quadratics(sizes: tuple[int, ...] = SIZES, seed: int = 1) -> Problem:
    """Clients with Hessians of eigenvalues in [.6, 1.6] in different directions, and solutions far apart."""
    draw = np.random.default_rng(seed)
    a, b, xs, ys = [], [], [], []
    for n in sizes:
        frame, _ = np.linalg.qr(draw.normal(size=(n, DIM)))
        turn, _ = np.linalg.qr(draw.normal(size=(DIM, DIM)))
        x = np.sqrt(n) * frame @ np.diag(np.sqrt(draw.uniform(0.6, 1.6, size=DIM))) @ turn
        y = x @ (2 * draw.normal(size=DIM)) + 0.1 * draw.normal(size=n)
        xs.append(x)
        ys.append(y)
        a.append(x.T @ x / n)
        b.append(x.T @ y / n)
    return Problem(tuple(a), tuple(b), tuple(xs), tuple(ys))


def squares(drift: Drift | None = None, mixing: Mixing | None = None, **slots: Any) -> Method:
    return Method("test", (SquaredError(),), drift=drift or Drift(), mixing=mixing or Mixing(), **slots)

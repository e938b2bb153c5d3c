"""FedBuff, FedAsync, MIFA and CA²FL against event simulators in NumPy, written from the papers' algorithm boxes.

The simulators train a client when it is invited, with the model of that time; FedLoom trains it when its work is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import CLASSES, FEATURES, classes
from helpers.marks import kinds
from helpers.runs import experiment
from torch import nn

from fedloom import methods
from fedloom.core.local import Local, draw_cohort
from fedloom.core.timeline import Timeline, World
from fedloom.experiment.federated import FederatedTask
from fedloom.parts.server import SGD
from fedloom.timing import Asynchronous, Buffered, Equal

STEPS, RATE, CLIENTS = 5, 0.3, 6
RATES = np.array([1.0, 0.31, 2.7, 0.83, 5.9, 1.7])


def seconds(clients: np.ndarray, version: int) -> np.ndarray:
    return RATES[clients] * (1 + 0.3 * np.sin(3.0 * clients + version))


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(FEATURES, CLASSES)


def world(size: int) -> World:
    return World(CLIENTS, size, lambda t, count: draw_cohort(CLIENTS, count, 0, t), seconds)


def federated_task(method: Any, schedule: Any, size: int, rounds: int, **changes: Any) -> FederatedTask:
    settings: dict[str, Any] = {"schedule": schedule, "devices": Equal(), "cohort": size, "rounds": rounds}
    local = Local(steps=STEPS, batch_size=0, lr=RATE, weight_decay=0.0)
    task = FederatedTask(experiment(method, model=linear, local=local, federation=classes(), **settings, **changes))
    task.timeline = Timeline(schedule, world(size))
    task.open()
    return task


def train(x: np.ndarray, y: np.ndarray, theta: np.ndarray, pull: float = 0.0) -> np.ndarray:
    """Full-batch gradient descent on the cross entropy of a linear model [C, d + 1], with (μ/2)‖θ - θ^s‖²."""
    start, x = theta, np.column_stack([x, np.ones(len(x))])
    for _ in range(STEPS):
        scores = x @ theta.T
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        theta = theta - RATE * ((p - np.eye(CLASSES)[y]).T @ x / len(x) + pull * (theta - start))
    return theta


@dataclass
class Simulator:
    """Clients at work, and the order in which their work arrives."""

    size: int
    work: Callable[[int, np.ndarray], Any]
    heap: list[tuple[float, int, int, Any]] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)
    clock: float = 0.0
    wave: int = 0

    def invite(self, theta: np.ndarray, version: int) -> None:
        free = self.size - len(self.heap)
        if not free:
            return
        clients = world(self.size).invite(free, version, self.wave, self.busy, self.clock)
        self.wave += 1
        for client in clients.tolist():
            end = self.clock + float(seconds(np.array([client]), version)[0])
            heappush(self.heap, (end, client, version, self.work(client, theta)))
            self.busy.add(client)

    def arrivals(self) -> list[tuple[int, int, Any]]:
        self.clock = self.heap[0][0]
        results = []
        while self.heap and self.heap[0][0] == self.clock:
            results.append(heappop(self.heap)[1:])
        return results


def start(task: FederatedTask) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    weight, bias = (value.detach().double().numpy() for value in linear().parameters())
    split = task.federation.train
    rows = [split.index[client] for client in range(CLIENTS)]
    x, y = split.arrays.x.double().numpy(), split.arrays.y.numpy()
    return np.column_stack([weight, bias]), [(x[indices], y[indices]) for indices in rows]


def train_with_library(task: FederatedTask, steps: int) -> tuple[np.ndarray, list[float]]:
    clocks = []
    for _ in range(steps):
        clocks.append(task.commit(task.step())[0]["clock"])
    theta = task.state.server.theta.numpy()
    split = CLASSES * FEATURES
    return np.column_stack([theta[:split].reshape(CLASSES, FEATURES), theta[split:]]), clocks


def simulate(
    theta: np.ndarray, size: int, k: int, steps: int, work: Callable[[int, np.ndarray], Any],
    step: Callable[[np.ndarray, list[tuple[int, int, Any]]], np.ndarray],
) -> tuple[np.ndarray, list[float]]:  # fmt: skip
    """``step(θ, [(client, staleness, work)])`` is the server's; the buffer holds k."""
    simulator, version, buffer, clocks = Simulator(size, work), 0, [], []
    while version < steps:
        simulator.invite(theta, version)
        buffer += simulator.arrivals()
        while len(buffer) >= k and version < steps:
            members, buffer = buffer[:k], buffer[k:]
            theta = step(theta, [(client, version - s, result) for client, s, result in members])
            simulator.busy -= {client for client, _, _ in members}
            version, simulator.wave = version + 1, 0
            clocks.append(simulator.clock)
    return theta, clocks


def test_many_are_invited_among_the_free_and_each_once() -> None:
    """Drawing 400 of 1000 with replacement meets some twice, or at work, and others are drawn for them."""
    some = World(1000, 400, lambda t, count: draw_cohort(1000, count, 0, t), seconds)
    assert len({*some.invite(400, 0, 1, {1, 2, 3}, 0.0).tolist()} - {1, 2, 3}) == 400


def test_fedbuff_with_server_momentum() -> None:
    task = federated_task(methods.make("fedbuff", server_lr=0.7, momentum=0.5), Buffered(2), 4, 40)
    theta, data = start(task)
    momentum = np.zeros_like(theta)

    def step(theta: np.ndarray, buffer: list[tuple[int, int, Any]]) -> np.ndarray:
        nonlocal momentum
        momentum = 0.5 * momentum + sum(delta / np.sqrt(1 + s) for _, s, delta in buffer) / len(buffer)
        return theta - 0.7 * momentum

    work = lambda client, theta: theta - train(*data[client], theta)  # noqa: E731
    expected, clocks = simulate(theta, 4, 2, 40, work, step)
    actual, ticks = train_with_library(task, 40)
    assert ticks == clocks
    np.testing.assert_allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize("rule", ["polynomial", "hinge", "constant"])
def test_fedasync(rule: str) -> None:
    task = federated_task(methods.make("fedasync", alpha=0.6, mu=0.05, rule=rule, a=0.5, b=1.0), Asynchronous(), 4, 60)
    theta, data = start(task)
    discount = {
        "polynomial": lambda s: (1 + s) ** -0.5,
        "hinge": lambda s: 1.0 if s <= 1 else 1 / (0.5 * (s - 1) + 1),
        "constant": lambda s: 1.0,
    }[rule]

    def step(theta: np.ndarray, buffer: list[tuple[int, int, Any]]) -> np.ndarray:
        ((_, s, model),) = buffer
        alpha = 0.6 * discount(s)
        return (1 - alpha) * theta + alpha * model

    work = lambda client, theta: train(*data[client], theta, 0.05)  # noqa: E731
    expected, clocks = simulate(theta, 4, 1, 60, work, step)
    actual, ticks = train_with_library(task, 60)
    assert ticks == clocks
    np.testing.assert_allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize("method", ["mifa", "ca2fl"])
def test_cached_updates(method: str) -> None:
    task = federated_task(method, Buffered(2), 4, 40)
    theta, data = start(task)
    cache = np.zeros((CLIENTS, *theta.shape))

    def step(theta: np.ndarray, buffer: list[tuple[int, int, Any]]) -> np.ndarray:
        before = cache.mean(0)
        change = sum(delta - cache[client] for client, _, delta in buffer) / len(buffer)
        for client, _, delta in buffer:
            cache[client] = delta
        return theta - (cache.mean(0) if method == "mifa" else before + change)

    work = lambda client, theta: theta - train(*data[client], theta)  # noqa: E731
    expected, clocks = simulate(theta, 4, 2, 40, work, step)
    actual, ticks = train_with_library(task, 40)
    assert ticks == clocks
    np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_delay_compensation() -> None:
    """Δ + λ/(aη) Δ ⊙ Δ ⊙ (θ^t - θ^s): the model that the client received is needed as well."""
    task = federated_task(methods.make("dcasgd", lam=0.3), Asynchronous(), 4, 40)
    theta, data = start(task)

    def step(theta: np.ndarray, buffer: list[tuple[int, int, Any]]) -> np.ndarray:
        ((_, _, (received, delta)),) = buffer
        return theta - delta - 0.3 / (STEPS * RATE) * delta**2 * (theta - received)

    work = lambda client, theta: (theta, theta - train(*data[client], theta))  # noqa: E731
    expected, clocks = simulate(theta, 4, 1, 40, work, step)
    actual, ticks = train_with_library(task, 40)
    assert ticks == clocks
    np.testing.assert_allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "schedule", "rate", "steps"),
    kinds(
        [
            ("scaffold", Buffered(3), 1.0, 120),
            ("feddyn", Buffered(3), 1.0, 120),
            ("scaffold", Asynchronous(), 0.3, 300),
        ],
        [("scaffold", Buffered(3), 1.0, 120)],
    ),
)
def test_drift_corrections_reach_the_minimiser_when_stale(method: str, schedule: Any, rate: float, steps: int) -> None:
    """Their fixed points do not mention versions; with k = 1 of 4 at work, the server's rate must be about k/4."""
    base = methods.make(method, **({"alpha": 0.5, "size_weighted": False} if method == "feddyn" else {}))
    task = federated_task(replace(base, server=SGD(lr=rate)), schedule, 4, steps)
    _, data = start(task)
    theta, _ = train_with_library(task, steps)
    gradient = np.zeros_like(theta)
    for x, y in data:
        design = np.column_stack([x, np.ones(len(x))])
        p = np.exp(design @ theta.T)
        p /= p.sum(1, keepdims=True)
        gradient += (p - np.eye(CLASSES)[y]).T @ design / len(x) / CLIENTS
    assert np.abs(gradient).max() < 1e-3

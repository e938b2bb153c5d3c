"""Rules of robust aggregation as classes of ``slots``."""

from __future__ import annotations

import numpy as np

from helpers import slots
from helpers.reference import Vector


class TrimmedMean(slots.Mixing):
    """Yin et al. 2018, definition 2; ``cut`` values go at either end of a coordinate."""

    trim = 0.3

    def cut(self, n: int) -> int:
        return int(np.floor(self.trim * n))

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        n, size = updates.shape
        used, self.mean = np.zeros(n), np.zeros(size)
        for j in range(size):
            order = sorted(range(n), key=lambda i: updates[i, j])[self.cut(n) : n - self.cut(n)]
            used[order] += 1
            self.mean[j] = sum(updates[i, j] for i in order) / len(order)
        return used

    def combine(self, p: Vector, who: list[int], losses: Vector, updates: Vector, lr: float) -> Vector:
        return self.mean


class CoordinateMedian(TrimmedMean):
    """Definition 1: of an even number of values, the mean of the two in the middle."""

    def cut(self, n: int) -> int:
        return n // 2 - (n % 2 == 0)


class Krum(slots.Mixing):
    """Blanchard et al. 2017, section 4: the score sums squared distances to the n - f - 2 closest vectors."""

    hostile, selected = 0.25, 1

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        n = len(who)
        near = max(n - int(self.hostile * n) - 2, 1)
        scores = []
        for i in range(n):
            distances = sorted(np.sum((updates[i] - updates[j]) ** 2) for j in range(n) if j != i)
            scores.append(sum(distances[:near]))
        selection = np.argsort(scores, kind="stable")[: self.selected or n - int(self.hostile * n)]
        return np.isin(np.arange(n), selection).astype(float)


class MultiKrum(Krum):
    selected = 0


class GeometricMedian(slots.Mixing):
    """Pillutla et al. 2022, algorithm 2, from the weighted mean."""

    steps = 3

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        alpha = self.samples[who] / self.samples[who].sum()
        v = alpha @ updates
        for _ in range(self.steps):
            beta = alpha / np.maximum([np.linalg.norm(v - x) for x in updates], 1e-6)
            v = beta @ updates / beta.sum()
        return beta


class NormBounding(slots.Mixing):
    radius = 0.2

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        lengths = np.linalg.norm(updates, axis=1)
        self.shares = self.samples[who] / self.samples[who].sum()
        self.clipped = np.array([x * min(1, self.radius / a) for x, a in zip(updates, lengths, strict=True)])
        return self.shares * np.minimum(1, self.radius / lengths)

    def combine(self, p: Vector, who: list[int], losses: Vector, updates: Vector, lr: float) -> Vector:
        return self.shares @ self.clipped


class CentredClipping(slots.Mixing):
    """Karimireddy et al. 2021, algorithm 2: v starts where the last aggregate is."""

    radius, steps = 0.2, 2

    def __init__(self, samples: Vector, cohort: int) -> None:
        super().__init__(samples, cohort)
        self.v = np.zeros(1)  # as long as an update, when the first one comes

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        for _ in range(self.steps):
            differences = updates - self.v
            factors = np.minimum(1, self.radius / np.maximum(np.linalg.norm(differences, axis=1), 1e-300))
            self.v = self.v + np.mean(differences * factors[:, None], axis=0)
        return factors

    def combine(self, p: Vector, who: list[int], losses: Vector, updates: Vector, lr: float) -> Vector:
        return self.v


class FLTrust(slots.Mixing):
    """Cao et al. 2021, algorithm 2, whose server model update g_0 is that of client 0."""

    everyone = True

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        g0, *client_updates = updates
        norms = [np.linalg.norm(g) or np.inf for g in client_updates]  # a client that did not move has no direction
        trust = [
            max(0.0, g @ g0 / (n * (np.linalg.norm(g0) or np.inf))) for g, n in zip(client_updates, norms, strict=True)
        ]
        scaled = [np.linalg.norm(g0) / n * g for g, n in zip(client_updates, norms, strict=True)]
        if not any(trust):  # the paper divides by zero; nobody is followed then
            self.g = 0 * g0
            return np.eye(len(who))[0]
        self.g = sum(s * g for s, g in zip(trust, scaled, strict=True)) / sum(trust)
        return np.array([0.0, *(s / n for s, n in zip(trust, norms, strict=True))])

    def combine(self, p: Vector, who: list[int], losses: Vector, updates: Vector, lr: float) -> Vector:
        return self.g

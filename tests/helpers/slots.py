"""NumPy classes of the parts of drift, mixing and server; ``robust`` has more, ``composition`` says when they act."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from helpers.fair import cumulative, faces_of, shortest
from helpers.reference import Vector


@dataclass
class Visit:
    """One client's work in one round: what it received, where it ended, what it uploads.

    ``steps`` is how many plain steps go as far as its own along a constant gradient: their number, or more; ``usual``
    are those of a client with the mean number of samples.
    """

    client: int
    lr: float
    steps: float
    received: Vector
    size: float  # n_i over the mean of all clients
    usual: float = 1.0
    model: Vector = field(default_factory=lambda: np.zeros(0))
    update: Vector = field(default_factory=lambda: np.zeros(0))


class Drift:
    """No correction. ``zero`` has the length of what clients share."""

    def __init__(self, clients: int, start: Vector) -> None:
        self.clients, self.zero = clients, np.zeros_like(start)
        self.begin(start)

    def begin(self, start: Vector) -> None:
        pass

    def pull(self, visit: Visit, w: Vector) -> Vector:
        """What is added to the gradient of the shared parameters."""
        return self.zero

    def along(self, visit: Visit, w: Vector, g: Vector) -> Vector:
        """The direction of a local step of the shared parameters."""
        return g + self.pull(visit, w)

    def end(self, visit: Visit) -> Vector:
        """The uploaded update."""
        return visit.received - visit.model

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        return delta

    def stretch(self, visits: list[Visit], p: Vector) -> float:
        """By how much a step is longer than a mean of what was uploaded."""
        return 1.0


class Scaffold(Drift):
    def begin(self, start: Vector) -> None:
        self.c, self.own = self.zero, dict.fromkeys(range(self.clients), self.zero)

    def pull(self, visit: Visit, w: Vector) -> Vector:
        return self.c - self.own[visit.client]

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        before = self.c
        for v in visits:
            new = self.own[v.client] - before + (v.received - v.model) / (v.steps * v.lr)
            self.c = self.c + (new - self.own[v.client]) / self.clients
            self.own[v.client] = new
        return delta


class FedDyn(Drift):
    alpha, by_size = 0.4, True

    def begin(self, start: Vector) -> None:
        self.h, self.own = self.zero, dict.fromkeys(range(self.clients), self.zero)

    def pull(self, visit: Visit, w: Vector) -> Vector:
        alpha = self.alpha / (visit.size if self.by_size else 1.0)
        return -self.own[visit.client] * alpha / self.alpha + alpha * (w - visit.received)

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        for v in visits:
            moved = v.model - v.received
            self.own[v.client] = self.own[v.client] - self.alpha * moved
            self.h = self.h - self.alpha * moved / self.clients
        return delta + self.h / self.alpha


class FedDynEqual(FedDyn):
    by_size = False


class FedNova(Drift):
    """What is uploaded is what the usual number of steps would have made of it, so that equal steps change nothing."""

    def end(self, visit: Visit) -> Vector:
        return (visit.received - visit.model) / visit.steps * visit.usual

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        return delta * self.stretch(visits, p)

    def stretch(self, visits: list[Visit], p: Vector) -> float:
        return float(p @ [v.steps / v.usual for v in visits])


class FedCM(Drift):
    """v = αg + (1 - α)d, with d the mixed mean gradient of the last round."""

    alpha = 0.4

    def begin(self, start: Vector) -> None:
        self.d = self.zero

    def along(self, visit: Visit, w: Vector, g: Vector) -> Vector:
        return self.alpha * g + (1 - self.alpha) * self.d

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        self.d = p @ [v.update for v in visits] / (visits[0].lr * (p @ [v.steps for v in visits]))
        return delta


class FedDC(Drift):
    alpha, everyone = 0.3, False

    def begin(self, start: Vector) -> None:
        self.g = self.zero
        self.own, self.h = (dict.fromkeys(range(self.clients), self.zero) for _ in range(2))

    def pull(self, visit: Visit, w: Vector) -> Vector:
        i = visit.client
        towards = (self.own[i] - self.g) / (visit.lr * visit.steps)
        return self.alpha * (self.h[i] + w - visit.received) + towards

    def end(self, visit: Visit) -> Vector:
        self.own[visit.client] = visit.model - visit.received
        self.h[visit.client] = self.h[visit.client] + self.own[visit.client]
        return -self.own[visit.client] - (0.0 if self.everyone else self.h[visit.client])

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        self.g = p @ [self.own[v.client] for v in visits]
        return delta - np.mean([*self.h.values()], axis=0) if self.everyone else delta


class FedDCAll(FedDC):
    everyone = True


class FedDCControl(FedDCAll):
    """With SCAFFOLD's control variates in the place of displacements; h and what is sent are FedDC's."""

    def pull(self, visit: Visit, w: Vector) -> Vector:
        i = visit.client
        return self.alpha * (self.h[i] + w - visit.received) + self.g - self.own[i]

    def end(self, visit: Visit) -> Vector:
        i, moved = visit.client, visit.model - visit.received
        self.own[i] = self.own[i] - self.g - moved / (visit.lr * visit.steps)
        self.h[i] = self.h[i] + moved
        return -moved

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        self.g = np.mean([*self.own.values()], axis=0)
        return delta - np.mean([*self.h.values()], axis=0)


class FedSplit(Drift):
    """``z[i]`` starts at the first model; clients that never came have it still."""

    s, active = 1.5, True

    def begin(self, start: Vector) -> None:
        self.z = dict.fromkeys(range(self.clients), start)

    def pull(self, visit: Visit, w: Vector) -> Vector:
        return (w - (2 * visit.received - self.z[visit.client])) / self.s

    def end(self, visit: Visit) -> Vector:
        before = self.z[visit.client]
        self.z[visit.client] = before + 2 * (visit.model - visit.received)
        return (visit.received if self.active else before) - self.z[visit.client]


class FedSplitAll(FedSplit):
    active = False

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        return visits[0].received - np.mean([*self.z.values()], axis=0)


class Mixing:
    """Weights by samples."""

    everyone = False  # needs all clients in all rounds

    def __init__(self, samples: Vector, cohort: int) -> None:
        self.samples, self.clients, self.cohort = samples, len(samples), cohort

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        return self.samples[who]

    def combine(self, p: Vector, who: list[int], losses: Vector, updates: Vector, lr: float) -> Vector:
        return p @ updates


class Uniform(Mixing):
    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        return np.ones(len(who))


class Term(Mixing):
    lam = 2.0

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        return self.samples[who] * np.exp(self.lam * losses)


class PropFair(Mixing):
    baseline = 6.0

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        return self.samples[who] / (self.baseline - losses)


class QFFL(Mixing):
    """Li et al. 2020, algorithm 2, with n_i."""

    q = 1.5

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        return self.samples[who] * losses**self.q

    def combine(self, p: Vector, who: list[int], losses: Vector, updates: Vector, lr: float) -> Vector:
        n, slopes = self.samples[who], updates / lr
        h = self.q * losses ** (self.q - 1) * np.sum(slopes**2, axis=1) + losses**self.q / lr
        return (n * losses**self.q) @ slopes / (n @ h)


class FedMGDA(Mixing):
    """λ is the shortest mixture of unit updates within ε of the samples' shares; p are the weights of the updates."""

    eps, lr = 0.2, 0.3

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        shares = self.samples[who] / self.samples[who].sum()
        lengths = np.linalg.norm(updates, axis=1)
        units = updates / np.where(lengths > 0, lengths, 1)[:, None]  # an update of zero counts nothing
        self.step = self.lr * units
        self.mixture = shortest(units @ units.T, np.maximum(shares - self.eps, 0), np.minimum(shares + self.eps, 1))
        raw = np.divide(self.mixture, lengths, out=np.zeros_like(self.mixture), where=lengths > 0)
        return raw if raw.any() else shares

    def combine(self, p: Vector, who: list[int], losses: Vector, updates: Vector, lr: float) -> Vector:
        return self.mixture @ self.step


class AFL(Mixing):
    everyone, step = True, 0.5

    def __init__(self, samples: Vector, cohort: int) -> None:
        super().__init__(samples, cohort)
        self.p = samples / samples.sum()

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        """Projection on the simplex by its sorted thresholds."""
        v = self.p + self.step * losses
        high = np.sort(v)[::-1]
        thresholds = (np.cumsum(high) - 1) / np.arange(1, len(v) + 1)
        self.p = np.maximum(v - thresholds[np.flatnonzero(high > thresholds)[-1]], 0)
        return self.p


class AAggFFS(Mixing):
    everyone = True

    def __init__(self, samples: Vector, cohort: int) -> None:
        super().__init__(samples, cohort)
        self.decisions, self.gradients = [np.full(self.clients, 1 / self.clients)], []

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        k = self.clients
        r = cumulative("normal", losses / losses.mean()) / k
        self.gradients.append(-r / (1 + self.decisions[-1] @ r))
        bound, pairs = 1 / k, list(zip(self.gradients, self.decisions, strict=True))
        h = 4 * k * bound * np.eye(k) + sum(np.outer(g, g) for g in self.gradients) / (4 * bound)
        self.decisions.append(faces_of(h, sum(g - g * (g @ q) / (4 * bound) for g, q in pairs), self.decisions[-1]))
        return self.decisions[-1]


class AAggFFD(Mixing):
    def __init__(self, samples: Vector, cohort: int) -> None:
        super().__init__(samples, cohort)
        self.p, self.total = np.full(self.clients, 1 / self.clients), np.zeros(self.clients)

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        c = len(who) / self.clients
        r = c * cumulative("weibull", losses / losses.mean())
        mean = r.mean()
        robust = np.full(self.clients, mean)
        robust[who] = (1 - 1 / c) * mean + r / c
        slope = 1 + self.p.sum() * mean
        self.total = self.total - robust / slope + mean * (self.p @ (robust - mean)) / slope**2
        p = np.exp(-np.sqrt(np.log(self.clients)) * self.total / ((c + 2) * np.sqrt(t + 2)))
        self.p = p / p.sum()
        return self.p[who]


class Server:
    """θ - Δ."""

    lr, beta1, beta2, tau = 0.3, 0.6, 0.8, 0.05

    def __init__(self, zero: Vector) -> None:
        self.m, self.v = zero, zero + self.tau**2

    def step(self, delta: Vector, p: Vector, updates: Vector) -> Vector:
        return delta


class Momentum(Server):
    def step(self, delta: Vector, p: Vector, updates: Vector) -> Vector:
        self.m = self.beta1 * self.m + delta
        return self.lr * self.m


class Adagrad(Server):
    """And the other adaptive ones, which differ in the second moment alone."""

    def second(self, squared: Vector) -> Vector:
        return self.v + squared

    def step(self, delta: Vector, p: Vector, updates: Vector) -> Vector:
        self.m = self.beta1 * self.m + (1 - self.beta1) * delta
        self.v = self.second(delta**2)
        return self.lr * self.m / (np.sqrt(self.v) + self.tau)


class Adam(Adagrad):
    def second(self, squared: Vector) -> Vector:
        return self.beta2 * self.v + (1 - self.beta2) * squared


class Yogi(Adagrad):
    def second(self, squared: Vector) -> Vector:
        return self.v - (1 - self.beta2) * squared * np.sign(self.v - squared)


class Exp(Server):
    eps = 0.01

    def step(self, delta: Vector, p: Vector, updates: Vector) -> Vector:
        long = p @ np.sum(updates**2, axis=1)
        return max(1.0, long / (2 * (np.sum(delta**2) + self.eps))) * delta

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
    size_weighted = False

    def begin(self, start: Vector) -> None:
        self.c, self.own = self.zero, dict.fromkeys(range(self.clients), self.zero)

    def pull(self, visit: Visit, w: Vector) -> Vector:
        return self.c / self.weight(visit) - self.own[visit.client]

    def weight(self, visit: Visit) -> float:
        return visit.size if self.size_weighted else 1.0

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        before = self.c
        for v in visits:
            w = self.weight(v)
            new = self.own[v.client] - before / w + (v.received - v.model) / (v.steps * v.lr)
            self.c = self.c + w * (new - self.own[v.client]) / self.clients
            self.own[v.client] = new
        return delta


class FedDyn(Drift):
    alpha, size_weighted = 0.4, True

    def begin(self, start: Vector) -> None:
        self.h, self.own = self.zero, dict.fromkeys(range(self.clients), self.zero)

    def pull(self, visit: Visit, w: Vector) -> Vector:
        alpha = self.alpha / (visit.size if self.size_weighted else 1.0)
        return -self.own[visit.client] * alpha / self.alpha + alpha * (w - visit.received)

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        for v in visits:
            moved = v.model - v.received
            self.own[v.client] = self.own[v.client] - self.alpha * moved
            self.h = self.h - self.alpha * moved / self.clients
        return delta + self.h / self.alpha


class FedDynEqual(FedDyn):
    size_weighted = False


class ADMM(Drift):
    """Who comes for the first time uploads the way from what it received; the server knows the way from the start."""

    rho = 0.4

    def begin(self, start: Vector) -> None:
        self.start, self.u = start, {}
        self.y = dict.fromkeys(range(self.clients), self.zero)

    def pull(self, visit: Visit, w: Vector) -> Vector:
        return self.y[visit.client] + self.rho * (w - visit.received)

    def after(self, visit: Visit) -> tuple[Vector, Vector]:
        y = self.y[visit.client] + self.rho * (visit.model - visit.received)
        return y, visit.model + y / self.rho

    def end(self, visit: Visit) -> Vector:
        return self.u.get(visit.client, visit.received) - self.after(visit)[1]

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        for v, share in zip(visits, p, strict=True):
            if v.client not in self.u:
                delta = delta + share * (self.start - v.received)
            self.y[v.client], self.u[v.client] = self.after(v)
        return delta


class Cached(Drift):
    """Every client counts with its last update (MIFA); or those of the round, and what they have changed (CA²FL)."""

    mean = False

    def begin(self, start: Vector) -> None:
        self.h, self.own = self.zero, dict.fromkeys(range(self.clients), self.zero)

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        before, change = self.h, self.zero
        for v in visits:
            change = change + v.update - self.own[v.client]
            self.own[v.client] = v.update
        self.h = np.mean([*self.own.values()], axis=0)
        return self.h if self.mean else before + change / len(visits)


class MIFA(Cached):
    mean = True


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
        self.direction = self.zero

    def along(self, visit: Visit, w: Vector, g: Vector) -> Vector:
        return self.alpha * g + (1 - self.alpha) * self.direction

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        self.direction = p @ [v.update for v in visits] / (visits[0].lr * (p @ [v.steps for v in visits]))
        return delta


class FedDC(Drift):
    """With ``control``, SCAFFOLD's control variates, as in the authors' code, in the place of displacements."""

    alpha, gradient, average_over_all, control, size_weighted = 0.3, True, False, False, False

    def begin(self, start: Vector) -> None:
        self.g, self.weights = self.zero, np.ones(self.clients)
        self.own, self.h = (dict.fromkeys(range(self.clients), self.zero) for _ in range(2))

    def pull(self, visit: Visit, w: Vector) -> Vector:
        i = visit.client
        size = self.weights[i] = visit.size if self.size_weighted else 1.0
        towards = self.g / size - self.own[i] if self.control else (self.own[i] - self.g) / (visit.lr * visit.steps)
        return self.alpha / size * (self.h[i] + w - visit.received) + towards

    def end(self, visit: Visit) -> Vector:
        i, moved = visit.client, visit.model - visit.received
        if self.gradient:
            after = self.own[i] - self.g / self.weights[i] - moved / (visit.lr * visit.steps)
            self.own[i] = after if self.control else moved
        self.h[i] = self.h[i] + moved
        return -moved - (0.0 if self.average_over_all else self.h[i])

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        if self.control:
            self.g = np.mean([self.weights[i] * c for i, c in self.own.items()], axis=0)
        else:
            self.g = p @ [self.own[v.client] for v in visits]
        return delta - np.mean([*self.h.values()], axis=0) if self.average_over_all else delta


class FedDCAll(FedDC):
    average_over_all = True


class FedDCControl(FedDCAll):
    control = True


class FedSplit(Drift):
    """``z[i]`` starts at the first model, which those who never came have still; ``moved`` is that of the others."""

    s, active = 1.5, True

    def begin(self, start: Vector) -> None:
        self.z, self.moved = dict.fromkeys(range(self.clients), start), {}

    def pull(self, visit: Visit, w: Vector) -> Vector:
        return (w - (2 * visit.received - self.z[visit.client])) / self.s

    def end(self, visit: Visit) -> Vector:
        before = self.z[visit.client]
        self.z[visit.client] = self.moved[visit.client] = before + 2 * (visit.model - visit.received)
        return (visit.received if self.active else before) - self.z[visit.client]

    def correct(self, delta: Vector, visits: list[Visit], p: Vector) -> Vector:
        return delta if self.active else visits[0].received - np.mean([*self.z.values()], axis=0)


class FedSplitAll(FedSplit):
    active = False


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
    lam, prior = 2.0, "samples"

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        return (self.samples[who] if self.prior == "samples" else 1) * np.exp(self.lam * losses)


class PropFair(Mixing):
    baseline = 6.0

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        return self.samples[who] / (self.baseline - losses)


class QFFL(Mixing):
    """Li et al. 2020, algorithm 2, times n_i."""

    q, prior = 1.5, "samples"

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        return self.prior_of(who) * losses**self.q

    def prior_of(self, who: list[int]) -> Vector:
        return self.samples[who] if self.prior == "samples" else np.ones(len(who))

    def combine(self, p: Vector, who: list[int], losses: Vector, updates: Vector, lr: float) -> Vector:
        n, slopes = self.prior_of(who), updates / lr
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
    everyone, step, prior, simultaneous = True, 0.5, "samples", False

    def __init__(self, samples: Vector, cohort: int) -> None:
        super().__init__(samples, cohort)
        self.p = samples / samples.sum() if self.prior == "samples" else np.full_like(samples, 1 / len(samples))

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        """Projection on the simplex by its sorted thresholds."""
        old = self.p
        v = self.p + self.step * losses
        high = np.sort(v)[::-1]
        thresholds = (np.cumsum(high) - 1) / np.arange(1, len(v) + 1)
        self.p = np.maximum(v - thresholds[np.flatnonzero(high > thresholds)[-1]], 0)
        return old if self.simultaneous else self.p


class AAggFFS(Mixing):
    """The whole history is kept, and the programme solved by trying every face of the simplex."""

    everyone, cdf, prior = True, "normal", "uniform"

    def __init__(self, samples: Vector, cohort: int) -> None:
        super().__init__(samples, cohort)
        shares = samples / samples.sum()
        self.decisions = [shares if self.prior == "samples" else np.full_like(shares, 1 / self.clients)]
        self.gradients: list[Vector] = []

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        k = self.clients
        r = cumulative(self.cdf, losses / losses.mean()) / k
        self.gradients.append(-r / (1 + self.decisions[-1] @ r))
        bound, pairs = 1 / k, list(zip(self.gradients, self.decisions, strict=True))
        h = 4 * k * bound * np.eye(k) + sum(np.outer(g, g) for g in self.gradients) / (4 * bound)
        c = sum(g - g * (g @ q) / (4 * bound) for g, q in pairs) - 4 * k * bound * self.decisions[0]
        self.decisions.append(faces_of(h, c, self.decisions[-1]))
        return self.decisions[-1]


class AAggFFD(Mixing):
    cdf, prior, step = "weibull", "uniform", "published"

    def __init__(self, samples: Vector, cohort: int) -> None:
        super().__init__(samples, cohort)
        self.p, self.total = np.full(self.clients, 1 / self.clients), np.zeros(self.clients)

    def weights(self, t: int, who: list[int], losses: Vector, updates: Vector) -> Vector:
        c = len(who) / self.clients
        r = c * cumulative(self.cdf, losses / losses.mean())
        mean = r.mean()
        robust = np.full(self.clients, mean)
        robust[who] = (1 - 1 / c) * mean + r / c
        slope = 1 + self.p.sum() * mean
        self.total = self.total - robust / slope + mean * (self.p @ (robust - mean)) / slope**2
        eta = np.sqrt(np.log(self.clients)) / ((c + 2) * np.sqrt(t + 2))
        if self.step == "visits":  # t + 1 rounds, each with its share of the clients
            eta = min(1.0, np.sqrt(np.log(self.clients) / ((t + 1) * c)))
        p = np.exp(-eta * self.total)
        self.p = p / p.sum()
        return self.p[who] * (self.samples[who] if self.prior == "samples" else 1.0)


class Server:
    """θ - Δ."""

    lr, beta1, beta2, tau = 0.3, 0.6, 0.8, 0.05

    def __init__(self, zero: Vector) -> None:
        self.m, self.v = zero, zero + self.tau**2

    def step(self, delta: Vector, p: Vector, updates: Vector) -> Vector:
        return delta

    def sent(self, theta: Vector) -> Vector:
        return theta


class Momentum(Server):
    nesterov = False

    def step(self, delta: Vector, p: Vector, updates: Vector) -> Vector:
        self.m = self.beta1 * self.m + delta
        return self.lr * (delta + self.beta1 * self.m if self.nesterov else self.m)


class Accelerated(Momentum):
    """FedACG: clients receive θ + λm, with m the mean way of the last rounds (here -m)."""

    def sent(self, theta: Vector) -> Vector:
        return theta - self.lr * self.beta1 * self.m


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
        squared_length = p @ np.sum(updates**2, axis=1)
        return max(1.0, squared_length / (2 * (np.sum(delta**2) + self.eps))) * delta

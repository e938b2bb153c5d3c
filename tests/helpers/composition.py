"""The whole round in NumPy, slot by slot: what any composition of parts must compute.

Written from the papers' algorithms. Every slot is a callback, and the round is five stages in this order:

    work      every member of the cohort trains, and uploads an update Δ_i (as a rule θ^t - θ_i)
    combine   the mixing's coefficients p over the cohort, and its own step where it has one (q-FFL, FedMGDA+): Δ
    correct   the drift's server half maps Δ, *after* that step: FedDyn's h/α is not to be rescaled by it
    step      the server optimiser on what is left
    advance   state for the next round

What the papers say for an unweighted mean, and what follows from it for any p:

- FedDyn, SCAFFOLD: sums over the cohort divided by all K clients make h and c, whatever p is.
- FedNova (Wang et al. 2020, eq. 4): Δ = (Σ p_i τ_i) Σ p_i Δ_i/τ_i; p are the objective's weights. What single updates
  are read from, lengths and directions, is Δ_i τ̄/τ_i with the τ̄ of a client of mean size: displacements, all as long as
  if clients took equally many steps, so that equal steps change no composition.
- FedDC (Gao et al. 2022, algorithm 1) aggregates θ_i + h_i, which is what a client uploads: Σ p_i (θ_i + h_i). Where h
  is averaged over all clients there are no p for the absent: Σ p_i θ_i + (1/K) Σ_j h_j, and the second is a correction.
  The gradient term pulls by g_i - g, which must not move the mixture: Σ p_i (g_i - g) = 0, so g = Σ p_i g_i.
- FedSplit (Pathak, Wainwright 2020; Acar 2023, §A.1.1). The active form uploads z_i: x = Σ p_i z_i over the cohort. The
  form over all clients goes to (1/K) Σ_j z_j whatever p is. Where nothing moves, z_i - x = s∇F_i(x), so that x is
  optimal only as a mean of z with weights that stay the same, and those of a cohort do not; for the same reason a
  server optimiser is given the way to that mean, Δ = x - (1/K) Σ_j z_j, not the mean's last move.
- FedExP (Jhunjhunwala et al. 2023): Σ p_i‖Δ_i‖², as in the authors' code, against the Δ that is stepped along; with
  FedNova those Δ_i whose mean it is, and with a mixing that takes a step of its own those that are rescaled like their
  mean: eq. (10) is a ratio of lengths, which no common factor of the updates changes.
- Losses F_i are those of the received model, adapted where clients adapt, with a client's private parameters in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fedloom.base import rng
from helpers import meta, robust, slots
from helpers.personal import Pace, local_aggregation
from helpers.reference import FinalState, Vector, World, forward

Numbers = dict[int, Vector]
Along = Callable[[Vector, Vector], Vector]  # (w, gradient) -> the direction that is stepped along


@dataclass
class Task:
    """A client's mini-batches, the gradient of a step, that of its loss before steps, and what follows a step."""

    round: int
    batches: list[Vector]
    draws: Vector
    slope: Callable[[Vector, Vector], Vector]
    shrink: Callable[[Vector], Vector]
    before: Callable[[Vector, Vector], Vector] | None = None


class Personal:
    """Everything is shared, or the body alone: then each client keeps a head."""

    head = False

    def __init__(self, world: World) -> None:
        self.world, self.own = world, {}
        self.sent = slice(0, world.body if self.head else None)

    def starting_model(self, i: int, received: Vector) -> Vector:
        """The model that a client starts from, whose loss mixings read."""
        return np.concatenate([received, self.own.get(i, self.world.start[len(received) :])])

    def shared(self, steps: int) -> int:
        """The number of steps in which what is shared moves."""
        return steps

    def begin(self, task: Task, visit: slots.Visit) -> Vector:
        """Where local steps start."""
        return self.starting_model(visit.client, visit.received)

    def work(self, task: Task, visit: slots.Visit, along: Along) -> Vector:
        w, pace, cut = self.begin(task, visit), Pace(self.world, visit.lr), len(visit.received)
        for rows in task.batches:
            g = task.slope(w, rows)
            g[:cut] = along(w[:cut], g[:cut])
            (w,) = pace.step({"w": (w, g)})
            w = task.shrink(w)
        self.own[visit.client] = w[cut:]
        return w[:cut]


class FedALA(Personal):
    """Mixtures in all layers; weights that are learnt for the first time take four epochs."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.weights: Numbers = {}
        self.times = dict.fromkeys(range(world.clients), 0)

    def starting_model(self, i: int, received: Vector) -> Vector:
        return received

    def begin(self, task: Task, visit: slots.Visit) -> Vector:
        i, received, start = visit.client, visit.received, visit.received
        free = np.ones(len(received), dtype=bool)
        if self.times[i]:
            before = self.weights.get(i, np.full(len(received), 0.7))
            self.weights[i], start = local_aggregation(
                self.world, i, task.round, received, self.own[i], before, free, self.times[i] == 1, task.before, 2.0,
                0.6, 4, 0.0, 4,
            )  # fmt: skip
        self.times[i] += 1
        return start

    def work(self, task: Task, visit: slots.Visit, along: Along) -> Vector:
        self.own[visit.client] = super().work(task, visit, along)
        return self.own[visit.client]


class Head(Personal):
    head = True


class FedRep(Head):
    """The head in the first half of the steps, rounded down, then the body; both in a visit's only step."""

    def shared(self, steps: int) -> int:
        return steps - steps // 2

    def work(self, task: Task, visit: slots.Visit, along: Along) -> Vector:
        pace, cut = Pace(self.world, visit.lr), len(visit.received)
        w, h = np.split(self.starting_model(visit.client, visit.received), [cut])
        for number, rows in enumerate(task.batches):
            g = task.slope(np.concatenate([w, h]), rows)
            if len(task.batches) == 1:
                w, h = pace.step({"w": (w, along(w, g[:cut])), "h": (h, g[cut:])})
            elif number < len(task.batches) // 2:
                (h,) = pace.step({"h": (h, g[cut:])})
            else:
                (w,) = pace.step({"w": (w, along(w, g[:cut]))})
        self.own[visit.client] = h
        return w


class Ditto(Personal):
    lam, initial = 0.6, False

    def starting_model(self, i: int, received: Vector) -> Vector:
        return received

    def work(self, task: Task, visit: slots.Visit, along: Along) -> Vector:
        w, pace, v = visit.received, Pace(self.world, visit.lr), self.own.get(visit.client, self.first(visit))
        for number, rows in enumerate(task.batches):
            w, v = self.steps(pace, task, rows, w, v, along, visit, task.draws[number])
        self.own[visit.client] = v
        return w

    def first(self, visit: slots.Visit) -> Vector:
        """A client's own model when it first comes."""
        return self.world.start if self.initial else visit.received

    def steps(
        self, pace: Pace, task: Task, rows: Vector, w: Vector, v: Vector, along: Along, visit: slots.Visit, draw: float
    ) -> list[Vector]:
        (new,) = pace.step({"w": (w, along(w, task.slope(w, rows)))})
        (v,) = pace.step({"v": (v, task.slope(v, rows) + self.lam * (v - visit.received))})
        return [new, v]


class APFL(Ditto):
    alpha = 0.4

    def steps(
        self, pace: Pace, task: Task, rows: Vector, w: Vector, v: Vector, along: Along, visit: slots.Visit, draw: float
    ) -> list[Vector]:
        a = self.alpha
        (new,) = pace.step({"w": (w, along(w, task.slope(w, rows)))})
        (v,) = pace.step({"v": (v, a * task.slope(a * v + (1 - a) * w, rows))})
        return [new, v]


class SuPerFed(Ditto):
    mu, nu = 0.2, 0.5

    def first(self, visit: slots.Visit) -> Vector:
        return self.world.start  # the local model's own initialisation, which is the same here

    def steps(
        self, pace: Pace, task: Task, rows: Vector, w: Vector, v: Vector, along: Along, visit: slots.Visit, draw: float
    ) -> list[Vector]:
        g = task.slope((1 - draw) * w + draw * v, rows)
        ww, vv, cos = w @ w, v @ v, w @ v / np.sqrt(w @ w * (v @ v))
        of_w = 2 * self.nu * cos * (v / np.sqrt(ww * vv) - cos * w / ww)
        of_v = 2 * self.nu * cos * (w / np.sqrt(ww * vv) - cos * v / vv)
        near = self.mu * (w - visit.received)
        return pace.step({"w": (w, along(w, (1 - draw) * g + near + of_w)), "v": (v, draw * g + of_v)})


@dataclass(frozen=True)
class Rules:
    """One oracle a slot; μ of the proximal term, l1 of the elastic net, M of −log(M − ℓ): 0 where there is none."""

    drift: type[slots.Drift] = slots.Drift
    personal: type[Personal] = Personal
    adaptation: str = "none"
    mixing: type[slots.Mixing] = slots.Mixing
    server: type[slots.Server] = slots.Server
    mu: float = 0.0
    l1: float = 0.0
    baseline: float = 0.0
    sharp: tuple[float, float, bool] = (0.0, 0.0, True)  # ρ, the share of the second gradient, unit length


LEAP = 0.1  # of MAML
SHARP = {"rho": 0.0, "blend": 1.0, "unit": True}


def task_of(world: World, rules: Rules, t: int, i: int, lr: float) -> Task:
    batches = world.local.batches(world.federation.train.index[i], world.seed, t, i)
    draws = rng.stream(world.seed, "views", t, i).random((len(batches), 2))[:, 0]

    def shrink(w: Vector) -> Vector:
        """The proximal map of l1‖w‖₁."""
        return np.sign(w) * np.maximum(np.abs(w) - lr * rules.l1, 0)

    def sharp(slope: Callable[[Vector], Vector], w: Vector) -> Vector:
        (rho, share, unit), g = rules.sharp, slope(w)
        if not rho:
            return g
        return (1 - share) * g + share * slope(w + rho * g / (max(np.linalg.norm(g), 1e-12) if unit else 1))

    if rules.adaptation == "none":

        def loss_slope(w: Vector, rows: Vector) -> Vector:
            g = world.gradient(w, rows)
            return g / (rules.baseline - world.loss_on(w, rows)) if rules.baseline else g

        return Task(t, batches, draws, lambda w, rows: sharp(lambda at: loss_slope(at, rows), w), shrink, loss_slope)
    pending = iter(meta.supports(world, i, t))
    adapted = meta.proto(world) if rules.adaptation == "proto" else meta.maml(world, LEAP, 1, True)

    def slope(w: Vector, rows: Vector) -> Vector:
        support = next(pending)
        return sharp(lambda at: adapted(at, support, rows), w)

    return Task(t, batches, draws, slope, shrink)


def received_loss(world: World, rules: Rules, w: Vector, i: int) -> float:
    """F_i(T_i(θ)), with all samples of the client as support and query."""
    rows = world.federation.train.index[i]
    if rules.adaptation == "maml":
        w = w - LEAP * world.gradient(w, rows)
    if rules.adaptation != "proto":
        return world.loss_on(w, rows)
    z, y = forward(w, world.x[rows], world.width)[0], world.y[rows]
    classes = np.unique(y)
    logits = -np.array([np.sum((z - z[y == k].mean(0)) ** 2, axis=1) for k in classes]).T
    margins = logits - logits[np.arange(len(y)), np.searchsorted(classes, y)][:, None]
    return float(np.mean(np.log(np.exp(margins).sum(1))))


def train(world: World, rules: Rules) -> tuple[Vector, dict[str, Any]]:
    """θ^T, and the rules of the stateful slots as they are then."""
    personal = rules.personal(world)
    theta = world.start[personal.sent]
    drift, server = rules.drift(world.clients, theta), rules.server(np.zeros_like(theta))
    mixing = rules.mixing(world.n, world.cohort)
    for t, lr, who in world.schedule():
        sent = server.sent(theta)
        losses = np.array([received_loss(world, rules, personal.starting_model(i, sent), i) for i in who])
        visits = []
        for i in who:
            task = task_of(world, rules, t, i, lr)
            visit = slots.Visit(
                i, lr, world.reach(personal.shared(len(task.batches))), sent, world.n[i] / world.n.mean(),
                world.reach(personal.shared(world.local.steps_for(int(world.n.mean())))),
            )  # fmt: skip

            def along(w: Vector, g: Vector, visit: slots.Visit = visit) -> Vector:
                return drift.along(visit, w, g + rules.mu * (w - visit.received))

            visit.model = personal.work(task, visit, along)
            visit.update = drift.end(visit)
            visits.append(visit)
        updates = np.array([v.update for v in visits])
        weights = mixing.weights(t, who, losses, updates)
        p = weights / weights.sum()
        delta = mixing.combine(p, who, losses, updates, lr)
        length = np.linalg.norm(p @ updates)
        rescaled = updates * (np.linalg.norm(delta) / length if length else 1.0)
        delta = drift.correct(delta, visits, p)
        theta = theta - server.step(delta, p, rescaled * drift.stretch(visits, p))
    return theta, {"drift": drift, "personal": personal, "server": server}


def oracle_with(
    slot: str = "mixing", rule: Any = slots.Mixing, *state_names: str, equal: bool = False, mu: float = 0.0,
    attributes: Mapping[str, str] = MappingProxyType({}), **defaults: Any,
) -> Callable[..., FinalState]:  # fmt: skip
    """The oracle of a method with one part of its own.

    Args:
        slot: of the part.
        rule: the part's; a setting is its attribute of that name, or of the one in ``attributes``.
        state_names: the server's states, and clients' as ``name=attribute``.
        equal: whether clients have the same weight, whatever their numbers of samples.
        mu: of the proximal term.
        defaults: of the settings.
    """

    def oracle(world: World, **settings: Any) -> FinalState:
        values = defaults | settings
        near = values.pop("mu", mu)
        sharp = tuple(values.pop(key, usual) for key, usual in SHARP.items())
        part = type(rule.__name__, (rule,), {attributes.get(key, key): value for key, value in values.items()})
        rules = Rules(**({"mixing": slots.Uniform} if equal else {}) | {slot: part}, mu=near, sharp=sharp)
        theta, parts = train(replace(world, cohort=world.clients) if rules.mixing.everyone else world, rules)
        states = {}
        for name, _, attribute in (state_name.partition("=") for state_name in state_names):
            value = getattr(parts[slot], attribute or name)
            clients = value.items() if attribute else ()
            states |= {f"client {i}/{slot}/{name}": v for i, v in clients} or {f"server/{slot}/{name}": value}
        return FinalState(theta, states=states)

    return oracle


MOMENTS = {"attributes": {"momentum": "beta1"}, "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
STALE = {"attributes": {"momentum": "beta1", "server_lr": "lr", "alpha": "lr"}, "beta1": 0.0}
ORACLES = {
    "fedprox": oracle_with(mu=0.01),
    "scaffold": oracle_with("drift", slots.Scaffold, "c", "c=own", equal=True),
    "feddyn": oracle_with("drift", slots.FedDyn, "h", "h=own", equal=True, alpha=0.01),
    "fednova": oracle_with("drift", slots.FedNova),
    "fedcm": oracle_with("drift", slots.FedCM, "direction", alpha=0.1),
    "fedsam": oracle_with(rho=0.05),
    "mofedsam": oracle_with("drift", slots.FedCM, "direction", alpha=0.1, rho=0.05),
    "fedgamma": oracle_with("drift", slots.Scaffold, "c", "c=own", equal=True, rho=0.05),
    "fedspeed": oracle_with("drift", slots.FedDC, "h=h", equal=True, alpha=10.0, gradient=False, rho=0.1, unit=False),
    "feddc": oracle_with("drift", slots.FedDC, "g", "g=own", "h=h", equal=True, alpha=0.01, average_over_all=True),
    "fedsplit": oracle_with("drift", slots.FedSplit, "z=moved", equal=True, s=10.0, active=False),
    "mifa": oracle_with("drift", slots.MIFA, "h", "h=own", equal=True),
    "ca2fl": oracle_with("drift", slots.Cached, "h", "h=own", equal=True),
    "dcasgd": oracle_with("drift", slots.Drift, equal=True, lam=0.04),  # in rounds nothing is stale
    "fedbuff": oracle_with("server", slots.Momentum, "m", equal=True, **STALE | {"lr": 1.0}),
    "fedasync": oracle_with("server", slots.Momentum, "m", mu=0.005, **STALE | {"lr": 0.6}),
    "ditto": oracle_with("personal", Ditto, "private=own", lam=0.1),
    "fedavgm": oracle_with("server", slots.Momentum, "m", **MOMENTS | {"lr": 1.0}),
    "fedacg": oracle_with("server", slots.Accelerated, "m", equal=True, mu=0.002, **STALE | {"lr": 1.0, "beta1": 0.85}),
    "fedadam": oracle_with("server", slots.Adam, "m", "v", **MOMENTS),
    "fedyogi": oracle_with("server", slots.Yogi, "m", "v", **MOMENTS),
    "fedadagrad": oracle_with("server", slots.Adagrad, "m", "v", **MOMENTS | {"lr": 0.1, "beta1": 0.0}),
    "fedexp": oracle_with("server", slots.Exp, equal=True, eps=1e-3),
    "term": oracle_with("mixing", slots.Term, lam=1.0),
    "q_ffl": oracle_with("mixing", slots.QFFL, q=1.0),
    "fedmgda": oracle_with("mixing", slots.FedMGDA, eps=0.1, lr=1.0),
    "afl": oracle_with("mixing", slots.AFL, step=0.1),
    "aaggff_s": oracle_with("mixing", slots.AAggFFS),
    "aaggff_d": oracle_with("mixing", slots.AAggFFD),
    "coordinate_median": oracle_with("mixing", robust.CoordinateMedian),
    "trimmed_mean": oracle_with("mixing", robust.TrimmedMean, trim=0.2),
    "krum": oracle_with("mixing", robust.Krum, hostile=0.2, selected=1),
    "multi_krum": oracle_with("mixing", robust.Krum, hostile=0.2, selected=None),
    "rfa": oracle_with("mixing", robust.GeometricMedian, steps=3),
    "centred_clipping": oracle_with("mixing", robust.CentredClipping, radius=1.0, steps=1),
    "norm_bounding": oracle_with("mixing", robust.NormBounding, radius=1.0),
    "fltrust": oracle_with("mixing", robust.FLTrust),
}

"""The federated round, top to bottom.

::

    down    = broadcast(server)                             what the cohort receives
    total   = engine.run(down, cohort)                      begin / step / end / send at clients, folded as they arrive
    Σ p_i Δ_i = receive(total)                              uplink: noise on sums
    Δ       = combine(Σ p_i Δ_i)                            mixing: the coefficients p, and a step of its own
    Δ       = Σ p_i w_i / Σ p_i · Δ                         weighting: staleness, inverse probabilities
    Δ       = correct(Δ)                                    objective, drift, personal: FedDyn's h/α, SCAFFOLD's c, ...
    θ       = refine(θ - step(Δ))                           server optimiser; then training at the server
    θ_r     = Σ_s B_rs θ_s                                  topology: the models of a round with several, each of which
                                                            has had a round like that with the clients that receive it

This module knows neither methods nor engines: it reduces what clients return as the parts declare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedloom.base import tree
from fedloom.base.errors import ClientError, ConfigError, add_note, in_words, nearest
from fedloom.base.tree import Bool, Tree
from fedloom.core.context import Heard, RoundInfo
from fedloom.core.hook_results import halves, like, pair, without_shared_storage
from fedloom.core.method import Method
from fedloom.core.missing_needs import with_hint
from fedloom.core.parts import UPDATE, Reduce, Reduced, Weighting
from fedloom.core.server_data import ServerData
from fedloom.core.slots import hook_name, label
from fedloom.core.timeline import Arrivals
from fedloom.rounds.aggregate import Fold
from fedloom.rounds.cohort import Cohort, Report
from fedloom.rounds.engine import Engine, Group, calls
from fedloom.rounds.exchange import BUFFERS, Broadcast, FailureKind, Result, State
from fedloom.rounds.meeting import Trained, heard_by, meet, models_of
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import Server, Store

ROUNDING = 1e-6  # by which mixing coefficients may miss the simplex


@with_hint
def federated_round(
    plan: ClientPlan,
    engine: Engine,
    server: Server,
    store: Store,
    cohort: np.ndarray,
    *,
    arrivals: Arrivals | None = None,
    versions: Mapping[int, Broadcast] | None = None,
    drop_rate: float = 0.0,
    server_data: ServerData | None = None,
    observe: Callable[[Result, Tensor], None] = lambda result, received: None,
) -> tuple[Server, Report]:
    """One round over the given cohort.

    Args:
        plan: the client plan.
        engine: the engine that runs client work.
        server: the state before the round.
        store: client states; only read, so that an interrupted round leaves no trace.
        cohort: S_t, client numbers, int64 [|S|], sorted (by version first, with ``arrivals``).
        arrivals: which version each member has received, and who is late; None: all receive θ^t, and none is.
        versions: the messages with earlier versions, by version.
        drop_rate: probability that a member drops out after receiving the model (simulated, for tests and studies).
        server_data: the server's unlabelled inputs, for parts that learn from them.
        observe: called with every successful result (without its uploads) and the parameters that its client received,
            in order.

    Returns:
        The server's new state, and the round's report with the new client states. If no update can be used, the model
        is unchanged.

    Raises:
        ConfigError: if a part of the server returns coefficients off the simplex, or anything of another shape or type.
        ClientError: if every client failed for other reasons than divergence, which points to a bug or an outage rather
            than to the clients; or if the server's model is no longer finite.
    """
    report = Report(cohort, np.zeros(len(cohort)))
    received = cohort
    if arrivals is not None:
        received, report.included = arrivals.received, arrivals.included
        report.late = arrivals.late if arrivals.late.any() else None
        report.versions = arrivals.versions if (arrivals.versions != server.round).any() else None
    common = plan, engine, store, versions or {}, drop_rate, server_data
    if server.models is None:
        rounds = {0: ModelRound(*common, server, report, received)}
    else:
        report.models = models_of(plan, engine, server, store, cohort)
        rounds, hears = {}, heard_by(plan, server) if plan.method.needs("heard") else None
        for number in np.unique(report.models).tolist():
            rows = report.models == number
            clients = None if plan.method.topology.chooses else np.flatnonzero(plan.model_of == number)
            heard = None if hears is None else hears(number)
            rounds[number] = ModelRound(*common, server.model(number), report.of(rows), cohort[rows], clients, heard)

    if plan.method.mixing.needs.label_counts and not server.round:  # told once, by everyone
        told = plan.population.clients * plan.facts.classes
        report.traffic.count(told, told * plan.layout.dtype.itemsize)
    if server.models is not None and plan.method.topology.chooses:  # all receive all models, to choose
        for number in range(plan.models):
            others = int((report.models != number).sum())
            report.traffic.down(server.model(number).broadcast(plan).tensors, others)

    # client work, in calls that models of few clients share; a model is finished once its last receiver has arrived
    groups = [(number, group) for number, one in rounds.items() for group in one.groups]
    shared = [[groups[n] for n in call] for call in calls([group for _, group in groups], engine.joint)]
    after, waiting = dict[int, Trained](), deque(rounds)
    with closing(engine.run([Group.joined([group for _, group in call]) for call in shared])) as folds:
        for turn, fold in folds:
            for (number, group), part in zip(shared[turn], fold.by_model or [fold], strict=True):
                while (done := waiting[0]) != number:
                    after[done] = rounds[done].finish()
                    waiting.popleft()
                rounds[number].take(group, part, observe)
    after |= {number: rounds[number].finish() for number in waiting}
    for number, one in rounds.items() if report.models is not None else ():
        report.add(report.models == number, one.report)
    trained = {number: one for number, one in after.items() if len(one.arrived)}
    if not trained and (arrivals is None or not arrivals.in_flight):  # else others are still at work
        _refuse_if_broken(report, np.concatenate([one.members for one in rounds.values()]))
    if server.models is None:
        return after[0].server, report
    return meet(plan, engine, server, store, trained, report, server_data), report


class ModelRound:
    """The round of one model: its receivers train it, and the server halves act on what returns.

    To make one starts the round: the broadcast is counted, losses of the received model are measured if a part needs
    them, and the coefficients are chosen if possible. The engine then runs ``groups``, ``take`` adds the results of
    each block, and ``finish`` returns the model.

    Args:
        plan: the client plan.
        engine: the engine that measures losses.
        store: client states.
        versions: the messages with earlier versions, by version.
        drop_rate: as in ``federated_round``.
        server_data: likewise.
        server: the model with its server states.
        report: the record of its part of the cohort, to be filled.
        received: the clients that are sent the model in this round.
        clients: all clients that receive it, of several models; None: all.
        heard: the models that its receivers get beside it.

    Attributes:
        groups: the work for the engine.
        members: the clients whose work is awaited.
        info: the record of the round as known before local work.
    """

    def __init__(
        self, plan: ClientPlan, engine: Engine, store: Store, versions: Mapping[int, Broadcast], drop_rate: float,
        server_data: ServerData | None, server: Server, report: Report, received: np.ndarray,
        clients: np.ndarray | None = None, heard: Heard | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.server, self.report, method, cohort = plan, server, report, plan.method, report.cohort

        # broadcast
        down = replace(server.broadcast(plan), invited=tuple(received.tolist()), heard=heard)
        used = {server.round} if report.versions is None else {server.round, *report.versions.tolist()}
        downs = {s: down if s == server.round else versions[s] for s in sorted(used)}
        self.work = work = Cohort(plan, engine, server, store, downs, report, clients)
        self.present = work.start(received, drop_rate)
        self.members = members = cohort[self.present]
        info = work.info(members, server_data)
        if report.losses is not None:
            info = replace(info, losses=report.losses[self.present])
        self.info = info

        # the coefficients are chosen first if possible, so that updates are summed as they arrive
        self.states, weights = dict(server.parts), None
        if len(members) and not method.mixing.needs.updates:
            self.states["mixing"], weights = _coefficients(method, self.states, info)
            finfo = torch.finfo(server.theta.dtype)  # sums lose digits below it, and are divided by what arrived
            weights = np.where(weights < finfo.tiny / finfo.eps, 0.0, weights)
        self.factors = factors = _factors(method, info) if method.weighting else None
        if factors is not None and weights is not None:
            weights = weights * factors / float(weights @ factors)
        self.weights = weights
        self.totals = [Fold() for _ in plan.levels]
        self.groups = work.tasks(members, None if plan.keeps_uploads else weights)

    def take(self, group: Group, fold: Fold, observe: Callable[[Result, Tensor], None]) -> None:
        """Add the results of one block."""
        self.totals[group.level].merge(fold)
        self.work.take(fold, group.down.theta, observe)

    def finish(self) -> Trained:
        """The model and its server states once all blocks are there; unchanged if no update can be used."""
        plan, method, server, work, report = self.plan, self.plan.method, self.server, self.work, self.report
        states, info, weights, factors, members = self.states, self.info, self.weights, self.factors, self.members
        totals, self.totals = self.totals, []  # freed at the end of this call
        arrived = work.arrived(members, totals)
        idle = Trained(replace(server, parts=states, round=server.round + 1), members[:0], Tree(), Fold())
        if not len(arrived):
            return idle
        if plan.keeps_uploads:
            work.collude(totals[0], members[arrived])

        # the coefficients of those that arrived
        kept = [total.kept for total in totals]
        info = info.restrict(arrived, *([u for one in kept for u in one.get(slot, ())] for slot in (UPDATE, BUFFERS)))
        if weights is None:
            states["mixing"], p = _coefficients(method, states, info)
            if factors is not None:
                p = p * factors[arrived] / float(p @ factors[arrived])
        else:
            with np.errstate(invalid="ignore"):  # NaN if all are 0
                p = weights[arrived] / weights[arrived].sum()
        if not np.isfinite(p).all():  # all weight was on clients that failed: no update is left
            report.states.clear()
            return idle._replace(arrived=members[arrived])
        info = replace(info, p=p)
        report.p[np.flatnonzero(self.present)[arrived]] = p
        delta, buffers, uploads = work.mix(totals, weights, arrived, info)

        # receive
        for place, part in reversed(method.hooks["receive"]):
            received = {UPDATE: Reduced(delta, Reduce.MIX)} | {
                f"{owner}/{name}": Reduced(uploads[owner][name], how)
                for owner, other in method.uploading
                if owner != place
                for name, how in other.uploads.items()
            }
            made = part.receive(states.get(place, {}), received, uploads.get(place, {}), info)
            states[place], changed = _received(made, received, hook_name(place, part, "receive"), server.theta)
            delta = changed.pop(UPDATE, delta)
            for slot, value in changed.items():
                owner, _, name = slot.rpartition("/")
                uploads[owner][name] = value

        # combine
        info = replace(info, mixed=delta)
        for place, part in method.hooks["combine"]:
            made = part.combine(states.get(place, {}), delta, uploads.get(place, {}), info)
            states[place], delta = halves(made, hook_name(place, part, "combine"), server.theta)

        # weigh: factors beside p, which need not sum to 1
        if factors is not None:
            total = 1 / float((p / factors[arrived]).sum())
            delta = total * delta
            buffers = server.buffers + total * (buffers - server.buffers)

        # correct
        info = replace(info, combined=delta)
        for place, part in method.hooks["correct"]:
            if place in plan.common:
                continue
            made = part.correct(states.get(place, {}), delta, uploads.get(place, {}), info)
            states[place], delta = halves(made, hook_name(place, part, "correct"), server.theta)

        # step: what no client of the round holds stays, and so does the optimiser's memory of it
        held = work.held(members[arrived], p)
        for place, part in method.hooks["step"]:
            before = states.get(place, {})
            made = part.step(before, delta, uploads.get(place, {}), info)
            states[place], delta = halves(made, hook_name(place, part, "step"), server.theta)
            if held is not None:
                states[place] = {name: _kept(held, value, before.get(name)) for name, value in states[place].items()}
        theta = _kept(held, server.theta - delta, server.theta)

        # refine
        for place, part in method.hooks["refine"]:
            made = part.refine(states.get(place, {}), theta, buffers, info)
            states[place], theta = halves(made, hook_name(place, part, "refine"), server.theta)

        if not tree.finite({"": theta}):
            raise ClientError(
                f"round {server.round + 1}: the server model is no longer finite; lower the learning rate or clip "
                "gradients."
            )
        states = without_shared_storage(states, theta, buffers)
        after = Server(theta, buffers, states, server.round + 1)
        return Trained(after, members[arrived], uploads.get("topology", {}), totals[0].of(plan.common))


def _received(
    made: object, received: Mapping[str, Reduced], hook: str, theta: Tensor
) -> tuple[Tree, dict[str, Tensor]]:
    """The new state and the changed slices that an uplink's ``receive`` returned; the update is of the model's type."""
    state, changed = pair(made, hook, "the changed slices by slot")
    if not isinstance(changed, dict):
        raise ConfigError(f"{hook} returned {in_words(changed)} instead of the changed slices by slot.")
    for slot, value in changed.items():
        if slot not in received:
            raise ConfigError(f"{hook} changed {slot!r}, which it did not receive; {nearest(str(slot), received)}")
        before = received[slot].value
        kind = value.dtype if slot != UPDATE and isinstance(value, Tensor) else theta.dtype  # slices have their own
        like(value, before.to(kind), f"{hook} of {slot!r}")
    return state, dict(changed)


def _coefficients(method: Method, states: State, info: RoundInfo) -> tuple[Tree, np.ndarray]:
    """The mixing's new state and p, float64 [|S|]: on the simplex, or NaN if no update shall count."""
    made = method.mixing.coefficients(states.get("mixing", {}), info)
    hook = hook_name("mixing", method.mixing, "coefficients")
    state, p = pair(made, hook, "p")
    try:
        p = np.asarray(p, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{hook} returned {in_words(p)} instead of an array of numbers.") from error
    if p.shape != info.cohort.shape:
        raise ConfigError(
            f"mixing {label(method.mixing)!r} returned coefficients of the shape {list(p.shape)} for a cohort of "
            f"{len(info.cohort)}."
        )
    if not np.isnan(p).all() and not (p.min() >= -ROUNDING and abs(p.sum() - 1) <= ROUNDING):
        raise ConfigError(
            f"mixing {label(method.mixing)!r} returned coefficients from {p.min():.3g} with the sum {p.sum():.3g}; "
            "they must be at least 0 and sum to 1."
        )
    return state, p


def _factors(method: Method, info: RoundInfo) -> np.ndarray:
    """The product of all weightings' factors, float64 [|S|] > 0."""
    total = np.ones(len(info.cohort))
    for place, part in method.parts.items():
        if isinstance(part, Weighting):
            factors = np.asarray(part.factors(info), dtype=np.float64)
            if factors.shape != total.shape or not (np.isfinite(factors) & (factors > 0)).all():
                raise ConfigError(
                    f"{hook_name(place, part, 'factors')} returned {in_words(factors)}; it must return one finite "
                    f"number greater than 0 for each of {len(total)} clients."
                )
            total *= factors
    return total


def _kept(held: Bool[Tensor, "P"] | None, new: Tensor, old: Tensor | None) -> Tensor:
    """The new values where parameters are held, and old ones elsewhere; other shapes are unchanged."""
    if held is None or new.shape != held.shape:
        return new
    return torch.where(held, new, torch.zeros_like(new) if old is None else old)


def _refuse_if_broken(report: Report, members: np.ndarray) -> None:
    """Raise ``ClientError`` if no member of the round is left, and not because updates diverged."""
    started = {*members.tolist(), *(f.client for f in report.failures if f.kind is FailureKind.CODE)}
    errors = [f for f in report.failures if f.client in started and f.kind is not FailureKind.DIVERGED]
    if not started or len(errors) < len(started):
        return
    first = next((f for f in errors if f.kind is not FailureKind.ABSENT), None)
    if first is not None:
        error = ClientError(f"every client of the round failed; the first was {first}.", trace=first.trace)
        if first.trace:
            add_note(error, f"The first client's failure:\n{first.trace}")
        raise error
    raise ClientError(
        f"round {errors[0].round + 1}: none of {len(started)} clients answered, the first because {errors[0].reason}; "
        "check that clients are running and can reach the server, or give them more time."
    )

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
    observe: Callable[[Result, Tensor], None] = lambda result, invited: None,
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
    invited = cohort
    if arrivals is not None:
        invited, report.included = arrivals.received, arrivals.included
        report.late = arrivals.late if arrivals.late.any() else None
        report.versions = arrivals.versions if (arrivals.versions != server.round).any() else None
    common = plan, engine, store, versions or {}, drop_rate, server_data
    if server.models is None:
        rounds = {0: ModelRound(*common, server, report, invited)}
    else:
        report.models = models_of(plan, engine, server, store, cohort)
        rounds, hears = {}, heard_by(plan, server) if plan.method.needs("heard") else None
        for number in np.unique(report.models).tolist():
            rows = report.models == number
            clients = None if plan.method.topology.chooses else np.flatnonzero(plan.model_of == number)
            heard = None if hears is None else hears(number)
            rounds[number] = ModelRound(*common, server.model(number), report.of(rows), cohort[rows], clients, heard)

    if plan.method.mixing.needs.label_counts and not server.round:  # told once, by everyone
        scalars = plan.population.clients * plan.facts.classes
        report.traffic.count(scalars, scalars * plan.layout.dtype.itemsize)
    if server.models is not None and plan.method.topology.chooses:  # all receive all models, to choose
        for number in range(plan.models):
            receivers = int((report.models != number).sum())
            report.traffic.down(server.model(number).broadcast(plan).tensors, receivers)

    # client work, in calls that models of few clients share; a model is finished once its last receiver has arrived
    groups = [(number, group) for number, model_round in rounds.items() for group in model_round.groups]
    shared = [[groups[n] for n in call] for call in calls([group for _, group in groups], engine.joint)]
    results, unfinished = dict[int, Trained](), deque(rounds)
    with closing(engine.run([Group.of_models([group for _, group in call]) for call in shared])) as folds:
        for turn, fold in folds:
            for (number, group), model_fold in zip(shared[turn], fold.by_model or [fold], strict=True):
                while (earlier := unfinished[0]) != number:
                    results[earlier] = rounds[earlier].finish()
                    unfinished.popleft()
                rounds[number].add(group, model_fold, observe)
    results |= {number: rounds[number].finish() for number in unfinished}
    for number, model_round in rounds.items() if report.models is not None else ():
        report.add(report.models == number, model_round.report)
    trained = {number: model for number, model in results.items() if len(model.contributors)}
    if not trained and (arrivals is None or not arrivals.in_flight):  # else others are still at work
        _refuse_if_broken(report, np.concatenate([model_round.members for model_round in rounds.values()]))
    if server.models is None:
        return results[0].server, report
    return meet(plan, engine, server, store, trained, report, server_data), report


class ModelRound:
    """The round of one model: its receivers train it, and the server halves act on what returns.

    The constructor starts the round: it counts the broadcast, measures losses of the received model if a part needs
    them, and chooses the coefficients if possible. The engine then runs ``groups``, ``add`` takes the results of
    each block, and ``finish`` returns the model.

    Args:
        plan: the client plan.
        engine: the engine that measures losses.
        store: client states.
        versions: the messages with earlier versions, by version.
        drop_rate: as in ``federated_round``.
        server_data: as in ``federated_round``.
        server: the model with its server states.
        report: the record of its part of the cohort, to be filled.
        invited: the clients that are sent the model in this round.
        clients: of several models, all clients that receive this one; None: all clients.
        heard: the models that its receivers get beside it.

    Attributes:
        groups: the work for the engine.
        members: the clients whose work is awaited.
        info: the record of the round as known before local work.
    """

    def __init__(
        self, plan: ClientPlan, engine: Engine, store: Store, versions: Mapping[int, Broadcast], drop_rate: float,
        server_data: ServerData | None, server: Server, report: Report, invited: np.ndarray,
        clients: np.ndarray | None = None, heard: Heard | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.server, self.report, method = plan, server, report, plan.method

        # broadcast
        down = replace(server.broadcast(plan), invited=tuple(invited.tolist()), heard=heard)
        used = {server.round} if report.versions is None else {server.round, *report.versions.tolist()}
        downs = {s: down if s == server.round else versions[s] for s in sorted(used)}
        self.cohort = cohort = Cohort(plan, engine, server, store, downs, report, clients)
        self.present = cohort.start(invited, drop_rate)
        self.members = members = report.cohort[self.present]
        info = cohort.info(members, server_data)
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
        self.groups = cohort.groups(members, None if plan.keeps_uploads else weights)

    def add(self, group: Group, fold: Fold, observe: Callable[[Result, Tensor], None]) -> None:
        """Add the results of one block."""
        self.totals[group.level].merge(fold)
        self.cohort.record(fold, group.down.theta, observe)

    def finish(self) -> Trained:
        """The model and its server states once all blocks are there; unchanged if no update can be used."""
        plan, method, server, cohort, report = self.plan, self.plan.method, self.server, self.cohort, self.report
        states, info, weights, factors, members = self.states, self.info, self.weights, self.factors, self.members
        totals, self.totals = self.totals, []  # freed at the end of this call
        arrived = cohort.arrived_rows(members, totals)
        unchanged = Trained(replace(server, parts=states, round=server.round + 1), members[:0], Tree(), Fold())
        if not len(arrived):
            return unchanged
        if plan.keeps_uploads:
            cohort.collude(totals[0], members[arrived])

        # the coefficients of those that arrived
        info = info.restrict(
            arrived,
            *([u for total in totals for u in total.single_uploads.get(slot, ())] for slot in (UPDATE, BUFFERS)),
        )
        if weights is None:
            states["mixing"], p = _coefficients(method, states, info)
            if factors is not None:
                p = p * factors[arrived] / float(p @ factors[arrived])
        else:
            with np.errstate(invalid="ignore"):  # NaN if all are 0
                p = weights[arrived] / weights[arrived].sum()
        if not np.isfinite(p).all():  # all weight was on clients that failed: no update is left
            report.states.clear()
            return unchanged._replace(contributors=members[arrived])
        info = replace(info, p=p)
        report.p[np.flatnonzero(self.present)[arrived]] = p
        delta, buffers, uploads = cohort.mix(totals, weights, arrived, info)

        # receive
        for place, part in reversed(method.hooks["receive"]):
            slices = {UPDATE: Reduced(delta, Reduce.MIX)} | {
                f"{owner}/{name}": Reduced(uploads[owner][name], how)
                for owner, sender in method.uploading
                if owner != place
                for name, how in sender.uploads.items()
            }
            output = part.receive(states.get(place, {}), slices, uploads.get(place, {}), info)
            states[place], new_slices = _received_slices(
                output, slices, hook_name(place, part, "receive"), server.theta
            )
            delta = new_slices.pop(UPDATE, delta)
            for slot, value in new_slices.items():
                owner, _, name = slot.rpartition("/")
                uploads[owner][name] = value

        # combine
        info = replace(info, mixed=delta)
        for place, part in method.hooks["combine"]:
            output = part.combine(states.get(place, {}), delta, uploads.get(place, {}), info)
            states[place], delta = halves(output, hook_name(place, part, "combine"), server.theta)

        # weigh: by factors beside p, with which coefficients need not sum to 1
        if factors is not None:
            scale = 1 / float((p / factors[arrived]).sum())
            delta = scale * delta
            buffers = server.buffers + min(scale, 1.0) * (buffers - server.buffers)  # a variance stays above 0

        # correct
        info = replace(info, combined=delta)
        for place, part in method.hooks["correct"]:
            if place in plan.common:
                continue
            output = part.correct(states.get(place, {}), delta, uploads.get(place, {}), info)
            states[place], delta = halves(output, hook_name(place, part, "correct"), server.theta)

        # step: what no client of the round holds stays, and so does the optimiser's memory of it
        mask = cohort.held_mask(members[arrived], p)
        for place, part in method.hooks["step"]:
            before = states.get(place, {})
            output = part.step(before, delta, uploads.get(place, {}), info)
            states[place], delta = halves(output, hook_name(place, part, "step"), server.theta)
            if mask is not None:
                states[place] = {
                    name: _where_held(mask, value, before.get(name)) for name, value in states[place].items()
                }
        theta = _where_held(mask, server.theta - delta, server.theta)

        # refine
        for place, part in method.hooks["refine"]:
            output = part.refine(states.get(place, {}), theta, buffers, info)
            states[place], theta = halves(output, hook_name(place, part, "refine"), server.theta)

        if not tree.finite({"": theta}):
            raise ClientError(
                f"round {server.round + 1}: the server model is no longer finite; lower the learning rate or clip "
                "gradients."
            )
        states = without_shared_storage(states, theta, buffers)
        after = Server(theta, buffers, states, server.round + 1)
        return Trained(after, members[arrived], uploads.get("topology", {}), totals[0].of(plan.common))


def _received_slices(
    output: object, received: Mapping[str, Reduced], hook: str, theta: Tensor
) -> tuple[Tree, dict[str, Tensor]]:
    """The new state and the changed slices that an uplink's ``receive`` returned; the update is of the model's type."""
    state, new_slices = pair(output, hook, "the changed slices by slot")
    if not isinstance(new_slices, dict):
        raise ConfigError(f"{hook} returned {in_words(new_slices)} instead of the changed slices by slot.")
    for slot, value in new_slices.items():
        if slot not in received:
            raise ConfigError(f"{hook} changed {slot!r}, which it did not receive; {nearest(str(slot), received)}")
        before = received[slot].value
        kind = value.dtype if slot != UPDATE and isinstance(value, Tensor) else theta.dtype  # slices have their own
        like(value, before.to(kind), f"{hook} of {slot!r}")
    return state, dict(new_slices)


def _coefficients(method: Method, states: State, info: RoundInfo) -> tuple[Tree, np.ndarray]:
    """The mixing's new state and p, float64 [|S|]: on the simplex, or NaN if no update shall count."""
    output = method.mixing.coefficients(states.get("mixing", {}), info)
    hook = hook_name("mixing", method.mixing, "coefficients")
    state, p = pair(output, hook, "p")
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


def _where_held(mask: Bool[Tensor, "P"] | None, new: Tensor, old: Tensor | None) -> Tensor:
    """The new values where the mask holds, the old ones elsewhere; all new ones without a mask of their shape."""
    if mask is None or new.shape != mask.shape:
        return new
    return torch.where(mask, new, torch.zeros_like(new) if old is None else old)


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

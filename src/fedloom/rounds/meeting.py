"""Several models in one federation: which of them a client receives, what its receivers hear, how models are mixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.errors import ConfigError, in_words
from fedloom.base.tree import Tree
from fedloom.core.context import Heard, Meeting
from fedloom.core.hook_results import halves, pair
from fedloom.core.links import Links, check_links, mixed
from fedloom.core.server_data import ServerData
from fedloom.core.slots import hook_name
from fedloom.rounds.aggregate import Fold, Traffic
from fedloom.rounds.cohort import Cohort, Report
from fedloom.rounds.engine import Engine
from fedloom.rounds.exchange import State
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import MEAN, Models, Server, Store


class Trained(NamedTuple):
    """A model after its receivers have trained it.

    Attributes:
        server: the model and its server states.
        contributors: the clients whose work counts, int64.
        uploads: what the topology has uploaded, reduced.
        common: the uploads to parts that have one state for all models.
    """

    server: Server
    contributors: np.ndarray
    uploads: Tree
    common: Fold


def received_losses(
    plan: ClientPlan, engine: Engine, server: Server, store: Store, clients: np.ndarray, on_validation: bool = False
) -> np.ndarray:
    """Losses F_i(θ^t) of the current model, float64 [clients], outside a round; NaN where a client has none.

    With several models, the loss of the model that each client receives.
    """
    if server.models is not None:
        losses, models = np.empty(len(clients)), models_of(plan, engine, server, store, clients)
        for number in np.unique(models).tolist():
            rows = models == number
            losses[rows] = received_losses(plan, engine, server.model(number), store, clients[rows], on_validation)
        return losses
    report, downs = Report(clients, np.zeros(len(clients))), {server.round: server.broadcast(plan)}
    return Cohort(plan, engine, server, store, downs, report).losses(clients, on_validation)[0]


def models_of(plan: ClientPlan, engine: Engine, server: Server, store: Store, clients: np.ndarray) -> np.ndarray:
    """The model that each client receives, int64 [clients]: the topology's, or the one of lowest loss F_i(θ_r^t)."""
    if not plan.method.topology.chooses:
        return plan.model_of[clients]
    losses = [received_losses(plan, engine, server.model(number), store, clients) for number in range(plan.models)]
    return np.nan_to_num(np.array(losses), nan=np.inf).argmin(0)


def heard_by(plan: ClientPlan, server: Server) -> Callable[[int], Heard]:
    """A function that returns what receivers of a model hear beside it in the next round; models are read once."""
    topology, theta = plan.method.topology, cache(lambda number: server.model(number).broadcast(plan).theta)
    mass = torch.from_numpy(plan.receivers if plan.method.mixing.is_uniform else plan.model_sizes)
    shares = (mass.double() / mass.sum()).to(server.theta)

    def of(number: int) -> Heard:
        draws = rng.stream(plan.seed, "heard", server.round, number)
        neighbours = np.asarray(topology.heard(number, plan.models, draws))
        fit = np.isin(neighbours, np.delete(np.arange(plan.models), number)).all()
        if not fit or len(np.unique(neighbours)) < len(neighbours):
            raise ConfigError(
                f"{hook_name('topology', topology, 'heard')} returned {in_words(neighbours)}, but it must name other "
                f"models than {number}, each once, of {plan.models} numbered from 0."
            )
        return Heard(number, {neighbour: theta(neighbour) for neighbour in neighbours.tolist()}, shares)

    return of


def meet(
    plan: ClientPlan, engine: Engine, server: Server, store: Store, trained: Mapping[int, Trained], report: Report,
    server_data: ServerData | None,
) -> Server:  # fmt: skip
    """The server after a round in which these models were trained, once all are mixed: θ_r = Σ_s B_rs θ_s."""
    assert server.models is not None
    method, topology, t, size = plan.method, plan.method.topology, server.round, len(server.theta)
    moved = {
        number: replace(model.server, parts={k: v for k, v in model.server.parts.items() if k not in plan.common})
        for number, model in trained.items()
    }
    downs = {t: server.broadcast(plan)}
    common = _common_states(plan, server, Cohort(plan, engine, server, store, downs, report), trained, server_data)
    if topology.home == "clients":  # they train the models that they hold: nothing was received or sent
        report.traffic = Traffic()
    received, changed = server.models, server.models.after(moved)
    now = replace(server, models=changed, round=t + 1)
    if not moved and topology.home != "edges":  # edge servers mix their models even if no client took part
        return now

    hook = hook_name("topology", topology, "between")
    validation = plan.validation
    validated = np.zeros(plan.facts.clients, dtype=bool) if validation is None else validation.index.sizes > 0

    def losses_of(at: Server) -> Callable[[int, np.ndarray], np.ndarray]:
        def losses(number: int, clients: np.ndarray) -> np.ndarray:
            if not topology.reads_losses:
                raise ConfigError(f"{hook} reads losses; declare it in the topology's class, by reads_losses = True.")
            values = np.empty(len(clients))
            for on_validation in (False, True):
                rows = np.flatnonzero(validated[clients] == on_validation)
                if len(rows):
                    model = at.model(number)
                    values[rows] = received_losses(plan, engine, model, store, clients[rows], on_validation)
            return values

        return losses

    meeting = Meeting(
        t, plan.facts, np.array(sorted(moved), dtype=np.int64), plan.model_sizes, plan.receivers,
        method.mixing.is_uniform, lambda number: now.model(number).theta, losses_of(now),
        lambda number: server.model(number).theta, losses_of(server), rng.stream(plan.seed, "topology", t),
        {number: model.uploads for number, model in trained.items()},
    )  # fmt: skip
    state, all_links = pair(topology.between(server.parts.get("topology", {}), meeting), hook, "links")
    entries = [(place, name) for place, part in method.parts.items() for name in part.mixed]
    for turn, links in enumerate(check_links(all_links, plan.models, size, hook)):
        message = _mix(links, None if turn else entries, received, changed, moved)
        _count(report.traffic, topology.home, links, message)
    share, mean = plan.receivers / plan.receivers.sum(), server.parts[MEAN]["mean"].clone()
    for number, model in moved.items():
        before = received.get(number)
        for part, new, old in ((mean[:size], model.theta, before.theta), (mean[size:], model.buffers, before.buffers)):
            part.add_(new, alpha=share[number]).sub_(old, alpha=share[number])
    parts = common | ({"topology": state} if state else {})
    return replace(now, models=received.after(moved), parts=parts).with_mean(mean)


def _common_states(
    plan: ClientPlan, server: Server, cohort: Cohort, trained: Mapping[int, Trained], server_data: ServerData | None
) -> State:
    """The new states of parts that have one for all models, from what the clients of a round have uploaded."""
    states, slices = dict(server.parts), Fold()
    places = [(place, part) for place, part in plan.method.hooks["correct"] if place in plan.common]
    if not places or not trained:
        return states
    for model in trained.values():
        slices.merge(model.common)
    members = np.concatenate([model.contributors for model in trained.values()])
    info, nothing = cohort.info(members, server_data), torch.zeros_like(server.theta)
    uploads = slices.uploads(plan, 1.0, np.zeros(0), plan.facts.clients, plan.common)
    for place, part in places:
        output = part.correct(states.get(place, {}), nothing, uploads.get(place, {}), info)
        states[place], _ = halves(output, hook_name(place, part, "correct"), nothing)
    return states


def _mix(
    links: Links, entries: list[tuple[str, str]] | None, received: Models, trained: Models, moved: dict[int, Server]
) -> Tensor:  # fmt: skip
    """Mix models by one matrix, in ``moved``, and return the message with which one of them is sent.

    With ``entries``, (place, name) of the parts' states, the buffers and these are mixed by it, too.
    """
    where = links.where
    speed = {} if links.steps is None else dict(zip(links.rows.tolist(), links.steps.tolist(), strict=True))

    def stepped(number: int, theta: Tensor) -> Tensor:
        return torch.lerp(received.get(number).theta, theta, speed[number]) if number in speed else theta

    def extra_slices(model: Server) -> list[Tensor]:
        if entries is None:
            return []
        return [model.buffers, *(model.parts[place][name].flatten() for place, name in entries)]

    def vector(number: int) -> Tensor:
        model = trained.get(number)
        theta = received.get(number).theta if links.before else stepped(number, model.theta)
        return torch.cat([theta[where], *extra_slices(model)])

    for number, product in mixed(links, vector):
        model = moved[number] if number in moved else trained.get(number)
        theta = model.theta.clone()
        theta[where], *rest = product.split([len(theta[where]), *map(len, extra_slices(model))])
        if links.before:
            theta[where] += (stepped(number, trained.get(number).theta) - received.get(number).theta)[where]
        if entries is not None:
            buffers, *values = rest
            parts = {place: dict(tree) for place, tree in model.parts.items()}
            for (place, name), value in zip(entries, values, strict=True):
                parts[place][name] = value.clone().view_as(parts[place][name])
            model = replace(model, buffers=buffers.clone(), parts=parts)
        moved[number] = replace(model, theta=theta)
    return vector(0)


def _count(traffic: Traffic, home: str, links: Links, message: Tensor) -> None:
    """Count the messages with which models are mixed: to another client each, or up to the cloud and down again."""
    up = len(links.crossing) if home == "clients" else len(np.unique(links.crossing)) if home == "edges" else 0
    numbers = up * (message.numel() + links.beside)
    traffic.count(numbers, numbers * message.element_size())
    if home == "edges" and up:
        traffic.down((message,), len(links.rows))

"""The cohort of a round: its members, what each of them receives, and how their results are combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.errors import LossError
from fedloom.base.tree import Bool, Float, Shaped
from fedloom.core.context import RoundInfo
from fedloom.core.hook_results import like
from fedloom.core.parts import UPDATE
from fedloom.core.server_data import ServerData
from fedloom.core.submodels import mean_over_holders
from fedloom.rounds.aggregate import EQUAL, Fold, Traffic, buffers_over_holders
from fedloom.rounds.engine import Engine, Group, States
from fedloom.rounds.exchange import BUFFERS, Broadcast, Failure, FailureKind, Result, State
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import Server, Store, first_state


@dataclass
class Report:
    """The record of one round.

    Attributes:
        cohort: S_t, int64 [|S|].
        p: the mixing coefficients actually used, float64 [|S|]; 0 for clients that were left out.
        traffic: parameters and bytes sent.
        losses: F_i(θ^t) before local work, float64 [|S|], if a part needs them; on validation samples if the part
            needs those.
        training_losses: F_i(θ^t) on training samples, float64 [|S|], if they are known.
        failures: the clients that were left out, with the reason.
        states: new client states, to be stored at the end of the round.
        late: members whose work the server did not wait for, bool [|S|]; None if it waits for everyone.
        versions: the version that each member received, int64 [|S|]; None if all received θ^t.
        included: the probability with which each member takes part, float64 [|S|], if it is known.
        local_losses: the mean training loss of each client's local work.
        models: the model that each member received, int64 [|S|], if there are several, each of which has its own p.
    """

    cohort: np.ndarray
    p: np.ndarray
    traffic: Traffic = field(default_factory=Traffic)
    losses: np.ndarray | None = None
    training_losses: np.ndarray | None = None
    failures: list[Failure] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)
    late: np.ndarray | None = None
    versions: np.ndarray | None = None
    included: np.ndarray | None = None
    local_losses: dict[int, float] = field(default_factory=dict)
    models: np.ndarray | None = None

    def of(self, rows: np.ndarray) -> Report:
        """The empty report of some members of the cohort."""
        late, versions, included = (
            None if column is None else column[rows] for column in (self.late, self.versions, self.included)
        )
        return Report(self.cohort[rows], self.p[rows], late=late, versions=versions, included=included)

    def add(self, rows: np.ndarray, other: Report) -> None:
        """Take over the report of some members of the cohort."""
        self.p[rows] = other.p
        for name in ("losses", "training_losses"):
            if (values := getattr(other, name)) is not None:
                if getattr(self, name) is None:
                    setattr(self, name, np.full(len(self.cohort), np.nan))
                getattr(self, name)[rows] = values
        self.traffic.add(other.traffic)
        self.failures += other.failures
        self.states |= other.states
        self.local_losses |= other.local_losses

    @property
    def train_loss(self) -> float:
        """The mean training loss over the clients that arrived; NaN without any."""
        return float(np.mean([*self.local_losses.values()])) if self.local_losses else float("nan")

    def objective(self, losses: np.ndarray) -> float:
        """Σ p_i F_i(θ^t) over the clients with p_i ≠ 0; NaN if p is all 0 (Hahn 2024, eq. (1.1) and figure 3.1)."""
        mixed = self.p != 0
        return float(self.p[mixed] @ losses[mixed]) if mixed.any() else float("nan")


def client_states(plan: ClientPlan, theta: Float[Tensor, "P"], store: Store) -> States:
    """The states of clients by number, initialised for those that participate for the first time.

    All new clients of a level share one initial state, which depends on the received model θ alone.
    """

    @cache
    def first(level: int) -> State:
        return first_state(plan, plan.levels[level].level_params(theta) if plan.method.hooks["init_client"] else theta)

    def state(client: int) -> State:
        stored = store.get(client)
        return first(int(plan.level[client])) if stored is None else stored

    return state


@dataclass(frozen=True)
class Cohort:
    """The members of a round: what each has received, its work, and the mean of their results.

    Attributes:
        plan: the client plan.
        engine: the engine that runs their work.
        server: the state before the round.
        store: the states of clients.
        downs: the messages that members have received, by version.
        report: the record of the round, which the cohort fills.
        receivers: of several models, the clients that receive this one, int64 [K_r]; None: all clients.
    """

    plan: ClientPlan
    engine: Engine
    server: Server
    store: Store
    downs: Mapping[int, Broadcast]
    report: Report
    receivers: np.ndarray | None = None

    @cached_property
    def states(self) -> Mapping[int, States]:
        """The states of clients, by the version that they have received."""
        return {version: client_states(self.plan, down.theta, self.store) for version, down in self.downs.items()}

    @cached_property
    def version(self) -> Mapping[int, int]:
        """The version that each member has received; empty if all have received θ^t."""
        cohort, versions = self.report.cohort, self.report.versions
        return {} if versions is None else dict(zip(cohort.tolist(), versions.tolist(), strict=True))

    def info(self, members: np.ndarray, server_data: ServerData | None) -> RoundInfo:
        """The record of the round as known before local work."""
        plan, t, versions = self.plan, self.server.round, self.versions(members)
        samples = plan.population.sizes[members]
        rows = zip(members.tolist(), samples.tolist(), versions.tolist(), strict=True)
        plans = ((c, n, s, plan.at(c)) for c, n, s in rows)
        steps = np.array([at.effective_steps(at.local.steps_of(n, plan.seed, s, c)) for c, n, s, at in plans])
        included = self.report.included
        if included is not None:
            included = included[np.isin(self.report.cohort, members)]
        stale_fields = (
            {}
            if not self.version
            else {
                "versions": versions,
                "models_received": {s: down.theta for s, down in self.downs.items() if s != t},
                "rates": np.array([self.downs[s].lr for s in versions.tolist()]),
            }
        )
        has_counts = plan.method.mixing.needs.label_counts and len(members)
        counts = np.stack([plan.label_counts_of(c).double().cpu().numpy() for c in members]) if has_counts else None
        facts, sizes = plan.facts, plan.population.sizes
        if self.receivers is not None:
            facts, sizes = facts._replace(clients=len(self.receivers)), sizes[self.receivers]
        return RoundInfo(
            t, plan.local.rate(t), members, samples, steps, facts, self.downs[t].theta, server_data=server_data,
            invited=self.report.cohort.tolist(), usual_steps=plan.usual_steps,
            normalised=plan.method.drift.update_kind == "normalised",
            sizes=sizes, uniform=plan.method.mixing.is_uniform, included=included, label_counts=counts, **stale_fields,
        )  # fmt: skip

    def start(self, invited: np.ndarray, drop_rate: float) -> np.ndarray:
        """Mask [|S|] of the members that remain after the broadcast; records F_i(θ^t) if a part needs it.

        The clients ``received``, int64, are sent the newest version, whenever their work arrives.
        """
        plan, cohort, report, t = self.plan, self.report.cohort, self.report, self.server.round
        for level, rows in self.by_level(invited):
            report.traffic.down(self.downs[t].at(plan.levels[level]).tensors, len(rows))
        present = np.ones(len(cohort), dtype=bool) if report.late is None else ~report.late
        if drop_rate:
            pairs = zip(self.versions(cohort).tolist(), cohort.tolist(), strict=True)
            stays = np.array([rng.stream(plan.seed, "drop", s, c).random() >= drop_rate for s, c in pairs])
            self.leave_out(present & ~stays, FailureKind.ABSENT, "dropped out")
            present &= stays
        if plan.method.needs("losses") and present.any():
            report.losses = np.full(len(cohort), np.nan)
            on_validation = plan.method.needs("validation")
            report.losses[present], errors = self.losses(cohort[present], on_validation)
            report.training_losses = None if on_validation else report.losses
            report.failures += [
                Failure(t, client, FailureKind.CODE, str(error).rstrip("."), trace=error.trace)
                for client, error in errors.items()
            ]
            finite = np.isfinite(report.losses)
            diverged = present & ~finite & ~np.isin(cohort, list(errors))
            self.leave_out(diverged, FailureKind.DIVERGED, "its loss of the received model is not finite")
            present &= finite
            numbers = int(present.sum())  # one loss of each member, beside the update
            report.traffic.count(numbers, numbers * plan.layout.dtype.itemsize)
        return present

    def losses(self, members: np.ndarray, on_validation: bool = False) -> tuple[np.ndarray, dict[int, LossError]]:
        """F_i of the received model on training or validation samples, float64 [members]; NaN with an error."""
        values, errors = np.empty(len(members)), {}
        for version, level, rows in self.by_message(members):
            values[rows], failed = self._losses(version, members[rows], level, on_validation)
            errors |= failed
        return values, errors

    def _losses(
        self, version: int, members: np.ndarray, level: int, on_validation: bool = False
    ) -> tuple[np.ndarray, dict[int, LossError]]:
        """The losses at one level; if one cannot be computed, halves of the members are asked until it stands alone."""
        try:
            down = self.downs[version].at(self.plan.levels[level])
            return self.engine.losses(down, members, self.states[version], level, on_validation), {}
        except LossError as error:
            if len(members) == 1:
                return np.full(1, np.nan), {int(members[0]): error}
        halves = [self._losses(version, half, level, on_validation) for half in np.array_split(members, 2)]
        return np.concatenate([values for values, _ in halves]), halves[0][1] | halves[1][1]

    def groups(self, members: np.ndarray, weights: np.ndarray | None) -> list[Group]:
        """The work of the members for the engine."""
        return [
            Group(
                self.downs[version].at(self.plan.levels[level]), members[rows], self.states[version],
                None if weights is None else weights[rows], level,
            )
            for version, level, rows in self.by_message(members)
        ]  # fmt: skip

    def record(self, fold: Fold, received: Tensor, observe: Callable[[Result, Tensor], None]) -> None:
        """Record the results of a block whose members received the parameters."""
        report = self.report
        for result in fold.results:
            if result.failure is not None:
                report.failures.append(replace(result.failure, round=self.server.round))
                continue
            report.states[result.client] = result.state
            report.local_losses[result.client] = result.loss
            observe(result, received)

    def arrived_rows(self, members: np.ndarray, totals: list[Fold]) -> np.ndarray:
        """The rows of the members that arrived, int64, whose uploads are counted."""
        report, arrived = self.report, np.zeros(len(members), dtype=bool)
        for level, rows in self.by_level(members):
            arrived[rows] = totals[level].arrived
            report.traffic.add(totals[level].traffic)
        return np.flatnonzero(arrived)

    def collude(self, total: Fold, members: np.ndarray) -> None:
        """Replace the updates of hostile members, who know those of the honest ones; [arrived] clients."""
        attack, updates = self.plan.attack, total.single_uploads[UPDATE]
        hostile = np.isin(members, list(self.plan.hostile))
        if attack is None or not hostile.any() or hostile.all():
            return
        honest = torch.stack([update for update, bad in zip(updates, hostile, strict=True) if not bad])
        forged = like(attack.collude(honest, int(hostile.sum())), honest[0], f"attack {type(attack).__name__}: collude")
        forged_slices = {slot: forged for slot in total.single_uploads if slot == UPDATE or slot.endswith(f"/{UPDATE}")}
        for place, part in self.plan.method.uploading:
            forged_slices |= {f"{place}/{name}": of(forged) for name, of in part.update_statistics.items()}
        for slot, value in forged_slices.items():
            for row in np.flatnonzero(hostile):
                total.single_uploads[slot][row] = value

    def mix(
        self, totals: list[Fold], weights: np.ndarray | None, arrived: np.ndarray, info: RoundInfo
    ) -> tuple[Shaped[Tensor, "P"], Shaped[Tensor, "buffers"], State]:
        """The mixed update Δ, the mixed buffers, and every part's reduced uploads by place."""
        plan, p = self.plan, info.p
        assert p is not None
        if not plan.has_levels:
            total = 1.0 if weights is None else float(weights[arrived].sum())
            buffers = totals[0].buffers(total, p) if len(self.server.buffers) else self.server.buffers
            return totals[0].reduced(UPDATE, total, p), buffers, totals[0].uploads(plan, total, p, info.facts.clients)
        assert weights is not None
        level = plan.level[info.cohort]
        mass = [float(weights[arrived][level == number].sum()) for number in range(len(totals))]
        slices = Fold()  # of parts, which are alike at all levels
        for total in totals:
            part_sums = {slot: value for slot, value in total.sums.items() if slot not in (UPDATE, BUFFERS, EQUAL)}
            slices.merge(Fold(part_sums, total.single_uploads, total.arrived))
        back = np.argsort(np.argsort(level, kind="stable"))  # single uploads came level by level
        slices.single_uploads = {slot: [values[row] for row in back] for slot, values in slices.single_uploads.items()}
        uploads = slices.uploads(plan, sum(mass), p, info.facts.clients)
        networks = [level_plan.submodel for level_plan in plan.levels if level_plan.submodel is not None]
        sums, unchanged = [total.sums.get(UPDATE) for total in totals], torch.zeros_like(self.server.theta)
        update = mean_over_holders([network.shared_index for network in networks], sums, mass, unchanged)
        places = [network.shared_buffers for network in networks]
        return update, buffers_over_holders(places, totals, mass, self.server.buffers), uploads

    def held_mask(self, members: np.ndarray, p: np.ndarray) -> Bool[Tensor, "P"] | None:
        """Mask of the parameters that members with a positive p hold; None if all clients hold all of them."""
        if not self.plan.has_levels:
            return None
        mask = torch.zeros_like(self.server.theta, dtype=torch.bool)
        for number in np.unique(self.plan.level[members[p > 0]]):
            submodel = self.plan.levels[number].submodel
            assert submodel is not None
            mask[submodel.shared_index.to(mask.device)] = True
        return mask

    def by_level(self, members: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The rows of each level's members, for levels that have any."""
        level = self.plan.level[members]
        return [(number, np.flatnonzero(level == number)) for number in np.unique(level).tolist()]

    def versions(self, members: np.ndarray) -> np.ndarray:
        """The version that each member has received, int64 [members]."""
        t = self.server.round
        return np.array([self.version.get(client, t) for client in members.tolist()], dtype=np.int64)

    def by_message(self, members: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Version, level and rows of the members that have received one message."""
        versions = self.versions(members)
        for version in np.unique(versions).tolist():
            rows = np.flatnonzero(versions == version)
            for level, inner in self.by_level(members[rows]):
                yield version, level, rows[inner]

    def leave_out(self, mask: np.ndarray, kind: FailureKind, reason: str) -> None:
        """Record members that take no further part in the round."""
        t = self.server.round
        self.report.failures += [Failure(t, int(c), kind, reason) for c in self.report.cohort[mask]]

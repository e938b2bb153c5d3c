"""Engines whose clients hold their own data and states: what the run sends, requests, and does without."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import SIZES
from helpers.runs import assert_same_state, experiment, go

from fedloom.base.errors import ClientError, ConfigError
from fedloom.base.registry import Entry
from fedloom.compute.live import Live
from fedloom.core.federation import Index, Population, Split
from fedloom.engines import Serial, engines
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.store import StateStore
from fedloom.rounds.aggregate import Fold, fold
from fedloom.rounds.cohort import client_states
from fedloom.rounds.engine import ComputeFactory, EngineFactory, Group, States, Traits
from fedloom.rounds.exchange import Broadcast, Failure, FailureKind, Result, State
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.round import federated_round

EVERYONE = np.arange(len(SIZES))


class Elsewhere(Serial):
    """Keeps client states, as proposed and as committed; clients in ``out`` do not answer."""

    traits = Traits(states="clients", computes=("live",))

    def __init__(
        self, plan: ClientPlan, compute: ComputeFactory, out: tuple[int, ...], kind: FailureKind = FailureKind.ABSENT
    ) -> None:
        super().__init__(plan, compute)
        self.plan, self.out, self.kind = plan, out, kind
        self.committed_states: dict[int, State] = {}
        self.proposed: dict[int, State] = {}
        self.rounds: list[tuple[int, list[int]]] = []

    def run(self, groups: Sequence[Group]) -> Generator[tuple[int, Fold]]:
        for number, (down, clients, states, weights, _) in enumerate(groups):
            yield number, fold(self.plan, self.results(down, clients.tolist(), states), weights)

    def results(self, down: Broadcast, clients: list[int], states: States) -> Iterator[Result]:
        for client in clients:
            if client in self.out:
                yield Result(client, failure=Failure(down.round, client, self.kind, "it is offline"))
                continue
            (result,) = self.computes[0].work(down, [client], [self.committed_states.get(client) or states(client)])
            self.proposed[client], result.state = result.state, {}
            yield result

    def committed(self, round: int, accepted: np.ndarray) -> None:
        self.rounds.append((round, accepted.tolist()))
        self.committed_states |= {client: self.proposed[client] for client in accepted.tolist()}
        self.proposed.clear()

    def evaluate(self, down: Broadcast, clients: np.ndarray) -> Mapping[str, np.ndarray]:
        some = clients[::2]
        return {"client": some, "n": some + 1, "loss": some / 10, "accuracy": np.full(len(some), down.round / 10)}


def register(monkeypatch: pytest.MonkeyPatch, *out: int, **settings: Any) -> list[Elsewhere]:
    """Register such an engine; the list receives its instances."""
    instances: list[Elsewhere] = []

    def make(plan: ClientPlan, compute: ComputeFactory) -> Elsewhere:
        instances.append(Elsewhere(plan, compute, out, **settings))
        return instances[-1]

    entry = Entry("engine", "elsewhere", lambda: lambda: EngineFactory(make, Elsewhere.traits))
    monkeypatch.setitem(engines._entries, "elsewhere", entry)
    return instances


def test_states_are_kept_where_the_round_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is that of the serial engine; the driver's store stays empty, the clients hold what it would."""
    settings = {"cohort": 4, "rounds": 4, "seed": 2}
    instances = register(monkeypatch)
    reference, result = go("scaffold", **settings), go("scaffold", engine="elsewhere", **settings)
    (engine,) = instances
    assert not len(result.snapshot.store)
    assert_same_state(replace(reference.snapshot, store=StateStore()), result.snapshot)
    store = StateStore()
    store.put(engine.committed_states, 4)
    assert_same_state(reference.snapshot, replace(result.snapshot, store=store))
    assert [t for t, _ in engine.rounds] == [0, 1, 2, 3]
    assert {len(accepted) for _, accepted in engine.rounds} == {4}


def test_only_accepted_results_are_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    instances = register(monkeypatch, 1, 4, kind=FailureKind.REFUSED)
    result = go("scaffold", engine="elsewhere", rounds=2)
    assert instances[0].rounds == [(0, [0, 2, 3, 5]), (1, [0, 2, 3, 5])]
    assert [(f.round, f.client, f.kind) for f in result.failures[:2]] == [(0, 1, "refused"), (0, 4, "refused")]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (FailureKind.ABSENT, "round 1: none of 6 clients answered, the first because it is offline; check that"),
        (FailureKind.REFUSED, "every client of the round failed; the first was round 1, client 0: it is offline"),
    ],
)
def test_a_round_without_anybody_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, kind: FailureKind, sentence: str
) -> None:
    register(monkeypatch, *EVERYONE.tolist(), kind=kind)
    with pytest.raises(ClientError, match=sentence):
        go(engine="elsewhere")


def test_clients_measure_their_own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they return is the table of clients; what the driver has data for, it measures itself."""
    register(monkeypatch)
    result = run(experiment(engine="elsewhere", rounds=2, evaluation=Evaluation(what=("clients", "global"))))
    for t, record in enumerate(result.history, start=1):
        assert record["clients/accuracy/mean"] == pytest.approx(t / 10)
        assert record["clients/loss/mean"] == pytest.approx(0.2)
        assert "global/accuracy" in record


def test_a_compute_that_an_engine_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    with pytest.raises(ConfigError, match="engine 'elsewhere' runs no compute 'batched'"):
        go(engine="elsewhere", compute="batched")


@pytest.mark.parametrize("method", ["feddyn", "scaffold", "fedavg"])
def test_a_server_without_rows_and_clients_without_the_others(method: str) -> None:
    """A plan with the population's figures in place of its rows does the same round, at the server and at a client."""
    task = FederatedTask(experiment(method))
    plan, server, store = task.plan, task.state.server, task.state.store
    nothing = Index(np.zeros(0, np.int64), np.zeros(len(SIZES) + 1, np.int64))
    server_plan = replace(plan, data=Split(plan.data.arrays.take(torch.zeros(0, dtype=torch.int64)), nothing))
    server_plan = replace(server_plan, all_clients=plan.population)

    class Alone(Serial):
        """Every client with a plan of its own."""

        def run(self, groups: Sequence[Group]) -> Any:
            ((down, clients, _, weights, _),) = groups
            assert weights is not None
            for client, weight in zip(clients.tolist(), weights, strict=True):
                rows = [plan.data.index[client] if k == client else [] for k in range(len(SIZES))]
                population = Population(len(SIZES), np.zeros(0, np.int64), float(np.mean(SIZES)))
                client_plan = replace(plan, data=Split(plan.data.arrays, Index.of(rows)), all_clients=population)
                states = client_states(client_plan, server.theta, store)
                yield 0, Live(client_plan).fold(down, [client], [states(client)], np.array([weight]))

    reference, _ = federated_round(plan, Serial(plan, Live), server, store, EVERYONE)
    result, report = federated_round(server_plan, Alone(plan, Live), server, store, EVERYONE)
    assert torch.equal(reference.theta, result.theta)
    assert sorted(report.states) == EVERYONE.tolist()

"""Laws of schedules: identities, a timeline that nothing but time enters, and the same bits on all engines."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import SIZES
from helpers.runs import assert_same_run, assert_same_state, experiment, go, leaves, theta

from fedloom import methods
from fedloom.base.errors import ConfigError, DataError
from fedloom.core.timeline import Arrivals, Schedule, World
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, run
from fedloom.parts.server import SGD
from fedloom.parts.uplink import SecureSum
from fedloom.timing import (
    Asynchronous,
    Buffered,
    Deadline,
    Devices,
    Equal,
    Lognormal,
    OverSelect,
    Replay,
    Rounds,
    Semi,
    Tiers,
)

SAME = Equal(speed=1e30, down=1e30, up=1e30)  # latency alone
UNEQUAL = Lognormal(sigma=1.5, jitter=0.2)
SCHEDULES = (Rounds(), Deadline(0.6), OverSelect(0.5), Tiers(2), Buffered(2), Asynchronous(), Semi(0.4))
KINDS = ("fedavg", "feddyn", "scaffold", "ditto", "fedper", "heterofl", "fedbn", "krum", "term", "fednova")


def world(clients: int = 50, size: int = 10, **settings: Any) -> World:
    rates = np.random.default_rng(0).lognormal(sigma=1.0, size=clients)
    draw = lambda t, n: np.sort(np.random.default_rng(t).choice(clients, n, replace=False))  # noqa: E731
    seconds = lambda invited, version: rates[invited] * (1 + 0.1 * np.sin(version + invited))  # noqa: E731
    return World(clients, size, draw, seconds, expected=lambda: rates, **settings)


def steps(schedule: Schedule, count: int = 200, **settings: Any) -> list[Arrivals]:
    return list(islice(schedule.steps(world(**settings)), count))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_time_runs_forward_and_no_client_overlaps_itself(schedule: Schedule) -> None:
    free = np.zeros(50)  # when each client's last work ended
    received: dict[int, list[int]] = {}
    arrived: dict[int, list[int]] = {}
    clock = 0.0
    for t, step in enumerate(steps(schedule)):
        assert step.clock >= clock
        clock = step.clock
        assert len(set(step.clients.tolist())) == len(step.clients)
        keys = list(zip(step.versions.tolist(), step.clients.tolist(), strict=True))
        assert keys == sorted(keys)
        assert (step.begin >= free[step.clients]).all()
        assert (step.end > step.begin).all()
        assert (step.end <= clock).all()
        assert (step.versions <= t).all()
        free[step.clients] = clock
        received[t] = step.received.tolist()
        for client, version in zip(step.clients.tolist(), step.versions.tolist(), strict=True):
            arrived.setdefault(version, []).append(client)
            assert client in received[version]
        assert set(step.in_flight) == {s for s in received if len(arrived.get(s, ())) < len(received[s])}


@pytest.mark.parametrize("schedule", [OverSelect(0.0), Deadline(1.0), Buffered()], ids=repr)
def test_schedules_that_wait_for_everyone_are_rounds(schedule: Schedule) -> None:
    equal = replace(world(), seconds=lambda clients, version: np.ones(len(clients)))
    for step, plain, _ in zip(schedule.steps(equal), Rounds().steps(equal), range(30), strict=False):
        for name in ("clients", "versions", "clock", "begin", "end", "late"):
            np.testing.assert_array_equal(getattr(step, name), getattr(plain, name))


def test_late_clients_and_their_cost() -> None:
    for fraction, size, invited in ((0.5, 10, 15), (0.1, 100, 110)):  # 100 · (1 + .1) is rounded to above 110
        for step in steps(OverSelect(fraction), 20, clients=5 * size, size=size):
            assert (~step.late).sum() == size
            assert len(step.clients) == invited
            assert (step.end[step.late] == step.clock).all()
    late = [step.late.any() for step in steps(Deadline(2.0))]
    assert any(late)
    assert not all(late)
    clocks = np.diff([0.0, *(step.clock for step in steps(Deadline(2.0)))])
    assert clocks.max() == pytest.approx(2.0)


def test_work_at_a_time_and_clients_per_step() -> None:
    for schedule, size in ((Buffered(4), 4), (Asynchronous(), 1)):
        arrivals = steps(schedule)
        assert {len(step.clients) for step in arrivals} == {size}
        begin, end = (np.concatenate([getattr(step, name) for step in arrivals]) for name in ("begin", "end"))
        for moment in np.linspace(0.1, arrivals[100].clock, 50):
            assert ((begin <= moment) & (moment < end)).sum() <= 10
    for t, step in enumerate(steps(Semi(0.5))):
        assert step.clock / 0.5 == pytest.approx(round(step.clock / 0.5))
        assert len(step.clients) or not t


def test_tiers_hold_clients_of_the_same_speed() -> None:
    expected = world().expected()
    tier = np.empty(50, dtype=int)
    for number, members in enumerate(np.array_split(np.argsort(expected), 5)):
        tier[members] = number
    tiers = [set(tier[step.clients]) for step in steps(Tiers(5))]
    assert all(len(numbers) == 1 for numbers in tiers)
    assert set().union(*tiers) == set(range(5))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_clients_are_invited_only_while_they_are_there(schedule: Schedule) -> None:
    present = lambda clients, time: (clients + int(time / 3)) % 3 == 0  # noqa: E731
    availability = {"available": present, "change": lambda time: 3 * (int(time / 3) + 1.0)}
    for step in steps(schedule, 40, **availability):
        for client, begin in zip(step.clients, step.begin, strict=True):
            assert present(np.array([client]), float(begin)).all()


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize(
    ("schedule", "devices"),
    [(Rounds(), UNEQUAL), (Buffered(), SAME), (Deadline(1e9), UNEQUAL), (OverSelect(0.0), UNEQUAL)],
    ids=repr,
)
def test_identities_of_runs(method: str, schedule: Schedule, devices: Devices) -> None:
    """Equal devices, or waiting for everyone, give the bits and the bytes of rounds."""
    settings: dict[str, Any] = {"cohort": 4, "drop_rate": 0.2, "rounds": 4}
    plain, timed = go(method, **settings), go(method, schedule=schedule, devices=devices, **settings)
    assert_same_state(plain.snapshot, timed.snapshot)
    for record, timed_record in zip(plain.history, timed.history, strict=True):
        assert all(timed_record[key] == value for key, value in record.items() if key != "seconds")
        assert timed_record["clock"] > 0
    assert not timed.snapshot.versions


def test_one_client_at_a_time_is_sequential_sgd() -> None:
    settings: dict[str, Any] = {"cohort": 1, "rounds": 8}
    assert_same_state(
        go("scaffold", **settings).snapshot,
        go("scaffold", schedule=Asynchronous(), devices=SAME, **settings).snapshot,
    )


def clocks(method: str, **changes: Any) -> list[tuple[float, ...]]:
    result = go(method, **({"devices": UNEQUAL, "cohort": 4, "rounds": 6} | changes))
    return [tuple(record[key] for key in ("clock", "time/work", "staleness/mean")) for record in result.history]


def test_the_timeline_depends_on_time_alone() -> None:
    """Neither engine, compute, evaluation nor what training returns moves it."""
    reference = clocks("fedavg", schedule=Buffered(2))
    for changes in (
        {"compute": "batched"},
        {"evaluation": Evaluation(what=("global", "clients"))},
        {"engine": "processes", "engine_settings": {"workers": 2}},
    ):
        assert clocks("fedavg", schedule=Buffered(2), **changes) == reference
    assert clocks("fedavg", schedule=Buffered(2), seed=1) != reference
    assert clocks("scaffold", schedule=Buffered(2))[0][0] > reference[0][0]  # its control variates travel too


@pytest.mark.parametrize("method", ["scaffold", "ditto", "heterofl", "fedbn"])
@pytest.mark.parametrize("schedule", [Buffered(3), Asynchronous(), Deadline(0.102)], ids=repr)
def test_the_same_bits_in_processes(method: str, schedule: Schedule) -> None:
    settings: dict[str, Any] = {"schedule": schedule, "devices": UNEQUAL, "cohort": 5, "drop_rate": 0.2, "rounds": 6}
    assert_same_run(go(method, **settings), go(method, engine="processes", engine_settings={"workers": 2}, **settings))


@pytest.mark.parametrize("method", ["feddyn", "scaffold", "ditto", "fedcm"])
@pytest.mark.parametrize("schedule", [Buffered(2), Asynchronous(), Semi(0.101)], ids=repr)
def test_stopped_at_any_step_and_resumed(method: str, schedule: Schedule, tmp_path: Path) -> None:
    what = Evaluation(what=("global", "average", "cohort"))
    settings: dict[str, Any] = {"schedule": schedule, "devices": UNEQUAL, "cohort": 4, "evaluation": what}
    full_run = go(method, rounds=7, **settings)
    for stop in (1, 4):
        out = tmp_path / str(stop)
        run(experiment(method, rounds=stop, **settings), out)
        resumed = run(experiment(method, rounds=7, **settings), out, resume=True)
        assert_same_state(full_run.snapshot, resumed.snapshot)
        assert full_run.history[-1]["average/loss"] == resumed.history[-1]["average/loss"]
        assert full_run.snapshot.versions.keys() == resumed.snapshot.versions.keys()


def test_live_and_batched_agree_when_stale() -> None:
    settings: dict[str, Any] = {"schedule": Buffered(3), "devices": UNEQUAL, "cohort": 5, "rounds": 6}
    for method in ("fedavg", "feddyn", "scaffold", "superfed_mm"):
        live, batched = go(method, **settings), go(method, compute="batched", **settings)
        assert_same_state(live.snapshot, batched.snapshot, 1e-12)


@pytest.mark.parametrize("method", ["feddyn", "scaffold"])
def test_server_means_stay_means_of_client_states(method: str) -> None:
    """h = mean h_i (FedDyn) and c = mean c_i (SCAFFOLD), however stale clients are."""
    result = go(method, schedule=Buffered(2), devices=UNEQUAL, cohort=4, rounds=12)
    state = dict(leaves(result.snapshot))
    (name,) = [key for key in state if key.startswith("server/drift/")]
    client_states = [value for key, value in state.items() if key.startswith("client") and "/drift/" in key]
    mean = torch.stack(client_states).sum(0) / len(SIZES)
    assert (state[name] - mean).abs().max() < 1e-12 or (state[name] + mean).abs().max() < 1e-12


@pytest.mark.parametrize("schedule", [Buffered(2), OverSelect(0.5)], ids=repr)
def test_a_run_on_record_gives_its_model_again(schedule: Schedule, tmp_path: Path) -> None:
    first = run(experiment("scaffold", schedule=schedule, devices=UNEQUAL, cohort=4, rounds=8), tmp_path / "run")
    replay = Replay(tmp_path / "run" / "mixing.parquet")
    assert_same_state(go("scaffold", schedule=replay, cohort=4, rounds=8).snapshot, first.snapshot)
    with pytest.raises(ConfigError, match="has 8 rounds, fewer than the run; set rounds=8"):
        go("scaffold", schedule=replay, cohort=4, rounds=9)
    arrivals = list(islice(replay.steps(world()), 8))
    for t, step in enumerate(arrivals):  # what later steps take is in flight, and nothing else
        assert set(step.in_flight) == {s for later in arrivals[t + 1 :] for s in later.versions.tolist() if s <= t}
    table = tmp_path / "table.csv"
    for rows, words in (
        ("1,0,0\n3,1,0", "every round"), ("1,0,0\n1e18,1,0", "every round"), ("1,99,0", "do not exist"),
        ("1,0,1", "not there yet"), ("1,0,0\n2,0,0", "two versions at a time"),
    ):  # fmt: skip
        table.write_text(f"round,client,version\n{rows}\n")
        with pytest.raises(DataError, match=words):
            next(Replay(table).steps(world()))


def test_a_few_clients_of_many_need_a_smaller_server_rate() -> None:
    settings: dict[str, Any] = {"schedule": Asynchronous(), "devices": UNEQUAL, "cohort": 6}
    warnings = {
        name: FederatedTask(experiment(name, **settings)).warnings for name in ("scaffold", "feddyn", "fedavg", "mifa")
    }
    assert ["may cycle" in "".join(lines) for lines in warnings.values()] == [True, True, False, False]
    for lr in (0.3, 0.4):  # twice the share of one client in six is the largest that is not warned of
        method = replace(methods.make("scaffold"), name="careful", server=SGD(lr=lr))
        assert len(FederatedTask(experiment(method, **settings)).warnings) == (lr > 2 / 6)
    assert not FederatedTask(experiment("scaffold", **settings | {"schedule": Buffered(2)})).warnings


def test_sums_are_unmasked_without_those_that_are_late() -> None:
    settings: dict[str, Any] = {"schedule": Deadline(0.102), "devices": UNEQUAL, "cohort": 4, "rounds": 6}
    plain = go("scaffold", **settings)
    masked = go(replace(methods.make("scaffold"), name="masked", uplink=(SecureSum(),)), **settings)
    assert sum(record.get("late", 0) for record in plain.history) > 3
    assert not plain.failures  # work that nobody waited for is no failure
    np.testing.assert_allclose(theta(masked), theta(plain), atol=1e-6)


def test_traffic_is_that_of_the_timeline() -> None:
    """Every invitation costs a broadcast, in the step of its version, and every arrival an upload."""
    task = FederatedTask(experiment("fedavg", schedule=Buffered(2), devices=UNEQUAL, cohort=4, rounds=10))
    result = go("fedavg", schedule=Buffered(2), devices=UNEQUAL, cohort=4, rounds=10)
    size = len(theta(result))
    for t, record in enumerate(result.history):
        step = task.timeline.step(t)
        assert record["comm/down_params"] == size * len(step.received)
        assert record["comm/up_params"] == size * len(step.clients)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": Buffered(2), "devices": None}, "set devices"),
        ({"schedule": Buffered(9)}, "never arrive together"),
        ({"schedule": Buffered(2), "sampling": "bernoulli"}, "sampling=fixed"),
        ({"schedule": Deadline(1.0), "method": "centralised"}, "pooled data"),
        ({"schedule": Tiers(), "method": "afl", "cohort": 6}, "needs every client"),
        ({"method": "ifca"}, "durations are not known"),
        ({"presence": {"0": (2,)}, "devices": Equal(availability=0.5)}, "devices that are always there"),
        ({"method": "afl", "cohort": 6, "devices": Equal(availability=0.5)}, "needs every client"),
        ({"method": "dp_fedavg", "devices": Equal(availability=0.5)}, "drawn uniformly"),
    ],
)
def test_what_does_not_go_with_time(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment(**({"method": "fedavg", "devices": UNEQUAL, "cohort": 4} | changes))

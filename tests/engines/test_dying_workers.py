"""Workers that are killed while they work."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.federations import SIZES
from helpers.runs import assert_same_run, assert_same_state, experiment, go
from helpers.trouble import MARK, guarded, marked, stumble, suicide

from fedloom.core.errors import ClientError
from fedloom.engines.processes import Processes
from fedloom.run.loop import Silent, _Run, run

VICTIM = 2


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper"])
def test_clients_of_a_killed_worker_are_redone(name: str, workers: int, tmp_path: Path) -> None:
    diary = tmp_path / "deaths"
    settings = {"federation": marked(VICTIM), "model": guarded(suicide(1, diary))}
    reference = go(name, **settings)
    assert not diary.exists()
    result = go(name, engine="processes", engine_settings={"workers": workers}, **settings)
    assert diary.read_text() == "x", "no worker died, so nothing was tested"
    assert not result.failures
    assert_same_run(reference, result)


@pytest.mark.parametrize("name", ["fedavg", "feddyn"])
def test_a_client_that_always_kills_its_worker_is_named_and_left_out(name: str, tmp_path: Path) -> None:
    diary = tmp_path / "deaths"
    settings = {"federation": marked(VICTIM), "model": guarded(suicide(10**6, diary)), "rounds": 2}
    result = go(name, engine="processes", engine_settings={"workers": 2}, **settings)
    assert [(f.round, f.client) for f in result.failures] == [(0, VICTIM), (1, VICTIM)]
    assert str(result.failures[0]) == f"round 0, client {VICTIM}: its worker process died 2 times"
    assert diary.read_text() == 4 * "x"
    assert [record["failures"] for record in result.history] == [1, 1]
    assert VICTIM not in dict(result.snapshot.store)
    assert (len(result.snapshot.store) == len(SIZES) - 1) == (name == "feddyn")
    left = {record["comm/up_params"] for record in result.history}
    assert left == {27 * (len(SIZES) - 1)}


def test_a_worker_killed_between_rounds_is_replaced() -> None:
    plan = _Run(experiment("scaffold"), None, 10, 2, ()).plan
    engine = Processes(plan, workers=2)
    server = _Run(experiment("scaffold"), None, 10, 2, ()).state.server
    down, cohort = server.broadcast(plan), np.arange(len(SIZES))
    state = {"drift": {"c": server.parts["drift"]["c"]}}

    def updates() -> list[bytes]:
        return [r.update["shared"].clone().numpy().tobytes() for r in engine.run(down, cohort, lambda i: state)]

    try:
        before = updates()
        for worker in engine.workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        time.sleep(0.05)
        assert updates() == before
        os.kill(engine.workers[0].process.pid, signal.SIGKILL)
        losses = engine.losses(down, cohort)
        assert losses.shape == (len(SIZES),)
        assert np.isfinite(losses).all()
    finally:
        engine.close()


class Slow(Silent):
    """Leaves time for being killed."""

    def round(self, record: dict[str, Any]) -> None:
        time.sleep(0.03)


def test_workers_killed_at_random_moments_change_no_bit() -> None:
    settings = {"rounds": 12, "cohort": 5, "seed": 9}
    reference = go("scaffold", **settings)
    parallel = experiment("scaffold", engine="processes", engine_settings={"workers": 2}, **settings)
    killed: list[int] = []
    over = threading.Event()

    def hunt() -> None:
        draw = np.random.default_rng(0)
        while not over.wait(float(draw.uniform(0.01, 0.06))):
            children = [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
            if children:
                victim = children[int(draw.integers(len(children)))]
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
            if len(killed) >= 5:
                return

    thread = threading.Thread(target=hunt)
    thread.start()
    try:
        result = run(parallel, progress=Slow())
    finally:
        over.set()
        thread.join()
    assert killed, "nobody was killed, so nothing was tested"
    if not result.failures:  # the same client's workers may have died twice
        assert_same_state(reference.snapshot, result.snapshot)
    assert all("died 2 times" in f.reason for f in result.failures)


def test_an_error_in_every_worker_ends_the_run_with_a_sentence() -> None:
    federation = marked(0)
    federation.train.arrays.x[:, 0] = MARK
    with pytest.raises(
        ClientError, match=r"round 0, client 0: failed in step 1 of 4: RuntimeError: the sample is cursed"
    ):
        run(experiment(federation=federation, model=guarded(stumble), engine="processes"))

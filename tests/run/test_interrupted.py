"""A signal ends a run between rounds, whenever it comes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.deaths import assert_same_contents, contents
from helpers.resuming import ROUNDS, work
from helpers.runs import assert_same_run
from helpers.trouble import guarded_net, with_marked_client

from fedloom.experiment import checkpoint
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.federated import run
from fedloom.experiment.rundir import RunDirectory


class Interrupts(Callback):
    """Sends a signal after a round."""

    def __init__(self, round: int, number: int = signal.SIGINT) -> None:
        self.at, self.number = round, number

    def on_round(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_between_rounds(number: int, tmp_path: Path, finished: Path) -> None:
    out = tmp_path / "stopped"
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(work(), out, checkpoint_every=100, keep=3, callbacks=[Interrupts(5, number)])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("interrupted", 5)
    assert [path.name for path in checkpoint.available(out / "checkpoint")] == ["round-000005"]
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(out))


def test_interrupted_while_a_round_is_being_recorded(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal waits until the round is on record and its states are taken over."""
    original = RunDirectory.record

    def record(self: RunDirectory, numbers: dict[str, Any], *tables: Any) -> None:
        if numbers["round"] == 5:
            os.kill(os.getpid(), signal.SIGINT)
        original(self, numbers, *tables)

    out = tmp_path / "stopped"
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "record", record)
        with pytest.raises(KeyboardInterrupt):
            run(work(), out, checkpoint_every=100, keep=3)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 5
    assert [path.name for path in checkpoint.available(out / "checkpoint")] == ["round-000005"]
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(out))


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_interrupted_in_the_middle_of_a_round(engine: str, tmp_path: Path) -> None:
    """The interrupted round leaves no trace; what came before is kept."""
    parent = os.getpid()
    calls: list[int] = []

    def act() -> None:
        calls.append(1)
        if len(calls) == 8:  # of one process: each worker counts its own
            os.kill(parent, signal.SIGINT)

    settings = {"federation": with_marked_client(2), "cohort": None, "drop_rate": 0.0}
    calm = guarded_net(lambda: None)
    full_run = run(work(model=calm, **settings), tmp_path / "whole", checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        run(work(model=guarded_net(act), engine=engine, **settings), tmp_path / "cut", checkpoint_every=100)
    checkpoints = checkpoint.available(tmp_path / "cut" / "checkpoint")
    assert len(checkpoints) == 1
    rounds = int(checkpoints[0].name.removeprefix("round-"))
    assert rounds < ROUNDS
    assert len((tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()) == rounds
    resumed = run(work(model=calm, engine=engine, **settings), tmp_path / "cut", resume=True)
    assert_same_run(full_run, resumed)


class Finalised:
    """Sends a signal from its finaliser, where Python ignores all exceptions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_ignores_in_a_finaliser_ends_the_run_before_the_round_counts(tmp_path: Path) -> None:
    calls: list[int] = []

    def act() -> None:
        calls.append(1)
        if len(calls) == 7:
            Finalised()

    settings = {"federation": with_marked_client(2), "cohort": None, "drop_rate": 0.0}
    full_run = run(work(model=guarded_net(lambda: None), **settings), tmp_path / "whole", checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        run(work(model=guarded_net(act), **settings), tmp_path / "cut", checkpoint_every=100)
    assert len(calls) > 7, "the exception was not ignored"
    rounds = len((tmp_path / "cut" / "metrics.jsonl").read_text().splitlines())
    assert rounds < ROUNDS
    assert [path.name for path in checkpoint.available(tmp_path / "cut" / "checkpoint")] == [f"round-{rounds:06d}"]
    resumed = run(work(model=guarded_net(lambda: None), **settings), tmp_path / "cut", resume=True)
    assert_same_run(full_run, resumed)

"""Where a run continues: from the named checkpoint, or from the start if none could be written."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.deaths import child
from helpers.marks import kinds
from helpers.runs import assert_same_state, experiment

from fedloom.base.errors import CheckpointError
from fedloom.experiment import checkpoint
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.federated import run
from fedloom.experiment.rundir import RunDirectory, Status


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_checkpoint_is_named_by_any_path(
    kind: Any, relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(experiment(rounds=3), "whole", checkpoint_every=1, keep=3)
    path = Path("whole") / "checkpoint" / "round-000001"
    starts = []

    class Watch:
        def __getattr__(self, name: str) -> Any:
            return (
                (lambda info: starts.append(info.start))
                if name == "on_start"
                else lambda *a: {} if "step" in name else None
            )

    resume = kind(path if relative else path.resolve())
    run(experiment(rounds=3), "whole", resume=resume, checkpoint_every=1, keep=3, callbacks=[Watch()])
    assert starts == [1]


@pytest.mark.parametrize("name", kinds())
def test_more_rounds_later_are_as_many_at_once_or_refused(name: str, tmp_path: Path) -> None:
    """A method whose rounds depend on how many there are, like one with a schedule, cannot be given more of them."""
    run(experiment(name, rounds=2), tmp_path / "run")
    if experiment(name).method.needs("rounds"):
        with pytest.raises(CheckpointError, match="rounds: 2 → 3"):
            run(experiment(name, rounds=3), tmp_path / "run", resume=True)
    else:
        longer = run(experiment(name, rounds=3), tmp_path / "run", resume=True)
        assert_same_state(longer.snapshot, run(experiment(name, rounds=3)).snapshot)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    run(experiment(rounds=1), tmp_path / "run")
    with pytest.raises(CheckpointError, match="round-000009 is not a checkpoint of"):
        run(experiment(rounds=2), tmp_path / "run", resume=str(tmp_path / "run/checkpoint/round-000009"))


def test_records_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    run(experiment(rounds=1), tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").unlink()
    (tmp_path / "run/metrics.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be read \(Is a directory\)"):
        RunDirectory(tmp_path / "run").metrics()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be read \(Is a directory\)"):
        run(experiment(rounds=2), tmp_path / "run", resume=True)


def test_a_run_whose_disk_was_full_before_its_first_checkpoint_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", full)
        warnings = run(experiment(rounds=5), tmp_path / "run", checkpoint_every=2).summary["warnings"]
    assert any("no checkpoint could be written" in line for line in warnings)
    resumed = run(experiment(rounds=5), tmp_path / "run", resume=True, checkpoint_every=2)
    full_run = run(experiment(rounds=5), tmp_path / "other", checkpoint_every=2)
    assert [record["train/loss"] for record in resumed.history] == [record["train/loss"] for record in full_run.history]
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    with pytest.raises(CheckpointError, match="has lost its checkpoints"):
        run(experiment(rounds=6), tmp_path / "run", resume=True)


@pytest.mark.parametrize("since", [2, 4])
def test_a_run_killed_while_it_goes_on_is_not_finished(since: int, tmp_path: Path) -> None:
    run(experiment("fedavg", rounds=4), tmp_path / "run", checkpoint_every=2, keep=9)
    start = tmp_path / "run/checkpoint" / f"round-{since:06d}"

    class Deadly(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    longer = experiment("fedavg", rounds=8)
    assert child(lambda: run(longer, tmp_path / "run", resume=start, callbacks=[Deadly()])) == -signal.SIGKILL
    directory = RunDirectory(tmp_path / "run")
    assert [record["round"] for record in directory.metrics()] == [*range(1, since + 2)]
    assert directory.status is Status.UNFINISHED
    run(longer, tmp_path / "run", resume=True)
    assert directory.status is Status.FINISHED

"""Client states on disk when runs are killed, files are damaged, or the disk is full."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deaths import assert_same_contents, child, go_on, kill_at
from helpers.resuming import flip, truncate
from helpers.stored import STATEFUL, files, referred, whole, work

from fedloom.core.client import State
from fedloom.core.errors import CheckpointError
from fedloom.experiment import atomic, checkpoint, store
from fedloom.experiment.callbacks import Callback, RunInfo
from fedloom.experiment.experiment import Evaluation
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.store import DiskStore


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil, stopped after round 4."""
    out = Path(shutil.copytree(stored, tmp_path / "copy"))
    checkpoint.remove(out / "checkpoint" / "round-000006")
    return out


# --- killed ----------------------------------------


LAST = Evaluation(what=("global", "clients", "average"), every=2)


@pytest.mark.parametrize("name", [*STATEFUL, "segments"])
@pytest.mark.slow
def test_killed_again_and_again_at_random_moments(name: str, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WHOLE", 0)
    made = work("scaffold", "memory", evaluation=LAST) if name == "segments" else work(name)
    run(made, memory / "whole", checkpoint_every=2, keep=2)
    out, draw, deaths = memory / "killed", np.random.default_rng(1), 0
    for _ in range(6):

        def doomed(moment: int = int(draw.integers(1, 40))) -> None:
            kill_at_step(moment)
            go_on(made, out, checkpoint_every=2, keep=2)

        status = child(doomed)
        assert status in (0, -signal.SIGKILL), "the run failed by itself"
        deaths += status != 0
    assert deaths >= 2, "it was hardly ever killed, so hardly anything was tested"
    go_on(made, out, checkpoint_every=2, keep=2)
    assert_same_contents(whole(memory / "whole"), whole(out))


def kill_at_step(number: int) -> None:
    """As ``kill_at``, where the removal of a file is a step, too."""
    seen, original = kill_at(number), os.remove

    def remove(path: Any) -> None:
        seen.append("remove")
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        original(path)

    os.remove = remove  # type: ignore[assignment]


@pytest.mark.parametrize("states", ["disk", "memory"])
@pytest.mark.slow
def test_killed_at_every_single_step_of_writing(states: str, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a state, before a rename, before a removal: whatever was the last thing done."""
    monkeypatch.setattr("fedloom.experiment.trainer.environment", dict)  # asking git takes longer than these runs
    monkeypatch.setattr(store, "WHOLE", 0)
    what = ("clients",) if states == "disk" else ("clients", "average")
    small = work("feddyn", states, rounds=3, cohort=2, drop_rate=0.0, evaluation=Evaluation(what=what))
    run(small, memory / "whole", checkpoint_every=2, keep=1)
    expected = whole(memory / "whole")
    number, ended, removed = 0, False, 0
    while not ended:
        number += 1
        out = memory / f"{number}"

        def doomed(out: Path = out, number: int = number) -> None:
            kill_at_step(number)
            run(small, out, checkpoint_every=2, keep=1)

        ended = child(doomed) == 0
        if not ended:
            removed += len(files(out) - set(expected["states"])) > 0
            go_on(small, out, checkpoint_every=2, keep=1)
        assert_same_contents(expected, whole(out))
        assert not list(out.rglob(".*")), "half-written files were left lying about"
        shutil.rmtree(out)
    assert number > 40
    assert removed > 5, "no run was killed that left files which nobody needed"


def test_files_after_the_checkpoint_are_not_believed(stored: Path, copy: Path) -> None:
    """A killed run may have got further, and somebody may have altered what it wrote there."""
    held = set().union(*map(referred, checkpoint.available(copy / "checkpoint")))
    later = files(copy) - held
    assert later
    for name in later:
        (copy / "clients" / name).write_bytes(b"nonsense")
    (copy / "clients" / ".0-000005.safetensors.part").write_bytes(b"half")
    checks: list[set[str]] = []

    class Looks(Callback):
        def on_start(self, run: RunInfo) -> None:
            checks.append(files(copy))

    run(work(), copy, resume=True, checkpoint_every=2, keep=3, callbacks=[Looks()])
    assert checks == [held]
    assert_same_contents(whole(stored), whole(copy))


def test_killed_before_the_first_checkpoint(tmp_path: Path, stored: Path) -> None:
    out = Path(shutil.copytree(stored, tmp_path / "early"))
    shutil.rmtree(out / "checkpoint")
    (out / "clients" / "5-000001.safetensors").write_bytes(b"nonsense")
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:2]))
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(whole(stored), whole(out))


# --- spoilt ----------------------------------------


@pytest.mark.parametrize(
    ("act", "what"),
    [(truncate, r"has \d+ bytes instead of \d+"), (Path.unlink, "is missing")],
    ids=["truncated", "missing"],
)
@pytest.mark.parametrize("states", ["disk", "memory"])
def test_a_missing_or_truncated_state_is_refused_at_once(
    states: str, act: Callable[[Path], None], what: str, stored: Path, copy: Path
) -> None:
    last, before = copy / "checkpoint" / "round-000004", copy / "checkpoint" / "round-000002"
    name = sorted(referred(last) - referred(before))[0]
    act(copy / "clients" / name)
    client = name.partition("-")[0]
    expected = (
        rf"^the checkpoint {last} cannot be used \(the state of client {client} {what}: {copy}/clients/{name}\); "
    )
    with pytest.raises(CheckpointError, match=expected + rf"continue from the one before it with resume={before}\.$"):
        run(work(states=states), copy, resume=True)
    run(work(), copy, resume=before, checkpoint_every=2, keep=3)
    assert_same_contents(whole(stored), whole(copy))


def test_an_altered_state_stops_the_run_and_no_checkpoint_is_made_of_it(stored: Path, copy: Path) -> None:
    last, before = (copy / "checkpoint" / f"round-00000{number}" for number in (4, 2))
    names = sorted(referred(last) - referred(before))
    for name in names:
        flip(copy / "clients" / name)
    good = {path: path.read_bytes() for path in [*before.iterdir(), *(copy / "clients" / n for n in referred(before))]}
    with pytest.raises(CheckpointError) as caught:
        run(work(), copy, resume=True, checkpoint_every=1, keep=3)
    told = {
        f"the state of client {name.partition('-')[0]} cannot be used ({copy}/clients/{name} was altered: its checksum "
        f"differs); only checkpoints from before round {int(name.partition('-')[2][:6])} do not need it."
        for name in names
    }
    assert str(caught.value) in told
    summary = json.loads((copy / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", str(caught.value))
    assert good == {path: path.read_bytes() for path in good}
    run(work(), copy, resume=before, checkpoint_every=2, keep=3)
    assert_same_contents(whole(stored), whole(copy))


def test_a_state_found_damaged_later_costs_no_checkpoint(tmp_path: Path) -> None:
    """The run is ahead of its only checkpoint, which is good, and must not replace it by one that is not."""
    out, spoilt = tmp_path / "out", []

    class Spoils(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 4:
                held = set().union(*map(referred, checkpoint.available(out / "checkpoint")))
                spoilt.extend(files(out) - held)
                for name in spoilt:
                    flip(out / "clients" / name)

    calm = replace(work().evaluation, every=1)  # evaluation looks at no state of FedDyn
    with pytest.raises(CheckpointError, match="was altered: its checksum differs"):
        run(work(evaluation=calm, cohort=6), out, checkpoint_every=3, keep=1, callbacks=[Spoils()])
    assert spoilt
    summary = json.loads((out / "summary.json").read_text())
    assert "no checkpoint could be written (the state of client" in summary["warnings"][-1]
    assert [path.name for path in checkpoint.available(out / "checkpoint")] == ["round-000003"]
    run(work(evaluation=calm, cohort=6), out, resume=True, checkpoint_every=3, keep=1)
    there = tmp_path / "whole"
    run(work(evaluation=calm, cohort=6), there, checkpoint_every=3, keep=1)
    assert_same_contents(whole(there), whole(out))


# --- disk full ----------------------------------------


@pytest.mark.parametrize("half", [False, True], ids=["at once", "after some bytes"])
def test_a_full_disk_ends_the_run_before_the_round_and_harms_nothing(
    half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second state of round 4 finds no room; a checkpoint of round 3 still does."""
    out, there, written = tmp_path / "full", tmp_path / "whole", []
    write = atomic.write_synced

    def crowded(path: Path, blob: bytes) -> None:
        if "-000004.safetensors" in path.name:
            written.append(path.name)
            if len(written) == 2:
                if half:
                    path.write_bytes(blob[:10])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    with monkeypatch.context() as patched:
        patched.setattr(atomic, "write_synced", crowded)
        with pytest.raises(CheckpointError) as caught:
            run(work(drop_rate=0.0), out, checkpoint_every=2, keep=3)
    client = written[1].removeprefix(".").partition("-")[0]
    assert str(caught.value) == (
        f"the state of client {client} cannot be written to {out}/clients/{client}-000004.safetensors "
        f"(No space left on device); make room and continue with resume={out}."
    )
    assert [path.name for path in checkpoint.available(out / "checkpoint")] == ["round-000002", "round-000003"]
    assert not [name for name in files(out) if "000004" in name], "what was written of the round was left lying about"
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    run(work(drop_rate=0.0), there, checkpoint_every=2, keep=3)
    run(work(drop_rate=0.0), out, resume=True, checkpoint_every=2, keep=3)
    found, expected = whole(out), whole(there)
    for key in ("metrics", "model", "last checkpoint", "clients", "mixing"):
        np.testing.assert_equal(found[key], expected[key])


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def states(value: float, *clients: int) -> dict[int, State]:
        return {client: {"drift": {"h": torch.full((2,), value)}} for client in clients}

    def values() -> dict[int, list[float]]:
        return {client: state["drift"]["h"].tolist() for client, state in disk}

    disk, write = DiskStore(tmp_path / "clients"), atomic.write_synced
    disk.update(states(1, 0, 1, 2))
    before = files(tmp_path)

    def crowded(path: Path, blob: bytes) -> None:
        if path.name.startswith(".2-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    with monkeypatch.context() as patched:
        patched.setattr(atomic, "write_synced", crowded)
        with pytest.raises(CheckpointError, match="the state of client 2 cannot be written"):
            disk.update(states(2, 0, 1, 2, 3))
    assert files(tmp_path) == before
    assert values() == {client: [1.0, 1.0] for client in range(3)}
    disk.update(states(2, 0, 1, 2, 3))
    assert values() == {client: [2.0, 2.0] for client in range(4)}


def test_what_a_checkpoint_was_read_from_stays_until_there_is_another(copy: Path) -> None:
    last = checkpoint.available(copy / "checkpoint")[-1]
    machine = FederatedTask(work(), copy)
    machine.restore(checkpoint.load(last))
    found = machine.state
    assert found.store.files == referred(last)
    found.store.update(dict(found.store))
    assert referred(last) <= files(copy)
    assert not found.store.files & referred(last)


def test_a_checkpoint_that_cannot_be_finished_holds_the_states_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be there although the last word about it was an error, so its files must be there, too."""
    out, failed = tmp_path / "out", []
    sync = atomic.sync_folder

    def broken(folder: Path) -> None:
        if folder.name == "checkpoint" and not failed:
            failed.append(folder)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(folder)

    monkeypatch.setattr(atomic, "sync_folder", broken)
    result = run(work(rounds=3), out, checkpoint_every=2, keep=3)
    assert failed
    assert "round 2: no checkpoint could be written" in result.summary["warnings"][0]
    for path in checkpoint.available(out / "checkpoint"):
        assert referred(path) <= files(out)

"""Large client states and last models in memory: successive checkpoints share the files that have not changed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.runs import assert_same_run, assert_same_state
from helpers.stored import STATEFUL, files, referred
from helpers.stored import work as stored_work

from fedloom.core.client import State
from fedloom.core.errors import CheckpointError
from fedloom.experiment import atomic, checkpoint, store
from fedloom.experiment.experiment import Evaluation, Experiment
from fedloom.experiment.federated import run
from fedloom.experiment.segments import SPARE, Segments
from fedloom.experiment.store import MemoryStore

LAST = Evaluation(what=("global", "average"), every=2)


def work(name: str, states: str, rounds: int = 6) -> Experiment:
    """A small experiment that keeps client states and last models."""
    return stored_work(name, states, rounds=rounds, evaluation=LAST)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All states and models count as large."""
    monkeypatch.setattr(store, "WHOLE", 0)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """An undisturbed run."""
    run(work("scaffold", "memory"), tmp_path / "finished", checkpoint_every=2, keep=3)
    return tmp_path / "finished"


def states(value: float, *clients: int, size: int = 1000) -> dict[int, State]:
    return {client: {"drift": {"h": torch.full((size,), value)}} for client in clients}


@pytest.mark.parametrize("name", [*STATEFUL, "apfl", "fedhen"])
def test_a_run_that_is_continued_has_the_bits_of_one_that_is_not(name: str, tmp_path: Path) -> None:
    expected = run(work(name, "memory"))
    run(work(name, "memory", rounds=4), tmp_path / "out", checkpoint_every=1)
    kinds = {path.partition("-")[0] for path in files(tmp_path / "out")}
    assert kinds == {"states", "models"} - ({"states"} if name == "fedhen" else set()), "all was in the checkpoints"
    found = run(work(name, "memory"), tmp_path / "out", resume=True, checkpoint_every=2)
    assert isinstance(found.snapshot.store, MemoryStore)
    assert_same_run(expected, found)
    assert_same_state(expected.snapshot, found.snapshot)


def test_every_kept_checkpoint_can_be_continued_and_needs_all_files_there_are(finished: Path, tmp_path: Path) -> None:
    expected = run(work("scaffold", "memory"))
    kept = checkpoint.available(finished / "checkpoint")
    assert len(kept) == 3
    assert files(finished) == set().union(*map(referred, kept))
    for path in kept:
        out = Path(shutil.copytree(finished, tmp_path / path.name))
        found = run(work("scaffold", "memory"), out, resume=out / "checkpoint" / path.name, checkpoint_every=2, keep=3)
        assert_same_state(expected.snapshot, found.snapshot)
        assert files(out) == set().union(*map(referred, checkpoint.available(out / "checkpoint")))


def test_a_run_may_change_between_files_of_one_state_and_of_many(tmp_path: Path) -> None:
    expected = run(work("scaffold", "memory", rounds=8))
    for rounds, kind in [(2, "memory"), (4, "disk"), (6, "memory"), (8, "disk")]:
        found = run(work("scaffold", kind, rounds=rounds), tmp_path / "out", resume=rounds > 2, checkpoint_every=2)
    assert_same_run(expected, found)
    assert_same_state(expected.snapshot, found.snapshot)


def test_a_checkpoint_writes_only_what_has_changed(tmp_path: Path) -> None:
    held = MemoryStore(tmp_path)
    held.update(states(0, *range(10)))
    held.saved()
    size = (tmp_path / "states-000001.safetensors").stat().st_size
    held.update(states(1, 3))
    held.saved()
    assert (tmp_path / "states-000002.safetensors").stat().st_size < size / 9
    before = held.files
    held.saved()
    assert held.files == before, "nothing has changed"


def test_what_is_out_of_date_never_takes_more_room_than_said(tmp_path: Path) -> None:
    segments, now = Segments(tmp_path), states(0, *range(8))
    segments.add(1, now, now.keys())
    live = sum(state["drift"]["h"].nbytes for state in now.values())
    for round in range(2, 40):
        now |= states(round, round % 8, (3 * round) % 8)
        index = segments.add(round, now, {round % 8, (3 * round) % 8})
        assert sum(segment.bytes for segment in segments.made.values()) < SPARE * live + 1000 * len(segments.made)
        found, read = Segments.read(tmp_path, index, "cpu")
        assert found.place == segments.place
        assert {c: s["drift"]["h"][0].item() for c, s in read.items()} == {
            c: s["drift"]["h"][0].item() for c, s in now.items()
        }


def test_last_models_may_become_large_and_small_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, whole = run(work("fedavg", "memory", rounds=8)), []
    for rounds, limit in [(2, 10**9), (4, 0), (6, 10**9), (8, 0)]:
        monkeypatch.setattr(store, "WHOLE", limit)
        found = run(work("fedavg", "memory", rounds=rounds), tmp_path / "out", resume=rounds > 2, keep=1)
        (last,) = checkpoint.available(tmp_path / "out" / "checkpoint")
        whole.append(len(checkpoint.read(last).tensors["average"]) > 1)  # the models beside their sum
        assert files(tmp_path / "out") == referred(last)
    assert whole == [True, False, True, False]
    assert_same_run(expected, found)


@pytest.mark.parametrize("kind", ["states", "models"])
@pytest.mark.parametrize("how", ["missing", "cut", "altered"])
def test_a_damaged_segment_is_refused_and_the_checkpoint_before_it_named(how: str, kind: str, finished: Path) -> None:
    last, *_, first = reversed(checkpoint.available(finished / "checkpoint"))
    before = checkpoint.available(finished / "checkpoint")[-2]
    assert referred(last) != referred(first)
    path = finished / "clients" / max(name for name in referred(last) if name.startswith(kind))
    blob = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(blob[:-1] if how == "cut" else blob[:-1] + bytes([blob[-1] ^ 1]))
    with pytest.raises(CheckpointError) as caught:
        run(work("scaffold", "memory"), finished, resume=True)
    assert str(caught.value).startswith(f"the checkpoint {last} cannot be used (")
    assert f"continue from the one before it with resume={before}." in str(caught.value)


@pytest.mark.parametrize("kind", ["states", "models"])
def test_a_full_disk_costs_a_checkpoint_and_no_state(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, write = run(work("scaffold", "memory")), atomic.write_synced

    def crowded(path: Path, blob: bytes) -> None:
        if path.name == f".{kind}-000004.safetensors.part":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    monkeypatch.setattr(atomic, "write_synced", crowded)
    found = run(work("scaffold", "memory"), tmp_path / "out", checkpoint_every=2, keep=3)
    assert any("round 4: no checkpoint could be written (No space left" in text for text in found.summary["warnings"])
    assert [path.name for path in checkpoint.available(tmp_path / "out" / "checkpoint")] == [
        "round-000002", "round-000006",
    ]  # fmt: skip
    again = run(work("scaffold", "memory"), tmp_path / "out", resume=True)
    assert_same_state(expected.snapshot, again.snapshot)

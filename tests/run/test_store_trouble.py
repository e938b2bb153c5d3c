"""Client states on disk when runs are killed, files are damaged, or the disk is full."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deaths import assert_same_contents, child, die_at, dies_at, go_on
from helpers.forging import forge_checkpoint
from helpers.marks import kinds
from helpers.resuming import flip, truncate
from helpers.runs import assert_same_run, assert_same_state
from helpers.stored import STATEFUL, files, full_contents, places, referenced_files, work

from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.experiment import atomic, checkpoint, federated, store
from fedloom.experiment.callbacks import Callback, RunInfo
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.store import StateFolder, StateStore
from fedloom.rounds.exchange import State

LAST = Evaluation(what=("global", "clients", "average"), every=2)
CLIENTS = Evaluation(what=("global", "clients"), every=2)


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """On disk means that every state is written in its round, and read when it is needed."""
    monkeypatch.setattr(store, "ROOM", 0)


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil, stopped after round 4."""
    out = Path(shutil.copytree(stored, tmp_path / "copy"))
    checkpoint.remove(out / "checkpoint" / "round-000006")
    return out


# --- killed ----------------------------------------


@pytest.mark.parametrize(
    ("name", "states", "room", "evaluation"),
    [
        *((name, "disk", 0, CLIENTS) for name in STATEFUL),
        *(("scaffold", "disk", room, LAST) for room in (0, 700, 64 << 20)),
        ("scaffold", "memory", 0, LAST),
    ],
)
@pytest.mark.exhaustive
def test_killed_again_and_again_at_random_moments(
    name: str, states: str, room: float, evaluation: Evaluation, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ROOM", room)
    setup = work(name, states, evaluation=evaluation)
    run(setup, memory / "whole", checkpoint_every=2, keep=2)
    out, draw, deaths = memory / "killed", np.random.default_rng(1), 0
    for _ in range(6):

        def run_until_killed(moment: int = int(draw.integers(1, 40))) -> None:
            die_at(moment)
            go_on(setup, out, checkpoint_every=2, keep=2)

        status = child(run_until_killed)
        assert status in (0, -signal.SIGKILL), "the run failed by itself"
        deaths += status != 0
    assert deaths >= 2, "it was hardly ever killed, so hardly anything was tested"
    go_on(setup, out, checkpoint_every=2, keep=2)
    assert_same_contents(full_contents(memory / "whole"), full_contents(out))


@pytest.mark.parametrize(("room", "every"), kinds([(0, 12), (0, 1), (200, 1), (float("inf"), 1)], [(0, 12)]))
def test_killed_at_every_single_step_of_writing(
    room: float, every: int, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file, before a rename, before a removal: whatever was the last thing done."""
    monkeypatch.setattr("fedloom.experiment.trainer.environment", dict)  # asking git takes longer than these runs
    monkeypatch.setattr(store, "ROOM", room)
    what = ("clients", "average")
    small = work("feddyn", "disk", rounds=4, cohort=2, drop_rate=0.0, evaluation=Evaluation(what=what))
    run(small, memory / "whole", checkpoint_every=2, keep=1)
    expected = full_contents(memory / "whole")
    removed = 0
    for number in count(1, every):
        out = memory / f"{number}"
        if not dies_at(number, lambda out=out: run(small, out, checkpoint_every=2, keep=1)):
            break
        removed += len(files(out) - set(expected["states"])) > 0
        go_on(small, out, checkpoint_every=2, keep=1)
        assert_same_contents(expected, full_contents(out))
        assert not list(out.rglob(".*")), "half-written files were left lying about"
        shutil.rmtree(out)
    assert number > 30
    assert removed > 4 / every, "no run was killed that left files which nobody needed"


def test_files_after_the_checkpoint_are_not_believed(stored: Path, copy: Path) -> None:
    """A killed run may have got further, and somebody may have altered what it wrote there."""
    needs = set().union(*map(referenced_files, checkpoint.available(copy / "checkpoint")))
    later = files(copy) - needs
    assert later
    for name in later:
        (copy / name).write_bytes(b"nonsense")
    (copy / "clients" / ".000005-0123456789ab.safetensors.there-7.part").write_bytes(b"half")
    checks: list[set[str]] = []

    class Looks(Callback):
        def on_start(self, run: RunInfo) -> None:
            checks.append(files(copy))

    run(work(), copy, resume=True, checkpoint_every=2, keep=3, callbacks=[Looks()])
    assert checks == [needs]
    assert_same_contents(full_contents(stored), full_contents(copy))


def test_killed_before_the_first_checkpoint(tmp_path: Path, stored: Path) -> None:
    out = Path(shutil.copytree(stored, tmp_path / "early"))
    shutil.rmtree(out / "checkpoint")
    (out / "clients" / "000001-0123456789ab.safetensors").write_bytes(b"nonsense")
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:2]))
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(full_contents(stored), full_contents(out))


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
    name = sorted(referenced_files(last) - referenced_files(before))[0]
    act(copy / name)
    reason = f"{copy}/{name}, with states of clients, {what}"
    expected = rf"^the checkpoint {last} cannot be used \({reason}\); continue from the one before it with "
    with pytest.raises(CheckpointError, match=expected + rf"resume={before}\.$"):
        run(work(states=states), copy, resume=True)
    run(work(), copy, resume=before, checkpoint_every=2, keep=3)
    assert_same_contents(full_contents(stored), full_contents(copy))


@pytest.mark.parametrize("kind", ["clients", "models"])
@pytest.mark.parametrize("how", ["missing", "cut", "altered"])
def test_a_file_that_is_read_at_once_is_checked_at_once(how: str, kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    setup = work("scaffold", "memory", evaluation=LAST)
    expected = run(setup, out, checkpoint_every=2, keep=3)
    before, last = checkpoint.available(out / "checkpoint")[-2:]
    path = out / max(name for name in referenced_files(last) if name.startswith(kind))
    blob = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(blob[:-1] if how == "cut" else blob[:-1] + bytes([blob[-1] ^ 1]))
    with pytest.raises(CheckpointError) as error:
        run(setup, out, resume=True)
    assert str(error.value).startswith(f"the checkpoint {last} cannot be used (")
    assert ("the last model" if kind == "models" else "the state") in str(error.value) or how != "altered"
    assert f"continue from the one before it with resume={before}." in str(error.value)
    assert_same_run(expected, run(setup, out, resume=before, checkpoint_every=2, keep=3))


def spoil(path: Path, client: int) -> None:
    """Change one bit of a client's state in a file."""
    blob = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(blob[:8], "little")
    entries = json.loads(blob[8:length])
    begin = next(entry["data_offsets"][0] for key, entry in entries.items() if key.startswith(f"{client}/"))
    blob[length + begin] ^= 1
    path.write_bytes(bytes(blob))


KEPT = ["scaffold", "superfed_mm", "ditto", "apfl", "fedphp", "fedala", "fedper", "fedbn", "pfedme", "moon"]
SERVED = ["feddyn", "sgp", "cfl", "pfedgraph"]
STATES = [*((name, "server") for name in SERVED), *((name, "clients") for name in KEPT), ("feddyn", "models"),
          ("gossip", "rows")]  # fmt: skip
FORMS = {"cut": lambda v: v[:-1], "axis": lambda v: v[None], "type": lambda v: v.half()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "kind"), STATES)
def test_states_of_another_form_are_refused_though_their_checksums_are_right(
    name: str, kind: str, form: str, tmp_path: Path
) -> None:
    setup = work(name, "memory", evaluation=LAST if kind == "models" else CLIENTS)
    run(setup, tmp_path, checkpoint_every=2)

    def change(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: FORMS[form](v.double()) if v.ndim and "|" in k else v for k, v in state.items()}

    forge_checkpoint(tmp_path, kind, change)
    for use in (lambda: run(setup, tmp_path, resume=True), lambda: federated.load(setup, tmp_path)):
        with pytest.raises(CheckpointError, match=r"has .* in another shape or type than this method and"):
            use()


@pytest.mark.parametrize(
    ("name", "kind", "key", "problem"),
    [
        ("superfed_mm", "clients", "personal|buffers", "lacks"),
        ("superfed_mm", "clients", "personal|private", "has personal.buffers"),
        ("gossip", "rows", "model|theta", "lacks"),
        ("gossip", "server", "models|mean", "lacks"),
        ("gossip", "server", "model|theta", "has"),
        ("scaffold", "clients", "personal|private", "has"),
        ("scaffold", "server", "shared", "shared"),
    ],
)
def test_what_the_library_keeps_is_in_a_state_where_it_belongs(
    name: str, kind: str, key: str, problem: str, tmp_path: Path
) -> None:
    setup = work(name, "memory", evaluation=CLIENTS)
    run(setup, tmp_path, checkpoint_every=2)

    def change(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: v for k, v in state.items() if k != key} if key in state else {**state, key: torch.ones(2)}

    forge_checkpoint(tmp_path, kind, change)
    with pytest.raises(CheckpointError, match=rf"cannot be used \(.*{problem}"):
        federated.load(setup, tmp_path)


@pytest.mark.parametrize("key", ["known", "prototypes"])
def test_what_a_part_cannot_go_on_from_is_told_of_the_checkpoint(key: str, tmp_path: Path) -> None:
    """States that begin without a form show in the next round."""
    setup = work("fedproto", "memory", rounds=4)
    run(setup, tmp_path, checkpoint_every=2)
    checkpoint.remove(tmp_path / "checkpoint" / "round-000004")
    path = forge_checkpoint(tmp_path, "server", lambda state: {k: v for k, v in state.items() if not k.endswith(key)})
    with pytest.raises(CheckpointError, match=rf"the checkpoint {path} cannot be used \('{key}'\); there is none"):
        run(setup, tmp_path, resume=True)


def test_a_state_of_which_a_client_has_no_model_is_told(tmp_path: Path) -> None:
    setup = work("fedala", "memory")
    run(setup, tmp_path, checkpoint_every=2)
    forge_checkpoint(tmp_path, "clients", lambda state: {k: v for k, v in state.items() if k != "personal|weights"})
    with pytest.raises(ConfigError, match="makes no model of a client's state: KeyError: 'weights'"):
        federated.load(setup, tmp_path).evaluate()


def test_an_altered_state_stops_the_run_and_no_checkpoint_is_made_of_it(stored: Path, copy: Path) -> None:
    last, before = (copy / "checkpoint" / f"round-00000{number}" for number in (4, 2))
    names = sorted(referenced_files(last) - referenced_files(before))
    for client, name in places(last).items():
        if name in names:
            spoil(copy / name, client)
    good = {
        path: path.read_bytes() for path in [*before.iterdir(), *(copy / name for name in referenced_files(before))]
    }
    with pytest.raises(CheckpointError) as error:
        run(work(), copy, resume=True, checkpoint_every=1, keep=3)
    sentences = {
        f"the state of client {client} cannot be used ({copy}/{name} was altered: its checksum differs); only "
        f"checkpoints from before round {int(name.removeprefix('clients/')[:6])} do not need it."
        for client, name in places(last).items()
        if name in names
    }
    assert str(error.value) in sentences
    summary = json.loads((copy / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", str(error.value))
    assert good == {path: path.read_bytes() for path in good}
    run(work(), copy, resume=before, checkpoint_every=2, keep=3)
    assert_same_contents(full_contents(stored), full_contents(copy))


def test_a_state_found_damaged_later_costs_no_checkpoint(tmp_path: Path) -> None:
    """The run is ahead of its only checkpoint, which is good, and must not replace it by one that is not."""
    out, spoilt = tmp_path / "out", []

    class Spoils(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 4:
                needs = set().union(*map(referenced_files, checkpoint.available(out / "checkpoint")))
                spoilt.extend(files(out) - needs)
                for name in spoilt:
                    flip(out / name)

    calm = replace(work().evaluation, every=1)  # evaluation looks at no state of FedDyn
    with pytest.raises(CheckpointError, match="was altered: its checksum differs"):
        run(work(evaluation=calm, cohort=6), out, checkpoint_every=3, keep=1, callbacks=[Spoils()])
    assert spoilt
    summary = json.loads((out / "summary.json").read_text())
    assert "no checkpoint could be written (the state of client" in summary["warnings"][-1]
    assert [path.name for path in checkpoint.available(out / "checkpoint")] == ["round-000003"]
    run(work(evaluation=calm, cohort=6), out, resume=True, checkpoint_every=3, keep=1)
    undisturbed = tmp_path / "whole"
    run(work(evaluation=calm, cohort=6), undisturbed, checkpoint_every=3, keep=1)
    assert_same_contents(full_contents(undisturbed), full_contents(out))


# --- disk full ----------------------------------------


def crowd(patched: pytest.MonkeyPatch, at: Callable[[Path], bool], half: bool = False) -> list[str]:
    """No room for some files; returns the names of those that found none."""
    refused, write = [], atomic.write_synced

    def write_unless_full(path: Path, blob: bytes) -> None:
        if at(path):
            refused.append(path.name)
            if half:
                path.write_bytes(blob[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    patched.setattr(atomic, "write_synced", write_unless_full)
    return refused


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("kind", ["clients", "models"])
@pytest.mark.parametrize("half", [False, True], ids=["at once", "after some bytes"])
def test_a_full_disk_ends_the_run_before_the_round_and_harms_nothing(
    half: bool, kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the files of round 4 finds no room; a checkpoint of round 3 still does."""
    out, undisturbed, names = tmp_path / "full", tmp_path / "whole", list[str]()
    setup = work("scaffold", drop_rate=0.0, evaluation=LAST)
    monkeypatch.setattr(store, "MOST", 1)

    def nth(path: Path) -> bool:
        if path.parent.name != kind or not path.name.startswith(".000004-"):
            return False
        names.append(path.name)
        return len(names) == number

    with monkeypatch.context() as patched:
        refused = crowd(patched, nth, half)
        with pytest.raises(CheckpointError) as error:
            run(setup, out, checkpoint_every=2, keep=3)
    assert len(refused) == 1, "there was room"
    noun = "states" if kind == "clients" else "last models"
    assert str(error.value) == (
        f"the {noun} of round 4 cannot be written to {out}/{kind} (No space left on device); make room and continue "
        f"with resume={out}."
    )
    paths = checkpoint.available(out / "checkpoint")
    assert [path.name for path in paths] == ["round-000002", "round-000003"]
    assert files(out) == set().union(*map(referenced_files, paths)), (
        "what was written of the round was left lying about"
    )
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    expected = run(setup, undisturbed, checkpoint_every=2, keep=3)
    result = run(setup, out, resume=True, checkpoint_every=2, keep=3)
    assert_same_run(expected, result)
    assert_same_state(expected.snapshot, result.snapshot)


@pytest.mark.parametrize("states", ["disk", "memory"])
@pytest.mark.parametrize("kind", ["clients", "models"])
def test_a_full_disk_costs_a_checkpoint_as_long_as_states_can_wait(
    kind: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ROOM", 1 << 20)
    setup = work("scaffold", states, evaluation=LAST)
    expected = run(work("scaffold", "memory", evaluation=LAST))
    with monkeypatch.context() as patched:
        refused = crowd(patched, lambda path: path.parent.name == kind and path.name.startswith(".000004-"))
        result = run(setup, tmp_path / "out", checkpoint_every=2, keep=3)
    assert len(refused) == 1, "there was room"
    assert any("round 4: no checkpoint could be written (No space left" in text for text in result.summary["warnings"])
    paths = checkpoint.available(tmp_path / "out" / "checkpoint")
    assert [path.name for path in paths] == ["round-000002", "round-000006"]
    assert files(tmp_path / "out") == set().union(*map(referenced_files, paths))
    assert_same_state(expected.snapshot, result.snapshot)
    resumed = run(setup, tmp_path / "out", resume=True)
    assert_same_state(expected.snapshot, resumed.snapshot)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("room", [0, 20])
def test_a_full_disk_leaves_the_store_as_it_was(
    room: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states(value: float, *clients: int) -> dict[int, State]:
        return {client: {"drift": {"h": torch.full((2,), value)}} for client in clients}

    def values() -> dict[int, list[float]]:
        return {client: state["drift"]["h"].tolist() for client, state in disk}

    monkeypatch.setattr(store, "MOST", 1)
    disk = StateStore(StateFolder(tmp_path / "clients"), room)
    disk.put(states(1.0, 0, 1, 2), 1)
    disk.save(1)
    disk.put(states(1.0, 2), 2)
    before, paths = files(tmp_path), list[Path]()

    def nth(path: Path) -> bool:
        paths.append(path)
        return len(paths) == number + 1

    with monkeypatch.context() as patched:
        refused = crowd(patched, nth)
        with pytest.raises(CheckpointError, match=rf"the states of round 3 cannot be written to {disk.folder.path} "):  # type: ignore[union-attr]
            disk.put(states(2.0, 0, 1, 2, 3), 3)
    assert refused
    assert files(tmp_path) == before
    assert values() == {client: [1.0, 1.0] for client in range(3)}
    disk.put(states(2.0, 0, 1, 2, 3), 3)
    assert values() == {client: [2.0, 2.0] for client in range(4)}


def test_what_a_checkpoint_was_read_from_stays_until_there_is_another(copy: Path) -> None:
    last = checkpoint.available(copy / "checkpoint")[-1]
    task = FederatedTask(work(), copy)
    task.restore(checkpoint.load(last))
    states = task.state.store
    assert {f"clients/{name}" for name in states.files} == referenced_files(last)
    states.put(dict(states), 5)
    assert referenced_files(last) < files(copy)
    assert not {f"clients/{name}" for name in states.files} & referenced_files(last)


def test_a_state_found_damaged_when_files_are_emptied_costs_no_checkpoint(tmp_path: Path) -> None:
    """Other states of its file are out of date, so that it is read to be moved, while a checkpoint is written."""
    disk = StateStore(StateFolder(tmp_path / "clients"), 1000)
    tree: dict[str, dict[str, Any]] = {"drift": {"h": torch.randn(400)}}
    disk.put(dict.fromkeys(range(3), tree), 1)
    disk.save(1)
    (name,) = files(tmp_path)
    flip(tmp_path / name)
    disk.put({0: {"drift": {"h": torch.ones(10)}}, 1: {"drift": {"h": torch.ones(10)}}}, 2)
    for _ in range(2):
        with pytest.raises(OSError, match="the state of client 2 cannot be used"):
            disk.save(2)
    assert files(tmp_path) == {name}


@pytest.mark.parametrize("kind", ["clients", "models"])
def test_a_checkpoint_that_cannot_be_read_keeps_every_file(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(work("scaffold", rounds=4, evaluation=LAST), out, checkpoint_every=2, keep=2)
    (out / kind / "000002-0123456789ab.safetensors").write_bytes(b"somebody's")
    index = out / "checkpoint" / "round-000002" / f"{kind}.safetensors"
    blob = index.read_bytes()
    truncate(index)
    before = files(out, kind)
    run(work("scaffold", rounds=5, evaluation=LAST), out, resume=True, checkpoint_every=9, keep=9)
    assert before <= files(out, kind)
    index.write_bytes(blob)
    run(work("scaffold", rounds=6, evaluation=LAST), out, resume=True, checkpoint_every=9, keep=9)
    assert files(out) == set().union(*map(referenced_files, checkpoint.available(out / "checkpoint")))


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
        assert referenced_files(path) <= files(out)

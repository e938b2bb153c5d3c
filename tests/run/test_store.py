"""Client states on disk: the same bits as in memory, only the files needed, and constant memory."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deaths import assert_same_contents, child, contents
from helpers.federations import SIZES, classes
from helpers.networks import Split, fixed
from helpers.runs import QUIET, assert_same_run, assert_same_state, experiment, leaves
from helpers.stored import ROUNDS, STATEFUL, files, numbers, referred, whole, work
from torch import nn

from fedloom.config import build, resolve
from fedloom.core.errors import ConfigError
from fedloom.experiment import checkpoint, store
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.disk_store import LRUCache
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.report.groups import group
from fedloom.experiment.report.rundata import load
from fedloom.experiment.store import DiskStore, MemoryStore, make_store, state_bytes
from fedloom.experiment.trainer import Trainer
from fedloom.methods import methods

# --- the same bits ----------------------------------------


@pytest.mark.parametrize("cached", [False, True], ids=["always read", "cached"])
@pytest.mark.parametrize("name", [*STATEFUL, "apfl", "fedper", "feddc"])
def test_disk_and_memory_give_the_same_bits(
    name: str, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        monkeypatch.setattr(LRUCache, "add", lambda self, client, state: None)
    there, here = tmp_path / "disk", tmp_path / "memory"
    a = run(work(name), there, checkpoint_every=2)
    b = run(work(name, "memory"), here, checkpoint_every=2)
    assert isinstance(a.snapshot.store, DiskStore)
    assert isinstance(b.snapshot.store, MemoryStore)
    assert len(a.snapshot.store) > 3
    assert_same_run(a, b)
    np.testing.assert_equal(numbers(there), numbers(here))


def test_disk_and_memory_give_the_same_bits_with_worker_processes(tmp_path: Path) -> None:
    two = {"engine": "processes", "engine_settings": {"workers": 2}}
    assert_same_run(run(work("scaffold", **two), tmp_path / "out"), run(work("scaffold", "memory")))


def test_methods_without_states_leave_no_files(tmp_path: Path) -> None:
    run(work("fedadam"), tmp_path / "out", checkpoint_every=1)
    assert files(tmp_path / "out") == set()
    run(work("fedadam", rounds=ROUNDS + 1), tmp_path / "out", resume=True)


def test_a_checkpoint_names_the_states_and_does_not_copy_them(stored: Path) -> None:
    found = contents(stored)
    mixing = found["mixing"]
    rows = list(zip(mixing["round"], mixing["client"], mixing["p"], strict=True))
    for path in checkpoint.available(stored / "checkpoint"):
        reached = int(path.name.removeprefix("round-"))
        failed = any(record["failures"] for record in found["metrics"] if record["round"] <= reached)
        expected = {"server.safetensors", "index.safetensors", "manifest.json"}
        assert {file.name for file in path.iterdir()} == expected | ({"failures.safetensors"} if failed else set())
        index = checkpoint.load_tensors((path / "index.safetensors").read_bytes())
        last = {client: number for number, client, p in rows if p and number <= reached}  # when it took part last
        assert dict(zip(index["client"].tolist(), index["round"].tolist(), strict=True)) == last
        assert sum(t.nbytes for t in index.values()) == len(last) * (3 * 8 + 32)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "drift": {"h": torch.randn(5, dtype=torch.float64), "new": torch.ones((), dtype=torch.float64)},
        "objective.a": {"k": torch.arange(6).reshape(2, 3).T, "half": torch.randn(3).bfloat16()},
    }
    disk = DiskStore(tmp_path / "clients")
    disk.update({7: state, 8: {}})
    assert disk.get(8) is None
    found = disk.get(7)
    assert found is not None
    assert found.keys() == state.keys()
    for place, tree in state.items():
        assert found[place].keys() == tree.keys()
        for name, value in tree.items():
            assert found[place][name].dtype == value.dtype
            assert torch.equal(found[place][name], value)
    assert disk.get(7) is found, "what was read last is in memory"
    disk.update({7: {"drift": {"h": torch.zeros(1)}}})
    assert torch.equal(dict(disk)[7]["drift"]["h"], torch.zeros(1))
    again = disk.get(7)
    assert again is not None
    assert torch.equal(again["drift"]["h"], torch.zeros(1)), "an old state came out of the cache"
    assert files(tmp_path) == {"7-000002.safetensors"}, "nobody needs the first one any more"


def test_the_cache_is_bounded_in_bytes_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "clients", cache=3 * 8)
    disk.update({client: {"drift": {"h": torch.full((1,), client, dtype=torch.float64)}} for client in range(6)})
    disk.update({9: {"drift": {"h": torch.zeros(4, dtype=torch.float64)}}})
    for client in (0, 1, 2, 0, 3):
        disk.get(client)
    kept = disk._recent
    assert (list(kept._states), kept.used) == ([2, 0, 3], 24)
    disk.get(9)  # larger than all there is room for
    assert (list(kept._states), kept.used) == ([], 0)
    disk.get(4)
    disk.update({4: {"drift": {"h": torch.ones(1, dtype=torch.float64)}}})
    assert (list(kept._states), kept.used) == ([], 0)


# --- removed ----------------------------------------


@pytest.mark.parametrize(("every", "keep"), [(1, 1), (2, 2), (3, 1)])
def test_what_kept_checkpoints_need_is_kept_and_nothing_else(every: int, keep: int, tmp_path: Path) -> None:
    out, sizes = tmp_path / "out", []

    class Looks(Callback):
        """The checkpoint of this round is not written yet."""

        def on_round(self, record: Mapping[str, Any]) -> None:
            found = checkpoint.available(out / "checkpoint")
            held = set().union(*map(referred, found))
            assert held <= files(out)
            sizes.append(len(files(out)))
            present = len(SIZES)
            assert len(files(out) - held) <= present, "superseded states that no checkpoint needs were left"

    run(work(rounds=9), out, checkpoint_every=every, keep=keep, callbacks=[Looks()])
    found = checkpoint.available(out / "checkpoint")
    assert len(found) == keep
    assert files(out) == set().union(*map(referred, found))
    assert max(sizes) <= (keep + 1) * len(SIZES)


def test_every_kept_checkpoint_can_be_continued(stored: Path, tmp_path: Path) -> None:
    for path in checkpoint.available(stored / "checkpoint"):
        out = Path(shutil.copytree(stored, tmp_path / path.name))
        run(work(), out, resume=out / "checkpoint" / path.name, checkpoint_every=2, keep=3)
        assert_same_contents(whole(stored), whole(out))


# --- chosen ----------------------------------------


def test_a_run_may_change_between_memory_and_disk(tmp_path: Path) -> None:
    expected = run(work("scaffold", "memory", rounds=8), tmp_path / "whole", checkpoint_every=2)
    out, kinds = tmp_path / "out", []
    for rounds, states in [(2, "disk"), (4, "memory"), (6, "disk"), (8, "memory")]:
        found = run(work("scaffold", states, rounds=rounds), out, resume=rounds > 2, checkpoint_every=2, keep=2)
        kinds.append(type(found.snapshot.store).__name__)
        kept = checkpoint.available(out / "checkpoint")
        held = set().union(*(referred(path) for path in kept if (path / "index.safetensors").exists()))
        assert held == files(out), "what the kept checkpoints on disk refer to, and nothing else"
    assert kinds == ["DiskStore", "MemoryStore", "DiskStore", "MemoryStore"]
    assert_same_run(expected, found)
    np.testing.assert_equal(numbers(out), numbers(tmp_path / "whole"))
    last = run(work("scaffold", "disk", rounds=8), out, resume=True)
    assert_same_state(expected.snapshot, last.snapshot)


def test_a_continued_configuration_may_change_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tiny = ["method=feddyn", "rounds=1", "clients=4", "model=logistic", "device=cpu"]
    first = run(build(resolve(tiny)), out)
    assert isinstance(first.snapshot.store, MemoryStore), "a small run needs no disk"
    config = resolve([f"resume={out}", "client_state=disk", "rounds=2"])
    assert isinstance(run(build(config), out, resume=True).snapshot.store, DiskStore)
    other = tmp_path / "other"
    run(build(resolve([*tiny, "rounds=2", "client_state=disk", "seed=1"])), other)
    assert len(group([load(out), load(other)])) == 1, "where states live sets runs apart in a report"


@pytest.mark.parametrize("name", [name for name in methods.names() if name != "centralised"])
def test_what_a_client_keeps_is_foreseen(name: str) -> None:
    machine = FederatedTask(work(name, "memory", rounds=1, drop_rate=0.0, evaluation=QUIET))
    foreseen = state_bytes(machine.plan, machine.state.server)
    result = machine.result(Trainer(machine).run())
    sizes = {client: 0 for client, _ in result.snapshot.store}
    for path, value in leaves(result.snapshot):
        if path.startswith("client "):
            sizes[int(path.split()[1].partition("/")[0])] += value.nbytes
    assert max(sizes.values(), default=0) == foreseen


def test_large_states_go_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FederatedTask(work("ditto", "memory"))
    plan, server = machine.plan, machine.state.server
    size = state_bytes(plan, server)
    assert size == 8 * (plan.layout.size + len(plan.method.personal.extras))
    monkeypatch.setattr(store, "LIMIT", 6 * size)
    for states, clients, folder, kind in [
        ("auto", 6, tmp_path, MemoryStore),
        ("auto", 7, tmp_path, DiskStore),
        ("memory", 7, tmp_path, MemoryStore),
        ("disk", 1, tmp_path, DiskStore),
        ("auto", 6, None, MemoryStore),
        ("memory", 7, None, MemoryStore),
    ]:
        found, warnings = make_store(states, plan, server, clients, folder)
        assert (type(found), warnings) == (kind, [])
    assert not list(tmp_path.iterdir()), "nothing is written before there is something to write"
    found, warnings = make_store("auto", plan, server, 7 * 10**9, None)
    assert type(found) is MemoryStore
    assert warnings == [
        f"client states may take {7 * size:.1f} GB of memory (7000000000 clients, {size / 1e6:.1f} MB each); "
        "in a run directory they would be kept on disk."
    ]


def test_only_clients_that_can_take_part_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FederatedTask(work("ditto", "memory"))
    monkeypatch.setattr(store, "LIMIT", 4 * state_bytes(machine.plan, machine.state.server))
    for rounds, kind in [(2, MemoryStore), (3, DiskStore)]:  # cohorts of two out of six clients
        found = FederatedTask(work("ditto", "auto", rounds=rounds, cohort=2), tmp_path / "out")
        assert type(found.state.store) is kind
    result = run(work("ditto", "auto", rounds=3, cohort=2))
    assert result.summary["warnings"][0].startswith("client states may take")
    result = run(work("ditto", "auto", rounds=3, cohort=2), tmp_path / "out")
    assert type(result.snapshot.store) is DiskStore
    assert result.summary["warnings"] == []


def test_impossible_choices_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^unknown client_state 'disc'; did you mean 'disk'\? There are: auto, disk, mem"
    ):
        work(states="disc")
    with pytest.raises(ConfigError, match=r"^client_state=disk needs a run directory; name one with out="):
        run(work())


# --- memory ----------------------------------------


def wide(width: int = 16_000) -> nn.Module:
    """A megabyte of parameters in float64."""
    return fixed(Split(nn.Sequential(nn.Linear(4, width), nn.Tanh()), width))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
def test_memory_does_not_grow_with_the_clients_that_have_taken_part(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedDyn keeps a vector a client: 10 new clients a round, of a megabyte each."""
    monkeypatch.setattr(DiskStore.__init__, "__defaults__", ("cpu", 4 << 20))
    federation = classes((2,) * 400, seed=0)

    class Looks(Callback):
        def __init__(self) -> None:
            self.held: list[float] = []

        def on_round(self, record: Mapping[str, Any]) -> None:
            # What the heap gives back is up to the heap: count tensors (but fake ones of other tests have no memory).
            plain = (torch.Tensor, torch.nn.Parameter)
            alive = (o.untyped_storage() for o in gc.get_objects() if type(o) in plain)
            self.held.append(sum({s.data_ptr(): s.nbytes() for s in alive}.values()) / 1e6)

    def growth(states: str) -> float:
        diary = memory / states

        def go() -> None:
            looks = Looks()
            settings = {"federation": federation, "model": wide, "cohort": 10, "rounds": 20, "evaluation": QUIET}
            work = experiment("feddyn", client_state=states, **settings)
            result = run(work, memory / f"{states}-run", callbacks=[looks], checkpoint_every=100)
            assert len(result.snapshot.store) > 150
            diary.write_text(json.dumps(looks.held))

        assert child(go) == 0
        held = json.loads(diary.read_text())
        return held[-1] - held[4]

    assert growth("disk") < 30
    assert growth("memory") > 90

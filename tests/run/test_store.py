"""Client states on disk: the same bits as in memory, only the files needed, and constant memory."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deaths import assert_same_contents, child, contents, indices
from helpers.federations import SIZES, classes
from helpers.marks import kinds
from helpers.networks import BodyAndHead, fixed
from helpers.runs import QUIET, assert_same_run, assert_same_state, experiment, leaves
from helpers.stored import ROUNDS, STATEFUL, files, full_contents, numbers, places, referenced_files, work
from torch import nn

from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.config import build, resolve
from fedloom.experiment import checkpoint, federated, store
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.store import DTYPES, LostState, StateFolder, StateStore, make_store, state_bytes
from fedloom.experiment.trainer import Trainer
from fedloom.methods import methods
from fedloom.rounds.exchange import State
from fedloom_apps.report.groups import group
from fedloom_apps.report.runs import load

INF = float("inf")


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """On disk means that every state is written in its round, and read when it is needed."""
    monkeypatch.setattr(store, "ROOM", 0)


def states(value: float, *clients: int, size: int = 1000) -> dict[int, State]:
    return {client: {"drift": {"h": torch.full((size,), float(value))}} for client in clients}


def values(disk: StateStore) -> dict[int, float]:
    return {client: state["drift"]["h"][0].item() for client, state in disk}


def on_disk(folder: Path, room: float = 0) -> StateStore:
    return StateStore(StateFolder(folder / "clients"), room)


# --- the same bits ----------------------------------------


@pytest.mark.parametrize("room", [0, 600, INF])
@pytest.mark.parametrize("name", [*STATEFUL, "apfl", "fedper", "feddc"])
def test_disk_and_memory_give_the_same_bits(
    name: str, room: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ROOM", room)
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    a = run(work(name), disk, checkpoint_every=2)
    b = run(work(name, "memory"), memory, checkpoint_every=2)
    assert (a.snapshot.store.room, b.snapshot.store.room) == (room, INF)
    assert a.snapshot.store._used <= room
    assert len(a.snapshot.store) > 3
    assert_same_run(a, b)
    np.testing.assert_equal(numbers(disk), numbers(memory))


def test_disk_and_memory_give_the_same_bits_with_worker_processes(tmp_path: Path) -> None:
    two = {"engine": "processes", "engine_settings": {"workers": 2}}
    assert_same_run(run(work("scaffold", **two), tmp_path / "out"), run(work("scaffold", "memory")))


def test_methods_without_states_leave_no_files(tmp_path: Path) -> None:
    run(work("fedadam"), tmp_path / "out", checkpoint_every=1)
    assert files(tmp_path / "out") == set()
    run(work("fedadam", rounds=ROUNDS + 1), tmp_path / "out", resume=True)


def test_a_checkpoint_names_the_states_and_does_not_copy_them(stored: Path) -> None:
    tables = contents(stored)
    mixing = tables["mixing"]
    rows = list(zip(mixing["round"], mixing["client"], mixing["p"], strict=True))
    for path in checkpoint.available(stored / "checkpoint"):
        reached = int(path.name.removeprefix("round-"))
        failed = any(record["failures"] for record in tables["metrics"] if record["round"] <= reached)
        expected = {"server.safetensors", "clients.safetensors", "manifest.json"}
        assert {file.name for file in path.iterdir()} == expected | ({"failures.safetensors"} if failed else set())
        last = {client: number for number, client, p in rows if p and number <= reached}  # when it took part last
        files_by_client = places(path)
        assert files_by_client.keys() == last.keys()
        for client, name in files_by_client.items():
            assert last[client] <= int(name.removeprefix("clients/")[:6]) <= reached
        index, names = indices(path)["clients"]
        tensors = checkpoint.load_tensors((path / "clients.safetensors").read_bytes())
        assert sum(t.nbytes for t in tensors.values()) == len(index["client"]) * 20 + len(names) * 48


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "drift": {"h": torch.randn(5, dtype=torch.float64), "new": torch.ones((), dtype=torch.float64)},
        "objective.a": {"k": torch.arange(6).reshape(2, 3).T, "half": torch.randn(3).bfloat16(), "none": torch.ones(0)},
        "every": {name: torch.tensor([0, 1, 1]).to(kind) for name, kind in DTYPES.items()},
    }
    disk = on_disk(tmp_path)
    disk.put({7: state, 8: {}}, 1)
    assert disk.get(8) is None
    result = disk.get(7)
    assert result is not None
    assert result.keys() == state.keys()
    for place, tree in state.items():
        assert result[place].keys() == tree.keys()
        for name, value in tree.items():
            assert result[place][name].dtype == value.dtype
            assert torch.equal(result[place][name], value)
    assert disk.get(7) is not result, "there is no room"
    disk.put({7: {"drift": {"h": torch.zeros(1)}}}, 2)
    assert torch.equal(dict(disk)[7]["drift"]["h"], torch.zeros(1))
    (only,) = files(tmp_path)
    assert only.startswith("clients/000002-"), "nobody needs the first one any more"


def test_what_is_in_memory_is_bounded_in_bytes_and_is_what_was_used_last(tmp_path: Path) -> None:
    disk = on_disk(tmp_path, 3 * 8)
    disk.put({client: {"drift": {"h": torch.full((1,), client, dtype=torch.float64)}} for client in range(6)}, 1)
    disk.put({9: {"drift": {"h": torch.zeros(4, dtype=torch.float64)}}}, 2)
    for client in (0, 1, 2, 0, 3):
        disk.get(client)
    assert (list(disk._trees), disk._used) == ([2, 0, 3], 24)
    disk.get(9)  # larger than all there is room for
    assert (list(disk._trees), disk._used) == ([], 0)
    disk.get(4)
    disk.put({4: {"drift": {"h": torch.ones(1, dtype=torch.float64)}}}, 3)
    assert disk._new == {4}, "there is room for it to wait"
    assert len(files(tmp_path)) == 2
    assert dict(disk)[4]["drift"]["h"] == 1
    assert list(disk._trees) == [4], "to look at all of them is to use none"


def test_a_state_in_a_bounded_store_keeps_no_larger_tensor_in_memory(tmp_path: Path) -> None:
    rows = torch.randn(100, 5)
    for room, copied in ((10_000, True), (INF, False)):
        disk = on_disk(tmp_path, room)
        disk.put({client: {"drift": {"h": row}} for client, row in enumerate(rows[:3])}, 1)
        assert all((state["drift"]["h"].untyped_storage().nbytes() == 20) == copied for _, state in disk)


# --- files ----------------------------------------


def test_the_same_content_has_the_same_name_and_another_never_takes_its_place(tmp_path: Path) -> None:
    blobs = []
    for value in (1.0, 2.0, 1.0):
        on_disk(tmp_path).put(states(value, 3, 1), 5)
        blobs.append({name: (tmp_path / name).read_bytes() for name in files(tmp_path)})
    first, second, third = blobs
    assert len(first) == 1
    assert len(second) == 2
    assert first.items() <= second.items()
    assert third == second


def test_a_file_holds_no_more_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST", 4)
    disk = on_disk(tmp_path)
    disk.put(states(1, *range(10)), 1)
    assert len(files(tmp_path)) == 3
    monkeypatch.setattr(store, "LARGEST", 9000)
    disk.put(states(2, *range(10, 16)), 2)
    assert len(files(tmp_path)) == 6
    assert values(disk) == {client: 1.0 if client < 10 else 2.0 for client in range(16)}


def test_a_checkpoint_writes_only_what_has_changed(tmp_path: Path) -> None:
    disk = on_disk(tmp_path, INF)
    disk.put(states(0, *range(10)), 1)
    disk.save(1)
    (first,) = files(tmp_path)
    disk.put(states(1, 3), 2)
    disk.save(2)
    (second,) = files(tmp_path) - {first}
    assert (tmp_path / second).stat().st_size < (tmp_path / first).stat().st_size / 9
    before = disk.files
    disk.save(3)
    assert disk.files == before, "nothing has changed"


@pytest.mark.parametrize("room", [0, 9000, INF])
def test_what_is_out_of_date_takes_less_room_than_what_is_not(room: float, tmp_path: Path) -> None:
    disk, now = on_disk(tmp_path, room), dict.fromkeys(range(8), 0.0)
    disk.put(states(0, *range(8)), 1)
    largest = 0
    for round in range(2, 40):
        changed = {round % 8, (3 * round) % 8}
        now |= dict.fromkeys(changed, float(round))
        disk.put(states(round, *changed), round)
        index = disk.save(round)
        disk.pin(disk.files)
        assert files(tmp_path) >= {f"clients/{name}" for name in disk.files}
        largest = max(largest, sum(file.bytes for file in disk._live))
        assert sum(file.bytes for file in disk._live) <= store.SPARE * sum(disk._live.values())
        assert values(disk) == now == values(on_disk(tmp_path, room).open(index))
    assert largest < 2 * 8 * 4200
    assert len(disk.files) <= 8


def test_files_are_emptied_a_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Much that is out of date at once is not written all at once."""
    monkeypatch.setattr(store, "LARGEST", 12_500)
    disk = on_disk(tmp_path)
    for at in range(0, 30, 3):
        disk.put(states(1, at, at + 1, at + 2), at + 1)
    before = disk.files
    for client in range(30):
        if client % 3:
            disk._refer(client, None)  # as if they were no longer needed
    disk.save(40)
    assert len(before - disk.files) == 3
    assert disk.files - before
    assert set(values(disk).values()) == {1.0}


def test_each_state_is_read_and_verified_alone(tmp_path: Path) -> None:
    disk = on_disk(tmp_path)
    disk.put({client: {"drift": {"h": torch.randn(50)}} for client in range(5)}, 1)
    (name,) = files(tmp_path)
    blob, index = (tmp_path / name).read_bytes(), disk.save(1)
    length = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:length])
    begin, end = header["3/drift|h"]["data_offsets"]
    (tmp_path / name).write_bytes(blob[: length + begin] + bytes(end - begin) + blob[length + end :])
    for client in (0, 1, 2, 4):
        assert disk.get(client) is not None
    sentence = (
        rf"^the state of client 3 cannot be used \({tmp_path}/{name} was altered: its checksum differs\); only check"
    )
    with pytest.raises(LostState, match=sentence + "points from before round 1 do not need it"):
        disk.get(3)
    with pytest.raises(OSError, match="the state of client 3 cannot be used"):
        disk.save(2)
    with pytest.raises(ValueError, match="the state of client 3 cannot be used"):
        on_disk(tmp_path, INF).open(index)


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    disk = on_disk(tmp_path)
    disk.put({client: {"drift": {"h": torch.randn(9)}, "personal": {"b": torch.ones(3)}} for client in range(4)}, 1)
    index, (name,) = disk.save(1), files(tmp_path)
    blob = (tmp_path / name).read_bytes()
    for bit in draw.choice(8 * len(blob), 400, replace=False).tolist():
        spoilt = bytearray(blob)
        spoilt[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(bytes(spoilt))
        store._header.cache_clear()
        with pytest.raises(ValueError, match="was altered"):
            on_disk(tmp_path, INF).open(index)
        with pytest.raises((ValueError, LostState), match="was altered"):  # a header at once
            dict(on_disk(tmp_path).open(index))


@pytest.mark.parametrize("is_read", [False, True])
def test_a_file_that_is_cut_while_it_is_used_ends_nothing_but_the_run(is_read: bool, tmp_path: Path) -> None:
    """A file in mapped memory would end the process."""
    disk = on_disk(tmp_path)
    disk.put(states(1, *range(4), size=10_000), 1)
    if is_read:
        disk.get(0)
    (name,) = files(tmp_path)
    for size in (100_000, 500, 3, 0):
        os.truncate(tmp_path / name, size)
        if not is_read:
            store._header.cache_clear()
        with pytest.raises(LostState, match="the state of client 3 cannot be used"):
            disk.get(3)
    (tmp_path / name).unlink()
    with pytest.raises(LostState, match=r"cannot be read on .*: No such file"):
        disk.get(3)


# --- written by workers ----------------------------------------


def test_what_a_worker_writes_counts_once_it_is_adopted(tmp_path: Path) -> None:
    disk = on_disk(tmp_path, 10_000)
    disk.put(states(0, 1, 2), 1)
    disk.save(1)
    disk.get(1)
    block = pickle.loads(pickle.dumps(disk.block([1, 2, 3], 2)))  # sent to a worker
    assert set(block.load("cpu")) == {1, 2}
    results = pickle.loads(pickle.dumps(block.save(states(5, 1, 3) | {2: {}})))
    assert not any(results.values()), "a state itself was sent"
    assert values(disk) == {1: 0.0, 2: 0.0}, "it counts before its time"
    block.save(states(6, 1, 3))  # by a worker that was thought to be dead
    disk.put(results, 2)
    assert values(disk) == {1: 5.0, 2: 0.0, 3: 5.0}
    assert values(on_disk(tmp_path).open(disk.save(2))) == values(disk)


def test_what_is_sent_to_and_from_workers_is_small(tmp_path: Path) -> None:
    disk = on_disk(tmp_path)
    disk.put(states(0, *range(100)), 1)
    block = disk.block(range(100), 2)
    for message in (block, block.save(states(1, *range(100)))):
        assert len(pickle.dumps(message)) < 60 * 100 + 500


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    disk = on_disk(tmp_path / "here")
    disk.put(states(0, 1), 1)
    block = disk.block([1], 2)
    elsewhere = replace(block, folder=StateFolder(tmp_path / "there" / "clients"))
    for act in (lambda: elsewhere.load("cpu"), lambda: elsewhere.save(states(1, 1))):
        with pytest.raises(CheckpointError, match=r"does not see the folder .*; client_state=shared needs a run dir"):
            act()
    elsewhere.folder.path.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"written on .*, is not in .*; client_state=shared needs a run dir"):
        disk.put(elsewhere.save(states(1, 1)), 2)
    assert values(disk) == {1: 0.0}


# --- removed ----------------------------------------


@pytest.mark.parametrize(("every", "keep"), [(1, 1), (2, 2), (3, 1)])
def test_what_kept_checkpoints_need_is_kept_and_nothing_else(every: int, keep: int, tmp_path: Path) -> None:
    out, sizes = tmp_path / "out", []

    class Looks(Callback):
        """The checkpoint of this round is not written yet."""

        def on_round(self, record: Mapping[str, Any]) -> None:
            paths = checkpoint.available(out / "checkpoint")
            needs = set().union(*map(referenced_files, paths))
            assert needs <= files(out)
            sizes.append(len(files(out)))
            present = len(SIZES)
            assert len(files(out) - needs) <= present, "superseded files that no checkpoint needs were left"

    run(work(rounds=9), out, checkpoint_every=every, keep=keep, callbacks=[Looks()])
    paths = checkpoint.available(out / "checkpoint")
    assert len(paths) == keep
    assert files(out) == set().union(*map(referenced_files, paths))
    assert max(sizes) <= (keep + 1) * len(SIZES)


def test_every_kept_checkpoint_can_be_continued(stored: Path, tmp_path: Path) -> None:
    for path in checkpoint.available(stored / "checkpoint"):
        out = Path(shutil.copytree(stored, tmp_path / path.name))
        run(work(), out, resume=out / "checkpoint" / path.name, checkpoint_every=2, keep=3)
        assert_same_contents(full_contents(stored), full_contents(out))


# --- chosen ----------------------------------------


def test_a_run_may_change_between_memory_and_disk(tmp_path: Path) -> None:
    expected = run(work("scaffold", "memory", rounds=8), tmp_path / "whole", checkpoint_every=2)
    out, rooms = tmp_path / "out", []
    for rounds, choice in [(2, "disk"), (4, "memory"), (6, "disk"), (8, "memory")]:
        result = run(work("scaffold", choice, rounds=rounds), out, resume=rounds > 2, checkpoint_every=2, keep=2)
        rooms.append(result.snapshot.store.room)
        paths = checkpoint.available(out / "checkpoint")
        assert files(out) == set().union(*map(referenced_files, paths)), (
            "what the kept checkpoints refer to, and nothing else"
        )
    assert rooms == [0, INF, 0, INF]
    assert_same_run(expected, result)
    np.testing.assert_equal(numbers(out), numbers(tmp_path / "whole"))
    last = run(work("scaffold", "disk", rounds=8), out, resume=True)
    assert_same_state(expected.snapshot, last.snapshot)


def test_a_continued_configuration_may_change_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tiny = ["method=feddyn", "rounds=1", "clients=4", "model=logistic", "device=cpu"]
    first = run(build(resolve(tiny)), out)
    assert first.snapshot.store.room == INF, "a small run needs no disk"
    config = resolve([f"resume={out}", "client_state=disk", "rounds=2"])
    assert run(build(config), out, resume=True).snapshot.store.room == 0
    second = tmp_path / "other"
    run(build(resolve([*tiny, "rounds=2", "client_state=disk", "seed=1"])), second)
    assert len(group([load(out), load(second)])) == 1, "where states live sets runs apart in a report"


# ``init_client`` does not know how many classes or clients there are: feddistill keeps C² numbers more, apple K
OTHERS = ("centralised", "feddistill", "apple")


@pytest.mark.parametrize("name", kinds(name for name in methods.names() if name not in OTHERS))
def test_what_a_client_keeps_is_foreseen(name: str) -> None:
    task = FederatedTask(work(name, "memory", rounds=1, drop_rate=0.0, evaluation=QUIET))
    foreseen = state_bytes(task.plan, task.state.server)
    result = task.result(Trainer(task).run())
    sizes = {client: 0 for client, _ in result.snapshot.store}
    for path, value in leaves(result.snapshot):
        if path.startswith("client "):
            sizes[int(path.split()[1].partition("/")[0])] += value.nbytes
    assert max(sizes.values(), default=0) == foreseen


def test_large_states_go_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = FederatedTask(work("ditto", "memory"))
    size = state_bytes(task.plan, task.state.server)
    assert size == 8 * (task.plan.layout.size + len(task.plan.method.extras))
    monkeypatch.setattr(store, "LIMIT", 6 * size)
    for choice, clients, folder, room in [
        ("auto", 6, tmp_path, INF),
        ("auto", 7, tmp_path, 0),
        ("memory", 7, tmp_path, INF),
        ("disk", 1, tmp_path, 0),
        ("shared", 1, tmp_path, 0),
        ("auto", 7, None, INF),
        ("memory", 7, None, INF),
    ]:
        assert make_store(choice, clients * size, folder, "clients").room == room
    assert not list(tmp_path.iterdir()), "nothing is written before there is something to write"


def test_only_clients_that_can_take_part_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = FederatedTask(work("ditto", "memory"))
    size = state_bytes(task.plan, task.state.server)
    monkeypatch.setattr(store, "LIMIT", 4 * size)
    monkeypatch.setattr(federated, "LIMIT", 4 * size)
    for rounds, room in [(2, INF), (3, 0)]:  # cohorts of two out of six clients
        candidate = FederatedTask(work("ditto", "auto", rounds=rounds, cohort=2), tmp_path / "out")
        assert candidate.state.store.room == room
    result = run(work("ditto", "auto", rounds=3, cohort=2))
    assert result.summary["warnings"] == [
        f"client states may take {6 * size / 1e9:.1f} GB of memory (6 clients, {size / 1e6:.1f} MB each); "
        "in a run directory they would be kept on disk."
    ]
    result = run(work("ditto", "auto", rounds=3, cohort=2), tmp_path / "out")
    assert result.snapshot.store.room == 0
    assert result.summary["warnings"] == []


def test_impossible_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^client_state is 'disc'; did you mean 'disk'\? There are: auto, disk, mem"):
        work(states="disc")
    with pytest.raises(ConfigError, match=r"^client_state=disk needs a run directory; name one with out="):
        run(work())


# --- memory ----------------------------------------


def wide(width: int = 16_000) -> nn.Module:
    """A megabyte of parameters in float64."""
    return fixed(BodyAndHead(nn.Sequential(nn.Linear(4, width), nn.Tanh()), width))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_clients_that_have_taken_part(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedDyn keeps a vector a client: 10 new clients a round, of a megabyte each."""
    monkeypatch.setattr(store, "ROOM", 4 << 20)
    federation = classes((2,) * 400, seed=0)

    class Looks(Callback):
        def __init__(self) -> None:
            self.megabytes: list[float] = []

        def on_round(self, record: Mapping[str, Any]) -> None:
            # What the heap gives back is up to the heap: count tensors (but fake ones of other tests have no memory).
            plain = (torch.Tensor, torch.nn.Parameter)
            alive = (o.untyped_storage() for o in gc.get_objects() if type(o) in plain)
            self.megabytes.append(sum({s.data_ptr(): s.nbytes() for s in alive}.values()) / 1e6)

    def growth(choice: str) -> float:
        diary = memory / choice

        def go() -> None:
            looks = Looks()
            settings = {"federation": federation, "model": wide, "cohort": 10, "rounds": 20, "evaluation": QUIET}
            work = experiment("feddyn", client_state=choice, **settings)
            result = run(work, memory / f"{choice}-run", callbacks=[looks], checkpoint_every=100)
            assert len(result.snapshot.store) > 150
            diary.write_text(json.dumps(looks.megabytes))

        assert child(go) == 0
        megabytes = json.loads(diary.read_text())
        return megabytes[-1] - megabytes[4]

    assert growth("disk") < 30
    assert growth("memory") > 90


def test_states_that_take_no_bytes_are_refused(tmp_path: Path) -> None:
    disk = on_disk(tmp_path)
    disk.put({0: {"drift": {"h": torch.ones(2)}}}, 1)
    index = disk.save(1)
    with pytest.raises(ValueError, match="states of clients take no bytes"):
        disk.open({**index, "size": 0 * index["size"]})

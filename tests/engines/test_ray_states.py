"""Client states in files that the workers of a Ray cluster read and write themselves; only where Ray is installed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.deaths import states_in
from helpers.federations import classes
from helpers.runs import assert_same_run, experiment, go
from helpers.stored import files, places, referenced_files
from helpers.trouble import MARK, guarded_net, with_marked_client, worker_death
from safetensors.torch import load

from fedloom.base.errors import CheckpointError
from fedloom.experiment import checkpoint, store
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.store import BlockFiles, StateFolder, StateStore
from fedloom.rounds.exchange import State

pytest.importorskip("ray")
pytestmark = pytest.mark.extra("ray")
MANY = tuple(2 + i % 3 for i in range(60))
BESIDES = 16_000  # bytes to the driver of a round of 30 clients, sums aside: results without states


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver keeps no state in memory."""
    monkeypatch.setattr(store, "ROOM", 0)


def shared_experiment(method: str, gather: str = "fold", **changes: Any) -> Any:
    return experiment(method, engine="ray", engine_settings={"gather": gather}, client_state="shared", **changes)


@pytest.mark.usefixtures("lent")
@pytest.mark.parametrize("gather", ["fold", "chain"])
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("scaffold", {"federation": classes(MANY), "cohort": 30, "compute": "batched"}),
        ("feddyn", {"federation": classes(MANY), "cohort": 30, "drop_rate": 0.2}),
        ("superfed_mm", {"evaluation": Evaluation(what=("clients",))}),
        ("aaggff_d", {}),
    ],
)
def test_states_never_pass_the_driver_and_bits_are_those_of_serial(
    method: str, changes: dict[str, Any], gather: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = go(method, **changes)
    task = FederatedTask.step
    sizes = []

    def step(self: FederatedTask) -> Any:
        before = self.engine.received  # type: ignore[union-attr]
        result = task(self)
        assert not any(result.report.states.values()), "a state came to the driver"
        sizes.append(self.engine.received - before)  # type: ignore[union-attr]
        return result

    original = StateStore._write
    monkeypatch.setattr(FederatedTask, "step", step)

    def write(self: StateStore, waiting: Mapping[int, State], *rest: Any) -> Any:
        assert not waiting, "the driver writes a state"
        return original(self, waiting, *rest)

    monkeypatch.setattr(StateStore, "_write", write)
    assert_same_run(reference, run(shared_experiment(method, gather, **changes), tmp_path / "out", checkpoint_every=2))
    if gather == "chain":
        assert max(sizes) < BESIDES
    paths = checkpoint.available(tmp_path / "out" / "checkpoint")
    assert files(tmp_path / "out") == set().union(*(referenced_files(path) for path in paths)), "nothing else is left"


@pytest.mark.usefixtures("lent")
def test_a_block_whose_worker_died_is_done_again(tmp_path: Path) -> None:
    """Its first half may have written some states; those of the second time count."""
    diary = tmp_path / "deaths"
    settings = {
        "federation": with_marked_client(2, MARK, MANY),
        "model": guarded_net(worker_death(1, diary)),
        "rounds": 2,
    }
    reference = go("scaffold", **settings)
    with pytest.warns(UserWarning, match="a worker of the cluster died"):
        result = run(shared_experiment("scaffold", "chain", **settings), tmp_path / "out")
    assert diary.read_text() == "x"
    assert not result.failures
    assert_same_run(reference, result)


@pytest.mark.usefixtures("lent")
@pytest.mark.parametrize("engine", ["ray", "serial"])
def test_a_round_that_was_not_committed_leaves_no_trace(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies when all workers have written; another engine and kind of store may go on."""
    settings: dict[str, Any] = {"federation": classes(MANY), "cohort": 30, "rounds": 4}
    out, commit = tmp_path / "out", FederatedTask.commit

    class PowerCut(BaseException):
        """Nothing handles it."""

    def cut(self: FederatedTask, step: Any) -> Any:
        if self.round == 2:
            raise PowerCut
        return commit(self, step)

    monkeypatch.setattr(FederatedTask, "commit", cut)
    with pytest.raises(PowerCut):
        run(shared_experiment("scaffold", **settings), out, checkpoint_every=1, keep=1)
    new = [load((out / name).read_bytes()) for name in files(out) if name.startswith("clients/000003-")]
    assert len({key.partition("/")[0] for tensors in new for key in tensors}) == 30
    monkeypatch.setattr(FederatedTask, "commit", commit)
    on_disk = experiment("scaffold", client_state="disk", **settings)
    work = shared_experiment("scaffold", **settings) if engine == "ray" else on_disk
    assert_same_run(go("scaffold", **settings), run(work, out, resume=True, checkpoint_every=1, keep=1))
    (path,) = checkpoint.available(out / "checkpoint")
    assert files(out) == referenced_files(path)


@pytest.mark.usefixtures("lent")
def test_altered_and_missing_states_end_the_run_in_a_sentence(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"federation": classes(MANY), "rounds": 2}
    run(shared_experiment("feddyn", **settings), tmp_path / "out", checkpoint_every=1)
    path = tmp_path / "out" / places(checkpoint.available(tmp_path / "out" / "checkpoint")[-1])[7]
    blob = path.read_bytes()
    path.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    later = shared_experiment("feddyn", **settings | {"rounds": 4})
    with pytest.raises(CheckpointError, match=r"^the state of client \d+ cannot be used \(.* was altered: .* before"):
        run(later, tmp_path / "out", resume=True, checkpoint_every=1)
    assert [p.name for p in checkpoint.available(tmp_path / "out" / "checkpoint")][-1] == "round-000002"
    path.write_bytes(blob)
    assert_same_run(go("feddyn", **settings | {"rounds": 4}), run(later, tmp_path / "out", resume=True))


@pytest.mark.usefixtures("lent")
def test_a_node_that_does_not_see_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one without the folder, nor one with another folder of that name."""
    original = StateStore.block

    def elsewhere(self: StateStore, clients: Collection[int], round: int) -> BlockFiles:
        return replace(original(self, clients, round), folder=StateFolder(folder))

    monkeypatch.setattr(StateStore, "block", elsewhere)
    for name, sentence in (("missing", "does not see the folder"), ("other", "is not in .*/out-other/clients/")):
        folder = tmp_path / name
        if name == "other":
            folder.mkdir()
        with pytest.raises(CheckpointError, match=f"{sentence}.*; client_state=shared needs a run directory that all"):
            run(shared_experiment("scaffold"), tmp_path / f"out-{name}")


PROGRAM = "import sys; from fedloom.cli import main; sys.exit(main(sys.argv[1:]))"


def test_a_driver_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """With SIGKILL, in the midst of a round; the run is finished by the serial engine."""
    words = ["run", "method=scaffold", "data=digits", "rounds=8", "client_state=shared", "checkpoint.every=1", "-q"]

    def fedloom(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, stderr=subprocess.PIPE)

    lines = tmp_path / "here" / "metrics.jsonl"
    program = fedloom(*words, "engine=ray", "engine.workers=1", "out=here")
    deadline = time.monotonic() + 120
    while not (lines.exists() and lines.read_text().count("\n") >= 3):
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    program.send_signal(signal.SIGKILL)
    program.wait()
    for last in (["run", "resume=here", "engine=serial", "-q"], [*words, "engine=serial", "out=there"]):
        program = fedloom(*last)
        assert program.wait(120) == 0, program.communicate()
    here, there = (tmp_path / name for name in ("here", "there"))
    ends = [states_in(checkpoint.available(out / "checkpoint")[-1]) for out in (here, there)]
    assert ends[0] == ends[1]
    assert (here / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()

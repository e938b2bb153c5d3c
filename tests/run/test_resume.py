"""A run that was killed goes on to the same bits."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from helpers.deaths import assert_same_contents, child, contents, go_on, kill_at
from helpers.federations import classes
from helpers.networks import tanh_net
from helpers.runs import assert_same_run, experiment
from helpers.trouble import guarded, marked
from torch import nn

from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.federation import Federation, Split
from fedloom.core.local import Local
from fedloom.experiment import atomic, checkpoint
from fedloom.experiment.callbacks import Callback, RunInfo
from fedloom.experiment.experiment import Evaluation, Experiment
from fedloom.experiment.federated import run
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.summary import should_stop
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.adaptation import Maml

EVERYTHING = Evaluation(what=("global", "clients", "average"), every=2)
ROUNDS = 8


def work(name: str = "scaffold", **changes: Any) -> Experiment:
    defaults = {"rounds": ROUNDS, "cohort": 3, "drop_rate": 0.2, "evaluation": EVERYTHING, "seed": 4}
    return experiment(name, **defaults | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    run(work(), out, checkpoint_every=2, keep=3)
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def back_to(out: Path, round: int) -> Path:
    """Make a finished run one that stopped after ``round`` with that checkpoint as its newest."""
    for path in checkpoint.available(out / "checkpoint"):
        if int(path.name.removeprefix("round-")) > round:
            checkpoint.remove(path)
    (out / "summary.json").unlink()
    (out / "model.safetensors").unlink()
    return out


def keep_lines(out: Path, *numbers: int) -> None:
    """Cut the records down to the first so many, or to those of the given rounds."""
    kept = range(1, numbers[0] + 1) if len(numbers) == 1 else numbers
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[number - 1] for number in kept))


class Slow(Callback):
    """Takes its time, so that random deaths fall anywhere."""

    def on_round(self, record: Mapping[str, Any]) -> None:
        time.sleep(0.004)


# --- killed ----------------------------------------


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedadam", "fedper"])
@pytest.mark.slow
def test_killed_again_and_again_at_random_moments(name: str, memory: Path) -> None:
    run(work(name), memory / "whole", checkpoint_every=2, keep=2)
    out, draw, deaths = memory / "killed", np.random.default_rng(0), 0
    for attempt in range(60):
        limit = float(draw.uniform(0.005, 0.08)) if attempt < 12 else None
        status = child(lambda: go_on(work(name), out, checkpoint_every=2, keep=2, callbacks=[Slow()]), limit)
        assert status in (0, -signal.SIGKILL), "the run failed by itself"
        deaths += status != 0
        if status == 0:
            break
    assert deaths >= 3, "it was hardly ever killed, so hardly anything was tested"
    assert_same_contents(contents(memory / "whole"), contents(out))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: waiting for a disk hundreds of times would take a minute."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_killed_at_every_single_step_of_writing(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file, before a rename, before a removal: whatever was the last thing done."""
    monkeypatch.setattr("fedloom.experiment.trainer.environment", dict)  # asking git takes longer than these runs
    small = work("fedadam", rounds=2, evaluation=Evaluation(what=("clients", "average")))
    run(small, memory / "whole", checkpoint_every=1, keep=1)
    expected = contents(memory / "whole")
    number, ended = 0, False
    while not ended:
        number += 1
        out = memory / f"{number}"

        def doomed(out: Path = out, number: int = number) -> None:
            kill_at(number)
            run(small, out, checkpoint_every=1, keep=1)

        ended = child(doomed) == 0
        if not ended:
            go_on(small, out, checkpoint_every=1, keep=1)
        assert_same_contents(expected, contents(out))
        assert not list(out.rglob(".*")), "half-written files were left lying about"
        shutil.rmtree(out)
    assert number > 30


def test_killed_before_the_first_checkpoint(tmp_path: Path, finished: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "early"))
    shutil.rmtree(out / "checkpoint")
    back_to(out, 0)
    keep_lines(out, 2)  # the second was recorded, and then its checkpoint could not be written any more
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(out))


def test_a_half_written_record_is_forgotten(finished: Path, copy: Path) -> None:
    back_to(copy, 6)
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join(lines[:7]) + "\n" + lines[7][:20])
    run(work(), copy, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(copy))


def test_resuming_a_finished_run_changes_nothing(finished: Path, copy: Path) -> None:
    run(work(), copy, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(copy))


def test_more_rounds_and_another_engine_give_the_same_bits(finished: Path, tmp_path: Path) -> None:
    """The number of rounds and the engine are no part of what an experiment is."""
    out = tmp_path / "grown"
    run(work(rounds=3), out, checkpoint_every=2, keep=3)
    two = {"engine": "processes", "engine_settings": {"workers": 2}}
    run(work(rounds=6, **two), out, resume=True, checkpoint_every=2, keep=3)
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    grown, whole = contents(out), contents(finished)
    for key in ("model", "last checkpoint"):
        np.testing.assert_equal(grown[key], whole[key])
    # a last round is always evaluated, so rounds 3 and 6 may hold more numbers, but no others
    for a, b in zip(whole["metrics"], grown["metrics"], strict=True):
        assert a.items() <= b.items()


def test_a_compute_that_does_the_work_of_another_may_take_its_place(tmp_path: Path) -> None:
    """What cannot be batched runs live, whatever it is called, and so goes on to the same bits."""
    made = replace(make("fedavg"), adaptation=Maml())
    whole = run(experiment(made, rounds=4), tmp_path / "whole")
    run(experiment(made, rounds=2, compute="batched"), tmp_path / "parts")
    assert_same_run(whole, run(experiment(made, rounds=4), tmp_path / "parts", resume=True))


def test_a_compute_that_rounds_in_its_own_way_is_refused(tmp_path: Path) -> None:
    settings = {"model": lambda: models.make("mlp", classes=3, inputs=(4,), hidden=(5,))}
    run(experiment(rounds=1, compute="batched", **settings), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"cannot be continued: compute: batched → live\."):
        run(experiment(rounds=2, **settings), tmp_path / "out", resume=True)


def test_other_blocks_of_clients_are_refused(tmp_path: Path) -> None:
    """Their sums round differently."""
    run(experiment(rounds=1, compute="batched"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="shares: None → 1"):
        run(experiment(rounds=2, compute="batched", compute_settings={"shares": 1}), tmp_path / "out", resume=True)


def test_another_decay_of_the_averaged_model_is_refused(tmp_path: Path) -> None:
    def averaging(decay: float, rounds: int) -> Experiment:
        return experiment(rounds=rounds, evaluation=Evaluation(("global",), server_average=decay))

    run(averaging(0.5, 1), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"averaged its server model with 0.5, not 0.9; set evaluation"):
        run(averaging(0.9, 2), tmp_path / "out", resume=True)
    run(averaging(0.5, 2), tmp_path / "out", resume=True)


def test_a_method_that_depends_on_the_number_of_rounds_gets_no_more_of_them(tmp_path: Path) -> None:
    run(experiment(make("fedssa", steps=2), rounds=2), tmp_path / "out")
    with pytest.raises(CheckpointError, match="rounds: 2 → 3"):
        run(experiment(make("fedssa", steps=2), rounds=3), tmp_path / "out", resume=True)
    fed_back = make("fedssa", steps=2, feed_back=True)
    run(experiment(fed_back, rounds=2), tmp_path / "back")
    run(experiment(fed_back, rounds=3), tmp_path / "back", resume=True)


def test_the_look_at_the_end_of_a_shorter_run_is_none_that_patience_counts(tmp_path: Path) -> None:
    patient = Evaluation(("global",), every=2, patience=1, metric="global/loss", metrics=("accuracy",))
    history = [{"round": t, "global/loss": value} for t, value in ((2, 0.5), (3, 0.6), (4, 0.4))]
    assert should_stop(history, patient) is None
    assert should_stop([*history, {"round": 6, "global/loss": 0.45}], patient) is not None


def test_other_metrics_after_resuming_leave_the_earlier_rounds_without(tmp_path: Path) -> None:
    def clients(rounds: int, *metrics: str) -> dict[str, np.ndarray]:
        evaluation = Evaluation(what=("clients",), metrics=metrics)
        run(experiment(rounds=rounds, evaluation=evaluation), tmp_path / "run", resume=rounds > 1)
        return RunDirectory(tmp_path / "run").clients()

    before, after = clients(1, "accuracy", "ece"), clients(2, "accuracy", "f1")
    first = after["round"] == 1
    assert np.array_equal(after["ece"][first], before["ece"])
    assert np.isnan(after["ece"][~first]).all()
    assert np.isnan(after["f1"][first]).all()
    assert not np.isnan(after["f1"][~first]).all()


def test_a_run_in_memory_is_the_same_run(finished: Path) -> None:
    a, b = run(work()), run(work())
    assert_same_run(a, b)
    stored = contents(finished)["metrics"]
    assert [{k: v for k, v in r.items() if k != "seconds"} for r in a.history] == stored


def test_early_stopping_stops_where_it_would_have(tmp_path: Path) -> None:
    patient = Evaluation(what=("global",), patience=2, metric="global/loss")
    stops = work("fedavg", rounds=30, evaluation=patient, local=Local(epochs=1, batch_size=4, lr=0.1))
    whole = run(stops, tmp_path / "whole", checkpoint_every=1)
    assert 3 < len(whole.history) < 30
    assert (whole.summary["status"], whole.summary["reason"]) == ("stopped", "no improvement in 2 evaluations")
    out = tmp_path / "twice"
    run(work("fedavg", rounds=3, evaluation=patient, local=Local(epochs=1, batch_size=4, lr=0.1)), out)
    again = run(stops, out, resume=True)
    assert_same_run(whole, again)


# --- interrupted ----------------------------------------


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
    """The round that was broken off leaves no trace; what came before is kept."""
    ours = os.getpid()
    calls: list[int] = []

    def act() -> None:
        calls.append(1)
        if len(calls) == 8:  # of one process: each worker counts its own
            os.kill(ours, signal.SIGINT)

    settings = {"federation": marked(2), "cohort": None, "drop_rate": 0.0}
    calm = guarded(lambda: None)
    whole = run(work(model=calm, **settings), tmp_path / "whole", checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        run(work(model=guarded(act), engine=engine, **settings), tmp_path / "cut", checkpoint_every=100)
    found = checkpoint.available(tmp_path / "cut" / "checkpoint")
    assert len(found) == 1
    rounds = int(found[0].name.removeprefix("round-"))
    assert rounds < ROUNDS
    assert len((tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()) == rounds
    resumed = run(work(model=calm, engine=engine, **settings), tmp_path / "cut", resume=True)
    assert_same_run(whole, resumed)


# --- refused ----------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[-3] ^= 1
    path.write_bytes(bytes(blob))


def miscount(path: Path) -> None:
    """Change a number, and nothing about the form."""
    text = path.read_text()
    assert '"round": 8' in text
    path.write_text(text.replace('"round": 8', '"round": 7', 1))


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{f"{file} {act.__name__}": (file, act) for act in (truncate, flip, Path.unlink)
       for file in ("server.safetensors", "clients.safetensors", "average.safetensors", "manifest.json")},
    "manifest.json miscount": ("manifest.json", miscount),
}  # fmt: skip


@pytest.mark.parametrize(("file", "act"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(
    file: str, act: Callable[[Path], None], finished: Path, copy: Path
) -> None:
    last, before = copy / "checkpoint" / "round-000008", copy / "checkpoint" / "round-000006"
    act(last / file)
    with pytest.raises(CheckpointError) as caught:
        run(work(), copy, resume=True)
    text = str(caught.value)
    assert text.startswith(f"the checkpoint {last} cannot be used (")
    assert f"; continue from the one before it with resume={before}." in text
    assert "\n" not in text
    run(work(), copy, resume=before, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(copy))


def test_a_damaged_checkpoint_without_another_before_it(tmp_path: Path) -> None:
    run(work(rounds=1), tmp_path / "one")
    truncate(tmp_path / "one" / "checkpoint" / "round-000001" / "server.safetensors")
    with pytest.raises(CheckpointError, match="there is none before it"):
        run(work(), tmp_path / "one", resume=True)


def test_the_one_before_is_found_by_number_not_by_letters(tmp_path: Path, finished: Path) -> None:
    folder = tmp_path / "checkpoint"
    for name in ("round-999999", "round-1000000"):
        shutil.copytree(finished / "checkpoint" / "round-000008", folder / name)
    assert [path.name for path in checkpoint.available(folder)] == ["round-999999", "round-1000000"]
    (folder / "round-1000000" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"resume=.*round-999999"):
        checkpoint.load(folder / "round-1000000")


def shifted() -> Federation:
    """The same labels at the same clients, with other inputs."""
    federation = classes()
    arrays = replace(federation.train.arrays, x=federation.train.arrays.x + 1)
    return replace(federation, train=Split(arrays, federation.train.index))


def relu_net() -> nn.Module:
    """The same parameters in another network."""
    net = tanh_net()
    net.body[1] = nn.ReLU()  # type: ignore[index, operator]
    return net


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"local": Local(epochs=2, batch_size=4, lr=0.3, lr_decay=0.9)}, r"local\.lr: 0\.2 → 0\.3"),
    "seed": ({"seed": 5}, "seed: 4 → 5"),
    "cohort": ({"cohort": 4}, r"sampling\.cohort: 3 → 4"),
    "drop rate": ({"drop_rate": 0.0}, r"sampling\.drop_rate: 0\.2 → 0\.0"),
    "dtype": ({"dtype": "float32"}, "dtype: float64 → float32"),
    "data": ({"federation": classes(seed=1)}, r"federation\.\w+: \w+ → \w+"),
    "inputs": ({"federation": shifted()}, r"federation\.digest: \w+ → \w+"),
    "start": ({"model": lambda: tanh_net(seed=1)}, r"model\.digest: \w+ → \w+"),
    "layers": ({"model": relu_net}, r"model\.digest: \w+ → \w+"),
    "model": ({"model": lambda: tanh_net(width=4)}, r"model\.parameters: 27 → 35"),
}


@pytest.mark.parametrize(("change", "sentence"), CHANGES.values(), ids=CHANGES)
def test_resuming_another_experiment_shows_the_difference(change: dict[str, Any], sentence: str, copy: Path) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=rf"holds another experiment, so it cannot be continued: .*{sentence}"):
        run(work(**change), copy, resume=True)
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_resuming_another_method_or_setting_shows_the_difference(tmp_path: Path) -> None:
    run(work("feddyn", rounds=1), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"method\.drift: FedDynDrift\(alpha=0\.01.* → FedDynDrift\(alpha=0\.1"):
        run(experiment(make("feddyn", alpha=0.1), rounds=2, cohort=3), tmp_path / "a", resume=True)
    with pytest.raises(CheckpointError, match=r"method\.name: feddyn → fedavg"):
        run(work("fedavg"), tmp_path / "a", resume=True)


def test_an_existing_run_is_not_overwritten(copy: Path) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=rf"{copy} exists already; choose another out=, or .* resume={copy}\."):
        run(work(), copy)
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_a_path_that_is_a_file_and_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="exists already"):
        run(work(), tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        run(work(), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"not a run directory: it has no config\.yaml"):
        run(work(), tmp_path / "other", resume=True)
    good = tmp_path / "good"
    run(work(rounds=1), good)
    with pytest.raises(CheckpointError, match="is not a checkpoint of"):
        run(work(), good, resume=tmp_path / "other")


def test_nothing_is_written_for_settings_that_an_engine_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers is -1"):
        run(work(engine="processes", engine_settings={"workers": -1}), tmp_path / "out")
    with pytest.raises(ConfigError, match="unknown engine"):
        run(work(engine="quantum"), tmp_path / "out")
    with pytest.raises(ConfigError, match="at least 1"):
        run(work(), tmp_path / "out", checkpoint_every=0)
    assert not (tmp_path / "out").exists()


def drop(name: str) -> Callable[[Path], None]:
    return lambda out: (out / name).unlink()


def spoil(name: str) -> Callable[[Path], None]:
    return lambda out: (out / name).write_bytes(b"nonsense")


def contradict(out: Path) -> None:
    record = json.loads((out / "metrics.jsonl").read_text().splitlines()[2])
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record | {"train/loss": 0.0}) + "\n")


LOST: dict[str, tuple[Callable[[Path], None], str]] = {
    "all records": (drop("metrics.jsonl"), r"metrics\.jsonl lacks rounds 1 to 8, which it needs"),
    "the first records": (lambda out: keep_lines(out, 5, 6, 7, 8), r"metrics\.jsonl lacks rounds 1 to 4, which"),
    "some records": (lambda out: keep_lines(out, 1, 2, 4, 5, 7, 8), r"metrics\.jsonl lacks rounds 3, 6, which"),
    "the last records": (lambda out: keep_lines(out, 7), r"metrics\.jsonl lacks round 8, which"),
    "a record that differs": (contradict, r"metrics\.jsonl has two different records of round 3"),
    "mixing": (drop("mixing.parquet"), r"mixing\.parquet lacks rounds 1 to 8, which"),
    "clients": (drop("clients.parquet"), r"clients\.parquet lacks rounds 2, 4, 6, …, which"),
    "a damaged table": (spoil("clients.parquet"), r"clients\.parquet cannot be read: "),
}


@pytest.mark.parametrize(("act", "sentence"), LOST.values(), ids=LOST)
def test_a_run_that_has_lost_records_is_not_continued(act: Callable[[Path], None], sentence: str, copy: Path) -> None:
    act(copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as caught:
        run(work(rounds=10), copy, resume=True)
    assert re.search(sentence, str(caught.value)), str(caught.value)
    assert f"; continue from the one before it with resume={copy}/checkpoint/round-000006." in str(caught.value)
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_records_written_twice_are_mended(finished: Path, copy: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(lines + lines)
    run(work(), copy, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(copy))


def test_a_run_that_has_lost_its_checkpoints_does_not_begin_anew(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoint")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="has lost its checkpoints: rounds are on record, but none is left"):
        run(work(rounds=10), copy, resume=True)
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_a_link_in_a_run_directory_is_not_followed(copy: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "checkpoint", "clients"):
        there = tmp_path / f"mine-{name}"
        if (copy / name).exists():
            (copy / name).rename(there)
        (copy / name).symlink_to(there)
        with pytest.raises(CheckpointError, match=rf"{copy}/{name} is a link, and a resumed run would write"):
            run(work(rounds=10), copy, resume=True)
        (copy / name).unlink()
        if there.exists():
            there.rename(copy / name)
    (tmp_path / "mine").write_text("precious")
    (copy / ".summary.json.part").symlink_to(tmp_path / "mine")
    (copy / "summary.json").unlink()
    (copy / "summary.json").symlink_to(tmp_path / "mine")
    run(work(), copy, resume=True)
    assert (tmp_path / "mine").read_text() == "precious"


# --- one at a time ----------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_directory_in_use_is_refused(resume: bool, tmp_path: Path) -> None:
    """Another process trains there, and then it is killed: what it left locks nobody out."""
    out, reading, writing = tmp_path / "out", *os.pipe()

    class Waits(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            os.write(writing, b"x")
            time.sleep(60)

    other = os.fork()
    if not other:
        run(work(engine="processes", engine_settings={"workers": 2}), out, callbacks=[Waits()])
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"x"
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        with pytest.raises(CheckpointError) as caught:
            run(work(), out, resume=resume)
        told = f"{out} is in use by process {other}; " if resume else f"{out} exists already; choose another out="
        assert str(caught.value).startswith(told)
        assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    run(work(), out, resume=True)
    assert not (out / ".lock").exists()


def test_two_that_begin_at_once_do_not_share_a_directory(tmp_path: Path) -> None:
    """All of them find an empty folder, and one of them has it."""
    started, numbers = tmp_path / "started", []

    def begin() -> NoReturn:
        while not started.exists():
            time.sleep(0.001)
        try:
            run(work(rounds=3), tmp_path / "out")
        except CheckpointError as error:
            os._exit(7 if re.search("is in use by process|exists already", str(error)) else 8)
        except BaseException:
            os._exit(9)
        os._exit(0)

    for _ in range(3):
        numbers.append(os.fork())
        if not numbers[-1]:
            begin()
    started.touch()
    statuses = sorted(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers)
    assert statuses == [0, 7, 7]
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_directory_in_use_by_the_same_process_is_refused(copy: Path) -> None:
    class Nested(Callback):
        def on_start(self, info: RunInfo) -> None:
            run(work(rounds=10), copy, resume=True)

    with pytest.raises(CheckpointError, match="is in use by this process already"):
        run(work(rounds=10), copy, resume=True, callbacks=[Nested()])
    run(work(rounds=10), copy, resume=True)


# --- kept ----------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_k_checkpoints_are_kept(keep: int, tmp_path: Path) -> None:
    run(work(rounds=5), tmp_path / "out", checkpoint_every=1, keep=keep)
    names = [path.name for path in checkpoint.available(tmp_path / "out" / "checkpoint")]
    assert names == [f"round-{r:06d}" for r in range(6 - keep, 6)]


def test_checkpoints_hold_data_only(finished: Path) -> None:
    for path in checkpoint.available(finished / "checkpoint"):
        assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
        manifest = json.loads((path / "manifest.json").read_text())
        assert set(manifest["files"]) == {file.name for file in path.iterdir()} - {"manifest.json"}


def test_tables_of_a_run(finished: Path) -> None:
    """Mixing coefficients sum to one in every round in which somebody arrived; clients' rows where evaluated."""
    found = contents(finished)
    rounds, p = (np.array(found["mixing"][key]) for key in ("round", "p"))
    assert np.unique(rounds).tolist() == list(range(1, ROUNDS + 1))
    totals = [p[rounds == r].sum() for r in range(1, ROUNDS + 1)]
    arrived = [record["failures"] < record["cohort"] for record in found["metrics"]]
    np.testing.assert_allclose(totals, np.array(arrived, dtype=float), atol=1e-12)
    assert sum(np.array(p) == 0) == sum(record["failures"] for record in found["metrics"])
    assert np.unique(found["clients"]["round"]).tolist() == [2, 4, 6, 8]
    assert np.unique(found["clients"]["client"]).tolist() == list(range(6))


# --- disk full ----------------------------------------


@pytest.mark.parametrize("half", [False, True], ids=["at once", "after some bytes"])
def test_a_full_disk_harms_no_checkpoint_and_is_reported(
    half: bool, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, full = tmp_path / "full", [False]
    write = atomic.write_synced

    def crowded(path: Path, blob: bytes) -> None:
        if full[0] and path.suffix == ".safetensors":
            if half:
                path.write_bytes(blob[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    class Fills(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            full[0] = 3 <= record["round"] <= 6

    monkeypatch.setattr(atomic, "write_synced", crowded)
    run(work(), out, checkpoint_every=2, keep=3, callbacks=[Fills()])
    names = [path.name for path in checkpoint.available(out / "checkpoint")]
    assert names == ["round-000002", "round-000008"]
    assert not list((out / "checkpoint").glob(".*"))
    found, whole = contents(out), contents(finished)
    assert len(found["summary"].pop("warnings")) == 2
    whole["summary"].pop("warnings")
    assert_same_contents(whole, found)


def test_warnings_say_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(path: Path, blob: bytes) -> None:
        if path.name == "manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    write = atomic.write_synced
    monkeypatch.setattr(atomic, "write_synced", crowded)
    summary = run(work(rounds=2), tmp_path / "out").summary
    assert summary["warnings"] == [
        "round 2: no checkpoint could be written (No space left on device); the one before it is untouched."
    ]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["warnings"] == summary["warnings"]
    assert checkpoint.available(tmp_path / "out" / "checkpoint") == []


@pytest.mark.parametrize("room", [0.5, 1.1], ids=["at the start", "after a round"])
def test_no_file_may_grow_any_more(room: float, tmp_path: Path, finished: Path) -> None:
    """The system's own limit on file sizes: the run stops with a clear error and continues once there is room."""
    out = Path(shutil.copytree(finished, tmp_path / "limited"))
    back_to(out, 4)
    good = {path: path.read_bytes() for path in (out / "checkpoint" / "round-000004").iterdir()}
    written = sum(len(line) + 1 for line in (out / "metrics.jsonl").read_text().splitlines()[:4])

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(room * written), resource.RLIM_INFINITY))
        try:
            run(work(), out, resume=True, checkpoint_every=100, keep=3)
        except Exception as error:
            os.write(pipe[1], f"{type(error).__name__}: {error}".encode())

    pipe = os.pipe()
    assert child(limited) == 0
    os.close(pipe[1])
    said = os.read(pipe[0], 10_000).decode()
    assert said.startswith("CheckpointError: ")
    assert "cannot be written" in said
    assert "File too large" in said
    assert good == {path: path.read_bytes() for path in good}
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(out))

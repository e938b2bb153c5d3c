"""Runs from the command line: directories, resuming, sweeps, Ctrl-C."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Cli

from fedloom.base import yaml
from fedloom.base.errors import ClientError
from fedloom.cli import command, main
from fedloom.cli import run as train
from fedloom.cli.command import in_directory
from fedloom.config import keys
from fedloom.config.schema import Config
from fedloom.experiment.atomic import Lock
from fedloom.experiment.callbacks import NullProgress, RunInfo
from fedloom.experiment.rundir import RunDirectory, Status
from fedloom.experiment.trackers import Tracker, trackers

SMALL = ("clients=5", "model.hidden=[8]", "local.batch_size=50")


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page."""
    monkeypatch.setattr("fedloom_apps.report.build", lambda directories, out: out / "report.html")


def runs_by(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """Let ``fedloom run`` do its runs by this function."""
    monkeypatch.setattr(train, "command", replace(train.command, run=in_directory(run)))


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def same_records(first: Path, second: Path) -> bool:
    pairs = zip(metrics(first), metrics(second), strict=True)
    return all({**a, "seconds": 0} == {**b, "seconds": 0} for a, b in pairs)


def test_by_default_fedavg_and_feddyn_are_compared(cli: Cli, tmp_path: Path):
    code, out, err = cli("run", "rounds=3", *SMALL)
    assert (code, err) == (0, "")
    (parent,) = (tmp_path / "runs").glob("*/*-fedavg-feddyn")
    names = sorted(path.name for path in parent.iterdir() if path.is_dir())
    assert names == [
        "fedavg-0",
        "feddyn-0",
        "tables",
    ]
    assert "feddyn" in (parent / "report.html").read_text()
    assert summary(parent / "feddyn-0")["status"] == "finished"
    assert summary(parent / "feddyn-0")["target"]["value"] == 0.9
    note, *lines = out.splitlines()
    assert note == "note: no method= given: comparing fedavg and feddyn."
    assert [line.split("  ")[1] for line in lines[:6]] == [f"round {n}/3" for n in (1, 2, 3)] * 2
    table = next(number for number, line in enumerate(lines) if line.startswith("method "))
    assert [line.split()[0] for line in lines[table + 1 : table + 3]] == ["fedavg", "feddyn"]
    assert "to 90 %" in lines[table]
    assert f"{parent.relative_to(tmp_path)}/report.html" in out
    assert not any(line.endswith(" ") for line in lines)


def test_one_method_runs_alone(cli: Cli, tmp_path: Path):
    code, out, _ = cli("run", "-q", "method=feddyn", "method.mixing=by_samples", "rounds=2", "seed=3", *SMALL)
    (directory,) = (tmp_path / "runs").glob("*/*")
    assert code == 0
    assert directory.name.endswith("-feddyn+by_samples-3")
    assert f"run directory: {directory.relative_to(tmp_path)}" in out
    assert "round 1/2" not in out
    assert summary(directory)["method"] == "feddyn+by_samples"
    stored: Any = yaml.load(directory / "config.yaml")
    assert stored["method"] == {
        "name": "feddyn",
        "alpha": 0.01,
        "size_weighted": True,
        "mixing": {"name": "by_samples"},
    }
    assert stored["versions"]["fedloom"]


def test_a_directory_that_is_taken_is_refused(cli: Cli, tmp_path: Path):
    assert cli("run", "-q", "method=fedavg", "rounds=1", "out=there", *SMALL).code == 0
    before = sorted((tmp_path / "there").rglob("*"))
    for words in (("method=fedavg",), ("-m", "method=fedavg,feddyn"), ()):
        code, out, err = cli("run", *words, "rounds=1", "out=there", *SMALL)
        assert (code, out) == (2, "")
        assert err == "fedloom: there exists already; choose another out=, or continue it with resume=there.\n"
    assert sorted((tmp_path / "there").rglob("*")) == before


def test_a_run_that_goes_on_gives_the_same_bits(cli: Cli, tmp_path: Path):
    words = ("run", "-q", "method=scaffold", "method.server=sgd", "method.server.momentum=0.5", *SMALL)
    assert cli(*words, "rounds=4", "out=whole").code == 0
    assert cli(*words, "rounds=2", "out=parts").code == 0
    engine = ("engine=processes", "engine.workers=1")
    assert cli("run", "resume=parts", "rounds=4", *engine, "checkpoint.keep=3", "-q").code == 0
    assert same_records(tmp_path / "whole", tmp_path / "parts")
    assert cli("run", "resume=parts/checkpoint/round-000002", "-q").code == 0
    assert same_records(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("local.stragglers=0.2", "local.stragglers: 0 → 0.2"),
        ("rounds=1", "rounds: 2 → 1"),
        ("seed=1", "seed: 0 → 1"),
        ("method=feddyn", "method.name: 'fedavg' → 'feddyn'"),
        ("method.mixing=uniform", "method.mixing.name: null → 'uniform'"),
        ("local.lrr=1", "local has no setting 'lrr'"),
    ],
)
def test_a_run_does_not_go_on_with_other_settings(word: str, sentence: str, cli: Cli, tmp_path: Path):
    cli("run", "-q", "method=fedavg", "rounds=2", "out=there", *SMALL)
    before = (tmp_path / "there" / "config.yaml").read_bytes()
    code, out, err = cli("run", "resume=there", word)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert (tmp_path / "there" / "config.yaml").read_bytes() == before


@pytest.mark.usefixtures("no_pages")
def test_a_cohort_beside_the_default_participation_is_kept_in_recipes_and_runs_that_go_on(cli: Cli, tmp_path: Path):
    assert cli("run", "method=fedavg", "rounds=1", "cohort=3", "out=run", *SMALL, "-q")[0] == 0
    assert cli("run", "run/config.yaml", "out=again", "-q")[0] == 0
    assert cli("run", "resume=run", "rounds=2", "-q")[0] == 0
    assert [record["cohort"] for name in ("run", "again") for record in metrics(tmp_path / name)] == [3, 3, 3]
    code, _, err = cli("run", "run/config.yaml", "participation=.2", "out=third", "-q")
    assert (code, err.count("\n")) == (2, 1)
    assert "participation=0.2 and cohort=3 both set the size of cohorts; leave one out, or add cohort=null." in err


def test_a_sweep(cli: Cli, tmp_path: Path):
    words = ("method=fedavg,{name: feddyn, alpha: .3}", "local.lr=.1,.2", "seed=1,2", "rounds=1", "out=sweep", *SMALL)
    code, out, _ = cli("run", "-m", *words, "-q")
    assert code == 0
    names = {path.parent.name for path in (tmp_path / "sweep").glob("*/summary.json")}
    assert names == {f"{m}-lr={lr}-{s}" for m in ("fedavg", "feddyn-alpha=0.3") for lr in (0.1, 0.2) for s in (1, 2)}
    assert "feddyn, alpha=0.3, local.lr=0.2, seed 2" in out


@pytest.mark.parametrize("words", [("-m", "seed=1,2"), ("--dry-run",), ("-m", "--dry-run", "seed=1,2")])
def test_runs_whose_states_are_on_disk_are_checked_with_their_directories(words: Sequence[str], cli: Cli):
    code, _, err = cli("run", *words, "-q", "method=scaffold", "client_state=disk", "rounds=1", "out=sweep", *SMALL)
    assert (code, err) == (0, "")


def test_a_sweep_of_one_is_a_run(cli: Cli, tmp_path: Path):
    assert cli("run", "-m", "method=fedavg", "rounds=1", "out=one", "-q", *SMALL).code == 0
    assert (tmp_path / "one" / "metrics.jsonl").exists()


def interrupt_in(monkeypatch: pytest.MonkeyPatch, run: int, round: int) -> None:
    """Press Ctrl-C in a round of the nth run."""
    rounds: list[int] = []

    def on_round(self: NullProgress, record: dict[str, Any]) -> None:
        rounds.append(record["round"])
        if rounds.count(1) == run and record["round"] == round:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(NullProgress, "on_round", on_round)


def test_ctrl_c_leaves_a_run_that_goes_on(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        interrupt_in(patch, run=1, round=2)
        code, out, err = cli("run", "-q", "method=feddyn", "rounds=4", "out=stopped", *SMALL)
    assert (code, out) == (130, "")
    assert err == "fedloom: stopped after round 2 of feddyn; continue with: fedloom run resume=stopped\n"
    with monkeypatch.context() as patch:
        interrupt_in(patch, run=0, round=3)  # its first round is not drawn again
        assert cli("run", "-q", "--import", "json", "resume=stopped").err.endswith("resume=stopped --import json\n")
    assert cli("run", "-q", "resume=stopped").code == 0
    assert cli("run", "-q", "method=feddyn", "rounds=4", "out=whole", *SMALL).code == 0
    assert same_records(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.usefixtures("no_pages")
def test_ctrl_c_leaves_a_sweep_that_goes_on(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = ("method=fedavg,feddyn,fedprox", "rounds=3", *SMALL)
    with monkeypatch.context() as patch:
        interrupt_in(patch, run=2, round=2)
        code, _, err = cli("run", "-m", "-q", *words, "out=stopped")
    assert code == 130
    assert err == "fedloom: stopped after round 2 of feddyn, seed 0; continue with: fedloom run resume=stopped\n"
    finished = (tmp_path / "stopped" / "fedavg-0" / "summary.json").stat().st_mtime_ns
    code, _, err = cli("run", "resume=stopped", "rounds=9")
    assert code == 2
    assert "continues with its own settings" in err
    code, out, _ = cli("run", "resume=stopped")
    assert code == 0
    assert "feddyn (2 of 3)  continues after round 2" in out
    assert (tmp_path / "stopped" / "fedavg-0" / "summary.json").stat().st_mtime_ns == finished
    assert cli("run", "-m", "-q", *words, "out=whole").code == 0
    for name in ("fedavg-0", "feddyn-0", "fedprox-0"):
        assert same_records(tmp_path / "stopped" / name, tmp_path / "whole" / name)


def test_ctrl_c_while_the_last_file_is_written_says_how_far_the_run_is(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "write_summary", stop)
    answer = cli("run", "-q", "method=fedavg", "rounds=2", "out=over there", *SMALL)
    assert answer.err == "fedloom: stopped after round 2 of fedavg; continue with: fedloom run 'resume=over there'\n"


def test_a_sweep_does_not_take_the_runs_of_one_that_was_faster_for_its_own(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs between the second one's look at the folder and its lock."""
    words = ("run", "-m", "-q", "method=fedavg,feddyn", "out=there", *SMALL)
    original, first = command.run_settings, [(*words, "rounds=1")]

    def slow(config: Config) -> dict[str, Any]:
        if first:
            assert cli(*first.pop()).code == 0
        return original(config)

    monkeypatch.setattr(command, "run_settings", slow)
    code, _, err = cli(*words, "rounds=2")
    assert code == 2
    assert err.endswith("there exists already; choose another out=, or continue it with resume=there.\n")


def test_ctrl_c_before_anything_is_written(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    runs_by(monkeypatch, stop)
    code, _, err = cli("run", "method=fedavg")
    assert (code, err) == (130, "fedloom: stopped before training began; nothing was written.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["fedloom.cli.command.plan", "fedloom.cli.command.run_settings"])
def test_ctrl_c_while_settings_are_read(where: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, stop)
    code, _, err = cli("run", "method=fedavg")
    assert (code, err) == (130, "fedloom: stopped before training began; nothing was written.\n")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_command_that_trains_nothing(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedloom_apps.report.groups.read", stop)
    (Path.cwd() / "config.yaml").touch()
    code, _, err = cli("report", ".")
    assert (code, err) == (130, "fedloom: stopped.\n")


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All of them choose the same name before any of them makes the folder."""
    same = "runs/2026-01-31/093000-fedavg-0"
    monkeypatch.setattr(command, "dated", lambda name: Path(same))
    real, starts = train.run, []

    def run(*words: Any, **settings: Any) -> Any:
        starts.append(1)
        assert len(starts) == 3 or main(["run", "-q", "method=fedavg", "rounds=1", *SMALL]) == 0
        return real(*words, **settings)

    runs_by(monkeypatch, run)
    assert cli("run", "-q", "method=fedavg", "rounds=1", *SMALL).code == 0
    for name in (same, f"{same}-2", f"{same}-3"):
        assert len(metrics(tmp_path / name)) == 1


def test_a_sweep_in_use_is_refused(cli: Cli, tmp_path: Path):
    (tmp_path / "sweep").mkdir()
    lock = Lock(tmp_path / "sweep")
    code, _, err = cli("run", "-m", "method=fedavg,feddyn", "out=sweep", *SMALL)
    assert (code, err) == (2, "fedloom: sweep is in use by this process already; wait until that run has ended.\n")
    lock.release()
    assert list((tmp_path / "sweep").iterdir()) == []


@pytest.mark.usefixtures("no_pages")
def test_a_sweep_goes_past_a_run_that_diverges(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    real = train.run

    def run(experiment: Any, *words: Any, **settings: Any) -> Any:
        if experiment.method.name == "fedavg":
            raise ClientError("the server model diverged.")
        return real(experiment, *words, **settings)

    runs_by(monkeypatch, run)
    code, out, err = cli("run", "-m", "-q", "method=fedavg,feddyn", "rounds=1", "out=sweep", *SMALL)
    assert code == 2
    assert err == "fedloom: fedavg: the server model diverged.\n"
    assert "feddyn" in out


@pytest.mark.usefixtures("no_pages")
def test_a_sweep_that_goes_on_goes_past_a_run_that_cannot(cli: Cli, tmp_path: Path):
    """The others of a night are not lost with the files of one."""
    words = ("method=fedavg,feddyn", "seed=1,2", "rounds=1", "out=sweep", *SMALL)
    assert cli("run", "-m", "-q", *words).code == 0
    for run in (broken := tmp_path / "sweep" / "fedavg-2"), tmp_path / "sweep" / "feddyn-2":
        (run / "summary.json").unlink()
    (broken / "checkpoint" / "round-000001" / "server.safetensors").write_bytes(b"")
    code, _, err = cli("run", "-q", "resume=sweep")
    assert code == 2
    assert err.startswith(
        "fedloom: fedavg, seed 2: the checkpoint sweep/fedavg-2/checkpoint/round-000001 cannot be used"
    )
    assert (tmp_path / "sweep" / "feddyn-2" / "summary.json").exists()


def test_trackers_get_every_record(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []

    class Fake(Tracker):
        library = "json"

        def begin(self, run: RunInfo, folder: Path, settings: Mapping[str, Any], tags: Mapping[str, str]) -> None:
            assert (folder / "config.yaml").exists()
            assert settings["method.name"] == "fedavg"
            assert (tags["kind"], tags["seed"]) == ("federated", "0")
            calls.append(f"{run.name}-{run.seed}")

        def log(self, round: int, numbers: Mapping[str, float]) -> None:
            assert numbers["round"] == round
            calls.append(round)

        def end(self, status: Status, final: Mapping[str, float], files: Sequence[Path]) -> None:
            assert {"config.yaml", "summary.json", "model.safetensors"} <= {path.name for path in files}
            assert "global/accuracy" in final
            calls.append(status)

    monkeypatch.setattr(trackers, "_entries", {**trackers._entries})
    trackers.register(name="json")(Fake)
    assert cli("run", "-q", "method=fedavg", "rounds=2", "trackers=json", *SMALL).code == 0
    assert calls == ["fedavg-0", 1, 2, Status.FINISHED]


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_what_one_run_of_a_sweep_cannot_do_is_said_before_the_first(
    words: tuple[str, ...], cli: Cli, tmp_path: Path
) -> None:
    """``fedbn`` needs normalisation layers, which is known once the model is made."""
    code, out, err = cli("run", "-q", "-m", "method=fedavg,fedbn", "out=both", *words, *SMALL)
    assert (code, out) == (2, "")
    assert "keeps no parameter of this model private" in err
    assert not (tmp_path / "both").exists()


def test_a_dry_run_prints_a_recipe_and_writes_nothing(cli: Cli, tmp_path: Path):
    code, out, _ = cli("run", "--dry-run", "method=feddyn", "method.alpha=0.2", *SMALL)
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "recipe.yaml").write_text(out)
    assert cli("run", "--dry-run", "recipe.yaml").out == out
    assert cli("run", "-q", "recipe.yaml", "rounds=1", "out=made").code == 0
    assert cli("run", "--dry-run", "made/config.yaml", "rounds=50").out == out


def test_words_and_options_in_any_order(cli: Cli):
    recipe = cli("run", "method=feddyn", "--dry-run", "seed=4", "-q", "rounds=7").out
    assert recipe == cli("run", "--dry-run", "-q", "rounds=7", "seed=4", "method=feddyn").out


@pytest.mark.exhaustive
def test_a_reader_that_goes_away_does_not_stop_a_run(tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    words = ["run", "method=fedavg", "rounds=3", "out=there", *SMALL]
    command = [sys.executable, "-c", f"import sys; from fedloom.cli import main; sys.exit(main({words!r}))"]
    process = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, text=True, timeout=60)
    os.close(writing)
    assert process.stderr == ""
    assert summary(tmp_path / "there")["status"] == "finished"


@pytest.mark.usefixtures("no_pages")
def test_a_sweep_builds_each_federation_once(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    seeds: list[int] = []
    real = keys.federate

    @functools.wraps(real)
    def federate(*args: Any, **settings: Any) -> Any:
        seeds.append(settings["seed"])
        return real(*args, **settings)

    monkeypatch.setattr(keys, "federate", federate)
    words = ("method=fedavg,feddyn", "local.lr=.1,.2", "seed=1,2", "rounds=1", "out=sweep", *SMALL)
    assert cli("run", "-q", "-m", *words).code == 0
    assert sorted(seeds) == [1, 2]

"""Trackers with their libraries, offline, in every command that trains."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.commands import Cli, cli

import fedloom as fl
from fedloom.base.errors import ClientError, ConfigError
from fedloom.cli import main
from fedloom.experiment.callbacks import Callback, RunInfo
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.trackers import Tracker, files, trackers

__all__ = ["cli"]

COMMANDS = {
    "run": ("method=fedavg", "clients=3", "rounds=2", "model=logistic"),
    "online": ("learner=moml", "tasks=2"),
    "distill": ("method=ce", "epochs=1", "model=logistic"),
    "synthesize": ("rounds=1", "clients=2", "judge.max_steps=2"),
    "search": (
        "clients=3", "rounds=2", "model=logistic", "search.budget=6", "search.methods=[fedavg]", "search.seeds=2",
    ),
    "deploy local": ("method=fedavg", "rounds=1", "model=logistic", "--nodes", "2"),
}  # fmt: skip
NEEDS = {"search": "optuna", "deploy local": "flwr"}
WRITTEN = {"synthesize": "synthetic.npz", "search": "winner.yaml"}
RUN = COMMANDS["run"]
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def read_tensorboard(out: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{out}/tensorboard")
    events.Reload()
    return events


def read_mlflow(out: str) -> Any:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{Path(out).absolute()}/mlflow.db")
    (run,) = mlflow.search_runs(experiment_names=["fedloom"], output_format="list")
    return run


def test_what_a_link_leads_to_is_not_uploaded(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    (out := tmp_path / "out").mkdir()
    (out / "config.yaml").touch()
    (out / "notes.txt").symlink_to(tmp_path / "mine")
    assert files(RunDirectory(out)) == [out / "config.yaml"]


@pytest.mark.extra("tensorboard")
@pytest.mark.parametrize("command", COMMANDS)
def test_tensorboard_in_every_command(command: str) -> None:
    pytest.importorskip(NEEDS.get(command, "torch"))
    assert main([*command.split(), "-q", "out=there", "trackers=[tensorboard]", *COMMANDS[command]]) == 0
    events = read_tensorboard("there")
    assert events.Tags()["scalars"]
    texts = events.Tags()["tensors"]
    assert {"settings/text_summary", "tags/text_summary", "status/text_summary"} <= set(texts)
    (status,) = events.Tensors("status/text_summary")
    assert status.tensor_proto.string_val == [b"finished"]


@pytest.mark.extra("tensorboard")
def test_every_run_of_a_sweep_is_tracked() -> None:
    assert main(["run", "-m", "-q", "out=there", "trackers=[tensorboard]", *RUN, "seed=1,2"]) == 0
    for seed in (1, 2):
        assert read_tensorboard(f"there/fedavg-{seed}").Tags()["scalars"]


@pytest.mark.extra("optuna", "tensorboard")
def test_every_run_that_a_search_compares_is_tracked() -> None:
    words = ("search", "-q", "trackers=[tensorboard]")
    assert main([*words, "out=there", *COMMANDS["search"]]) == 0
    runs = sorted(Path("there/runs").iterdir())
    assert {run.name for run in runs} >= {"fedavg-1", "fedavg-2"}
    for run in runs:
        last = read_tensorboard(str(run)).Scalars("clients/accuracy/mean")[-1]
        final = RunDirectory(run).summary()["final"]["clients/accuracy/mean"]
        assert (last.step, last.value) == (2, pytest.approx(final))
    assert main([*words, "resume=there"]) == 0
    assert all(len(read_tensorboard(str(run)).Tensors("status/text_summary")) == 1 for run in runs)


def test_a_run_that_has_ended_is_logged_as_it_was_while_it_went_on() -> None:
    class Diary(Tracker):
        library = "json"

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def begin(self, run: RunInfo, folder: Path, settings: Any, tags: Any) -> None:
            self.calls.append((run.name, run.seed, run.start, folder, settings, tags))

        def log(self, round: int, numbers: Any) -> None:
            self.calls.append((round, numbers))

        def end(self, status: Any, final: Any, files: Any) -> None:
            self.calls.append((status, final, files))

    live, later = Diary(), Diary()
    federation = fl.data.federate("digits", "iid", clients=2)
    fl.run("feddyn", federation, "logistic", rounds=2, seed=3, out="there", callbacks=[live])
    later.replay(RunDirectory("there"))
    assert len(live.calls) == 4
    assert live.calls == later.calls


@pytest.mark.extra("mlflow", "sqlalchemy")
@pytest.mark.parametrize("command", ["synthesize", "search"])
def test_mlflow_has_the_files_that_a_command_writes(command: str) -> None:
    pytest.importorskip(NEEDS.get(command, "torch"))
    assert main([command, "-q", "out=there", "trackers=[mlflow]", *COMMANDS[command]]) == 0
    run = read_mlflow("there")
    assert (run.info.status, run.data.tags["status"]) == ("FINISHED", "finished")
    names = {path.name for path in Path("there/mlflow").rglob("*") if path.is_file()}
    assert {"config.yaml", "summary.json", WRITTEN.get(command, "model.safetensors")} <= names
    assert not any(name.startswith("mlflow.db") for name in names)


@pytest.mark.extra("mlflow", "sqlalchemy")
def test_mlflow_logs_settings_tags_numbers_status_and_files() -> None:
    assert main(["run", "-q", "out=there", "trackers=[mlflow]", *RUN]) == 0
    run = read_mlflow("there")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "fedavg-0")
    assert (run.data.params["method.name"], run.data.params["clients"]) == ("fedavg", "3")
    assert (run.data.tags["method"], run.data.tags["status"]) == ("fedavg", "finished")
    last = fl.load("there").summary["final"]["global/accuracy"]
    assert run.data.metrics["global/accuracy"] == last
    names = {path.name for path in Path("there/mlflow").rglob("*") if path.is_file()}
    assert {"config.yaml", "summary.json", "model.safetensors"} <= names
    assert main(["run", "-q", "resume=there", "rounds=3"]) == 0
    resumed = read_mlflow("there")
    assert (resumed.info.run_id, resumed.info.status) == (run.info.run_id, "FINISHED")
    assert resumed.data.metrics["round"] == 3


@pytest.mark.extra("mlflow", "sqlalchemy")
def test_mlflow_keeps_every_run_of_a_sweep_in_its_own_directory() -> None:
    assert main(["run", "-m", "-q", "out=there", "trackers=[mlflow]", *RUN, "seed=1,2"]) == 0
    assert "MLFLOW_TRACKING_URI" not in os.environ
    assert [read_mlflow(f"there/fedavg-{seed}").data.tags["seed"] for seed in (1, 2)] == ["1", "2"]


@pytest.mark.extra("mlflow", "sqlalchemy")
def test_mlflow_gets_every_round_once_though_a_killed_run_does_some_again() -> None:
    federation = fl.data.federate("digits", "iid", clients=2)

    class Killed(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 5:
                os._exit(9)

    def go(*callbacks: Callback, resume: bool = False) -> None:
        fl.run(
            "fedavg", federation, "logistic", rounds=6, out="there", checkpoint_every=2, resume=resume,
            callbacks=[trackers.make("mlflow"), *callbacks],
        )  # fmt: skip

    child = os.fork()
    if child == 0:
        go(Killed())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    go(resume=True)
    import mlflow

    number = read_mlflow("there").info.run_id
    history = mlflow.MlflowClient().get_metric_history(number, "global/accuracy")
    assert [point.step for point in history] == [1, 2, 3, 4, 5, 6]


@pytest.mark.extra("mlflow", "sqlalchemy")
@pytest.mark.parametrize("change", ["runs set artifact_uri", "experiments set artifact_location"])
def test_mlflow_keeps_no_file_where_a_run_directory_says(change: str, tmp_path: Path, cli: Cli) -> None:
    assert cli("run", "-q", "out=there", "trackers=[mlflow]", *RUN).code == 0
    with sqlite3.connect("there/mlflow.db") as store:
        store.execute(f"update {change} = '{(tmp_path / 'mine').as_uri()}'")
    answer = cli("run", "-q", "resume=there", "rounds=3")
    assert (answer.code, (tmp_path / "mine").exists()) == (2, False)
    assert "mlflow.db keeps files in file:///" in answer.err


@pytest.mark.extra("mlflow", "sqlalchemy")
def test_mlflow_goes_on_where_a_link_leads_to_the_run_directory(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    assert cli("run", "-q", "out=runs/there", "trackers=[mlflow]", *RUN).code == 0
    assert cli("run", "-q", "resume=scratch/there", "rounds=3").code == 0
    read_mlflow("scratch/there")  # is the only one


@pytest.mark.extra("mlflow", "sqlalchemy")
def test_mlflow_marks_a_run_that_fails() -> None:

    class Fails(Callback):
        def on_step(self, step: Any) -> Any:
            raise ClientError("the probe broke.")

    federation = fl.data.federate("digits", "iid", clients=2)
    with pytest.raises(ClientError):
        fl.run("fedavg", federation, "logistic", rounds=1, out="there", callbacks=[trackers.make("mlflow"), Fails()])
    run = read_mlflow("there")
    assert run.info.status == "FAILED"
    assert run.data.params["method.name"] == "fedavg"


@pytest.mark.extra("wandb")
def test_wandb_offline() -> None:
    assert main(["run", "-q", "out=there", "trackers=[wandb]", *RUN]) == 0
    assert next(Path("there/wandb").rglob("*.wandb")).stat().st_size > 0
    (folder,) = [path for path in Path("there/wandb").iterdir() if path.name.startswith("offline-run-")]
    texts = "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.suffix in (".yaml", ".json"))
    blob = next(folder.glob("*.wandb")).read_bytes()
    assert b"global/accuracy" in blob or "global/accuracy" in texts
    assert b"model.safetensors" in blob


def test_trackers_need_a_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers["wandb"].factory, "library", "json")
    federation = fl.data.federate("digits", "iid", clients=2)
    with pytest.raises(ConfigError, match="trackers=wandb tracks run directories; give the run one, with out="):
        fl.run("fedavg", federation, "logistic", rounds=1, callbacks=[trackers.make("wandb")])


def test_a_tracker_that_cannot_begin_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Any, *args: Any) -> None:
        raise RuntimeError("api_key not configured\nmore")

    monkeypatch.setattr(trackers["wandb"].factory, "library", "json")
    monkeypatch.setattr(trackers["wandb"].factory, "begin", refuse)
    assert main(["run", "-q", "out=there", "trackers=[wandb]", *RUN]) == 2
    assert capsys.readouterr().err == "fedloom: trackers=wandb cannot begin: api_key not configured.\n"
    assert not os.path.exists("there/metrics.jsonl")


def test_a_run_outlives_its_tracker() -> None:
    class Flaky(Tracker):
        library = "json"
        logged: ClassVar[list[int]] = []

        def begin(self, *args: Any) -> None: ...

        def log(self, round: int, numbers: Any) -> None:
            self.logged.append(round)
            if round == 2:
                raise ConnectionError("the server is gone\nmore")

        def end(self, *args: Any) -> None:
            raise ConnectionError("it is still gone")

    federation = fl.data.federate("digits", "iid", clients=2)
    sentence = "trackers=flaky failed and logs no more rounds of this run, .*: the server is gone.$"
    with pytest.warns(UserWarning, match=sentence) as warnings:
        result = fl.run("fedavg", federation, "logistic", rounds=4, out="there", callbacks=[Flaky()])
    assert (result.summary["status"], len(result.history)) == ("finished", 4)
    assert (Flaky.logged, len(warnings)) == ([1, 2], 1)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_library_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers[name].factory, "library", "no_such_library_here")
    extra = "wandb" if name == "wandb" else "track"
    with pytest.raises(ConfigError, match=rf"trackers={name} needs the package .*: pip install 'fedloom\[{extra}\]'\."):
        trackers.make(name)

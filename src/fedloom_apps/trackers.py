"""Trackers of runs: TensorBoard, MLflow, and Weights & Biases."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fedloom.base.errors import ConfigError
from fedloom.experiment.callbacks import RunInfo
from fedloom.experiment.rundir import Status
from fedloom.experiment.trackers import STORE, Tracker

SERVER = "MLFLOW_TRACKING_URI"
"""MLflow's server, in the environment."""


class TensorBoard(Tracker):
    """Writes scalars, settings and final numbers to ``<run directory>/tensorboard``, which holds no other files."""

    library = "torch.utils.tensorboard"

    def begin(self, run: RunInfo, folder: Path, settings: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        self.settings = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in settings.items()}
        self.writer = self.module.SummaryWriter(str(folder / "tensorboard"), purge_step=run.start + 1)
        for name, values in (("settings", settings), ("tags", tags)):
            rows = "".join(f"| {key} | {value} |\n" for key, value in values.items())
            self.writer.add_text(name, f"| key | value |\n|---|---|\n{rows}", run.start)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            self.writer.add_scalar(key, value, round)

    def end(self, status: Status, final: Mapping[str, float], files: Sequence[Path]) -> None:
        self.writer.add_text("status", status.value)
        self.writer.add_hparams(self.settings, {f"final/{key}": value for key, value in final.items()}, run_name=".")
        self.writer.close()


class MLflow(Tracker):
    """Logs to MLflow's tracking server, or to ``<run directory>/mlflow.db`` if ``MLFLOW_TRACKING_URI`` is not set."""

    library = "mlflow"
    ended: ClassVar = {Status.FINISHED: "FINISHED", Status.STOPPED: "FINISHED", Status.INTERRUPTED: "KILLED"}

    def begin(self, run: RunInfo, folder: Path, settings: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        mlflow, experiment = self.module, "fedloom"
        if SERVER not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{folder / STORE}")
            os.environ.pop(SERVER, None)  # MLflow sets it; the next run would take it for the user's
            home = (folder / "mlflow").as_uri()
            if mlflow.get_experiment_by_name(experiment) is None:
                mlflow.create_experiment(experiment, artifact_location=home)
            runs = mlflow.search_runs(experiment_names=[experiment], output_format="list")
            places = {run.info.artifact_uri.removesuffix(f"/{run.info.run_id}/artifacts") for run in runs}
            places.add(mlflow.get_experiment_by_name(experiment).artifact_location)
            if away := places - {home}:  # of a stranger's run, or one that was moved
                raise ConfigError(
                    f"{folder / STORE} keeps files in {min(away)}, not in its run directory; rename it, which begins a "
                    "new one, or take trackers=[]."
                )
        mlflow.set_experiment(experiment)
        before = []
        if run.start:
            here = f"tags.directory = '{folder}'"
            before = mlflow.search_runs(experiment_names=[experiment], filter_string=here, output_format="list")
        self.known = 0  # rounds that are logged there already, with these numbers
        if before:  # the newest; its parameters stay
            number = before[0].info.run_id
            mlflow.start_run(run_id=number)
            past = mlflow.MlflowClient().get_metric_history(number, "round")
            self.known = max((point.step for point in past), default=0)
            return
        mlflow.start_run(run_name=f"{run.name}-{run.seed}", tags=dict(tags))
        mlflow.log_params({key: str(value)[:6000] for key, value in settings.items()})

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        if round > self.known:
            self.module.log_metrics(dict(numbers), step=round)

    def end(self, status: Status, final: Mapping[str, float], files: Sequence[Path]) -> None:
        self.module.set_tag("status", status.value)
        for path in files:
            self.module.log_artifact(str(path))
        self.module.end_run(self.ended.get(status, "FAILED"))


class WandB(Tracker):
    """Logs to Weights & Biases, with its files in the run directory; ``WANDB_MODE=offline`` sends nothing.

    The project is ``WANDB_PROJECT``, or ``fedloom``.
    """

    library = "wandb"
    extra = "wandb"

    def begin(self, run: RunInfo, folder: Path, settings: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        self.number = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        self.session = self.module.init(
            project=os.environ.get("WANDB_PROJECT", "fedloom"),
            name=f"{run.name}-{run.seed}",
            id=self.number,
            dir=str(folder),
            config={**settings, "tags": dict(tags)},
            tags=[run.name[:64], tags["kind"]],
            resume="allow" if run.start else None,
            settings=self.module.Settings(silent=True),
        )

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self.session.log(dict(numbers), step=round)

    def end(self, status: Status, final: Mapping[str, float], files: Sequence[Path]) -> None:
        self.session.summary.update({"status": status.value})
        artefact = self.module.Artifact(f"run-{self.number}", type="run")
        for path in files:
            artefact.add_file(str(path), policy="immutable")
        self.session.log_artifact(artefact)
        self.session.finish(exit_code=0 if status.ended else 1)

"""Experiment trackers: callbacks that log a run to TensorBoard, MLflow or Weights & Biases.

A tracker begins before training, with the settings as parameters and the run's identity as tags; it logs every number
of every record, and at the end the status and the files of the run directory.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fedloom.core.errors import ConfigError, first_line, nearest, of_extra
from fedloom.core.settings import flatten
from fedloom.experiment.callbacks import Callback, RunInfo
from fedloom.experiment.rundir import PROVENANCE, RunDirectory, Status

SERVER, STORE = "MLFLOW_TRACKING_URI", "mlflow.db"
"""MLflow's server, in the environment, and its own file in a run directory."""


def files(directory: RunDirectory) -> list[Path]:
    """The files of a run directory that are uploaded: all but checkpoints, single runs of a search and caches."""
    paths = [*directory.path.iterdir(), *(directory.figures.iterdir() if directory.figures.is_dir() else ())]
    return sorted(path for path in paths if path.is_file() and not path.name.startswith((".", STORE)))


class Tracker(Callback):
    """Base class of trackers.

    Raises:
        ConfigError: if its library is not installed, the run has no run directory, or the library refuses to begin.
    """

    library: str
    """The module to import."""
    extra = "track"
    """The extra of this package that installs it."""

    def __init__(self) -> None:
        self.module: Any = of_extra(self.extra, self.library, f"trackers={self.name}")
        self.run: RunInfo | None = None
        self.lost = False  # whether the library has failed in this run

    @property
    def name(self) -> str:
        """The name under which it is chosen."""
        return next((name for name, kind in TRACKERS.items() if kind is type(self)), type(self).__name__.lower())

    def on_start(self, run: RunInfo) -> None:
        if run.directory is None:
            raise ConfigError(f"trackers={self.name} tracks run directories; give the run one, with out=….")
        config, folder = run.directory.config(), run.directory.path.absolute()
        settings = {key: value for key, value in config.items() if key not in PROVENANCE}
        if set(settings) <= {"checkpoint"}:  # started from Python: its identity replaces the settings
            settings |= config.get("identity", {})
        tags = {
            "method": run.name,
            "seed": str(run.seed),
            "kind": run.directory.kind,
            "directory": str(folder),
            **{f"version.{name}": str(version) for name, version in (config.get("versions") or {}).items()},
            **({"git": str(config["git"])} if config.get("git") else {}),
        }
        try:
            self.begin(run, folder, flatten(settings), tags)
        except Exception as error:
            raise ConfigError(f"trackers={self.name} cannot begin: {first_line(error)}.") from error
        self.run, self.lost = run, False

    def on_round(self, record: Mapping[str, Any]) -> None:
        if self.run is not None and not self.lost:
            self._try(self.log, record["round"], {k: float(v) for k, v in record.items() if isinstance(v, int | float)})

    def on_close(self) -> None:
        if self.run is None or self.run.directory is None:
            return
        directory, self.run = self.run.directory, None
        final = directory.summary().get("final") or {}
        numbers = {key: float(value) for key, value in final.items() if isinstance(value, int | float)}
        self._try(self.end, directory.status, numbers, files(directory))

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call the library; if it fails, as when its server is gone, a warning says so once, and the run goes on."""
        try:
            call(*arguments)
        except Exception as error:
            if not self.lost:
                warnings.warn(
                    f"trackers={self.name} failed and logs no more rounds of this run, whose directory has them all: "
                    f"{first_line(error)}.",
                    stacklevel=2,
                )
            self.lost = True

    def replay(self, directory: RunDirectory) -> None:
        """Log a run that has ended, from its run directory.

        Raises:
            ConfigError: if the library refuses to begin.
        """
        summary = directory.summary()
        self.on_start(RunInfo(summary["method"], summary["rounds"], seed=summary["seed"], directory=directory))
        try:
            for record in directory.metrics():
                self.on_round(record)
        finally:
            self.on_close()

    @abstractmethod
    def begin(self, run: RunInfo, folder: Path, settings: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Start logging a run whose run directory is ``folder``, or continue it after ``run.start`` rounds."""

    @abstractmethod
    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Log one value per metric."""

    @abstractmethod
    def end(self, status: Status, final: Mapping[str, float], files: Sequence[Path]) -> None:
        """Log status, final numbers and files, flush and close."""


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
            if mlflow.get_experiment_by_name(experiment) is None:
                mlflow.create_experiment(experiment, artifact_location=(folder / "mlflow").as_uri())
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


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def make(names: Sequence[str]) -> list[Tracker]:
    """The trackers with the given names.

    Raises:
        ConfigError: for an unknown name, or a tracker whose library is not installed.
    """
    for name in names:
        if name.lower() not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}; {nearest(name, TRACKERS)}")
    return [TRACKERS[name.lower()]() for name in names]

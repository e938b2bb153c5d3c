"""Experiment trackers: callbacks that send every round's record to TensorBoard or MLflow."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from fedloom.core.errors import ConfigError, nearest
from fedloom.experiment.callbacks import Callback, RunInfo


class Tracker(Callback):
    """Base class of trackers; logging starts with the first record of a run that has a run directory.

    Raises:
        ConfigError: if its library is not installed.
    """

    library: str
    """The module to import."""

    def __init__(self) -> None:
        try:
            self.module: Any = import_module(self.library)
        except ImportError as error:
            name = type(self).__name__.lower()
            raise ConfigError(f"trackers={name} needs: pip install 'fedloom[track]'") from error
        self.run: RunInfo | None = None
        self.begun = False

    def on_start(self, run: RunInfo) -> None:
        self.run, self.begun = run, False

    def on_round(self, record: Mapping[str, Any]) -> None:
        if self.run is None or self.run.directory is None:
            return
        if not self.begun:
            self.begin(self.run, str(self.run.directory.path.absolute()))
            self.begun = True
        self.log(record["round"], {k: float(v) for k, v in record.items() if isinstance(v, int | float)})

    def on_close(self) -> None:
        if self.begun:
            self.end()

    @abstractmethod
    def begin(self, run: RunInfo, folder: str) -> None:
        """Start logging a run whose run directory is ``folder``."""

    @abstractmethod
    def log(self, round: int, numbers: dict[str, float]) -> None:
        """Log one value per metric."""

    @abstractmethod
    def end(self) -> None:
        """Flush and close."""


class TensorBoard(Tracker):
    """Writes scalars to ``<run directory>/tensorboard``."""

    library = "torch.utils.tensorboard"

    def begin(self, run: RunInfo, folder: str) -> None:
        self.writer = self.module.SummaryWriter(f"{folder}/tensorboard")

    def log(self, round: int, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            self.writer.add_scalar(key, value, round)

    def end(self) -> None:
        self.writer.close()


class MLflow(Tracker):
    """Logs to MLflow's tracking server, or to ``<run directory>/mlflow.db`` if ``MLFLOW_TRACKING_URI`` is not set."""

    library = "mlflow"

    def begin(self, run: RunInfo, folder: str) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            self.module.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        self.module.set_experiment("fedloom")
        self.module.start_run(run_name=f"{run.name}-{run.seed}")

    def log(self, round: int, numbers: dict[str, float]) -> None:
        self.module.log_metrics(numbers, step=round)

    def end(self) -> None:
        self.module.end_run()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def make(names: Sequence[str]) -> list[Tracker]:
    """The trackers with the given names.

    Raises:
        ConfigError: for an unknown name, or a tracker whose library is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}; {nearest(name, TRACKERS)}")
    return [TRACKERS[name]() for name in names]

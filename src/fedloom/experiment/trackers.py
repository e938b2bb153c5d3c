"""Experiment trackers, as switches: every round's record goes to TensorBoard or MLflow too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fedloom.core.errors import ConfigError, nearest


class Tracker(Protocol):
    """Receives every round's record."""

    def log(self, round: int, record: Mapping[str, Any]) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class TensorBoard:
    """Writes scalars into ``<run directory>/tensorboard``."""

    def __init__(self, out: Path, name: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("trackers=tensorboard needs: pip install 'fedloom[track]'") from error
        self.writer = SummaryWriter(str(out / "tensorboard"))

    def log(self, round: int, record: Mapping[str, Any]) -> None:
        """One point in every curve."""
        for key, value in numbers(record).items():
            self.writer.add_scalar(key, value, round)

    def close(self) -> None:
        """Flush."""
        self.writer.close()


class MLflow:
    """Logs to MLflow's tracking server, or to ``<run directory>/mlflow.db`` if ``MLFLOW_TRACKING_URI`` is not set."""

    def __init__(self, out: Path, name: str) -> None:
        try:
            mlflow = import_module("mlflow")
        except ImportError as error:
            raise ConfigError("trackers=mlflow needs: pip install 'fedloom[track]'") from error
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{out.absolute()}/mlflow.db")
        mlflow.set_experiment("fedloom")
        mlflow.start_run(run_name=name)
        self.mlflow = mlflow

    def log(self, round: int, record: Mapping[str, Any]) -> None:
        """One point in every curve."""
        self.mlflow.log_metrics(numbers(record), step=round)

    def close(self) -> None:
        """End the MLflow run."""
        self.mlflow.end_run()


TRACKERS = {"tensorboard": TensorBoard, "mlflow": MLflow}


def make(names: list[str], out: Path, run_name: str) -> list[Tracker]:
    """The trackers of the given names.

    Raises:
        ConfigError: for an unknown name, or one whose library is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}; {nearest(name, TRACKERS)}")
    return [TRACKERS[name](out, run_name) for name in names]


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numeric entries of a record.

    >>> numbers({"round": 1, "global/loss": None, "global/accuracy": 0.5})
    {'round': 1.0, 'global/accuracy': 0.5}
    """
    return {k: float(v) for k, v in record.items() if isinstance(v, int | float)}

"""Experiment trackers: callbacks that log a run to a library or service for experiments.

A tracker begins before training, with the settings as parameters and the run's identity as tags; it logs every number
of every record, and at the end the status and the files of the run directory.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.base.errors import ConfigError, first_line, import_extra
from fedloom.base.registry import Registry
from fedloom.base.settings import flatten
from fedloom.experiment.callbacks import Callback, RunInfo
from fedloom.experiment.rundir import PROVENANCE, RunDirectory, Status

STORE = "mlflow.db"
"""MLflow's own file in a run directory, and the beginning of the names of files beside it."""


def files(directory: RunDirectory) -> list[Path]:
    """The files of a run directory that are uploaded: not checkpoints, single runs of a search, caches or links."""
    paths = [*directory.path.iterdir(), *(directory.figures.iterdir() if directory.figures.is_dir() else ())]
    regular_files = (path for path in paths if path.is_file() and not path.is_symlink())
    return sorted(path for path in regular_files if not path.name.startswith((".", STORE)))


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
        self.module: Any = import_extra(self.extra, self.library, f"trackers={self.name}")
        self.run: RunInfo | None = None
        self.lost = False  # whether the library has failed in this run

    @property
    def name(self) -> str:
        """The name under which it is chosen."""
        return trackers.name_of(type(self)) or type(self).__name__.lower()

    def on_start(self, run: RunInfo) -> None:
        if run.directory is None:
            raise ConfigError(f"trackers={self.name} tracks run directories; give the run one, with out=….")
        config, folder = run.directory.config(), run.directory.path.resolve()
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
        summary = directory.summary()
        final = (summary.get("final") or {}).items()
        numbers = {key: float(value) for key, value in final if isinstance(value, int | float)}
        self._try(self.end, Status.of(summary), numbers, files(directory))

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
        """Log a run that has ended, from its run directory."""
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


trackers = Registry[Tracker]("tracker")
trackers.register_lazily("fedloom_apps", ["trackers.TensorBoard", "trackers.MLflow", "trackers.WandB"])

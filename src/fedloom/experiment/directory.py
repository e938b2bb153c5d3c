"""The run directory: what a run leaves behind, and what tools read.

``config.yaml`` (everything resolved, with versions, git revision and seed), ``metrics.jsonl`` (one object a round),
``clients.parquet`` (round, client, n, accuracy, loss), ``mixing.parquet`` (round, client, p and, where a policy or
``evaluation.on=[received]`` asked, the client's training ``loss`` F_i(θ^t) of the model it received, NaN if it has
none), ``checkpoint/``, ``clients/`` (client states, where they live on disk), ``model.safetensors`` (the final server
model under its module's names), ``summary.json``, ``citations.bib``. With the losses, each round's record has
``mixing/objective``, Σ p_i F_i(θ^t).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from fedloom.core.errors import CheckpointError
from fedloom.experiment.checkpoint import write_whole

PACKAGES = ("fedloom", "torch", "numpy", "scipy", "omegaconf", "safetensors", "pyarrow")


class Table:
    """A growing table of one row a (round, client), kept in columns and written as one parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: list[dict[str, np.ndarray]] = []

    def add(self, round: int, columns: Mapping[str, np.ndarray]) -> None:
        """Add one round's rows."""
        rows = len(next(iter(columns.values())))
        self.blocks.append({"round": np.full(rows, round, dtype=np.int64), **columns})

    def write(self) -> None:
        """Write all rows, atomically."""
        if not self.blocks:
            return
        columns = {name: np.concatenate([b[name] for b in self.blocks]) for name in self.blocks[0]}
        self.blocks = [columns]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), sink, compression="zstd")
        write_whole(self.path, sink.getvalue().to_pybytes())

    def read(self, up_to: int) -> None:
        """Take back the rows of rounds up to ``up_to`` from disk."""
        if self.path.exists():
            stored = pq.read_table(self.path)
            columns = {name: stored[name].to_numpy() for name in stored.column_names}
            past = columns["round"] <= up_to
            self.blocks = [{name: column[past] for name, column in columns.items()}]


class RunDirectory:
    """Writes a run directory; everything in it is whole at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoint"
        self.clients = Table(path / "clients.parquet")
        self.mixing = Table(path / "mixing.parquet")
        self.history: list[dict[str, Any]] = []

    @property
    def recorded(self) -> int:
        """The last round on record."""
        return self.history[-1]["round"] if self.history else 0

    @property
    def exists(self) -> bool:
        """Whether there is a run here already; half-written files of one killed at its very start do not count."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(not entry.name.startswith(".") for entry in self.path.iterdir())

    def create(self, config: Mapping[str, Any], citations: str) -> None:
        """Start a new run directory.

        Raises:
            CheckpointError: if the path is taken or cannot be written.
        """
        if self.exists:
            raise CheckpointError(
                f"{self.path} exists already; choose another out=, or continue it with resume={self.path}."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.describe(config, citations)
        except OSError as error:
            raise CheckpointError(f"the run directory {self.path} cannot be written: {error.strerror}.") from error

    def describe(self, config: Mapping[str, Any], citations: str) -> None:
        """(Re)write ``config.yaml``, which makes the folder a run directory, and ``citations.bib``."""
        write_whole(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(config))).encode())
        write_whole(self.path / "citations.bib", citations.encode())

    def config(self) -> dict[str, Any]:
        """The stored configuration.

        Raises:
            CheckpointError: if this is not a run directory.
        """
        path = self.path / "config.yaml"
        if not path.is_file():
            raise CheckpointError(f"{self.path} is not a run directory: it has no config.yaml.")
        stored = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(stored, dict)
        return {str(k): v for k, v in stored.items()}

    def rewind(self, round: int) -> None:
        """Forget everything after a round, which a checkpoint holds: a killed run may have gone further."""
        self.history = [record for record in self._read_history() if record["round"] <= round]
        lines = "".join(json.dumps(record) + "\n" for record in self.history)
        write_whole(self.path / "metrics.jsonl", lines.encode())
        self.clients.read(round)
        self.mixing.read(round)

    def record(self, record: dict[str, Any]) -> None:
        """Append one round.

        Raises:
            CheckpointError: if the disk is full; the checkpoints written so far stay good.
        """
        self.history.append(record)
        try:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            self.history.pop()
            raise CheckpointError(
                f"{self.path}/metrics.jsonl cannot be written ({error.strerror}); "
                f"make room and continue with resume={self.path}."
            ) from error

    def write_tables(self) -> None:
        """Write both parquet files, and wait until the records so far are on disk."""
        with (self.path / "metrics.jsonl").open("ab") as file:
            os.fsync(file.fileno())
        self.clients.write()
        self.mixing.write()

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        write_whole(self.path / "summary.json", json.dumps(summary, indent=1).encode())

    def _read_history(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        records = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:  # the line that was being written when the run was killed
                break
        return records


def environment() -> dict[str, Any]:
    """Versions of what ran, the machine's kind and the git revision of the sources, if they are in a repository."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        revision = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        revision = None
    return {"versions": versions, "machine": platform.machine(), "git": revision}

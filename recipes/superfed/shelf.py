"""What the recipes of this folder share: the setting of the thesis' chapter II, run directories, what a run came to."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from torch import float32

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.models import models
from fedloom.run.experiment import Evaluation, Experiment
from fedloom.run.loop import RunResult, run

sys.path.append(str(Path(__file__).resolve().parents[1]))
from pages import machine, notes, read, rounded, table, write

__all__ = ["float32", "machine", "notes", "read", "rounded", "table", "write"]

RESULTS = Path(__file__).parent / "results"
METHODS: dict[str, dict[str, float]] = {  # registered methods and their settings
    "FedAvg": {},
    "FedProx": {"mu": 0.01},
    "SCAFFOLD": {},
    "LG-FedAvg": {},
    "FedPer": {},
    "APFL": {"alpha": 0.25},
    "pFedMe": {"pull_in": 15.0, "steps": 5},
    "Ditto": {"pull_in": 0.1},
    "FedRep": {"share": 0.9},
    "SuPerFed-MM": {"mu": 0.01, "nu": 1.0},
    "SuPerFed-LM": {"mu": 0.01, "nu": 1.0},
}


def experiment(
    name: str,
    federation: Federation,
    rounds: int,
    seed: int,
    metrics: tuple[str, ...] = ("accuracy",),
    start: float = 0.0,
    looks: int = 4,
) -> Experiment:
    """A method under the thesis' settings on MNIST, measured at all clients ``looks`` times.

    SuPerFed's local models are trained after the share ``start`` of the rounds, L/T.
    """
    late = {"start": int(start * rounds)} if name.startswith("SuPerFed") else {}
    method = methods.make(folder(name), **METHODS[name], **late)
    momentum = 0.0 if method.needs("plain_sgd") else 0.9
    return Experiment(
        method,
        federation,
        lambda: models.make("two_nn", classes=10, inputs=(1, 28, 28)),
        rounds=rounds,
        cohort=5,
        local=Local(epochs=10, batch_size=10, lr=0.01, lr_decay=0.99, momentum=momentum, weight_decay=1e-4),
        evaluation=Evaluation(on=("clients",), every=max(rounds // looks, 1), metrics=metrics),
        seed=seed,
    )


def folder(name: str) -> str:
    """A method's name as that of a folder."""
    return name.lower().replace("-", "_")


def done(chosen: Experiment, where: Path) -> tuple[RunResult, float]:
    """Run it or go on with it; the result, and the processor's seconds that this took."""
    started = time.process_time()
    result = run(chosen, where, resume=(where / "config.yaml").exists(), checkpoint_every=5, keep=1)
    return result, time.process_time() - started


def history(where: Path) -> list[dict[str, Any]]:
    """A run's records so far."""
    path = where / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def trained(where: Path, until: int) -> set[int]:
    """The clients that have taken part up to a round, by the run's own tables."""
    rows = parquet.read_table(where / "mixing.parquet").to_pydict()
    return {client for client, at in zip(rows["client"], rows["round"], strict=True) if at <= until}


def last_table(where: Path) -> dict[str, np.ndarray]:
    """The clients' columns as they were last measured."""
    rows = parquet.read_table(where / "clients.parquet").to_pydict()
    columns = {name: np.array(values) for name, values in rows.items()}
    return {name: values[columns["round"] == columns["round"].max()] for name, values in columns.items()}


def took_part(where: Path, metric: str = "accuracy") -> dict[str, float]:
    """How many clients had taken part when they were last measured; mean and deviation over them, and the others."""
    clients = last_table(where)
    inside = np.isin(clients["client"], sorted(trained(where, int(clients["round"].max()))))
    found: dict[str, float] = {"count": int(inside.sum())}
    for side, of in (("in", inside), ("out", ~inside)):
        if of.any():
            found |= {side: float(clients[metric][of].mean()), f"{side}_std": float(clients[metric][of].std())}
    return found


def percent(mean: float | None, deviation: float | None = None) -> str:
    """``98.21 (1.28)``: mean and standard deviation in percent.

    >>> percent(0.9821, 0.0128), percent(None)
    ('98.21 (1.28)', '-')
    """
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + ("" if deviation is None else f" ({100 * deviation:.2f})")

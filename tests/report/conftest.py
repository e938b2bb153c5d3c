"""Run directories made up for the tests, in the form the runner writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from helpers.commands import cli

from fedloom.base import yaml
from fedloom.experiment.rundir import VERSION

__all__ = ["cli"]

MODEL = 1000  # parameters
CLIENTS = 20
COHORT = 4

Maker = Callable[..., Path]


def write_run(
    path: Path,
    method: str = "fedavg",
    seed: int = 1,
    rounds: int = 12,
    planned: int | None = None,
    rate: float = 0.2,
    models_up: int = 1,
    scopes: tuple[str, ...] = ("global", "clients", "average"),
    config: dict[str, Any] | None = None,
    files: tuple[str, ...] = ("summary.json", "clients.parquet", "mixing.parquet", "citations.bib"),
) -> Path:
    """One run: accuracy 1 − e^(−rate·t) plus a little noise, evaluated every second round and in the last."""
    path.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    settings = {
        "method": {"name": method},
        "data": {"name": "digits"},
        "partition": {"name": "dirichlet", "alpha": 0.3},
        "model": {"name": "mlp", "hidden": [32]},
        "clients": CLIENTS,
        "participation": COHORT / CLIENTS,
        "rounds": planned or rounds,
        "seed": seed,
        "engine": {"name": "serial"},
        "evaluation": {"every": 2, "target": 0.8, "metric": "global/accuracy"},
        "identity": {
            "method": {"name": method},
            "federation": {"clients": CLIENTS, "samples": 1400 + seed, "digest": f"d{seed}"},
            "model": {"parameters": MODEL},
            "seed": seed,
        },
        "checkpoint": {"every": 10},
        "kind": "federated",
        "version": VERSION,
        "versions": {"fedloom": "0.1.0"},
    }
    (path / "config.yaml").write_text(yaml.dump({**settings, **(config or {})}))
    lines, clients, mixing = [], [], []
    sent = models_up * COHORT * MODEL
    for t in range(1, rounds + 1):
        row: dict[str, Any] = {
            "round": t,
            "seconds": 0.1,
            "train/loss": 2.3 * np.exp(-rate * t),
            "failures": 0,
            "cohort": COHORT,
        }
        row |= {
            "comm/up_params": sent,
            "comm/down_params": sent,
            "comm/params": 2 * sent * t,
            "comm/bytes": 8 * sent * t,
        }
        if t % 2 == 0 or t == rounds:
            accuracy = float(0.97 * (1 - np.exp(-rate * t)) * (1 + 0.02 * rng.uniform(-1, 1)))
            accuracies = np.clip(accuracy + 0.1 * rng.standard_normal(CLIENTS), 0, 1)
            for scope in scopes:
                middle = "/mean" if scope == "clients" else ""
                row[f"{scope}/accuracy{middle}"] = accuracy
                row[f"{scope}/loss{middle}"] = 2.3 * (1 - accuracy)
            clients += [
                {"round": t, "client": k, "n": 10 + k, "accuracy": a, "loss": 1.0} for k, a in enumerate(accuracies)
            ]
        cohort = rng.choice(CLIENTS, COHORT, replace=False)
        mixing += [{"round": t, "client": int(k), "p": 1 / COHORT} for k in cohort]
        lines.append(json.dumps(row))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if "clients.parquet" in files:
        parquet.write_table(pa.Table.from_pylist(clients), path / "clients.parquet")
    if "mixing.parquet" in files:
        parquet.write_table(pa.Table.from_pylist(mixing), path / "mixing.parquet")
    if "summary.json" in files:
        summary = {
            "method": method,
            "seed": seed,
            "rounds": rounds,
            "parameters": MODEL,
            "clients": CLIENTS,
            "seconds": 1.2,
            "status": "finished",
        }
        (path / "summary.json").write_text(json.dumps(summary))
    if "citations.bib" in files:
        (path / "citations.bib").write_text(f"@article{{{method}2021,\n  title = {{On {method}}},\n}}\n")
    return path


@pytest.fixture
def make_run(tmp_path: Path) -> Maker:
    """Make a run directory below the test's own directory; the name counts up unless given."""
    paths: list[Path] = []

    def make(name: str | None = None, **settings: Any) -> Path:
        paths.append(write_run(tmp_path / "runs" / (name or f"run{len(paths)}"), **settings))
        return paths[-1]

    return make

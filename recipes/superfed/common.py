"""Shared code of this folder's recipes: the setting of the thesis' chapter II, run directories, results of runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from torch import nn

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.data import Source, sources
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult, run
from fedloom.experiment.rundir import RunDirectory
from fedloom.models import models

sys.path.append(str(Path(__file__).resolve().parents[1]))
from protocol import mean_error
from reporting import cpu_seconds, excluded_share, notes, rounded

RESULTS = Path(__file__).parent / "results"
START = 0.4  # L/T
LOCAL = Local(epochs=10, batch_size=10, lr=0.01, lr_decay=0.99, momentum=0.9, weight_decay=1e-4)
METHODS: dict[str, dict[str, float]] = {  # registered methods and their settings
    "FedAvg": {},
    "FedProx": {"mu": 0.01},
    "SCAFFOLD": {},
    "LG-FedAvg": {},
    "FedPer": {},
    "APFL": {"alpha": 0.25, "w_first": True},  # as it was run
    "pFedMe": {"lam": 15.0, "steps": 5, "personal_lr": 0.09},  # as it was run
    "Ditto": {"lam": 0.1},
    "FedRep": {"head_fraction": 0.9},
    "SuPerFed-MM": {"mu": 0.01, "nu": 1.0},
    "SuPerFed-LM": {"mu": 0.01, "nu": 1.0},
}


@dataclass(frozen=True)
class Protocol:
    """The settings in which the thesis' text and the authors' scripts differ.

    Args:
        decay: of the learning rate, a round.
        starts: L/T, by method.
        nus: ν, by method.
        network: by its name.
        suffix: of the files with the results.
    """

    decay: float
    starts: Mapping[str, float]
    nus: Mapping[str, float]
    network: str
    suffix: str


MM, LM = "SuPerFed-MM", "SuPerFed-LM"
TEXT = Protocol(0.99, {MM: START, LM: START}, {MM: 1.0, LM: 1.0}, "two_nn", "")
SCRIPTS = Protocol(0.999, {MM: 0.2, LM: 0.4}, {MM: 1.0, LM: 2.0}, "two_nn_superfed", "_scripts")
SETTINGS = {"scripts": SCRIPTS, "text": TEXT}

PROTOCOLS = {  # what a client of SuPerFed deploys, and the keys of a run's records
    "validation": ("clients/{}/mean", "clients/{}/std"),
    "lambda 0": ("lambda/0/{}/mean", None),
    "lambda .5": ("lambda/0.5/{}/mean", None),
    "lambda 1": ("lambda/1/{}/mean", None),
    "as published": ("as_published/{}/mean", "as_published/{}/std"),
}


@cache
def mnist() -> Source:
    """MNIST, read once."""
    return sources.make("mnist")


def two_nn(network: str = "two_nn") -> nn.Module:
    """The network for MNIST."""
    return models.make(network, classes=10, inputs=(1, 28, 28))


def experiment(
    name: str,
    federation: Federation,
    rounds: int,
    seed: int,
    metrics: tuple[str, ...] = ("accuracy",),
    start: float = 0.0,
    looks: int = 4,
    *,
    model: Callable[[], nn.Module] = two_nn,
    local: Local = LOCAL,
    settings: Mapping[str, float] | None = None,
) -> Experiment:
    """A method under the thesis' settings (by default on MNIST), measured at all clients ``looks`` times.

    SuPerFed's local models are trained after the share ``start`` of the rounds, L/T. ``settings`` replace some of the
    method's own.
    """
    late = {"start_round": int(start * rounds)} if name.startswith("SuPerFed") else {}
    method = methods.make(folder(name), **{**METHODS[name], **late, **(settings or {})})
    return Experiment(
        method,
        federation,
        model,
        rounds=rounds,
        cohort=5,
        local=local,
        evaluation=Evaluation(what=("clients",), every=max(rounds // looks, 1), metrics=metrics),
        seed=seed,
    )


def folder(name: str) -> str:
    """The name of a method's folder."""
    return name.lower().replace("-", "_")


def run_or_resume(conditions: Experiment, where: Path) -> tuple[RunResult, float]:
    """Run an experiment, or resume its run; the result, and the CPU seconds that this took."""
    started = cpu_seconds()
    result = run(conditions, where, resume=(where / "config.yaml").exists(), checkpoint_every=5, keep=1)
    return result, cpu_seconds() - started


def participants(where: Path, until: int, since: int = 0) -> set[int]:
    """The clients that have taken part after round ``since`` and up to ``until``, according to the run's tables."""
    rows = parquet.read_table(where / "mixing.parquet").to_pydict()
    return {client for client, at in zip(rows["client"], rows["round"], strict=True) if since < at <= until}


def last_table(where: Path) -> dict[str, np.ndarray]:
    """The clients' columns as they were last measured."""
    rows = parquet.read_table(where / "clients.parquet").to_pydict()
    columns = {name: np.array(values) for name, values in rows.items()}
    return {name: values[columns["round"] == columns["round"].max()] for name, values in columns.items()}


def by_participation(where: Path, metric: str = "accuracy") -> dict[str, float]:
    """How many clients had taken part at the last measurement; mean and deviation over them and over the others."""
    clients = last_table(where)
    inside = np.isin(clients["client"], sorted(participants(where, int(clients["round"].max()))))
    stats: dict[str, float] = {"count": int(inside.sum())}
    for side, mask in (("in", inside), ("out", ~inside)):
        if mask.any():
            stats |= {side: float(clients[metric][mask].mean()), f"{side}_std": float(clients[metric][mask].std())}
    return stats


def cell(where: Path, metric: str = "accuracy") -> dict[str, Any]:
    """A run's results so far: the curve of each protocol, and the clients that took part; empty if unmeasured."""
    history = RunDirectory(where).metrics()
    evaluations = [r for r in history if f"clients/{metric}/mean" in r]
    if not evaluations or not (where / "clients.parquet").exists():
        return {}
    results: dict[str, Any] = {"rounds": evaluations[-1]["round"], "at": [r["round"] for r in evaluations]}
    results["left_out"] = excluded_share(history)
    for name, keys in PROTOCOLS.items():
        mean, deviation = (key and key.format(metric) for key in keys)
        if mean in evaluations[-1]:
            columns = [[rounded(r.get(key)) for r in evaluations] for key in (mean, deviation) if key]
            results[name] = dict(zip(("mean", "std"), columns, strict=False))
    return results | {"took part": {k: rounded(v) for k, v in by_participation(where, metric).items()}}


def foot(results: dict[str, Any]) -> list[str]:
    """The last lines of a page: command, machine, time and notes."""
    text = ["", f"`{results['command']}`. {results.get('machine', '')}."]
    if seconds := results.get("core_seconds"):
        text += [f"The runs took at least {sum(seconds.values()) / 60:.0f} minutes of one core."]
    return [*text, *notes(results)]


def mean_with_deviation(pairs: Sequence[Sequence[float | None]], scale: float = 100, digits: int = 2) -> str:
    """Mean ± standard error over seeds and, if there are deviations over clients, their mean in brackets.

    >>> mean_with_deviation([[0.5, 0.25], [0.75, 0.25]]), mean_with_deviation([[0.5, None]])
    ('62.50 ± 12.50 (25.00)', '50.00')
    """
    text = mean_error([value for value, _ in pairs if value is not None], scale, digits)
    deviations = [off for _, off in pairs if off is not None]
    return f"{text} ({scale * fmean(deviations):.{digits}f})" if deviations else text


def last_value(by_seed: Mapping[str, Any], protocol: str) -> str:
    """The last value of a protocol of a method's cells; ``-`` where the method has none.

    >>> last_value({"0": {"validation": {"mean": [0.5, 0.6], "std": [0.1, 0.2]}}}, "validation")
    '60.00 (20.00)'
    """
    curves = [run[protocol] for run in by_seed.values() if protocol in run]
    return mean_with_deviation([(curve["mean"][-1], curve["std"][-1] if "std" in curve else None) for curve in curves])

"""Shared code of the recipes in this folder: data sets with their settings, methods with their grids, and single runs.

Every run is a run directory, named by its data, method and seed, which is read if it exists and continued if it was
interrupted; recipes that need the same run share it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

from fedloom import methods
from fedloom.core.method import Method
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.metrics import fairness
from fedloom.models import models
from fedloom.parts.mixing import AAggFFD, AAggFFS, Uniform
from fedloom.parts.mixing.responses import CDFS, Name

sys.path.append(str(Path(__file__).resolve().parents[1]))
from reporting import excluded_share
from settings import DEVICES, SETTINGS, SILOS, VALIDATION, deal, load

__all__ = ["CDFS", "DEVICES", "SETTINGS", "SILOS", "Bench", "deal", "load"]

FIGURES = ("mean", "weighted", "worst10", "best10", "gini", "gap")
AVERAGE = 0.97
"""Of the server's models: evaluated beside the last one where only some clients take part in a round."""
GRIDS: dict[str, tuple[str, dict[str, tuple]]] = {  # the paper's; FedMGDA+ also has a step length, which it needs
    "FedAvg": ("fedavg", {}),
    "uniform": ("fedavg", {}),  # 1/|S| instead of samples: not in the paper, but what AAggFF-D is without responses
    "AFL": ("afl", {"step": (0.01, 0.1, 1.0)}),
    "q-FedAvg": ("q_ffl", {"q": (0.1, 1.0, 5.0)}),
    "TERM": ("term", {"lam": (0.1, 1.0, 10.0)}),
    "FedMGDA+": ("fedmgda", {"eps": (0.1, 0.5, 1.0), "lr": (0.01, 0.1, 1.0)}),
    "PropFair": ("propfair", {"M": (2.0, 3.0, 5.0)}),
}
VARIANTS: dict[str, dict[str, str]] = {  # of AAggFF, with its CDF
    "AAggFF, held out": {"response": "validation"},
    "AAggFF, samples": {"prior": "samples"},
    "AAggFF, samples, held out": {"prior": "samples", "response": "validation"},
    "AAggFF, visits": {"step": "visits"},
    "AAggFF, samples, visits": {"prior": "samples", "step": "visits"},
}


def grid(name: str, method: str) -> list[dict[str, Any]]:
    """The grid points of a method: combinations of its settings."""
    axes = {"cdf": SETTINGS[name].cdfs} if method == "AAggFF" else GRIDS[method][1]
    points: list[dict[str, Any]] = [{}]
    for key, values in axes.items():
        points = [{**point, key: value} for point in points for value in values]
    return points


def make(name: str, method: str, point: Mapping[str, Any]) -> Method:
    """A method of the tables with its settings."""
    composition = methods.make(GRIDS[method][0] if method in GRIDS else SETTINGS[name].aaggff, **point)
    return replace(composition, name=method, mixing=Uniform()) if method == "uniform" else composition


def fair(name: str, method: Method, cdf: Name) -> Method:
    """The same method with AAggFF's mixing coefficients."""
    mixing = AAggFFD(cdf) if SETTINGS[name].cohort else AAggFFS(cdf)
    return replace(method, name=f"{method.name}+aaggff", mixing=mixing)


def text(point: Mapping[str, Any]) -> str:
    """A point in words.

    >>> text({"eps": 0.1, "lr": 1.0, "cdf": "normal"})
    'eps 0.1, lr 1, normal'
    """
    return ", ".join(f"{k} {v:g}" if isinstance(v, float) else str(v) for k, v in point.items())


def experiment(name: str, method: Method, lr: float, seed: int, rounds: int | None = None) -> Experiment:
    """A run as in the paper: clients are evaluated at the end, losses of received models are recorded throughout."""
    setting = SETTINGS[name]
    federation = deal(name, seed, VALIDATION if method.needs("validation") else 0.0)
    arrays = federation.train.arrays
    shape = {"classes": arrays.classes, "inputs": tuple(arrays.x.shape[1:]), **setting.model_settings}
    total = rounds or setting.rounds
    return Experiment(
        method,
        federation,
        lambda: models.make(setting.model, **shape),
        rounds=total,
        cohort=setting.cohort or None,
        local=replace(setting.local, lr=lr),
        evaluation=Evaluation(
            ("clients", "received"),
            total,
            metric=f"clients/{setting.metric}/mean",
            metrics=(setting.metric,),
            server_average=AVERAGE if setting.cohort else 0.0,
        ),
        engine="serial",
        compute="batched",
        compute_settings={"shares": 1},  # at most five small clients: one pass a step
        seed=seed,
    )


@dataclass(frozen=True)
class Bench:
    """Where runs are kept, their number of rounds (None: the setting's), and which rows are run (none given: all)."""

    runs: Path
    rounds: int | None = None
    only: tuple[str, ...] = ()

    def place(self, name: str, label: str, lr: float, seed: int) -> Path:
        """The run directory."""
        return self.runs / name / f"{label}, rate {lr:g}" / f"seed{seed}"

    def trial(self, name: str, label: str, method: Method, lr: float, seed: int) -> dict[str, Any]:
        """One run's figures; the run is made if it does not exist."""
        where = self.place(name, label, lr, seed)
        total = self.rounds or SETTINGS[name].rounds
        summary = where / "summary.json"
        if not summary.exists() or json.loads(summary.read_text())["rounds"] < total:
            conditions = experiment(name, method, lr, seed, self.rounds)
            run(conditions, where, resume=where.exists(), checkpoint_every=100, keep=1)
        return figures(where, SETTINGS[name].metric)

    def curve(self, name: str, label: str, method: Method, lr: float, seed: int) -> list[float]:
        """The accumulated global objective of an existing run, at no more than 101 rounds spread evenly over it."""
        history = records(self.place(name, label, lr, seed))
        total = np.cumsum([record["mixing/objective"] or 0.0 for record in history])
        at = np.unique(np.linspace(0, len(total) - 1, 101).round().astype(int))
        return [float(f"{total[i]:.5g}") for i in at]

    def choose(
        self, name: str, candidates: Iterable[tuple[str, Method, float]], by: Callable[[dict[str, Any]], Any]
    ) -> tuple[int, list[dict[str, Any]]]:
        """The index of the best candidate (label, method, rate) on the tuning seeds, and the mean figures of all."""
        trials = []
        for label, method, lr in candidates:
            results = [self.trial(name, label, method, lr, seed) for seed in SETTINGS[name].tuning]
            means = {key: round(fmean(result[key] for result in results), 6) for key in FIGURES}
            trials.append({"point": f"{label}, rate {lr:g}", **means})
        return max(range(len(trials)), key=lambda i: by(trials[i])), trials


def fairest(result: Mapping[str, Any]) -> tuple[float, float]:
    """The criterion for points of a fair method: the worst 10 %, then the average."""
    return result["worst10"], result["mean"]


def average(result: Mapping[str, Any]) -> float:
    """The criterion for learning rates and for methods that do not aim at fairness."""
    return result["mean"]


def records(where: Path) -> list[dict[str, Any]]:
    """The records of a run directory."""
    return [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]


def figures(where: Path, metric: str) -> dict[str, Any]:
    """The statistics of a run for tables and figures.

    The figures of fairness, for all clients and, where some did not train, for these and the others; the clients'
    values (21 quantiles where there are more clients), the mean largest coefficient of a round, the last round's
    coefficients and training losses, and the accumulated global objective.
    """
    history = records(where)
    clients, mixing = parquet.read_table(where / "clients.parquet"), parquet.read_table(where / "mixing.parquet")
    values = clients[metric].to_numpy()[clients["round"].to_numpy() == history[-1]["round"]]
    finite = np.sort(values[np.isfinite(values)])
    at_end = clients["round"].to_numpy() == history[-1]["round"]
    summary = fairness.summary(values, clients["n"].to_numpy()[at_end])
    rounds, p = mixing["round"].to_numpy(), mixing["p"].to_numpy()
    largest = [p[rounds == t].max() for t in np.unique(rounds)]
    last, losses = (mixing[column].to_numpy()[rounds == rounds.max()] for column in ("p", "loss"))
    spread = finite if len(finite) <= 21 else np.quantile(finite, np.linspace(0, 1, 21))
    objective = np.array([np.nan if r["mixing/objective"] is None else r["mixing/objective"] for r in history])
    coefficient_sums = np.bincount(
        mixing["client"].to_numpy(), p, minlength=int(clients["client"].to_numpy().max()) + 1
    )
    divergences = [r["mixing/kl"] for r in history if r.get("mixing/kl") is not None]
    server_values = {key: history[-1].get(f"server_average/{metric}/{key}") for key in FIGURES}
    server_average = {key: value for key, value in server_values.items() if value is not None}
    by_group = {
        group: {key: round(history[-1][f"{group}/{metric}/{key}"], 6) for key in FIGURES}
        for group in ("seen", "unseen")
        if f"{group}/{metric}/mean" in history[-1]
    }
    return {
        **{key: round(summary[key], 6) for key in FIGURES},
        **({"averaged": {k: round(v, 6) for k, v in server_average.items()}} if server_average else {}),
        **by_group,
        "hardest_p": round(fairness.hardest_weight(values, coefficient_sums[clients["client"].to_numpy()[at_end]]), 4),
        "kl": round(float(np.mean(divergences)), 5) if divergences else None,
        "rounds": len(history),
        "clients": np.round(spread, 4).tolist(),
        "largest_p": round(float(np.mean(largest)), 4),
        "last_p": np.round(last, 4).tolist(),
        "last_losses": np.round(losses, 4).tolist(),
        "objective": round(float(np.nansum(objective)), 4),
        "failures": sum(r["failures"] for r in history),
        "left_out": excluded_share(history),
        "seconds": round(sum(r["seconds"] for r in history), 1),
    }

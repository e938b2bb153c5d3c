"""Curves of a group: the mean over seeds, with a band from the lowest to the highest."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.experiment.report.groups import Group
from fedloom.experiment.report.rundir import Run

Floats = NDArray[np.float64]

COMMUNICATION = "comm/params"
"""Parameters transmitted so far, by all clients, in both directions."""


@dataclass(frozen=True)
class Scope:
    """One way to evaluate, and the names of its metrics."""

    name: str
    title: str
    accuracy: str
    loss: str


SCOPES = (
    Scope("global", "Server model on the common test set", "global/accuracy", "global/loss"),
    Scope(
        "clients",
        "Deployed models on the clients' own test data, mean over clients",
        "clients/accuracy/mean",
        "clients/loss/mean",
    ),
    Scope("average", "Average of all clients' last models", "average/accuracy", "average/loss"),
    Scope("training", "Server model on all training data", "global/train_accuracy", "global/train_loss"),
    Scope("train", "Clients during their local training", "train/accuracy", "train/loss"),
)


@dataclass(frozen=True)
class Series:
    """A line and its band: mean, lowest and highest value over seeds at each x."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def has(groups: Sequence[Group], key: str) -> bool:
    """Whether any run has a finite value of the metric."""
    return any(np.isfinite(run.curve(key)[1]).any() for member in groups for run in member.runs)


_LEVEL = re.compile(r"(global|average|clients)/([^/]+)/accuracy(?:/mean)?")
_OF_LEVEL = {
    "global": "Server model of level {} on the common test set",
    "clients": "Deployed models of the clients of level {} on their own test data, mean over clients",
    "average": "Average of the last models of the clients of level {}",
}


def _levels(groups: Sequence[Group], scope: Scope) -> list[Scope]:
    """The evaluations of single levels' networks, where clients train networks of different size."""
    keys = dict.fromkeys(key for member in groups for run in member.runs for row in run.rows for key in row)
    found = []
    for key in keys:
        if (match := _LEVEL.fullmatch(key)) and match[1] == scope.name:
            title = _OF_LEVEL[scope.name].format(match[2].replace("_", " "))
            found.append(Scope(f"{scope.name}_{match[2]}", title, key, key.replace("/accuracy", "/loss")))
    return found


def headline(groups: Sequence[Group]) -> str:
    """The scope to read first: ``clients`` if any run's method leaves models to its clients, as its summary says."""
    said = [str(run.summary.get("headline", "")) for member in groups for run in member.runs]
    return "clients" if any(key.startswith("clients/") for key in said) else "global"


def scopes(groups: Sequence[Group]) -> list[Scope]:
    """The evaluations of which there is anything to draw, the one to read first in front."""
    first = headline(groups)
    ordered = [
        scope for scope in sorted(SCOPES, key=lambda s: s.name != first) for scope in (scope, *_levels(groups, scope))
    ]
    return [s for s in ordered if has(groups, s.accuracy) or has(groups, s.loss)]


def _at(run: Run, key: str, rounds: Floats) -> Floats:
    """Values of a metric at the given rounds; NaN where it is missing or not finite."""
    known, values = run.curve(key)
    lookup = dict(zip(known.tolist(), values.tolist(), strict=True))
    found = np.array([lookup.get(r, np.nan) for r in rounds.tolist()], dtype=np.float64)
    return np.where(np.isfinite(found), found, np.nan)


def series(member: Group, key: str, x: str | None = None) -> Series | None:
    """The curve of a metric over rounds, or over another metric ``x`` (its mean over seeds in each round).

    A round counts when any seed has a value there; mean and band are over the seeds that have one.
    """
    rounds = np.unique(np.concatenate([run.curve(key)[0] for run in member.runs]))
    values = np.stack([_at(run, key, rounds) for run in member.runs])  # [seeds, rounds]
    places = rounds if x is None else np.stack([_at(run, x, rounds) for run in member.runs])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rounds without any finite value: NaN, dropped below
        found = Series(
            places if x is None else np.nanmean(places, 0),
            np.nanmean(values, 0),
            np.nanmin(values, 0, initial=np.inf),
            np.nanmax(values, 0, initial=-np.inf),
        )
    keep = np.isfinite(found.mean) & np.isfinite(found.x)
    if not keep.any():
        return None
    return Series(found.x[keep], found.mean[keep], found.low[keep], found.high[keep])

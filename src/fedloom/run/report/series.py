"""Curves of a group: the mean over seeds, with a band from the lowest to the highest."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.run.report.groups import Group
from fedloom.run.report.rundir import Run

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


def scopes(groups: Sequence[Group]) -> list[Scope]:
    """The evaluations of which there is anything to draw."""
    return [s for s in SCOPES if has(groups, s.accuracy) or has(groups, s.loss)]


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

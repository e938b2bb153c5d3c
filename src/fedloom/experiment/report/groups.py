"""Runs that share everything but the seed form one group: one line in a picture, one row in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.experiment.report.palette import Style, styles
from fedloom.experiment.report.rundir import Run

PROVENANCE = ("out", "resume", "versions", "git", "machine", "checkpoint", "states", "client_state", "trackers")
"""First parts of keys that say where and with what a run was made and kept, not what it was."""

ABSENT = "–"


@dataclass(frozen=True)
class Group:
    """Runs that differ by seed alone."""

    label: str
    method: str
    runs: tuple[Run, ...]
    style: Style


def _identity(run: Run) -> dict[str, str]:
    """Every setting that makes a run what it is, as text."""
    return {
        key: str(value)
        for key, value in run.config.items()
        if key != "seed" and key.partition(".")[0] not in PROVENANCE
    }


def _differing(members: Sequence[dict[str, str]]) -> list[str]:
    """Keys whose values are not the same in all, in order of appearance."""
    keys = dict.fromkeys(key for member in members for key in member)
    return [key for key in keys if len({member.get(key, ABSENT) for member in members}) > 1]


def _labels(runs: Sequence[Run]) -> list[str]:
    """The method's name, and, where several groups have the same one, up to three settings that tell them apart."""
    identities = [_identity(run) for run in runs]
    labels = []
    for run, identity in zip(runs, identities, strict=True):
        rivals = [other for r, other in zip(runs, identities, strict=True) if r.method == run.method]
        apart = _differing(rivals)[:3]
        labels.append(", ".join([run.method, *(f"{key}={identity.get(key, ABSENT)}" for key in apart)]))
    return [
        f"{label} #{labels[: i + 1].count(label)}" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def group(runs: Sequence[Run]) -> list[Group]:
    """Put runs that share everything but the seed together: FedAvg first, then in the order in which they are given."""
    members: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        members.setdefault((run.method, *sorted(_identity(run).items())), []).append(run)
    together = sorted(members.values(), key=lambda found: found[0].method != "fedavg")
    first = [found[0] for found in together]
    looks = styles([run.method for run in first])
    return [
        Group(label, run.method, tuple(found), look)
        for label, run, found, look in zip(_labels(first), first, together, looks, strict=True)
    ]


def settings(groups: Sequence[Group]) -> tuple[list[tuple[str, list[str]]], list[tuple[str, str]]]:
    """Settings that differ, with the value of each group, and settings in common; without the seeds and paths.

    Several values within one group (versions of libraries, say) are listed with commas.
    """
    runs = [run for member in groups for run in member.runs]
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in ("seed", "out", "resume"))
    differ: list[tuple[str, list[str]]] = []
    common: list[tuple[str, str]] = []
    for key in keys:
        values = [
            ", ".join(dict.fromkeys(str(run.config.get(key, ABSENT)) for run in member.runs)) for member in groups
        ]
        if len(set(values)) > 1:
            differ.append((key, values))
        else:
            common.append((key, values[0]))
    return differ, common


def shared(groups: Sequence[Group], *keys: str) -> str | None:
    """The value that all runs have for the first of ``keys`` that any of them has; None when they differ or lack it."""
    for key in keys:
        values = {str(run.config.get(key, ABSENT)) for member in groups for run in member.runs}
        if values != {ABSENT}:
            return values.pop() if len(values) == 1 else None
    return None

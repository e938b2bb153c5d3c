"""The tables of what it cost: communication until a target, and in all."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from fedloom.experiment.report.groups import ABSENT, Group
from fedloom.experiment.report.results import names
from fedloom.experiment.report.rundir import Run
from fedloom.experiment.report.series import COMMUNICATION, has
from fedloom.experiment.report.table import Cell, Sample, Table, as_amount, as_count, assemble, column
from fedloom.experiment.report.target import Target, targets
from fedloom.experiment.report.traffic import arithmetic, traffic, unit
from fedloom.metrics import fedavg_rounds, parameters_to_target, rounds_to_target


def as_seconds(value: float, brief: bool = False) -> str:
    """Seconds with two significant digits, or whole.

    >>> as_seconds(0.01234), as_seconds(75.2)
    ('0.012', '75')
    """
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def _relative(run: Run, at: int | None, groups: Sequence[Group]) -> float | None:
    """Uploads until round ``at`` in FedAvg rounds."""
    sent = None if at is None else traffic(run).up_until(at)
    one = unit(run, groups)
    return None if sent is None or one is None else fedavg_rounds(sent, 1, one)


def _parameters(run: Run, key: str, target: Target) -> float | None:
    """Parameters sent both ways until the target."""
    rounds, values = run.curve(key)
    sent = dict(zip(*(column.tolist() for column in run.curve(COMMUNICATION)), strict=True))
    until = [sent.get(r, np.nan) for r in rounds.tolist()]
    return parameters_to_target(values, until, target.value, target.direction)


_NOTE = (
    "Mean ± sample standard deviation over the seeds that reached the target. Rounds: the first evaluated one with a "
    "value at least as good as the target; “–” where it is never reached. FedAvg rounds = parameters sent up by all "
    "clients until then ÷ (clients in the cohort × parameters of one model): a FedAvg round sends one model up from "
    "each client, so FedAvg needs as many as it has rounds, and a method that sends a second model twice as many. "
    "Parameters counts both directions. FedAvg ÷ method compares the FedAvg rounds that both need. "
)


def _target_table(groups: Sequence[Group], target: Target) -> Table:
    key = target.metric

    def reached(run: Run) -> int | None:
        rounds, values = run.curve(key)
        return rounds_to_target(values, rounds, target.value, target.direction)

    relative = [Sample([_relative(run, reached(run), groups) for run in g.runs]) for g in groups]
    header = ["method", "rounds", "FedAvg rounds", "parameters"]
    cells = [
        column([Sample([reached(run) for run in g.runs]) for g in groups], as_count, "min"),
        column(relative, as_count, "min"),
        column([Sample([_parameters(run, key, target) for run in g.runs]) for g in groups], as_amount, "min"),
    ]
    baselines = [found.complete_mean for g, found in zip(groups, relative, strict=True) if g.method == "fedavg"]
    if len(baselines) == 1 and baselines[0] and len(groups) > 1:
        header.append("FedAvg ÷ method")
        cells.append([_saving(baselines[0], found.complete_mean) for found in relative])
    return Table(
        "target_" + re.sub(r"\W+", "_", target.text).strip("_"),
        f"To the target {target.text}",
        header,
        assemble(names(groups), *cells),
        note=_NOTE + arithmetic(groups),
    )


def _saving(baseline: float | None, needed: float | None) -> Cell:
    """How many times the communication of this method FedAvg needs."""
    return Cell(f"{baseline / needed:.1f} ×" if baseline and needed else ABSENT)


def _total_table(groups: Sequence[Group]) -> Table | None:
    """What was sent in the whole run."""
    if not has(groups, COMMUNICATION):
        return None

    def last(key: str) -> list[Sample]:
        ends = [[run.curve(key)[1] for run in member.runs] for member in groups]
        return [Sample([float(end[-1]) if len(end) else None for end in of_group]) for of_group in ends]

    sent = [[traffic(run) for run in member.runs] for member in groups]
    up = [Sample([float(t.up.mean()) if len(t.up) else None for t in of_group]) for of_group in sent]
    down = [Sample([float(t.down.mean()) if len(t.down) else None for t in of_group]) for of_group in sent]
    seconds = [Sample([_seconds(run) for run in member.runs]) for member in groups]
    return Table(
        "sent",
        "What was sent, by all clients together",
        ["method", "up, a round", "down, a round", "in all", "bytes in all", "seconds a round"],
        assemble(
            names(groups),
            column(up, as_amount, None, spread=False),
            column(down, as_amount, None, spread=False),
            column(last(COMMUNICATION), as_amount, None, spread=False),
            column(last("comm/bytes"), as_amount, None, spread=False),
            column(seconds, as_seconds, None, spread=False),
        ),
        note="Means over seeds. Parameters are counted from what was sent, in both directions. Seconds are the median "
        "of the rounds' wall time on the machine of the run.",
    )


def _seconds(run: Run) -> float | None:
    seconds = run.curve("seconds")[1]
    seconds = seconds[np.isfinite(seconds)]
    return float(np.median(seconds)) if len(seconds) else None


def cost_tables(groups: Sequence[Group]) -> list[Table]:
    """A table for each target that the runs name, then what was sent in all."""
    found = [_target_table(groups, target) for target in targets(groups) if has(groups, target.metric)]
    total = _total_table(groups)
    return [*found, *([total] if total else [])]

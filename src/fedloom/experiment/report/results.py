"""The tables of what was reached: accuracy, loss, fairness."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedloom.experiment.report.groups import Group
from fedloom.experiment.report.rundir import Run
from fedloom.experiment.report.series import Scope, has, scopes
from fedloom.experiment.report.table import (
    Cell,
    Format,
    Sample,
    Table,
    as_count,
    as_number,
    as_percent,
    assemble,
    column,
)
from fedloom.metrics import Direction, best_round, final_smoothed, summary

EMA = 0.9

Figure = Callable[[Run, str], float | None]
"""One number for a metric of a run."""


def names(groups: Sequence[Group]) -> list[Cell]:
    """The first column: every group with its line."""
    return [Cell(member.label, style=member.style) for member in groups]


def rounds_done(run: Run) -> str:
    """Rounds on record, and of how many when some are missing.

    Runs stop early on purpose too, so a finished run shows what it did.
    """
    planned = run.number("rounds")
    if planned and not run.finished and run.last_round < planned:
        return f"{run.last_round} of {planned:.0f}"
    return str(run.last_round)


def _rounds(groups: Sequence[Group]) -> list[Cell]:
    return [Cell(", ".join(dict.fromkeys(rounds_done(run) for run in member.runs))) for member in groups]


def final(run: Run, key: str) -> float | None:
    """The last recorded value, NaN if that is what the run wrote."""
    values = run.curve(key)[1]
    return float(values[-1]) if len(values) else None


def _best(run: Run, key: str, direction: Direction) -> float | None:
    rounds, values = run.curve(key)
    found = best_round(values, rounds, direction)
    return found[1] if found else None


def _smoothed(run: Run, key: str) -> float | None:
    rounds, values = run.curve(key)
    found = final_smoothed(values, rounds, EMA)
    return found[1] if found else None


_ACCURACY: tuple[tuple[str, Figure], ...] = (
    ("final round", final),
    ("best round", lambda run, key: _best(run, key, "max")),
    (f"EMA {EMA:g}", _smoothed),
)

_LOSS: tuple[tuple[str, Figure], ...] = (
    ("final round", final),
    ("best round", lambda run, key: _best(run, key, "min")),
)

_NOTE = (
    "Mean ± sample standard deviation over seeds; the best mean of a column is bold. The final round is the last one "
    "evaluated, and is the result. The best round was chosen on the evaluation itself and is optimistic. "
    f"EMA {EMA:g} is the moving average s ← {EMA:g} s + {1 - EMA:.1g} v over the evaluated rounds, at the last one."
)


def _final_table(groups: Sequence[Group], scope: Scope) -> Table:
    seeds = [Cell(str(len(member.runs))) for member in groups]
    header, spans, cells = ["method", "seeds", "rounds"], [("", 3)], [names(groups), seeds, _rounds(groups)]
    parts: tuple[tuple[str, str, tuple[tuple[str, Figure], ...], Format, Direction], ...] = (
        ("accuracy, %", scope.accuracy, _ACCURACY, as_percent, "max"),
        ("loss", scope.loss, _LOSS, as_number, "min"),
    )
    for title, key, figures, form, direction in parts:
        if has(groups, key):
            spans.append((title, len(figures)))
            for name, figure in figures:
                header.append(name)
                cells.append(column([Sample([figure(run, key) for run in g.runs]) for g in groups], form, direction))
    return Table(f"final_{scope.name}", scope.title, header, assemble(*cells), spans, _NOTE)


def final_tables(groups: Sequence[Group]) -> list[Table]:
    """One table for each evaluation: accuracy and loss in the final round, in the best one, and smoothed."""
    return [_final_table(groups, scope) for scope in scopes(groups)]


_FAIRNESS: tuple[tuple[str, str, Direction], ...] = (
    ("mean", "mean", "max"),
    ("weighted", "weighted", "max"),
    ("std", "std", "min"),
    ("worst10", "worst 10 %", "max"),
    ("best10", "best 10 %", "max"),
    ("worst", "worst", "max"),
    ("best", "best", "max"),
    ("gini", "Gini × 100", "min"),
    ("gap", "parity gap", "min"),
)


def client_figures(run: Run) -> dict[str, float]:
    """Fairness of the last evaluated round; empty when the run has no clients.parquet or nobody has an accuracy."""
    if not run.clients:
        return {}
    values = np.asarray(run.clients["accuracy"], dtype=np.float64)
    if not np.isfinite(values).any():
        return {}
    return summary(values, np.asarray(run.clients["n"], dtype=np.float64) if "n" in run.clients else None)


def fairness_table(groups: Sequence[Group]) -> Table | None:
    """How evenly accuracy is spread over clients in the last evaluated round."""
    figures = [[client_figures(run) for run in member.runs] for member in groups]
    if not any(f for of_group in figures for f in of_group):
        return None

    def samples(name: str) -> list[Sample]:
        return [Sample([f.get(name) for f in of_group]) for of_group in figures]

    cells = [column(samples(name), as_percent, better) for name, _, better in _FAIRNESS]
    return Table(
        "fairness",
        "Accuracy of the clients in the last evaluated round, in per cent",
        ["method", "clients", *(title for _, title, _ in _FAIRNESS)],
        assemble(names(groups), column(samples("clients"), as_count, None, spread=False), *cells),
        note="Computed from clients.parquet for each run, then mean ± sample standard deviation over seeds. The "
        "weighted mean weighs clients by their samples; std is over clients (population); worst and best 10 % are "
        "means over max(1, ⌊0.1 K⌋) clients; the parity gap is best minus worst client. Clients without test samples "
        "are left out.",
    )

"""The table of the runs themselves, what failed in them, and whom to cite."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.experiment.report.groups import ABSENT, Group
from fedloom.experiment.report.results import rounds_done
from fedloom.experiment.report.rundir import Run
from fedloom.experiment.report.table import Cell, Table

_NAMED = 5


def status(run: Run) -> str:
    """What the run says of its end, or that it has none yet.

    Returns:
        The ``status`` of the summary, ``finished`` without one, ``unfinished`` when there is no summary.
    """
    return str(run.summary.get("status", "finished")) if run.finished else "unfinished"


def failures(run: Run) -> int:
    """Client updates that were lost, summed over rounds."""
    values = run.curve("failures")[1]
    return int(values[values > 0].sum())


def _told(failure: Any) -> str:
    """One failure of the summary as a line, whatever form it was written in.

    >>> _told({"round": 3, "client": 5, "stage": "step", "message": "loss is NaN"})
    'round 3, client 5, step: loss is NaN'
    """
    if not isinstance(failure, Mapping):
        return str(failure)
    where = [f"{key} {failure[key]}" for key in ("round", "client") if key in failure]
    if "stage" in failure:
        where.append(str(failure["stage"]))
    what = [str(failure[key]) for key in ("kind", "reason", "error", "message") if failure.get(key)]
    rest = [] if where or what else [f"{key} {value}" for key, value in failure.items()]
    return ": ".join(filter(None, [", ".join(where + rest), ", ".join(what)]))


def named_failures(run: Run) -> list[str]:
    """The failures that the summary names: a list, or a mapping of reasons to counts."""
    found = run.summary.get("failures")
    if isinstance(found, Mapping):
        return [f"{reason}: {count}" for reason, count in found.items() if count]
    if not isinstance(found, list):
        return []
    told = [_told(failure) for failure in found]
    return told[:_NAMED] + ([f"and {len(told) - _NAMED} more"] if len(told) > _NAMED else [])


def _clock(seconds: Any) -> str:
    """Wall time for people.

    >>> _clock(42.31), _clock(3725), _clock(None)
    ('42.3 s', '1 h 02 min', '–')
    """
    if not isinstance(seconds, int | float):
        return ABSENT
    if seconds < 100:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def _wall(run: Run) -> Any:
    for key in ("wall_seconds", "wall_time", "seconds"):
        if key in run.summary:
            return run.summary[key]
    seconds = run.curve("seconds")[1]
    return float(seconds.sum()) if len(seconds) else None


def runs_table(groups: Sequence[Group]) -> Table:
    """One row a run: where it lies, how far it came, what failed."""
    rows = [
        [
            Cell(member.label, style=member.style),
            Cell(run.name),
            Cell(run.seed),
            Cell(status(run)),
            Cell(rounds_done(run)),
            Cell(_clock(_wall(run))),
            Cell(str(failures(run))),
        ]
        for member in groups
        for run in member.runs
    ]
    header = ["method", "run directory", "seed", "status", "rounds", "wall time", "failures"]
    return Table("runs", "The runs", header, rows, words=frozenset({1, 3}))


def remarks(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Run directory and sentence, for everything that failed or could not be read."""
    found = []
    for member in groups:
        for run in member.runs:
            lost = failures(run)
            if lost:
                plural = "update was" if lost == 1 else "updates were"
                found.append((run.name, f"{lost} client {plural} lost and left out."))
            found += [(run.name, line) for line in named_failures(run)]
            warnings = run.summary.get("warnings")
            found += [(run.name, str(warning)) for warning in (warnings if isinstance(warnings, list) else [])]
            found += [(run.name, note) for note in run.notes]
    return found


def citations(groups: Sequence[Group]) -> str:
    """The BibTeX of all runs, each entry once, by its key."""
    entries: dict[str, str] = {}
    for member in groups:
        for run in member.runs:
            for entry in re.split(r"(?m)^(?=\s*@\w+\s*\{)", run.citations):
                if key := re.match(r"\s*@\w+\s*\{\s*([^,\s]+)", entry):
                    entries.setdefault(key.group(1), entry.strip())
    return "\n\n".join(entries.values())

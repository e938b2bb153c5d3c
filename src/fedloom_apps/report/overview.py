"""What was compared, with which settings, how the runs ended, and what to cite."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.experiment.console import ABSENT, EPSILONS, WORDS, duration, number, plural
from fedloom_apps.report.groups import RunGroup, all_runs, on_the_same_data, settings, shared, targets
from fedloom_apps.report.results import rounds_done
from fedloom_apps.report.rundata import WALL, RunData
from fedloom_apps.report.tables import ReportTable, words

_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("data", ("data.name", "data")),
    ("partition", ("partition.name", "partition")),
    ("model", ("model.name", "model")),
    ("clients", ("clients",)),
    ("participation", ("participation",)),
    ("rounds", ("rounds",)),
    ("engine", ("engine.name", "engine")),
    ("compute", ("compute.name", "compute")),
)

_PROBLEM = ("data", "partition", "model", "clients")

_NAMED = 5


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def sentence(groups: Sequence[RunGroup]) -> str:
    """A sentence that describes the comparison, naming at most six methods."""
    methods = list(dict.fromkeys(member.method for member in groups))
    named = methods if len(methods) <= 6 else [*methods[:5], f"{len(methods) - 5} more"]
    data = shared(groups, "data.name", "data")
    begin = f"{_joined(named)}{f' on {data}' if data else ''}: "
    variants = f" in {len(groups)} variants" if len(groups) > len(methods) else ""
    return f"{begin}{plural(len(methods), 'method')}{variants}, {plural(len(all_runs(groups)), 'run')}."


def conditions(groups: Sequence[RunGroup]) -> list[tuple[str, str]]:
    """The common conditions, by name, for the head of the page."""
    runs = all_runs(groups)
    pairs = [
        (name, _with_settings(groups, name) if name == "partition" else shared(groups, *keys) or "differs")
        for name, keys in _FACTS
        if any(key in run.config for key in keys for run in runs)
    ]
    seeds = list(dict.fromkeys(run.seed for run in runs))
    pairs.append(("seed" if len(seeds) == 1 else "seeds", ", ".join(seeds[:8]) + (" …" if len(seeds) > 8 else "")))
    if goals := targets(groups):
        pairs.append(("target", "; ".join(goal.text for goal in goals)))
    return pairs


def _with_settings(groups: Sequence[RunGroup], choice: str) -> str:
    """The common value of a choice with its settings, apart from how often a draw is repeated.

    The heterogeneity of the clients is a setting of the partition.
    """
    name = shared(groups, f"{choice}.name", choice)
    keys = dict.fromkeys(key for run in all_runs(groups) for key in run.config if key.startswith(f"{choice}."))
    own = [key for key in keys if key.rpartition(".")[2] not in ("name", "min_size", "redraws")]
    words = [f"{key.partition('.')[2]} {shared(groups, key) or 'differs'}" for key in own]
    return ", ".join([name, *words]) if name else "differs"


def heading(groups: Sequence[RunGroup]) -> str:
    """The heading of the page."""
    runs = all_runs(groups)
    return "Comparison of runs" if len(runs) != 1 else f"Run of {groups[0].method}"


def problem_warning(groups: Sequence[RunGroup]) -> str:
    """A warning if the runs do not solve the same problem, else ""."""
    moved = [key for key in settings(groups)[0] if key.partition(".")[0] in _PROBLEM]
    if not moved and not all(on_the_same_data(groups[0], other) for other in groups[1:]):
        moved = ["the samples that clients hold"]
    if not moved:
        return ""
    return (
        f"These runs do not solve the same problem: they differ in {_joined(moved[:6])}. "
        "Compare their figures with that in mind."
    )


def settings_tables(groups: Sequence[RunGroup]) -> tuple[ReportTable | None, ReportTable | None]:
    """The settings that differ, one column per group, and the common ones; None if there are none."""
    differ, common = settings(groups)
    labels = [member.label for member in groups]
    columns = [words(label, [texts[i] for texts in differ.values()], left=True) for i, label in enumerate(labels)]
    values = words("value", list(common.values()), left=True)
    return (
        ReportTable("settings", "Settings that differ", list(differ), columns, heading="setting") if differ else None,
        ReportTable("common", "Settings in common", list(common), [values], heading="setting") if common else None,
    )


def _failure(failure: Any) -> str:
    """One failure of a summary as a line, whatever its format.

    >>> _failure({"round": 3, "client": 5, "stage": "step", "message": "loss is NaN"})
    'round 3, client 5, step: loss is NaN'
    """
    if not isinstance(failure, Mapping):
        return str(failure)
    where = [f"{key} {failure[key]}" for key in ("round", "client") if key in failure]
    if failure.get("stage"):
        where.append(str(failure["stage"]))
    what = [str(failure[key]) for key in ("kind", "reason", "error", "message") if failure.get(key)]
    rest = [] if where or what else [f"{key} {value}" for key, value in failure.items()]
    return ": ".join(filter(None, [", ".join(where + rest), ", ".join(what)]))


def _failures(run: RunData) -> list[str]:
    """The failures in the summary, given as a list or as a mapping of reasons to counts."""
    failures = run.summary.get("failures")
    if isinstance(failures, Mapping):
        return [f"{reason}: {number}" for reason, number in failures.items() if number]
    if not isinstance(failures, list):
        return []
    lines = [_failure(failure) for failure in failures]
    return lines[:_NAMED] + ([f"and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else [])


def _status(run: RunData) -> str:
    return str(run.summary.get("status", "finished")) if run.summary else "unfinished"


def _wall_time(run: RunData) -> str:
    seconds = run.summary.get("seconds", run.last(WALL))
    return duration(seconds if isinstance(seconds, int | float) else None)


def _left_out(run: RunData) -> str:
    """Number of client updates left out, and their fraction of all."""
    share = run.share_left_out
    return f"{run.left_out} ({100 * share:.1f} %)" if share else str(run.left_out)


def runs_table(groups: Sequence[RunGroup]) -> ReportTable:
    """One row per run: directory, status, rounds, wall time, updates left out, and ε if a run is private."""
    members = [member for member in groups for _ in member.runs]
    runs = all_runs(groups)
    last = [run.rows[-1] if run.rows else {} for run in runs]
    spent = {WORDS[key]: [number(key, record.get(key)) for record in last] for key in EPSILONS}
    columns = [
        words("run directory", [run.name for run in runs], left=True),
        words("seed", [run.seed for run in runs]),
        words("status", [_status(run) for run in runs], left=True),
        words("rounds", [rounds_done(run) for run in runs]),
        words("wall time", [_wall_time(run) for run in runs]),
        words("updates left out", [_left_out(run) for run in runs]),
        *(words(name, texts) for name, texts in spent.items() if {*texts} != {ABSENT}),
    ]
    return ReportTable(
        "runs", "The runs", [member.label for member in members], columns, [member.style for member in members]
    )


def remarks(groups: Sequence[RunGroup]) -> list[tuple[str, str]]:
    """Pairs (run directory, sentence) on everything that failed or could not be read."""
    remarks = []
    for run in all_runs(groups):
        if lost := run.left_out:
            verb = "update was" if lost == 1 else "updates were"
            remarks.append((run.name, f"{lost} client {verb} lost and left out."))
        warnings = run.summary.get("warnings")
        lines = [*_failures(run), *(warnings if isinstance(warnings, list) else []), *run.notes]
        remarks += [(run.name, str(line)) for line in lines]
    return remarks


def citations(groups: Sequence[RunGroup]) -> str:
    """The BibTeX entries of all runs, without duplicate keys."""
    entries: dict[str, str] = {}
    for run in all_runs(groups):
        for entry in re.split(r"(?m)^(?=\s*@\w+\s*\{)", run.citations):
            if key := re.match(r"\s*@\w+\s*\{\s*([^,\s]+)", entry):
                entries.setdefault(key.group(1), entry.strip())
    return "\n\n".join(entries.values())

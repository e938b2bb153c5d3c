"""Tables that compare groups: methods by data, paired tests over seeds, and an ablation of parts and settings.

Cost tables: communication until a target and in total, in units of one FedAvg round. What was compared, with which
settings, how the runs ended, and what to cite.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np

from fedloom.core.slots import SLOTS
from fedloom.experiment.console import ABSENT, EPSILONS, WORDS, duration, notes, number, plural
from fedloom.metrics import rounds_to_target
from fedloom_apps.report.charts import slugs
from fedloom_apps.report.groups import (
    PROVENANCE,
    RunGroup,
    TargetValue,
    all_runs,
    by_data,
    counts,
    has,
    on_the_same_data,
    settings,
    shared,
    targets,
    texts,
)
from fedloom_apps.report.runs import NO_SEED, WALL, Curve, RunData
from fedloom_apps.report.tables import (
    Cell,
    Column,
    Format,
    ReportTable,
    SeedStats,
    as_amount,
    as_count,
    as_number,
    as_percent,
    as_seconds,
    column,
    group_table,
    headline,
    per_run,
    result_word,
    rounds_done,
    words,
)

Counted = Callable[[RunData], bool]


def baselines(groups: Sequence[RunGroup]) -> list[RunGroup | None]:
    """The baseline of each group: the first one on the same data, itself if it is that; None if it is alone there."""
    result: list[RunGroup | None] = []
    for member in groups:
        same = [other for other in groups if other is member or on_the_same_data(member, other)]
        result.append(same[0] if len(same) > 1 else None)
    return result


def results(member: RunGroup, key: str, counted: Counted) -> dict[tuple[str, int], float]:
    """The results in a metric by seed, of runs that count; of running ones by seed and round."""
    values = {
        (run.seed, 0 if run.ended else run.last_round): run.result(key)
        for run in member.runs
        if counted(run) and run.seed != NO_SEED
    }
    return {pair: value for pair, value in values.items() if value is not None and np.isfinite(value)}


def differences(member: RunGroup, base: RunGroup, key: str, counted: Counted) -> list[float]:
    """The differences of the results in a metric between runs with the same seed."""
    here, before = results(member, key, counted), results(base, key, counted)
    return [value - before[pair] for pair, value in here.items() if pair in before]


def baseline_names(bases: Sequence[RunGroup | None]) -> tuple[str, list[Column]]:
    """The name of the baseline, and a column of names if there are several."""
    labels = list(dict.fromkeys(base.label for base in bases if base is not None))
    if len(labels) == 1:
        return labels[0], []
    each = [ABSENT if base is None else base.label for base in bases]
    return "the baseline on the same data", [words("baseline", each, left=True)]


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjustment of several p values; NaN are kept.

    >>> holm([0.04, 0.01, float("nan")])
    [0.04, 0.02, nan]
    """
    known = sorted((value, i) for i, value in enumerate(p) if not np.isnan(value))
    adjusted, largest = list(p), 0.0
    for position, (value, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - position) * value))
        adjusted[i] = largest
    return adjusted


def _probabilities(title: str, values: Sequence[float]) -> Column:
    """p values, with two significant digits on pages."""
    cells = [ABSENT if np.isnan(value) else f"{value:.2g}" for value in values]
    full = [ABSENT if np.isnan(value) else repr(float(value)) for value in values]
    return Column(title, [Cell(text, full=exact) for text, exact in zip(cells, full, strict=True)])


def data_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """The results of all methods on all data; None unless a method was run on several."""
    columns, judged = by_data(groups), headline(groups)
    rows = Counter(chain.from_iterable(columns.values()))
    if judged is None or max(rows.values(), default=0) < 2:
        return None
    key, name, form, better = judged
    every = per_run(groups, partial(RunData.result, key=key))
    found = {member.label: stats for member, stats in zip(groups, every, strict=True)}
    cells = [[found[on[row].label] if row in on else SeedStats([]) for row in rows] for on in columns.values()]
    return ReportTable(
        "data",
        f"By method and data. {name}, {result_word(groups)}",
        list(rows),
        [column(title, stats, form, better) for title, stats in zip(columns, cells, strict=True)],
        note="Mean ± standard error over seeds; the best mean of a column is bold.",
    )


def paired_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """Every group against the baseline on the same seeds: mean difference, interval, p; None without pairs."""
    if len(groups) < 2 or (judged := headline(groups)) is None:
        return None
    key, name, form, _ = judged
    counted = counts(groups)
    compared = [(a, b) for a, b in zip(groups, baselines(groups), strict=True) if b is not None and b is not a]
    pairs = [differences(member, base, key, counted) for member, base in compared]
    if max(map(len, pairs), default=0) < 2:
        return None
    from fedloom.metrics.curves import paired

    tests = [paired(results(a, key, counted), results(b, key, counted)) for a, b in compared]
    p = [test["p"] for test in tests]
    ends = [[SeedStats([] if np.isnan(test["p"]) else [test[end]]) for test in tests] for end in ("low", "high")]
    base, which = baseline_names([base for _, base in compared])
    columns = [
        *which,
        words("n", [str(len(values)) for values in pairs]),
        column("difference", [SeedStats(values) for values in pairs], form),
        column("from", ends[0], form, spread=False, over="95 % interval"),
        column("to", ends[1], form, spread=False, over="95 % interval"),
        _probabilities("p", p),
        _probabilities("p, adjusted", holm(p)),
    ]
    return group_table(
        [member for member, _ in compared],
        "paired",
        f"Difference from {base} with the same seed. {name}, {result_word(groups)}",
        columns,
        "Mean ± standard error of the differences over the n seeds that both have, the interval and the two-sided p of "
        "the paired t test, and p adjusted for the number of comparisons after Holm. With few seeds the test has "
        "little power: a large p is no evidence that methods are equal.",
    )


_PLAIN = re.compile(r"(Drift|Personal|Adaptation|ServerOptimizer)\(\)")


def _slot(run: RunData, slot: str) -> str:
    """The parts of a run's method in one slot; – if none does anything."""
    keys = [key for key in run.facts if re.fullmatch(rf"method\.{slot}(\.\d+)?", key)]
    text = " + ".join(str(run.facts[key]) for key in keys)
    if not text or _PLAIN.fullmatch(text):
        return ABSENT
    names = _names()
    return re.sub(r"\b(\w+)\(", lambda match: names.get(match[1], match[1]) + "(", text).replace("()", "")


def _brief(texts: Sequence[str]) -> Sequence[str]:
    """Descriptions of parts without the checksums of users' code, unless these alone tell them apart."""
    short = [re.sub(r" code [0-9a-f]{12}", "", text) for text in texts]
    return short if len({*short}) == len({*texts}) else texts


@cache
def _names() -> dict[str, str]:
    """The name under which each part is typed, by that of its class."""
    import_module("fedloom.methods")  # knows all parts
    return {entry.place.rpartition(".")[2]: entry.name for slot in SLOTS.values() for entry in slot}


def ablation_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """What differs between the groups, slot by slot and setting by setting, beside the result.

    None if nothing differs, or if the groups are of different tasks, which have few settings in common.
    """
    if len(texts([run for member in groups for run in member.runs], "kind")) > 1:
        return None
    columns = [words(slot, _brief([_slot(member.runs[0], slot) for member in groups]), left=True) for slot in SLOTS]
    columns += [
        words(key, texts, left=True)
        for key, texts in settings(groups)[0].items()
        if key.partition(".")[0] not in (*PROVENANCE, "method")
    ]
    columns = [column for column in columns if len({cell.text for cell in column.cells}) > 1]
    judged = headline(groups)
    if not columns or judged is None:
        return None
    key, name, form, better = judged
    columns.append(column("result", per_run(groups, partial(RunData.result, key=key)), form, better))
    bases, counted = baselines(groups), counts(groups)
    if any(bases):
        base, which = baseline_names(bases)
        pairs = zip(groups, bases, strict=True)
        gains = [[] if b is None else differences(member, b, key, counted) for member, b in pairs]
        columns += [*which, column(f"against {base}", [SeedStats(values) for values in gains], form)]
    note = "The parts and settings that differ, and the result as mean ± standard error over seeds."
    return group_table(groups, "ablation", f"Ablation. {name}, {result_word(groups)}", columns, note)


COMMUNICATION = "comm/params"
"""Cumulative number of parameters transmitted, by all clients, in both directions."""
UPLOADED = "comm/up_params"
"""Number of parameters that all clients sent in a round."""

_CONDITIONS = ("model.name", "data.name", "clients", "participation", "cohort")


def _model_size(run: RunData) -> float | None:
    """What FedAvg would upload for one client, a network's parameters and buffers, if on record."""
    value = run.summary.get("upload", run.facts.get("model.parameters", run.summary.get("parameters")))
    return float(value) if isinstance(value, int | float) and value > 0 else None


def fedavg_upload(run: RunData, groups: Sequence[RunGroup]) -> float | None:
    """What one FedAvg round uploads under this run's conditions: a network from each client of the cohort.

    If the model size is not on record, the mean upload of a FedAvg run in this comparison with the same model, data,
    clients and participation.
    """
    model, cohort = _model_size(run), run.cohort_size
    if model and cohort:
        return model * cohort
    here = [run.config.get(key) for key in _CONDITIONS]
    alike = (other for other in all_runs(groups) if [other.config.get(key) for key in _CONDITIONS] == here)
    means = (other.curve(UPLOADED).value(np.mean) for other in alike if other.method == "fedavg")
    return next(filter(None, means), None)


def _arithmetic(groups: Sequence[RunGroup]) -> str:
    """The unit in numbers, once per distinct value, as a sentence."""
    sentences: list[str] = []
    for member in groups:
        run = member.runs[0]
        upload, model, cohort = fedavg_upload(run, groups), _model_size(run), run.cohort_size
        if upload is None:
            sentences.append(f"the size of the model is not on record for {member.label}")
        elif model and cohort:
            sentences.append(f"one FedAvg round = {cohort:,.4g} clients × {model:,.0f} = {upload:,.0f} parameters")
        else:
            sentences.append(f"one FedAvg round = {upload:,.0f} parameters, the mean upload of the FedAvg run compared")
    return "Here " + "; ".join(dict.fromkeys(sentences)) + "."


_NOTE = (
    "Mean ± standard error over seeds. Rounds: the first evaluated one with a value at least as good as the target. If "
    "a seed never reaches it, no mean is taken over the others: “> T” then says how far the shortest such run went, "
    "and how many seeds did reach it. FedAvg rounds = parameters sent up by all clients until then ÷ (clients in the "
    "cohort × parameters of one network, with its buffers): a FedAvg round sends one network up from each client, so "
    "FedAvg needs as many as it has rounds, and a method that sends a second one twice as many. Parameters counts both "
    "directions. FedAvg ÷ method compares the FedAvg rounds that both need. "
)


def target_table(groups: Sequence[RunGroup], target: TargetValue, name: str) -> ReportTable:
    """The cost of each group until it reached a target, of which the table has its name."""

    def spent(run: RunData) -> dict[str, Curve]:
        """What a run had spent at each of its evaluations: hours, rounds, FedAvg rounds, parameters."""
        at, up = run.curve(target.metric).x, run.curve(UPLOADED).known
        so_far = np.concatenate([[np.nan], up.y.cumsum()])[np.searchsorted(up.x, at, side="right")]
        known = {
            "rounds": at,
            "FedAvg rounds": so_far / (fedavg_upload(run, groups) or np.nan),
            "parameters": run.curve(COMMUNICATION).at(at),
            "hours": run.curve("clock").at(at) / 3600,
        }
        return {name: Curve(at, values).known for name, values in known.items()}

    def cost(member: RunGroup, what: str) -> SeedStats:
        """The cost of each run until it reached the target, with its whole cost as the bound."""
        reached, whole = [], []
        for run in member.runs:
            values = run.curve(target.metric)
            round = rounds_to_target(values.y, values.x, target.value, target.direction)
            known = spent(run)[what]
            reached.append(next(iter(known.y[known.x == round].tolist()), None))
            whole.append(float(known.y[-1]) if len(known) else None)
        return SeedStats(reached, whole)

    relative = [cost(member, "FedAvg rounds") for member in groups]
    columns = [
        column("rounds", [cost(member, "rounds") for member in groups], as_count, "min"),
        column("FedAvg rounds", relative, as_count, "min"),
        column("parameters", [cost(member, "parameters") for member in groups], as_amount, "min"),
    ]
    if has(groups, "clock"):
        columns.insert(0, column("hours", [cost(member, "hours") for member in groups], as_number, "min"))
    baselines = [stats.mean for g, stats in zip(groups, relative, strict=True) if g.method == "fedavg"]
    if len(baselines) == 1 and (baseline := baselines[0]) and len(groups) > 1:
        savings = [f"{baseline / s.mean:.1f} ×" if s.mean else ABSENT for s in relative]
        columns.append(words("FedAvg ÷ method", savings))
    return group_table(groups, f"target_{name}", f"To the target {target.text}", columns, _NOTE + _arithmetic(groups))


def total_table(groups: Sequence[RunGroup]) -> ReportTable:
    """Total communication of the whole run."""
    figures: tuple[tuple[str, Callable[[RunData], float | None], Format], ...] = (
        ("up per round", lambda run: run.curve(UPLOADED).value(np.mean), as_amount),
        ("down per round", lambda run: run.curve("comm/down_params").value(np.mean), as_amount),
        ("in all", partial(RunData.last, key=COMMUNICATION), as_amount),
        ("bytes in all", partial(RunData.last, key="comm/bytes"), as_amount),
        ("seconds per round", lambda run: run.curve("seconds").value(np.median), as_seconds),
    )
    columns = [column(title, per_run(groups, figure), form, spread=False) for title, figure, form in figures]
    note = (
        "Means over seeds. Parameters are counted from what was sent, in both directions. Seconds are the median of "
        "the rounds' wall time on the machine of the run."
    )
    return group_table(groups, "sent", "What was sent, by all clients together", columns, note)


def time_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """The time of runs with devices: hours, use of the clients at work, waste, staleness."""
    if not has(groups, "clock"):
        return None

    def shares(run: RunData) -> tuple[float, float] | None:
        """The shares of the time of clients at work that counted, and of all work that was thrown away."""
        clock, size, work = run.last("clock"), run.cohort_size, run.curve("time/work").known.y.sum()
        lost = run.curve("time/wasted").known.y.sum()
        return ((work - lost) / (clock * size), lost / work) if clock and size and work else None

    figures = {run.path: shares(run) for run in all_runs(groups)}
    columns = [column("hours", per_run(groups, lambda run: (t := run.last("clock")) and t / 3600), as_number)]
    for place, title in enumerate(("used, %", "thrown away, %")):
        stats = per_run(groups, lambda run, place=place: (pair := figures[run.path]) and pair[place])
        columns.append(column(title, stats, as_percent))
    if has(groups, "staleness/mean"):
        stale = per_run(groups, lambda run: run.curve("staleness/mean").value(np.mean))
        kept = per_run(groups, lambda run: run.curve("versions").value(np.max))
        columns += [column("staleness", stale, as_number), column("versions", kept, as_count)]
    note = (
        "Means over seeds, of the clients' devices, simulated or a deployment's nodes. Used: the share of the time of "
        "as many clients as are at work whose work counted. Staleness: server steps between the version that a client "
        "received and the step that took its work. Versions: the most that the server kept for clients at work."
    )
    return group_table(groups, "time", "Time on the clients' devices", columns, note)


def cost_tables(groups: Sequence[RunGroup]) -> list[ReportTable]:
    """A table for each target of the runs, then the total communication."""
    reached = [target for target in targets(groups) if has(groups, target.metric)]
    names = slugs(target.text.rstrip(" %") for target in reached)
    tables = [target_table(groups, target, name) for target, name in zip(reached, names, strict=True)]
    return [*tables, total_table(groups)] if has(groups, COMMUNICATION) else tables


_FACTS = ("data", "partition", "model", "clients", "participation", "rounds", "engine", "compute")
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
        (
            name,
            _with_settings(groups, name) if name == "partition" else shared(groups, f"{name}.name", name) or "differs",
        )
        for name in _FACTS
        if any(key in run.config for key in (f"{name}.name", name) for run in runs)
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


def problem_warnings(groups: Sequence[RunGroup]) -> list[str]:
    """A warning if the runs do not solve the same problem."""
    moved = [key for key in settings(groups)[0] if key.partition(".")[0] in _PROBLEM]
    if not moved and not all(on_the_same_data(groups[0], other) for other in groups[1:]):
        moved = ["the samples that clients hold"]
    if not moved:
        return []
    return [
        f"These runs do not solve the same problem: they differ in {_joined(moved[:6])}. "
        "Compare their figures with that in mind."
    ]


def said(groups: Sequence[RunGroup], key: str) -> Iterator[str]:
    """What the runs' summaries say under a key, as in the terminal: with the runs' names unless all of them say it."""
    several = any(len(member.runs) > 1 for member in groups)
    rows = [
        (f"{member.label}, seed {run.seed}" if several else member.label, run.summary)
        for member in groups
        for run in member.runs
    ]
    return notes(rows, key)


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
    """One failure of a summary as a line.

    >>> _failure({"round": 3, "client": 5, "kind": "diverged", "stage": "step 1", "reason": "loss is NaN"})
    'round 3, client 5, step 1: diverged, loss is NaN'
    """
    if not isinstance(failure, Mapping) or not {"round", "client", "kind", "reason"} <= failure.keys():
        return str(failure)
    stage = f", {failure['stage']}" if failure.get("stage") else ""
    return f"round {failure['round']}, client {failure['client']}{stage}: {failure['kind']}, {failure['reason']}"


def _failures(run: RunData) -> list[str]:
    """The first failures in the summary, and how many more there are."""
    failures = run.summary.get("failures")
    lines = [_failure(failure) for failure in failures] if isinstance(failures, list) else []
    return lines[:_NAMED] + ([f"and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else [])


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
        words("status", [run.status.value for run in runs], left=True),
        words("rounds", [rounds_done(run) for run in runs]),
        words("wall time", [_wall_time(run) for run in runs]),
        words("updates left out", [_left_out(run) for run in runs]),
        *(words(name, texts) for name, texts in spent.items() if {*texts} != {ABSENT}),
    ]
    return ReportTable(
        "runs", "The runs", [member.label for member in members], columns, [member.style for member in members]
    )


def remarks(groups: Sequence[RunGroup]) -> list[tuple[str, str]]:
    """Pairs (run directory, sentence) on everything that failed or could not be read, and on how runs were computed."""
    remarks = []
    for run in all_runs(groups):
        if lost := run.left_out:
            verb = "update was" if lost == 1 else "updates were"
            remarks.append((run.name, f"{lost} client {verb} lost and left out."))
        lines = [*_failures(run), *notes([(run.name, run.summary)], "notes"), *run.notes]
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

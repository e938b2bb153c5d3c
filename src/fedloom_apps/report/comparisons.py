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
    has,
    on_the_same_data,
    result_filter,
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
    rounds_text,
    words,
)

RunPredicate = Callable[[RunData], bool]


def baselines(groups: Sequence[RunGroup]) -> list[RunGroup | None]:
    """The baseline of each group: the first group on the same data, which may be itself; None if it is alone there."""
    result: list[RunGroup | None] = []
    for member in groups:
        same = [other for other in groups if other is member or on_the_same_data(member, other)]
        result.append(same[0] if len(same) > 1 else None)
    return result


def results(member: RunGroup, key: str, has_result: RunPredicate) -> dict[tuple[str, int], float]:
    """The results in a metric, of runs that count, by (seed, 0), or by (seed, last round) if a run has not ended."""
    values = {
        (run.seed, 0 if run.ended else run.last_round): run.result(key)
        for run in member.runs
        if has_result(run) and run.seed != NO_SEED
    }
    return {pair: value for pair, value in values.items() if value is not None and np.isfinite(value)}


def differences(member: RunGroup, base: RunGroup, key: str, has_result: RunPredicate) -> list[float]:
    """The differences of the results in a metric between runs with the same seed."""
    values, base_values = results(member, key, has_result), results(base, key, has_result)
    return [value - base_values[pair] for pair, value in values.items() if pair in base_values]


def baseline_names(group_baselines: Sequence[RunGroup | None]) -> tuple[str, list[Column]]:
    """The name of the baseline, and a column of names if there are several."""
    labels = list(dict.fromkeys(base.label for base in group_baselines if base is not None))
    if len(labels) == 1:
        return labels[0], []
    names = [ABSENT if base is None else base.label for base in group_baselines]
    return "the baseline on the same data", [words("baseline", names, left=True)]


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjustment of several p values; NaN are kept.

    >>> holm([0.04, 0.01, float("nan")])
    [0.04, 0.02, nan]
    """
    ranking = sorted((value, i) for i, value in enumerate(p) if not np.isnan(value))
    adjusted, largest = list(p), 0.0
    for position, (value, i) in enumerate(ranking):
        largest = max(largest, min(1.0, (len(ranking) - position) * value))
        adjusted[i] = largest
    return adjusted


def _probabilities(title: str, values: Sequence[float]) -> Column:
    """p values, with two significant digits on pages."""
    cells = [ABSENT if np.isnan(value) else f"{value:.2g}" for value in values]
    full = [ABSENT if np.isnan(value) else repr(float(value)) for value in values]
    return Column(title, [Cell(text, csv_text=exact) for text, exact in zip(cells, full, strict=True)])


def data_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """The results of all methods on all data; None unless a method was run on several."""
    columns, metric = by_data(groups), headline(groups)
    rows = Counter(chain.from_iterable(columns.values()))
    if metric is None or max(rows.values(), default=0) < 2:
        return None
    key, name, form, better = metric
    all_stats = per_run(groups, partial(RunData.result, key=key))
    by_label = {member.label: stats for member, stats in zip(groups, all_stats, strict=True)}
    cells = [
        [by_label[members[row].label] if row in members else SeedStats([]) for row in rows]
        for members in columns.values()
    ]
    return ReportTable(
        "data",
        f"By method and data. {name}, {result_word(groups)}",
        list(rows),
        [column(title, stats, form, better) for title, stats in zip(columns, cells, strict=True)],
        note="Mean ± standard error over seeds; the best mean of a column is bold.",
    )


def paired_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """Every group against the baseline on the same seeds: mean difference, interval, p; None without pairs."""
    if len(groups) < 2 or (metric := headline(groups)) is None:
        return None
    key, name, form, _ = metric
    has_result = result_filter(groups)
    comparisons = [(a, b) for a, b in zip(groups, baselines(groups), strict=True) if b is not None and b is not a]
    seed_differences = [differences(member, base, key, has_result) for member, base in comparisons]
    if max(map(len, seed_differences), default=0) < 2:
        return None
    from fedloom.metrics.curves import paired

    tests = [paired(results(a, key, has_result), results(b, key, has_result)) for a, b in comparisons]
    p = [test["p"] for test in tests]
    bounds = [[SeedStats([] if np.isnan(test["p"]) else [test[end]]) for test in tests] for end in ("low", "high")]
    baseline, name_columns = baseline_names([baseline for _, baseline in comparisons])
    columns = [
        *name_columns,
        words("n", [str(len(values)) for values in seed_differences]),
        column("difference", [SeedStats(values) for values in seed_differences], form),
        column("from", bounds[0], form, spread=False, spanner="95 % interval"),
        column("to", bounds[1], form, spread=False, spanner="95 % interval"),
        _probabilities("p", p),
        _probabilities("p, adjusted", holm(p)),
    ]
    return group_table(
        [member for member, _ in comparisons],
        "paired",
        f"Difference from {baseline} with the same seed. {name}, {result_word(groups)}",
        columns,
        "Mean ± standard error of the differences over the n seeds that both have, the interval and the two-sided p of "
        "the paired t test, and p adjusted for the number of comparisons after Holm. With few seeds the test has "
        "little power: a large p is no evidence that methods are equal.",
    )


_IDENTITY = re.compile(r"(Drift|Personal|Adaptation|ServerOptimizer)\(\)")


def _slot_text(run: RunData, slot: str) -> str:
    """The parts of a run's method in one slot; – if all are identities."""
    keys = [key for key in run.facts if re.fullmatch(rf"method\.{slot}(\.\d+)?", key)]
    text = " + ".join(str(run.facts[key]) for key in keys)
    if not text or _IDENTITY.fullmatch(text):
        return ABSENT
    names = _part_names()
    return re.sub(r"\b(\w+)\(", lambda match: names.get(match[1], match[1]) + "(", text).replace("()", "")


def _short_texts(texts: Sequence[str]) -> Sequence[str]:
    """Descriptions of parts without the checksums of users' code, unless these alone tell them apart."""
    short_texts = [re.sub(r" code [0-9a-f]{12}", "", text) for text in texts]
    return short_texts if len({*short_texts}) == len({*texts}) else texts


@cache
def _part_names() -> dict[str, str]:
    """The name under which each part is typed, by the name of its class."""
    import_module("fedloom.methods")  # knows all parts
    return {entry.place.rpartition(".")[2]: entry.name for slot in SLOTS.values() for entry in slot}


def ablation_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """What differs between the groups, slot by slot and setting by setting, beside the result.

    None if nothing differs, or if the groups are of different tasks, which have few settings in common.
    """
    if len(texts([run for member in groups for run in member.runs], "kind")) > 1:
        return None
    columns = [
        words(slot, _short_texts([_slot_text(member.runs[0], slot) for member in groups]), left=True) for slot in SLOTS
    ]
    columns += [
        words(key, texts, left=True)
        for key, texts in settings(groups)[0].items()
        if key.partition(".")[0] not in (*PROVENANCE, "method")
    ]
    columns = [column for column in columns if len({cell.text for cell in column.cells}) > 1]
    metric = headline(groups)
    if not columns or metric is None:
        return None
    key, name, form, better = metric
    columns.append(column("result", per_run(groups, partial(RunData.result, key=key)), form, better))
    group_baselines, has_result = baselines(groups), result_filter(groups)
    if any(group_baselines):
        baseline, name_columns = baseline_names(group_baselines)
        pairs = zip(groups, group_baselines, strict=True)
        gains = [[] if b is None else differences(member, b, key, has_result) for member, b in pairs]
        columns += [*name_columns, column(f"against {baseline}", [SeedStats(values) for values in gains], form)]
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
    setup = [run.config.get(key) for key in _CONDITIONS]
    similar_runs = (other for other in all_runs(groups) if [other.config.get(key) for key in _CONDITIONS] == setup)
    means = (other.curve(UPLOADED).value(np.mean) for other in similar_runs if other.method == "fedavg")
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
    """The cost of each group until it reached a target; ``name`` stands for the target in the table's name."""

    def cumulative_costs(run: RunData) -> dict[str, Curve]:
        """The rounds, FedAvg rounds, parameters and hours that a run had taken by each of its evaluations."""
        rounds, uploads = run.curve(target.metric).x, run.curve(UPLOADED).without_nan
        total_upload = np.concatenate([[np.nan], uploads.y.cumsum()])[np.searchsorted(uploads.x, rounds, side="right")]
        costs = {
            "rounds": rounds,
            "FedAvg rounds": total_upload / (fedavg_upload(run, groups) or np.nan),
            "parameters": run.curve(COMMUNICATION).at(rounds),
            "hours": run.curve("clock").at(rounds) / 3600,
        }
        return {name: Curve(rounds, values).without_nan for name, values in costs.items()}

    def cost_to_target(member: RunGroup, unit: str) -> SeedStats:
        """The cost of each run until it reached the target, with its whole cost as the bound."""
        costs, limits = [], []
        for run in member.runs:
            values = run.curve(target.metric)
            round = rounds_to_target(values.y, values.x, target.value, target.direction)
            cost = cumulative_costs(run)[unit]
            costs.append(next(iter(cost.y[cost.x == round].tolist()), None))
            limits.append(float(cost.y[-1]) if len(cost) else None)
        return SeedStats(costs, limits)

    relative = [cost_to_target(member, "FedAvg rounds") for member in groups]
    columns = [
        column("rounds", [cost_to_target(member, "rounds") for member in groups], as_count, "min"),
        column("FedAvg rounds", relative, as_count, "min"),
        column("parameters", [cost_to_target(member, "parameters") for member in groups], as_amount, "min"),
    ]
    if has(groups, "clock"):
        columns.insert(0, column("hours", [cost_to_target(member, "hours") for member in groups], as_number, "min"))
    fedavg_costs = [stats.mean for g, stats in zip(groups, relative, strict=True) if g.method == "fedavg"]
    if len(fedavg_costs) == 1 and (fedavg_cost := fedavg_costs[0]) and len(groups) > 1:
        savings = [f"{fedavg_cost / s.mean:.1f} ×" if s.mean else ABSENT for s in relative]
        columns.append(words("FedAvg ÷ method", savings))
    return group_table(groups, f"target_{name}", f"To the target {target.text}", columns, _NOTE + _arithmetic(groups))


def total_table(groups: Sequence[RunGroup]) -> ReportTable:
    """Total communication of the whole run."""
    quantities: tuple[tuple[str, Callable[[RunData], float | None], Format], ...] = (
        ("up per round", lambda run: run.curve(UPLOADED).value(np.mean), as_amount),
        ("down per round", lambda run: run.curve("comm/down_params").value(np.mean), as_amount),
        ("in all", partial(RunData.last, key=COMMUNICATION), as_amount),
        ("bytes in all", partial(RunData.last, key="comm/bytes"), as_amount),
        ("seconds per round", lambda run: run.curve("seconds").value(np.median), as_seconds),
    )
    columns = [column(title, per_run(groups, quantity), form, spread=False) for title, quantity, form in quantities]
    note = (
        "Means over seeds. Parameters are counted from what was sent, in both directions. Seconds are the median of "
        "the rounds' wall time on the machine of the run."
    )
    return group_table(groups, "sent", "What was sent, by all clients together", columns, note)


def time_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """The time of runs with devices: hours, use of the clients at work, waste, staleness."""
    if not has(groups, "clock"):
        return None

    def time_shares(run: RunData) -> tuple[float, float] | None:
        """The share of the time of clients at work that counted, and the share of all work that was thrown away."""
        clock, size, work = run.last("clock"), run.cohort_size, run.curve("time/work").without_nan.y.sum()
        wasted_work = run.curve("time/wasted").without_nan.y.sum()
        return ((work - wasted_work) / (clock * size), wasted_work / work) if clock and size and work else None

    shares = {run.path: time_shares(run) for run in all_runs(groups)}
    columns = [column("hours", per_run(groups, lambda run: (t := run.last("clock")) and t / 3600), as_number)]
    for place, title in enumerate(("used, %", "thrown away, %")):
        stats = per_run(groups, lambda run, place=place: (pair := shares[run.path]) and pair[place])
        columns.append(column(title, stats, as_percent))
    if has(groups, "staleness/mean"):
        staleness = per_run(groups, lambda run: run.curve("staleness/mean").value(np.mean))
        versions = per_run(groups, lambda run: run.curve("versions").value(np.max))
        columns += [column("staleness", staleness, as_number), column("versions", versions, as_count)]
    note = (
        "Means over seeds, of the clients' devices, simulated or a deployment's nodes. Used: the share of the time of "
        "as many clients as are at work whose work counted. Staleness: server steps between the version that a client "
        "received and the step that took its work. Versions: the most that the server kept for clients at work."
    )
    return group_table(groups, "time", "Time on the clients' devices", columns, note)


def cost_tables(groups: Sequence[RunGroup]) -> list[ReportTable]:
    """A table for each target of the runs, then the total communication."""
    goals = [target for target in targets(groups) if has(groups, target.metric)]
    names = slugs(target.text.rstrip(" %") for target in goals)
    tables = [target_table(groups, target, name) for target, name in zip(goals, names, strict=True)]
    return [*tables, total_table(groups)] if has(groups, COMMUNICATION) else tables


_FACTS = ("data", "partition", "model", "clients", "participation", "rounds", "engine", "compute")
_PROBLEM = ("data", "partition", "model", "clients")

_MAX_FAILURES = 5


def _enumeration(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def sentence(groups: Sequence[RunGroup]) -> str:
    """A sentence that describes the comparison, naming at most six methods."""
    methods = list(dict.fromkeys(member.method for member in groups))
    names = methods if len(methods) <= 6 else [*methods[:5], f"{len(methods) - 5} more"]
    data = shared(groups, "data.name", "data")
    opening = f"{_enumeration(names)}{f' on {data}' if data else ''}: "
    variants = f" in {len(groups)} variants" if len(groups) > len(methods) else ""
    return f"{opening}{plural(len(methods), 'method')}{variants}, {plural(len(all_runs(groups)), 'run')}."


def conditions(groups: Sequence[RunGroup]) -> list[tuple[str, str]]:
    """The common conditions, by name, for the head of the page."""
    runs = all_runs(groups)
    pairs = [
        (
            name,
            _choice_text(groups, name) if name == "partition" else shared(groups, f"{name}.name", name) or "differs",
        )
        for name in _FACTS
        if any(key in run.config for key in (f"{name}.name", name) for run in runs)
    ]
    seeds = list(dict.fromkeys(run.seed for run in runs))
    pairs.append(("seed" if len(seeds) == 1 else "seeds", ", ".join(seeds[:8]) + (" …" if len(seeds) > 8 else "")))
    if goals := targets(groups):
        pairs.append(("target", "; ".join(goal.text for goal in goals)))
    return pairs


def _choice_text(groups: Sequence[RunGroup], choice: str) -> str:
    """The common value of a choice with its settings, apart from how often a draw is repeated.

    The heterogeneity of the clients is a setting of the partition.
    """
    name = shared(groups, f"{choice}.name", choice)
    keys = dict.fromkeys(key for run in all_runs(groups) for key in run.config if key.startswith(f"{choice}."))
    setting_keys = [key for key in keys if key.rpartition(".")[2] not in ("name", "min_size", "redraws")]
    words = [f"{key.partition('.')[2]} {shared(groups, key) or 'differs'}" for key in setting_keys]
    return ", ".join([name, *words]) if name else "differs"


def problem_warnings(groups: Sequence[RunGroup]) -> list[str]:
    """A warning if the runs do not solve the same problem."""
    discrepancies = [key for key in settings(groups)[0] if key.partition(".")[0] in _PROBLEM]
    if not discrepancies and not all(on_the_same_data(groups[0], other) for other in groups[1:]):
        discrepancies = ["the samples that clients hold"]
    if not discrepancies:
        return []
    return [
        f"These runs do not solve the same problem: they differ in {_enumeration(discrepancies[:6])}. "
        "Compare their figures with that in mind."
    ]


def summary_notes(groups: Sequence[RunGroup], key: str) -> Iterator[str]:
    """What the runs' summaries say under a key, as in the terminal: with the runs' names unless all of them say it."""
    has_seeds = any(len(member.runs) > 1 for member in groups)
    rows = [
        (f"{member.label}, seed {run.seed}" if has_seeds else member.label, run.summary)
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
    return lines[:_MAX_FAILURES] + ([f"and {len(lines) - _MAX_FAILURES} more"] if len(lines) > _MAX_FAILURES else [])


def _wall_time(run: RunData) -> str:
    seconds = run.summary.get("seconds", run.last(WALL))
    return duration(seconds if isinstance(seconds, int | float) else None)


def _excluded_text(run: RunData) -> str:
    """Number of client updates left out, and their fraction of all."""
    share = run.excluded_share
    return f"{run.excluded_updates} ({100 * share:.1f} %)" if share else str(run.excluded_updates)


def runs_table(groups: Sequence[RunGroup]) -> ReportTable:
    """One row per run: directory, status, rounds, wall time, updates left out, and ε if a run is private."""
    members = [member for member in groups for _ in member.runs]
    runs = all_runs(groups)
    last_rows = [run.rows[-1] if run.rows else {} for run in runs]
    epsilons = {WORDS[key]: [number(key, record.get(key)) for record in last_rows] for key in EPSILONS}
    columns = [
        words("run directory", [run.name for run in runs], left=True),
        words("seed", [run.seed for run in runs]),
        words("status", [run.status.value for run in runs], left=True),
        words("rounds", [rounds_text(run) for run in runs]),
        words("wall time", [_wall_time(run) for run in runs]),
        words("updates left out", [_excluded_text(run) for run in runs]),
        *(words(name, texts) for name, texts in epsilons.items() if {*texts} != {ABSENT}),
    ]
    return ReportTable(
        "runs", "The runs", [member.label for member in members], columns, [member.style for member in members]
    )


def remarks(groups: Sequence[RunGroup]) -> list[tuple[str, str]]:
    """Pairs (run directory, sentence) on everything that failed or could not be read, and on how runs were computed."""
    pairs = []
    for run in all_runs(groups):
        if count := run.excluded_updates:
            verb = "update was" if count == 1 else "updates were"
            pairs.append((run.name, f"{count} client {verb} lost and left out."))
        lines = [*_failures(run), *notes([(run.name, run.summary)], "notes"), *run.notes]
        pairs += [(run.name, str(line)) for line in lines]
    return pairs


def citations(groups: Sequence[RunGroup]) -> str:
    """The BibTeX entries of all runs, without duplicate keys."""
    entries: dict[str, str] = {}
    for run in all_runs(groups):
        for entry in re.split(r"(?m)^(?=\s*@\w+\s*\{)", run.citations):
            if key := re.match(r"\s*@\w+\s*\{\s*([^,\s]+)", entry):
                entries.setdefault(key.group(1), entry.strip())
    return "\n\n".join(entries.values())

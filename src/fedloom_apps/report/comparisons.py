"""Tables that compare groups: paired tests over seeds, and an ablation of parts and settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module

import numpy as np

from fedloom.core.slots import SLOTS
from fedloom_apps.report.groups import ABSENT, PROVENANCE, RunGroup, counts, on_the_same_data, settings, texts
from fedloom_apps.report.results import headline, per_run, result_word
from fedloom_apps.report.rundata import NO_SEED, RunData
from fedloom_apps.report.tables import Cell, Column, ReportTable, SeedStats, column, group_table, words

Counted = Callable[[RunData], bool]


def baselines(groups: Sequence[RunGroup]) -> list[RunGroup | None]:
    """The baseline of each group: FedAvg, or else the first group, on the same data; None if it is alone there.

    FedAvg or the first group itself is its own baseline.
    """
    result: list[RunGroup | None] = []
    for member in groups:
        same = [other for other in groups if other is member or on_the_same_data(member, other)]
        first = next((other for other in same if other.method == "fedavg"), same[0])
        result.append(first if len(same) > 1 else None)
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


def named(bases: Sequence[RunGroup | None]) -> tuple[str, list[Column]]:
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
    base, which = named([base for _, base in compared])
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
    columns = [words(slot, [_slot(member.runs[0], slot) for member in groups], left=True) for slot in SLOTS]
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
        base, which = named(bases)
        pairs = zip(groups, bases, strict=True)
        gains = [[] if b is None else differences(member, b, key, counted) for member, b in pairs]
        columns += [*which, column(f"against {base}", [SeedStats(values) for values in gains], form)]
    note = "The parts and settings that differ, and the result as mean ± standard error over seeds."
    return group_table(groups, "ablation", f"What makes the difference. {name}, {result_word(groups)}", columns, note)

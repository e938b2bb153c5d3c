"""Tables that compare groups: paired tests over seeds, and an ablation of parts and settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import numpy as np

from fedloom.experiment.report.groups import ABSENT, PROVENANCE, RunGroup, on_the_same_data, settings
from fedloom.experiment.report.results import headline, per_run
from fedloom.experiment.report.rundata import RunData
from fedloom.experiment.report.tables import ReportTable, SeedStats, column, group_table, words

CONFIDENCE = 0.95


def baseline(groups: Sequence[RunGroup]) -> RunGroup:
    """What the others are compared with: FedAvg, or else the first group."""
    return next((member for member in groups if member.method == "fedavg"), groups[0])


def differences(member: RunGroup, base: RunGroup, key: str) -> list[float]:
    """The differences of the last values of a metric between runs with the same seed."""
    before = {run.seed: run.last(key) for run in base.runs}
    pairs = [(run.last(key), before.get(run.seed)) for run in member.runs]
    return [a - b for a, b in pairs if a is not None and b is not None and np.isfinite([a, b]).all()]


def paired_t(values: Sequence[float]) -> tuple[float, float, float]:
    """The paired t test of differences: both ends of the 95 % interval of their mean, and the two-sided p.

    All are NaN for fewer than two differences, or if they are all equal.

    >>> low, high, p = paired_t([0.01, 0.02, 0.03])
    >>> round(low, 4), round(high, 4), round(p, 3)
    (-0.0048, 0.0448, 0.074)
    """
    from scipy.special import stdtr, stdtrit  # slow to import

    n = len(values)
    error = float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else 0.0
    if error == 0:
        return np.nan, np.nan, np.nan
    mean, half = float(np.mean(values)), float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * error
    return mean - half, mean + half, 2 * float(stdtr(n - 1, -abs(mean) / error))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjustment of several p values; NaN stay.

    >>> holm([0.04, 0.01, float("nan")])
    [0.04, 0.02, nan]
    """
    known = sorted((value, i) for i, value in enumerate(p) if not np.isnan(value))
    adjusted, largest = list(p), 0.0
    for position, (value, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - position) * value))
        adjusted[i] = largest
    return adjusted


def paired_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """Every group against the baseline on the same seeds: mean difference, interval, p; None without pairs."""
    if len(groups) < 2 or (judged := headline(groups)) is None:
        return None
    (key, name, form, _), base = judged, baseline(groups)
    others = [member for member in groups if member is not base and on_the_same_data(member, base)]
    pairs = [differences(member, base, key) for member in others]
    if max(map(len, pairs), default=0) < 2:
        return None
    tests = [paired_t(values) for values in pairs]
    ends = [[SeedStats([] if np.isnan(test[k]) else [test[k]]) for test in tests] for k in (0, 1)]
    adjusted = [ABSENT if np.isnan(p) else f"{p:.2g}" for p in holm([p for *_, p in tests])]
    columns = [
        words("n", [str(len(values)) for values in pairs]),
        column("difference", [SeedStats(values) for values in pairs], form),
        column("from", ends[0], form, spread=False, over="95 % interval"),
        column("to", ends[1], form, spread=False, over="95 % interval"),
        words("p", [ABSENT if np.isnan(p) else f"{p:.2g}" for *_, p in tests]),
        words("p, adjusted", adjusted),
    ]
    return group_table(
        others,
        "paired",
        f"Difference from {base.label} with the same seed. {name}, final round",
        columns,
        "Mean ± standard error of the differences over the n seeds that both have, the interval and the two-sided p of "
        "the paired t test, and p adjusted for the number of comparisons after Holm. With few seeds the test has "
        "little power: a large p is no evidence that methods are equal.",
    )


_SLOTS = ("objective", "drift", "personal", "adaptation", "mixing", "server", "uplink")
_PLAIN = re.compile(r"(Drift|Personal|Adaptation|ServerOptimizer)\(\)")


def _slot(run: RunData, slot: str) -> str:
    """The parts of a run's method in one slot; – if none does anything."""
    keys = [key for key in run.facts if re.fullmatch(rf"method\.{slot}(\.\d+)?", key)]
    text = " + ".join(str(run.facts[key]) for key in keys)
    return ABSENT if not text or _PLAIN.fullmatch(text) else text.replace("Mixing()", "by samples").replace("()", "")


def ablation_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """What differs between the groups, slot by slot and setting by setting, beside the result; None if nothing does."""
    columns = [words(slot, [_slot(member.runs[0], slot) for member in groups], left=True) for slot in _SLOTS]
    columns += [
        words(key, texts, left=True)
        for key, texts in settings(groups)[0].items()
        if key.partition(".")[0] not in (*PROVENANCE, "method")
    ]
    columns = [one for one in columns if len({cell.text for cell in one.cells}) > 1]
    judged = headline(groups)
    if not columns or judged is None:
        return None
    (key, name, form, better), base = judged, baseline(groups)
    columns.append(column("result", per_run(groups, partial(RunData.last, key=key)), form, better))
    gains = [SeedStats(differences(member, base, key)) for member in groups]
    columns.append(column(f"against {base.label}", gains, form))
    note = "The parts and settings that differ, and the result as mean ± standard error over seeds."
    return group_table(groups, "ablation", f"What makes the difference. {name}, final round", columns, note)

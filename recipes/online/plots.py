"""Tables and pictures of the online recipes, from stored results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import numpy as np
import reporting

from fedloom_apps.online.evaluate import samples_needed

COLOURS = {
    "MOML": "#c1272d", "FTML": "#0b6e99", "MOGD": "#d9902f", "FS": "#888888", "TOE": "#444444",
    "MOML ∇=0": "#e08283", "B-MOML 5": "#6a4c93", "B-MOML 10": "#1b998b", "TOE, continued": "#8c6d46",
}  # fmt: skip
PAPER: dict[str, dict[str, tuple[float, float]]] = {  # CTM and LTM in percent: tables 5.1 to 5.4, A.8 to A.10
    "s_mnist": {
        "TOE": (71.22, 63.73), "FS": (71.15, 71.14), "MOGD": (74.63, 74.07), "FTML": (80.62, 82.49),
        "MOML": (85.82, 87.49), "MOML ∇=0": (84.09, 86.53), "B-MOML 5": (84.21, 87.54), "B-MOML 10": (84.33, 87.77),
        "B-MOML 5 random": (83.30, 86.09), "B-MOML 10 random": (84.07, 86.97),
    },
    "5": {
        "FS": (31.58, 31.60), "MOGD": (49.92, 50.21), "FTML": (50.68, 54.50), "MOML": (55.83, 60.78),
        "MOML ∇=0": (51.33, 57.87), "B-MOML 5": (56.37, 63.76), "B-MOML 10": (56.70, 65.24),
        "B-MOML 5 random": (56.40, 64.37), "B-MOML 10 random": (55.07, 64.37),
    },
    "4": {"FTML": (58.19, 54.70), "MOML": (60.85, 62.79)},
    "3": {"FTML": (67.07, 61.84), "MOML": (69.10, 72.15)},
    "deep": {"FTML": (54.90, 62.92), "MOML": (56.17, 64.72)},
    "apart": {"MOGD": (36.89, 45.82), "FTML": (38.38, 50.90), "MOML": (39.32, 50.54)},
}  # fmt: skip


def paper_figures(setting: str, learner: str) -> tuple[float, float] | None:
    """The thesis' CTM and LTM; for letters, those of 5-way CIFAR-100, for which they stand in.

    >>> published("letters_5", "FS"), published("omniglot_5", "FS")
    ((31.58, 31.6), None)
    """
    kind = setting if setting in PAPER else setting.rpartition("_")[2]
    return None if setting.startswith("omniglot") else PAPER.get(kind, {}).get(learner.removesuffix(", whole"))


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """A moving average over the last ``window`` values, for figures.

    >>> smoothed([0.0, 1.0, 1.0], 2)
    [0.0, 0.5, 1.0]
    """
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    ends = np.arange(1, len(total))
    starts = np.maximum(ends - window, 0)
    return ((total[ends] - total[starts]) / (ends - starts)).tolist()


def figures(run: Mapping[str, Any], tasks: int) -> dict[str, float]:
    """CTM and LTM (last, and mean over its evaluations) of a run's first tasks, in percent; NaN where not measured."""
    long = [(n, value) for n, value in run["ltm"] if n <= tasks]
    return {
        "ctm": 100 * fmean(run["ctm"][:tasks]),
        "late": 100 * fmean(run["ctm"][tasks // 2 : tasks]),
        "ltm": 100 * long[-1][1] if long and long[-1][0] == tasks else float("nan"),
        "mean": 100 * fmean(value for _, value in long) if long else float("nan"),
        "bytes": run["bytes"][tasks - 1],
    }


def tables(results: Mapping[str, Any]) -> str:
    """Our figures beside the thesis'."""
    text = ["# Online meta-learning with bounded memory (tables 5.1 to 5.4, A.8 to A.10)", ""]
    text += [
        "Accuracy in percent of Hedge's mixture; the published figure in brackets. CTM: the new task, adapted to and"
    ]
    text += ["not yet learnt, mean over the tasks (after the bar: over their second half). LTM: all tasks seen, after"]
    text += ["the last one; after the bar, the mean over all its evaluations. Kept: task data between two tasks."]
    for setting, runs in results["settings"].items():
        text += ["", f"## {common.SETTINGS[setting].words}", "", *_table(setting, runs)]
    text += ["", *(f"`{command}`  " for command in results["commands"])]
    text += ["", f"{results['machine']}.", *reporting.notes(dict(results))]
    return re.sub("\n{3,}", "\n\n", "\n".join(text))


def _table(setting: str, runs: Mapping[str, Any]) -> Iterator[str]:
    """One table per length, of all runs of at least this length; costs are given only for whole runs."""
    for tasks in sorted({run["tasks"] for run in runs.values()}, reverse=True):
        learners = [learner for learner, run in runs.items() if run["tasks"] >= tasks]
        rows = []
        for learner in learners:
            run = runs[learner]
            values, paper, is_complete = figures(run, tasks), paper_figures(setting, learner), run["tasks"] == tasks
            brackets = ["", ""] if paper is None else [f" ({value:.2f})" for value in paper]
            regret = f"{run['regret']:.0f}" if is_complete and run["regret"] is not None else "–"
            rows.append([
                learner, f"{values['ctm']:.2f}{brackets[0]} \\| {values['late']:.2f}",
                f"{values['ltm']:.2f}{brackets[1]} \\| {values['mean']:.2f}", f"{values['bytes'] / 1e6:.2f} MB",
                run["chosen"] if is_complete else "–", regret, f"{run['seconds']:.0f} s" if is_complete else "–",
            ])  # fmt: skip
        head = ["learner", "CTM (paper)", "LTM (paper)", "kept", "best expert", "regret to w^{T+1}", "time"]
        yield from (f"### {tasks} tasks", "", reporting.table(head, rows), "")
    yield from _efficiency(setting, runs)


def _efficiency(setting: str, runs: Mapping[str, Any]) -> Iterator[str]:
    """Samples needed: accuracies by number of samples, mean over the later half of the measurements (figure A.20)."""
    sizes, target = common.SETTINGS[setting].sizes, common.SETTINGS[setting].target
    rows = []
    for learner, run in runs.items():
        late = [values for _, values in run["efficiency"][len(run["efficiency"]) // 2 :]]
        if late:
            means = [fmean(column) for column in zip(*late, strict=True)]
            samples = samples_needed(sizes, means, target)
            rows.append([learner, *(f"{100 * v:.1f}" for v in means), "more" if samples is None else f"{samples:.0f}"])
    if rows:
        yield from (
            "",
            "Accuracy on a new task after adapting with this many samples, second half of the tasks (figure A.20):",
        )
        yield from ("", reporting.table(["learner", *map(str, sizes), f"needed for {100 * target:.0f} %"], rows))


def picture(setting: str, runs: Mapping[str, Any], path: Path) -> None:
    """CTM, LTM, memory and samples needed against tasks (figures 5.2 to 5.4 and A.20)."""
    figure, axes = reporting.subplots(1, 4, figsize=(15, 3.6))
    window = max(10, max(run["tasks"] for run in runs.values()) // 10)
    sizes, target = common.SETTINGS[setting].sizes, common.SETTINGS[setting].target
    for learner, run in runs.items():
        if learner not in COLOURS:
            continue
        style = {"color": COLOURS[learner], "linewidth": 1.3, "label": learner}
        places = range(1, run["tasks"] + 1)
        axes[0].plot(places, moving_average(run["ctm"], window), **style)
        axes[1].plot(*zip(*run["ltm"], strict=True), marker="o" if len(run["ltm"]) == 1 else None, **style)
        axes[2].plot(places, [value / 1e6 for value in run["bytes"]], **style)
        if len(run["efficiency"]) > 4:
            curves = [
                moving_average([v[i] for _, v in run["efficiency"]], 1 + len(run["efficiency"]) // 5)
                for i in range(len(sizes))
            ]
            samples = [samples_needed(sizes, point, target) for point in zip(*curves, strict=True)]
            heights = [float("nan") if value is None else value for value in samples]
            axes[3].plot([n for n, _ in run["efficiency"]], heights, **style)
    heads = (f"CTM, mean of {window} tasks", "LTM", "task data kept, MB", f"samples needed for {100 * target:.0f} %")
    for axis, head in zip(axes, heads, strict=True):
        axis.set(title=head, xlabel="tasks")
        if not any(isfinite(value) for line in axis.lines for value in line.get_ydata()):
            axis.set(title=f"{head}: none", xticks=[], yticks=[])
    axes[2].set_yscale("symlog", linthresh=0.1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    reporting.save(figure, path)


def report(results: dict[str, Any], out: Path) -> None:
    """Write the results so far; notes written into the file in the meantime are kept."""
    if notes := reporting.read(out / "tables.json").get("notes"):
        results["notes"] = notes
    reporting.publish(out / "tables.json", results, tables(results))
    for setting, runs in results["settings"].items():
        if runs:
            picture(setting, runs, out / f"{setting}.png")

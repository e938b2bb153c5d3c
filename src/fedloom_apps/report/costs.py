"""Cost tables: communication until a target and in total, in units of one FedAvg round."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd

from fedloom.metrics import rounds_to_target
from fedloom_apps.report.groups import ABSENT, RunGroup, TargetValue, all_runs, has, targets
from fedloom_apps.report.results import per_run
from fedloom_apps.report.rundata import RunData
from fedloom_apps.report.tables import (
    ReportTable,
    SeedStats,
    as_amount,
    as_count,
    as_seconds,
    column,
    group_table,
    words,
)

COMMUNICATION = "comm/params"
"""Cumulative number of parameters transmitted, by all clients, in both directions."""

_CONDITIONS = ("model.name", "data.name", "clients", "participation", "cohort")


def traffic(run: RunData) -> pd.DataFrame:
    """Parameters that all clients together sent in each round: columns ``up`` and ``down``, indexed by round.

    If a run recorded cumulative values (their last ones then add up to ``comm/params``), differences are taken.
    """
    keys = {"up": "comm/up_params", "down": "comm/down_params", "both": COMMUNICATION}
    sent = pd.DataFrame({name: run.curve(key) for name, key in keys.items()}).dropna(subset="up").fillna(0)
    if len(sent) > 1:
        first, last = sent["both"].iloc[[0, -1]]
        if first > 0 and np.isclose(sent["up"].iloc[-1] + sent["down"].iloc[-1], last, rtol=1e-9):
            sent = sent.diff().fillna(sent)
    return sent.loc[:, ["up", "down"]]


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
    for other in all_runs(groups):
        if other.method == "fedavg" and all(other.config.get(k) == run.config.get(k) for k in _CONDITIONS):
            up = traffic(other)["up"].to_numpy()
            if up.sum() > 0:
                return float(up.mean())
    return None


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
            sentences.append(
                f"one FedAvg round = {upload:,.0f} parameters, the mean upload of the FedAvg run in this comparison"
            )
    return "Here " + "; ".join(dict.fromkeys(sentences)) + "."


_NOTE = (
    "Mean ± standard error over seeds. Rounds: the first evaluated one with a value at least as good as the target. If "
    "a seed never reaches it, no mean is taken over the others: “> T” then says how far the shortest such run went, "
    "and how many seeds did reach it. FedAvg rounds = parameters sent up by all clients until then ÷ (clients in the "
    "cohort × parameters of one network, with its buffers): a FedAvg round sends one network up from each client, so "
    "FedAvg needs as many as it has rounds, and a method that sends a second one twice as many. Parameters counts both "
    "directions. FedAvg ÷ method compares the FedAvg rounds that both need. "
)


def target_table(groups: Sequence[RunGroup], target: TargetValue) -> ReportTable:
    """The cost of each group until it reached a target."""

    def spent(run: RunData) -> pd.DataFrame:
        """What a run had spent at each of its evaluations: columns rounds, FedAvg rounds, parameters."""
        at, upload = run.curve(target.metric).index, fedavg_upload(run, groups)
        up = traffic(run)["up"].cumsum().reindex(at, method="ffill") / (upload or np.nan)
        return pd.DataFrame({"rounds": at, "FedAvg rounds": up, "parameters": run.curve(COMMUNICATION).reindex(at)}, at)

    def cost(member: RunGroup, what: str) -> SeedStats:
        """The cost of each run until it reached the target, with its whole cost as the bound."""
        reached, whole = [], []
        for run in member.runs:
            values = run.curve(target.metric)
            round = rounds_to_target(values.to_numpy(), values.index.to_numpy(), target.value, target.direction)
            known = spent(run)[what].dropna()
            reached.append(known.get(round))
            whole.append(known.iloc[-1] if len(known) else None)
        return SeedStats(reached, whole)

    relative = [cost(member, "FedAvg rounds") for member in groups]
    columns = [
        column("rounds", [cost(member, "rounds") for member in groups], as_count, "min"),
        column("FedAvg rounds", relative, as_count, "min"),
        column("parameters", [cost(member, "parameters") for member in groups], as_amount, "min"),
    ]
    baselines = [stats.mean for g, stats in zip(groups, relative, strict=True) if g.method == "fedavg"]
    if len(baselines) == 1 and (baseline := baselines[0]) and len(groups) > 1:
        savings = [f"{baseline / s.mean:.1f} ×" if s.mean else ABSENT for s in relative]
        columns.append(words("FedAvg ÷ method", savings))
    name = "target_" + re.sub(r"\W+", "_", target.text).strip("_")
    return group_table(groups, name, f"To the target {target.text}", columns, _NOTE + _arithmetic(groups))


def total_table(groups: Sequence[RunGroup]) -> ReportTable:
    """Total communication of the whole run."""

    def mean_upload(way: str, run: RunData) -> float | None:
        sent = traffic(run)[way].to_numpy()
        return float(sent.mean()) if len(sent) else None

    def seconds(run: RunData) -> float | None:
        values = run.curve("seconds").to_numpy()
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None

    columns = [
        column("up per round", per_run(groups, lambda run: mean_upload("up", run)), as_amount, spread=False),
        column("down per round", per_run(groups, lambda run: mean_upload("down", run)), as_amount, spread=False),
        column("in all", per_run(groups, partial(RunData.last, key=COMMUNICATION)), as_amount, spread=False),
        column("bytes in all", per_run(groups, partial(RunData.last, key="comm/bytes")), as_amount, spread=False),
        column("seconds per round", per_run(groups, seconds), as_seconds, spread=False),
    ]
    note = (
        "Means over seeds. Parameters are counted from what was sent, in both directions. Seconds are the median of "
        "the rounds' wall time on the machine of the run."
    )
    return group_table(groups, "sent", "What was sent, by all clients together", columns, note)


def cost_tables(groups: Sequence[RunGroup]) -> list[ReportTable]:
    """A table for each target of the runs, then the total communication."""
    tables = [target_table(groups, target) for target in targets(groups) if has(groups, target.metric)]
    return [*tables, total_table(groups)] if has(groups, COMMUNICATION) else tables

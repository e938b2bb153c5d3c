"""Figures of curves over rounds and over communication: accuracy and loss, the global objective, regret."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedloom.experiment.report.canvas import Panel, panels
from fedloom.experiment.report.costs import COMMUNICATION
from fedloom.experiment.report.groups import RunGroup, all_runs, band, has, series, targets_by_metric
from fedloom.experiment.report.results import SCOPES, Scope, scopes
from fedloom.experiment.report.rundata import RunData
from fedloom.experiment.report.style import Theme
from fedloom.metrics.regret import lipschitz, played, regret_of_losses, silo_bound
from fedloom.parts.mixing.responses import CDFS, respond

SENT = "parameters transmitted, down and up"

OBJECTIVE = "mixing/objective"
"""Σ p_i F_i(θ^t) over a round's clients, with the losses of the received model."""

SYNTHETIC = {
    "synthetic/accuracy": "accuracy of a classifier\ntrained on the set",
    "synthetic/recognised": "recognised by a classifier\ntrained on real data",
    "synthetic/fid": "FID",
    "synthetic/diversity": "diversity within classes,\nsynthetic over real",
}


def _row(groups: Sequence[RunGroup], key: str, y: str, title: str = "", share: bool = False) -> list[Panel]:
    """A metric against rounds and, if it was counted, against communication."""
    goal = targets_by_metric(groups).get(key)
    first = Panel(partial(series, key=key), y, title=title, share=share, log=not share, target=goal)
    if not has(groups, COMMUNICATION):
        return [first]
    sent = replace(first, curve=partial(series, key=key, x=COMMUNICATION), x=SENT, title="", amounts=True)
    return [first, sent]


def curves(groups: Sequence[RunGroup], scope: Scope, theme: Theme) -> Figure:
    """One evaluation: rows for accuracy and loss, columns for rounds and communication."""
    rows = [_row(groups, scope.accuracy, "accuracy", share=True)] if has(groups, scope.accuracy) else []
    rows += [_row(groups, scope.loss, "loss")] if has(groups, scope.loss) else []
    return panels(groups, rows, theme)


def comparison(groups: Sequence[RunGroup], theme: Theme) -> Figure:
    """Accuracy (or loss, if there is none) against rounds and communication, one row per evaluation."""
    found = scopes(groups)
    rows = [_row(groups, s.accuracy, "accuracy", s.title, True) for s in found if has(groups, s.accuracy)]
    rows = rows or [_row(groups, s.loss, "loss", s.title) for s in found]
    return panels(groups, rows or [_row(groups, SCOPES[0].accuracy, "accuracy", SCOPES[0].title, True)], theme, 3.2)


def synthetic_curves(groups: Sequence[RunGroup], theme: Theme) -> Figure:
    """One row per measure of synthetic sets, columns for rounds and communication."""
    shares = ("synthetic/accuracy", "synthetic/recognised")
    rows = [_row(groups, key, y, share=key in shares) for key, y in SYNTHETIC.items() if has(groups, key)]
    rows = [[replace(panel, log=False) for panel in row] for row in rows]
    return panels(groups, rows, theme, 2.5)


def cumulated(run: RunData) -> pd.Series:
    """Σ_{τ≤t} Σ_i p_i F_i(θ^τ) by round; a round without a value adds nothing."""
    values = run.curve(OBJECTIVE)
    return values.where(np.isfinite(values), 0.0).cumsum()


def cumulated_band(member: RunGroup) -> pd.DataFrame:
    """The cumulative objective of a group, over the rounds that all its seeds have reached."""
    sums = [total for run in member.runs if len(total := cumulated(run))]
    return band(pd.concat(sums, axis=1, join="inner")) if sums else pd.DataFrame()


def objective(groups: Sequence[RunGroup], theme: Theme) -> Figure:
    """Left, the objective in each round; right, cumulative (Hahn 2024, figure 3.1: smaller is better)."""
    row = [Panel(partial(series, key=OBJECTIVE), "Σ p F"), Panel(cumulated_band, "Σ p F, cumulated")]
    return panels(groups, [row], theme, 3.3)


def decisions(run: RunData) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """P and F(θ^t), float64 [T, K] each, if ``mixing.parquet`` has both for all clients in all rounds, else None."""
    if "loss" not in run.mixing:
        return None
    p, losses = (pivot(run.mixing, column).to_numpy(np.float64) for column in ("p", "loss"))
    complete = p.shape == losses.shape and np.isfinite(p).all() and np.isfinite(losses).all()
    return (p.T, losses.T) if len(p) > 1 and complete else None


def pivot(mixing: pd.DataFrame, column: str) -> pd.DataFrame:
    """One column of ``mixing.parquet`` as [clients, rounds]; NaN where a client did not participate."""
    return mixing.drop_duplicates(["client", "round"], keep="last").pivot(
        index="client", columns="round", values=column
    )


def transformation(run: RunData) -> tuple[str, float, float]:
    """Name, scale and shape of the CDF in the run's mixing policy; the normal CDF if it has none."""
    stored = dict(re.findall(r"(\w+)='?([\w.+-]+)", str(run.facts.get("method.mixing", ""))))
    if stored.get("cdf") not in CDFS:
        return "normal", 1.0, 0.0
    return stored["cdf"], float(stored["scale"]), float(stored["shape"])


def regret_curve(run: RunData) -> pd.Series:
    """Σ_{τ≤t} ℓ_τ(p^τ) - ℓ_τ(p*) by round, with p* the best fixed p of the whole run; empty if losses are missing.

    All policies are evaluated with responses in [0, 1/K], as in AAggFF for silos.
    """
    known = decisions(run)
    if known is None:
        return pd.Series(dtype=np.float64)
    p, losses = known
    cdf, scale, shape = transformation(run)
    answer = partial(respond, cdf=cdf, scale=scale, shape=shape, low=0.0, high=1 / p.shape[1])
    values = regret_of_losses(played(p), losses, answer)
    return pd.Series(values, np.arange(1.0, len(values) + 1))


def with_regret(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The groups, reduced to runs whose regret is known; groups without such runs are left out."""
    kept = [replace(g, runs=tuple(run for run in g.runs if decisions(run) is not None)) for g in groups]
    return [member for member in kept if member.runs]


def regrets(groups: Sequence[RunGroup], theme: Theme) -> Figure:
    """The regret of each group and, dotted, the bound of Hahn 2024, theorem 3.1, for the same number of clients."""

    def curve(member: RunGroup) -> pd.DataFrame:
        return band(pd.concat([regret_curve(run) for run in member.runs], axis=1))

    made = panels(groups, [[Panel(curve, "regret, cumulated")]], theme, 3.3, 7.2)
    axes, last = made.axes[0], {}
    for run in all_runs(groups):
        clients = len(pivot(run.mixing, "p"))
        last[clients] = max(last.get(clients, 0), run.last_round)
    for clients, rounds in last.items():
        places = np.linspace(1, rounds, 100)
        bound = [silo_bound(t, clients, lipschitz(0.0, 1 / clients)) for t in places]
        axes.plot(places, bound, color=theme.muted, linestyle=":", linewidth=1.2)
        at = (places[-1], bound[-1])
        axes.annotate(f"bound, K = {clients}", at, color=theme.muted, fontsize=8.5, ha="right", va="bottom")
    return made

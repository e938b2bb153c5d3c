"""Regret of the mixing coefficients against the best fixed ones, beside the bound of Hahn 2024, theorem 3.1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedloom.experiment.report.canvas import dress, figure, legend
from fedloom.experiment.report.curves import ROUNDS
from fedloom.experiment.report.groups import Group
from fedloom.experiment.report.palette import Theme
from fedloom.experiment.report.rundir import Run
from fedloom.experiment.report.series import Series
from fedloom.metrics.regret import lipschitz, played, regret_of_losses, silo_bound
from fedloom.parts.mixing.responses import CDFS, respond

USUAL = "normal"
"""The response transformation by which policies are judged that have none of their own."""


def decisions(run: Run) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """P and F(θ^t) [T, K], if all clients of all rounds left both in ``mixing.parquet``."""
    if "loss" not in run.mixing:
        return None
    clients, column = np.unique(run.mixing["client"], return_inverse=True)
    rounds, row = np.unique(run.mixing["round"], return_inverse=True)
    found = np.full((2, len(rounds), len(clients)), np.nan)
    found[0, row, column], found[1, row, column] = run.mixing["p"], run.mixing["loss"]
    return (found[0], found[1]) if len(clients) > 1 and np.isfinite(found).all() else None


def transformation(run: Run) -> tuple[str, float, float]:
    """Name, scale and shape of the CDF in the run's own mixing policy, or the usual one's."""
    said = dict(re.findall(r"(\w+)='?([\w.+-]+)", str(run.facts.get("method.mixing", ""))))
    if said.get("cdf") not in CDFS:
        return USUAL, 1.0, 0.0
    return said["cdf"], float(said["scale"]), float(said["shape"])


def curve(run: Run) -> Series | None:
    """Σ_{τ≤t} ℓ_τ(p^τ) - ℓ_τ(p*), by round: p* is the best fixed p for the whole run; None without all losses.

    Every policy is judged by responses from 0 to 1/K, those of AAggFF between silos.
    """
    known = decisions(run)
    if known is None:
        return None
    p, losses = known
    cdf, scale, shape = transformation(run)
    answer = partial(respond, cdf=cdf, scale=scale, shape=shape, low=0.0, high=1 / p.shape[1])
    values = regret_of_losses(played(p), losses, answer)
    return Series(np.arange(1.0, len(values) + 1), values, values, values)


def judged(groups: Sequence[Group]) -> list[Group]:
    """The groups with at least one run whose regret is known."""
    return [member for member in groups if any(decisions(run) is not None for run in member.runs)]


def regrets(groups: Sequence[Group], theme: Theme) -> Figure:
    """One line a run; dotted, the bound for as many clients."""
    made = figure(7.2, 3.6, theme)
    axes = made.subplots()
    dress(axes, theme, ROUNDS, "regret, cumulated")
    bounds: dict[int, float] = {}
    for member in groups:
        for run in member.runs:
            known, found = decisions(run), curve(run)
            if known is None or found is None:
                continue
            look, clients = member.style, known[0].shape[1]
            axes.plot(found.x, found.mean, color=look.colour, dashes=look.dash or (None, None), linewidth=1.5)
            bounds[clients] = max(bounds.get(clients, 0.0), found.x[-1])
    for clients, last in bounds.items():
        rounds = np.linspace(1, last, 100)
        bound = [silo_bound(t, clients, lipschitz(0.0, 1 / clients)) for t in rounds]
        axes.plot(rounds, bound, color=theme.muted, linestyle=":", linewidth=1.2)
        axes.annotate(f"bound, K = {clients}", (rounds[-1], bound[-1]), color=theme.muted, fontsize=8.5, ha="right",
                      va="bottom")  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    legend(made, groups, theme)
    return made

"""The global objective that a method's mixing coefficients make of the clients' losses, round by round and summed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedloom.experiment.report.canvas import dress, figure, legend
from fedloom.experiment.report.curves import ROUNDS, line
from fedloom.experiment.report.groups import Group
from fedloom.experiment.report.palette import Theme
from fedloom.experiment.report.rundir import Run
from fedloom.experiment.report.series import Series, has, series

OBJECTIVE = "mixing/objective"
"""Σ p_i F_i(θ^t) over a round's clients, with losses of the model that they received."""


def recorded(groups: Sequence[Group]) -> list[Group]:
    """The groups that have it: their policy asks for losses, or the evaluation did."""
    return [member for member in groups if has([member], OBJECTIVE)]


def cumulated(run: Run) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rounds, and Σ_τ≤t Σ_i p_i F_i(θ^τ); a round without a value adds nothing."""
    rounds, values = run.curve(OBJECTIVE)
    return rounds, np.cumsum(np.where(np.isfinite(values), values, 0.0))


def _summed(member: Group) -> Series:
    """The cumulated curve of a group, for the rounds that all its seeds with any value have reached."""
    curves = [cumulated(run) for run in member.runs]
    reached = min(len(rounds) for rounds, _ in curves if len(rounds))
    values = np.stack([total[:reached] for rounds, total in curves if len(rounds)])
    rounds = next(rounds for rounds, _ in curves if len(rounds))[:reached]
    return Series(rounds, values.mean(0), values.min(0), values.max(0))


def objective(groups: Sequence[Group], theme: Theme) -> Figure:
    """Left, the objective in each round; right, cumulated (Hahn 2024, figure 3.1: smaller is better)."""
    made = figure(10.8, 3.6, theme)
    left, right = made.subplots(1, 2)
    dress(left, theme, ROUNDS, "Σ p F")
    dress(right, theme, ROUNDS, "Σ p F, cumulated")
    for member in groups:
        for axes, found in ((left, series(member, OBJECTIVE)), (right, _summed(member))):
            if found is not None:
                line(axes, member, found)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    legend(made, groups, theme)
    return made

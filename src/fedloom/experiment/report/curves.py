"""Accuracy and loss against rounds and against communication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedloom.experiment.report.canvas import dress, figure, legend, logarithmic, percent, thousands, title
from fedloom.experiment.report.groups import Group
from fedloom.experiment.report.palette import LIGHT, Theme
from fedloom.experiment.report.series import COMMUNICATION, SCOPES, Scope, Series, has, scopes, series

ROUNDS = "communication rounds"
SENT = "parameters transmitted, down and up"


def line(axes: Axes, member: Group, found: Series) -> None:
    """A group's mean, and its band where it has several seeds."""
    look = member.style
    axes.plot(
        found.x,
        found.mean,
        color=look.colour,
        dashes=look.dash or (None, None),
        linewidth=1.7,
        marker=look.marker,
        markersize=4.5 if len(found.x) > 1 else 7,
        markevery=max(1, len(found.x) // 8),
    )
    if len(member.runs) > 1:
        axes.fill_between(found.x, found.low, found.high, color=look.colour, alpha=0.16, linewidth=0)


def _lines(axes: Axes, groups: Sequence[Group], key: str, x: str | None) -> None:
    """Every group's mean and band; loss on a logarithmic axis when it spans much."""
    values = []
    for member in groups:
        found = series(member, key, x)
        if found is None:
            continue
        line(axes, member, found)
        values.append(found.mean)
    together = np.concatenate(values) if values else np.zeros(0)
    if "accuracy" not in key and len(together) and 0 < together.min() < together.max() / 30:
        logarithmic(axes)


def _panel(axes: Axes, groups: Sequence[Group], key: str, x: str | None, target: float | None, theme: Theme) -> None:
    dress(axes, theme, ROUNDS if x is None else SENT, "accuracy" if "accuracy" in key else "loss")
    _lines(axes, groups, key, x)
    if "accuracy" in key:
        percent(axes)
    if x is None:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    else:
        thousands(axes)
    if target is not None:
        axes.axhline(target, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            "target",
            (0, target),
            xycoords=("axes fraction", "data"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=8.5,
            color=theme.muted,
        )


def curves(groups: Sequence[Group], scope: Scope, targets: dict[str, float], theme: Theme) -> Figure:
    """One evaluation: a row for accuracy and one for loss, a column for rounds and one for communication.

    Args:
        groups: what is compared.
        scope: the evaluation.
        targets: values to mark, by metric.
        theme: colours.
    """
    rows = [key for key in (scope.accuracy, scope.loss) if has(groups, key)]
    columns = [None, COMMUNICATION] if has(groups, COMMUNICATION) else [None]
    made = figure(5.4 * len(columns), 3.1 * len(rows) + 0.35, theme)
    grid = made.subplots(len(rows), len(columns), squeeze=False, sharey="row")
    for key, line in zip(rows, grid, strict=True):
        for x, axes in zip(columns, line, strict=True):
            _panel(axes, groups, key, x, targets.get(key), theme)
            if axes is not line[0]:
                axes.set_ylabel("")
    legend(made, groups, theme)
    return made


def comparison(groups: Sequence[Group], targets: dict[str, float], theme: Theme = LIGHT) -> Figure:
    """Accuracy (loss where there is none) against rounds and communication, a row for each evaluation of the models."""
    found = scopes(groups)
    keys = [(s, s.accuracy) for s in found if has(groups, s.accuracy)]
    keys = keys or [(s, s.loss) for s in found if has(groups, s.loss)] or [(SCOPES[0], SCOPES[0].accuracy)]
    columns = [None, COMMUNICATION] if has(groups, COMMUNICATION) else [None]
    made = figure(5.4 * len(columns), 3.2 * len(keys) + 0.35, theme)
    grid = made.subplots(len(keys), len(columns), squeeze=False)
    for (scope, key), line in zip(keys, grid, strict=True):
        for x, axes in zip(columns, line, strict=True):
            _panel(axes, groups, key, x, targets.get(key), theme)
        title(line[0], scope.title, theme)
    legend(made, groups, theme)
    return made

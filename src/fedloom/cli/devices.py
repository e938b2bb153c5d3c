"""``fedloom devices``: how long clients' work takes on their devices, and a run on the clock, without training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.text import Text

from fedloom.base.errors import ConfigError
from fedloom.cli.data import config_and_path, write_picture
from fedloom.config.keys import build
from fedloom.data.plots import ACCENT, INK, QUIET, SOFT, save
from fedloom.experiment.clock import Outlook, WorkParts
from fedloom.experiment.console import duration, format_size, make_console, plain_table, plural, print_raw, relpath
from fedloom.experiment.federated import FederatedTask

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
HEADS = ("slowest", "10 %", "median", "90 %", "fastest")
COLOURS = {"latency": SOFT, "down": QUIET, "computing": ACCENT, "up": "#d9a25f"}


def command(arguments: argparse.Namespace) -> int:
    """Print the devices, durations and the timeline of a run, and draw durations by client."""
    config, _, path = config_and_path(arguments, "devices.png")
    task = FederatedTask(build(config))
    if (clock := task.clock) is None:
        raise ConfigError("there are no devices; choose some, like devices=lognormal (fedloom list devices).")
    parts = clock.parts(np.arange(task.plan.population.clients))
    totals, fleet = np.sum(parts, axis=0), clock.fleet
    outlook = task.outlook()
    write_picture(path, lambda: plot(parts, f"{len(totals):,} clients, devices {config['devices.name']}", path))
    console = make_console()
    if arguments.json:
        about = {name: quantiles(values) for name, values in fleet._asdict().items() if np.isfinite(values).all()}
        about["seconds"] = {name: -value for name, value in quantiles(-totals).items()}
        timeline = None if outlook is None else outlook._asdict()
        print_raw(
            console, json.dumps({"devices": about, "timeline": timeline, "figure": str(path.resolve())}, indent=1)
        )
        return 0
    table = plain_table("", *HEADS, numbers=HEADS)
    for name, values, format_value in (
        ("operations a second", fleet.speed, lambda value: f"{value:.2g}"),
        ("download a second", fleet.down, format_size),
        ("upload a second", fleet.up, format_size),
        ("client's work", -totals, lambda value: f"{-value:.2g} s"),
        *((f"  {name}", -seconds, lambda value: f"{-value:.2g} s") for name, seconds in parts._asdict().items()),
    ):
        table.add_row(Text(name, style="bold"), *map(format_value, quantiles(values).values()))
    if np.isfinite(fleet.memory).all():
        table.add_row(Text("memory", style="bold"), *map(format_size, quantiles(fleet.memory).values()))
    console.print(table)
    console.print()
    if (short := int((~clock.fits).sum())) > 0:
        print_raw(console, f"{plural(short, 'client')} of {len(totals):,} cannot be invited for lack of memory.")
    if outlook is not None:
        print_raw(console, in_words(outlook, task.experiment.schedule.stale))
    print_raw(console, f"figure: {relpath(path)}")
    return 0


def quantiles(values: np.ndarray) -> dict[str, float]:
    """The values of the slowest, median, fastest … client.

    >>> quantiles(np.arange(11.0))
    {'slowest': 0.0, '10 %': 1.0, 'median': 5.0, '90 %': 9.0, 'fastest': 10.0}
    """
    return dict(zip(HEADS, np.quantile(values, QUANTILES).tolist(), strict=True))


def in_words(outlook: Outlook, stale: bool) -> str:
    """The timeline in a sentence."""
    text = (
        f"{outlook.steps} server steps take {duration(outlook.clock)}: {outlook.utilisation:.0%} of the time of "
        f"clients at work is used, {outlook.wasted:.0%} of the work is thrown away"
    )
    if stale:
        text += f", and the server keeps up to {outlook.versions} versions of {format_size(outlook.version_bytes)}"
    return f"{text}."


def plot(parts: WorkParts, title: str, path: Path) -> None:
    """Draw the durations of all clients' work, the slowest first, as areas: latency, down, computing, up."""
    figure = Figure(figsize=(8.5, 3.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    order = np.argsort(-np.sum(parts, axis=0), kind="stable")
    edges, base = np.arange(len(order) + 1), np.zeros(len(order))
    for name, seconds in parts._asdict().items():
        axes.stairs(base + seconds[order], edges, baseline=base, fill=True, color=COLOURS[name], label=name)
        base = base + seconds[order]
    axes.set_xlim(0, len(order))
    axes.set_xlabel("clients, the slowest first", fontsize=9, color=SOFT)
    axes.set_ylabel("seconds", fontsize=9, color=SOFT)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, colors=SOFT)
    axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    save(figure, path, dpi=150)

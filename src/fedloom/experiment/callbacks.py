"""Callbacks observe a run, measure it, and may stop it: progress displays, trackers, early stopping."""

from __future__ import annotations

import html
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text
from torch import nn

from fedloom.base.checks import at_least
from fedloom.base.errors import ConfigError, in_words, nearest, user_stacklevel
from fedloom.base.ranges import Count, NonNegative, check_ranges
from fedloom.experiment.console import (
    HEADLINES,
    LEVEL,
    duration,
    first_metrics,
    ignoring_lost_output,
    number,
    print_raw,
)
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.summary import looks, since_best
from fedloom.metrics import Direction, direction

BETWEEN = 0.1  # seconds between two drawings of a bar


@dataclass(frozen=True)
class RunInfo:
    """What a callback learns about a run before its first round.

    Attributes:
        name: the method's name.
        rounds: number of rounds of the whole run.
        start: number of rounds completed before this process took over.
        seed: the run's seed.
        headline: the metric of the records by which the run is judged.
        directory: the run directory; None if the run is kept in memory.
        unit: what is counted as rounds.
        facts: what is known of the run beforehand, shown before its first round.
        model: maps what ``on_step`` receives to the server's model after that step, if the task has one. The module
            holds one model at a time.
    """

    name: str
    rounds: int
    start: int = 0
    seed: int = 0
    headline: str = "global/accuracy"
    directory: RunDirectory | None = None
    unit: str = "round"
    facts: tuple[str, ...] = ()
    model: Callable[[Any], nn.Module] | None = None


class Callback:
    """Observes a run; every hook does nothing by default."""

    def on_start(self, run: RunInfo) -> None:
        """Called once, before the first round of this process."""

    def on_step(self, step: Any) -> Mapping[str, Any]:
        """Return extra numbers for the round's record, given what the task's ``step`` returned, before it is committed.

        Their names must be none that the record has already, such as ``round`` or ``global/accuracy``.
        They must be a function of ``step`` alone, so that a resumed run reproduces them. Ctrl-C may interrupt this
        hook, and the round is then discarded.
        """
        return {}

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Called after every round with its record; Ctrl-C is held back meanwhile."""

    def should_stop(self, history: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the reason to stop before the next round, or None; ``history`` holds the records of all rounds so far.

        It should be a function of the history alone, so that a resumed run stops at the same round. The run then ends
        as usual, with a checkpoint and the reason in its summary; resumed without the callback, it continues.
        """
        return None

    def on_finish(self, summary: Mapping[str, Any]) -> None:
        """Called once when the run has ended, with the content of ``summary.json``."""

    def on_close(self) -> None:
        """Called once, however the run ended, to release resources."""


def numbers(callback: Callback, step: Any) -> dict[str, int | float | None]:
    """What a callback measures after a step, as plain numbers."""
    measurements: Any = callback.on_step(step)
    if not isinstance(measurements, Mapping):
        raise ConfigError(
            f"{_name_of(callback)} returned {in_words(measurements)}, but it must return numbers by name."
        )
    scalars = {key: value.item() if getattr(value, "ndim", None) == 0 else value for key, value in measurements.items()}
    for key, value in scalars.items():
        if not isinstance(key, str) or not isinstance(value, int | float | None):
            raise ConfigError(
                f"{_name_of(callback)} returned {in_words(measurements[key])} as {key!r}, but it must be a number."
            )
    return scalars


def with_measurements(record: Mapping[str, Any], callback: Callback, measurements: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a round with the measurements of a callback."""
    if duplicates := [key for key in measurements if key in record or key == "seconds"]:
        raise ConfigError(
            f"{_name_of(callback)} returned {duplicates[0]!r}, which the record of a round has already; choose another "
            "name."
        )
    return {**record, **measurements}


def _name_of(callback: Callback) -> str:
    if isinstance(callback, Measure):
        return f"the measure {getattr(callback.function, '__name__', type(callback.function).__name__)!r}"
    return f"the callback {type(callback).__name__}"


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Stops a run that has stopped improving.

    Args:
        metric: the key of the records that should improve, like ``clients/accuracy/mean`` or ``train/loss``.
        patience: stop after this many measurements without improvement, at least 1.
        min_delta: the smallest change that counts as an improvement.
        better: whether larger (``max``) or smaller values (``min``) are better; None infers it from the metric's name;
            for an unknown name, larger values are better.

    If no round has measured the metric by the time that patience would run out, a warning names the closest one.

    >>> stop = EarlyStopping("global/loss", patience=2, min_delta=0.05)
    >>> records = [{"round": round, "global/loss": loss} for round, loss in enumerate([2.0, 1.0, 1.1, 0.98], start=1)]
    >>> stop.should_stop(records[:3]), stop.should_stop(records)
    (None, 'no improvement of global/loss in 2 evaluations')
    """

    metric: str = "global/accuracy"
    patience: Count = 10
    min_delta: NonNegative = 0.0
    better: Direction | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "EarlyStopping: ")

    def should_stop(self, history: Sequence[Mapping[str, Any]]) -> str | None:
        values = looks(history, self.metric)
        if not values and len(history) == self.patience:
            metrics = [key for key in dict.fromkeys(key for record in history for key in record) if "/" in key]
            warnings.warn(
                f"EarlyStopping waits for {self.metric!r}, which the rounds so far did not measure; "
                f"{nearest(self.metric, metrics)}",
                stacklevel=user_stacklevel(),
            )
        if since_best(values, (self.better or direction(self.metric)) == "max", self.min_delta) < self.patience:
            return None
        return f"no improvement of {self.metric} in {self.patience} evaluations"


class Measure(Callback):
    """Measures the server's model with a user-defined function after every round.

    Args:
        function: maps the model, in evaluation mode and without gradients, to numbers by name, which enter the
            round's record.
        every: rounds between measurements.

    Raises:
        ConfigError: if ``every`` is below 1, or the run trains no server model.

    >>> import fedloom as fl
    >>> norm = Measure(lambda model: {"norm": float(model.head.weight.norm())})
    >>> federation = fl.data.federate("digits", "iid", clients=2)
    >>> result = fl.run("fedavg", federation, "logistic", rounds=2, callbacks=[norm])
    >>> all(record["norm"] > 0 for record in result.history)
    True
    """

    def __init__(self, function: Callable[[nn.Module], Mapping[str, float]], every: int = 1) -> None:
        at_least(1, "Measure: ", every=every)
        self.function, self.every = function, every
        self.done = 0
        self.model: Callable[[Any], nn.Module] | None = None

    def on_start(self, run: RunInfo) -> None:
        if run.model is None:
            raise ConfigError(f"Measure needs a server model, but a run of {run.name!r} trains none.")
        self.model, self.done = run.model, run.start

    def on_step(self, step: Any) -> Mapping[str, Any]:
        assert self.model is not None
        self.done += 1
        if self.done % self.every:
            return {}
        with torch.no_grad():
            return self.function(self.model(step).eval())


class NullProgress(Callback):
    """A display that shows nothing.

    Attributes:
        label: the name of the next run, instead of its method's.
    """

    label: str = ""

    def __enter__(self) -> NullProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the display."""


class LineProgress(NullProgress):
    """One line per round, for logs and pipes; neither a closed pipe nor a full disk stops the run."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.run = RunInfo("", 0)

    def on_start(self, run: RunInfo) -> None:
        self.run = run
        if run.start:
            self._print(f"{self.label or run.name}  continues after round {run.start}")
        for fact in run.facts:
            self._print(f"{self.label or run.name}  {fact}")

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Print one line: round, metrics, failures, time."""
        name, total = self.label or self.run.name, self.run.rounds
        words = first_metrics(record, self.run.headline)
        status = [f"{word} {number(key, record[key])}" for key, word in words.items()]
        if record.get("failures"):
            status.append(f"failures {record['failures']}")
        status.append(duration(record.get("seconds")))
        self._print(f"{name}  {self.run.unit} {record['round']:>{len(str(total))}}/{total}  " + "  ".join(status))

    def _print(self, text: str) -> None:
        with ignoring_lost_output(self.console):
            print_raw(self.console, text)


class LatestProgress(NullProgress):
    """A display of one line that changes: metrics not measured in a round keep their last values."""

    def __init__(self) -> None:
        self.run = RunInfo("", 0)
        self.latest: dict[str, Any] = {}
        self.failures = 0

    def on_start(self, run: RunInfo) -> None:
        self.run, self.latest, self.failures = run, {}, 0

    def status(self, record: Mapping[str, Any]) -> str:
        """The metrics after a round, leading ones only, and what a private run has spent."""
        self.latest |= {key: record[key] for key in first_metrics(record, self.run.headline)}
        self.failures += record.get("failures", 0)
        words = first_metrics(self.latest, self.run.headline)
        lead = next((key for key in words if key not in HEADLINES[4:]), "")
        levels = [key for key in words if LEVEL.fullmatch(key) and key.partition("/")[0] == lead.partition("/")[0]]
        keys = [key for key in (lead, *levels, *HEADLINES[4:]) if key in words]
        failed = [f"{self.failures} failed"] * (self.failures > 0)
        return "  ".join([*(f"{words[key]} {number(key, self.latest[key])}" for key in keys), *failed])


class _Status(ProgressColumn):
    """What a bar says of its run, cut where a terminal is too narrow for all of it."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["status"], no_wrap=True, overflow="ellipsis")


class BarProgress(LatestProgress):
    """One bar per run, with accuracy, loss and remaining time; finished bars stay."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.task: TaskID | None = None
        self.bars = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(None, complete_style="cyan", finished_style="green", table_column=Column(ratio=1)),
            MofNCompleteColumn(),
            _Status(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            refresh_per_second=1 / BETWEEN,
            expand=True,
        )

    def __enter__(self) -> BarProgress:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop redrawing; the bars stay."""
        self.bars.stop()

    def on_start(self, run: RunInfo) -> None:
        super().on_start(run)
        name = escape(self.label or run.name)
        self.task = self.bars.add_task(name, total=run.rounds, completed=run.start, status="")

    def on_round(self, record: Mapping[str, Any]) -> None:
        assert self.task is not None
        self.bars.update(self.task, completed=record["round"], status=self.status(record))

    def on_finish(self, summary: Mapping[str, Any]) -> None:
        """Fill the bar, also if the run stopped early."""
        assert self.task is not None
        self.bars.update(self.task, total=summary.get("rounds") or None)


class NotebookProgress(LatestProgress):
    """One bar per run in a notebook's output, which stays when the run has ended; needs no widgets."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = self.done = self.total = 0
        self.text = ""
        self.handle: Any = None

    def on_start(self, run: RunInfo) -> None:
        super().on_start(run)
        self.done, self.total, self.text = run.start, run.rounds, ""
        self.handle = import_module("IPython.display").display(self, display_id=True)  # a notebook has it

    def on_round(self, record: Mapping[str, Any]) -> None:
        self.done, self.text = record["round"], self.status(record)
        if time.monotonic() - self.drawn >= BETWEEN:
            self._draw()

    def on_finish(self, summary: Mapping[str, Any]) -> None:
        """Fill the bar, also if the run stopped early."""
        self.total = summary.get("rounds") or self.total

    def on_close(self) -> None:
        if self.handle is not None:
            self._draw()

    def _draw(self) -> None:
        self.handle.update(self)
        self.drawn = time.monotonic()

    def __repr__(self) -> str:
        return f"{self.label or self.run.name}  {self.run.unit} {self.done}/{self.total}  {self.text}".rstrip()

    def _repr_html_(self) -> str:
        name, text = html.escape(self.label or self.run.name), html.escape(self.text)
        bar = f'<progress value="{self.done}" max="{max(self.total, 1)}" style="width:16em"></progress>'
        line = f"<b>{name}</b> {bar} {self.done}/{self.total}  {text}"
        return f'<div style="font:13px monospace;white-space:pre">{line}</div>'


def make_progress(console: Console, quiet: bool = False) -> NullProgress:
    """A bar on a terminal or in a notebook, lines elsewhere, or nothing if ``quiet``."""
    if quiet:
        return NullProgress()
    if console.is_jupyter:
        return NotebookProgress()
    return BarProgress(console) if console.is_terminal else LineProgress(console)

"""Progress of a run: a bar on a terminal, one line per round elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedloom.experiment.callbacks import Callback, RunInfo
from fedloom.experiment.console import HEADLINES, LEVEL, duration, going_on, number, print_raw, silence_stdout, watched


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

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Print one line: round, metrics, failures, time."""
        name, total = self.label or self.run.name, self.run.rounds
        status = [f"{word} {number(key, record[key])}" for key, word in watched(record, self.run.headline).items()]
        if record.get("failures"):
            status.append(f"failures {record['failures']}")
        status.append(duration(record.get("seconds")))
        self._print(f"{name}  {self.run.unit} {record['round']:>{len(str(total))}}/{total}  " + "  ".join(status))

    def _print(self, text: str) -> None:
        try:
            with going_on(self.console):
                print_raw(self.console, text)
        except (BrokenPipeError, SystemExit):
            silence_stdout()


class BarProgress(NullProgress):
    """One bar per run, with accuracy, loss and remaining time; finished bars stay.

    Args:
        console: the terminal.
        seconds_between: shortest time between redraws, in seconds.
    """

    def __init__(self, console: Console, seconds_between: float = 0.1) -> None:
        self.console = console
        self.seen: dict[str, Any] = {}
        self.failures = 0
        self.echo = False
        self.task: TaskID | None = None
        self.first = HEADLINES[0]
        self.bars = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            refresh_per_second=1 / seconds_between,
            expand=True,
        )

    def __enter__(self) -> BarProgress:
        self.echo = _echo_of_control_keys(False)
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop redrawing; the bars stay."""
        self.bars.stop()
        if self.echo:
            _echo_of_control_keys(True)

    def on_start(self, run: RunInfo) -> None:
        self.seen, self.failures, self.first = {}, 0, run.headline
        name = escape(self.label or run.name)
        self.task = self.bars.add_task(name, total=run.rounds, completed=run.start, status="")

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Advance the bar; metrics not measured in this round keep their last values."""
        assert self.task is not None
        words = watched(record, self.first)
        self.seen |= {key: record[key] for key in words}
        self.failures += record.get("failures", 0)
        words = watched(self.seen, self.first)
        lead = next((key for key in words if key not in HEADLINES[4:]), "")
        levels = [key for key in words if LEVEL.fullmatch(key) and key.partition("/")[0] == lead.partition("/")[0]]
        shown = [key for key in (lead, *levels, *HEADLINES[4:]) if key in words]
        status = "  ".join(f"{words[key]} {number(key, self.seen[key])}" for key in shown)
        status += f"  [yellow]{self.failures} failed[/]" if self.failures else ""
        self.bars.update(self.task, completed=record["round"], status=status)

    def on_finish(self, summary: Mapping[str, Any]) -> None:
        """Fill the bar, also if the run stopped early."""
        assert self.task is not None
        self.bars.update(self.task, total=summary.get("rounds") or None)


def _echo_of_control_keys(on: bool) -> bool:
    """Set whether the terminal echoes ^C, which would break a bar; return the previous setting."""
    try:
        import termios

        settings = termios.tcgetattr(sys.stdin)
        before = bool(settings[3] & termios.ECHOCTL)
        settings[3] = settings[3] | termios.ECHOCTL if on else settings[3] & ~termios.ECHOCTL
        termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
    except Exception:  # no terminal, no termios, or standard input is closed
        return False
    return before


def make_progress(console: Console, quiet: bool = False) -> NullProgress:
    """A bar on a terminal, lines elsewhere, or nothing if ``quiet``."""
    if quiet:
        return NullProgress()
    return BarProgress(console) if console.is_terminal else LineProgress(console)

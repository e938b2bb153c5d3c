"""The one way to look at a run while it goes on: progress, trackers and evaluations of one's own are callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.experiment.rundir import RunDirectory


@dataclass(frozen=True)
class RunInfo:
    """What a callback learns of a run before its first round.

    Attributes:
        name: of the method.
        rounds: how many the whole run has.
        start: how many were over when this process took it up.
        seed: of everything random.
        headline: the number in a record by which the run is read.
        directory: where the run is written; None if it stays in memory.
    """

    name: str
    rounds: int
    start: int = 0
    seed: int = 0
    headline: str = "global/accuracy"
    directory: RunDirectory | None = None


class Callback:
    """Looks at a run; every hook does nothing unless it is overridden."""

    def on_start(self, run: RunInfo) -> None:
        """Called once, before the first round of this process."""

    def on_step(self, step: Any) -> Mapping[str, Any]:
        """Numbers that join the round's record, from what ``Task.step`` returned, before the round is taken over.

        They must be a function of the step alone, so that a continued run repeats them. Ctrl-C may break this off, and
        then the round has not been.
        """
        return {}

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Called after every round with its record; Ctrl-C waits for it."""

    def on_finish(self, summary: Mapping[str, Any]) -> None:
        """Called once when the run has come to its end, with what ``summary.json`` says."""

    def on_close(self) -> None:
        """Called once however the run ended: release what is held."""

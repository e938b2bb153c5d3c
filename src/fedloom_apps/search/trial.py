"""One candidate's run, ended early once it falls behind the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedloom.core.errors import ClientError, ConfigError, DataError
from fedloom.experiment import federated
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.experiment import Experiment

GoesOn = Callable[[int, float], bool]
"""Whether a candidate with this score after this round may continue."""


class _Ended(Exception):
    """Raised to end a run early on purpose."""


@dataclass
class Outcome:
    """The outcome of a candidate's run.

    Attributes:
        label: its name, like ``feddyn+uniform``.
        scores: the goal by round, at the rounds of comparison and at the end.
        state: ``complete``, ``stopped`` (at a comparison), ``failed`` (it diverged) or ``refused`` (impossible).
        reason: why it failed or was refused.
        rounds: rounds that were run.
        bytes: bytes communicated.
        minutes: minutes of training.
    """

    label: str
    scores: dict[int, float] = field(default_factory=dict)
    state: str = "complete"
    reason: str = ""
    rounds: int = 0
    bytes: int = 0
    minutes: float = 0.0


class Comparisons(Callback):
    """Compares a run with the others at given rounds, and measures what it costs.

    Args:
        outcome: the outcome to fill in.
        goal: the metric to compare.
        milestones: rounds of comparison.
        goes_on: the rule; None lets the candidate run to its end.
        limit: the run ends before it communicates more bytes than this.
    """

    def __init__(
        self, outcome: Outcome, goal: str, milestones: Sequence[int], goes_on: GoesOn | None, limit: float = math.inf
    ) -> None:
        self.outcome, self.goal, self.milestones, self.goes_on, self.limit = outcome, goal, milestones, goes_on, limit

    def on_round(self, record: Mapping[str, Any]) -> None:
        outcome = self.outcome
        outcome.rounds, outcome.bytes = record["round"], record["comm/bytes"]
        outcome.minutes += record["seconds"] / 60
        here = outcome.rounds in self.milestones
        if self.goal in record or (here and outcome.scores):
            self._compare(record.get(self.goal), here)
        else:
            measured = [key for key in record if "/" in key and key.split("/")[0] not in ("comm", "train")]
            outcome.reason = f"measured are: {', '.join(measured)}." if measured else outcome.reason
        if outcome.bytes * (outcome.rounds + 1) / outcome.rounds > self.limit:
            raise _Ended

    def _compare(self, score: float | None, here: bool) -> None:
        """Note the goal, None for NaN, and ``here``, at a milestone, end the run unless it is to continue."""
        outcome = self.outcome
        outcome.scores[outcome.rounds] = math.nan if score is None else score
        if here and score is None:
            outcome.state, outcome.reason = "failed", f"{self.goal} is not a number after round {outcome.rounds}."
            raise _Ended
        if here and self.goes_on is not None and not self.goes_on(outcome.rounds, outcome.scores[outcome.rounds]):
            outcome.state = "stopped"
            raise _Ended


def attempt(
    make: Callable[[], Experiment],
    label: str,
    goal: str,
    milestones: Sequence[int],
    goes_on: GoesOn | None = None,
    limit: float = math.inf,
) -> Outcome:
    """Run a candidate in memory; impossible settings and divergence are outcomes, not errors."""
    outcome = Outcome(label)
    try:
        experiment = make()
        outcome.label = experiment.method.name
        federated.run(experiment, callbacks=[Comparisons(outcome, goal, milestones, goes_on, limit)])
    except _Ended:
        pass
    except (ConfigError, DataError) as error:
        outcome.state, outcome.reason = "refused", str(error)
    except ClientError as error:
        outcome.state, outcome.reason = "failed", str(error)
    return outcome


def in_best(score: float, others: Sequence[float], eta: int, maximise: bool) -> bool:
    """Whether a score is among the best 1/η of all that were measured so far at the same round, itself included.

    The rule of asynchronous successive halving (Li et al., MLSys 2020, algorithm 2); NaN is worst.

    >>> in_best(0.8, [0.5, 0.9, 0.7], 3, maximise=True), in_best(0.9, [0.5, 0.8, 0.7], 3, maximise=True)
    (False, True)
    """
    if math.isnan(score):
        return False
    better = sum(other > score if maximise else other < score for other in others if not math.isnan(other))
    return better < max((len(others) + 1) // eta, 1)

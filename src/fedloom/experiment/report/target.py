"""The value a comparison asks the runs to reach, read from their configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedloom.experiment.report.groups import Group
from fedloom.experiment.report.rundir import Run
from fedloom.metrics import Direction


@dataclass(frozen=True)
class Target:
    """A value for a metric (``global/accuracy``) to reach."""

    metric: str
    value: float

    @property
    def direction(self) -> Direction:
        """Accuracy is reached from below, a loss from above."""
        return "min" if self.metric.endswith("loss") or "/loss/" in self.metric else "max"

    @property
    def text(self) -> str:
        """As people write it.

        >>> Target("global/accuracy", 0.9).text, Target("global/train_loss", 0.0603).text
        ('global/accuracy ≥ 90 %', 'global/train_loss ≤ 0.0603')
        """
        if self.direction == "min":
            return f"{self.metric} ≤ {self.value:g}"
        return f"{self.metric} ≥ {100 * self.value:g} %"


def _of(run: Run) -> Target | None:
    """The target of the evaluation, from the settings or, for a run that was started from Python, from its summary."""
    metric, value = run.config.get("evaluation.metric", "global/accuracy"), run.number("evaluation.target")
    told = run.summary.get("target")
    if value is None and isinstance(told, Mapping):
        metric, value = told.get("metric"), told.get("value")
    return Target(metric, float(value)) if isinstance(metric, str) and isinstance(value, int | float) else None


def targets(groups: Sequence[Group]) -> list[Target]:
    """The different targets of the runs, in order of appearance."""
    found = [_of(run) for member in groups for run in member.runs]
    return list(dict.fromkeys(target for target in found if target is not None))


def marks(groups: Sequence[Group]) -> dict[str, float]:
    """What to draw into the curves: the value to reach, by metric."""
    return {target.metric: target.value for target in targets(groups)}

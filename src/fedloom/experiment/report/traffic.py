"""What a run sent, and the unit in which methods are compared: one FedAvg round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.experiment.report.groups import Group
from fedloom.experiment.report.rundir import Run, cohort_size
from fedloom.experiment.report.series import COMMUNICATION

_CONDITIONS = ("model.name", "data.name", "clients", "participation", "cohort")


@dataclass(frozen=True)
class Traffic:
    """Parameters sent in each round by all clients together, up and down."""

    rounds: NDArray[np.float64]
    up: NDArray[np.float64]
    down: NDArray[np.float64]

    def up_until(self, at: float) -> float | None:
        """Parameters sent up until round ``at``, that round included."""
        past = self.rounds <= at
        return float(self.up[past].sum()) if past.any() else None


def traffic(run: Run) -> Traffic:
    """Read ``comm/up_params`` and ``comm/down_params``, which say what each round sent.

    Should a run have cumulated them, which shows when they add up to the cumulated ``comm/params`` in the last of
    several rows, the differences are taken.
    """
    rows = [
        (row["round"], *(float(row.get(key) or 0) for key in ("comm/up_params", "comm/down_params", COMMUNICATION)))
        for row in run.rows
        if row.get("comm/up_params") is not None
    ]
    rounds, up, down, both = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    if len(rounds) > 1 and both[-1] > 0 and np.isclose(up[-1] + down[-1], both[-1], rtol=1e-9) and both[0] > 0:
        up, down = np.diff(up, prepend=0), np.diff(down, prepend=0)
    return Traffic(rounds, up, down)


def model_size(run: Run) -> float | None:
    """Parameters of one model, if the run says."""
    value = run.facts.get("model.parameters", run.summary.get("parameters"))
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _fedavg_upload(run: Run, groups: Sequence[Group]) -> float | None:
    """What a FedAvg run of this comparison, with the same model, data, clients and participation, sends up a round."""
    for member in groups:
        for other in member.runs:
            if other.method == "fedavg" and all(other.config.get(k) == run.config.get(k) for k in _CONDITIONS):
                up = traffic(other).up
                if up.sum() > 0:
                    return float(up.mean())
    return None


def unit(run: Run, groups: Sequence[Group]) -> float | None:
    """Parameters one FedAvg round sends up under this run's conditions: a model from each client of the cohort."""
    model, cohort = model_size(run), cohort_size(run)
    return model * cohort if model and cohort else _fedavg_upload(run, groups)


def arithmetic(groups: Sequence[Group]) -> str:
    """The unit in numbers, once for each different one, as a sentence."""
    said: list[str] = []
    for member in groups:
        run = member.runs[0]
        one, model, cohort = unit(run, groups), model_size(run), cohort_size(run)
        if one is None:
            said.append(f"the size of the model is not on record for {member.label}")
        elif model and cohort:
            said.append(f"one FedAvg round = {cohort:,.4g} clients × {model:,.0f} = {one:,.0f} parameters")
        else:
            said.append(
                f"one FedAvg round = {one:,.0f} parameters, the mean upload of the FedAvg run in this comparison"
            )
    return "Here " + "; ".join(dict.fromkeys(said)) + "."

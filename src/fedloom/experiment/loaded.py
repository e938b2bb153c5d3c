"""A module into which models are loaded for evaluation, in large batches across clients."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import State
from fedloom.core.federation import Arrays, Split
from fedloom.core.layout import LiveModule
from fedloom.core.objective import Net
from fedloom.core.plan import ClientPlan
from fedloom.core.targets import TargetKind
from fedloom.experiment.evaluation import Evaluation
from fedloom.metrics import Predictions, lookup, predictions, reliability
from fedloom.metrics.measures import TestLoss

Values = dict[str, np.ndarray]
"""Metrics by name, one value per client."""
RELIABILITY = "reliability"


@dataclass(frozen=True)
class Measurement:
    """The interpretation and measurement of a model's outputs.

    Attributes:
        settings: metrics, padding and batch size.
        targets: the kind of targets that the objective declares; None infers it from the data.
        loss: the objective's own test loss; None if it has none, and the cross entropy is reported.
    """

    settings: Evaluation
    targets: TargetKind | None = None
    loss: TestLoss | None = None

    @property
    def loss_name(self) -> str:
        """The name of the loss: ``loss`` if it is the objective's own, else ``cross_entropy``."""
        return "cross_entropy" if self.loss is None else "loss"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that suit the targets: they are recorded in every evaluation, also where they are NaN."""
        return tuple(name for name in self.settings.metrics if self.targets in (None, *lookup(name).suits))

    def predictions(self, out: Tensor, y: Tensor) -> Predictions:
        """The quantities that the metrics and the test loss need from outputs on one batch."""
        settings = self.settings
        return predictions(settings.metrics, out, y, settings.padding, loss=self.loss, declared=self.targets)


class LoadedModel:
    """A module in evaluation mode that holds one model at a time.

    Args:
        plan: the client plan, with the layout of parameters and buffers.
        settings: metrics and batch size.
    """

    def __init__(self, plan: ClientPlan, settings: Evaluation) -> None:
        self.plan, self.settings = plan, settings
        self.live = LiveModule(copy.deepcopy(plan.model), plan.layout, plan.device)
        self.live.module.eval()
        self.net = Net(self.live.module, plan)
        self.measurement = Measurement(settings, plan.targets, plan.method.test_loss)

    def load(self, shared: Tensor, buffers: Tensor, state: State | None = None) -> None:
        """Load a model: shared parameters [P] and buffers, and a client's private ones if the model is split."""
        split, own = self.plan.layout.shared_size, self.plan.layout.shared_buffers
        self.live.theta[:split].copy_(shared)
        self.live.buffers[:own].copy_(buffers)
        self.fill_private(state, self.live.theta[split:], self.live.buffers[own:])

    def fill_private(self, state: State | None, theta: Tensor, buffers: Tensor) -> None:
        """Write the private parameters and buffers of a client: the initial ones if it has not participated."""
        split, own = self.plan.layout.shared_size, self.plan.layout.shared_buffers
        private = (state or {}).get("personal", {})
        theta.copy_(private.get("private", self.plan.theta0[split:]))
        buffers.copy_(private.get("buffers", self.plan.buffers0[own:]))

    def scores(self, arrays: Arrays, rows: np.ndarray | None = None, labels: Tensor | None = None) -> Predictions:
        """The quantities that the metrics need from the loaded model's predictions, from one pass over the rows.

        ``labels`` overrides the arrays' targets where clients relabel classes.
        """
        at = torch.arange(len(arrays)) if rows is None else torch.from_numpy(rows)
        found = []
        device, size = self.live.theta.device, self.settings.batch_size
        with torch.inference_mode():
            for number, part in enumerate(at.split(size)):
                y = arrays.y[part] if labels is None else labels[number * size : number * size + len(part)]
                x, y = arrays.x[part].to(device), y.to(device)
                found.append(self.measurement.predictions(self.live.module(x), y))
        return Predictions.joined(found)

    def on(
        self, name: str, arrays: Arrays, rows: np.ndarray | None = None, labels: Tensor | None = None
    ) -> dict[str, Any]:
        """Loss and metrics of the loaded model as ``<name>/loss``, ``<name>/accuracy`` and so on.

        Where the objective has no loss outside training it is ``<name>/cross_entropy`` (``Measurement.loss_name``).

        With the metric ``ece`` also its bins, ``<name>/reliability``: rows (fraction, confidence, accuracy).
        """
        found = self.scores(arrays, rows, labels)
        record: dict[str, Any] = {f"{name}/{self.measurement.loss_name}": found.value("loss")}
        record |= {f"{name}/{metric}": found.value(metric) for metric in self.measurement.metrics}
        if f"{name}/ece" in record:  # its bins, for the page; empty ones as zeros
            record[f"{name}/{RELIABILITY}"] = np.nan_to_num(reliability(*found.kept["confidence"])).tolist()
        return record

    def by_client(self, found: Predictions, offsets: np.ndarray) -> Values:
        """Metrics and loss of each client [K], and with ``ece`` sums in bins of confidence, ``reliability`` [K, 15, 3].

        Client k has the samples ``offsets[k]:offsets[k + 1]``.
        """
        values = {name: found.by_group(name, offsets) for name in (*self.settings.metrics, "loss")}
        return values | ({RELIABILITY: found.bins(offsets)} if "ece" in self.settings.metrics else {})


def owned_labels(split: Split) -> Tensor | None:
    """Targets of all rows of ``split.index`` with their owners' labels; None if there is no relabelling."""
    if split.relabel is None:
        return None
    owners = torch.from_numpy(split.index.owners).to(split.relabel.device)
    return split.labels(torch.from_numpy(split.index.rows), owners)

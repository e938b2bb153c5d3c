"""The three evaluations: the server model, every client's deployed model, and the average of all last models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import Plan, Result, State
from fedloom.core.federation import Arrays, Federation, Split
from fedloom.core.layout import LiveModule
from fedloom.core.round import Server
from fedloom.metrics import Predictions, direction, fairness, predictions
from fedloom.run.experiment import Evaluation
from fedloom.run.store import MemoryStore


@dataclass
class LastModels:
    """Each client's last model and the sum over all K of them, for the ``average`` evaluation only.

    A client that has not taken part counts with the initial model, as in the published curves of FedDyn. The sum is
    kept in float64 and updated by differences, so a round costs O(cohort).
    """

    initial: Tensor
    clients: int
    models: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor = field(init=False)
    pending: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = self.initial.double() * self.clients

    def observe(self, server: Server, result: Result) -> None:
        """Remember what a client of this round has arrived at; nothing changes before ``commit``."""
        theta = server.shared["shared"] - result.moved["shared"]
        self.pending[result.client] = torch.cat([theta, result.buffers]).cpu()

    def commit(self) -> None:
        """The round is over: its models become the last ones."""
        for client, model in self.pending.items():
            self.total += model.double() - self.models.get(client, self.initial).double()
            self.models[client] = model
        self.pending.clear()

    def mean(self) -> Tensor:
        """The average model, parameters and buffers in one vector."""
        return (self.total / self.clients).to(self.initial.dtype)


class Evaluator:
    """Measures models on data, in large batches whatever client the samples belong to."""

    def __init__(self, plan: Plan, federation: Federation, settings: Evaluation) -> None:
        self.plan, self.federation, self.settings = plan, federation, settings
        self.live = LiveModule(copy.deepcopy(plan.model), plan.layout, plan.device)
        self.live.module.eval()

    def load(self, shared: Tensor, buffers: Tensor, private: Mapping[str, Tensor] | None = None) -> None:
        """Put a model in place: shared parameters and buffers, and private ones if there are any."""
        split, own = self.plan.layout.shared_size, self.plan.layout.shared_buffers
        private = private or {}
        self.live.theta[:split].copy_(shared)
        self.live.theta[split:].copy_(private.get("private", self.plan.theta0[split:]))
        self.live.buffers[:own].copy_(buffers)
        self.live.buffers[own:].copy_(private.get("buffers", self.plan.buffers0[own:]))

    def scores(self, arrays: Arrays, rows: np.ndarray | None = None, labels: Tensor | None = None) -> Predictions:
        """What the metrics need of the loaded model's predictions, from one pass over the rows.

        ``labels`` are the rows' targets where clients call them otherwise than the arrays do.
        """
        at = torch.arange(len(arrays)) if rows is None else torch.from_numpy(rows)
        found = []
        device, size = self.live.theta.device, self.settings.batch_size
        with torch.inference_mode():
            for number, part in enumerate(at.split(size)):
                y = arrays.y[part] if labels is None else labels[number * size : number * size + len(part)]
                x, y = arrays.x[part].to(device), y.to(device)
                found.append(predictions(self.settings.metrics, self.live.module(x), y, self.settings.padding))
        return Predictions.joined(found)

    def on(
        self, name: str, arrays: Arrays, rows: np.ndarray | None = None, labels: Tensor | None = None
    ) -> dict[str, float]:
        """Loss and metrics of the loaded model, named ``<name>/loss``, ``<name>/accuracy`` and so on."""
        found = self.scores(arrays, rows, labels)
        values = {metric: found.value(metric) for metric in ("loss", *self.settings.metrics)}
        return {f"{name}/{k}": v for k, v in values.items() if k == "loss" or not np.isnan(v)}

    def clients(self, server: Server, store: MemoryStore) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Every client's deployed model on its own test samples: a summary, and one row per client.

        One shared model takes one pass over all clients' samples; private models take one pass each.
        """
        split = self.federation.held_out
        rows, sizes = split.index.rows, split.index.sizes
        tested = np.flatnonzero(sizes)
        if self.plan.layout.shared_size == self.plan.layout.size:
            self.load(server.shared["shared"], server.buffers)
            found = self.scores(split.arrays, rows, owned_labels(split))
        else:
            parts = []
            for client in tested:
                state: State = store.get(int(client)) or {}
                self.load(server.shared["shared"], server.buffers, state.get("personal"))
                mine = split.index[int(client)]
                parts.append(self.scores(split.arrays, mine, split.labels(torch.from_numpy(mine), int(client))))
            found = Predictions.joined(parts)
        n, offsets = sizes[tested], np.concatenate([[0], np.cumsum(sizes[tested])])
        values = {metric: found.by_group(metric, offsets) for metric in (*self.settings.metrics, "loss")}
        table = {"client": tested, "n": n, **values}
        record = {"clients/loss/mean": float(values["loss"].mean())}
        groups = {"clients": np.ones(len(tested), dtype=bool)}
        if self.federation.unseen:
            new = tested >= self.federation.seen
            groups |= {"seen": ~new, "unseen": new}
        for metric in self.settings.metrics:
            if np.isnan(values[metric]).all():
                continue
            for name, of in groups.items():
                figures = fairness.summary(values[metric][of], n[of], direction(metric))
                record |= {f"{name}/{metric}/{k}": v for k, v in figures.items()}
        return record, table

    def measure(
        self, server: Server, store: MemoryStore, last: LastModels | None
    ) -> tuple[dict[str, float], dict[str, np.ndarray] | None]:
        """All evaluations asked for: numbers for the round's record, and the clients' table."""
        record: dict[str, float] = {}
        table = None
        on, federation = self.settings.on, self.federation
        if "clients" in on and len(federation.held_out.index.rows):
            numbers, table = self.clients(server, store)
            record |= numbers
        if "average" in on and last is not None:
            mean = last.mean()
            split = self.plan.layout.shared_size
            self.load(mean[:split], mean[split:])
            record |= self.on("average", federation.test)
        if "global" in on or "train" in on:
            self.load(server.shared["shared"], server.buffers)
        if "global" in on:
            record |= self.on("global", federation.test)
        if "train" in on:
            split = federation.train.first(federation.seen)
            numbers = self.on("train", split.arrays, split.index.rows, owned_labels(split))
            record |= {f"global/{key.replace('/', '_')}": value for key, value in numbers.items()}
        return record, table


def owned_labels(split: Split) -> Tensor | None:
    """Targets of all rows of ``split.index`` as their owners call them; None if they are those of the arrays."""
    if split.relabel is None:
        return None
    owners = torch.from_numpy(split.index.owners).to(split.relabel.device)
    return split.labels(torch.from_numpy(split.index.rows), owners)

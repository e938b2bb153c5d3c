"""The three evaluations: the server model, every client's deployed model, and the average of all last models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Plan, Result, State
from fedloom.core.federation import Arrays, Federation
from fedloom.core.layout import LiveModule
from fedloom.core.round import Server
from fedloom.metrics import fairness
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

    def scores(self, arrays: Arrays, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Per-sample correctness (NaN for regression) and loss of the loaded model, float64 [rows]."""
        at = torch.arange(len(arrays)) if rows is None else torch.from_numpy(rows)
        correct, losses = [], []
        device = self.live.theta.device
        with torch.inference_mode():
            for part in at.split(self.settings.batch_size):
                x, y = arrays.x[part].to(device), arrays.y[part].to(device)
                out = self.live.module(x)
                if y.is_floating_point():
                    losses.append(0.5 * (out.flatten(1) - y.reshape(len(y), -1)).square().sum(1))
                    correct.append(torch.full((len(y),), torch.nan, dtype=torch.float64))
                    continue
                loss = F.cross_entropy(out.movedim(-1, 1), y, reduction="none")
                right = (out.argmax(-1) == y).double()
                losses.append(loss if loss.ndim == 1 else loss.flatten(1).mean(1))
                correct.append(right if right.ndim == 1 else right.flatten(1).mean(1))
        return torch.cat(correct).cpu().numpy(), torch.cat(losses).double().cpu().numpy()

    def on(self, name: str, arrays: Arrays, rows: np.ndarray | None = None) -> dict[str, float]:
        """Mean accuracy and loss of the loaded model, named ``<name>/accuracy`` and ``<name>/loss``."""
        correct, losses = self.scores(arrays, rows)
        record = {f"{name}/loss": float(losses.mean())}
        if not np.isnan(correct).all():
            record[f"{name}/accuracy"] = float(correct.mean())
        return record

    def clients(self, server: Server, store: MemoryStore) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Every client's deployed model on its own test samples: a summary, and one row per client.

        One shared model takes one pass over all clients' samples; private models take one pass each.
        """
        split = self.federation.held_out
        rows, sizes, starts = split.index.rows, split.index.sizes, split.index.offsets
        if self.plan.layout.shared_size == self.plan.layout.size:
            self.load(server.shared["shared"], server.buffers)
            correct, losses = self.scores(split.arrays, rows)
        else:
            parts = []
            for client in np.flatnonzero(sizes):
                state: State = store.get(int(client)) or {}
                self.load(server.shared["shared"], server.buffers, state.get("personal"))
                parts.append(self.scores(split.arrays, split.index[int(client)]))
            correct, losses = (np.concatenate(column) for column in zip(*parts, strict=True))
        tested = np.flatnonzero(sizes)
        accuracy = np.add.reduceat(correct, starts[:-1][tested]) / sizes[tested]
        loss = np.add.reduceat(losses, starts[:-1][tested]) / sizes[tested]
        table = {"client": tested, "n": sizes[tested], "accuracy": accuracy, "loss": loss}
        record = {"clients/loss/mean": float(loss.mean())}
        if not np.isnan(accuracy).all():
            record |= {f"clients/accuracy/{k}": v for k, v in fairness.summary(accuracy, sizes[tested]).items()}
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
            numbers = self.on("train", federation.train.arrays, federation.train.index.rows)
            record |= {f"global/{key.replace('/', '_')}": value for key, value in numbers.items()}
        return record, table

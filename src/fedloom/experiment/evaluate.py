"""Evaluation of the server model, of every client's deployed model, and of means of models over clients or rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.federation import Arrays, Federation, Split
from fedloom.core.parts import Submodels
from fedloom.core.plan import ClientPlan
from fedloom.core.server import Server, Store
from fedloom.experiment import batched_eval, interpolation_eval
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.last_models import ClientModels
from fedloom.experiment.loaded import RELIABILITY, LoadedModel, Values, owned_labels
from fedloom.experiment.server_average import ServerAverage
from fedloom.metrics import Predictions, direction, fairness
from fedloom.metrics.prediction import reliability_of


class Evaluator(LoadedModel):
    """Runs the evaluations of an experiment.

    Args:
        plan: the client plan.
        federation: the data.
        settings: what to measure.
    """

    def __init__(self, plan: ClientPlan, federation: Federation, settings: Evaluation) -> None:
        super().__init__(plan, settings)
        self.federation = federation
        self.name = "" if plan.submodel is None else plan.submodel.name
        levels = plan.levels if plan.has_levels else ()
        self.levels = [Evaluator(level, federation, settings) for level in levels]

    def clients(self, server: Server, store: Store) -> tuple[dict[str, Any], Values]:
        """Evaluate every client's deployed model on its own test samples; return a summary and one row per client.

        A shared model, or one per level, takes one pass over all samples; private, adapted and interpolated models are
        evaluated as described in ``fedloom.experiment.batched_eval``.
        """
        split = self.federation.held_out
        rows, sizes = split.index.rows, split.index.sizes
        tested = np.flatnonzero(sizes)
        n, offsets = sizes[tested], np.concatenate([[0], np.cumsum(sizes[tested])])
        record: dict[str, Any] = {}
        adapts, whole = not self.plan.method.adaptation.is_identity, self.plan.layout.size
        if self.plan.is_paired:
            values, record = interpolation_eval.deployed(self, self.federation, server, store, tested)
        elif self.levels:
            values = self.by_level(server, tested)
        elif adapts or self.plan.layout.shared_size < whole:
            values = self.by_client(self.own(server, store, tested), offsets)
        else:
            self.load(server.theta, server.buffers)
            values = self.by_client(self.scores(split.arrays, rows, owned_labels(split)), offsets)
        bins = values.pop(RELIABILITY, None)
        if bins is not None:  # of all clients' samples, for the page; empty bins as zeros
            record[f"clients/{RELIABILITY}"] = np.nan_to_num(reliability_of(bins.sum(0))).tolist()
        table = {"client": tested, "n": n, **values}
        return record | self.summary(table), table

    def summary(self, table: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Mean loss and the fairness of every metric in a table of clients (``client``, ``n``, ``loss``, metrics)."""
        tested, n = table["client"], table["n"]
        loss = table["loss"][self.counted(tested)]
        record = {f"clients/{self.measurement.loss_name}/mean": float(loss.mean()) if len(loss) else float("nan")}
        groups = {"clients": np.ones(len(tested), dtype=bool)}
        if self.federation.unseen:
            new = tested >= self.federation.seen
            groups |= {"seen": ~new, "unseen": new}
        if self.levels:
            level = table["cluster"] if "cluster" in table else self.level_of(tested)
            groups |= {f"clients/{name}": level == n for n, name in enumerate(self.names) if (level == n).any()}
        for metric in self.measurement.metrics:
            for name, of in groups.items():
                figures = fairness.summary(table[metric][of], n[of], direction(metric))
                record |= {f"{name}/{metric}/{k}": v for k, v in figures.items()}
        return record

    def counted(self, tested: np.ndarray) -> np.ndarray:
        """Whether each tested client has a label that counts, bool [tested]: not if all its positions are padding."""
        split, padding = self.federation.held_out, self.settings.padding
        if padding is None or split.arrays.y.is_floating_point() or not len(split.index.rows):
            return np.ones(len(tested), dtype=bool)
        y = split.arrays.y[torch.from_numpy(split.index.rows).to(split.arrays.y.device)]
        real = (y != padding).reshape(len(y), -1).any(1).cpu().numpy()
        return np.bincount(split.index.owners, weights=real, minlength=len(split.index))[tested] > 0

    def own(self, server: Server, store: Store, tested: np.ndarray) -> Predictions:
        """Predictions of each tested client's model, with its private parameters, on its own test samples.

        If the method adapts models, each is adapted first, on all the client's training samples.
        """
        layout, federation = self.plan.layout, self.federation
        split = layout.shared_size, layout.shared_buffers
        self.load(server.theta, server.buffers)

        def fill(client: int, number: int, theta: Tensor, buffers: Tensor) -> None:
            self.fill_private(store.get(client), theta, buffers)

        support = None if self.plan.method.adaptation.is_identity else federation.train
        return batched_eval.through(self, federation.held_out, tested, fill, split, support=support)[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The levels' names; () if all clients train the same network."""
        personal = self.plan.method.personal
        return personal.levels if isinstance(personal, Submodels) else ()

    def level_of(self, clients: np.ndarray, server: Server | None = None) -> np.ndarray:
        """The levels of clients, including clients that never train, int64 [clients].

        Clients that choose their level take the one whose server model has the lowest loss on their training samples.
        """
        personal = self.plan.method.personal
        if not isinstance(personal, Submodels):
            return np.zeros(len(clients), dtype=np.int64)
        if self.plan.chooses and server is not None:
            train, levels = self.federation.train, range(len(self.levels))
            losses = [self.of_level(number, server, train, clients)["loss"] for number in levels]
            return np.nan_to_num(losses, nan=np.inf).argmin(0)
        return np.array([personal.level(int(client)) for client in clients])

    def of_level(self, number: int, server: Server, split: Split, clients: np.ndarray) -> Values:
        """Metrics and loss of a level's network on each client's samples of the split, [clients] each."""
        evaluator, index = self.levels[number], split.index.pick(clients)
        evaluator.load(self.plan.levels[number].own(server.theta), server.buffers)
        owners = torch.from_numpy(np.repeat(clients, index.sizes)).to(split.arrays.y.device)
        labels = None if split.relabel is None else split.labels(torch.from_numpy(index.rows), owners)
        return self.by_client(evaluator.scores(split.arrays, index.rows, labels), index.offsets)

    def by_level(self, server: Server, tested: np.ndarray) -> Values:
        """Metrics and loss of each tested client's level network on its own test samples, float64 [clients] each."""
        levels = self.level_of(tested, server)
        values: Values = {"cluster": levels} if self.plan.chooses else {}
        for number in range(len(self.levels)):
            of = np.flatnonzero(levels == number)
            if len(of):
                for metric, column in self.of_level(number, server, self.federation.held_out, tested[of]).items():
                    values.setdefault(metric, np.full((len(tested), *column.shape[1:]), np.nan))[of] = column
        return values

    def measure(
        self,
        server: Server,
        store: Store,
        means: Mapping[str, ClientModels],
        averaged: ServerAverage | None = None,
        at_clients: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray] | None]:
        """All configured evaluations: numbers for the round's record, and the table of clients.

        ``at_clients`` is that table if clients measured their models themselves (``Engine.evaluate``).
        """
        rng.seed_torch(self.plan.seed, "evaluation", server.round)  # for models that draw in evaluation mode, too
        record, table = self.deployed(server, store)
        if at_clients is not None and len(at_clients["client"]):
            record, table = record | self.summary(at_clients), dict(at_clients)
        for name, models in means.items():
            record |= self.mean(name, models, server, store)
        if averaged is not None:
            numbers, _ = self.deployed(averaged.server(server), store)
            record |= _renamed(numbers, "server_average")
        if table is not None:
            table = {self.measurement.loss_name if key == "loss" else key: column for key, column in table.items()}
            if self.federation.names:
                named = np.array(self.federation.names, dtype=object)[table["client"]]
                table = {"client": table.pop("client"), "name": named, **table}
        return record, table

    def deployed(self, server: Server, store: Store) -> tuple[dict[str, Any], dict[str, np.ndarray] | None]:
        """The evaluations of a server model: ``clients`` with their table, ``global``, ``train``."""
        record: dict[str, Any] = {}
        table = None
        on, federation = self.settings.what, self.federation
        if "clients" in on and len(federation.held_out.index.rows):
            record, table = self.clients(server, store)
        for evaluator, level in zip(self.levels, self.plan.levels, strict=False):
            if "global" in on and evaluator.name:
                evaluator.load(level.own(server.theta), server.buffers)
                record |= evaluator.on(f"global/{evaluator.name}", federation.test)
        if "global" in on or "train" in on:
            self.load(server.theta, server.buffers)
        if "global" in on:
            record |= self.on("global", federation.test)
        if "train" in on:
            split = federation.train.first(federation.seen)
            numbers = self.on("train", split.arrays, split.index.rows, owned_labels(split))
            record |= {f"global/{key.replace('/', '_')}": value for key, value in numbers.items()}
        return record, table

    def accuracy(self, server: Server, arrays: Arrays) -> float:
        """Accuracy of the server model on other arrays, whatever metrics are configured."""
        self.load(server.theta, server.buffers)
        size, right = self.settings.batch_size, 0
        with torch.inference_mode():
            for x, y in zip(arrays.x.split(size), arrays.y.split(size), strict=True):
                right += int((self.live.module(x).argmax(-1) == y).sum())
        return right / len(arrays)

    def mean(self, name: str, models: ClientModels, server: Server, store: Store) -> dict[str, Any]:
        """Evaluate the mean of clients' models on the common test set.

        If there is none, or the method adapts, every client evaluates it, adapted, on test samples of its own. Empty if
        there is no model to average.
        """
        split, federation = self.plan.layout.shared_size, self.federation
        if self.levels:
            record: dict[str, Any] = {}
            for number, evaluator in enumerate(self.levels):
                if models.members(number):
                    evaluator.load(models.mean(number), server.buffers)
                    record |= evaluator.on("/".join(filter(None, (name, evaluator.name))), federation.test)
            return record
        if not models.members(0):
            return {}
        mean = models.mean().to(server.theta.device)
        if self.plan.method.adaptation.is_identity and len(federation.test):
            self.load(mean[:split], mean[split:])
            return self.on(name, federation.test)
        if not len(federation.held_out.index.rows):
            return {}
        beside = replace(server, theta=mean[:split], buffers=mean[split:])
        return _renamed(self.clients(beside, store)[0], name)


def _renamed(record: dict[str, Any], scope: str) -> dict[str, Any]:
    """Rename metrics after another model, which replaces the first word of ``global/…`` and ``clients/…``.

    >>> _renamed({"global/loss": 1.0, "clients/accuracy/mean": 0.5, "unseen/accuracy/mean": 0.4}, "average")
    {'average/loss': 1.0, 'average/accuracy/mean': 0.5, 'average/unseen/accuracy/mean': 0.4}
    """
    short = {key: key.removeprefix("global/").removeprefix("clients/") for key in record}
    return {f"{scope}/{short[key]}": value for key, value in record.items()}

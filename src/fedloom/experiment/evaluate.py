"""The three evaluations: the server model, every client's deployed model, and the average of all last models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import Result
from fedloom.core.federation import Arrays, Federation, Split
from fedloom.core.layout import LiveModule
from fedloom.core.objective import Net
from fedloom.core.parts import Submodels
from fedloom.core.plan import Plan
from fedloom.core.round import Server, Store
from fedloom.experiment import batched_eval as passes
from fedloom.experiment import interpolation_eval as mixtures
from fedloom.experiment.experiment import Evaluation
from fedloom.metrics import Predictions, direction, fairness, predictions


@dataclass
class LastModels:
    """Each client's last model and the sum over all K of them, for the ``average`` evaluation only.

    A client that has not taken part counts with the initial model, as in the published curves of FedDyn. The sum is
    kept in float64 and updated by differences, so a round costs O(cohort). Where clients have levels, ``initial`` and
    ``total`` hold those of all levels, one after the other.
    """

    initial: Tensor
    clients: int
    plan: Plan | None = None  # where clients have levels
    models: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor = field(init=False)
    pending: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = self.initial.double().clone()
        for number in range(len(self.levels) or 1):
            self.total[self.segment(number)] *= self.members(number)

    @classmethod
    def of(cls, plan: Plan, clients: int) -> LastModels:
        """Nobody has taken part yet."""
        if plan.has_levels:
            return cls(torch.cat([level.theta0 for level in plan.levels]).cpu(), clients, plan)
        split, own = plan.layout.shared_size, plan.layout.shared_buffers
        return cls(torch.cat([plan.theta0[:split], plan.buffers0[:own]]).cpu(), clients)

    @property
    def levels(self) -> tuple[Plan, ...]:
        """The levels' plans; none if all clients train the same network."""
        return () if self.plan is None else self.plan.levels

    def segment(self, number: int) -> slice:
        """Where the models of a level lie."""
        if not self.levels:
            return slice(None)
        ends = np.cumsum([0, *(len(level.theta0) for level in self.levels)])
        return slice(int(ends[number]), int(ends[number + 1]))

    def members(self, number: int) -> int:
        """How many clients a level has."""
        return self.clients if self.plan is None else int((self.plan.level[: self.clients] == number).sum())

    def where(self, client: int) -> slice:
        """Where the model of a client's level lies."""
        return self.segment(0 if self.plan is None else int(self.plan.level[client]))

    def observe(self, server: Server, result: Result) -> None:
        """Remember what a client of this round has arrived at; nothing changes before ``commit``."""
        received = server.theta if self.plan is None else self.plan.received(result.client, server.theta)
        assert result.moved is not None
        theta = received - result.moved
        self.pending[result.client] = torch.cat([theta, result.buffers]).cpu()

    def commit(self) -> None:
        """The round is over: its models become the last ones."""
        for client, model in self.pending.items():
            at = self.where(client)
            self.total[at] += model.double() - self.models.get(client, self.initial[at]).double()
            self.models[client] = model
        self.pending.clear()

    def mean(self, number: int = 0) -> Tensor:
        """The average model, parameters and buffers in one vector; of a level's clients, where there are several."""
        return (self.total[self.segment(number)] / self.members(number)).to(self.initial.dtype)


class Evaluator:
    """Measures models on data, in large batches whatever client the samples belong to."""

    def __init__(self, plan: Plan, federation: Federation, settings: Evaluation) -> None:
        self.plan, self.federation, self.settings = plan, federation, settings
        self.live = LiveModule(copy.deepcopy(plan.model), plan.layout, plan.device)
        self.live.module.eval()
        self.net = Net(self.live.module, plan)
        self.name = "" if plan.submodel is None else plan.submodel.name
        levels = plan.levels if plan.has_levels else ()
        self.levels = [Evaluator(level, federation, settings) for level in levels]

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

    def clients(self, server: Server, store: Store) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Every client's deployed model on its own test samples: a summary, and one row per client.

        One shared model, or one a level, takes one pass over all clients' samples; private, adapted and mixed models go
        through as ``fedloom.experiment.batched_eval`` has it.
        """
        split = self.federation.held_out
        rows, sizes = split.index.rows, split.index.sizes
        tested = np.flatnonzero(sizes)
        n, offsets = sizes[tested], np.concatenate([[0], np.cumsum(sizes[tested])])
        record: dict[str, float] = {}
        adapts, whole = not self.plan.method.adaptation.is_identity, self.plan.layout.size
        if self.plan.is_paired:
            values, record = mixtures.deployed(self, server, store, tested)
        elif self.levels:
            values = self.by_level(server, tested)
        elif adapts or self.plan.layout.shared_size < whole:
            values = self._by_client(self.own(server, store, tested), offsets)
        else:
            self.load(server.theta, server.buffers)
            values = self._by_client(self.scores(split.arrays, rows, owned_labels(split)), offsets)
        table = {"client": tested, "n": n, **values}
        record["clients/loss/mean"] = float(values["loss"].mean())
        groups = {"clients": np.ones(len(tested), dtype=bool)}
        if self.federation.unseen:
            new = tested >= self.federation.seen
            groups |= {"seen": ~new, "unseen": new}
        if self.levels:
            level = self.level_of(tested)
            groups |= {f"clients/{name}": level == n for n, name in enumerate(self.names) if (level == n).any()}
        for metric in self.settings.metrics:
            if np.isnan(values[metric]).all():
                continue
            for name, of in groups.items():
                figures = fairness.summary(values[metric][of], n[of], direction(metric))
                record |= {f"{name}/{metric}/{k}": v for k, v in figures.items()}
        return record, table

    def own(self, server: Server, store: Store, tested: np.ndarray) -> Predictions:
        """Predictions of each tested client's model on its own test samples: its private half with the shared one.

        Where the method adapts models, each is adapted first, with all the client's training samples.
        """
        layout, plan = self.plan.layout, self.plan
        split, federation = (layout.shared_size, layout.shared_buffers), self.federation
        self.load(server.theta, server.buffers)

        def fill(client: int, number: int, theta: Tensor, buffers: Tensor) -> None:
            mine = (store.get(client) or {}).get("personal", {})
            theta.copy_(mine.get("private", plan.theta0[split[0] :]))
            buffers.copy_(mine.get("buffers", plan.buffers0[split[1] :]))

        support = None if plan.method.adaptation.is_identity else federation.train
        return passes.through(self, federation.held_out, tested, fill, split, support=support)[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The levels' names; none if all clients train the same network."""
        personal = self.plan.method.personal
        return personal.levels if isinstance(personal, Submodels) else ()

    def level_of(self, clients: np.ndarray) -> np.ndarray:
        """The levels of clients, those too that never take part, int64 [clients]."""
        personal = self.plan.method.personal
        assert isinstance(personal, Submodels)
        return np.array([personal.level(int(client)) for client in clients])

    def by_level(self, server: Server, tested: np.ndarray) -> dict[str, np.ndarray]:
        """The metrics and the loss of the network of each tested client's level on its own test samples, [clients]."""
        split, levels = self.federation.held_out, self.level_of(tested)
        values = {metric: np.full(len(tested), np.nan) for metric in (*self.settings.metrics, "loss")}
        for number, (evaluator, level) in enumerate(zip(self.levels, self.plan.levels, strict=False)):
            of = np.flatnonzero(levels == number)
            if len(of):
                evaluator.load(level.own(server.theta), server.buffers)
                index = split.index.pick(tested[of])
                owners = torch.from_numpy(np.repeat(tested[of], index.sizes)).to(split.arrays.y.device)
                labels = None if split.relabel is None else split.labels(torch.from_numpy(index.rows), owners)
                found = evaluator.scores(split.arrays, index.rows, labels)
                for metric, column in self._by_client(found, index.offsets).items():
                    values[metric][of] = column
        return values

    def _by_client(self, found: Predictions, offsets: np.ndarray) -> dict[str, np.ndarray]:
        return {metric: found.by_group(metric, offsets) for metric in (*self.settings.metrics, "loss")}

    def measure(
        self, server: Server, store: Store, last: LastModels | None
    ) -> tuple[dict[str, float], dict[str, np.ndarray] | None]:
        """All evaluations asked for: numbers for the round's record, and the clients' table."""
        record: dict[str, float] = {}
        table = None
        on, federation = self.settings.what, self.federation
        if "clients" in on and len(federation.held_out.index.rows):
            numbers, table = self.clients(server, store)
            record |= numbers
        for number, (evaluator, level) in enumerate(zip(self.levels, self.plan.levels, strict=False)):
            if "average" in on and last is not None and last.members(number):
                evaluator.load(last.mean(number), server.buffers)
                record |= evaluator.on("/".join(filter(None, ("average", evaluator.name))), federation.test)
            if "global" in on and evaluator.name:
                evaluator.load(level.own(server.theta), server.buffers)
                record |= evaluator.on(f"global/{evaluator.name}", federation.test)
        if "average" in on and last is not None and not self.levels:
            mean = last.mean()
            split = self.plan.layout.shared_size
            self.load(mean[:split], mean[split:])
            record |= self.on("average", federation.test)
        if "global" in on or "train" in on:
            self.load(server.theta, server.buffers)
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

"""All state of a federated run between two rounds, and its form in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedloom.core.client import Failure, State
from fedloom.core.errors import CheckpointError
from fedloom.core.server import Server
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.failures import packed
from fedloom.experiment.last_models import CohortModels, LastModels
from fedloom.experiment.server_average import ServerAverage
from fedloom.experiment.store import CLIENTS, StateStore, flat, nested


@dataclass
class Snapshot:
    """The state of a federated run after some rounds.

    Attributes:
        server: θ [P], buffers and the parts' server states.
        store: the client states.
        last: the clients' last models, if their average is evaluated.
        cohort: the models of the last round's cohort, if their mean is evaluated; not part of a checkpoint.
        averaged: the average of the server model over the rounds, if it is evaluated.
    """

    server: Server
    store: StateStore
    last: LastModels | None = None
    cohort: CohortModels | None = None
    averaged: ServerAverage | None = None

    @property
    def client_models(self) -> dict[str, LastModels | CohortModels]:
        """The means of clients' models that are evaluated, by the names of their evaluations."""
        both = {"average": self.last, "cohort": self.cohort}
        return {name: models for name, models in both.items() if models is not None}

    def commit(self, server: Server, states: Mapping[int, State]) -> None:
        """End a round with its new client states, and the clients' models that were observed: all or nothing.

        Raises:
            CheckpointError: see ``StateStore.prepare``.
        """
        updates = [self.store.prepare(states, server.round)]
        if self.last is not None and states:
            try:
                updates.append(self.last.prepare(server.round))
            except BaseException:
                updates[0].withdraw()
                raise
        for update in updates:
            update.adopt()
        self.server = server
        for models in self.client_models.values():
            models.commit() if states else models.begin()  # a round without any update leaves no trace
        if self.averaged is not None:
            self.averaged.add(server)

    def checkpoint(self, facts: dict[str, Any], failures: Sequence[Failure] = ()) -> Checkpoint:
        """The snapshot as a checkpoint, with all clients that were left out."""
        server, (reasons, table) = self.server, packed(failures)
        facts = facts | {"failures": reasons}
        tensors: dict[str, dict[str, Tensor]] = {
            "server": {"shared": server.theta, "buffers": server.buffers} | flat(server.parts),
            CLIENTS: self.store.save(server.round),
        }
        if self.last is not None:
            tensors |= self.last.saved(server.round)
        if failures:
            tensors["failures"] = table
        if self.averaged is not None:
            tensors["server_average"] = {"model": self.averaged.model}
            facts = facts | {"server_average": self.averaged.rho}
        return Checkpoint(server.round, tensors, facts)

    def restored(self, checkpoint: Checkpoint, out: Path) -> Snapshot:
        """The state in a checkpoint of the run directory ``out``; ``self`` is the state before the first round.

        Raises:
            ValueError: if it belongs to another model, or client states on disk are missing.
            CheckpointError: if the average is evaluated but the run did not keep last models.
        """
        parts = dict(checkpoint.tensors["server"])
        shared, buffers = parts.pop("shared"), parts.pop("buffers")
        mine = self.server.theta
        if [(t.shape, t.dtype) for t in (shared, buffers)] != [(t.shape, t.dtype) for t in (mine, self.server.buffers)]:
            raise ValueError("it belongs to another model")
        device = self.server.buffers.device
        states = {place: {k: v.to(device) for k, v in t.items()} for place, t in nested(parts).items()}
        server = replace(
            self.server,
            theta=shared.to(device),
            buffers=buffers.to(device),
            parts=states,
            round=checkpoint.round,
        )
        store = self.store.opened(checkpoint.tensors[CLIENTS])
        last = self.last
        if last is not None:
            if "average" not in checkpoint.tensors:
                raise CheckpointError(
                    f"the run in {out} did not keep its clients' last models, so the average evaluation cannot begin "
                    "now; leave average out of evaluation.what."
                )
            last.restore(checkpoint.tensors)
        averaged = self.averaged
        if averaged is not None:
            if "server_average" not in checkpoint.tensors:
                raise CheckpointError(
                    f"the run in {out} did not average its server model, so the average cannot begin now; "
                    "leave evaluation.server_average out."
                )
            if (before := checkpoint.facts.get("server_average", averaged.rho)) != averaged.rho:
                raise CheckpointError(
                    f"the run in {out} averaged its server model with {before:g}, not {averaged.rho:g}; "
                    f"set evaluation.server_average={before:g}."
                )
            model = checkpoint.tensors["server_average"]["model"].to(device)
            averaged = replace(averaged, model=model, rounds=server.round)
        return Snapshot(server, store, last, self.cohort, averaged)

"""The models of a run: the server's, each client's, and those of clients that join later."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.applications import notebook_html
from fedloom.base.determinism import exact_gpu
from fedloom.base.errors import ClientError, ConfigError, nearest
from fedloom.compute import computes
from fedloom.core.context import Batch
from fedloom.core.federation import Arrays, Federation, Index, Population, Split
from fedloom.core.parts import Use
from fedloom.core.slots import label
from fedloom.core.targets import CLASSES
from fedloom.experiment.conventions import compare, conventions, table_of
from fedloom.experiment.deployed import Adapted, DeployedModel
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.evaluator import Evaluator
from fedloom.experiment.passes import LoadedModel
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.setup import to_device
from fedloom.experiment.snapshot import Snapshot
from fedloom.experiment.store import StateStore
from fedloom.rounds import meta
from fedloom.rounds.cohort import client_states
from fedloom.rounds.exchange import State, own_values
from fedloom.rounds.plan import ClientPlan

if TYPE_CHECKING:
    from pandas import DataFrame


class RunRecords:
    """The records and the summary that every run leaves.

    Args:
        history: one record per round.
        summary: the content of ``summary.json``; empty if the run has not ended.
        path: the run directory, if there is one.
    """

    def __init__(
        self, history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], path: Path | None = None
    ) -> None:
        self.records, self.summary, self.path = history, summary, path

    def _repr_html_(self) -> str | None:
        return notebook_html(self)

    @property
    def history(self) -> DataFrame:
        """One row per round, one column per key of the records; NaN where a round has no such number."""
        from pandas import DataFrame

        return DataFrame(list(self.records))


class TrainedRun(RunRecords):
    """The models that a run has trained, ready for use; ``fedloom.load`` reads them from a run directory.

    >>> import fedloom as fl
    >>> federation = fl.data.federate("digits", "dirichlet", clients=4)
    >>> trained = fl.run("fedper", federation, "mlp", rounds=2).trained
    >>> mine, test = trained.client(3), federation.held_out.client(3)
    >>> mine.predict(test.x).shape == test.y.shape
    True
    >>> sorted(mine.evaluate(test.x, test.y))
    ['accuracy', 'loss']

    Args:
        evaluator: the run's evaluator, whose models these are.
        snapshot: all final state.
        apart: whether clients kept their data and models to themselves, as in a deployment.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        snapshot: Snapshot,
        history: Sequence[Mapping[str, Any]],
        summary: Mapping[str, Any],
        path: Path | None = None,
        is_deployment: bool = False,
    ) -> None:
        super().__init__(history, summary, path)
        self.evaluator, self.snapshot, self.is_deployment = evaluator, snapshot, is_deployment
        self.federation, self.plan = evaluator.federation, evaluator.plan

    def __repr__(self) -> str:
        rounds = self.snapshot.server.round
        return f"<TrainedRun of {self.plan.method.name!r}: {len(self.federation)} clients, {rounds} rounds>"

    @cached_property
    def server(self) -> DeployedModel:
        """The server's model.

        Raises:
            ConfigError: if some of its parameters are private, so that only clients have a whole model.
        """
        self._refuse_without_models()
        if self.plan.has_private:
            source = (
                "of a node, fedloom deploy predict there"
                if self.is_deployment
                else "of a client, client(0) or --client 0"
            )
            raise ConfigError(
                f"with personal {label(self.plan.method.personal)!r} clients keep parameters to themselves, so that "
                f"the server has no whole model; use that {source}, or of a new one, adapt(x, y)."
            )
        self._refuse_without_mean("client(0) or --client 0")
        server = self.snapshot.server
        return self._model(self.plan, server.theta, server.buffers)

    def client(self, client: int | str) -> DeployedModel:
        """The model that a client deploys, with the same bits as in the run's own evaluation of that client.

        That is the server's model, with the client's private parameters if the method keeps some; (1 - λ)w + λv at the
        client's λ if it trains two models; its level's network if clients have networks of different size; and adapted
        to its training samples if the method adapts models.

        Args:
            client: its number, from 0, or its name if the data have names.

        Raises:
            ConfigError: if there is no such client, clients kept their models to themselves, or no model outlives a
                round.
        """
        self._refuse_without_models()
        if self.is_deployment and (self.plan.private_size or not self.plan.method.adaptation.is_identity):
            use = f"call adapt(x, y) for a new client{'' if self.plan.has_private else ', and server is its own'}"
            raise ConfigError(
                "a deployment's data and its clients' own models stay with the nodes, where fedloom deploy predict "
                f"uses them; {use}."
            )
        number = self._number(client)
        plan, snapshot = self.plan, self.snapshot
        support = None
        if not plan.method.adaptation.is_identity:
            samples = self.federation.train.client(number)
            support = Batch(samples.x, samples.y)
        model = self._deployed(plan, snapshot.store.get(number), self._uses[number], support)
        return replace(model, arrays=self.federation.train.arrays_for(number))

    def adapt(self, x: Any, y: Any, rounds: int = 10) -> DeployedModel:
        """The model that a new client with samples x [n, ...] and targets y [n] deploys; the run is not changed.

        The client receives the final server model. If the method keeps parameters at clients, it trains its own as in
        ``rounds`` rounds of the method, while the server is unchanged and receives nothing. If the method adapts
        models, the model is then adapted to the samples. A client that would choose λ on validation samples takes 0.5.
        Of several models it receives the mean, or the one with the lowest loss on its samples where clients choose.

        Raises:
            ConfigError: if ``rounds`` is below 1, or no model outlives a round.
            DataError: if the samples do not fit the run's data.
            ClientError: if training fails or diverges.
        """
        self._refuse_without_models()
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ConfigError(f"rounds is {rounds!r}, but it must be a whole number of at least 1.")
        server = self.snapshot.server
        data = self._as_deployed(self.plan.model).labelled_arrays(x, y)
        with self._as_deployed(self.plan.model).refusing_unknown(data.x):  # before the method trains on them
            data = replace(data, x=data.x.to(server.theta.device), y=data.y.to(server.theta.device))
        plan, number = _with_client(self.plan, data), self.plan.population.clients
        store = StateStore()
        if plan.private_size:
            level_plan = plan.levels[plan.level[number]]
            compute, states = (
                computes.make("live")(level_plan),
                client_states(plan, server.broadcast(plan).theta, store),
            )
            with reproducible():
                for ahead in range(rounds):
                    down = replace(server, round=server.round + ahead).broadcast(plan).at(level_plan)
                    down = replace(down, invited=(number,))
                    (result,) = compute.work(down, [number], [states(number)])
                    if (failure := result.failure) is not None:
                        raise ClientError(f"the new client cannot train: {failure.reason}.", failure.trace)
                    store.put({number: result.state}, ahead + 1)
        return self.with_state(number, store.get(number), x, y)

    def with_state(self, number: int, state: State | None, x: Any, y: Any) -> DeployedModel:
        """The model of the client with this number and state; ``adapt`` says how it is adapted to its samples."""
        plan, data = self.plan, self._as_deployed(self.plan.model).labelled_arrays(x, y)
        device = self.snapshot.server.theta.device
        support = None if plan.method.adaptation.is_identity else Batch(data.x.to(device), data.y.to(device))
        uses = plan.method.personal.uses(number, lambda: own_values(state), 0)
        if plan.method.topology.chooses:
            uses = tuple(use._replace(model=model) for use in uses for model in range(plan.models))
        else:
            self._refuse_without_mean("client(0)")
        models = [self._deployed(plan, state, use, support) for use in uses]
        loss = self.evaluator.measurement.loss_name
        return models[0] if len(models) == 1 else min(models, key=lambda model: model.evaluate(x, y)[loss])

    def evaluate(self, federation: Federation | None = None, evaluation: Evaluation | None = None) -> dict[str, Any]:
        """The records of an evaluation of the run's models, on its own federation or on another; nothing is trained.

        Args:
            federation: other clients, which then use the server's model, adapted to their training samples if the
                method adapts models; by default the run's own with the models that they deploy.
            evaluation: what is measured; by default as in the run. ``average``, ``cohort`` and ``received`` are left
                out.

        Raises:
            ConfigError: if clients of the method keep parameters, which those of another federation do not have; if
                its classes, columns or tokens are others; or if its samples cannot be measured.
        """
        self._refuse_without_models()
        plan, store, here = self.plan, self.snapshot.store, self.federation
        if self.is_deployment and federation is None:
            raise ConfigError("a deployment's data stay with the nodes; give the federation to evaluate on.")
        if federation is not None:
            if plan.private_size or self.snapshot.server.models is not None:
                part = plan.method.topology if self.snapshot.server.models is not None else plan.method.personal
                raise ConfigError(
                    f"with {label(part)!r} clients have their own models; for a client of "
                    "another federation call adapt(x, y)."
                )
            data_facts, model_facts = (
                conventions(data.train.arrays, data.provenance) for data in (federation, self.federation)
            )
            compare(model_facts, data_facts, "the run's model")
            here = to_device(federation, plan.layout.dtype, plan.device)
            plan, store = replace(plan, data=here.train, validation=None, all_clients=None), StateStore()
            expected, actual = (
                f"of shape {list(data.train.arrays.x.shape[1:])} in {data.classes} classes"
                for data in (self.federation, here)
            )
            if expected != actual:
                raise ConfigError(f"the run's model takes samples {expected}, but these are {actual}.")
        settings = self.evaluator.settings if evaluation is None else evaluation
        fitted = settings.for_targets(plan.targets or CLASSES, len(here.test) > 0)
        what = tuple(name for name in fitted.what if name not in ("average", "cohort", "received"))
        evaluator = Evaluator(plan, here, replace(fitted, what=what, server_average=0.0))
        with reproducible():
            return evaluator.measure(self.snapshot.server, store, {})[0]

    def _deployed(self, plan: ClientPlan, state: State | None, use: Use, support: Batch | None) -> DeployedModel:
        """The model that a client with this state uses, adapted to ``support`` if there are any samples."""
        server, plan = self.snapshot.server.model(use.model), plan.levels[use.level]
        loaded = LoadedModel(plan, self.evaluator.settings)
        loaded.load(plan.level_params(server.theta), plan.level_buffers(server.buffers), state, use)
        theta, buffers = loaded.live.theta, loaded.live.buffers
        if support is None:
            return self._model(plan, theta, buffers, use.lam)
        with torch.no_grad(), reproducible():
            fitted = meta.deployed_params(plan, loaded.net, theta, buffers, support)
            if fitted is not None:
                return self._model(plan, fitted, buffers)
            predict = meta.deployed_model(plan, loaded.net, theta, buffers, support)
        return self._as_deployed(Adapted(predict, plan.model, theta.device).eval())

    def _model(self, plan: ClientPlan, theta: Tensor, buffers: Tensor, lam: float | None = None) -> DeployedModel:
        """An independent module with these parameters [P] and buffers, laid out in memory as in the evaluation."""
        module = copy.deepcopy(plan.model).to(theta.device)
        module = module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        plan.layout.write(module, theta, buffers)
        return self._as_deployed(module.eval(), lam)

    def _as_deployed(self, module: nn.Module, lam: float | None = None) -> DeployedModel:
        """A module with the conventions of the run's data."""
        federation = self.federation
        table = table_of(federation.provenance)
        return DeployedModel(module, federation.train.arrays, self.evaluator.measurement, lam, table)

    @cached_property
    def _uses(self) -> list[Use]:
        """The model that every client uses [K]; those with test samples choose together, as in the evaluation."""
        server, store, uses = self.snapshot.server, self.snapshot.store, [Use()] * len(self.federation)
        tested = self.federation.held_out.index.sizes > 0
        for clients in (np.flatnonzero(tested), np.flatnonzero(~tested)):
            with exact_gpu():
                for client, use in zip(clients, self.evaluator.uses(server, store, clients), strict=True):
                    uses[client] = use
        return uses

    def _number(self, client: int | str) -> int:
        names, clients = self.federation.names, len(self.federation)
        if isinstance(client, str) and client in names:
            return names.index(client)
        if isinstance(client, str) and names:
            raise ConfigError(f"there is no client {client!r}; {nearest(client, names)}")
        if isinstance(client, bool) or not isinstance(client, int | np.integer) or not 0 <= client < clients:
            raise ConfigError(f"there is no client {client!r}; clients have the numbers 0 to {clients - 1}.")
        return int(client)

    def _refuse_without_mean(self, instead: str) -> None:
        topology = self.plan.method.topology
        if self.snapshot.server.models is not None and topology.mean == "unused":
            raise ConfigError(
                f"with topology {label(topology)!r} clients have different models, whose mean is none of them; use "
                f"that of a client, {instead}."
            )

    def _refuse_without_models(self) -> None:
        if self.plan.has_private and not self.plan.method.keeps_private:
            raise ConfigError(
                f"with personal {label(self.plan.method.personal)!r} no model outlives a round; a run of fedloom "
                "synthesize leaves data, which are read as data=generated:DIR/synthetic.npz."
            )
        if not self.plan.method.predicts:
            raise ConfigError(
                f"method {self.plan.method.name!r} trains no predictor, but makes synthetic data; read them from "
                "its run directory, as data=generated:DIR/synthetic.npz."
            )


def _with_client(plan: ClientPlan, new: Arrays) -> ClientPlan:
    """The plan of a federation in which a client with these samples comes last; it holds no others' rows."""
    before = plan.population
    sizes = np.append(before.sizes, len(new))
    index = Index.of([*([[]] * before.clients), np.arange(len(new))])
    population = Population(before.clients + 1, sizes, float(sizes.mean()))
    return replace(plan, data=Split(new, index), validation=None, all_clients=population)

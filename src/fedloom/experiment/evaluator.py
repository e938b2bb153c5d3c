"""Evaluation: of the server model, of the model that every client uses, and of means of models over clients or rounds.

The personal part says which models a client may use, and on which samples they are judged (``Personal.uses``,
``Personal.fill``); the models of all clients that may choose are judged together here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.parts import Personal, Use, Weights
from fedloom.experiment.evaluation import VALIDATION, Evaluation
from fedloom.experiment.passes import RELIABILITY, SHARED, LoadedModel, Values, client_predictions, labels_of
from fedloom.experiment.snapshot import ClientModels, ServerAverage
from fedloom.metrics import Predictions, direction, fairness, summary
from fedloom.metrics.fairness import POOLED
from fedloom.metrics.prediction import reliability_of
from fedloom.rounds.exchange import own_values
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import Server, Store

SHOWN = (0.0, 0.5, 1.0)  # λ that are always reported if clients choose theirs
SHOWN_MODELS = 20  # of a topology, up to which the clients of each have figures of their own


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
        self.networks = [LoadedModel(level, settings) for level in plan.levels] if plan.has_levels else [self]

    def clients(
        self, server: Server, store: Store, split: Split | None = None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Evaluate the model that every client uses on its own samples; return a summary and one row per client.

        Where clients choose λ, the table has theirs as ``lambda``, and the summary what all would have with one λ, and
        with the λ that is best on their *test* samples, as in some published tables (``as_published``). Where clients
        share the models of a topology, the table has each client's as ``model``. If classes have the same number
        everywhere, the summary has every metric over the samples of all clients, too, as ``clients/<metric>/pooled``.

        Args:
            server: the source of shared values.
            store: the source of the clients' own.
            split: their samples; by default their test samples.
        """
        split, method = self.federation.held_out if split is None else split, self.plan.method
        clients, n = np.flatnonzero(split.index.sizes), split.index.sizes
        offsets = np.concatenate([[0], np.cumsum(n[clients])])
        uses, record = self.uses(server, store, clients), {}
        if method.choices and not self.plan.has_levels:
            candidates = [[choice._replace(model=use.model) for use in uses] for choice in method.choices]
            by_choice = self.predictions(split, server, store, clients, candidates)
            record = self.lambda_record(self.by_model(by_choice, offsets), method.choices)
            places = np.repeat([method.choices.index(use._replace(model=None)) for use in uses], n[clients])
            predictions = Predictions.concatenate(by_choice).take(places * offsets[-1] + np.arange(offsets[-1]))
        else:
            (predictions,) = self.predictions(split, server, store, clients, [uses])
        values = self.by_client(predictions, offsets)
        if self.federation.classes_alike:
            record |= {f"clients/{metric}/{POOLED}": predictions.value(metric) for metric in self.measurement.metrics}
        bins = values.pop(RELIABILITY, None)
        if bins is not None:  # of all clients' samples, for the page; empty bins as zeros
            record[f"clients/{RELIABILITY}"] = np.nan_to_num(reliability_of(bins.sum(0))).tolist()
        table = {"client": clients, "n": n[clients]}
        if server.models is not None and self.plan.models < self.plan.population.clients:
            table["model"] = np.array([-1 if use.model is None else use.model for use in uses])
        table |= values
        if self.plan.is_paired:
            table["lambda"] = np.array([use.lam for use in uses], dtype=float)
        return record | self.summary(table, split), table

    def uses(self, server: Server, store: Store, clients: np.ndarray) -> list[Use]:
        """The model that each client uses; all that may choose are judged together, each on its own samples.

        They take the best by the loss on their training samples, or by the first metric on their validation samples.
        """
        method = self.plan.method
        received = self.received(server, store, clients)
        if not self.chooses:
            return [SHARED if model is None else Use(model=model) for model in received]
        split = self.federation.validation
        samples = split.index.sizes[clients] if method.choices else np.zeros(len(clients), dtype=np.int64)
        uses = [
            tuple(
                use._replace(model=model)
                for use in method.personal.uses(client, lambda client=client: own_values(store.get(client)), count)
            )
            for client, count, model in zip(clients.tolist(), samples.tolist(), received, strict=True)
        ]
        several = np.flatnonzero([len(options) > 1 for options in uses])
        if len(several):
            candidates = list(zip(*(uses[k] for k in several), strict=True))
            offsets = np.concatenate([[0], np.cumsum(split.index.sizes[clients[several]])])
            predictions = self.predictions(split, server, store, clients[several], candidates)
            values = self.by_model(predictions, offsets)
            for k, at in zip(several, best(values, self.judging), strict=True):
                uses[k] = (uses[k][at],)
        return [use for (use,) in uses]

    def received(self, server: Server, store: Store, clients: np.ndarray) -> list[int | None]:
        """The model of a topology that each client receives; those that never took part have the mean."""
        plan = self.plan
        if server.models is None:
            return [None] * len(clients)
        if plan.method.topology.chooses and len(clients):
            split, candidates = self.federation.train, [[Use(model=n)] * len(clients) for n in range(plan.models)]
            offsets = np.concatenate([[0], np.cumsum(split.index.sizes[clients])])
            predictions = self.predictions(split, server, store, clients, candidates)
            return best(self.by_model(predictions, offsets), "loss").tolist()
        return [int(plan.model_of[c]) if c < len(plan.model_of) else None for c in clients.tolist()]

    @property
    def chooses(self) -> bool:
        """Whether clients may use different models of those that there are."""
        return type(self.plan.method.personal).uses is not Personal.uses

    @property
    def validates(self) -> bool:
        """Whether anything reads the clients' validation samples."""
        method = self.plan.method
        return bool(method.choices) or self.plan.validation is not None or VALIDATION in self.settings.what

    @property
    def judging(self) -> str:
        """The metric by which models are judged on validation samples: the first one of the evaluation, or the loss."""
        return (*self.settings.metrics, "loss")[0]

    def predictions(
        self, split: Split, server: Server, store: Store, clients: np.ndarray, uses: Sequence[Sequence[Use]]
    ) -> list[Predictions]:
        """Predictions of M models of each client on its samples of the split, each in the order of the clients.

        If the method adapts models, each is adapted first, on all the client's training samples.

        Args:
            split: the samples.
            server: the source of shared values.
            store: the source of the clients' own.
            clients: the clients, int64 [clients].
            uses: the models, [M][clients].
        """
        plan, several = self.plan, server.models is not None
        adapts = not plan.method.adaptation.is_identity
        if plan.has_levels or not (plan.has_private or plan.method.keeps_own or adapts):
            return [self._shared_predictions(split, server, store, clients, row) for row in uses]
        if adapts and len(uses) > 1:
            return [self.predictions(split, server, store, clients, [row])[0] for row in uses]
        place = {client: number for number, client in enumerate(clients.tolist())}

        def fill(client: int, number: int, theta: Tensor, buffers: Tensor) -> None:
            use = uses[number][place[client]]
            model = server.model(use.model)
            self.fill(Weights(model.theta, model.buffers), store.get(client), use, theta, buffers, several)

        self.load(server.theta, server.buffers)
        support = self.federation.train if adapts else None
        return client_predictions(
            self, split, clients, fill, (0, 0) if several else self.own_offsets, len(uses), support
        )

    def by_model(self, predictions: Sequence[Predictions], offsets: np.ndarray) -> Values:
        """Metrics and loss of the M models of each client, [M, clients] each; see ``by_client``."""
        rows = [self.by_client(prediction, offsets) for prediction in predictions]
        return {metric: np.stack([row[metric] for row in rows]) for metric in rows[0]}

    def _shared_predictions(
        self, split: Split, server: Server, store: Store, clients: np.ndarray, uses: Sequence[Use]
    ) -> Predictions:
        """Predictions of each client's model, in the clients' order: those of one level and model are measured at once.

        Clients of one level may have private parameters.
        """
        keys = [(use.level, -1 if use.model is None else use.model) for use in uses]
        level, parts = np.unique(np.array(keys).reshape(-1, 2), axis=0, return_inverse=True)[1].reshape(-1), []
        order = np.argsort(level, kind="stable")
        for number in np.unique(level):
            group, use = clients[level == number], uses[int(np.argmax(level == number))]
            network, model = self.networks[use.level], server.model(use.model)
            shared = Weights(network.plan.level_params(model.theta), network.plan.level_buffers(model.buffers))
            network.load(*shared)
            if not network.plan.has_private:
                parts.append(network.scores(split.arrays, split.index.pick(group).rows, labels_of(split, group)))
                continue

            def fill(
                client: int, number: int, theta: Tensor, buffers: Tensor,
                network: LoadedModel = network, shared: Weights = shared, use: Use = use,
            ) -> None:  # fmt: skip
                network.fill(shared, store.get(client), use, theta, buffers)

            parts += client_predictions(network, split, group, fill, network.own_offsets)
        if len(parts) == 1:
            return parts[0]
        sizes = split.index.sizes[clients]
        places = Index(np.arange(sizes.sum()), np.concatenate([[0], np.cumsum(sizes[order])])).pick(np.argsort(order))
        return Predictions.concatenate(parts).take(places.rows)

    def lambda_record(self, values: Values, choices: Sequence[Use]) -> dict[str, float]:
        """The means over clients for λ = 0, .5 and 1, and for the λ that is best on the samples of ``values``."""
        metric, everyone = self.judging, np.arange(values["loss"].shape[1])
        names = {name: name for name in self.settings.metrics} | {"loss": self.measurement.loss_name}
        rows: dict[str, Any] = {f"lambda/{use.lam:g}": at for at, use in enumerate(choices) if use.lam in SHOWN}
        rows["as_published"] = best(values, metric)
        summaries = {
            (place, name): summary(values[name][row, everyone]) for place, row in rows.items() for name in names
        }
        record = {f"{place}/{names[name]}/mean": figures["mean"] for (place, name), figures in summaries.items()}
        return record | {f"as_published/{metric}/std": summaries["as_published", metric]["std"]}

    def summary(self, table: Mapping[str, np.ndarray], split: Split) -> dict[str, Any]:
        """Mean loss and the fairness of every metric in a table of clients (``client``, ``n``, ``loss``, metrics)."""
        clients, n = table["client"], table["n"]
        loss = table["loss"][self.has_labels(clients, split)]
        record = {f"clients/{self.measurement.loss_name}/mean": float(loss.mean()) if len(loss) else float("nan")}
        groups = {"clients": np.ones(len(clients), dtype=bool)}
        if self.federation.unseen:
            new = clients >= self.federation.seen
            groups |= {"seen": ~new, "unseen": new}
        personal = self.plan.method.personal
        if len(personal.levels) > 1:
            level = np.array([personal.uses(int(n), lambda: None, 0)[0].level for n in clients])
            groups |= {f"clients/{name}": level == n for n, name in enumerate(personal.levels) if (level == n).any()}
        if "model" in table and self.plan.models <= SHOWN_MODELS:
            model = table["model"]
            groups |= {f"clients/model_{n}": model == n for n in range(self.plan.models) if (model == n).any()}
        for metric in self.measurement.metrics:
            for name, mask in groups.items():
                figures = fairness.summary(table[metric][mask], n[mask], direction(metric))
                record |= {f"{name}/{metric}/{k}": v for k, v in figures.items()}
        return record

    def has_labels(self, clients: np.ndarray, split: Split) -> np.ndarray:
        """Whether each client has a label that counts, bool [clients]: not if all its positions are padding."""
        padding = self.settings.padding
        if padding is None or split.arrays.has_numbers or not len(split.index.rows):
            return np.ones(len(clients), dtype=bool)
        y = split.arrays.y[torch.from_numpy(split.index.rows).to(split.arrays.y.device)]
        real = (y != padding).reshape(len(y), -1).any(1).cpu().numpy()
        return np.bincount(split.index.owners, weights=real, minlength=len(split.index))[clients] > 0

    def measure(
        self,
        server: Server,
        store: Store,
        means: Mapping[str, ClientModels],
        average: ServerAverage | None = None,
        at_clients: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray] | None]:
        """All configured evaluations: numbers for the round's record, and the table of clients.

        ``at_clients`` is that table if clients measured their models themselves (``Engine.evaluate``).
        """
        rng.seed_torch(self.plan.seed, "evaluation", server.round)  # for models that draw in evaluation mode, too
        record, table = self.deployed(server, store)
        if server.models is not None and self.plan.method.topology.mean != "unused":
            record["consensus/distance"] = server.distance(self.plan.receivers)
        if at_clients is not None and len(at_clients["client"]):
            record, table = record | self.summary(at_clients, self.federation.held_out), dict(at_clients)
        for name, models in means.items():
            record |= self.mean(name, models, server, store)
        if average is not None:
            numbers, _ = self.deployed(average.server(server), store)
            record |= _rename(numbers, "server_average")
        if table is not None:
            table = {self.measurement.loss_name if key == "loss" else key: column for key, column in table.items()}
            if self.federation.names:
                names = np.array(self.federation.names, dtype=object)[table["client"]]
                table = {"client": table.pop("client"), "name": names, **table}
        return record, table

    def deployed(self, server: Server, store: Store) -> tuple[dict[str, Any], dict[str, np.ndarray] | None]:
        """The evaluations of a server model: ``clients`` with their table, ``validation``, ``global``, ``train``."""
        record: dict[str, Any] = {}
        table = None
        what, federation = self.settings.what, self.federation
        if "clients" in what and len(federation.held_out.index.rows):
            record, table = self.clients(server, store)
        if VALIDATION in what and len(federation.validation.index.rows):
            record |= _rename(self.clients(server, store, federation.validation)[0], VALIDATION)
        for network in self.networks if "global" in what else ():
            if (name := network.name) and not network.plan.has_private:  # else it is not any client's model
                network.load(network.plan.level_params(server.theta), network.plan.level_buffers(server.buffers))
                record |= network.on(f"global/{name}", federation.test)
        if "global" in what or "train" in what:
            self.load(server.theta, server.buffers)
        if "global" in what:
            record |= self.on("global", federation.test)
        if "train" in what:
            split = federation.train.first(federation.seen)
            numbers = self.on("train", split.arrays, split.index.rows, labels_of(split, np.arange(len(split.index))))
            record |= {f"global/{key.replace('/', '_')}": value for key, value in numbers.items()}
        return record, table

    def accuracy(self, server: Server, arrays: Arrays) -> float:
        """Accuracy of the server model on other arrays, whatever metrics are configured."""
        self.load(server.theta, server.buffers)
        batches = map(arrays.batch, torch.arange(len(arrays)).split(self.settings.batch_size))
        with torch.inference_mode():
            return sum(int((self.live.module(x).argmax(-1) == y).sum()) for x, y in batches) / len(arrays)

    def mean(self, name: str, models: ClientModels, server: Server, store: Store) -> dict[str, Any]:
        """Evaluate the mean of clients' models on the common test set.

        If there is none, or the method adapts, every client evaluates it, adapted, on test samples of its own. Empty if
        there is no model to average.
        """
        plan, federation, record = self.plan, self.federation, dict[str, Any]()
        for number, network in enumerate(self.networks):
            if not models.members(number):
                continue
            mean, split = models.mean(number).to(server.theta.device), network.plan.layout.shared_size
            if plan.has_levels or (plan.method.adaptation.is_identity and len(federation.test)):
                network.load(mean[:split], mean[split:])
                record |= network.on("/".join(filter(None, (name, network.name))), federation.test)
            elif len(federation.held_out.index.rows):
                mean_server = replace(server, theta=mean[:split], buffers=mean[split:], models=None)
                record |= _rename(self.clients(mean_server, store)[0], name)
        return record


def _rename(record: dict[str, Any], scope: str) -> dict[str, Any]:
    """Rename metrics after another model, which replaces the first word of ``global/…`` and ``clients/…``.

    >>> _rename({"global/loss": 1.0, "clients/accuracy/mean": 0.5, "unseen/accuracy/mean": 0.4}, "average")
    {'average/loss': 1.0, 'average/accuracy/mean': 0.5, 'average/unseen/accuracy/mean': 0.4}
    """
    short = {key: key.removeprefix("global/").removeprefix("clients/") for key in record}
    return {f"{scope}/{short[key]}": value for key, value in record.items()}


def best(values: Values, metric: str) -> np.ndarray:
    """The index of each client's best model, int64 [clients], of values [M, clients]: by the metric, then by the loss.

    >>> best({"accuracy": np.array([[0.5, 1], [1, 1]]), "loss": np.array([[2, 1], [2, 3]])}, "accuracy").tolist()
    [1, 0]
    >>> best({"auroc": np.array([[np.nan], [0.1]]), "loss": np.array([[1], [1]])}, "auroc").tolist()
    [1]
    """
    signed = values[metric] * (1 if direction(metric) == "max" else -1)
    top = np.nan_to_num(signed, nan=-np.inf)
    return np.where(top == top.max(0), values["loss"], np.inf).argmin(0)

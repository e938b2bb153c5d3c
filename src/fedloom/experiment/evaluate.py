"""Evaluation: of the server model, of the model that every client uses, and of means of models over clients or rounds.

Which model a client uses its personal part says (``Personal.uses``, ``Personal.fill``), candidates and samples as data:
clients that may choose are judged together here. A model that clients have in common takes one pass over all their
samples. Models of which each client has its own differ in some parameters, which ``fill`` writes; the others are common
to all. If a client's pass is small, call overhead dominates: models of several clients are stacked, their samples
padded to one length, and ``torch.func.vmap`` runs them together; common parameters are not copied. A large pass is
dominated by arithmetic and gains nothing; on a CPU, stacked weights would even slow it down.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedloom.base import rng
from fedloom.core.context import Batch
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.layout import Leaf, LiveModule, call
from fedloom.core.parts import Personal, Use, Weights
from fedloom.core.samples import moved
from fedloom.core.slots import label
from fedloom.core.targets import STRUCTURES
from fedloom.experiment.experiment import VALIDATION, Evaluation, Measurement
from fedloom.experiment.setup import failing
from fedloom.experiment.snapshot import ClientModels, ServerAverage
from fedloom.metrics import Predictions, direction, fairness, reliability, summary
from fedloom.metrics.fairness import POOLED
from fedloom.metrics.prediction import reliability_of
from fedloom.rounds import meta as adapting
from fedloom.rounds.exchange import State, own_values
from fedloom.rounds.objective import Net
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import Server, Store

Values = dict[str, np.ndarray]
"""Metrics by name, one value per client."""
RELIABILITY = "reliability"
SHARED = Use()  # the model of clients that have no choice
SHOWN = (0.0, 0.5, 1.0)  # λ that are always reported if clients choose theirs
SHOWN_MODELS = 20  # of a topology, up to which the clients of each have figures of their own
SMALL = 32  # on a CPU, models are stacked up to this many samples per client; on a GPU always
LIGHT = 256 << 10  # and up to this many bytes of private parameters per model; beyond, stacking costs memory
VECTORS = 256 << 20  # largest size of stacked parameters, in bytes


class LoadedModel:
    """A module in evaluation mode that holds one model at a time."""

    def __init__(self, plan: ClientPlan, settings: Evaluation) -> None:
        self.plan, self.settings = plan, settings
        self.live = LiveModule(copy.deepcopy(plan.model), plan.layout, plan.device)
        self.live.module.eval()
        self.net = Net(self.live.module, plan)
        self.measurement = Measurement(settings, plan.targets, plan.method.test_loss)
        self.name = "" if plan.submodel is None else plan.submodel.name

    def load(self, shared: Tensor, buffers: Tensor, state: State | None = None, use: Use = SHARED) -> None:
        """Load the model that a client with this state uses; without one, that of a client that never participated.

        ``shared`` [P] and ``buffers`` are what it received.
        """
        split, own = self.plan.layout.shared_size, self.plan.layout.shared_buffers
        self.live.theta[:split].copy_(shared)
        self.live.buffers[:own].copy_(buffers)
        at, places = self.own
        self.fill(Weights(shared, buffers), state, use, self.live.theta[at:], self.live.buffers[places:])

    def fill(
        self, shared: Weights, state: State | None, use: Use, theta: Tensor, buffers: Tensor, whole: bool = False
    ) -> None:
        """Write a client's own values of the model that it uses, those from the offsets ``own`` on, or all of them."""
        plan = self.plan
        if whole and not plan.method.keeps_own:
            split, own = plan.layout.shared_size, plan.layout.shared_buffers
            theta[:split].copy_(shared.theta)
            buffers[:own].copy_(shared.buffers)
            theta, buffers = theta[split:], buffers[own:]
        first = Weights(plan.theta0[plan.layout.shared_size :], plan.buffers0[plan.layout.shared_buffers :])
        first = shared if plan.method.keeps_own else first
        with failing(f"personal {label(plan.method.personal)!r} makes no model of a client's state:"):
            plan.method.personal.fill(use, shared, first, own_values(state), Weights(theta, buffers))

    @property
    def own(self) -> tuple[int, int]:
        """The offsets at which a client's own parameters and buffers start."""
        layout = self.plan.layout
        return (0, 0) if self.plan.method.keeps_own else (layout.shared_size, layout.shared_buffers)

    def scores(self, arrays: Arrays, rows: np.ndarray | None = None, labels: Tensor | None = None) -> Predictions:
        """The quantities that the metrics need from the loaded model's predictions, from one pass over the rows.

        ``labels`` overrides the arrays' targets where clients relabel classes.
        """
        at = torch.arange(len(arrays)) if rows is None else torch.from_numpy(rows)
        found = []
        device, size = self.live.theta.device, self.measurement.batch_size
        with torch.inference_mode():
            for number, part in enumerate(at.split(size)):
                x, y = arrays.batch(part)
                y = y if labels is None else labels[number * size : number * size + len(part)]
                out = self.live.module(moved(x, device))
                found.append(self.measurement.predictions(out, moved(y, device)))
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
        tested, n = np.flatnonzero(split.index.sizes), split.index.sizes
        offsets = np.concatenate([[0], np.cumsum(n[tested])])
        used, record = self.chosen(server, store, tested), {}
        if method.choices and not self.plan.has_levels:
            uses = [[choice._replace(model=use.model) for use in used] for choice in method.choices]
            every = self.predictions(split, server, store, tested, uses)
            record = self.with_every(self.by_model(every, offsets), method.choices)
            places = np.repeat([method.choices.index(use._replace(model=None)) for use in used], n[tested])
            found = Predictions.joined(every).take(places * offsets[-1] + np.arange(offsets[-1]))
        else:
            (found,) = self.predictions(split, server, store, tested, [used])
        values = self.by_client(found, offsets)
        if self.federation.classes_alike:
            record |= {f"clients/{metric}/{POOLED}": found.value(metric) for metric in self.measurement.metrics}
        bins = values.pop(RELIABILITY, None)
        if bins is not None:  # of all clients' samples, for the page; empty bins as zeros
            record[f"clients/{RELIABILITY}"] = np.nan_to_num(reliability_of(bins.sum(0))).tolist()
        table = {"client": tested, "n": n[tested]}
        if server.models is not None and self.plan.models < self.plan.population.clients:
            table["model"] = np.array([-1 if use.model is None else use.model for use in used])
        table |= values
        if self.plan.is_paired:
            table["lambda"] = np.array([use.lam for use in used], dtype=float)
        return record | self.summary(table, split), table

    def chosen(self, server: Server, store: Store, clients: np.ndarray) -> list[Use]:
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
        several = np.flatnonzero([len(one) > 1 for one in uses])
        if len(several):
            candidates = list(zip(*(uses[k] for k in several), strict=True))
            offsets = np.concatenate([[0], np.cumsum(split.index.sizes[clients[several]])])
            found = self.predictions(split, server, store, clients[several], candidates)
            values = self.by_model(found, offsets)
            for k, at in zip(several, best(values, self.judging), strict=True):
                uses[k] = (uses[k][at],)
        return [one for (one,) in uses]

    def received(self, server: Server, store: Store, clients: np.ndarray) -> list[int | None]:
        """The model of a topology that each client receives; those that never took part have the mean."""
        plan = self.plan
        if server.models is None:
            return [None] * len(clients)
        if plan.method.topology.chooses and len(clients):
            split, candidates = self.federation.train, [[Use(model=n)] * len(clients) for n in range(plan.models)]
            offsets = np.concatenate([[0], np.cumsum(split.index.sizes[clients])])
            found = self.predictions(split, server, store, clients, candidates)
            return best(self.by_model(found, offsets), "loss").tolist()
        return [int(plan.model_of[c]) if c < len(plan.model_of) else None for c in clients.tolist()]

    @property
    def chooses(self) -> bool:
        """Whether clients may use different models of those that there are."""
        return type(self.plan.method.personal).uses is not Personal.uses

    @property
    def validates(self) -> bool:
        """Whether anything reads the clients' validation samples."""
        method = self.plan.method
        return bool(method.choices) or method.needs("validation") or VALIDATION in self.settings.what

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
            return [self._in_common(split, server, store, clients, row) for row in uses]
        if adapts and len(uses) > 1:
            return [self.predictions(split, server, store, clients, [row])[0] for row in uses]
        place = {client: number for number, client in enumerate(clients.tolist())}

        def fill(client: int, number: int, theta: Tensor, buffers: Tensor) -> None:
            use = uses[number][place[client]]
            mine = server.model(use.model)
            self.fill(Weights(mine.theta, mine.buffers), store.get(client), use, theta, buffers, several)

        self.load(server.theta, server.buffers)
        support = self.federation.train if adapts else None
        return through(self, split, clients, fill, (0, 0) if several else self.own, len(uses), support)

    def by_model(self, found: Sequence[Predictions], offsets: np.ndarray) -> Values:
        """Metrics and loss of the M models of each client, [M, clients] each; see ``by_client``."""
        rows = [self.by_client(one, offsets) for one in found]
        return {metric: np.stack([row[metric] for row in rows]) for metric in rows[0]}

    def _in_common(
        self, split: Split, server: Server, store: Store, clients: np.ndarray, uses: Sequence[Use]
    ) -> Predictions:
        """Predictions of each client's model, in the clients' order: those of one level and model are measured at once.

        Clients of one level may have private parameters.
        """
        keys = [(use.level, -1 if use.model is None else use.model) for use in uses]
        level, found = np.unique(np.array(keys).reshape(-1, 2), axis=0, return_inverse=True)[1].reshape(-1), []
        order = np.argsort(level, kind="stable")
        for number in np.unique(level):
            of, use = clients[level == number], uses[int(np.argmax(level == number))]
            network, mine = self.networks[use.level], server.model(use.model)
            shared = Weights(network.plan.own(mine.theta), network.plan.own_buffers(mine.buffers))
            network.load(*shared)
            if not network.plan.has_private:
                found.append(network.scores(split.arrays, split.index.pick(of).rows, labels_of(split, of)))
                continue

            def fill(
                client: int, number: int, theta: Tensor, buffers: Tensor,
                network: LoadedModel = network, shared: Weights = shared, use: Use = use,
            ) -> None:  # fmt: skip
                network.fill(shared, store.get(client), use, theta, buffers)

            found += through(network, split, of, fill, network.own)
        if len(found) == 1:
            return found[0]
        sizes = split.index.sizes[clients]
        places = Index(np.arange(sizes.sum()), np.concatenate([[0], np.cumsum(sizes[order])])).pick(np.argsort(order))
        return Predictions.joined(found).take(places.rows)

    def with_every(self, values: Values, choices: Sequence[Use]) -> dict[str, float]:
        """What clients have with λ = 0, .5 and 1, and with the λ that is best on the samples of ``values``."""
        metric, everyone = self.judging, np.arange(values["loss"].shape[1])
        names = {name: name for name in self.settings.metrics} | {"loss": self.measurement.loss_name}
        shown: dict[str, Any] = {f"lambda/{use.lam:g}": at for at, use in enumerate(choices) if use.lam in SHOWN}
        shown["as_published"] = best(values, metric)
        over = {(place, name): summary(values[name][row, everyone]) for place, row in shown.items() for name in names}
        record = {f"{place}/{names[name]}/mean": found["mean"] for (place, name), found in over.items()}
        return record | {f"as_published/{metric}/std": over["as_published", metric]["std"]}

    def summary(self, table: Mapping[str, np.ndarray], split: Split) -> dict[str, Any]:
        """Mean loss and the fairness of every metric in a table of clients (``client``, ``n``, ``loss``, metrics)."""
        tested, n = table["client"], table["n"]
        loss = table["loss"][self.counted(tested, split)]
        record = {f"clients/{self.measurement.loss_name}/mean": float(loss.mean()) if len(loss) else float("nan")}
        groups = {"clients": np.ones(len(tested), dtype=bool)}
        if self.federation.unseen:
            new = tested >= self.federation.seen
            groups |= {"seen": ~new, "unseen": new}
        personal = self.plan.method.personal
        if len(personal.levels) > 1:
            level = np.array([personal.uses(int(n), lambda: None, 0)[0].level for n in tested])
            groups |= {f"clients/{name}": level == n for n, name in enumerate(personal.levels) if (level == n).any()}
        if "model" in table and self.plan.models <= SHOWN_MODELS:
            model = table["model"]
            groups |= {f"clients/model_{n}": model == n for n in range(self.plan.models) if (model == n).any()}
        for metric in self.measurement.metrics:
            for name, of in groups.items():
                figures = fairness.summary(table[metric][of], n[of], direction(metric))
                record |= {f"{name}/{metric}/{k}": v for k, v in figures.items()}
        return record

    def counted(self, tested: np.ndarray, split: Split) -> np.ndarray:
        """Whether each tested client has a label that counts, bool [tested]: not if all its positions are padding."""
        padding = self.settings.padding
        if padding is None or split.arrays.has_numbers or not len(split.index.rows):
            return np.ones(len(tested), dtype=bool)
        y = split.arrays.y[torch.from_numpy(split.index.rows).to(split.arrays.y.device)]
        real = (y != padding).reshape(len(y), -1).any(1).cpu().numpy()
        return np.bincount(split.index.owners, weights=real, minlength=len(split.index))[tested] > 0

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
        if server.models is not None and self.plan.method.topology.has_mean:
            record["consensus/distance"] = server.distance(self.plan.receivers)
        if at_clients is not None and len(at_clients["client"]):
            record, table = record | self.summary(at_clients, self.federation.held_out), dict(at_clients)
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
        """The evaluations of a server model: ``clients`` with their table, ``validation``, ``global``, ``train``."""
        record: dict[str, Any] = {}
        table = None
        on, federation = self.settings.what, self.federation
        if "clients" in on and len(federation.held_out.index.rows):
            record, table = self.clients(server, store)
        if VALIDATION in on and len(federation.validation.index.rows):
            record |= _renamed(self.clients(server, store, federation.validation)[0], VALIDATION)
        for network in self.networks if "global" in on else ():
            if (name := network.name) and not network.plan.has_private:  # else it is no client's model
                network.load(network.plan.own(server.theta), network.plan.own_buffers(server.buffers))
                record |= network.on(f"global/{name}", federation.test)
        if "global" in on or "train" in on:
            self.load(server.theta, server.buffers)
        if "global" in on:
            record |= self.on("global", federation.test)
        if "train" in on:
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
                beside = replace(server, theta=mean[:split], buffers=mean[split:], models=None)
                record |= _renamed(self.clients(beside, store)[0], name)
        return record


def _renamed(record: dict[str, Any], scope: str) -> dict[str, Any]:
    """Rename metrics after another model, which replaces the first word of ``global/…`` and ``clients/…``.

    >>> _renamed({"global/loss": 1.0, "clients/accuracy/mean": 0.5, "unseen/accuracy/mean": 0.4}, "average")
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


def labels_of(split: Split, clients: np.ndarray) -> Tensor | None:
    """Targets of all rows of these clients, in their order, with their own labels; None if there is no relabelling."""
    if split.relabel is None:
        return None
    index = split.index.pick(clients)
    owners = torch.from_numpy(np.repeat(clients, index.sizes)).to(split.relabel.device)
    return split.labels(torch.from_numpy(index.rows), owners)


Fill = Callable[[int, int, Tensor, Tensor], None]
"""Writes a client's own parameters [A] and buffers [B] of its model with a number: (client, number, [A], [B])."""


def stackable(loaded: LoadedModel) -> bool:
    """Whether models of this architecture can be stacked: no module declares ``stackable = False``."""
    terms = loaded.plan.method.objective if not loaded.plan.method.adaptation.is_identity else ()
    masked = all(term.per_sample is not None for term in terms)
    rows = isinstance(loaded.plan.data.arrays.x, Tensor)
    return rows and masked and all(getattr(module, "stackable", True) for module in loaded.live.module.modules())


def pays(loaded: LoadedModel, samples: np.ndarray, own: int) -> np.ndarray:
    """Whether stacking pays, bool [K], given the clients' sample counts [K] and the bytes of their own parameters."""
    light = loaded.live.theta.is_cuda or own <= LIGHT
    return (samples <= (np.inf if loaded.live.theta.is_cuda else SMALL)) & light & stackable(loaded)


def padded(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Row numbers int64 [C, n], padded with each client's first, and the mask of real ones, bool [C, n].

    >>> at, real = padded([np.array([4]), np.array([7, 8])])
    >>> at.tolist(), real.tolist()
    ([[4, 4], [7, 8]], [[True, False], [True, True]])
    """
    width = max(map(len, rows))
    at = np.stack([np.concatenate([r, np.repeat(r[:1], width - len(r))]) for r in rows])
    real = np.arange(width) < np.array([len(r) for r in rows])[:, None]
    return torch.from_numpy(at), torch.from_numpy(real)


def groups(sizes: Sequence[int], together: Sequence[bool], limit: int, models: int) -> Iterator[slice]:
    """Runs of consecutive clients to evaluate together, up to ``limit`` padded samples and ``models`` models.

    >>> [(s.start, s.stop) for s in groups([2, 3, 9, 2, 2, 2], [True, True, False, True, True, True], 6, 5)]
    [(0, 2), (2, 3), (3, 6)]
    """
    start = 0
    for end in range(1, len(sizes) + 1):
        here = slice(start, end + 1)
        full = end == len(sizes) or not all(together[here]) or (end + 1 - start) > models
        if full or max(sizes[here]) * (end + 1 - start) > limit:
            yield slice(start, end)
            start = end


def through(
    loaded: LoadedModel, split: Split, clients: np.ndarray, fill: Fill, own: tuple[int, int], count: int = 1,
    support: Split | None = None,
) -> list[Predictions]:  # fmt: skip
    """Predictions of every client's models 0 .. count - 1 on its samples of the split.

    Args:
        loaded: the module, holding everything that is common to all models.
        split: the samples.
        clients: the clients, each with at least one sample, int64 [K].
        fill: writes what is a client's own.
        own: the offsets at which a client's own parameters and buffers start.
        count: number of models per client.
        support: adapt each client's model to its samples of this split first (requires ``count=1``).

    Returns:
        The predictions for each model number, over all samples in client order.
    """
    sizes, limit = split.index.sizes[clients], max(1, loaded.settings.batch_size // count)
    if support is not None:
        sizes, limit = sizes + support.index.sizes[clients], min(limit, adapting.PIECE)
    live = loaded.live
    vector = (len(live.theta) - own[0]) * live.theta.element_size()
    together = (pays(loaded, sizes, vector) & (sizes <= limit)).tolist()

    def outputs() -> Iterator[tuple[Any, Any]]:
        for group in groups(sizes.tolist(), together, limit, VECTORS // max(1, count * vector)):
            members = [int(client) for client in clients[group]]
            if together[group.start]:
                try:
                    yield _stacked(loaded, split, members, fill, own, count, support)
                    continue
                except RuntimeError:  # vmap does not support the model; any other error is raised again below
                    together[group.stop :] = [False] * (len(together) - group.stop)
            for client in members:
                yield from _alone(loaded, split, client, fill, own, count, support)

    with torch.inference_mode() if support is None else torch.no_grad():
        return _measured(loaded, count, outputs())


def _alone(
    loaded: LoadedModel, split: Split, client: int, fill: Fill, own: tuple[int, int], count: int, support: Split | None
) -> Iterator[tuple[Any, Any]]:
    """Logits [count, N, ...] and targets [N] of one client's samples, in batches; of structures, one by one."""
    live, plan = loaded.live, loaded.plan
    rows, place = torch.from_numpy(split.index[client]), (live.theta[own[0] :], live.buffers[own[1] :])
    if count == 1:
        fill(client, 0, *place)
    if support is not None:
        at = torch.from_numpy(support.index[client])
        batch = Batch(support.arrays.x[at].to(live.theta.device), support.labels(at, client).to(live.theta.device))
        predict = adapting.deployed(plan, loaded.net, live.theta, live.buffers, batch)
        yield predict(split.arrays.x[rows].to(live.theta.device))[None], split.labels(rows, client)
        return
    for part in rows.split(loaded.measurement.batch_size):
        x, y = split.batch(part, client)
        x, out = moved(x, live.theta.device), []
        for number in range(count):
            if count > 1:
                fill(client, number, *place)
            out.append(live.module(x))
        yield out if loaded.measurement.targets == STRUCTURES else torch.stack(out), y


def _gathered(split: Split, members: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [C, n, ...] and targets [C, n] of clients, padded to one length, and the mask bool [C, n] of real ones."""
    at, real = padded([split.index[client] for client in members])
    owners = torch.tensor(members, device=split.arrays.y.device).repeat_interleave(at.shape[1])
    flat = at.reshape(-1)
    return split.arrays.x[flat].unflatten(0, at.shape), split.labels(flat, owners).unflatten(0, at.shape), real


def _stacked(
    loaded: LoadedModel, split: Split, members: list[int], fill: Fill, own: tuple[int, int], count: int,
    support: Split | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits [count, N, ...] and targets [N] of several clients' samples, concatenated, from one pass."""
    live, plan, layout = loaded.live, loaded.plan, loaded.plan.layout
    theta = live.theta.new_empty(len(members), count, len(live.theta) - own[0])
    buffers = live.buffers.new_empty(len(members), count, len(live.buffers) - own[1])
    for row, client in enumerate(members):
        for number in range(count):
            fill(client, number, theta[row, number], buffers[row, number])
    x, y, real = _gathered(split, members)
    same, device = layout.named(live.theta, live.buffers), live.theta.device

    def adapted(theta: Tensor, buffers: Tensor, x: Tensor, sx: Tensor, sy: Tensor, mask: Tensor) -> Tensor:
        whole = torch.cat([live.theta[: own[0]], theta]) if len(theta) else live.theta
        kept = torch.cat([live.buffers[: own[1]], buffers]) if len(buffers) else live.buffers
        return adapting.deployed(plan, loaded.net, whole, kept, Batch(sx, sy, mask))(x)

    def logits(theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        mine = _named(layout.parameters, theta, own[0]) | _named(layout.buffers, buffers, own[1])
        return call(live.module, same | mine, (x,))

    if support is None:
        out = vmap(vmap(logits, in_dims=(0, 0, None)))(theta, buffers, x.to(device))  # [C, count, n, ...]
    else:
        sx, sy, mask = _gathered(support, members)
        batch = sx.to(device), sy.to(device), mask.to(device, theta.dtype)
        out = vmap(adapted)(theta[:, 0], buffers[:, 0], x.to(device), *batch)[:, None]
    return out.movedim(1, 0)[:, real.to(device)], y[real.to(y.device)]


def _named(leaves: Sequence[Leaf], vector: Tensor, start: int) -> dict[str, Tensor]:
    """Views of the trailing leaves in a vector that starts at offset ``start``."""
    found, at = {}, -start
    for leaf in leaves:
        if at >= 0:
            found[leaf.name] = leaf.view(vector[at : at + leaf.size])
        at += leaf.size
    return found


def _measured(loaded: LoadedModel, count: int, outputs: Iterable[tuple[Any, Any]]) -> list[Predictions]:
    """The predictions of each model number, from outputs [count, N, ...] and targets [N, ...], about a batch at a time.

    Of structures each is one sample's.
    """
    measurement, parts, waiting = loaded.measurement, list[list[Predictions]](), list[tuple[Tensor, Tensor]]()

    def reduced() -> list[Predictions]:
        out, y = torch.cat([out for out, _ in waiting], 1), torch.cat([y for _, y in waiting])
        waiting.clear()
        return measurement.predictions(out.flatten(0, 1), y.expand(count, *y.shape).flatten(0, 1)).split(count)

    for out, y in outputs:
        if measurement.targets == STRUCTURES:
            parts.append([measurement.predictions(one, y) for one in out])
            continue
        waiting.append((out, y.to(out.device)))
        if count * sum(len(y) for _, y in waiting) >= loaded.settings.batch_size:
            parts.append(reduced())
    if waiting:
        parts.append(reduced())
    return [Predictions.joined(part) for part in zip(*parts, strict=True)]

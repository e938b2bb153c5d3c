"""The methods of fluke (``fluke-fl``): its server and client classes, round by round."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from federation import LR, Federation, Models, Net, serve, vector
from fluke import FlukeENV
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.nets import EncoderHeadNet
from torch import nn

ALGORITHMS = {
    "fedavg": ("fedavg", "FedAVG"), "fedprox": ("fedprox", "FedProx"), "scaffold": ("scaffold", "SCAFFOLD"),
    "feddyn": ("feddyn", "FedDyn"), "fednova": ("fednova", "FedNova"), "fedavgm": ("fedavgm", "FedAVGM"),
    "fedadam": ("fedopt", "FedOpt"), "fedyogi": ("fedopt", "FedOpt"), "fedadagrad": ("fedopt", "FedOpt"),
    "fedexp": ("fedexp", "FedExP"), "moon": ("moon", "MOON"), "fedlc": ("fedlc", "FedLC"),
    "fedper": ("fedper", "FedPer"), "fedrep": ("fedrep", "FedRep"), "lg_fedavg": ("lg_fedavg", "LGFedAVG"),
    "fedbabu": ("fedbabu", "FedBABU"), "fedbn": ("fedbn", "FedBN"), "fedrod": ("fedrod", "FedROD"),
    "fedproto": ("fedproto", "FedProto"), "ditto": ("ditto", "Ditto"), "apfl": ("apfl", "APFL"),
    "pfedme": ("pfedme", "PFedMe"), "per_fedavg": ("per_fedavg", "PerFedAVG"), "fedala": ("fedala", "FedALA"),
    "fedamp": ("fedamp", "FedAMP"), "fedrs": ("fedrs", "FedRS"), "fedsam": ("fedsam", "FedSAM"),
    "superfed_mm": ("superfed", "SuPerFed"),
}  # fmt: skip
ENCODER, HEAD = {"fedper", "fedrep", "fedbabu"}, {"lg_fedavg"}  # what the server holds, if not the whole model


class RoundLoader(FastDataLoader):
    """The current round's mini-batches of a client, all in one epoch; with ``halves``, one half of them at a time."""

    mixes: Iterator[float]

    def __init__(self, federation: Federation, client: int, halves: bool = False) -> None:
        x, y = federation.samples(client)
        super().__init__(x, y, num_labels=int(federation.y.max()) + 1, batch_size=len(y))
        self.federation, self.client, self.halves, self.turn = federation, client, halves, 0

    def __iter__(self) -> Iterator[Any]:
        batches = self.federation.batches(self.client)
        if self.halves:
            cut = len(batches) // 2
            batches = batches[cut:] if self.turn % 2 else batches[:cut]
            self.turn += 1
        self.n_batches = len(batches)
        RoundLoader.mixes = iter(self.federation.mixes[self.federation.round, self.client].tolist())
        return iter(batches)


class Alternating(RoundLoader):
    """A mini-batch to adapt on, then one to train on, and so on, for clients that ask for the next one."""

    queue: list[Any]

    def __len__(self) -> int:
        pairs = zip(self.federation.batches(self.client, True), self.federation.batches(self.client), strict=True)
        self.queue = [batch for pair in pairs for batch in pair]
        return len(self.queue) // 2

    def __next__(self) -> Any:
        return self.queue.pop(0)


def network(net: Net) -> EncoderHeadNet:
    """A net in fluke's form, with the same parameters in the same order."""
    return EncoderHeadNet(net.body, net.head)


def play(federation: Federation, method: str, settings: Mapping[str, Any], changed: bool) -> Models:
    """A method's last models."""
    FlukeENV().set_inmemory(True)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, server=False, locals=False)
    module = import_module(f"fluke.algorithms.{ALGORITHMS[method][0]}")
    algorithm = getattr(module, ALGORITHMS[method][1])
    first = network(federation.model(method == "fedbn"))
    step = {"name": algorithm.get_optimizer_class(None), "lr": LR} | settings.get("optimiser", {})
    loaders = [
        Alternating(federation, i) if method == "per_fedavg" else RoundLoader(federation, i, halves=method == "fedrep")
        for i in range(int(federation.owner.max()) + 1)
    ]
    kind = algorithm.get_client_class(None)
    kind = CHANGED_CLIENTS.get(method, lambda same: same)(kind) if changed else kind
    clients = [
        kind(
            index=i, model=copy.deepcopy(first), train_set=loader, test_set=None, loss_fn=nn.CrossEntropyLoss(),
            optimizer_cfg=OptimizerConfigurator(dict(step)), local_epochs=1, **settings.get("client", {}),
        )
        for i, loader in enumerate(loaders)
    ]  # fmt: skip
    server_model = first.encoder if method in ENCODER else first.head if method in HEAD else first
    server = algorithm.get_server_class(None)(
        model=copy.deepcopy(server_model), test_set=None, clients=clients, **settings.get("server", {})
    )
    for client in clients:
        client.set_channel(server.channel)
    algorithm._round_zero(types.SimpleNamespace(server=server, clients=clients))
    if method == "superfed_mm":
        module.np = types.SimpleNamespace(
            random=types.SimpleNamespace(uniform=lambda low, high: next(RoundLoader.mixes))
        )
    undo = CHANGED_SERVERS[method](server, module) if changed and method in CHANGED_SERVERS else None
    for cohort in federation.rounds():
        eligible = [clients[i] for i in cohort]
        server.broadcast_model(eligible)
        for client in eligible:
            client.local_update(federation.round + 1)
        server.aggregate(eligible, server.receive_client_models(eligible, state_dict=False))
        if method == "feddyn" and changed:
            of_all_clients(server, clients)
    if undo is not None:
        undo()
    participants = [clients[i] for i in sorted({*federation.cohorts.ravel().tolist()})]
    modules = {client.index: PRIVATE[method](client) for client in participants} if method in PRIVATE else {}
    private = {f"client {index}": vector(part) for index, part in modules.items() if part}
    shared = server.cld_mdl if method == "feddyn" else server.model
    if method == "fedamp":  # every client has a model at the server, which waits for it to come again
        return {"theta": sum(map(next_message, clients)) / len(clients), **private}
    theta = [] if shared is None else without_norm(shared) if method == "fedbn" else vector(shared)
    return {"theta": theta, **private}


def next_message(client: Any) -> Any:
    """FedAMP: the model that a client is sent when it comes again; one that never came has the first one."""
    sent = [m.payload for m in client.channel[client.index] if m.msg_type == "model"]
    return vector(sent[-1] if sent else client.personalized_model)


PRIVATE: dict[str, Any] = {
    "fedper": lambda client: client.model.get_local(),
    "fedrep": lambda client: client.model.get_local(),
    "fedbabu": lambda client: client.model.head,
    "lg_fedavg": lambda client: client.model.get_local(),
    "fedbn": lambda client: client.model.encoder[1],
    "fedproto": lambda client: client.model,
    "ditto": lambda client: client.personalized_model,
    "apfl": lambda client: client.personalized_model,
    "pfedme": lambda client: client.model,
    "fedala": lambda client: client.model,
    "fedamp": lambda client: client.model,
    "superfed_mm": lambda client: nn.ParameterList(
        p for n, p in client.personalized_model.named_parameters() if "_local" in n
    ),
}
"""What a client keeps to itself: a module."""


def without_norm(model: EncoderHeadNet) -> Any:
    """All parameters but those of normalisations."""
    return torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "encoder.1" not in n]).numpy()


def of_all_clients(server: Any, clients: list[Any]) -> None:
    """FedDyn's server adds the mean of all clients' accumulated displacements, not that of the cohort's alone."""
    sums = [client.prev_grads for client in clients if client.prev_grads is not None]
    mean = torch.stack(sums).sum(0) / len(clients)
    with torch.no_grad():
        flat = nn.utils.parameters_to_vector(server.model.parameters()) + mean
        nn.utils.vector_to_parameters(flat, server.cld_mdl.parameters())


def first_momentum(server: Any, module: Any) -> None:
    """FedAvgM: the momentum is there before the first round."""
    server.momentum_vector = {name: torch.zeros_like(value) for name, value in server.model.state_dict().items()}


def plain_mean(server: Any, module: Any) -> Any:
    """FedOpt: models are averaged with rate 1 before the step of rate η; v starts at τ²."""
    server.v_t = {name: torch.full_like(v, server.hyper_params.tau**2) for name, v in server.v_t.items()}
    base = import_module("fluke.server")
    usual = base.aggregate_models
    base.aggregate_models = lambda target, models, weights, eta, inplace=True: usual(
        target, models, weights, 1.0, inplace
    )
    return lambda: setattr(base, "aggregate_models", usual)


def displacements(server: Any, module: Any) -> Any:
    """FedNova: the received model takes the rest of the weights, so that displacements are summed, not models."""
    usual = module.aggregate_models

    def summed(target: Any, models: Any, weights: Any, eta: float, inplace: bool = True) -> Any:
        models = [*models, copy.deepcopy(target)]
        return usual(target, models, [*weights, 1 - sum(weights)], eta, inplace)

    module.aggregate_models = summed
    return lambda: setattr(module, "aggregate_models", usual)


def differentiable_mixture(server: Any, module: Any) -> Any:
    """APFL: the mixture is a function of v, of which gradients exist."""
    usual = module.merge_models

    def merged(w: nn.Module, v: nn.Module, lam: float) -> Any:
        fixed = {name: p.detach() for name, p in w.named_parameters()}
        return lambda x: torch.func.functional_call(
            w, {name: (1 - lam) * fixed[name] + lam * p for name, p in v.named_parameters()}, (x,)
        )

    module.merge_models = merged
    return lambda: setattr(module, "merge_models", usual)


def doubles(server: Any, module: Any) -> Any:
    """FedExP: the step size is of the model's type."""
    module.torch = types.SimpleNamespace(**{**vars(torch), "FloatTensor": torch.DoubleTensor})
    return lambda: setattr(module, "torch", torch)


def by_samples(server: Any, module: Any) -> None:
    """FedProto: a class's prototypes are averaged with the numbers of samples."""

    def aggregate(eligible: list[Any], models: Any) -> None:
        sent = list(models)
        counts = [torch.bincount(client.train_set.tensors[1], minlength=len(sent[0])) for client in eligible]
        for j in sent[0]:
            pairs = [
                (n[j], prototypes[j]) for n, prototypes in zip(counts, sent, strict=True) if prototypes[j] is not None
            ]
            if pairs:
                server.prototypes[j] = sum(n * mean for n, mean in pairs) / sum(n for n, _ in pairs)

    server.aggregate = aggregate


CHANGED_SERVERS: dict[str, Any] = {
    "fedavgm": first_momentum, "fedadam": plain_mean, "fedyogi": plain_mean, "fedadagrad": plain_mean,
    "fedexp": doubles, "fednova": displacements, "apfl": differentiable_mixture, "fedproto": by_samples,
}  # fmt: skip


def towards(kind: type) -> type:
    """FedDyn: displacements θ_i - θ are added up, without another factor α; all start from the corrected mean."""

    class Changed(kind):
        def receive_model(self) -> None:
            _, corrected = next(m.payload for m in self.channel[self.index] if m.msg_type == "model")
            super().receive_model()
            self.model.load_state_dict(corrected.state_dict())

        def fit(self, override_local_epochs: int = 0) -> float:
            before = self.prev_grads.clone()
            received = nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
            value = super().fit(override_local_epochs)
            self.prev_grads = before + nn.utils.parameters_to_vector(self.model.parameters()).detach() - received
            return value

    return Changed


def keeps_v(kind: type) -> type:
    """APFL: v stays v at the end of a round."""

    class Changed(kind):
        def fit(self, override_local_epochs: int = 0) -> float:
            v = self.personalized_model
            value = super().fit(override_local_epochs)
            self.personalized_model = v
            return value

    return Changed


def pulled(kind: type) -> type:
    """pFedMe: the pull is towards w, which starts at the received model, is kept apart from v, and is sent."""

    class Changed(kind):
        def receive_model(self) -> None:
            super().receive_model()
            self.internal_model = copy.deepcopy(self.model)
            self.internal_model.load_state_dict = lambda state: None

        def fit(self, override_local_epochs: int = 0) -> float:
            if self.optimizer is None:
                self.optimizer, self.scheduler = self._optimizer_cfg(self.model)
                usual = self.optimizer.step
                self.optimizer.step = lambda same: usual(list(self.internal_model.parameters()))
            return super().fit(override_local_epochs)

        def send_model(self) -> None:
            v, self.model = self.model, self.internal_model
            super().send_model()
            self.model = v

    return Changed


def restored(kind: type) -> type:
    """Per-FedAvg: the gradient after the inner step moves the model before it."""

    class Changed(kind):
        def fit(self, override_local_epochs: int = 0) -> float:
            if self.optimizer is None:
                self.optimizer, _ = self._optimizer_cfg(self.model)
                usual, before = self.optimizer.step, []

                def step(parameters: Any, beta: float = 0.0) -> None:
                    if beta:
                        for parameter, value in zip(self.model.parameters(), before.pop(), strict=True):
                            parameter.data.copy_(value)
                    else:
                        before.append([parameter.data.clone() for parameter in self.model.parameters()])
                    usual(parameters, beta=beta)

                self.optimizer.step = step
            return super().fit(override_local_epochs)

    return Changed


def lacking(kind: type) -> type:
    """FedRoD: classes without samples count as 10⁻⁸."""

    class Changed(kind):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.sample_per_class = self.sample_per_class.clamp(min=1e-8)

    return Changed


def own_norm(kind: type) -> type:
    """FedBN: normalisation starts from the first model."""

    class Changed(kind):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.start = arguments["model"].encoder[1].state_dict()

        def receive_model(self) -> None:
            is_first = self.model is None
            super().receive_model()
            if is_first:
                self.model.encoder[1].load_state_dict(self.start)

    return Changed


def fresh(kind: type) -> type:
    """FedSAM: gradients start at zero in every step."""

    class Changed(kind):
        def _get_closure(self, x: Any, y: Any) -> Any:
            usual = super()._get_closure(x, y)

            def closure() -> Any:
                self.optimizer.zero_grad()
                return usual()

            return closure

    return Changed


def squared(kind: type) -> type:
    """SuPerFed: the pull is half the square of a distance, and nothing is added to the products of the cosine."""

    class Changed(kind):
        def fit(self, override_local_epochs: int = 0) -> float:
            norm, add = torch.Tensor.norm, torch.Tensor.add
            torch.Tensor.norm = lambda x, *_: x.square().sum() / 2
            torch.Tensor.add = lambda x, other: x if other == 1e-6 else add(x, other)
            try:
                return super().fit(override_local_epochs)
            finally:
                torch.Tensor.norm, torch.Tensor.add = norm, add

    return Changed


def trained_features(kind: type) -> type:
    """FedProto: prototypes are means of the trained model's features, and pull as soon as there are any."""

    class Changed(kind):
        def fit(self, override_local_epochs: int = 0) -> float:
            self._last_round = max(
                self._last_round, int(any(prototype is not None for prototype in self.global_protos))
            )
            value = super().fit(override_local_epochs)
            with torch.no_grad():
                features = self.model.encoder(self.train_set.tensors[0])
            labels = self.train_set.tensors[1]
            self.prototypes = {
                j: features[labels == j].mean(0) if (labels == j).any() else None for j in self.prototypes
            }
            return value

    return Changed


CHANGED_CLIENTS: dict[str, Any] = {
    "feddyn": towards, "apfl": keeps_v, "pfedme": pulled, "per_fedavg": restored, "fedrod": lacking, "fedbn": own_norm,
    "fedproto": trained_features, "fedsam": fresh, "superfed_mm": squared,
}  # fmt: skip

if __name__ == "__main__":
    serve(play)

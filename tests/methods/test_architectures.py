"""Clients with networks of different architecture: federations side by side, which exchange what fits all networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import CLASSES, FEATURES, classes
from helpers.networks import BodyAndHead as Net
from helpers.networks import fixed, tanh_net
from helpers.runs import GENTLE, assert_same_state, experiment, go
from torch import Tensor, nn

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.config.keys import build_method, resolve
from fedloom.core.context import Context, RoundInfo
from fedloom.core.federation import Index, Split
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Personal
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import run
from fedloom.methods import make
from fedloom.models import Several
from fedloom.models.classifier import models
from fedloom.parts.objectives.alignment import TrainablePrototypes
from fedloom.parts.personal import Architectures, OwnArchitectures, OwnBodies
from fedloom.parts.personal.architectures import for_networks
from fedloom.timing.devices import Grades

TINY = 1e-13
FULL_BATCH = Local(steps=3, batch_size=0, lr=0.2)


def deep(width: int = 5) -> nn.Module:
    body = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 3), nn.Tanh())
    return fixed(Net(body, 3), 1)


def same_net(make_net: Callable[[], Any]) -> nn.Module:
    return make_net()


def normed(make_net: Callable[[], Any]) -> nn.Module:
    """The network with batch normalisation of its features."""
    net = make_net()
    net.body.append(nn.BatchNorm1d(net.head.in_features))
    return net


def two_networks() -> nn.Module:
    return Several([tanh_net(), deep()])


def with_own_networks(name: str, *members: int, count: int = 2, **settings: Any) -> Any:
    return replace(make(name, **settings), personal=OwnArchitectures(count, members))


def private(result: Any, client: int) -> Tensor:
    return result.snapshot.store.get(client)["personal"]["private"]


@pytest.mark.parametrize(
    ("name", "entry"),
    [("fedproto", "prototypes"), ("feddistill", "outputs"), ("fedtgp", "prototypes"), ("fedmd", "scores")],
)
def test_equal_networks_are_one_network(name: str, entry: str) -> None:
    same: dict[str, Any] = {"cohort": 4, "drop_rate": 0.2, "rounds": 3, "evaluation": Evaluation(what=("clients",))}
    twice = go(with_own_networks(name, **GENTLE.get(name, {})), model=lambda: Several([tanh_net(), tanh_net()]), **same)
    once = go(name, **same)
    entries = [result.snapshot.server.parts["objective.1"][entry] for result in (twice, once)]
    torch.testing.assert_close(*entries, rtol=0, atol=TINY)
    for client, _ in once.snapshot.store:
        torch.testing.assert_close(private(twice, client), private(once, client), rtol=0, atol=TINY)
    assert [r["comm/bytes"] for r in twice.history] == [r["comm/bytes"] for r in once.history]
    losses = [[r["clients/loss/mean"] for r in result.history] for result in (twice, once)]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("compute", "change"), [("live", same_net), ("batched", same_net), ("live", normed)])
def test_without_exchange_groups_are_federations_of_their_own(compute: str, change: Any) -> None:
    members, federation = (0, 1, 1, 0, 1, 0), classes()
    networks = [partial(change, tanh_net), partial(change, deep)]
    method = replace(make("fedavg"), personal=Architectures(2, members))
    evaluation = Evaluation(what=("global", "clients"))
    same: dict[str, Any] = {"local": FULL_BATCH, "compute": compute, "evaluation": evaluation}
    result = go(method, model=lambda: Several([make_net() for make_net in networks]), federation=federation, **same)
    theta, buffers, record = result.snapshot.server.theta, result.snapshot.server.buffers, result.history[-1]
    for number, network in enumerate(networks):
        net = network()
        size, states = (sum(tensor.numel() for tensor in group) for group in (net.parameters(), net.buffers()))
        part, own_buffers = (
            slice(n) if not number else slice(len(vector) - n, None) for n, vector in ((size, theta), (states, buffers))
        )
        clients = [client for client in range(6) if members[client] == number]
        few = replace(
            federation,
            **{
                name: Split(split.arrays, Index.of([split.index[i] for i in clients]))
                for name, split in vars(federation).items()
                if name in ("train", "validation", "held_out")
            },
        )
        alone = go("fedavg", model=network, federation=few, **same)
        torch.testing.assert_close(theta[part], alone.snapshot.server.theta, rtol=0, atol=TINY)
        torch.testing.assert_close(buffers[own_buffers], alone.snapshot.server.buffers, rtol=0, atol=TINY)
        scope = "global/network_1" if number else "global"
        assert record[f"{scope}/loss"] == pytest.approx(alone.history[-1]["global/loss"], abs=1e-12)
        pair, x = (result.trained.client(clients[0]), alone.trained.client(0)), federation.test.x
        torch.testing.assert_close(*(model.outputs(x) for model in pair), rtol=0, atol=TINY)
        key = f"clients/network_{number}/accuracy/mean"
        assert record[key] == pytest.approx(alone.history[-1]["clients/accuracy/mean"], abs=1e-12)


def test_prototypes_cross_networks_as_in_the_equations() -> None:
    """After one round C_y is the mean over all clients' samples of their own networks' features."""
    result = go(with_own_networks("fedproto"), model=two_networks, rounds=1)
    federation, sums, counts = classes(), np.zeros((CLASSES, 3)), np.zeros(CLASSES)
    for client in range(6):
        own_data = federation.train.client(client)
        x, y = own_data.x.numpy(), own_data.y.numpy()
        w = [p.numpy() for p in result.trained.client(client).module.double().state_dict().values()]
        layers = w[:-2]
        assert len(layers) == 2 + 2 * (client % 2), "dealt in turn"
        for weight, bias in zip(layers[::2], layers[1::2], strict=True):
            x = np.tanh(x @ weight.T + bias)
        np.add.at(sums, y, x)
        np.add.at(counts, y, 1)
    here = counts > 0
    prototypes = result.snapshot.server.parts["objective.1"]["prototypes"].numpy()
    np.testing.assert_allclose(prototypes[here], sums[here] / counts[here, None], rtol=0, atol=1e-6)
    assert result.history[-1]["comm/up_params"] == 6 * CLASSES * 4


def test_they_resume_run_in_processes_and_are_loaded_each_with_its_own_network(tmp_path: Path) -> None:
    method = with_own_networks("fedproto", 1, 0, 1, 1, 0, 0)
    setting: dict[str, Any] = {"model": two_networks, "cohort": 4, "evaluation": Evaluation(what=("clients",))}
    full_run = run(experiment(method, rounds=4, **setting))
    run(experiment(method, rounds=2, **setting), tmp_path / "a")
    again = run(experiment(method, rounds=4, engine="processes", **setting), tmp_path / "a", resume=True)
    assert_same_state(full_run.snapshot, again.snapshot)
    assert full_run.history[-1]["clients/accuracy/mean"] == again.history[-1]["clients/accuracy/mean"]
    loaded = fl.load(tmp_path / "a", experiment(method, rounds=4, **setting))
    x = classes().test.x[:4]
    for client, depth in ((0, 2), (1, 1)):
        assert torch.equal(loaded.client(client).predict(x), full_run.trained.client(client).predict(x))
        layers = [layer for layer in loaded.client(client).module.modules() if isinstance(layer, nn.Tanh)]
        assert len(layers) == depth


@pytest.mark.parametrize(
    ("method", "model", "alone"),
    [
        (with_own_networks("local", count=4), lambda: Several([tanh_net(), deep(4), deep(), deep(6)]), deep),
        (make("fml", alpha=1.0, beta=1.0), tanh_net, tanh_net),
    ],
    ids=["networks in turn", "beside a shared one"],
)
def test_a_client_that_joins_later_trains_the_network_of_its_group(
    method: Method, model: Callable[[], nn.Module], alone: Callable[[], nn.Module]
) -> None:
    """The seventh client has the third of four networks, and with weight on labels alone its own one."""
    samples = classes().train.client(1)
    runs = go(method, model=model, local=FULL_BATCH), go("local", model=alone, local=FULL_BATCH)
    outputs, expected = (run.trained.adapt(samples.x, samples.y, rounds=2).outputs(samples.x) for run in runs)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=TINY)


def test_a_list_of_models_is_all_that_a_run_needs() -> None:
    federation = fl.data.federate("digits", "iid", clients=4)
    fedproto = fl.run("fedproto", federation, ["mlp", "mlp"], rounds=1)
    assert fedproto.trained.plan.method.personal == OwnArchitectures(2)
    feddistill = fl.run("feddistill", federation, ["mlp", "logistic"], rounds=2)  # features of different length
    assert feddistill.history[-1]["comm/up_params"] == 4 * (10 * 10 + 10)
    fedavg = fl.run("fedavg", federation, ["mlp", "logistic"], rounds=1)
    assert fedavg.trained.plan.method.personal == Architectures(2)
    assert {"global/accuracy", "global/network_1/accuracy"} < fedavg.history[-1].keys()
    with pytest.raises(ConfigError, match="personal 'private_head' splits or doubles it"):
        fl.run("fedper", federation, ["mlp", "logistic"])
    with pytest.raises(ConfigError, match="of which method 'fedavg' would train the first alone"):
        fl.run("fedavg", federation, "several", rounds=1)


@pytest.mark.parametrize(("method", "personal"), [("fedavg", Architectures(3)), ("fedproto", OwnArchitectures(3))])
def test_names_of_models_are_all_that_the_command_line_needs(method: str, personal: Personal) -> None:
    several = ["model=several", "model.names=[mlp,logistic,mlp]"]
    assert build_method(resolve([f"method={method}", *several])).personal == personal
    with pytest.raises(ConfigError, match="every client trains one whole network, but personal 'ditto' splits"):
        build_method(resolve(["method=ditto", *several]))


def test_names_of_networks_may_have_settings() -> None:
    networks = models.of(
        {"name": "several", "names": ["logistic", {"name": "mlp", "hidden": [3]}]}, classes=10, inputs=(4,)
    )
    assert [[*p.shape] for p in networks.parameters()] == [[10, 4], [10], [3, 4], [3], [10, 3], [10]]
    with pytest.raises(ConfigError, match="did you mean 'hidden'"):
        models.make("several", classes=10, inputs=(4,), names=({"name": "mlp", "hiden": [3]},))


@pytest.mark.parametrize(
    ("method", "networks", "sentence"),
    [
        (make("scaffold"), [tanh_net, deep], "exchanges more than models with clients"),
        (
            with_own_networks("fedproto"),
            [tanh_net, lambda: tanh_net(4)],
            "have 3, 4 of them; give all networks features of one",
        ),
        (with_own_networks("fedproto"), [tanh_net], "2 networks to choose from, but the model has 1"),
        (with_own_networks("fedproto", 0, 1), [tanh_net, deep], "names the networks of 2 clients, but there are more"),
    ],
)
def test_what_does_not_fit_all_networks_is_refused(method: Any, networks: list[Any], sentence: str) -> None:
    personal = method.personal if isinstance(method.personal, Architectures) else Architectures(2)
    with pytest.raises(ConfigError, match=sentence):
        go(replace(method, personal=personal), model=lambda: Several([make_one() for make_one in networks]))
    with pytest.raises(ConfigError, match="names network 2, but there are 2"):
        OwnArchitectures(2, (0, 2))


@pytest.mark.parametrize("name", ["lg_fedavg", "fedgh"])
def test_bodies_of_one_architecture_share_their_head_as_one_network_does(name: str) -> None:
    same: dict[str, Any] = {"cohort": 4, "drop_rate": 0.2, "evaluation": Evaluation(what=("clients", "average"))}
    listed = replace(make(name), personal=OwnBodies(2))
    twice = go(listed, model=lambda: Several([tanh_net(), tanh_net()]), **same)
    once = go(name, **same)
    torch.testing.assert_close(twice.snapshot.server.theta, once.snapshot.server.theta, rtol=0, atol=TINY)
    for client, _ in once.snapshot.store:
        torch.testing.assert_close(private(twice, client), private(once, client), rtol=0, atol=TINY)
    assert [r["comm/bytes"] for r in twice.history] == [r["comm/bytes"] for r in once.history]


def test_a_head_that_the_server_does_not_train_is_the_first_one_in_every_round() -> None:
    start = tanh_net().head
    result = go(for_networks(make("fedgh", epochs=0), 2), model=lambda: Several([tanh_net(), deep()]), rounds=3)
    assert result.trained.plan.method.personal == OwnBodies(2)
    first = torch.cat([p.detach().double().flatten() for p in start.parameters()])
    assert torch.equal(result.snapshot.server.theta, first)
    assert result.history[-1]["comm/down_params"] == 6 * len(first)


@pytest.mark.parametrize("change", [same_net, normed])
def test_networks_that_learn_from_labels_alone_are_local_training_beside_fedavg(change: Any) -> None:
    same: dict[str, Any] = {
        "cohort": 4,
        "drop_rate": 0.2,
        "rounds": 3,
        "local": FULL_BATCH,
        "model": partial(change, tanh_net),
    }
    pair, shared, alone = (go(method, **same) for method in (make("fml", alpha=1.0, beta=1.0), "fedavg", "local"))
    torch.testing.assert_close(pair.snapshot.server.theta, shared.snapshot.server.theta, rtol=0, atol=TINY)
    torch.testing.assert_close(pair.snapshot.server.buffers, shared.snapshot.server.buffers, rtol=0, atol=TINY)
    for client, state in alone.snapshot.store:
        torch.testing.assert_close(pair.snapshot.store.get(client)["personal"], state["personal"], rtol=0, atol=TINY)
    assert [r["comm/bytes"] for r in pair.history] == [r["comm/bytes"] for r in shared.history]


@pytest.mark.parametrize(
    ("name", "change"),
    [("fedkd", same_net), ("fedkd", normed), pytest.param("fml", same_net, marks=pytest.mark.exhaustive)],
)
def test_own_networks_of_any_architecture_stand_beside_the_shared_one(name: str, change: Any, tmp_path: Path) -> None:
    small = lambda: fixed(Net(nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh()), 6), 2)  # noqa: E731
    networks = [partial(change, make_net) for make_net in (tanh_net, deep, small)]
    method = for_networks(make(name), 3)
    setting: dict[str, Any] = {
        "model": lambda: Several([make_net() for make_net in networks]), "cohort": 4, "rounds": 2, "local": FULL_BATCH,
        "evaluation": Evaluation(what=("clients", "global", "average")),
    }  # fmt: skip
    full_run = run(experiment(method, **setting))
    run(experiment(method, **{**setting, "rounds": 1}), tmp_path / "a")
    again = run(experiment(method, **setting, engine="processes"), tmp_path / "a", resume=True)
    assert_same_state(full_run.snapshot, again.snapshot)
    shared, record, server = change(tanh_net).double().eval(), full_run.history[-1], full_run.snapshot.server
    size = sum(tensor.numel() for tensor in shared.state_dict().values())
    assert record["comm/up_params"] == record["comm/down_params"] == 4 * size
    assert not any(key.startswith("global/network") for key in record), "no client uses these"
    Layout.of(shared).write(shared, server.theta, server.buffers)
    test = classes().test
    right = (shared(test.x).argmax(1) == test.y).double().mean()
    assert record["global/accuracy"] == pytest.approx(float(right))
    for client, layers in ((0, 3), (1, 2)):
        module = full_run.trained.client(client).module
        assert sum(isinstance(layer, nn.Linear) for layer in module.own.modules()) == layers
        assert torch.equal(full_run.trained.client(client).predict(test.x), module.own(test.x).argmax(1))


def test_features_of_every_position_of_a_sequence_are_aligned() -> None:
    draws = np.random.default_rng(0)
    federation = fl.data.federate(tuple(draws.integers(0, 6, (12, 4)) for _ in range(2)), "iid", 2)
    networks = [
        lambda hidden=hidden: fl.models.make("stacked_lstm", classes=6, inputs=(4,), hidden=hidden, positions="every")
        for hidden in (5, 3)
    ]
    assert not fl.run("fedkd", federation, networks, rounds=1).failures


@pytest.mark.parametrize("by", ["speed", "memory"])
def test_the_last_networks_go_to_the_best_devices(by: Any) -> None:
    devices = Grades(speeds=(1.0, 0.1), memory=1e9)
    method = replace(make("fedproto"), personal=OwnArchitectures(2, by=by))
    setup = experiment(method, model=two_networks, devices=devices, seed=2)  # ranks there are not the order that sorts
    assert isinstance(setup.method.personal, OwnArchitectures)
    fast = devices.fleet(6, setup.seed).speed > 1e9
    assert setup.method.personal.members == tuple(fast.astype(int).tolist())
    with_members = replace(method, personal=OwnArchitectures(2, (1, 0, 0, 0, 0, 0), by))
    assert experiment(with_members, model=two_networks, devices=devices).method.personal == with_members.personal
    with pytest.raises(ConfigError, match=f"deals networks by the {by} of devices, which is not known; set devices"):
        experiment(method, model=two_networks, devices=None if by == "speed" else Grades())


@pytest.mark.parametrize(
    ("method", "networks", "sentence"),
    [
        (replace(make("fedgh"), personal=OwnBodies(2)), [tanh_net, lambda: tanh_net(4)], "for features of one length"),
        (make("fml"), [tanh_net, deep, deep], "own are 2 models, but there are 3; list the shared one first"),
        (make("fedkd"), [tanh_net, lambda: nn.Linear(FEATURES, CLASSES)], "a network has no such 'head'"),
    ],
)
def test_networks_that_do_not_go_together_are_refused(method: Any, networks: list[Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        go(method, model=lambda: Several([make_one() for make_one in networks]))


def test_the_server_trains_a_linear_head_alone() -> None:
    with pytest.raises(ConfigError, match="but clients share 27 parameters; set personal=private_body"):
        go(replace(make("fedgh"), personal=Personal()), rounds=1)


def test_the_server_trains_a_head_without_a_bias() -> None:
    def unbiased() -> nn.Module:
        net = tanh_net()
        net.head = nn.Linear(net.head.in_features, CLASSES, bias=False)  # type: ignore[union-attr,arg-type]
        return net

    assert not go("fedgh", model=unbiased, rounds=1).failures


def test_the_margin_is_that_of_classes_which_somebody_has() -> None:
    """The last class is nobody's, and 0 is far from the means of the others."""
    means = 5 + torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uploads = {"means": means, "has": torch.tensor([[1.0, 1.0, 0.0]] * 2).double()}
    largest = float((means[:, 0].mean(0) - means[:, 1].mean(0)).norm())
    info = replace(RoundInfo.of_cohort([0, 1], [5, 5], clients=2), received=torch.zeros(1))
    narrow, wide = (
        TrainablePrototypes(margin=margin, epochs=2, lr=0.1).correct({}, torch.zeros(1), uploads, info)[0]
        for margin in (largest, 1e9)
    )
    torch.testing.assert_close(narrow, wide, rtol=1e-9, atol=0)


def test_means_of_features_are_made_without_dropout() -> None:
    dropout, x = nn.Dropout(0.5), torch.ones(4, 6)
    assert Context.over_samples(SimpleNamespace(samples=SimpleNamespace(x=x)), dropout, dropout).equal(x)  # type: ignore[arg-type]
    assert dropout.training, "for the steps of the next client"


@pytest.mark.exhaustive  # four runs of a second, to see that the methods learn
def test_clients_of_two_architectures_learn_from_each_others_messages() -> None:
    federation = fl.data.federate("digits", "dirichlet", clients=4, seed=0)
    networks = [
        fl.models.models.make("mlp", classes=10, inputs=(1, 8, 8), hidden=hidden) for hidden in ((32,), (64, 32))
    ]
    setting: dict[str, Any] = {"rounds": 6, "local": Local(epochs=2, batch_size=20, lr=0.2), "seed": 1}
    for name, settings in {"fedtgp": {"epochs": 20}, "fedgh": {}, "fml": {}, "fedkd": {}}.items():
        record = fl.run(make(name, **settings), federation, networks, **setting).history[-1]
        assert record["clients/accuracy/mean"] > 0.7, name
        if name in ("fml", "fedkd"):
            assert record["global/accuracy"] > 0.8, name

"""Models with side effects, frozen and shared parts: the batched compute matches the live one or says why it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.federations import CLASSES, FEATURES, classes
from helpers.nested import wide_net
from helpers.networks import fixed
from helpers.runs import assert_same_run, experiment, go
from torch import Tensor, nn

from fedloom.compute import reason_against_batched
from fedloom.compute.cohort import CohortNet
from fedloom.compute.cohort.pointwise import Dropout, Sigmoid, Tanh
from fedloom.compute.cohort.trial import trial_reason
from fedloom.core.layout import Layout, call
from fedloom.core.local import Local
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask
from fedloom.methods import make
from fedloom.rounds.plan import ClientPlan

SIDES = (1, 6, 6)
ONE_BLOCK = {"compute": "batched", "compute_settings": {"shares": 1}}
LOCAL = Local(epochs=2, batch_size=4, lr=0.1)
WIDTH = 5

Forward = Callable[[Any, Tensor], Tensor]
Prepare = Callable[[Any], object]


class Net(nn.Module):
    """Three linear layers, a gate and dropout, combined by a given function."""

    def __init__(self, forward: Forward, prepare: Prepare | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.gate, self.act, self.drop = nn.Linear(WIDTH, 1), nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.calls, self.function = 0, forward
        if prepare is not None:
            prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Calm(Net):
    """Its dropout stays off while it is trained."""

    def train(self, mode: bool = True) -> Calm:
        super().train(mode)
        self.drop.eval()
        return self


def plain(m: Any, x: Tensor) -> Tensor:
    return m.c(torch.tanh(m.b(torch.tanh(m.a(x)))))


def branch(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.c(h + m.b(h)) if m.training else m.c(h)


def coin(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.c(h if torch.rand(()) < 0.5 else m.b(h))


def python_coin(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.c(h if random.random() < 2 else m.b(h))


def counter(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    h = torch.tanh(m.a(x))
    return m.c(h if m.calls < 3 else m.b(h))


def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.tanh(m.a(x))
    return m.c(torch.tanh(m.b(h)))


def under_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = torch.tanh(m.a(x))
    return m.c(h)


def statement(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.act(h)
    return m.c(m.b(h))


def by_name(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    F.relu(h, inplace=True)
    return m.c(m.b(h))


def method(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.relu_()
    return m.c(m.b(h))


def read_again(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y = m.act(h)
    return m.c(y + h)


def view_read_again(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y = m.act(h.flatten(1))
    return m.c(y + h)


def added_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y = h
    y += m.b(torch.tanh(h))
    return m.c(y + h)


def input_overwritten(m: Any, x: Tensor) -> Tensor:
    return m.c(m.a(m.act(x)))


def lost_draws(m: Any, x: Tensor) -> Tensor:
    h = m.drop(m.a(x))
    m.drop(h)
    return m.c(h)


def mean_of_the_batch(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.c(h + h.mean(-2, keepdim=True)) if m.training else m.c(h)


def in_place_once(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y = m.b(torch.tanh(h))
    y += h
    return F.relu(m.c(m.act(y)), inplace=True)


def gated(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.c(h + h.mean(1, keepdim=True))


def dueling(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.c(h) + m.gate(h)


def dropped(m: Any, x: Tensor) -> Tensor:
    return m.c(m.drop(torch.tanh(m.a(x))))


def tie_weight(m: Any) -> None:
    m.d = nn.Linear(WIDTH, WIDTH)
    m.d.weight = m.b.weight


def tie_bias(m: Any) -> None:
    m.d = nn.Linear(WIDTH, WIDTH)
    m.d.bias = m.b.bias


def tied(m: Any, x: Tensor) -> Tensor:
    return m.c(torch.tanh(m.d(torch.tanh(m.b(torch.tanh(m.a(x)))))))


def hooked(m: Any) -> None:
    m.a.register_forward_hook(lambda module, inputs, out: 2 * out)


def pre_hooked(m: Any) -> None:
    m.a.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


def root_hooked(m: Any) -> None:
    m.register_forward_hook(lambda module, inputs, out: 2 * out)


def back_hooked(m: Any) -> None:
    m.b.register_full_backward_hook(lambda module, grads, outs: tuple(None if g is None else g / 10 for g in grads))


def normed(m: Any) -> None:
    nn.utils.weight_norm(m.b)
    with torch.no_grad():
        m.b(torch.zeros(1, m.b.in_features))  # its weight is then one that can be copied


LIVE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "coin": (lambda: Net(coin), "draws random numbers"),
    "Python's coin": (lambda: Net(python_coin), "draws random numbers"),
    "no_grad": (lambda: Net(without_gradients), "without gradients"),
    "autocast": (lambda: Net(under_autocast), "under autocast"),
    "in-place statement": (lambda: Net(statement), "overwrites a value in place"),
    "in-place function": (lambda: Net(by_name), "overwrites a value in place"),
    "in-place method": (lambda: Net(method), "overwrites a value in place"),
    "overwritten value read again": (lambda: Net(read_again), "overwrites a value in place"),
    "its memory read again": (lambda: Net(view_read_again), "overwrites a value in place"),
    "added in place": (lambda: Net(added_in_place), "overwrites a value in place"),
    "input overwritten": (lambda: Net(input_overwritten), "overwrites a value in place"),
    "lost draws": (lambda: Net(lost_draws), "does not read what a layer of dropout returns"),
    "mean over the batch": (lambda: Net(mean_of_the_batch), "a mean over the samples of a batch"),
    "tied weight": (lambda: Net(tied, tie_weight), "the weight of layer 'd' is a parameter of another layer"),
    "tied bias": (lambda: Net(tied, tie_bias), "the bias of layer 'd' is a parameter of another layer"),
    "hook": (lambda: Net(plain, hooked), "hooks are registered at a Linear"),
    "hook before": (lambda: Net(plain, pre_hooked), "hooks are registered at a Linear"),
    "hook at the model": (lambda: Net(plain, root_hooked), "hooks are registered at a Net"),
    "hook of gradients": (lambda: Net(plain, back_hooked), "hooks are registered at a Linear"),
    "weight_norm": (lambda: Net(plain, normed), "layer 'b'"),
}
BATCHED: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Net(plain),
    "training branch": lambda: Net(branch),
    "dropout kept off": lambda: Calm(dropped),
    "dropout": lambda: Net(dropped),
    "in place, and not read again": lambda: Net(in_place_once),
    "broadcast mean": lambda: Net(gated),
    "dueling": lambda: Net(dueling),
}


def plan_of(model: Callable[[], nn.Module], **changes: Any) -> ClientPlan:
    return FederatedTask(experiment(model=model, **changes)).plan


def agree(model: Callable[[], nn.Module], name: Any = "fedavg", **changes: Any) -> None:
    settings = {"model": lambda: fixed(model()), "local": LOCAL, "rounds": 2} | changes
    assert_same_run(go(name, **settings), go(name, **ONE_BLOCK, **settings), 1e-9)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", LIVE)
def test_what_a_trace_does_not_show_runs_live(name: str) -> None:
    model, words = LIVE[name]
    reason = reason_against_batched(plan_of(model))
    assert reason is not None
    assert words in reason


def test_what_runs_live_gives_the_live_numbers() -> None:
    agree(LIVE["coin"][0])


@pytest.mark.parametrize("name", BATCHED)
def test_what_can_be_traced_gives_the_live_numbers(name: str) -> None:
    assert reason_against_batched(plan_of(BATCHED[name])) is None
    agree(BATCHED[name])


def frozen() -> nn.Module:
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64, CLASSES))
    model[2].requires_grad_(False)
    return model


def pooled() -> nn.Module:
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(6, 6), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9, CLASSES))


class PooledBeside(nn.Module):
    """What a pool reads is read beside it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.pool, self.c = nn.Linear(6, 6), nn.MaxPool2d(3, 1, 1), nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x.flatten(1, 2)))
        return self.c((self.pool(h) + h).flatten(1))


@pytest.mark.parametrize("model", [frozen, pooled, PooledBeside])
def test_frozen_kernels_and_pools_of_planes_give_the_live_numbers(model: Callable[[], nn.Module]) -> None:
    data = classes((6, 9, 11), shape=SIDES)
    assert reason_against_batched(plan_of(model, federation=data)) is None
    agree(model, federation=data)


def test_the_scaler_of_narrow_networks_acts_in_the_batched_compute() -> None:
    scaled = make("heterofl", scale=True)
    plans = FederatedTask(experiment(scaled, model=wide_net)).plan.levels
    assert [reason_against_batched(plan) for plan in plans] == [None, None]
    assert any(part._forward_hooks for part in plans[1].model.modules())
    reference = go(scaled, model=wide_net, local=LOCAL)
    assert_same_run(reference, go(scaled, model=wide_net, local=LOCAL, **ONE_BLOCK), 1e-9)
    unscaled = go("heterofl", model=wide_net, local=LOCAL, **ONE_BLOCK)
    assert (reference.snapshot.server.theta - unscaled.snapshot.server.theta).abs().max() > 1e-4


X = torch.zeros(1, FEATURES)


def test_the_trial_finds_wrong_outputs_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(plain)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert trial_reason(model, "logits", X) is None
    with monkeypatch.context() as patch:
        patch.setattr(Tanh, "backward", lambda self, grad: (grad,))
        reason = trial_reason(model, "logits", X)
        assert reason is not None
        assert "other gradients than the module, of 'a.weight'" in reason
    with monkeypatch.context() as patch:
        patch.setattr(Sigmoid, "forward", lambda self, x: setattr(self, "saved_value", x) or x)
        assert "other outputs" in str(trial_reason(nn.Sequential(nn.Linear(FEATURES, 3), nn.Sigmoid()), "logits", X))
    with monkeypatch.context() as patch:
        patch.setattr(Dropout, "forward", lambda self, x: setattr(self, "scale", None) or x)
        assert "other outputs" in str(trial_reason(Net(dropped), "logits", X))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_trial_leaves_modes_attributes_and_random_numbers_as_they_were() -> None:
    model = Net(counter).eval()
    model.drop.train()
    state = torch.get_rng_state()
    for reason in (CohortNet.reason(model), trial_reason(model, "logits", X)):
        assert reason == "the model's forward pass sets the attribute 'calls'"
    assert model.calls == 0
    assert [part.training for part in (model, model.a, model.drop)] == [False, False, True]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr("fedloom.compute.batched.trial_reason", lambda *args: tried.append(args))
    plan = plan_of(BATCHED["plain"])
    for _ in range(3):
        assert reason_against_batched(plan) is None
    assert len(tried) == 1


class Alias(nn.Module):
    """A layer under two names, and a weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(4, CLASSES)
        self.net = nn.Sequential(self.a, nn.Tanh(), self.b)
        self.b.weight = self.a.weight

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Named(Alias):
    """The same network with every layer under one name."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))


@pytest.mark.parametrize("name", ["ditto", "pfedme", "per_fedavg", "moon", "fedntd", "fedbabu"])
def test_a_layer_of_two_names_is_the_same_layer(name: str) -> None:
    settings = {"local": LOCAL, "evaluation": Evaluation(what=("global", "clients"))}
    single_name, alias = (go(name, model=lambda kind=kind: fixed(kind()), **settings) for kind in (Named, Alias))
    assert_same_run(single_name, alias)


def test_a_call_replaces_a_tensor_in_all_its_owners_and_gives_it_back() -> None:
    model = Alias().double()
    layout = Layout.of(model)
    theta, buffers = layout.read(model)
    before = dict(model.named_parameters(remove_duplicate=False))
    x = torch.randn(3, FEATURES, dtype=torch.float64)
    expected = model(x)
    moved = call(model, layout.views(2 * theta, buffers), (x,))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is value for name, value in before.items())
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    layout.write(model, 2 * theta, buffers)
    torch.testing.assert_close(model(x), moved)

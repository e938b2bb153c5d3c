"""Gradient steps in a basis of the samples: the same models and gradients as with explicit weights, wherever used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.networks import BodyAndHead, fixed
from torch import Tensor, nn

from fedloom.core.context import NO_ROUND, Batch
from fedloom.core.federation import Arrays, Index
from fedloom.core.federation import Split as Samples
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.models import models
from fedloom.parts.adaptation import FineTune, Maml
from fedloom.parts.objectives import CrossEntropy, Robustness
from fedloom.rounds import subspace
from fedloom.rounds.meta import deployed_model, deployed_params, gradient, objective
from fedloom.rounds.objective import Net
from fedloom.rounds.plan import ClientPlan
from fedloom_apps.online import ExpertConfig, ExpertEnsemble, learners

SHAPE, CLASSES = (1, 10, 10), 3
ADAPTATIONS = [Maml(0.3, 1), Maml(0.3, 3), Maml(0.3, 2, second_order=False), FineTune(0.2, 4)]


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the layer is."""
    monkeypatch.setattr(subspace, "SMALLEST", 0)


@pytest.fixture
def explicitly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], Tensor]:
    """The value of a function that takes its steps with explicit weights."""

    def value(f: Callable[[], Tensor]) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(subspace, "SMALLEST", 10**9)
            return f()

    return value


def mlp() -> nn.Module:
    return fixed(models.make("mlp", classes=CLASSES, inputs=SHAPE, hidden=(7, 5)))


def batches(n: int = 5, seed: int = 0) -> tuple[Batch, Batch]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n + 4, *SHAPE, generator=draw, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (n + 4,), generator=draw)
    return Batch(x[:n], y[:n]), Batch(x[n:], y[n:])


def planned(model: nn.Module, method: Method) -> tuple[ClientPlan, Net]:
    nothing = Arrays(torch.zeros(0, *SHAPE, dtype=torch.float64), torch.zeros(0, dtype=torch.long), CLASSES)
    plan = ClientPlan.of(model.double(), method, Samples(nothing, Index.of([[]])), Local(), 0, "cpu")
    return plan, Net(model, plan)


def adapting(part: Maml | FineTune, *terms: object) -> Method:
    return Method("a", (CrossEntropy(), *terms), adaptation=part)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ADAPTATIONS, ids=repr)
@pytest.mark.parametrize("case", ["plain", "repeated samples", "samples of zeros", "padded"])
def test_models_and_gradients_are_those_of_explicit_weights(
    part: Maml | FineTune, case: str, explicitly: Callable[..., Tensor]
) -> None:
    """Also where the samples do not span n dimensions, and where some are padding."""
    plan, net = planned(mlp(), adapting(part))
    support, query = batches()
    contexts = dict.fromkeys(plan.method.parts, NO_ROUND)
    if case == "repeated samples":
        support.x[3:] = support.x[0]
    if case == "samples of zeros":
        support.x[1:4] = 0
    if case == "padded":
        support = support._replace(mask=torch.tensor([1, 1, 0, 1, 0], dtype=torch.float64))
    assert (subspace.Subspace.of(plan, net, plan.theta0, support.x) is None) == (part.steps == 1)

    def model() -> Tensor:
        with torch.no_grad():
            return deployed_model(plan, net, plan.theta0, plan.buffers0, support)(query.x)

    def slope() -> Tensor:
        return gradient(objective(plan, net, plan.buffers0, support, query, contexts), plan.theta0)[0]

    def transformed() -> Tensor:
        return torch.func.grad(objective(plan, net, plan.buffers0, support, query, contexts))(plan.theta0)

    for compute in (model, slope, transformed):
        torch.testing.assert_close(compute(), explicitly(compute), rtol=1e-10, atol=1e-12)


def test_a_step_by_hand() -> None:
    """A linear model under cross entropy, in NumPy: W - η (P - Y)ᵀ X / n."""
    plan, net = planned(fixed(nn.Sequential(nn.Flatten(), nn.Linear(100, CLASSES))), adapting(FineTune(0.2, 2)))
    support, query = batches()
    flat, one_hot = support.x.flatten(1).numpy(), np.eye(CLASSES)[support.y.numpy()]
    weight, bias = plan.theta0[:-CLASSES].view(CLASSES, 100).numpy(), plan.theta0[-CLASSES:].numpy()
    for _ in range(2):
        logits = flat @ weight.T + bias
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        weight = weight - 0.2 * (shares - one_hot).T @ flat / len(flat)
        bias = bias - 0.2 * (shares - one_hot).mean(0)
    with torch.no_grad():
        outputs = deployed_model(plan, net, plan.theta0, plan.buffers0, support)(query.x)
    np.testing.assert_allclose(outputs, query.x.flatten(1).numpy() @ weight.T + bias, rtol=1e-10, atol=1e-12)


class Skipping(nn.Module):
    """The samples are read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(100, 4), nn.Linear(104, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.last(torch.cat([torch.tanh(self.first(flat)), flat], 1))


class Summing(nn.Module):
    """The samples are read twice, by functions of any width."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.flatten(1)) + x.flatten(1).abs().mean(1, keepdim=True)


class Dropping(nn.Module):
    """Dropout comes first, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(100, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(x.flatten(1), 0.5, self.training))


class Asserting(nn.Module):
    """It insists on the shape of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(100, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1:] == SHAPE
        return self.last(x.flatten(1))


class Tied(nn.Module):
    """An autoencoder's weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(100, 4), nn.Linear(100, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x.flatten(1))) @ self.first.weight)


def frozen() -> nn.Module:
    model = mlp()
    next(model.parameters()).requires_grad_(False)
    return model


UNFIT = [
    Skipping, Summing, Dropping, Asserting, Tied, frozen,
    lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(100, elementwise_affine=False), nn.Linear(100, CLASSES)),
    lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(100, affine=False), nn.Linear(100, CLASSES)),
    lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(128, CLASSES)),
    lambda: nn.Sequential(nn.Flatten(2), nn.Linear(100, CLASSES), nn.Flatten()),
]  # fmt: skip


@pytest.mark.parametrize("make", UNFIT)
def test_other_networks_keep_explicit_weights(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    plan, net = planned(model, adapting(Maml(steps=2)))
    net.train()
    before = torch.get_rng_state()
    assert subspace.Subspace.of(plan, net, plan.theta0, batches()[0].x) is None
    assert all(module.training for module in net.modules())
    assert torch.equal(before, torch.get_rng_state())


def test_a_network_that_cannot_be_copied_keeps_explicit_weights() -> None:
    """It keeps a tensor with a history."""
    plan, net = planned(mlp(), adapting(Maml(steps=2)))
    support = batches()[0].x
    net.model.seen = net.model(support)
    assert subspace.layer_in_basis(plan, net, support) is None


def test_explicit_weights_where_a_method_or_many_samples_need_them() -> None:
    plan, net = planned(mlp(), adapting(Maml(steps=2), Robustness()))
    assert plan.has_twin
    assert subspace.layer_in_basis(plan, net, batches()[0].x) is None
    plan, net = planned(mlp(), adapting(Maml(steps=2)))
    assert subspace.layer_in_basis(plan, net, batches(12)[0].x) is not None
    assert subspace.layer_in_basis(plan, net, batches(13)[0].x) is None
    single_step = planned(mlp(), adapting(Maml(steps=1)))
    assert subspace.layer_in_basis(*single_step, batches()[0].x) is None
    assert subspace.layer_in_basis(*single_step, batches()[0].x, together=True) is not None
    assert subspace.layer_in_basis(plan, net, batches(5)[0].x.float()) is None
    head = fixed(BodyAndHead(nn.Flatten(), 100))
    plan, net = planned(head, Method("a", (CrossEntropy(),), adaptation=Featured(steps=2)))
    assert subspace.layer_in_basis(plan, net, batches()[0].x) is None


class Featured(Maml):
    """It needs features, which here are the samples."""

    needs = replace(Maml.needs, features=True)


class Shrinking(Maml):
    """It does more than gradient steps."""

    def fit(self, forward: object, theta: Tensor, support: Batch, loss: object) -> Tensor:
        return 0.5 * theta


class Doubling(Maml):
    """Its function is not the network with other parameters."""

    def adapt(self, forward: Any, theta: Tensor, support: Batch, loss: object) -> Any:
        predict, params = super().adapt(forward, theta, support, loss)  # pyright: ignore[reportArgumentType]
        return lambda x: predict(x)._replace(logits=2 * predict(x).logits), params


def test_the_parameters_of_a_part_with_a_function_of_its_own_are_not_its_model() -> None:
    for part, is_network in ((Maml(), True), (Shrinking(), True), (Doubling(), False)):
        plan, net = planned(mlp(), adapting(part))
        params = deployed_params(plan, net, plan.theta0, plan.buffers0, batches()[0])
        assert (params is not None) == is_network


def test_a_part_that_adapts_differently_is_asked_with_explicit_weights() -> None:
    assert Maml(steps=3).descents == FineTune(steps=3).descents == 3
    assert Shrinking(steps=3).descents == 0
    plan, net = planned(mlp(), adapting(Shrinking(steps=2)))
    support, query = batches()
    outputs = deployed_model(plan, net, plan.theta0, plan.buffers0, support)(query.x)
    for value in net.model.parameters():
        value.data /= 2
    torch.testing.assert_close(outputs, net.model(query.x))


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("experts", [1, 3])
def test_tasks_of_a_step_are_one_computation(experts: int, inner: int, explicitly: Callable[..., Tensor]) -> None:
    """A learner whose steps take several tasks: their mean loss, with and without other experts beside it."""
    draw = torch.Generator().manual_seed(1)
    tasks = [
        Arrays(
            torch.randn(12, *SHAPE, generator=draw), torch.randint(0, CLASSES, (12,), generator=draw), CLASSES
        )
        for _ in range(3)
    ]  # fmt: skip
    local = Local(steps=2, batch_size=4, lr=0.1, clip=3.0)
    configs = tuple(
        ExpertConfig(learners.make("b_moml", buffer=3, alpha=alpha), Maml(0.1, inner), local)
        for alpha in (1.0, 2.0, 3.0)
    )

    def learnt() -> Tensor:
        ensemble = ExpertEnsemble(configs[:experts], mlp().float(), CLASSES, (CrossEntropy(),), support=4, seed=0)
        state = ensemble.init()
        for t, arrays in enumerate(tasks):
            state, _ = ensemble.learn(state, t, arrays)
        return state["0"]["w"]

    torch.testing.assert_close(learnt(), explicitly(learnt), rtol=1e-4, atol=1e-5)

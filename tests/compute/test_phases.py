"""Rounds in phases, of methods that train one half of the model after the other, against one client after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.federations import classes
from helpers.networks import IMAGE, images, tanh_net
from helpers.runs import assert_same_run, go
from torch import Tensor, nn

from fedloom.compute.batched import _Block
from fedloom.compute.cohort import CohortNet
from fedloom.compute.phases import outputs, split_program
from fedloom.core.context import Context
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.views import StepInfo, View
from fedloom.experiment.evaluation import Evaluation
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import Alternating, PrivateHead

TOLERANCE = 1e-9
SIZES = (7, 12, 9, 16)
BOTH, HEAD, BODY, NONE = View(), View(shared=0.0), View(private=0.0), View(shared=0.0, private=0.0)


@dataclass(frozen=True)
class Steps(PrivateHead):
    """A private head, with a client's views in order; the last one is repeated."""

    order: tuple[View | tuple[View, ...], ...] = ()

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        view = self.order[min(step.step, len(self.order) - 1)]
        return (view,) if isinstance(view, View) else view


def conditions(data: str = "vectors", sizes: tuple[int, ...] = SIZES, **local: Any) -> dict[str, Any]:
    inputs: dict[str, Any] = {"federation": classes(sizes)}
    if data == "images":
        inputs = {"federation": classes(sizes, shape=IMAGE), "model": images("group")}
    settings = Local(**{"epochs": 2, "batch_size": 4, "lr": 0.1, "weight_decay": 0.05} | local)
    return {"local": settings, "rounds": 2, "seed": 11, "evaluation": Evaluation(what=("global", "clients"))} | inputs


def method(personal: Alternating | Steps) -> Method:
    return Method("m", (CrossEntropy(),), personal=personal)


@pytest.fixture
def forbid_lockstep(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to make anything but rounds in phases fail."""
    return lambda: monkeypatch.setattr(_Block, "lockstep", None)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("data", ["vectors", "images"])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9, 1.0])
def test_heads_and_bodies_descend_in_turn(
    fraction: float, data: str, momentum: float, forbid_lockstep: Callable[[], None]
) -> None:
    """Clients of different sizes change from head to body at different steps."""
    settings, fedrep = conditions(data, momentum=momentum), method(Alternating(fraction))
    reference = go(fedrep, **settings)
    forbid_lockstep()
    assert_same_run(reference, go(fedrep, compute="batched", **settings), TOLERANCE)


@pytest.mark.parametrize("order", [(HEAD, BODY, HEAD), (BOTH, HEAD, BODY), (BODY, BOTH)])
def test_any_order_of_phases_will_do_without_momentum(order: tuple[View, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    settings, usual = conditions(sizes=(12, 12, 12), epochs=1), method(Steps(order=order))
    heavy = conditions(sizes=(12, 12, 12), epochs=1, momentum=0.8)
    reference = go(usual, **settings)
    with monkeypatch.context() as only:
        only.setattr(_Block, "lockstep", None)
        assert_same_run(reference, go(usual, compute="batched", **settings), TOLERANCE)
    if order[0] is HEAD:  # a momentum outlives its phase
        assert_same_run(go(usual, **heavy), go(usual, compute="batched", **heavy), TOLERANCE)


@pytest.mark.parametrize(
    "order",
    [(NONE, HEAD), ((HEAD, BODY),), (View(shared=0.5),), (View(shared=0.0, data=False), BODY)],
    ids=["a step of neither", "two views", "half a step", "a step without data"],
)
def test_other_views_run_in_lockstep(order: tuple[Any, ...]) -> None:
    settings, unusual = conditions(), method(Steps(order=order))
    assert_same_run(go(unusual, **settings), go(unusual, compute="batched", **settings), TOLERANCE)


def test_clients_with_other_phases_run_in_lockstep() -> None:
    """A client with a single step trains both halves in it; others train one after the other."""
    settings = conditions(sizes=(4, 12, 12), epochs=1)
    assert_same_run(go("fedrep", **settings), go("fedrep", compute="batched", **settings), TOLERANCE)


def test_a_client_that_diverges_in_a_phase_is_named() -> None:
    settings = conditions(sizes=(8, 8, 8))
    data = settings["federation"]
    data.train.arrays.x[data.train.index[1][0]] = float("inf")
    reference, result = go("fedrep", **settings), go("fedrep", compute="batched", **settings)
    assert [(f.client, f.kind) for f in result.failures] == [(1, "diverged")] * 2
    assert_same_run(reference, result, TOLERANCE)


def test_what_precedes_the_first_trained_layer_is_constant() -> None:
    model = tanh_net()
    net = CohortNet(model, Layout.of(model), 2)
    net.theta.normal_()
    body = {name for name in net.parameters if name.startswith("body.")}
    assert split_program(net.program, frozen=()) is None  # the first layer is trained
    parts = split_program(net.program, body)
    assert parts is not None
    x = torch.randn(2, 70, 4, dtype=net.theta.dtype)
    constant_part, trained_part = parts
    hidden = outputs(net, constant_part, x)
    torch.testing.assert_close(net.forward(hidden, trained_part)[0], net.forward(x)[0])
    assert len(trained_part.steps) == 1


def test_trained_layers_that_read_two_earlier_values_have_no_constant_part() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            return self.head(torch.tanh(self.second(torch.tanh(hidden)) + hidden))

    net = CohortNet(Skip(), Layout.of(Skip()), 1)
    first = {"first.weight", "first.bias"}
    assert split_program(net.program, first) is None
    assert split_program(net.program, {*first, "second.weight", "second.bias"}) is not None

"""Evaluating models of many clients in one pass equals evaluating them one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.networks import IMAGE, images, tanh_net
from helpers.runs import experiment
from torch import Tensor, nn

from fedloom.compute.live import Live
from fedloom.core.federation import Federation, Index, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.engines import engines
from fedloom.experiment import passes
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.evaluator import Evaluator
from fedloom.experiment.federated import RunResult, run
from fedloom.experiment.setup import make_plan, to_device
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.adaptation import Maml, Prototypes
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import PrivateBody, PrivateHead

SIZES = (7, 12, 5, 9, 16, 4)
METRICS = ("accuracy", "auroc", "top2", "ece")
ADAPTED = Method("both", (CrossEntropy(),), personal=PrivateHead(), adaptation=Maml(lr=0.3, steps=2))
PROTOTYPES = Method("proto", (CrossEntropy(),), personal=PrivateBody(), adaptation=Prototypes())
NAMES = ("fedper", "lg_fedavg", "fedrep", "ditto", "superfed_mm", "p_avg_proto", "per_fedavg")
METHODS = [*NAMES, make("apfl", learn=True), ADAPTED, PROTOTYPES]


def uneven(shape: tuple[int, ...] = (4,), relabelled: bool = False) -> Federation:
    """Clients with other numbers of test samples each, one of them with none, and perhaps names of their own."""
    federation = classes(SIZES, shape=shape)
    test = federation.test
    rows = [[0, 1, 2], [], [3], list(range(4, 11)), [11, 12, 0, 1], [5, 6]]
    names = torch.stack([torch.randperm(3, generator=torch.Generator().manual_seed(k)) for k in range(6)])
    names = names if relabelled else None
    held_out, train = Split(test, Index.of(rows), names), Split(federation.train.arrays, federation.train.index, names)
    return replace(federation, train=train, held_out=held_out, validation=Split(test, Index.of(rows[::-1]), names))


def train(method: Method | str, federation: Federation, **changes: Any) -> tuple[Evaluator, RunResult]:
    """A few rounds of half the clients, and what evaluates them."""
    batch = changes.pop("batch_size", 1000)
    on = Evaluation(what=("clients",), metrics=METRICS, batch_size=batch)
    settings = {
        "federation": federation,
        "rounds": 2,
        "cohort": 3,
        "local": Local(steps=3, batch_size=4, lr=0.2),
    } | changes
    setup = experiment(method, evaluation=on, **settings)
    data = to_device(setup.federation, torch.float64, "cpu")
    return Evaluator(make_plan(setup, data, "cpu"), data, on), run(setup)


def stacked_and_single(monkeypatch: pytest.MonkeyPatch, evaluator: Evaluator, result: RunResult) -> list[Any]:
    """The clients' evaluation with stacked models, and with one after the other; and that these were the ways."""
    stacks: list[int] = []
    stacked = passes._stacked_outputs

    def count_stack(*args: Any) -> tuple[Tensor, Tensor]:
        stacks.append(len(args[2]))
        return stacked(*args)

    monkeypatch.setattr(passes, "_stacked_outputs", count_stack)
    evaluations = []
    for size in (1000, 0):
        monkeypatch.setattr(passes, "SMALL", size)
        stacks.clear()
        evaluations.append(evaluator.clients(result.snapshot.server, result.snapshot.store))
        assert bool(stacks) == bool(size)
        assert not stacks or max(stacks) > 1 or evaluator.settings.batch_size < 10
    return evaluations


def assert_agree(evaluations: list[Any]) -> None:
    (record, table), (expected, rows) = evaluations
    assert record.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(record[key], value, atol=1e-10, err_msg=key)
    for key, column in rows.items():
        np.testing.assert_allclose(table[key], column, rtol=0, atol=1e-10, err_msg=key)
    np.testing.assert_array_equal(table["accuracy"], rows["accuracy"])


@pytest.mark.parametrize("relabelled", [False, True])
@pytest.mark.parametrize("batch_size", [1000, 6])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m if isinstance(m, str) else m.name)
def test_stacked_models_are_the_models(
    method: Method | str, batch_size: int, relabelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_agree(stacked_and_single(monkeypatch, *train(method, uneven(relabelled=relabelled), batch_size=batch_size)))


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
@pytest.mark.parametrize("method", ["fedper", "lg_fedavg", "superfed_lm"])
def test_convolutions_and_private_statistics_stack_too(method: str, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_agree(stacked_and_single(monkeypatch, *train(method, uneven(IMAGE), model=images(norm))))


def test_logits_are_equal_to_rounding() -> None:
    """Every client's logits, from models that have nothing in common, against the module itself."""
    evaluator, _ = train("ditto", uneven())
    layout, split = evaluator.plan.layout, evaluator.federation.held_out
    thetas = {c: torch.randn(layout.size, dtype=torch.float64) for c in range(6)}

    def fill(client: int, number: int, theta: Tensor, buffers: Tensor) -> None:
        theta.copy_(thetas[client] * (1 + number))

    members = [0, 2, 3, 4, 5]
    with torch.inference_mode():
        stacked, y = passes._stacked_outputs(evaluator, split, members, fill, (0, 0), 2, None)
        alone = [list(passes._client_outputs(evaluator, split, c, fill, (0, 0), 2, None)) for c in members]
    expected = torch.cat([logits for parts in alone for logits, _ in parts], 1)
    torch.testing.assert_close(stacked, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(y, torch.cat([targets for parts in alone for _, targets in parts]))
    evaluator.live.theta.copy_(2 * thetas[3])
    torch.testing.assert_close(alone[2][0][0][1], evaluator.live.module(split.client(3).x), rtol=1e-12, atol=1e-12)


def test_a_model_may_declare_that_it_cannot_be_stacked() -> None:
    class Alone(nn.Tanh):
        stackable = False

    def net() -> nn.Module:
        module = tanh_net()
        module.set_submodule("body.1", Alone())
        return module

    evaluator, _ = train("fedper", uneven(), model=net)
    assert not passes.stackable(evaluator)
    assert not passes.stacking_pays(evaluator, np.array([1, 2]), 8).any()
    plain_evaluator, _ = train("fedper", uneven())
    sizes = np.array([1, passes.SMALL, passes.SMALL + 1])
    assert passes.stacking_pays(plain_evaluator, sizes, 8).tolist() == [True, True, False]
    assert not passes.stacking_pays(plain_evaluator, np.array([1]), passes.LIGHT + 1).any()
    text = models.make("stacked_lstm", classes=5, inputs=(3,))
    assert any(getattr(module, "stackable", True) is False for module in text.modules())


def test_a_model_that_cannot_be_stacked_and_does_not_say_so_goes_alone() -> None:
    """Control flow on numbers stops a batched pass; the evaluation goes on one after the other, and gives the same."""

    class Branching(nn.Tanh):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input if float(input.detach().sum()) > -1e9 else -input)

    def net(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def make_net() -> nn.Module:
            module = tanh_net()
            module.set_submodule("body.1", layer())
            return module

        return make_net

    tables = []
    for layer in (Branching, nn.Tanh):
        evaluator, result = train("fedper", uneven(), model=net(layer))
        tables.append(evaluator.clients(result.snapshot.server, result.snapshot.store))
    assert_agree(tables)


@pytest.mark.parametrize("name", ["serial", "processes"])
@pytest.mark.parametrize("method", ["fedper", "lg_fedavg"])
def test_losses_before_work_are_those_of_the_clients_own_models(method: str, name: str) -> None:
    """F_i of the shared half with the client's own half; the initial one where it never took part."""
    evaluator, result = train(method, uneven())
    plan, server, store = evaluator.plan, result.snapshot.server, result.snapshot.store
    private = {client: state["personal"]["private"] for client, state in store}
    assert 0 < len(private) < 6
    engine = engines.make(name)(plan, Live)
    try:
        losses = engine.losses(server.broadcast(plan), np.arange(6), lambda client: store.get(client) or {})
    finally:
        engine.close()
    module, split = evaluator.live.module, plan.layout.shared_size
    for client in range(6):
        theta = torch.cat([server.theta, private.get(client, plan.theta0[split:])])
        plan.layout.write(module, theta, torch.zeros(0, dtype=torch.float64))
        data = evaluator.federation.train.client(client)
        with torch.no_grad():
            expected = nn.functional.cross_entropy(module(data.x), data.y)
        assert losses[client] == pytest.approx(float(expected), abs=1e-12)


def test_a_round_that_asks_for_losses_gets_those_of_the_clients_own_models() -> None:
    """What the record calls the global objective before a round's work, over all clients with their own heads."""
    on = Evaluation(what=("received",))
    settings = {"federation": uneven(), "local": Local(steps=3, batch_size=0, lr=0.2), "evaluation": on}
    record = run(experiment("fedper", rounds=2, **settings)).history[-1]
    evaluator, before = train("fedper", uneven(), rounds=1, cohort=6, local=settings["local"])
    plan, server, store = evaluator.plan, before.snapshot.server, before.snapshot.store
    engine = engines.make("serial")(plan, Live)
    losses = engine.losses(server.broadcast(plan), np.arange(6), lambda client: store.get(client) or {})
    weights = np.array(SIZES) / sum(SIZES)
    assert record["mixing/objective"] == pytest.approx(weights @ losses, abs=1e-12)
    initial = engine.losses(server.broadcast(plan), np.arange(6), lambda client: {})
    assert abs(weights @ initial - record["mixing/objective"]) > 1e-3

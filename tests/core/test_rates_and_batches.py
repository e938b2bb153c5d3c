"""Schedules of the learning rate, optimisers, rates by parameter, and how an epoch is cut into mini-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.runs import assert_same_state, experiment, go, theta
from torch import nn

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.core.local import Local
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.privacy import ExampleAccountant

SCHEDULED: dict[str, dict[str, Any]] = {
    "cosine": {"schedule": "cosine", "warmup": 2},
    "milestones": {"schedule": "milestones", "milestones": (1,), "lr_decay": 0.5},
    "own": {"schedule": lambda t: 1 / (1 + t)},
    "linear steps": {"step_schedule": "linear"},
    "cosine steps, momentum": {"step_schedule": "cosine", "momentum": 0.9},
    "warm-up of steps, Nesterov": {"step_schedule": "warmup", "momentum": 0.5, "nesterov": True},
    "own steps": {"step_schedule": lambda k, steps: 2.0 if k == 0 else 1.0},
    "half epochs": {"epochs": 1.5, "steps": None},
    "drop": {"last_batch": "drop", "epochs": 2},
    "merge": {"last_batch": "merge", "epochs": 2},
}


def slope(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss of which the gradient by a linear model's parameters does not depend on them."""
    return out[:, 0]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def constant(method: str, **settings: Any) -> tuple[Any, list[np.ndarray]]:
    """A round of full-batch training on that loss, and the clients' gradients [P], weights before biases."""
    federation = classes()
    local = Local(**{"steps": 5, "batch_size": 0, "lr": 0.1} | settings)
    result = fl.run(
        method, federation, linear, loss=slope, local=local, dtype="float64", rounds=1, compute="live",
        evaluation=fl.Evaluation(what=()),
    )  # fmt: skip
    gradients = []
    for client in range(6):
        x = federation.train.client(client).x.mean(0).numpy()
        gradients.append(np.concatenate([x, np.zeros(8), [1.0, 0, 0]]))
    return result, gradients


@pytest.mark.parametrize("settings", SCHEDULED.values(), ids=SCHEDULED)
def test_control_variates_are_the_gradients_under_every_schedule(settings: dict[str, Any]) -> None:
    """Along a constant gradient the displacement over η‖a‖₁ is the gradient: SCAFFOLD's c_i from steps of varying η."""
    result, gradients = constant("scaffold", **settings)
    for client, expected in enumerate(gradients):
        np.testing.assert_allclose(result.snapshot.store.get(client)["drift"]["c"], expected, atol=1e-12)


def test_steps_in_which_shared_parameters_rest_do_not_count() -> None:
    """FedRep's head moves first, one of three steps; what moves the body after it has the later factors."""
    plan = FederatedTask(experiment("fedrep", local=Local(steps=3, step_schedule="linear"))).plan
    moving = [k for k, views in enumerate(plan.usual_views(3)) if any(view.shared for view in views)]
    assert 0 < len(moving) < 3
    assert plan.effective_steps(3) == pytest.approx(sum(1 - k / 3 for k in moving))


@pytest.mark.parametrize("settings", SCHEDULED.values(), ids=SCHEDULED)
def test_fednova_normalises_by_what_the_steps_moved(settings: dict[str, Any]) -> None:
    """θ moves by η_0 (Σ p_i ‖a_i‖₁) Σ p_i g_i along constant gradients."""
    result, gradients = constant("fednova", **settings)
    start = theta(fl.run("fedavg", classes(), linear, loss=slope, dtype="float64", rounds=0))
    horizon = {"horizon": 1} if settings.get("schedule") == "cosine" else {}
    local = Local(**{"steps": 5, "batch_size": 0, "lr": 0.1} | horizon | settings)
    sizes = classes().train.index.sizes
    p = sizes / sizes.sum()
    effective = np.array([local.effective_steps(local.steps_for(int(n))) for n in sizes])
    moved = local.rate(0) * float(p @ effective) * (p @ np.stack(gradients))
    np.testing.assert_allclose(start - theta(result), moved, atol=1e-12)


@pytest.mark.parametrize("settings", SCHEDULED.values(), ids=SCHEDULED)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn", "fedper", "superfed_mm", "ditto"])
def test_batched_is_live_under_every_schedule(method: str, settings: dict[str, Any]) -> None:
    local = Local(**{"steps": 3, "batch_size": 4, "lr": 0.1} | settings)
    results = [go(method, local=local, compute=compute, rounds=2) for compute in ("live", "batched")]
    assert_same_state(*(result.snapshot for result in results), 1e-10)


OPTIMISERS: dict[str, tuple[dict[str, Any], Any]] = {
    "adamw": (
        {"optimiser": "adamw", "weight_decay": 0.3},
        lambda net: torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.3),
    ),
    "rates": (
        {"momentum": 0.5, "weight_decay": 0.2, "rates": {"weight": 0.5, "bias": 3.0}},
        lambda net: torch.optim.SGD(
            [{"params": [net.weight], "lr": 0.05}, {"params": [net.bias], "lr": 0.3}], momentum=0.5, weight_decay=0.2
        ),
    ),
}


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers_are_those_of_pytorch(name: str, compute: str) -> None:
    settings, make = OPTIMISERS[name]
    federation, net = classes((9,)), linear().double()
    optimiser, samples = make(net), federation.train.client(0)
    local = Local(steps=4, batch_size=0, lr=0.1, **settings)
    result = fl.run("fedavg", federation, linear, local=local, dtype="float64", rounds=1, compute=compute)
    for _ in range(4):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(samples.x), samples.y).backward()
        optimiser.step()
    expected = torch.cat([net.weight.detach().flatten(), net.bias.detach()])
    np.testing.assert_allclose(theta(result), expected, atol=1e-12)


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("method", ["fedper", "ditto", "superfed_mm"])
def test_rates_hold_for_private_parameters_and_second_models(method: str, compute: str) -> None:
    """All parameters at twice the rate is twice the rate; a rate that moves nothing leaves its parameters."""
    twice = go(method, local=Local(steps=3, batch_size=4, lr=0.1, rates={"": 2.0}), compute=compute)
    fast = go(method, local=Local(steps=3, batch_size=4, lr=0.2), compute=compute)
    if method != "ditto":  # whose personal rate is its own
        assert_same_state(twice.snapshot, fast.snapshot, 1e-12)
    still = go(method, local=Local(steps=3, batch_size=4, lr=0.1, rates={"head": 1e-300}), compute=compute)
    start = go(method, rounds=0).trained
    for client in range(6):
        head, first_head = still.trained.client(client).module.head, start.client(client).module.head
        assert torch.allclose(head.weight, first_head.weight, rtol=0, atol=1e-15)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedprox", "ditto", "moon"])
def test_accumulated_gradients_are_those_of_the_batch(method: str) -> None:
    results = [go(method, local=Local(epochs=2, batch_size=7, lr=0.1, micro_batch=size)) for size in (None, 3)]
    assert_same_state(*(result.snapshot for result in results), 1e-12)


def test_batches_that_are_whole_alone_are_not_cut() -> None:
    with pytest.raises(ConfigError, match=r"local\.micro_batch cuts mini-batches, which 'maml' takes whole"):
        experiment("per_fedavg", local=Local(micro_batch=2))
    with pytest.raises(ConfigError, match=r"needs local training by sgd, without local\.rates"):
        experiment("scaffold", local=Local(rates={"head": 2.0}))
    with pytest.raises(ConfigError, match=r"local\.rates names 'haed', but no parameter has such a name"):
        go(local=Local(rates={"haed": 2.0}))


def test_a_last_batch_of_one_does_not_cost_the_client_with_batch_normalisation() -> None:
    def trained(how: str) -> Any:
        local = Local(batch_size=4, last_batch=how)
        return go(
            federation=classes((9, 8)),
            model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)),
            local=local,
            rounds=1,
        )

    assert {failure.client for failure in trained("keep").failures} == {0}
    for how in ("merge", "drop"):
        assert not trained(how).failures


def test_fractions_of_epochs_are_their_first_batches() -> None:
    rows = np.arange(10)
    epoch = Local(batch_size=3).batches(rows, 0, 0, 0)
    half = Local(batch_size=3, epochs=0.5).batches(rows, 0, 0, 0)
    more = Local(batch_size=3, epochs=1.25).batches(rows, 0, 0, 0)
    assert [len(epoch), len(half), len(more)] == [4, 2, 5]
    for a, b in ((epoch, half), (more, epoch)):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=False))
    assert Local(batch_size=3, epochs=0.01).steps_for(10) == 1


def test_a_cosine_goes_to_the_last_round_of_the_run(tmp_path: Any) -> None:
    shorter = experiment(local=Local(schedule="cosine", lr=0.1), rounds=4)
    assert shorter.local == Local(schedule="cosine", lr=0.1, horizon=4)
    for horizon, changed in ((None, ["local.horizon: 4 → 8"]), (4, None)):
        out = tmp_path / str(horizon)
        run(shorter, out)
        longer = experiment(local=Local(schedule="cosine", lr=0.1, horizon=horizon), rounds=8)
        assert run(longer, out, resume=True).history[4].get("changed") == changed  # told, where it changes


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"schedule": "cosin"}, "local.schedule is 'cosin'; did you mean 'cosine'"),
    ({"step_schedule": "steps"}, "local.step_schedule is 'steps'"),
    ({"milestones": (3,)}, "milestones are used by schedule=milestones"),
    ({"lr_end": 0.1}, "horizon and lr_end are used by schedule=cosine"),
    ({"rates": {"head": 0.0}}, "rates must be a finite number greater than 0"),
    ({"optimiser": "adamw", "momentum": 0.5}, "momentum belongs to sgd"),
])  # fmt: skip
def test_settings_that_would_do_nothing_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Local(**settings)


def test_functions_of_ones_own_return_factors() -> None:
    with pytest.raises(ConfigError, match=r"schedule returned 0 for round 3, but it must be a finite number"):
        Local(schedule=lambda t: 0).rate(3)
    with pytest.raises(ConfigError, match=r"step_schedule returned 'x' for step 0 of 2"):
        Local(step_schedule=lambda k, steps: "x").speeds(2)


def test_dropped_batches_are_counted_as_passes_over_the_data() -> None:
    """Three epochs of two batches are three passes for the accountant, though n/B rounds up to three batches."""
    local = Local(epochs=3, batch_size=2, last_batch="drop", dp_clip=1.0, dp_noise=1.0)
    accountant = ExampleAccountant.of(local, 5, 1e-5)
    assert accountant is not None
    assert accountant.times == 3

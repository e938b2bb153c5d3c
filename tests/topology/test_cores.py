"""APPLE: clients hear the models of others, and train their own and the weights of all in a combination of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_state, experiment, go
from torch import Tensor

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.base.tree import Tree
from fedloom.core.context import NO_ROUND, Context, Heard
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.federated import RunResult, run
from fedloom.methods import make
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import Combined
from fedloom.parts.topology import Cores, OwnModel

CLIENTS = 6
LIMITED: dict[str, Any] = {"rate": 0.2, "models": 2}


def models(result: RunResult) -> Tensor:
    """w_i of all clients, [K, P]."""
    server = result.snapshot.server
    return torch.stack([server.model(client).theta for client in range(CLIENTS)])


def weights(result: RunResult, clients: int) -> np.ndarray:
    """p [K, K]."""
    states = dict(result.snapshot.store)
    return np.stack([states[client]["personal"]["weights"].numpy() for client in range(clients)])


def composition(personal: Combined, **settings: Any) -> Method:
    return Method("composed", (CrossEntropy(),), personal=personal, topology=Cores(**settings))


@dataclass(frozen=True)
class OneHot(Combined):
    """p_i = e_i."""

    def begin(self, ctx: Context) -> Tree:
        assert ctx.heard is not None
        one_hot = torch.arange(CLIENTS) == ctx.heard.number
        return super().begin(ctx) | {"weights": one_hot.to(ctx.received)}


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_all_weight_on_the_own_model_is_local_training(compute: str) -> None:
    same: dict[str, Any] = {"compute": compute, "cohort": 4, "local": Local(epochs=2, batch_size=4, momentum=0.5)}
    alone = go(Method("own", (CrossEntropy(),), topology=OwnModel()), **same)
    torch.testing.assert_close(models(go(composition(OneHot(rate=0.0)), **same)), models(alone), rtol=0, atol=1e-15)


def test_the_steps_of_all_cores_from_one_model_are_the_step_of_their_mean() -> None:
    """With p⁰ and one step from equal models x_i = θ⁰ at all clients, Σ_i (w_i - θ⁰) = -η Σ_i p⁰_i ∇F_i(θ⁰)."""
    same: dict[str, Any] = {"local": Local(steps=1, batch_size=0, lr=0.2), "rounds": 1}
    result, usual = go(composition(Combined(rate=0.0)), **same), go("fedavg", **same)
    start = result.trained.plan.theta0
    moved = (models(result) - start).sum(0)
    torch.testing.assert_close(moved, usual.snapshot.server.theta - start, rtol=0, atol=1e-14)
    shares = result.trained.plan.population.sizes / result.trained.plan.population.sizes.sum()
    np.testing.assert_allclose(weights(result, CLIENTS), np.tile(shares, (CLIENTS, 1)), rtol=1e-15)


def test_chain_is_the_gradient_of_the_combination() -> None:
    draw = torch.Generator().manual_seed(0)
    w, a, b, c = (torch.randn(5, generator=draw, dtype=torch.float64) for _ in range(4))
    p, shares = torch.tensor([0.5, -0.2, 0.9], dtype=torch.float64), torch.full((3,), 1 / 3, dtype=torch.float64)
    part = Combined(rate=0.1, mu=0.4, span=0.5)
    facts = NO_ROUND.facts._replace(rounds=8)
    ctx = NO_ROUND._replace(heard=Heard(1, {0: a, 2: b}, shares), received=w, round=2, facts=facts)
    ctx = ctx._replace(local=part.begin(ctx) | {"weights": p})

    def value(core: Tensor, at: Tensor) -> Tensor:
        return torch.cos(at @ torch.stack([a, core, b])) @ c + part.pull(2, 8) / 2 * (at - shares).square().sum()

    grad = -torch.sin(part.point(w, ctx)) * c
    local, by_w = part.chain(grad, w, ctx)
    expected = torch.func.grad(value, (0, 1))(w, p)
    torch.testing.assert_close(by_w, expected[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(local["weights"], p - 0.1 * expected[1], rtol=0, atol=1e-14)
    assert part.pull(2, 8) == pytest.approx(0.4 * 1e-3**0.5)


@pytest.mark.parametrize(("count", "sent"), [(None, 5), (2, 2), (9, 5)])
def test_every_model_that_a_client_hears_is_a_download(count: int | None, sent: int) -> None:
    result = go(composition(Combined(), models=count), rounds=2, cohort=4)
    usual = go("fedavg", rounds=2, cohort=4)
    size = len(usual.snapshot.server.theta)
    more = result.history[-1]["comm/bytes"] - usual.history[-1]["comm/bytes"]
    assert more == 2 * 4 * 8 * (sent * size + CLIENTS)


def test_whoever_drops_out_keeps_its_weights_and_its_model() -> None:
    same: dict[str, Any] = {"cohort": 3, "drop_rate": 0.3, "seed": 2}
    two, three = (go(make("apple", **LIMITED), rounds=rounds, **same) for rounds in (2, 3))
    before, after = (dict(result.snapshot.store) for result in (two, three))
    (here, there), moved = (models(two), models(three)), [c for c in after if after[c] is not before.get(c)]
    same_state = [c for c in before if torch.equal(before[c]["personal"]["weights"], after[c]["personal"]["weights"])]
    assert same_state, moved
    for client in range(CLIENTS):
        assert torch.equal(here[client], there[client]) == (client in same_state or client not in after)


class AfterTwo(Callback):
    def should_stop(self, history: Sequence[Mapping[str, Any]]) -> str | None:
        return "two rounds" if len(history) == 2 else None


def test_batched_is_live_and_a_run_on_disk_in_processes_goes_on_with_the_same_bits(tmp_path: Any) -> None:
    method, same = make("apple", **LIMITED), {"cohort": 4, "rounds": 3}
    once = go(method, **same)
    assert_same_state(go(method, compute="batched", **same).snapshot, once.snapshot, 1e-13)
    changed: dict[str, Any] = {"client_state": "disk", "engine": "processes"}
    run(experiment(method, **same), tmp_path / "a", callbacks=[AfterTwo()])
    again = run(experiment(method, **same, **changed), tmp_path / "a", resume=True)
    assert_same_state(again.snapshot, once.snapshot)


def test_a_client_deploys_the_combination_that_it_trained() -> None:
    result = go(make("apple", rate=0.2), local=Local(epochs=2, batch_size=4, lr=0.2), rounds=1)
    start, p, after = result.trained.plan.theta0, weights(result, CLIENTS), models(result)
    for client in range(CLIENTS):
        mixed = p[client, client] * after[client] + (p[client].sum() - p[client, client]) * start
        used = torch.cat([value.flatten() for value in result.trained.client(client).module.parameters()])
        torch.testing.assert_close(used, mixed, rtol=0, atol=1e-14)


@dataclass(frozen=True)
class Echo(Cores):
    """A client hears itself."""

    def heard(self, number: int, models: int, draws: np.random.Generator) -> np.ndarray:
        return np.array([number])


def test_a_model_beside_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="must name other models than 0, each once, of 6"):
        go(replace(make("apple"), topology=Echo()))


def test_weights_tell_two_groups_of_clients_apart() -> None:
    """Labels are swapped at every second client: their models help those with the same labels, and hurt the others."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((240, 4)).astype(np.float32)
    swapped = np.arange(240) // 40 % 2
    y = (x[:, 0] > 0).astype(np.int64) ^ swapped
    federation = fl.data.federate((x, y), [np.arange(n * 40, n * 40 + 40) for n in range(CLIENTS)])
    method = make("apple", rate=0.02, mu=0.0)
    result = fl.run(
        method, federation, lambda: torch.nn.Linear(4, 2), rounds=12, local=Local(epochs=2, lr=0.5), engine="serial"
    )
    p, group = weights(result, CLIENTS), np.arange(CLIENTS) % 2
    alike = (group[:, None] == group) & ~np.eye(CLIENTS, dtype=bool)
    other = group[:, None] != group
    assert p[alike].min() > p[other].max() + 0.1, p.round(2)

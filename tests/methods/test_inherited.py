"""FedPHP: the models of a client's past, which it deploys and learns from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.networks import tanh_net, with_norm
from helpers.runs import go, theta
from torch import nn

import fedloom as fl
from fedloom.base.errors import ClientError, ConfigError
from fedloom.core.context import NO_ROUND, Batch, Output
from fedloom.core.local import Local
from fedloom.core.parts import Personal
from fedloom.methods import make
from fedloom.parts.mixing import QFFL
from fedloom.parts.objectives import Inheritance
from fedloom.parts.objectives.inheritance import _discrepancy

LOCAL = Local(epochs=2, batch_size=4, lr=0.2, momentum=0.8, weight_decay=0.01)
SAME: dict[str, Any] = {"local": LOCAL, "cohort": 4, "rounds": 4, "seed": 3}


def test_without_lambda_the_server_has_the_model_of_federated_averaging() -> None:
    """To the last bit; with λ it has another."""
    usual = theta(go("fedavg", **SAME))
    assert np.array_equal(theta(go(make("fedphp", lam=0.0), **SAME)), usual)
    for by in ("outputs", "features"):
        assert np.abs(theta(go(make("fedphp", lam=1.0, by=by), **SAME)) - usual).max() > 1e-3


def test_a_client_deploys_the_average_of_its_models() -> None:
    """Of one visit that is its model."""
    result = go(make("fedphp", mu=0.8), **SAME)
    weights = set()
    for client in range(6):
        module, state = result.trained.client(client).module, result.snapshot.store.get(client)
        deployed_model = torch.cat([p.detach().flatten() for p in module.parameters()])
        if state is None:
            assert torch.equal(deployed_model, result.snapshot.server.theta)
            continue
        w, past, last = (state["personal"][name] for name in ("weight", "history", "private"))
        weights.add(round(float(w), 12))
        torch.testing.assert_close(deployed_model, w * past + (1 - w) * last, rtol=0, atol=1e-14)
    assert 0.6 in weights, "0.8 · 3/4 in the fourth round"
    once = go(make("fedphp", mu=0.8), **SAME | {"rounds": 1})
    for client, state in once.snapshot.store:
        module = once.trained.client(client).module
        deployed_model = torch.cat([p.detach().flatten() for p in module.parameters()])
        torch.testing.assert_close(deployed_model, state["personal"]["private"], rtol=0, atol=0)


def test_the_first_step_from_ones_own_history_is_not_pulled() -> None:
    """At a first visit the received model is the history, and learning from it changes nothing until one has moved."""
    once: dict[str, Any] = {"local": Local(steps=1, batch_size=6, lr=0.2), "rounds": 1}
    for by in ("outputs", "features"):
        pulled = go(make("fedphp", lam=3.0, by=by), **once)
        np.testing.assert_allclose(theta(pulled), theta(go("fedavg", **once)), rtol=0, atol=1e-14)


def test_losses_of_what_was_received_are_without_the_term() -> None:
    """There no client has a history."""
    assert not go(replace(make("fedphp"), mixing=QFFL()), rounds=1).failures


def test_a_discrepancy_of_features_is_that_of_whole_mini_batches() -> None:
    local = Local(batch_size=6, micro_batch=2)
    assert not go(make("fedphp"), local=local, rounds=1).failures
    with pytest.raises(ConfigError, match=r"local\.micro_batch cuts mini-batches, which 'inheritance' takes whole"):
        go(make("fedphp", by="features"), local=local, rounds=1)


def test_rows_that_a_mask_leaves_out_are_not_compared() -> None:
    now, past = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(rows: int, mask: torch.Tensor | None) -> torch.Tensor:
        old = Output(past[:rows], features=past[:rows])
        out = Output(now[:rows], features=now[:rows], at=lambda theta: old)
        batch = Batch(now[:rows], torch.zeros(rows), mask)
        return Inheritance(by="features").loss(out, batch, NO_ROUND._replace(own={"history": past}))

    torch.testing.assert_close(loss(5, torch.tensor([1.0, 1, 1, 0, 0])), loss(3, None), rtol=1e-14, atol=0)


def test_batch_statistics_are_the_received_ones() -> None:
    result = go("fedphp", model=lambda: with_norm(tanh_net(), nn.BatchNorm1d), rounds=1)
    received = result.snapshot.server.buffers
    assert received[:3].any()
    for client in range(6):
        norm = result.trained.client(client).module.get_submodule("body.1")
        assert torch.equal(norm.running_mean, received[:3])  # type: ignore[arg-type]


def test_a_term_that_looks_for_a_history_says_that_there_is_none() -> None:
    with pytest.raises(ClientError, match=r"learns from a historical model .* set personal=inherited"):
        go(replace(make("fedphp"), personal=Personal()), rounds=1)


@pytest.mark.exhaustive
def test_it_learns_what_clients_need() -> None:
    """Two classes a client: what they deploy is far better than the mean."""
    federation = fl.data.federate("digits", "pathological", clients=10, held_out=0.2)
    local = Local(epochs=2, lr=0.1, batch_size=20)
    for by in ("outputs", "features"):
        result = fl.run(make("fedphp", by=by), federation, "mlp", rounds=6, local=local, engine="serial")
        assert result.history[-1]["clients/accuracy/mean"] > 0.9
        assert result.history[-1]["clients/accuracy/mean"] > result.history[-1]["global/accuracy"] + 0.1


def test_curvature_of_the_discrepancy_does_not_depend_on_how_equal_rows_are_rounded() -> None:
    """MAML differentiates it twice, also where the historical model is the received one."""
    rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    at, near = (
        torch.autograd.functional.hessian(lambda b: _discrepancy(rows, b, torch.ones(8, dtype=b.dtype)), rows + step)
        for step in (0.0, 1e-8)
    )
    assert torch.allclose(at, near, rtol=0, atol=1e-6)

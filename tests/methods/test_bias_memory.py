"""FedDBE: a vector of the client's own beside its features, and features whose mean stays near a consensus."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.networks import headless, tanh_net
from helpers.runs import experiment, go, theta

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.core.local import Local
from fedloom.experiment.federated import RunResult
from fedloom.methods import make

LOCAL: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.2, "momentum": 0.8, "weight_decay": 0.01}


def test_without_the_term_and_with_a_memory_that_stays_0_it_is_federated_averaging() -> None:
    same: dict[str, Any] = {"cohort": 4, "rounds": 3, "seed": 3}
    still = go(make("feddbe", kappa=0.0), local=Local(**LOCAL, rates={"head.memory": 1e-300}), **same)
    usual = go("fedavg", local=Local(**LOCAL), **same)
    np.testing.assert_allclose(theta(still), theta(usual), rtol=0, atol=1e-13)
    moved = go(make("feddbe", kappa=0.0), local=Local(**LOCAL), **same)
    assert np.abs(theta(moved) - theta(usual)).max() > 1e-3


def means(result: RunResult) -> torch.Tensor:
    """Every client's mean feature in the server's model, [K, d]."""
    task, module = experiment("feddbe"), tanh_net().double()
    values = torch.from_numpy(theta(result))
    torch.nn.utils.vector_to_parameters(values, module.parameters())
    split = task.federation.train
    with torch.no_grad():
        return torch.stack(
            [module.features(split.arrays.x[torch.from_numpy(rows)]).mean(0) for rows in split.index]  # type: ignore[operator]
        )


def test_the_consensus_is_that_of_the_first_round_and_draws_mean_features_near() -> None:
    full_batch = Local(steps=4, batch_size=0, lr=0.05)
    first, later = (go(make("feddbe", kappa=10.0), rounds=n, local=full_batch) for n in (1, 6))
    consensus = first.snapshot.server.parts["objective.1"]["consensus"]
    assert torch.equal(later.snapshot.server.parts["objective.1"]["consensus"], consensus)
    free = go(make("feddbe", kappa=0.0), rounds=6, local=full_batch)
    near, far = ((means(run) - consensus).square().sum(1).mean() for run in (later, free))
    assert near < 0.5 * far


def test_a_client_deploys_its_own_memory() -> None:
    result = go("feddbe", cohort=3, rounds=1)
    x = experiment().federation.test.x
    deployed, store = [result.trained.client(i).module for i in range(6)], result.snapshot.store
    for client, module in enumerate(deployed):
        state = store.get(client)
        b = torch.zeros(3, dtype=torch.float64) if state is None else state["personal"]["private"]
        expected = module.head.linear(module.features(x) + b)  # type: ignore[operator,union-attr]
        torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-14)
        assert torch.equal(module.features(x), deployed[0].features(x))  # type: ignore[operator]
        assert bool(b.any()) == (state is not None)


def test_a_model_without_a_linear_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bias_memory.* Linear has none; wrap the module, like fedloom\.wrap"):
        go("feddbe", model=headless)


@pytest.mark.exhaustive
def test_it_learns_what_clients_need() -> None:
    """Two classes a client: the shared features and a vector of one's own are far better than one model for all."""
    federation = fl.data.federate("digits", "pathological", clients=10, held_out=0.2)
    local = Local(epochs=2, lr=0.1, batch_size=20)
    records = {
        name: fl.run(name, federation, "mlp", rounds=6, local=local, engine="serial").history[-1]
        for name in ("fedavg", "feddbe")
    }
    assert records["feddbe"]["clients/accuracy/mean"] > records["fedavg"]["clients/accuracy/mean"] + 0.03, records
    assert records["feddbe"]["clients/accuracy/mean"] > 0.8, records

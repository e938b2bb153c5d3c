"""pFedGraph: models mixed by a graph between the extremes of one model for all and one for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import go
from torch import Tensor

import fedloom as fl
from fedloom.core.context import NO_ROUND, Meeting
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.slots import topologies
from fedloom.experiment.federated import RunResult
from fedloom.methods import make
from fedloom.parts.objectives import CosinePull, CrossEntropy
from fedloom.parts.topology import Collaboration, OwnModel

SAME: dict[str, Any] = {"local": Local(epochs=2, batch_size=4, lr=0.2), "rounds": 3}


def models(result: RunResult) -> Tensor:
    """θ_i of all clients, [K, P]."""
    server = result.snapshot.server
    assert server.models is not None
    return torch.stack([server.models.get(client).theta for client in range(6)])


def test_between_federated_averaging_and_local_training() -> None:
    """α → ∞: the shares of samples; α → 0: nobody is as similar as oneself."""
    fedavg = go("fedavg", **SAME).snapshot.server.theta
    alike = models(go(make("pfedgraph", lam=0.0, alpha=1e13), **SAME))
    torch.testing.assert_close(alike, fedavg.expand_as(alike), rtol=0, atol=1e-12)
    alone = models(go(Method("own", (CrossEntropy(),), topology=OwnModel()), **SAME, cohort=4))
    near = models(go(Method("near", (CrossEntropy(),), topology=Collaboration(alpha=1e-12)), **SAME, cohort=4))
    torch.testing.assert_close(near, alone, rtol=0, atol=1e-12)


def collaboration(*theta: Tensor) -> list[float]:
    """B of clients with these models, row by row, which all began at the first."""
    meeting = Meeting(*[None] * len(Meeting._fields))._replace(  # type: ignore[arg-type]
        active=np.arange(len(theta)), uniform=True, receivers=np.ones(len(theta)), theta=lambda n: theta[n],
        received=lambda n: theta[0],
    )  # fmt: skip
    part = Collaboration()
    state, links = part.between(part.init_server(theta[0], meeting.facts), meeting)
    start = theta[0].tolist()
    theta[0].zero_()  # whoever holds the models goes on with them
    assert state["first"].tolist() == start
    return links.matrix(len(theta)).flatten().tolist()


def test_models_that_have_not_moved_are_like_no_other() -> None:
    assert collaboration(torch.ones(3), torch.ones(3)) == [0.5] * 4


def test_models_beyond_all_numbers_are_like_no_other() -> None:
    far = torch.full((3,), 1e200, dtype=torch.float64)
    assert collaboration(torch.ones(3, dtype=torch.float64), far) == [0.5] * 4


@pytest.mark.parametrize("name", ["ring", "complete", "attention", "collaboration", "first_order"])
def test_a_round_in_which_nobody_is_there_changes_no_model(name: str) -> None:
    method = Method("drawn", (CrossEntropy(),), topology=topologies.make(name))
    result = go(method, cohort=1, drop_rate=0.9, rounds=1)
    assert (result.history[0]["cohort"], result.history[0]["failures"]) == (1, 1)
    first = go(method, rounds=0).snapshot.server.theta
    assert torch.equal(models(result), first.expand(6, -1))


def test_the_cosine_turns_a_model_without_stretching_it() -> None:
    draw = torch.Generator().manual_seed(0)
    w, received, zero = (torch.randn(9, generator=draw, dtype=torch.float64) for _ in range(3))
    ctx = NO_ROUND._replace(received=received)

    def value(at: Tensor) -> Tensor:
        return 0.3 * (1 - torch.nn.functional.cosine_similarity(at, received, dim=0))

    pull = CosinePull(0.3).grad(torch.zeros_like(w), w, ctx)
    torch.testing.assert_close(pull, torch.func.grad(value)(w), rtol=0, atol=1e-14)
    assert abs(float(pull @ w)) < 1e-14
    for at, to in ((2 * received, received), (zero * 0, received), (w, zero * 0)):
        assert CosinePull(0.3).grad(torch.zeros_like(w), at, ctx._replace(received=to)).abs().max() < 1e-15


@pytest.mark.exhaustive
def test_it_learns_what_clients_need() -> None:
    """Two classes a client: mixtures of similar models are far better than the mean."""
    federation = fl.data.federate("digits", "pathological", clients=10, held_out=0.2)
    local = Local(epochs=2, lr=0.1, batch_size=20)
    records = {
        name: fl.run(name, federation, "mlp", rounds=6, local=local, engine="serial").history[-1]
        for name in ("fedavg", "pfedgraph")
    }
    assert records["pfedgraph"]["clients/accuracy/mean"] > records["fedavg"]["clients/accuracy/mean"] + 0.05, records
    assert records["pfedgraph"]["clients/accuracy/mean"] > 0.8, records

"""A server that sends another point than the model that it keeps: FedACG."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.runs import assert_same_state, go
from torch import Tensor

from fedloom.core.context import Context, Model
from fedloom.core.local import Local
from fedloom.core.parts import ClientEnd, Drift, Needs, Tree
from fedloom.experiment.federated import RunResult
from fedloom.methods import fedacg, fedgamma, fedprox, scaffold
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.mixing import Uniform
from fedloom.parts.server import SGD, Accelerated
from fedloom.parts.topology import Cores
from fedloom.timing import Buffered, Lognormal

PLACES = {"cohort": 4, "rounds": 4, "drop_rate": 0.1, "local": Local(epochs=2, batch_size=4, lr=0.3, clip=0.9)}
PROXIMAL = replace(fedprox(mu=0.2), mixing=Uniform())
BUFFERED = {"rounds": 6, "schedule": Buffered(2), "devices": Lognormal(sigma=1.5, memory=1e9)}


def broadcast_model(result: RunResult) -> Tensor:
    """What the clients of the next round would receive."""
    return result.snapshot.server.broadcast(result.trained.plan).theta


def test_without_momentum_fedacg_is_fedprox_with_the_plain_mean() -> None:
    a, b = go(fedacg(mu=0.2, momentum=0.0), **PLACES), go(replace(PROXIMAL, server=SGD()), **PLACES)
    assert_same_state(a.snapshot, b.snapshot)


def test_without_a_step_uphill_fedgamma_is_scaffold() -> None:
    a, b = go(fedgamma(rho=0.0), **PLACES), go(scaffold(), **PLACES)
    assert_same_state(a.snapshot, b.snapshot, 1e-13)


@pytest.mark.parametrize("where", [PLACES, BUFFERED], ids=["rounds", "buffered"])
@pytest.mark.parametrize("drift", [Drift(), FedDynDrift(0.3)], ids=["none", "dynamic"])
def test_clients_receive_the_models_of_nesterovs_momentum(drift: Drift, where: dict[str, Any]) -> None:
    """Whatever else a method does, and however stale; what is kept is the point before the momentum."""
    method = replace(PROXIMAL, drift=drift)
    far = go(replace(method, server=SGD(0.7, 0.6, nesterov=True)), **where)
    ahead = go(replace(method, server=Accelerated(0.7, 0.6)), **where)
    torch.testing.assert_close(broadcast_model(ahead), far.snapshot.server.theta, rtol=0, atol=1e-13)
    m = ahead.snapshot.server.parts["server"]["m"]
    torch.testing.assert_close(ahead.snapshot.server.theta, broadcast_model(ahead) + 0.7 * 0.6 * m, rtol=0, atol=1e-13)
    assert (broadcast_model(ahead) - ahead.snapshot.server.theta).abs().max() > 1e-2


RECORDS: list[tuple[Context, Tensor]] = []


class Noted(Drift):
    """Notes what a client sees, and the model that it trained."""

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        RECORDS.append((ctx, ctx.received - update))
        return ClientEnd(ctx.state, {}, update)


class Hearing(Noted):
    needs = Needs(heard=True)


def test_the_model_is_the_plain_mean_of_the_clients_models() -> None:
    """As the authors' code has it, for η = 1."""
    RECORDS.clear()
    result = go(replace(fedacg(), drift=Noted()), rounds=3)
    models = [model for ctx, model in RECORDS if ctx.round == 2]
    torch.testing.assert_close(result.snapshot.server.theta, torch.stack(models).mean(0), rtol=0, atol=1e-13)


def test_what_clients_hear_of_others_is_what_those_receive() -> None:
    RECORDS.clear()
    go(replace(fedacg(), drift=Hearing(), topology=Cores()), rounds=3)
    received = {(ctx.round, ctx.client): ctx.received for ctx, _ in RECORDS}
    for ctx, _ in RECORDS:
        assert ctx.heard is not None
        for other, theta in ctx.heard.models.items():
            assert torch.equal(theta, received[ctx.round, other])


class InPlace(Accelerated):
    """Writes what is sent over the model that it is given."""

    def broadcast(self, state: Tree, theta: Tensor) -> Tensor:
        return theta.sub_(self.lr * self.momentum * state["m"])


def test_what_is_sent_may_be_written_over_the_model_that_a_part_is_given() -> None:
    a, b = (go(replace(PROXIMAL, server=server(0.7, 0.6)), **PLACES) for server in (Accelerated, InPlace))
    assert_same_state(a.snapshot, b.snapshot)

"""What parts may ask of a round: losses before local work, all updates at once, reductions; and aborted rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers.federations import SIZES, classes
from helpers.networks import headless, tanh_net
from helpers.runs import assert_same_state, experiment, go, theta
from helpers.trouble import with_marked_client

from fedloom.base.errors import ConfigError
from fedloom.base.tree import Tree
from fedloom.compute.live import Live
from fedloom.core.context import Context, Model, RoundInfo
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import ClientEnd, Drift, Halves, Mixing, Needs, Reduce
from fedloom.engines import Serial
from fedloom.experiment.federated import FederatedTask, run
from fedloom.parts.drift import FedDynDrift, Scaffold
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy, Proximal
from fedloom.parts.personal import LocalOnly
from fedloom.parts.server import Extrapolated
from fedloom.rounds.round import federated_round

ENGINES = ["serial", "processes"]
LOSS = (CrossEntropy(),)


@dataclass(frozen=True)
class ByLoss(Mixing):
    """Coefficients in proportion to the losses of the received model."""

    needs = Needs(losses="train")

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        assert info.losses is not None
        past_losses = state.get("losses", torch.zeros(0, dtype=torch.float64))
        record = {"losses": torch.cat([past_losses, torch.tensor(info.losses)])}
        return record, info.losses / info.losses.sum()


@dataclass(frozen=True)
class Waits(Mixing):
    """By samples, but only when all updates are there."""

    needs = Needs(updates=True)

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        assert len(info.updates) == len(info.cohort) == len(info.samples)
        assert all(update.shape == info.received.shape for update in info.updates)
        return state, info.samples / info.samples.sum()


@dataclass(frozen=True)
class Favourite(Mixing):
    """All weight on client 2."""

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        return state, (info.cohort == 2).astype(float)


@dataclass(frozen=True)
class Probe(Drift):
    """Uploads its client's relative size in every way there is, and keeps what comes of it."""

    uploads: ClassVar[Mapping[str, Reduce]] = {how.value: how for how in Reduce} | {"update": Reduce.SHARE}

    def end(self, ctx: Context, update: torch.Tensor, model: Model) -> ClientEnd:
        value = torch.as_tensor(ctx.relative_size, dtype=torch.float64).reshape(1)
        return ClientEnd({}, {how.value: value for how in Reduce}, update)

    def correct(self, state: Tree, update: torch.Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return uploads | {"share of update": uploads["update"], "update": update}, update


def initial_losses() -> np.ndarray:
    """F_i(θ⁰) by plain PyTorch."""
    federation, model = classes(), tanh_net().double()
    arrays = federation.train.arrays
    losses = []
    for client in range(len(federation)):
        rows = federation.train.index[client]
        with torch.no_grad():
            losses.append(float(torch.nn.functional.cross_entropy(model(arrays.x[rows]), arrays.y[rows])))
    return np.array(losses)


# --- what parts may ask for ------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("drift", [Drift(), Scaffold(), FedDynDrift(0.1)], ids=["none", "scaffold", "dynamic"])
def test_losses_of_the_received_model_before_work(drift: Drift, engine: str) -> None:
    """For any other parts of the method: drift and proximal terms do not belong to F_i."""
    method = Method("m", (CrossEntropy(), Proximal(5.0)), drift=drift, mixing=ByLoss())
    result = go(method, rounds=2, engine=engine)
    losses = result.snapshot.server.parts["mixing"]["losses"].numpy()
    assert losses.shape == (2 * len(SIZES),)
    np.testing.assert_allclose(losses[: len(SIZES)], initial_losses(), rtol=0, atol=1e-12)
    assert np.abs(losses[len(SIZES) :] - initial_losses()).max() > 1e-3


def test_losses_mix_the_cohort_that_was_drawn() -> None:
    method = Method("m", LOSS, mixing=ByLoss())
    machine = FederatedTask(experiment(method))
    cohort = np.array([1, 4, 5])
    _, report = federated_round(
        machine.plan, Serial(machine.plan, Live), machine.state.server, machine.state.store, cohort
    )
    losses = initial_losses()[cohort]
    np.testing.assert_allclose(report.p, losses / losses.sum(), rtol=0, atol=1e-12)


def test_a_client_whose_loss_is_not_finite_is_left_out_before_work() -> None:
    method = Method("m", LOSS, mixing=ByLoss())
    federation = with_marked_client(2, 1e308)
    result = go(method, federation=federation, model=lambda: scaled(headless()), rounds=1)
    assert [str(f) for f in result.failures] == ["round 1, client 2: its loss of the received model is not finite"]
    sent = result.history[0]
    assert sent["comm/up_params"] == (15 + 1) * (len(SIZES) - 1)
    assert sent["comm/bytes"] == 8 * (sent["comm/up_params"] + sent["comm/down_params"])


def test_class_counts_are_told_once_by_all_clients() -> None:
    fedavg, feddisco = (go(method, rounds=2, cohort=4).history for method in ("fedavg", "feddisco"))
    sent = [feddisco[t]["comm/up_params"] - fedavg[t]["comm/up_params"] for t in range(2)]
    assert sent == [3 * len(SIZES), 0]
    assert feddisco[1]["comm/bytes"] - fedavg[1]["comm/bytes"] == 8 * 3 * len(SIZES)


def scaled(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(100)
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_waiting_for_all_updates_changes_nothing_else(engine: str) -> None:
    """A policy that needs every update at once, but mixes by samples, is FedAvg."""
    settings: dict[str, Any] = {"cohort": 4, "drop_rate": 0.2, "engine": engine, "rounds": 4}
    a = go(Method("m", LOSS, mixing=Waits()), **settings)
    b = go(Method("m", LOSS), **settings)
    np.testing.assert_allclose(theta(a), theta(b), rtol=0, atol=1e-13)
    dyn = [go(Method("m", LOSS, drift=FedDynDrift(0.2), mixing=m), **settings) for m in (Waits(), Mixing())]
    np.testing.assert_allclose(theta(dyn[0]), theta(dyn[1]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mixing", [Mixing(), Uniform(), Waits()], ids=["by samples", "uniform", "waits"])
def test_reductions_mean_what_they_say(mixing: Mixing) -> None:
    """One round in which client 2 fails: p, the plain mean, the share of K, and all of them."""
    method = Method("m", LOSS, drift=Probe(), mixing=mixing)
    result = go(
        method, federation=with_marked_client(2, 1e160), model=headless, rounds=1, cohort=None, local=Local(steps=3)
    )
    state = {k: v.numpy() for k, v in result.snapshot.server.parts["drift"].items()}
    there = np.array([i for i in range(len(SIZES)) if i != 2])
    sizes = np.array(SIZES)[there]
    value = sizes / np.mean(SIZES)
    p = np.full(len(there), 1 / len(there)) if isinstance(mixing, Uniform) else sizes / sizes.sum()
    np.testing.assert_allclose(state["mix"], [p @ value], rtol=0, atol=1e-12)
    np.testing.assert_allclose(state["mean"], [value.mean()], rtol=0, atol=1e-12)
    np.testing.assert_allclose(state["share"], [value.sum() / len(SIZES)], rtol=0, atol=1e-12)
    np.testing.assert_allclose(state["all"], value[:, None], rtol=0, atol=1e-12)
    if isinstance(mixing, Uniform):
        np.testing.assert_allclose(
            state["share of update"], state["update"] * len(there) / len(SIZES), rtol=0, atol=1e-12
        )


def test_when_all_weight_was_on_clients_that_failed_nobodys_work_counts() -> None:
    """Neither the model nor any client's state moves; otherwise FedDyn's h would no longer be the mean of the h_i."""
    method = Method("m", LOSS, drift=FedDynDrift(0.1), mixing=Favourite())
    result = go(method, federation=with_marked_client(2, 1e160), model=headless, rounds=2, local=Local(steps=3))
    assert [f.client for f in result.failures] == [2, 2]
    start = torch.cat([p.detach().double().ravel() for p in headless().parameters()]).numpy()
    np.testing.assert_array_equal(theta(result), start)
    assert len(result.snapshot.store) == 0
    assert result.snapshot.server.parts["drift"]["h"].abs().max() == 0


# --- a round is all or nothing -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedper", "fedadam"])
def test_a_round_that_breaks_off_leaves_no_trace(name: str) -> None:
    machine = FederatedTask(experiment(name))
    engine, everyone, state = Serial(machine.plan, Live), np.arange(len(SIZES)), machine.state
    server, report = federated_round(machine.plan, engine, state.server, state.store, everyone)
    state.server = server
    state.store.put(report.states, server.round)
    reference = go(name, rounds=1)
    assert_same_state(state, reference.snapshot)

    count = []

    def interrupt(result: Any, received: Any) -> None:
        count.append(result.client)
        if len(count) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federated_round(machine.plan, engine, state.server, state.store, everyone, observe=interrupt)
    assert count == [0, 1, 2, 3]
    assert_same_state(state, reference.snapshot)
    server, report = federated_round(machine.plan, engine, state.server, state.store, everyone)
    state.server = server
    state.store.put(report.states, server.round)
    assert_same_state(state, go(name, rounds=2).snapshot)


# --- impossible methods and experiments -----------------------------------------------------------------


@dataclass(frozen=True)
class Everyone(Mixing):
    """Needs all clients."""

    needs = Needs(full_participation=True)


def test_methods_without_a_loss_are_refused() -> None:
    for objective in ((), (Proximal(0.1),)):
        with pytest.raises(ConfigError, match=r"^method 'm' has no term with a loss on the data; add Cross"):
            Method("m", objective)


def test_the_server_step_on_nothing_shared_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="server 'exp' works on shared parameters, but personal 'local_only'"):
        Method("m", LOSS, server=Extrapolated(), personal=LocalOnly())


def test_parts_that_need_everyone() -> None:
    method = Method("m", LOSS, mixing=Everyone())
    with pytest.raises(ConfigError, match=r"mixing 'everyone' needs every client .* the cohort holds 3 of 6"):
        experiment(method, cohort=3)
    assert run(experiment(method)).history


def test_parts_that_need_sgd() -> None:
    local = Local(optimiser="adam")
    experiment(Method("m", LOSS), local=local)
    with pytest.raises(ConfigError, match=r"drift 'scaffold' reads gradients .* by sgd, not adam\.$"):
        experiment(Method("m", LOSS, drift=Scaffold()), local=local)

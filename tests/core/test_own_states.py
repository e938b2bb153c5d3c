"""Client states of users' parts: what a hook returns is kept, in memory of its own, beside the private parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.resuming import back_to
from helpers.runs import assert_same_records, assert_same_run, assert_same_state, experiment, go, theta
from torch import Tensor

from fedloom.base.errors import ClientError, ConfigError
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Facts, Output, RoundInfo
from fedloom.core.method import Method
from fedloom.core.parts import ClientEnd, Drift, Halves, Mixing, Model, Personal, Term
from fedloom.experiment.federated import run
from fedloom.methods import make
from fedloom.parts.mixing import AFL, QFFL, TERM
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import Ditto, PrivateHead

FEDAVG = make("fedavg")


@dataclass(frozen=True)
class CountingDitto(Ditto):
    """Ditto that counts its rounds."""

    starts: bool = False
    called: str = "n"

    def init_client(self, theta: Tensor) -> Tree:
        return {self.called: theta.new_zeros(())} if self.starts else {}

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd({self.called: ctx.state.get(self.called, update.new_zeros(())) + 1}, {}, update)


@dataclass(frozen=True)
class CountingHead(PrivateHead):
    """A private head that counts its rounds."""

    starts: bool = False
    called: str = "n"

    init_client = CountingDitto.init_client
    end = CountingDitto.end


@dataclass(frozen=True)
class KeepingHead(PrivateHead):
    """A private head with a state that never changes."""

    def init_client(self, theta: Tensor) -> Tree:
        return {"first": theta.clone()}

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd(ctx.state, {}, update)


COUNTING = [kind(starts=starts) for kind in (CountingDitto, CountingHead) for starts in (False, True)]


@pytest.mark.parametrize("personal", COUNTING, ids=repr)
@pytest.mark.parametrize("compute", ["live", "batched"])
def test_a_personal_part_has_a_state_beside_private_parameters(personal: Personal, compute: str) -> None:
    plain = Ditto() if isinstance(personal, Ditto) else PrivateHead()
    counting, bare = (go(replace(FEDAVG, personal=part), compute=compute) for part in (personal, plain))
    for client, state in counting.snapshot.store:
        values = state["personal"]
        assert values["n"] == 3
        expected = bare.snapshot.store.get(client)
        assert expected is not None
        torch.testing.assert_close(values["private"], expected["personal"]["private"])
    by_processes = go(
        replace(FEDAVG, personal=personal), compute=compute, engine="processes", engine_settings={"workers": 2}
    )
    assert_same_run(by_processes, counting)


@pytest.mark.parametrize("personal", [*COUNTING, KeepingHead()], ids=repr)
@pytest.mark.parametrize("client_state", ["memory", "disk"])
def test_both_survive_an_interruption(personal: Personal, client_state: str, tmp_path: Path) -> None:
    assert_survives_an_interruption(replace(FEDAVG, personal=personal), client_state, tmp_path)


def assert_survives_an_interruption(method: Method, client_state: str, folder: Path) -> None:
    """A run that goes on from its second round ends in the state of one that was never interrupted."""
    work = experiment(method, cohort=4, client_state=client_state)
    full_run = run(work, out=folder / "whole")
    run(work, out=folder / "cut", checkpoint_every=1, keep=3)
    back_to(folder / "cut", 2)
    assert_same_state(run(work, folder / "cut", resume=True).snapshot, full_run.snapshot)


@dataclass(frozen=True)
class Remembering(Drift):
    """All updates of a client, and all of the server: states that start without rows, and grow."""

    def init_client(self, theta: Tensor) -> Tree:
        return {"updates": theta.new_zeros(0, len(theta))}

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return self.init_client(theta)

    def end(self, ctx: Context, update: Tensor, model: Any) -> ClientEnd:
        return ClientEnd({"updates": torch.cat([ctx.state["updates"], update[None]])}, {}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return {"updates": torch.cat([state["updates"], update[None]])}, update


@pytest.mark.parametrize("client_state", ["memory", "disk"])
def test_states_that_grow_survive_an_interruption(client_state: str, tmp_path: Path) -> None:
    assert_survives_an_interruption(replace(FEDAVG, drift=Remembering()), client_state, tmp_path)


@pytest.mark.parametrize("called", ["private", "buffers"])
def test_the_names_of_private_values_are_refused(called: str) -> None:
    with pytest.raises(ClientError, match=f"personal.end returned a state '{called}', the name under which"):
        go(replace(FEDAVG, personal=CountingDitto(called=called)))
    with pytest.raises(ConfigError, match=f"personal.init_client returned a state '{called}'"):
        go(replace(FEDAVG, personal=CountingDitto(called=called, starts=True)))


@dataclass(frozen=True)
class Aliasing(Drift):
    """States that are the library's own memory: the model, the message, the update and the last state."""

    def init_client(self, theta: Tensor) -> Tree:
        return {"first": theta}

    def end(self, ctx: Context, update: Tensor, model: Any) -> ClientEnd:
        weight = next(iter(model.parameters())) if hasattr(model, "parameters") else ctx.received - update
        state = {"weight": weight, "row": weight[0], "received": ctx.received, "update": update, "again": update}
        return ClientEnd(state | {"first": ctx.state["first"], "turned": ctx.received.expand(2, -1).T}, {}, update)


def test_states_do_not_share_memory_with_the_library(tmp_path: Path) -> None:
    method = replace(FEDAVG, drift=Aliasing())
    serial = go(method)
    weights = [state["drift"]["weight"] for _, state in serial.snapshot.store]
    assert not any(torch.equal(weights[0], weight) for weight in weights[1:])
    assert_same_run(go(method, engine="processes", engine_settings={"workers": 2}), serial)
    assert_same_state(run(experiment(method), out=tmp_path / "kept").snapshot, serial.snapshot)


@dataclass(frozen=True)
class AliasingServer(Drift):
    """Server states that are the library's own memory."""

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {"first": theta}

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return {**state, "update": update, "again": update, "received": info.received}, update

    def refine(self, state: Tree, theta: Tensor, buffers: Tensor, info: RoundInfo) -> Halves:
        return {**state, "theta": theta}, theta


def test_server_states_may_be_the_model_and_its_update(tmp_path: Path) -> None:
    method = replace(FEDAVG, drift=AliasingServer())
    result = run(experiment(method), out=tmp_path / "kept")
    assert torch.equal(result.snapshot.server.parts["drift"]["theta"], result.snapshot.server.theta)
    assert_same_run(go(method), result)


@dataclass(frozen=True)
class Norm(Term):
    """(μ/2)‖logits‖² with μ as a setting, a constant of the round, or a client's state."""

    place: str = "setting"

    def init_client(self, theta: Tensor) -> Tree:
        return {"mu": theta.new_tensor(2.0)} if self.place == "state" else {}

    def begin(self, ctx: Context) -> Tree:
        return {"mu": ctx.received.new_tensor(2.0)} if self.place == "round" else {}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        mu = {"setting": {"mu": 2.0}, "round": ctx.local, "state": ctx.state}[self.place]["mu"]
        return mu / 2 * out.logits.square().sum(1)


@pytest.mark.parametrize("place", ["round", "state"])
@pytest.mark.parametrize("mixing", [QFFL(1.0), AFL(), TERM(1.0)], ids=repr)
def test_mixings_see_losses_with_all_their_terms(place: str, mixing: Mixing) -> None:
    runs = [go(Method("m", (CrossEntropy(), Norm(source)), mixing=mixing)) for source in ("setting", place)]
    assert_same_records(runs[0].history, runs[1].history, tolerance=1e-12)
    np.testing.assert_allclose(theta(runs[0]), theta(runs[1]), rtol=0, atol=1e-12)
    method = Method("m", (CrossEntropy(), Norm(place)), mixing=mixing)
    assert_same_run(go(method, engine="processes", engine_settings={"workers": 2}), runs[1])

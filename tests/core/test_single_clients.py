"""Clients with settings of local training of their own, and clients that join or leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.runs import assert_same_state, experiment, go, theta
from torch import nn

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.config import build, resolve
from fedloom.core.local import Local
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.fingerprint import differences

BASE = Local(epochs=2, batch_size=4, lr=0.2)
ALONE = {"*": (9,), "2": (0,)}  # of the first rounds, client 2 has all
OWN: dict[str, dict[str, Any]] = {
    "lengths": {"epochs": 0.5, "batch_size": 3, "last_batch": "drop"},
    "rate": {"lr": 0.05},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1, "clip": 0.5},
    "adam": {"optimiser": "adam", "lr": 0.01},
    "rates": {"rates": {"head": 3.0}},
}


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("settings", OWN.values(), ids=OWN)
@pytest.mark.parametrize("method", ["fedavg", "fedper", "superfed_mm"])
def test_a_client_trains_as_if_all_had_its_settings(method: str, settings: dict[str, Any], compute: str) -> None:
    """θ^2 is that of the client that alone takes part."""
    here = go(method, local=BASE, client_local={"2": settings}, presence=ALONE, rounds=2, compute=compute)
    expected = go(method, local=replace(BASE, **settings), presence=ALONE, rounds=2)
    assert_same_state(here.snapshot, expected.snapshot, 1e-10)


@pytest.mark.parametrize("settings", OWN.values(), ids=OWN)
@pytest.mark.parametrize("method", ["fedavg", "feddyn", "fedper", "ditto", "fedrep"])
def test_batched_is_live_where_clients_differ(method: str, settings: dict[str, Any]) -> None:
    mixed = {"1": settings, "4": {"epochs": 1}}
    results = [go(method, local=BASE, client_local=mixed, rounds=2, compute=compute) for compute in ("live", "batched")]
    assert_same_state(*(result.snapshot for result in results), 1e-10)
    plain = go(method, local=BASE, rounds=2)
    assert not np.allclose(theta(plain), theta(results[0]), atol=1e-6)


def test_lengths_leave_rounds_plain() -> None:
    plans = [
        FederatedTask(experiment(local=BASE, client_local={"1": OWN[name]})).plan for name in ("lengths", "momentum")
    ]
    assert [plan.is_even for plan in plans] == [True, False]


def test_control_variates_are_gradients_where_rates_differ() -> None:
    """SCAFFOLD's c_i, along constant gradients: displacements over the client's own rates."""
    federation = classes()
    result = fl.run(
        "scaffold", federation, lambda: nn.Linear(4, 3), loss=lambda out, y: out[:, 0], dtype="float64", rounds=1,
        local=Local(steps=5, batch_size=0, lr=0.1), evaluation=fl.Evaluation(what=()), compute="live",
        client_local={"0": {"lr": 0.02}, "1": {"momentum": 0.9, "steps": 7}, "3": {"lr": 0.3, "steps": 2}},
    )  # fmt: skip
    for client in range(6):
        x = federation.train.client(client).x.mean(0).numpy()
        control = result.snapshot.store.get(client)["drift"]["c"]
        np.testing.assert_allclose(control, np.concatenate([x, np.zeros(8), [1.0, 0, 0]]), atol=1e-12)


def test_clients_join_and_leave_with_their_states(tmp_path: Path) -> None:
    setup = experiment("scaffold", presence={"1": (2,), "4": (0, 3)}, rounds=5, local=BASE)
    task = FederatedTask(setup)
    members = [task.timeline.step(t).clients.tolist() for t in range(5)]
    assert members == [[0, 2, 3, 4, 5], [0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5], [0, 1, 2, 3, 5]]
    full_run = run(setup)
    left = run(replace(setup, rounds=3))
    for result in (full_run, left):  # the client that left keeps its state
        state = result.snapshot.store.get(4)["drift"]["c"]
        assert torch.equal(state, left.snapshot.store.get(4)["drift"]["c"])
    run(replace(setup, rounds=2), tmp_path)
    assert_same_state(run(setup, tmp_path, resume=True).snapshot, full_run.snapshot)


def test_cohorts_are_shares_of_those_present() -> None:
    task = FederatedTask(experiment(presence={"0": (3,), "1": (3,)}, participation=0.5))
    assert [len(task.timeline.step(t).clients) for t in (0, 3)] == [2, 3]
    assert set(task.timeline.step(0).clients) <= {2, 3, 4, 5}


def test_a_run_does_not_go_on_with_clients_that_come_at_other_times() -> None:
    usual, later = (FederatedTask(experiment(presence=presence)) for presence in ({}, {"0": (3,)}))
    assert differences(usual.identity(), later.identity())


def test_names_and_patterns(tmp_path: Path) -> None:
    federation = replace(classes(), names=("phone a", "phone b", "server", "x", "y", "z"))
    setup = experiment(federation=federation, client_local={"phone*": {"epochs": 1}, "phone b": {"lr": 0.5}})
    assert {k: (local.epochs, local.lr) for k, local in setup.own_local.items()} == {0: (1, 0.2), 1: (1, 0.5)}
    words = ["client_local={1*:{epochs:2},3:{lr:0.5}}", "presence={4:[5],5:[0,9]}", "clients=12", "model=logistic"]
    typed_setup = build(resolve(words))
    assert sorted(typed_setup.own_local) == [1, 3, 10, 11]
    assert typed_setup.presence == {"4": (5,), "5": (0, 9)}


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"client_local": {"2": {"schedule": "cosine"}}}, "client_local: 2 has no own 'schedule'"),
    ({"client_local": {"9": {"lr": 0.1}}}, "client_local names client '9', but there is none"),
    ({"client_local": {"2": {"lr": -1.0}}}, r"local\.lr must be"),
    ({"client_local": {"2": {"optimiser": "adam"}}, "method": "scaffold"}, "by sgd, not adam"),
    ({"presence": {"*": (1,)}}, "presence leaves no client in round 0"),
    ({"presence": {"*": (0, 2)}}, "presence leaves no client in round 2"),
    ({"presence": {"2": (3, 1)}}, r"presence: 2 is \[3, 1\], but it must be"),
    ({"presence": {"2": (3,)}, "local": Local(dp_clip=1.0, dp_noise=1.0)}, "counts the same rounds for all clients"),
    ({"presence": {"2": (3,)}, "method": "centralised"}, "trains on pooled data"),
])  # fmt: skip
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        experiment(settings.pop("method", "fedavg"), **settings)


def test_private_uplinks_count_equal_rounds() -> None:
    private = fl.methods.make("dp_fedavg")
    with pytest.raises(ConfigError, match="counts the same rounds for all clients; leave presence out"):
        experiment(private, presence={"2": (1,)})


def test_settings_and_presence_of_clients_come_from_tables(tmp_path: Path) -> None:
    (tmp_path / "settings.csv").write_text("client,epochs,lr\n1,,0.05\n2,1,\n")
    (tmp_path / "who.csv").write_text("client,joins,leaves\n0,1,\n1,0,2\n")
    files = {"client_local": tmp_path / "settings.csv", "presence": tmp_path / "who.csv"}
    by_tables, by_words = (
        experiment(local=BASE, **settings)
        for settings in (
            files,
            {"client_local": {"1": {"lr": 0.05}, "2": {"epochs": 1}}, "presence": {"0": (1,), "1": (0, 2)}},
        )
    )
    assert by_tables.own_local == by_words.own_local
    assert [by_tables.present(t).tolist() for t in range(3)] == [by_words.present(t).tolist() for t in range(3)]
    (tmp_path / "who.csv").write_text("client,from\n0,1\n")
    with pytest.raises(ConfigError, match="has a column 'from'; name client, joins and leaves"):
        experiment(local=BASE, presence=tmp_path / "who.csv")


def test_tables_of_clients_are_named_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "settings.csv").write_text("client,lr\n1,0.05\n")
    setup = build(resolve([f"client_local={tmp_path / 'settings.csv'}", "clients=3"]))
    assert [setup.own_local[1].lr, *setup.own_local] == [0.05, 1]


def test_models_are_loaded_without_the_tables_of_their_training(tmp_path: Path) -> None:
    tables = {"client_local": "client,lr\n1,0.05\n", "presence": "client,joins\n1,1\n"}
    for name, text in tables.items():
        (tmp_path / f"{name}.csv").write_text(text)
    words = [*(f"{name}={tmp_path / name}.csv" for name in tables), "clients=3", "rounds=2", "model=logistic"]
    result = run(build(resolve(words)), tmp_path / "run")
    for name in tables:
        (tmp_path / f"{name}.csv").unlink()
    assert fl.load(tmp_path / "run").snapshot.server.theta.equal(result.snapshot.server.theta)

"""FedFomo: what clients hear, what they make of it, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.runs import go

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.tree import Tree
from fedloom.core.context import Facts, Meeting
from fedloom.core.federation import Index
from fedloom.core.links import Links
from fedloom.core.local import Local
from fedloom.methods import make
from fedloom.parts.topology import FirstOrder

CLIENTS = 4


def links_from(gains: np.ndarray, topology: FirstOrder = FirstOrder(), t: int = 0) -> Links:  # noqa: B008
    """B where model n is worth gains[i, n] to client i, and all models are one step from each received one."""
    nothing = torch.zeros(0)
    facts = Facts((1,), 2, nothing, nothing, clients=CLIENTS, rounds=1, seed=0)
    everyone, ones = np.arange(CLIENTS), np.ones(CLIENTS, dtype=np.int64)
    meeting = Meeting(
        t, facts, everyone, ones, ones, False, lambda n: torch.ones(1), lambda n, who: 1 - gains[who, n],
        lambda n: torch.zeros(1), lambda n, who: np.ones(len(who)), rng.stream(0, "topology", t),
    )  # fmt: skip
    links = topology.between({}, meeting)[1]
    assert isinstance(links, Links)
    return links


def test_equal_gains_are_the_mean_and_no_gain_is_ones_own() -> None:
    np.testing.assert_allclose(links_from(np.full((CLIENTS, CLIENTS), 0.3)).matrix(CLIENTS), 1 / CLIENTS, atol=1e-15)
    np.testing.assert_array_equal(links_from(np.full((CLIENTS, CLIENTS), -0.1)).matrix(CLIENTS), np.eye(CLIENTS))
    gains = np.diag([-1.0] * CLIENTS) + np.eye(CLIENTS, k=1) * 3 + np.eye(CLIENTS, k=2)
    np.testing.assert_allclose(links_from(gains).matrix(CLIENTS)[0], [0, 0.75, 0.25, 0], atol=1e-15)


def test_who_explores_hears_others_than_the_best() -> None:
    always, never = FirstOrder(models=1, explore=1.0), FirstOrder(models=1, explore=0.0)
    gains = np.ones((CLIENTS, CLIENTS))
    best = [links_from(gains, never, t).matrix(CLIENTS)[3] > 0 for t in range(20)]
    assert np.sum(best, axis=0).tolist() == [20, 0, 0, 20]
    counts = np.sum([links_from(gains, always, t).matrix(CLIENTS)[3] > 0 for t in range(20)], axis=0)
    assert counts[0] == 0
    assert counts[1:3].min() > 0
    assert counts[1:3].sum() == counts[3] == 20


def test_losses_are_not_read_where_gradients_alone_are_private() -> None:
    with pytest.raises(ConfigError, match="'first_order' reads 'losses' of the data"):
        go(make("fedfomo"), local=Local(steps=1, batch_size=4, dp_clip=1.0))


def test_losses_that_are_read_are_declared() -> None:
    class Undeclared(FirstOrder):
        reads_losses = False

    with pytest.raises(ConfigError, match="reads losses; declare it"):
        go(replace(make("fedfomo"), topology=Undeclared()))


def test_losses_are_those_of_validation_samples_where_a_client_has_any() -> None:
    """The others' are those of training samples; validation samples are of another class than all else."""
    federation = classes()
    rows = [federation.train.index[client] for client in range(len(federation))]
    some = replace(federation, validation=replace(federation.train, index=Index.of([rows[1], *([[]] * 5)])))
    losses = []

    class Recorded(FirstOrder):
        reads_losses = True

        def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, Links]:
            losses.append(meeting.losses(0, np.arange(6)))
            return super().between(state, meeting)

    method = replace(make("fedfomo"), topology=Recorded())
    for data in (federation, some):
        go(method, federation=data, rounds=1)
    plain, validated = losses
    assert validated[0] == plain[1] != plain[0]  # the first client is validated on the samples of the second
    assert validated[1:].tolist() == plain[1:].tolist()


def test_a_message_is_counted_for_every_model_that_is_heard() -> None:
    all_models, two_models = (go(make("fedfomo", models=m), cohort=4, rounds=1, seed=1) for m in (None, 2))
    size = all_models.snapshot.server.theta.nbytes
    assert all_models.history[0]["comm/bytes"] == 4 * 3 * size
    assert two_models.history[0]["comm/bytes"] == 4 * 2 * size

"""Unseen clients never enter a cohort, are unknown to methods, and are evaluated."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.runs import experiment
from hypothesis import given
from hypothesis import strategies as st

from fedloom import methods
from fedloom.base.errors import ConfigError, DataError
from fedloom.base.rng import stream
from fedloom.core.federation import Index
from fedloom.data import federate, from_tensors
from fedloom.data.federate import last_unseen
from fedloom.data.partitions import Alid
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models


@pytest.mark.filterwarnings("ignore:partition 'alid'")
def test_unseen_clients_stand_last_and_keep_what_is_theirs() -> None:
    y = torch.arange(1000) % 10
    source = from_tensors(torch.zeros(1000, 1), y, x_test=torch.zeros(100, 1), y_test=torch.arange(100) % 10)
    all_seen, part = (
        federate(source, Alid(2, 20, 4), 10, seed=7, held_out="common", unseen=share) for share in (0.0, 0.3)
    )
    order = part.provenance["unseen"]
    assert (all_seen.unseen, part.unseen, part.seen, len(part)) == (0, 3, 7, 10)
    assert "unseen" not in all_seen.provenance
    was = [k for k in range(10) if k not in order] + order
    for a, b in ((all_seen.train, part.train), (all_seen.held_out, part.held_out)):
        for now, then in enumerate(was):
            assert np.array_equal(a.index[then], b.index[now])
            assert torch.equal(a.client(then).y, b.client(now).y)


@given(st.integers(2, 10_000), st.floats(0.001, 0.999), st.integers(0, 99))
def test_the_order_is_a_permutation_with_the_asked_number_last(clients: int, share: float, seed: int) -> None:
    order = last_unseen(clients, share, stream(seed, "unseen"))
    assert order is not None
    assert np.array_equal(np.sort(order), np.arange(clients))
    hidden = min(max(round(clients * share), 1), clients - 1)
    assert (np.diff(order[: clients - hidden]) > 0).all()
    assert (np.diff(order[clients - hidden :]) > 0).all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_picking_clients_is_reordering_lists(sizes: list[int]) -> None:
    rows = np.arange(sum(sizes))
    index = Index(rows, np.concatenate([[0], np.cumsum(sizes)]))
    order = np.array(sorted(range(len(sizes)), key=lambda k: (sizes[k], -k)))
    picked = index.pick(order)
    assert [picked[i].tolist() for i in range(len(order))] == [index[k].tolist() for k in order]
    assert len(index.first(len(sizes) // 2)) == len(sizes) // 2


@pytest.mark.parametrize("sampling", ["fixed", "bernoulli"])
@pytest.mark.parametrize("method", ["fedavg", "feddyn", "scaffold", "fedper"])
def test_training_is_as_if_unseen_clients_were_not_there(method: str, sampling: str) -> None:
    """The same bits as in a federation from which they were removed: no part counts them among its K clients."""
    federation = federate("digits", "dirichlet", 10, seed=2, unseen=0.3)
    cut = dataclasses.replace(
        federation,
        train=federation.train.first(7),
        validation=federation.validation.first(7),
        held_out=federation.held_out.first(7),
        unseen=0,
    )
    results = [
        run(
            experiment(
                method,
                federation=data,
                model=lambda: models.make("mlp", classes=10, inputs=(1, 8, 8), hidden=(8,)),
                participation=0.4,
                sampling=sampling,
                evaluation=Evaluation(
                    what=("global", "clients", "average", "train") if method != "fedper" else ("clients",)
                ),
            )
        )
        for data in (federation, cut)
    ]
    thetas = [result.snapshot.server.theta for result in results]
    assert torch.equal(*thetas)
    for record, short in zip(*(result.history for result in results), strict=True):
        assert record["cohort"] == short["cohort"]
        assert record["clients/accuracy/clients"] == 10
        assert record["seen/accuracy/mean"] == short["clients/accuracy/mean"]
        assert record["unseen/accuracy/clients"] == 3
        mean = 0.7 * record["seen/accuracy/mean"] + 0.3 * record["unseen/accuracy/mean"]
        assert record["clients/accuracy/mean"] == pytest.approx(mean)
        assert "unseen/accuracy/mean" not in short
        for key in ("global/accuracy", "average/accuracy", "global/train_loss"):
            assert record.get(key) == short.get(key)


def test_centralised_training_leaves_unseen_clients_out() -> None:
    federation = federate("digits", "iid", 10, seed=2, unseen=0.2)
    pooled = federation.pooled()
    assert pooled.train.index.sizes.tolist() == [federation.train.index.sizes[:8].sum()]
    assert pooled.held_out.index.sizes.tolist() == [federation.held_out.index.sizes.sum()]
    centralised = Experiment(
        methods.make("centralised"), federation, lambda: models.make("logistic", classes=10, inputs=(1, 8, 8))
    )
    assert run(dataclasses.replace(centralised, rounds=2)).history[-1]["cohort"] == 1


def test_bad_requests_get_one_sentence() -> None:
    with pytest.raises(ConfigError, match="unseen must be a fraction"):
        federate("digits", "iid", 10, unseen=1.0)
    with pytest.raises(DataError, match="no client would be left to train"):
        federate("digits", "iid", 1, unseen=0.1)
    with pytest.raises(DataError, match="no client is left to train"):
        dataclasses.replace(federate("digits", "iid", 3), unseen=3)

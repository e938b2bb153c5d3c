"""Targets have the requested distribution, and what a learner sees of them contains no labels."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.base.errors import DataError
from fedloom.base.rng import stream
from fedloom.core.federation import Unlabelled
from fedloom.data import federate, from_tensors, targets
from fedloom.data.labels import Imbalanced, Skew, Target, UniformLabels
from fedloom.data.partitions import Niid1, Niid2
from fedloom.data.sources import Source


def source(test: int = 10_000, seed: int = 0) -> Source:
    """Inputs are distinct numbers, so that rows can be found again."""
    y, v = torch.arange(5000) % 10, torch.from_numpy(np.random.default_rng(seed).permutation(np.arange(test) % 10))
    return from_tensors(torch.rand(5000, 1), y, x_test=torch.arange(float(test))[:, None], y_test=v)


@pytest.mark.parametrize("rho", [100.0, 50.0, 10.0, 1.0])
def test_imbalanced_counts_are_exponential(rho: float) -> None:
    federation = federate(source(), "iid", 5, target=Imbalanced(rho))
    counts = np.bincount(federation.test.y.numpy(), minlength=10)
    assert counts.tolist() == [int(1000 * rho ** (-c / 9) + 1e-9) for c in range(10)]
    assert federation.provenance["target"] == {"name": "imbalanced", "rho": rho}


def test_skew_is_the_first_clients_distribution() -> None:
    for partition, clients in ((Niid1(), 5), (Niid2(), 10)):
        federation = federate(source(), partition, clients, seed=4, target=Skew(), held_out=0.0)
        client_counts = np.bincount(federation.train.client(0).y.numpy(), minlength=10)
        counts = np.bincount(federation.test.y.numpy(), minlength=10)
        assert np.abs(counts - client_counts / client_counts.max() * counts.max()).max() <= 1
        assert counts.max() == 1000  # as many as the pool has
        rarest = client_counts[client_counts > 0].min()
        assert ((counts > 0) == (client_counts > 0)).all() or rarest * 1000 < client_counts.max()


@pytest.mark.parametrize("client", range(5))
def test_any_client_can_be_the_target_and_classes_can_be_dealt_in_order(client: int) -> None:
    """NIID-1 as in the paper's table 4: client k = 1, ..., 5 holds classes 2k - 1 and 2k."""
    federation = federate(source(), Niid1(order=True), 5, seed=client, target=Skew(client), held_out=0.0)
    assert federation.train.client(client).y.unique().tolist() == [2 * client, 2 * client + 1]
    counts = np.bincount(federation.test.y.numpy(), minlength=10)
    assert counts[2 * client : 2 * client + 2].max() == counts.max() == 1000
    assert counts.sum() == counts[2 * client : 2 * client + 2].sum()
    with pytest.raises(DataError, match="there is no client 5"):
        federate(source(), Niid1(), 5, target=Skew(5))


@pytest.mark.parametrize("clients", [5, 7, 20])
def test_parts_in_order_go_around_the_clients(clients: int) -> None:
    labels = np.arange(4000) % 10
    index = Niid1(order=True)(labels, clients, stream(1, "partition"))
    for k in range(clients):
        assert np.unique(labels[index[k]]).tolist() == [2 * (k % 5), 2 * (k % 5) + 1]
    assert np.sort(index.rows).tolist() == list(range(4000))


def test_uniform_and_none() -> None:
    pool = source()
    federation = federate(pool, "iid", 5, target=UniformLabels())
    assert np.bincount(federation.test.y.numpy()).tolist() == [1000] * 10
    plain = federate(pool, "iid", 5)
    assert plain.test is pool.test
    assert plain.unlabelled is None


def test_every_target_row_is_a_row_of_the_pool_drawn_once() -> None:
    pool = source()
    federation = federate(pool, "iid", 5, target=Imbalanced(50))
    assert federation.unlabelled is not None
    rows = federation.unlabelled.x[:, 0].long()
    assert len(rows.unique()) == len(rows)
    assert torch.equal(pool.test.y[rows], federation.test.y)


def test_a_target_is_the_largest_subset_of_its_shares_drawn_at_random() -> None:
    labels = np.repeat([0, 1], [10, 4])  # shares 1 and 1/2: the second class is exhausted first
    subsets = [Imbalanced(2).rows(labels, 2, np.ones((1, 2)), np.random.default_rng(seed)) for seed in range(5)]
    assert all(np.bincount(labels[rows]).tolist() == [8, 4] for rows in subsets)
    assert len({frozenset(rows.tolist()) for rows in subsets}) > 1


def reachable(value: Any, ids: set[int]) -> list[Any]:
    """Everything that can be reached from an object by attributes, items and containers."""
    if id(value) in ids or value is None or isinstance(value, type):
        return []
    ids.add(id(value))
    objects = [value]
    inner: list[Any] = []
    if dataclasses.is_dataclass(value):
        inner = [getattr(value, f.name) for f in dataclasses.fields(value)]
    elif isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple | set):
        inner = list(value)
    if hasattr(value, "__dict__"):
        inner += list(vars(value).values())
    for part in inner:
        objects += reachable(part, ids)
    return objects


class Poisoned(Tensor):
    """Labels that nobody may touch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a label was touched by {func}")


@pytest.mark.parametrize("target", [Skew(), Imbalanced(10), UniformLabels()], ids=repr)
def test_the_learners_side_holds_no_labels(target: Target) -> None:
    federation = federate(source(), Niid2(), 10, target=target)
    hidden = federation.unlabelled
    assert isinstance(hidden, Unlabelled)
    tensors = [t for t in reachable(hidden, set()) if isinstance(t, Tensor | np.ndarray)]
    assert [t is hidden.x for t in tensors] == [True]
    assert hidden.x is federation.test.x  # one tensor: the inputs are not held twice
    poisoned = dataclasses.replace(federation)
    object.__setattr__(poisoned.test, "y", federation.test.y.as_subclass(Poisoned))
    with pytest.raises(AssertionError, match="a label was touched"):
        _ = poisoned.test.y[0]
    assert poisoned.unlabelled is not None
    assert len(poisoned.unlabelled) == len(poisoned.unlabelled.x.clone())  # can be used all the same


def test_the_order_of_the_inputs_tells_nothing_of_their_labels() -> None:
    federation = federate(source(), "iid", 5, target=Imbalanced(10))
    y = federation.test.y.numpy()
    same = (y[1:] == y[:-1]).mean()
    share = np.bincount(y) / len(y)
    expected = (share**2).sum()
    assert abs(same - expected) < 5 * np.sqrt(expected / len(y))
    position = np.arange(len(y))
    assert all(abs(position[y == c].mean() / len(y) - 0.5) < 3 / np.sqrt(12 * (y == c).sum()) for c in range(10))


def test_relabelling_the_chosen_rows_does_not_change_the_inputs_of_a_uniform_target() -> None:
    """If the classes of the pool trade their numbers, a uniform target still takes the whole of a balanced pool."""
    labels = np.arange(1000) % 10
    for swapped in (labels, (labels + 3) % 10):
        rows = UniformLabels().rows(swapped, 10, np.ones((1, 10)), stream(0, "target"))
        assert np.array_equal(np.sort(rows), np.arange(1000))


def test_bad_targets_get_one_sentence() -> None:
    assert targets.names() == ["none", "skew", "imbalanced", "uniform"]
    bare = from_tensors(torch.zeros(100, 1), torch.arange(100) % 10)
    with pytest.raises(DataError, match="a target needs a common test set"):
        federate(bare, "iid", 5, target="uniform")
    some = from_tensors(
        torch.zeros(100, 1), torch.arange(100) % 10, x_test=torch.zeros(4, 1), y_test=torch.tensor([0, 1, 2, 3])
    )
    with pytest.raises(DataError, match=r"needs class \[4\], which the common test set does not have"):
        federate(some, "iid", 5, target="imbalanced")

"""The real data sets, if available under $FEDLOOM_DATA."""

import os

import numpy as np
import pytest
from helpers.counting import calls

from fedloom.base.errors import DataError
from fedloom.data import federate, sources, statistics
from fedloom.data.partitions import DirichletBalanced
from fedloom.data.sources import Source

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif("FEDLOOM_DATA" not in os.environ, reason="FEDLOOM_DATA is not set"),
]


def get(name: str) -> Source:
    try:
        return sources.make(name)
    except DataError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("name", "train", "test", "shape"),
    [
        ("mnist", 60_000, 10_000, (1, 28, 28)),
        ("fashion_mnist", 60_000, 10_000, (1, 28, 28)),
        ("emnist_l", 48_000, 8000, (1, 28, 28)),
        ("cifar10", 50_000, 10_000, (3, 32, 32)),
    ],
)
def test_real_images_are_whole_and_normalised(name: str, train: int, test: int, shape: tuple[int, ...]) -> None:
    source = get(name)
    assert (len(source.train), len(source.test)) == (train, test)
    assert tuple(source.train.x.shape[1:]) == shape
    assert source.train.classes == len(source.train.names) == 10
    assert abs(source.train.x.mean()) < 0.02
    assert abs(source.train.x.std() - 1) < 0.02


def test_writers_of_mnist_are_clients() -> None:
    source = get("mnist")
    if source.groups is None:
        pytest.skip("mnist_writers.npz is not there")
    federation = federate(source, "natural")
    assert len(federation) == 539
    assert federation.names[0].startswith("writer ")
    with pytest.raises(DataError, match="no test sample of mnist belongs to a training client"):
        federate(source, "natural", held_out="natural")


def test_feddyns_partition_of_mnist_is_as_skewed_as_the_paper_says() -> None:
    """Thesis A.1.1: with Dirichlet .3, 80 % of a client's samples belong to mostly 3 or 4 labels."""
    source = get("mnist")
    federation = federate(source, DirichletBalanced(0.3), 100, seed=0, held_out=0.0)
    y = source.train.y.numpy()
    counts = np.stack([np.bincount(y[federation.train.index[k]], minlength=10) for k in range(100)])
    assert set(counts.sum(1)) == {600}
    label_counts = (np.cumsum(np.sort(counts, axis=1)[:, ::-1], axis=1) < 0.8 * 600).sum(1) + 1
    assert np.isin(label_counts, (3, 4)).mean() > 0.5


def test_ten_thousand_clients_on_mnist_take_no_loop_over_clients() -> None:
    source = get("mnist")
    federation, work = calls(lambda: federate(source, DirichletBalanced(0.3), 10_000))
    assert work < 10_000
    assert federation.train.arrays is source.train
    assert statistics(federation)["clients"] == 10_000


def test_omniglot_is_whole() -> None:
    source = get("omniglot")
    assert (len(source.train), len(source.test), source.train.classes) == (1623 * 16, 1623 * 4, 1623)
    assert len(source.group_names) == 50
    assert 0 == source.train.x.min() < source.train.x.max() == 1
    drawers = sources.make("omniglot", clients="drawers", subset="evaluation", size=14, test=0)
    assert drawers.groups is not None
    assert len(np.unique(drawers.groups)) == 20 * 20
    assert len(drawers.train) == 659 * 20


def test_shakespeares_roles() -> None:
    source = get("shakespeare")
    assert source.groups is not None
    assert source.groups_test is not None
    assert set(np.bincount(source.groups)) == {2000}
    assert set(np.bincount(source.groups_test)) == {400}
    assert len(source.group_names) == 391
    assert {"hamlet: HAMLET", "romeo_juliet: ROMEO"} <= set(source.group_names)
    with pytest.warns(UserWarning, match="keeps 100 of 391"):
        federation = federate(source, "natural", clients=100, seed=1, held_out="natural")
    assert set(federation.held_out.index.sizes) == {400}
    first = source.train.x[source.groups == source.group_names.index("hamlet: HAMLET")][30]
    assert "".join(source.train.names[c] for c in first.tolist()).strip() == "[Aside] A little more than kin"


def test_heart_is_flambys() -> None:
    """Sizes of its paper: 303, 261, 46 and 130 patients, 486 of them for training."""
    source = get("heart")
    assert source.groups is not None
    assert source.groups_test is not None
    train, test = np.bincount(source.groups), np.bincount(source.groups_test)
    assert train.tolist() == [199, 172, 30, 85]
    assert test.tolist() == [104, 89, 16, 45]
    for hospital in range(4):
        x = source.train.x[source.groups == hospital]
        assert x.mean(0).abs().max() < 1e-5
        assert ((x.std(0, unbiased=False) - 1).abs() < 1e-4).logical_or(x.abs().amax(0) == 0).all()
    assert len(sources.make("heart", missing="mean").train) + len(sources.make("heart", missing="mean").test) == 920

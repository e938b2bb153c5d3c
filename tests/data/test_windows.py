"""ACID, ALID, NIID-1 and NIID-2: their specified properties, up to 10 000 clients."""

import warnings

import numpy as np
import pytest
import torch
from helpers.counting import calls
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.base.errors import ConfigError, DataError
from fedloom.base.rng import stream
from fedloom.data import federate, from_tensors
from fedloom.data.partitions import Acid, Alid, Niid1, Niid2
from fedloom.data.sources import Source

pytestmark = pytest.mark.filterwarnings("ignore:partition 'a.id' gives")


def pools(classes: int = 10, train: int = 5000, test: int = 1000) -> Source:
    """A source of the shape of CIFAR, whose inputs are the row numbers."""
    y, v = (torch.arange(n * classes) % classes for n in (train, test))
    x, u = (torch.arange(n * classes, dtype=torch.float32)[:, None] for n in (train, test))
    return from_tensors(x, y, x_test=u, y_test=v, classes=classes)


@pytest.mark.parametrize("s", [3, 5, 7])
def test_acid_on_cifar_is_the_thesis_setting_and_uses_every_sample(s: int) -> None:
    """100 clients, 500 + 100 samples each: all of CIFAR-10's 50 000 + 10 000, for each number of classes."""
    source = pools()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federation = federate(source, Acid(classes=s), 100, seed=3, held_out="common")
    assert federation.train.arrays is source.train
    for split, size, total in ((federation.train, 500, 50_000), (federation.held_out, 100, 10_000)):
        assert set(split.index.sizes) == {size}
        assert np.array_equal(np.sort(split.index.rows), np.arange(total))
        y = split.arrays.y.numpy()
        for client in range(100):
            classes, counts = np.unique(y[split.index[client]], return_counts=True)
            assert set(classes) == {(client + j) % 10 for j in range(s)}
            assert counts.max() - counts.min() <= 1
    assert federation.provenance["partition"] == {"name": "acid", "classes": s, "samples": 500, "test_samples": 100}
    assert federation.provenance["left_out"] == {}


def test_the_thesis_own_example() -> None:
    """A.1.2: with five classes a device, device 10 has 0 to 4 and device 25 has 5 to 9."""
    index = Acid(5)(np.arange(50_000) % 10, 100, stream(0, "partition"))
    assert np.unique(index[10] % 10).tolist() == [0, 1, 2, 3, 4]
    assert np.unique(index[25] % 10).tolist() == [5, 6, 7, 8, 9]


@settings(max_examples=25)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([1, 2, 7, 40, 1000, 10_000]),
    st.integers(1, 15),
    st.integers(0, 99),
)
def test_acid_laws(classes: int, s: int, clients: int, samples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(
        np.repeat(np.arange(classes), rng.integers(1, 4 * samples * clients // classes + 9, classes))
    )
    if samples < s:
        with pytest.raises(ConfigError, match="at least one"):
            Acid(s, samples, s)
        return
    partition = Acid(s, samples, s)
    try:
        index, work = calls(lambda: partition(labels, clients, stream(seed, "partition")))
    except DataError as error:
        if "\n" in str(error):
            pytest.fail("an error is one sentence")
        return
    assert work < 5000
    assert len(index) == clients
    assert set(index.sizes) == {samples}
    assert len(np.unique(index.rows)) == len(index.rows)
    window = (labels[index.rows] - index.owners) % classes  # place in the client's list of classes
    assert window.max() < s
    counts = np.bincount(index.owners * s + window, minlength=clients * s).reshape(clients, s)
    assert (counts == samples // s + (np.arange(s) < samples % s)).all()
    again = partition(labels, clients, stream(seed, "partition"))
    assert np.array_equal(index.rows, again.rows)
    assert not len(index.rows) or index.rows.max() < len(labels)


def test_what_is_left_out_is_said_and_what_is_impossible_refused() -> None:
    labels = np.arange(1000) % 10
    with pytest.warns(UserWarning, match="gives 10 clients 50 samples each and leaves out 500 of 1000"):
        Acid(5, 50)(labels, 10, stream(0, "partition"))
    with pytest.raises(
        DataError,
        match="class 0 has 100 samples, but 10 clients with samples=600 need 600 of it; use at most samples=100",
    ):
        Acid(5, 600)(labels, 10, stream(0, "partition"))
    with pytest.raises(DataError, match="use at most samples=100"):
        Acid(5, 101)(labels, 10, stream(0, "partition"))
    with pytest.raises(DataError, match="there are only 10"):
        Acid(11)(labels, 10, stream(0, "partition"))
    with pytest.raises(DataError, match="needs a common test set"):
        federate(from_tensors(torch.zeros(1000, 1), torch.from_numpy(labels)), Acid(5, 50), 10, held_out="common")
    with pytest.raises(ConfigError, match="classes"):
        Acid(0)
    with pytest.raises(DataError, match="10 classes cannot be cut into 3 equal parts"):
        Niid1(3)(labels, 10, stream(0, "partition"))
    with pytest.raises(DataError, match="cannot hold all 10 classes"):
        Niid1(5)(labels, 4, stream(0, "partition"))


def test_alid_is_acid_with_one_permutation_per_client_for_training_and_test() -> None:
    source = pools(train=500, test=100)
    acid, alid, other = (
        federate(source, kind(5, 50, 10), 100, seed=seed, held_out="common")
        for kind, seed in ((Acid, 1), (Alid, 1), (Alid, 2))
    )
    for a, b in ((acid.train, alid.train), (acid.held_out, alid.held_out)):
        assert np.array_equal(a.index.rows, b.index.rows)
        assert b.arrays is a.arrays  # nothing is copied: the arrays keep the common numbers
        assert b.relabel is alid.train.relabel
    names = alid.train.relabel
    assert names is not None
    assert acid.train.relabel is None
    assert np.array_equal(np.sort(names.numpy(), axis=1), np.tile(np.arange(10), (100, 1)))
    assert len(np.unique(names.numpy(), axis=0)) > 90
    for split in (alid.train, alid.held_out):
        for client in (0, 57):
            samples = split.client(client)
            assert torch.equal(samples.y, names[client, split.arrays.y[torch.from_numpy(split.index[client])]])
    assert other.train.relabel is not None
    assert not torch.equal(names, other.train.relabel)
    assert len({f.provenance["fingerprint"] for f in (acid, alid, other)}) == 3


def test_alid_with_local_names_has_as_many_outputs_as_a_client_has_classes() -> None:
    """Names 0 ... s - 1, one for each of a client's classes, the same in training and test; nobody loses a sample."""
    source, kinds = pools(train=500, test=100), (Alid(5, 50, 10), Alid(5, 50, 10, names="local"))
    common, local = (federate(source, kind, 100, seed=1, held_out="common", validation=0.1) for kind in kinds)
    assert local.classes == 5
    assert common.classes == 10
    orders = set()
    splits = [(getattr(common, name), getattr(local, name)) for name in ("train", "validation", "held_out")]
    for k in range(100):
        names = {}
        for a, b in splits:
            assert np.array_equal(a.index[k], b.index[k])
            rows = torch.from_numpy(b.index[k])
            for number, name in zip(a.arrays.y[rows].tolist(), b.client(k).y.tolist(), strict=True):
                assert names.setdefault(number, name) == name
        assert sorted(names) == sorted((k + j) % 10 for j in range(5))
        assert sorted(names.values()) == list(range(5))
        orders.add(tuple(names[(k + j) % 10] for j in range(5)))
    assert len(orders) > 30
    assert len(local.test) == 1000
    assert int(local.test.y.max()) == 4
    with pytest.raises(ConfigError, match="names is 'own'"):
        Alid(names="own")
    with pytest.raises(ConfigError, match="takes no label noise and no target"):
        federate(source, kinds[1], 100, held_out="common", noise="symmetric")


def test_pooled_alid_keeps_what_each_client_calls_its_samples() -> None:
    source = pools(train=50, test=20)
    alid = federate(source, Alid(5, 20, 5), 10, held_out="common", unseen=0.2)
    pooled = alid.pooled()
    assert len(pooled) == 1
    assert pooled.train.relabel is None
    for split, pool, clients in ((alid.train, pooled.train, 8), (alid.held_out, pooled.held_out, 10)):
        y = torch.cat([split.client(k).y for k in range(clients)])
        assert torch.equal(pool.client(0).y, y)
    assert torch.equal(source.train.y, torch.arange(500) % 10)


@given(
    st.sampled_from([(10, 5), (100, 5), (10, 2), (6, 3)]), st.sampled_from([5, 10, 20, 50, 10_000]), st.integers(0, 9)
)
@settings(max_examples=15)
def test_niid1_clients_hold_an_equal_part_of_the_categories(kind: tuple[int, int], clients: int, seed: int) -> None:
    classes, parts = kind
    labels = np.arange(classes * max(20, 2 * clients * (classes // parts) // classes)) % classes
    index = Niid1(parts)(labels, clients, stream(seed, "partition"))
    assert np.array_equal(np.sort(index.rows), np.arange(len(labels)))
    pairs = np.unique(index.owners * classes + labels[index.rows])
    assert (np.bincount(pairs // classes, minlength=clients) == classes // parts).all()
    holders = np.bincount(pairs % classes, minlength=classes)
    assert holders.max() - holders.min() <= 1
    if clients == parts:
        assert (holders == 1).all()


def test_niid2_is_the_dirichlet_over_clients_of_beta() -> None:
    labels = np.arange(200_000) % 1000
    index = Niid2(0.5)(labels, 10, stream(0, "partition"))
    shares = np.bincount(index.owners * 1000 + labels[index.rows], minlength=10_000).reshape(10, 1000) / 200
    assert shares.var() == pytest.approx(9 / (100 * (10 * 0.5 + 1)), rel=0.1)  # of a Dirichlet with beta 1/2


def test_ten_thousand_clients_take_no_loop_over_clients() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    for partition in (Acid(3, 5, 3), Alid(3, 5, 3), Niid1(), Niid2(500.0)):
        _, work = calls(lambda partition=partition: partition(labels, 10_000, stream(0, "partition")))
        assert work < 5000
    alid = Alid()
    orders, work = calls(lambda: alid.relabelling(10_000, 100, stream(0, "relabel")))
    assert orders.shape == (10_000, 100)
    assert work < 100

"""From a source and a partition to the samples of each client."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.counting import calls
from hypothesis import given
from hypothesis import strategies as st

from fedloom.base.errors import ConfigError, DataError
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.data import federate, from_tensors, sources, statistics
from fedloom.data.partitions import Dirichlet, DirichletBalanced, Iid, Natural, Partition, Pathological
from fedloom.data.plots import plot_labels, plot_samples
from fedloom.data.sources import Source
from fedloom.data.split import by_distribution, split_rows, systematic


def toy(samples: int = 1000, classes: int = 10, **more: object) -> Source:
    return from_tensors(torch.zeros(samples, 2), torch.arange(samples) % classes, **more)  # type: ignore[arg-type]


def rows(federation: Federation) -> np.ndarray:
    return np.concatenate([s.index.rows for s in (federation.train, federation.validation, federation.held_out)])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.floats(0, 0.4), st.floats(0, 0.5), st.integers(0, 99))
def test_splits_are_disjoint_stratified_and_leave_something_to_train_on(
    sizes: list[int], validation: float, held_out: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, sum(sizes))
    index = Index(rng.permutation(sum(sizes)), np.concatenate([[0], np.cumsum(sizes)]))
    parts = split_rows(index, labels, validation, held_out, rng)
    assert (parts[0].sizes >= 1).all()
    for k, n in enumerate(sizes):
        assert sorted(np.concatenate([p[k] for p in parts])) == sorted(index[k])
        assert len(parts[2][k]) == min(round(n * held_out), n - 1)
        assert len(parts[0][k]) == max(n - round(n * held_out) - round(n * validation), 1)
        here = np.bincount(labels[index[k]], minlength=4)
        test_counts = np.bincount(labels[parts[2][k]], minlength=4)
        away = test_counts + np.bincount(labels[parts[1][k]], minlength=4)
        assert (np.abs(away - here * away.sum() / n) <= 1).all()
        assert (np.abs(test_counts - away * test_counts.sum() / max(away.sum(), 1)) <= 1).all()


def test_common_test_set_is_dealt_by_each_clients_labels() -> None:
    labels, test_labels = np.arange(6000) % 10, np.arange(1000) % 10
    index = Pathological(2)(labels, 20, np.random.default_rng(0))
    test_index = by_distribution(index, labels, test_labels, np.random.default_rng(0))
    assert np.array_equal(np.sort(test_index.rows), np.arange(1000))
    for k in range(20):
        here = np.bincount(labels[index[k]], minlength=10) / 6
        assert (np.abs(np.bincount(test_labels[test_index[k]], minlength=10) - here) <= 1).all()


def test_rows_are_taken_from_a_random_offset() -> None:
    """Each member of a group is taken equally often, and each client gets a test row of a class equally often."""
    member_counts, client_counts, rng = np.zeros(5), np.zeros(3), np.random.default_rng(0)
    index, labels = Index.of([[0, 1], [2, 3], [4, 5]]), np.zeros(6, dtype=int)
    for _ in range(500):
        member_counts += systematic(np.array([5]), np.array([2]), rng)
        client_counts += by_distribution(index, labels, np.zeros(1, dtype=int), rng).sizes
    np.testing.assert_allclose(member_counts / 500, 2 / 5, atol=0.08)
    np.testing.assert_allclose(client_counts / 500, 1 / 3, atol=0.08)


def test_the_images_are_held_once_and_the_same_seed_is_the_same_federation() -> None:
    source = toy()
    first, same, other = (federate(source, "dirichlet_balanced", 10, seed, validation=0.1) for seed in (1, 1, 2))
    assert first.train.arrays is source.train
    assert first.validation.arrays is source.train
    assert np.array_equal(np.sort(rows(first)), np.arange(1000))
    assert first.provenance["fingerprint"] == same.provenance["fingerprint"] != other.provenance["fingerprint"]
    assert json.loads(json.dumps(first.provenance))["partition"] == {
        "name": "dirichlet_balanced",
        "alpha": 0.3,
        "sigma": 0.0,
    }


def test_natural_clients_have_names_and_their_own_test_rows() -> None:
    who = ["ann", "bob", "cyd", "ann", "bob", "cyd"]
    source = toy(
        6, 2, clients=who, x_test=torch.zeros(3, 2), y_test=torch.tensor([0, 1, 0]), clients_test=["cyd", "ann", "dan"]
    )
    federation = federate(source, "natural", held_out="natural")
    assert federation.names == ("ann", "bob", "cyd")
    assert [federation.held_out.index[k].tolist() for k in range(3)] == [[1], [], [0]]
    with pytest.warns(UserWarning, match="keeps 2 of 3"):
        federation = federate(source, "natural", 2, held_out=0.0)
    assert federation.provenance["left_out"]["samples"] == 2
    assert len(federation.provenance["left_out"]["groups"]) == 1
    with pytest.raises(DataError, match="needs partition 'natural'"):
        federate(source, "iid", 2, held_out="natural")


def test_validation_samples_of_other_clients_are_named_as_such() -> None:
    data = {"x_validation": torch.zeros(2, 2), "y_validation": torch.tensor([0, 1])}
    source = toy(4, 2, clients=["ann", "bob"] * 2, clients_validation=["cyd", "dan"], **data)
    with pytest.raises(DataError, match="no validation sample of tensors belongs to a training client; give a fract"):
        federate(source, held_out=0.0)


def test_the_client_of_each_sample_is_a_partition_of_any_source() -> None:
    owners = np.arange(1442) % 5
    federation = federate("digits", owners)
    assert federation.names == ("0", "1", "2", "3", "4")
    rows = federate(sources.make("digits"), [np.flatnonzero(owners == client) for client in range(5)])
    assert federation.provenance["fingerprint"] == rows.provenance["fingerprint"]
    with pytest.raises(DataError, match=r"digits has 1442 samples, but client ids of shape \[3\]; give one each"):
        federate("digits", ["ann", "bob", "ann"])


def test_bad_requests_get_one_sentence() -> None:
    with pytest.raises(ConfigError, match="leave something to train on"):
        federate(toy(), "iid", 10, validation=0.5, held_out=0.5)
    with pytest.raises(ConfigError, match="held_out must be a fraction"):
        federate(toy(), "iid", 10, held_out="own")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="needs a common test set"):
        federate(toy(), "iid", 10, held_out="common")
    with pytest.raises(ConfigError, match="did you mean 'dirichlet'"):
        federate("digits", "dirichlett", 10)
    real = from_tensors(torch.zeros(10, 2), torch.rand(10))
    assert len(federate(real, Iid(), 5)) == 5
    with pytest.raises(DataError, match="reads class numbers"):
        federate(real, Dirichlet(), 5)


def test_settings_of_a_partition_or_source_are_told_where_they_belong() -> None:
    for call, message in (
        (lambda: federate(toy(), "dirichlet", alpha=0.1, clients=4), r"partitions\.make\('dirichlet', alpha=0\.1\)"),  # type: ignore[arg-type]
        (lambda: federate("folder:scans", by_client=True), r"sources\.make\('folder:scans', by_client=True\)"),  # type: ignore[arg-type]
        (lambda: federate(toy(), "iid", n_clients=4), r"no argument 'n_clients'; settings .* mean 'clients'"),  # type: ignore[arg-type]
        (lambda: federate(toy(), Iid(), alpha=0.1), r"no argument 'alpha'; settings of a partition or source go to"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=message):
            call()


@pytest.mark.exhaustive
def test_a_million_clients_take_no_loop_and_little_memory() -> None:
    samples, clients = 2_000_000, 1_000_000
    source = from_tensors(torch.zeros(samples, 1), torch.arange(samples) % 10)
    federation, work = calls(lambda: federate(source, Iid(), clients, held_out=0.5))
    assert work < 2000
    assert len(federation) == clients
    assert federation.train.index.sizes.tolist() == [1] * clients
    index_bytes = sum(
        a.nbytes for s in (federation.train, federation.held_out) for a in (s.index.rows, s.index.offsets)
    )
    assert index_bytes < 50e6


def test_statistics_by_hand() -> None:
    source = from_tensors(torch.zeros(6, 1), torch.tensor([0, 0, 0, 1, 1, 2]), clients=[0, 0, 1, 1, 1, 1])
    summary = statistics(federate(source, Natural(), held_out=0.0))
    assert summary["samples"] == {"total": 6, "min": 2, "median": 3.0, "mean": 3.0, "max": 4}
    assert summary["classes_per_client"] == {"min": 1, "median": 2.0, "mean": 2.0, "max": 3}
    assert summary["label_entropy"]["min"] == 0
    assert summary["label_entropy"]["max"] == pytest.approx(1.5 * np.log(2))
    assert summary["entropy_of_all"] == pytest.approx(np.log(2) / 2 + np.log(3) / 3 + np.log(6) / 6)
    assert json.dumps(summary)
    numbers = statistics(federate((np.zeros((10, 1)), np.linspace(0, 1, 10)), Iid(), clients=2))
    assert numbers.keys() == summary.keys() - {"classes", "classes_per_client", "label_entropy", "entropy_of_all"}


@pytest.mark.parametrize(
    ("partition", "clients"), [(Dirichlet(), 5), (DirichletBalanced(), 41), (Iid(), 1), (Pathological(3), 1200)]
)
def test_pictures_are_drawn_for_few_and_many(partition: Partition, clients: int, tmp_path: Path) -> None:
    path = plot_labels(federate(toy(6000), partition, clients), tmp_path / "labels.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 8000


def test_names_with_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    source = from_tensors(
        torch.rand(8, 1, 4, 4), torch.arange(8) % 2, names=["$5_$", "more"], clients=["$a_$", "b"] * 4
    )
    assert plot_labels(federate(source), tmp_path / "labels.png").exists()
    assert plot_samples(source.train, "$_$", tmp_path / "samples.png").exists()


def test_every_source_says_licence_and_citation() -> None:
    for name in ("digits", "synthetic"):
        source = sources.make(name)
        assert source.licence
        assert source.citation.startswith("@")
    assert [entry.name for entry in sources if not entry.summary] == []


@pytest.mark.parametrize(
    ("rows", "offsets", "sentence"),
    [
        ([0, 1, -1], [0, 2, 3], "an index lists row -1, but there are 4 samples"),
        ([0, 1, 4], [0, 2, 3], "an index lists row 4, but there are 4 samples"),
        ([0, 1, 2], [0, 2, 5], "the offsets of an index end with 5, but it lists 3 rows"),
        ([0, 1, 2], [0, 2], "the offsets of an index end with 2, but it lists 3 rows"),
        ([0, 1, 2], [0, 3, 2, 3], "begin with 0 and never fall"),
        ([0, 1, 2], [1, 3], "begin with 0 and never fall"),
        ([0, 1, 2], [], "the offsets of an index are a NumPy array of whole numbers"),
        ([0.0, 1.0], [0, 2], "the rows of an index are a NumPy array of whole numbers"),
        ([[0, 1]], [0, 2], "the rows of an index are a NumPy array of whole numbers"),
    ],
)
def test_an_index_made_by_hand_lists_rows_client_by_client(rows: list, offsets: list, sentence: str) -> None:
    arrays = Arrays(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), classes=2)
    with pytest.raises(DataError, match=sentence):
        Split(arrays, Index(np.array(rows), np.array(offsets)))


def test_an_index_of_lists_is_no_index() -> None:
    arrays = Arrays(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), classes=2)
    with pytest.raises(DataError, match="the rows of an index are a NumPy array"):
        Split(arrays, Index([0, 1], [0, 2]))  # type: ignore[arg-type]


def test_a_list_is_no_fraction() -> None:
    with pytest.raises(ConfigError, match=r"held_out must be a fraction .*, not \[1\]"):
        federate("digits", "iid", clients=2, held_out=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["x", "y"])
def test_arrays_are_tensors(name: str) -> None:
    arrays = {"x": torch.zeros(3, 2), "y": torch.zeros(3, dtype=torch.int64)}
    message = rf"{name} of Arrays is a tensor, not an ndarray of shape \[3.*; use torch.as_tensor\({name}\)"
    with pytest.raises(DataError, match=message):
        Arrays(**{**arrays, name: arrays[name].numpy()}, classes=2)


def test_every_class_has_a_name_or_none_has() -> None:
    with pytest.raises(DataError, match="there are 2 class names for 3 classes; name each class once"):
        Arrays(torch.zeros(2, 1), torch.tensor([0, 1]), 3, ("no", "yes"))

"""Invariants of all partitions for any labels, and the properties that each one promises."""

import itertools
from collections import Counter

import numpy as np
import pytest
from helpers.counting import calls
from hypothesis import given
from hypothesis import strategies as st

from fedloom.base.errors import ConfigError, DataError
from fedloom.base.rng import stream
from fedloom.data.partitions import (
    Dirichlet,
    DirichletBalanced,
    Iid,
    Lognormal,
    Natural,
    Partition,
    Pathological,
    Shards,
    fill,
    lognormal_sizes,
    partitions,
)

KINDS = [
    Iid(),
    Lognormal(1.0),
    Shards(2),
    Pathological(2),
    Dirichlet(0.2),
    DirichletBalanced(0.2),
    DirichletBalanced(0.5, 0.8),
]


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Labels (some classes rare or absent), a number of clients, a seed."""
    seed = draw(st.integers(0, 10_000))
    rng = np.random.default_rng(seed)
    classes = draw(st.integers(1, 12))
    weights = rng.dirichlet(np.full(classes, draw(st.sampled_from([0.3, 5.0]))))
    labels = rng.choice(classes, draw(st.integers(1, 400)), p=weights)
    return labels, draw(st.integers(1, 25)), seed


@pytest.mark.parametrize("partition", KINDS, ids=lambda p: p.name)
@given(problem=problems())
def test_each_sample_sits_at_exactly_one_client_or_it_is_refused(
    partition: Partition, problem: tuple[np.ndarray, int, int]
) -> None:
    labels, clients, seed = problem
    try:
        index = partition(labels, clients, stream(seed, "partition"))
    except DataError:
        return
    assert len(index) == clients
    assert np.array_equal(np.sort(index.rows), np.arange(len(labels)))
    assert index.sizes.min() >= 1
    assert all((np.diff(index[client]) > 0).all() for client in range(clients))
    again = partition(labels, clients, stream(seed, "partition"))
    assert np.array_equal(index.rows, again.rows)
    assert np.array_equal(index.offsets, again.offsets)


@pytest.mark.parametrize("partition", KINDS, ids=lambda p: p.name)
def test_another_seed_is_another_partition(partition: Partition) -> None:
    labels = np.arange(1000) % 10
    first, other = (partition(labels, 10, stream(seed, "partition")) for seed in (1, 2))
    assert not np.array_equal(first.rows, other.rows)


@given(problems(), st.integers(1, 4))
def test_pathological_clients_see_exactly_k_classes_dealt_evenly(problem: tuple[np.ndarray, int, int], k: int) -> None:
    labels, clients, seed = problem
    try:
        index = Pathological(k)(labels, clients, stream(seed, "partition"))
    except DataError:
        return
    class_sets = [set(labels[index[client]].tolist()) for client in range(clients)]
    assert {len(s) for s in class_sets} == {k}
    holders = [sum(c in s for s in class_sets) for c in np.unique(labels)]
    assert max(holders) - min(holders) <= 1


def test_pathological_pairs_are_dealt_at_random() -> None:
    index = Pathological(2)(np.arange(20_000) % 10, 1000, stream(0, "partition"))
    pairs = {tuple(np.unique(index[client] % 10)) for client in range(1000)}
    assert len(pairs) == 45


@given(st.integers(1, 40), st.integers(0, 400))
def test_sizes_of_equal_partitions_differ_by_one(clients: int, extra: int) -> None:
    labels = np.zeros(clients + extra, dtype=int)
    for partition in (Iid(), DirichletBalanced(0.3)):
        sizes = partition(labels, clients, stream(0, "partition")).sizes
        assert sizes.max() - sizes.min() <= 1


def test_shards_come_from_few_labels() -> None:
    labels = np.arange(6000) % 10
    index = Shards(2)(labels, 100, stream(0, "partition"))  # shards of 30 do not straddle labels
    assert set(index.sizes) == {60}
    assert max(len(set(labels[index[client]])) for client in range(100)) == 2


def test_lognormal_sizes_have_the_asked_deviation() -> None:
    index = Lognormal(0.5)(np.zeros(1_000_000, dtype=int), 2000, stream(0, "partition"))
    assert np.log(index.sizes).std() == pytest.approx(0.5, rel=0.06)
    balanced = DirichletBalanced(1.0, sigma=0.5)(np.arange(1_000_000) % 10, 2000, stream(0, "partition"))
    assert np.log(balanced.sizes).std() == pytest.approx(0.5, rel=0.06)


def test_the_largest_remainders_of_sizes_round_up() -> None:
    exact = np.exp(0.5 * stream(0, "sizes").standard_normal(50))
    exact *= 1000 / exact.sum()
    rest = lognormal_sizes(1000, 50, 0.5, stream(0, "sizes")) - exact
    assert np.abs(rest).max() < 1
    assert (1 - rest[rest > 0]).min() >= (-rest[rest < 0]).max()


@pytest.mark.parametrize("seed", range(4))
def test_lognormal_sizes_beyond_what_numbers_hold_are_all_of_one_client(seed: int) -> None:
    for sigma in (1e4, 1e30):
        assert sorted(lognormal_sizes(100, 3, sigma, stream(seed, "partition"))) == [0, 0, 100]


def entropies(labels: np.ndarray, index: object) -> np.ndarray:
    counts = np.stack([np.bincount(labels[index[k]], minlength=10) for k in range(len(index))])  # type: ignore[index, arg-type]
    p = counts / counts.sum(1, keepdims=True)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(1)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0])
def test_balanced_dirichlet_has_the_label_entropy_of_its_priors_while_labels_last(alpha: float) -> None:
    """With many more samples than places nothing runs out; then counts are multinomial in the prior."""
    rng = np.random.default_rng(0)
    labels = np.arange(60_000) % 10
    index = DirichletBalanced(alpha)(labels, 100, stream(3, "partition"))
    prior = rng.dirichlet(np.full(10, alpha), 4000)
    p = np.stack([rng.multinomial(600, q) for q in prior]) / 600
    expected = -(p * np.log(np.where(p > 0, p, 1))).sum(1).mean()
    # the classes that run out first push the last clients towards what is left, which raises entropy a little
    assert expected - 0.15 < entropies(labels, index).mean() < expected + 0.3


@pytest.mark.parametrize(("alpha", "modes"), [(0.6, {4, 5}), (0.3, {3, 4})])
def test_balanced_dirichlet_has_the_published_number_of_classes_in_80_percent_of_a_clients_data(
    alpha: float, modes: set[int]
) -> None:
    """Acar, thesis, A.1.1 and figure A.3: MNIST, 100 clients, "mostly 4 or 5" at Dirichlet .6, "3 or 4" at .3."""
    labels = np.arange(60_000) % 10
    index = DirichletBalanced(alpha)(labels, 100, stream(0, "partition"))
    largest_first = np.stack([np.sort(np.bincount(labels[index[k]], minlength=10))[::-1] for k in range(100)])
    classes = 1 + (largest_first.cumsum(1) < 0.8 * 600).sum(1)
    assert {*np.argsort(np.bincount(classes))[-2:]} == modes


def one_place_after_the_other(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """The balanced Dirichlet partition as described in the papers, without optimisation; counts [K, C]."""
    left = np.bincount(labels, minlength=10).astype(float)
    prior = rng.dirichlet(np.full(10, alpha), clients)
    counts = np.zeros((clients, 10))
    for k in rng.permutation(np.repeat(np.arange(clients), len(labels) // clients)):
        p = prior[k] * (left > 0)
        p = p / p.sum() if p.sum() > 0 else (left > 0) / (left > 0).sum()
        c = rng.choice(10, p=p)
        left[c] -= 1
        counts[k, c] += 1
    return counts


def test_balanced_dirichlet_is_the_sequential_process() -> None:
    """Same mean entropy, and same mean of the largest class, as drawing one place after the other."""
    labels, trials = np.arange(600) % 10, 40
    slow, fast = [], []
    for trial in range(trials):
        counts = one_place_after_the_other(labels, 12, 0.3, np.random.default_rng(trial))
        index = DirichletBalanced(0.3)(labels, 12, stream(trial, "partition"))
        quick = np.stack([np.bincount(labels[index[k]], minlength=10) for k in range(12)])
        for label_counts, into in ((counts, slow), (quick, fast)):
            p = label_counts / label_counts.sum(1, keepdims=True)
            into.append([-(p * np.log(np.where(p > 0, p, 1))).sum(1).mean(), p.max(1).mean()])
    difference = np.mean(slow, 0) - np.mean(fast, 0)
    error = np.sqrt((np.var(slow, 0) + np.var(fast, 0)) / trials)
    assert (np.abs(difference) < 4 * error).all()


def test_places_are_filled_with_the_exact_probabilities() -> None:
    """All orders in which two clients can draw 1 + 1 + 3 samples, against their probabilities."""
    places, available, trials = np.array([0, 1, 0, 1, 0]), np.array([1, 1, 3]), 6000
    prior = np.array([[0.6, 0.3, 0.1], [0.5, 0.2, 0.3]])
    rng = np.random.default_rng(0)
    frequencies = Counter(tuple(fill(places, prior, available, rng).tolist()) for _ in range(trials))
    orders = set(itertools.permutations([0, 1, 2, 2, 2]))
    assert set(frequencies) <= orders
    surprise = 0.0
    for order in orders:
        left, p = available.copy(), 1.0
        for client, c in zip(places, order, strict=True):
            alive = prior[client] * (left > 0)
            p *= alive[c] / alive.sum()
            left[c] -= 1
        surprise += (frequencies[order] - trials * p) ** 2 / (trials * p)
    assert surprise < 50  # chi-square with 19 degrees of freedom: exceeded once in eight thousand


def test_dirichlet_over_clients_gives_shares_of_the_asked_concentration() -> None:
    """p_k ~ Beta(alpha, (K - 1) alpha): variance (K - 1) / (K^2 (K alpha + 1))."""
    labels, clients, alpha = np.repeat(np.arange(1000), 200), 10, 0.5
    index = Dirichlet(alpha)(labels, clients, stream(0, "partition"))
    shares = np.stack([np.bincount(labels[index[k]], minlength=1000) for k in range(clients)]) / 200
    assert shares.mean() == pytest.approx(1 / clients)
    assert shares.var() == pytest.approx((clients - 1) / (clients**2 * (clients * alpha + 1)), rel=0.1)


def test_min_size_is_kept_or_refused_after_bounded_redraws() -> None:
    labels = np.arange(2000) % 10
    assert Dirichlet(0.3, min_size=20)(labels, 20, stream(0, "partition")).sizes.min() >= 20
    with pytest.raises(DataError, match="in each of 4 draws"):
        Dirichlet(0.01, min_size=90, redraws=3)(labels, 20, stream(0, "partition"))
    with pytest.raises(DataError, match=r"cannot give 20 clients 101 each"):
        Iid(min_size=101)(labels, 20, stream(0, "partition"))


@pytest.mark.parametrize(
    ("partition", "clients", "message"),
    [
        (Iid(), 101, "cannot give 101 clients 1 each"),
        (Iid(), None, "needs a number of clients"),
        (Iid(), 0, "at least 1 client, not clients=0"),
        (Shards(11), 10, "more shards than samples"),
        (Pathological(11), 10, "there are only 10"),
        (Pathological(2), 4, "cannot hold all 10 classes"),
        (Pathological(8), 20, "has 10 samples, but 16 clients need one"),
        (Natural(), None, "natural client ids"),
    ],
)
def test_the_impossible_gets_one_sentence(partition: Partition, clients: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        partition(np.arange(100) % 10, clients, stream(0, "partition"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("dirichlet", {"alpha": 0.0}),
        ("dirichlet", {"alpha": float("nan")}),
        ("dirichlet_balanced", {"alpha": -1.0}),
        ("dirichlet_balanced", {"sigma": -0.1}),
        ("lognormal", {"sigma": 0.0}),
        ("shards", {"shards": 0}),
        ("pathological", {"classes": 0}),
        ("iid", {"min_size": 0}),
        ("iid", {"redraws": -1}),
    ],
)
def test_meaningless_settings_are_refused_when_made(name: str, setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        partitions.make(name, **setting)


def test_extreme_concentrations_still_deal_everything() -> None:
    labels = np.arange(3000) % 10
    for alpha in (1e-8, 1e6):
        index = DirichletBalanced(alpha)(labels, 30, stream(0, "partition"))
        assert set(index.sizes) == {100}


def test_natural_ids_are_clients_and_what_is_left_out_is_said() -> None:
    groups = np.array([5, 9, 5, 7, 9, 5, -1])
    with pytest.warns(UserWarning, match=r"keeps 3 of 4 natural ids and leaves out 1 of 7 samples \(ids -1\)"):
        index = Natural()(np.zeros(7, int), None, stream(0, "partition"), groups)
    assert [index[k].tolist() for k in range(3)] == [[0, 2, 5], [3], [1, 4]]
    with pytest.warns(UserWarning, match=r"keeps 1 of 4"):
        index = Natural(min_size=3)(np.zeros(7, int), 1, stream(0, "partition"), groups)
    assert index.rows.tolist() == [0, 2, 5]
    with pytest.raises(DataError, match="too few for 4 clients"):
        Natural()(np.zeros(7, int), 4, stream(0, "partition"), groups)
    with pytest.warns(UserWarning, match=r"keeps 5 of 50"):
        some = [Natural()(np.zeros(50, int), 5, stream(seed, "partition"), np.arange(50)).rows for seed in range(2)]
    assert len({*some[0].tolist(), *some[1].tolist()}) > 5  # drawn at random


def test_partitions_loop_over_neither_samples_nor_clients() -> None:
    """A pass over classes at most; for 60 000 samples and 10 000 clients that takes a few hundredths of a second."""
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    for partition in (Iid(), Lognormal(), Shards(), Pathological(), DirichletBalanced()):
        for clients in (100, 10_000):
            _, work = calls(lambda p=partition, k=clients: p(labels, k, stream(0, "partition")))
            assert work < 2000


def test_every_partition_describes_itself_as_plain_data() -> None:
    assert Dirichlet(0.1).describe() == {"name": "dirichlet", "alpha": 0.1}
    assert Iid(min_size=3).describe() == {"name": "iid", "min_size": 3}
    assert [entry.name for entry in partitions if not entry.summary] == []


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
def test_dirichlet_over_clients_has_the_label_entropy_of_a_direct_simulation(alpha: float) -> None:
    """Each class spread over the clients by its own Dirichlet draw: mean entropy of a client's labels, in nats."""
    classes, clients, per_class = 10, 20, 600
    labels = np.repeat(np.arange(classes), per_class)

    def entropy(counts: np.ndarray) -> float:  # [clients, classes]
        p = counts / counts.sum(1, keepdims=True)
        return float(-np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1).mean())

    partition_entropies, direct_entropies = [], []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        index = partitions.make("dirichlet", alpha=alpha)(labels, clients, rng)
        partition_entropies.append(entropy(np.array([np.bincount(labels[rows], minlength=classes) for rows in index])))
        shares = np.random.default_rng(1000 + seed).dirichlet(np.full(clients, alpha), size=classes)
        direct_entropies.append(entropy(per_class * shares.T + 1e-9))
    spread = sum(np.std(values) / np.sqrt(len(values)) for values in (partition_entropies, direct_entropies))
    assert abs(np.mean(partition_entropies) - np.mean(direct_entropies)) < 4 * spread + 0.02

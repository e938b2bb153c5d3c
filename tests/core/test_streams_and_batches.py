"""Random streams, batches, cohorts and index lists: laws that hold for all inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.base import rng, tree
from fedloom.base.errors import ConfigError, DataError
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.local import Local, cohort_size, draw_cohort

seeds = st.integers(0, 2**40)
counters = st.lists(st.integers(0, 2**31), max_size=3)
purposes = st.sampled_from(["cohort", "batches", "dropout", "model", "drop"])


# --- streams -----------------------------------------------------------------------------------------


@given(seeds, purposes, counters)
def test_a_stream_depends_on_its_counters_alone(seed: int, purpose: str, numbers: list[int]) -> None:
    first = rng.stream(seed, purpose, *numbers).random(4)
    np.random.default_rng(0).random(9)
    rng.stream(seed + 1, purpose, *numbers).random(3)
    np.testing.assert_array_equal(first, rng.stream(seed, purpose, *numbers).random(4))


@given(st.tuples(seeds, purposes, counters), st.tuples(seeds, purposes, counters))
def test_different_counters_give_different_streams(a: tuple, b: tuple) -> None:
    same = a == b
    assert (rng.key(a[0], a[1], *a[2]) == rng.key(b[0], b[1], *b[2])) == same


def test_counters_are_not_run_together() -> None:
    assert rng.key(1, "batches", 12, 3) != rng.key(1, "batches", 1, 23)
    assert rng.key(11, "batches", 2) != rng.key(1, "batches", 12)


@given(seeds, counters)
def test_pytorch_generators_follow_a_stream(seed: int, numbers: list[int]) -> None:
    rng.seed_torch(seed, "dropout", *numbers)
    first = torch.rand(3)
    torch.rand(5)
    rng.seed_torch(seed, "dropout", *numbers)
    assert torch.equal(first, torch.rand(3))
    assert 0 <= rng.torch_seed(seed, "dropout", *numbers) < 2**63


# --- batches ---------------------------------------------------------------------------------------------


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(0, 50),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 5),
    round=st.integers(0, 9),
    client=st.integers(0, 9),
)
def test_every_epoch_is_a_permutation(
    size: int, batch_size: int, epochs: int, seed: int, round: int, client: int
) -> None:
    rows = np.arange(100, 100 + 3 * size, 3)
    local = Local(epochs=epochs, batch_size=batch_size)
    batches = local.batches(rows, seed, round, client)
    assert len(batches) == local.steps_for(size)
    assert len(batches) % epochs == 0
    width = batch_size or size
    steps = len(batches) // epochs
    for epoch in range(epochs):
        epoch_batches = batches[epoch * steps : (epoch + 1) * steps]
        np.testing.assert_array_equal(np.sort(np.concatenate(epoch_batches)), rows)
        assert [len(b) for b in epoch_batches[:-1]] == [width] * (steps - 1)
        assert 1 <= len(epoch_batches[-1]) <= width
    again = local.batches(rows, seed, round, client)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


@given(size=st.integers(1, 30), batch_size=st.integers(0, 40), steps=st.integers(1, 25))
def test_steps_are_counted_exactly_and_go_through_all_data_before_they_repeat(
    size: int, batch_size: int, steps: int
) -> None:
    local = Local(epochs=7, steps=steps, batch_size=batch_size)
    batches = local.batches(np.arange(size), 0, 0, 0)
    assert len(batches) == steps == local.steps_for(size)
    counts = np.bincount(np.concatenate(batches), minlength=size)
    assert counts.max() - counts.min() <= 1


def test_orders_differ_between_epochs_rounds_clients_and_seeds() -> None:
    local, rows = Local(epochs=2, batch_size=0), np.arange(50)
    first, second = local.batches(rows, 0, 0, 0)
    other_orders = [local.batches(rows, *key)[0] for key in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    orders = {tuple(order) for order in (first, second, *other_orders)}
    assert len(orders) == 5


def test_streams_are_fixed_for_good() -> None:
    """A change here changes every published figure and breaks every resume: it must be made on purpose."""
    batches = Local(batch_size=4, epochs=2).batches(np.arange(6), seed=3, round=1, client=2)
    assert [b.tolist() for b in batches] == [[5, 0, 4, 1], [2, 3], [0, 2, 5, 3], [4, 1]]
    assert draw_cohort(100, 5, seed=3, round=1).tolist() == [18, 32, 52, 64, 82]
    assert draw_cohort(100, 5, seed=3, round=1, probability=0.05).tolist() == [7, 18, 32, 45, 62]
    assert rng.torch_seed(3, "model") == 650677552112377261


@given(st.floats(0.01, 2), st.floats(0.1, 1), st.integers(1, 20), st.integers(0, 200))
def test_learning_rate(lr: float, decay: float, every: int, round: int) -> None:
    rates = [Local(lr=lr, lr_decay=decay, decay_every=every).rate(t) for t in (0, round)]
    assert rates[0] == lr
    expected = lr
    for t in range(1, round + 1):
        expected *= decay if t % every == 0 else 1.0
    assert rates[1] == pytest.approx(expected)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ConfigError, match=r"^local\.nesterov needs momentum above 0"):
        Local(nesterov=True)


# --- cohorts -----------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.floats(1e-6, 1.0))
def test_cohort_size(clients: int, participation: float) -> None:
    size = cohort_size(clients, participation)
    assert 1 <= size <= clients
    assert size <= max(1.0, participation * clients + 1e-6)
    assert size > participation * clients - 1


@pytest.mark.parametrize(
    ("clients", "participation", "size"), [(100, 0.29, 29), (10, 0.7, 7), (3, 1 / 3, 1), (7, 1, 7)]
)
def test_cohort_size_is_not_fooled_by_rounding(clients: int, participation: float, size: int) -> None:
    assert cohort_size(clients, participation) == size


@given(st.integers(1, 300), st.data())
def test_fixed_cohorts(clients: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, clients))
    seed, round = data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))
    cohort = draw_cohort(clients, size, seed, round)
    assert len(cohort) == size == len(set(cohort.tolist()))
    assert cohort.tolist() == sorted(cohort.tolist())
    assert cohort[0] >= 0
    assert cohort[-1] < clients
    np.testing.assert_array_equal(cohort, draw_cohort(clients, size, seed, round))


def test_every_client_is_as_likely_as_any_other() -> None:
    """6000 draws of 3 out of 10: each client comes 1800 times, give or take four standard deviations."""
    for probability in (None, 0.3):
        counts = np.zeros(10)
        for t in range(6000):
            counts[draw_cohort(10, 3, 0, t, probability=probability)] += 1
        assert np.abs(counts - 1800).max() < 4 * np.sqrt(6000 * 0.3 * 0.7) + 6000 * 0.3 * 0.7**10 * 2


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.integers(0, 30))
def test_bernoulli_cohorts_are_never_empty(clients: int, probability: float, round: int) -> None:
    cohort = draw_cohort(clients, 1, 0, round, probability=probability)
    assert 1 <= len(cohort) <= clients
    assert cohort.tolist() == sorted(set(cohort.tolist()))
    if probability == 1.0:
        assert len(cohort) == clients


def test_bernoulli_sizes_have_the_mean_and_spread_of_coins() -> None:
    sizes = np.array([len(draw_cohort(40, 4, 1, t, probability=0.1)) for t in range(4000)])
    none = 0.9**40
    mean = 4 / (1 - none)  # redrawn if nobody came
    square = (40 * 0.1 * 0.9 + 16) / (1 - none)
    assert sizes.mean() == pytest.approx(mean, abs=4 * 1.9 / np.sqrt(4000))
    assert sizes.var() == pytest.approx(square - mean**2, rel=0.15)


@pytest.mark.parametrize("participation", [0.0, -0.1, 1.01, float("nan")])
def test_participation_out_of_range(participation: float) -> None:
    with pytest.raises(ConfigError, match=rf"^participation is {participation:g}, but it must lie in \(0, 1\]\.$"):
        cohort_size(10, participation)


@pytest.mark.parametrize("cohort", [0, -3, 11])
def test_cohort_out_of_range(cohort: int) -> None:
    with pytest.raises(ConfigError, match=f"^cohort is {cohort}, but it must lie between 1 and .* clients, 10"):
        cohort_size(10, 1.0, cohort)


# --- index lists -----------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 1000), max_size=8), max_size=12))
def test_index_round_trip(lists: list[list[int]]) -> None:
    index = Index.of(lists)
    assert len(index) == len(lists)
    assert [index[i].tolist() for i in range(len(index))] == lists
    assert index.sizes.tolist() == [len(part) for part in lists]
    assert index.owners.tolist() == [i for i, part in enumerate(lists) for _ in part]
    assert index.rows.dtype == np.int64


def test_data_that_cannot_be_used() -> None:
    x, y = torch.zeros(3, 2), torch.tensor([0, 1, 1])
    with pytest.raises(DataError, match="3 inputs but 2 labels"):
        Arrays(x, y[:2], 2)
    with pytest.raises(DataError, match="sample 1 has label 1, but there are 1 classes"):
        Arrays(x, y, 1)
    with pytest.raises(DataError, match="sample 2 has label -1"):
        Arrays(x, torch.tensor([0, 0, -1]), 2)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = x.clone()
        spoiled[1, 0] = bad
        with pytest.raises(DataError, match="NaN or infinity in 1 of 3 samples, first in sample 1; fill"):
            Arrays(spoiled, y, 2)
    assert len(Arrays(torch.full((3, 2), 3e38), y, 2)) == 3, "a sum that overflows is not a NaN"


def test_federations_that_cannot_be() -> None:
    arrays = Arrays(torch.zeros(3, 2), torch.tensor([0, 1, 1]), 2)
    one_client, two_clients = Split(arrays, Index.of([[0, 1, 2]])), Split(arrays, Index.of([[0], [1]]))
    with pytest.raises(DataError, match="at least one client"):
        Federation(Split(arrays, Index.of([])), one_client, one_client, arrays)
    with pytest.raises(DataError, match="the same clients"):
        Federation(one_client, two_clients, one_client, arrays)


def test_pooling_keeps_every_sample_once() -> None:
    arrays = Arrays(torch.zeros(5, 2), torch.tensor([0, 1, 1, 0, 0]), 2)
    split = Split(arrays, Index.of([[3, 1], [], [0, 4]]))
    pooled = Federation(split, split, split, arrays).pooled()
    assert len(pooled) == 1
    assert pooled.train.index[0].tolist() == [3, 1, 0, 4]


# --- trees -------------------------------------------------------------------------------------------------


def test_bytes_are_counted_by_type() -> None:
    t = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(2, 5), "c": torch.zeros(0)}
    assert tree.nbytes(t) == 3 * 8 + 10 * 4


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=5))
def test_finite_is_true_of_finite_numbers_only(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    assert tree.finite({"a": torch.zeros(2), "b": values}) == bool(torch.isfinite(values).all())

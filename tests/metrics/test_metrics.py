"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.counting import calls

from fedloom.base.errors import ConfigError
from fedloom.metrics import (
    best,
    best_round,
    fedavg_rounds,
    final_smoothed,
    gini,
    parameters_to_target,
    quantiles,
    rounds_to_target,
    smoothed,
    summary,
    worst,
)

NAN = float("nan")


@pytest.mark.parametrize(
    ("clients", "count"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (29, 2), (30, 3), (70, 7), (1000, 100)]
)
def test_the_worst_tenth_is_at_least_one_client_and_rounds_down(clients: int, count: int) -> None:
    values = np.random.default_rng(0).permutation(np.arange(clients, dtype=float))
    assert worst(values) == np.arange(count).mean()
    assert best(values) == np.arange(clients - count, clients).mean()


def test_a_share_that_is_rounded_to_below_a_whole_number_is_that_number() -> None:
    assert 0.29 * 100 < 29
    assert worst(np.arange(100.0), 0.29) == 14.0


def test_summary_by_hand() -> None:
    figures = summary([0.2, 0.4, 0.6, 0.8, NAN], weights=[1, 1, 1, 7, 90])
    expected = {
        "clients": 4,
        "mean": 0.5,
        "weighted": (0.2 + 0.4 + 0.6 + 5.6) / 10,
        "std": math.sqrt((0.09 + 0.01 + 0.01 + 0.09) / 4),
        "worst10": 0.2,
        "best10": 0.8,
        "worst": 0.2,
        "best": 0.8,
        "gini": (2 * (0.2 + 0.4 + 0.6 + 0.2 + 0.4 + 0.2)) / (2 * 16 * 0.5),
        "gap": 0.6,
        "q10": 0.26,
        "q25": 0.35,
        "q50": 0.5,
        "q75": 0.65,
        "q90": 0.74,
    }
    assert figures == pytest.approx(expected)


def test_for_losses_the_worst_is_the_largest() -> None:
    figures = summary([1.0, 2.0, 5.0], direction="min")
    assert (figures["worst"], figures["best"], figures["worst10"]) == (5.0, 1.0, 5.0)


def test_no_client_gives_nan_everywhere() -> None:
    figures = summary([NAN, NAN])
    assert figures.pop("clients") == 0
    assert all(math.isnan(v) for v in figures.values())


def test_gini_equals_its_definition() -> None:
    x = np.random.default_rng(1).random(23)
    direct = np.abs(x[:, None] - x[None]).sum() / (2 * len(x) ** 2 * x.mean())
    assert gini(x) == pytest.approx(direct)
    assert gini(3 * x) == pytest.approx(direct)


@pytest.mark.parametrize(("value", "clients"), [(0.1, 10), (0.3, 7), (0.7, 100)])
def test_gini_of_equal_values_is_zero_however_their_sums_round(value: float, clients: int) -> None:
    assert gini([value] * clients) == 0


def test_an_infinite_value_leaves_only_undefined_what_it_makes_so() -> None:
    figures = summary([1.0, 2.0, 3.0, math.inf], direction="min")
    assert (figures["mean"], figures["worst"], figures["gap"], figures["best"]) == (math.inf, math.inf, math.inf, 1.0)
    assert math.isnan(figures["std"])
    assert math.isnan(figures["gini"])
    assert list(quantiles([math.inf, 2.0, 1.0]).values()) == [1.0, 1.2, 1.5, 2.0, math.inf, math.inf, math.inf]
    assert quantiles([math.inf, 1.0, math.inf], at=(0.25, 0.75)) == {0.25: math.inf, 0.75: math.inf}


def test_summaries_are_written_with_arrays() -> None:
    """They are made of every metric in every evaluation, of 100 000 clients as well."""
    x = np.random.default_rng(2).random(2000)
    assert calls(lambda: summary(x))[1] < calls(lambda: summary(x[:20]))[1] + 20


def test_quantile_curve_ends_at_worst_and_best() -> None:
    curve = quantiles([0.3, 0.1, 0.2])
    assert (curve[0.0], curve[0.5], curve[1.0]) == (0.1, 0.2, 0.3)


def test_target_is_reached_at_the_first_crossing_and_equality_counts() -> None:
    rounds = [5, 10, 15, 20]
    assert rounds_to_target([0.1, NAN, 0.8, 0.7], rounds, 0.8) == 15
    assert rounds_to_target([0.1, NAN, 0.8, 0.9], rounds, 0.91) is None
    assert rounds_to_target([2.0, 1.0, 0.5, 0.6], rounds, 1.0, "min") == 10
    assert parameters_to_target([0.1, NAN, 0.8, 0.7], [10, 20, 30, 40], 0.8) == 30
    assert parameters_to_target([], [], 0.8) is None


def test_scaffold_costs_twice_fedavg() -> None:
    assert fedavg_rounds(10 * 50 * 7, 50, 10) == 7
    assert fedavg_rounds(2 * 10 * 50 * 7, 50, 10) == 14


def test_the_best_and_the_smoothed_value_are_two_figures() -> None:
    values, rounds = [0.4, 0.8, 0.6, NAN], [1, 2, 3, 4]
    assert best_round(values, rounds) == (2, 0.8)
    assert final_smoothed(values, rounds, 0.5) == (3, pytest.approx(0.6))
    assert best_round([NAN], [1]) is final_smoothed([NAN], [1]) is None


def test_smoothing_starts_at_the_first_value() -> None:
    np.testing.assert_allclose(smoothed([NAN, 2.0, 4.0], 0.75), [NAN, 2.0, 2.5])
    np.testing.assert_array_equal(smoothed([3.0, 1.0], 0.0), [3.0, 1.0])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: worst([1.0, 0.5], 10), "in \\(0, 1\\], not 10"),
        (lambda: rounds_to_target([1.0], [1], 0.5, "up"), "no direction 'up'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_use_ends_in_a_sentence(call, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()

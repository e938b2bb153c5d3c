"""The two toy problems: supports, balance, and their characteristic local minima."""

import numpy as np
import pytest

from fedloom.base.errors import ConfigError
from fedloom.data.sources import sources
from fedloom.data.sources.included import BLUE, CENTRES


def test_intervals_are_balanced_and_lie_where_the_paper_says():
    source = sources.make("intervals", seed=3, samples=4000)
    x, y = source.train.x[:, 0].numpy(), source.train.y.numpy()
    inside = np.any([(x >= a) & (x <= b) for a, b in BLUE], axis=0)
    assert (inside == (y == 1)).all()
    assert y.mean() == 0.5
    assert x.min() >= 0
    assert x.max() <= 9
    # uniform within a colour: two thirds of blue in the longer interval, red by the lengths 2, 2, 2
    assert abs((x[y == 1] > 4).mean() - 2 / 3) < 0.04
    assert np.abs(np.histogram(x[y == 0], bins=[0, 2, 5, 9])[0] / (y == 0).sum() - 1 / 3).max() < 0.04


def test_one_interval_is_wrong_on_a_sixth_at_best():
    source = sources.make("intervals")
    x, y = source.train.x[:, 0].numpy(), source.train.y.numpy()
    ends = np.linspace(0, 9, 46)
    errors = {(a, b): (((x > a) & (x < b)).astype(int) != y).mean() for a in ends for b in ends if a < b}
    best = min(errors, key=lambda ab: errors[ab])
    assert best[1] == pytest.approx(7.0, abs=0.2)
    assert best[0] == pytest.approx(5.0, abs=0.2) or best[0] == pytest.approx(2.0, abs=0.2)
    assert errors[best] == pytest.approx(1 / 6, abs=0.03)  # the shorter cluster, or the red between the two


def test_gaussians_have_their_centres_their_spread_and_their_colours():
    source = sources.make("six_gaussians", samples=6000)
    x, y = source.train.x.numpy(), source.train.y.numpy()
    assert np.bincount(y).tolist() == [2000, 2000, 2000]
    for label, balls in enumerate(CENTRES.values()):
        points = x[y == label]
        nearest = np.argmin([((points - c) ** 2).sum(1) for c in balls], axis=0)
        for number, centre in enumerate(balls):
            np.testing.assert_allclose(points[nearest == number].mean(0), centre, atol=0.03)
            np.testing.assert_allclose(points[nearest == number].var(0), 0.05, rtol=0.15)


def test_a_seed_is_a_draw_and_a_spread_must_be_positive():
    first, again, other = (sources.make("six_gaussians", seed=s).train.x for s in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
    with pytest.raises(ConfigError, match="greater than 0"):
        sources.make("six_gaussians", r=0)


@pytest.mark.parametrize("name", ["intervals", "six_gaussians"])
@pytest.mark.parametrize(("key", "least"), [("samples", 1), ("test_samples", 0)])
def test_a_toy_problem_has_points(name: str, key: str, least: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}': {key} must be at least {least}, not -1"):
        sources.make(name, **{key: -1})

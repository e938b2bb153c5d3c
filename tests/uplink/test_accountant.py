"""ε of a run: as dp-accounting says, as a hand derivation says, and found the other way round."""

from __future__ import annotations

from math import exp, inf, sqrt
from typing import Any

import pytest
from helpers.federations import classes
from helpers.runs import experiment, go
from scipy.optimize import brentq
from scipy.stats import norm

from fedloom.experiment.federated import FederatedTask
from fedloom.experiment.privacy import Accountant, accountant
from fedloom.methods import make

dp = pytest.importorskip("dp_accounting", reason="the extra 'privacy' is not installed")

DELTA = 1e-5
MANY = tuple([3] * 400)


def gaussian(mu: float) -> float:
    """Balle and Wang 2018, theorem 8: δ = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ), μ = sensitivity over deviation."""

    def excess(e: float) -> float:
        return norm.cdf(mu / 2 - e / mu) - exp(e) * norm.cdf(-mu / 2 - e / mu) - DELTA

    return brentq(excess, 0, 500, xtol=1e-12)


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (3.0, 20), (20.0, 500)])
@pytest.mark.parametrize("kind", ["local", "fixed"])
def test_without_subsampling_it_is_the_gaussian_mechanism_by_hand(kind: str, noise: float, rounds: int) -> None:
    """One client's data replaced moves a sum of clipped uploads by 2C at most."""
    found = Accountant(kind, noise, 50, 50, DELTA).epsilon(rounds)
    assert abs(found - gaussian(2 * sqrt(rounds) / noise)) < 1e-6


@pytest.mark.parametrize(("noise", "cohort", "rounds"), [(1.0, 40, 10), (0.7, 200, 3), (4.0, 100, 100)])
def test_random_cohorts_are_poisson_sampled(noise: float, cohort: int, rounds: int) -> None:
    known = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    known.compose(dp.PoissonSampledDpEvent(cohort / 1000, dp.GaussianDpEvent(noise)), rounds)
    expected = known.get_epsilon(DELTA)
    assert abs(Accountant("poisson", noise, 1000, cohort, DELTA).epsilon(rounds) - expected) < 1e-6


@pytest.mark.parametrize(("noise", "cohort", "rounds"), [(4.0, 40, 10), (8.0, 100, 100)])
def test_cohorts_of_a_fixed_size_are_sampled_without_replacement(noise: float, cohort: int, rounds: int) -> None:
    known = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    known.compose(dp.SampledWithoutReplacementDpEvent(1000, cohort, dp.GaussianDpEvent(noise / 2)), rounds)
    assert abs(Accountant("fixed", noise, 1000, cohort, DELTA).epsilon(rounds) - known.get_epsilon(DELTA)) < 1e-6


def test_cohorts_that_may_be_empty_cost_what_drawing_them_anew_does() -> None:
    few = Accountant("poisson", 5.0, 60, 12, DELTA)
    redrawn = 0.8**60
    plain = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    plain.compose(dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(5.0)), 2)
    found = few.epsilon(2)
    assert found > plain.get_epsilon(DELTA)
    assert plain.get_delta(found) + (1 + exp(found)) * 2 * redrawn <= DELTA * (1 + 1e-6)
    assert Accountant("poisson", 5.0, 6, 1, DELTA).epsilon(1) == inf


CONDITIONS: dict[str, dict[str, Any]] = {
    "poisson": {"sampling": "bernoulli", "participation": 0.1},
    "fixed": {"participation": 0.1},
    "all": {},
}


@pytest.mark.parametrize("kind", CONDITIONS)
def test_epsilon_stands_in_every_round_and_in_the_summary(kind: str) -> None:
    settings = {"federation": classes(MANY), "rounds": 2, **CONDITIONS[kind]}
    result = go(make("dp_fedavg", noise=2.0), **settings)
    known = accountant(experiment(make("dp_fedavg", noise=2.0), **settings))
    assert known is not None
    assert known.kind == {"all": "fixed"}.get(kind, kind)
    assert known.cohort == {"all": 400}.get(kind, 40)
    assert [r["privacy/epsilon"] for r in result.history] == [known.epsilon(1), known.epsilon(2)]
    assert result.summary["privacy"]["delta"] == DELTA
    assert result.summary["privacy"]["noise"] == 2.0
    replaced = "one client more or less" if kind == "poisson" else "one client's data replaced"
    assert result.summary["privacy"]["neighbours"] == replaced


@pytest.mark.parametrize("kind", ["poisson", "all"])
def test_noise_is_found_from_a_target(kind: str) -> None:
    settings = {"federation": classes(MANY), "rounds": 30, **CONDITIONS[kind]}
    task = FederatedTask(experiment(make("dp_fedavg", epsilon=3.0), **settings))
    found: Any = task.experiment.method.uplink[0]
    assert task.accountant is not None
    assert 2.97 < task.accountant.epsilon(30) <= 3.0
    assert task.accountant.noise == found.noise == task.plan.method.uplink[0].noise  # type: ignore[attr-defined]

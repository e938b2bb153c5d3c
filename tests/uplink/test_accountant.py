"""ε of a run: against dp-accounting, against a hand derivation, and inverted."""

from __future__ import annotations

from functools import partial
from math import exp, inf, sqrt
from typing import Any

import pytest
from helpers.federations import classes
from helpers.runs import experiment, go
from scipy.optimize import brentq
from scipy.stats import norm

from fedloom.core.local import Local
from fedloom.data import federate
from fedloom.experiment.federated import FederatedTask
from fedloom.experiment.privacy import Accountant, accountant
from fedloom.experiment.trained import TrainedRun
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.uplink import ClipNoise
from fedloom_apps.customise.calibration import CCVR
from fedloom_apps.customise.model import ClassModels

dp = pytest.importorskip("dp_accounting", reason="the extra 'privacy' is not installed")
pytestmark = pytest.mark.extra("dp_accounting")

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


@pytest.mark.parametrize(("noise", "other"), [(4.0, 4.0), (4.0, 2.5)])
def test_sums_of_all_clients_add_to_the_rounds(noise: float, other: float) -> None:
    """Three sums with noise z', after ten rounds with noise z: as dp-accounting composes them one by one."""
    asked = 3 * (noise / other) ** 2
    poisson = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    poisson.compose(dp.PoissonSampledDpEvent(0.04, dp.GaussianDpEvent(noise)), 10)
    expected = poisson.compose(dp.GaussianDpEvent(other), 3).get_epsilon(DELTA)
    assert abs(Accountant("poisson", noise, 1000, 40, DELTA).epsilon(10, asked) - expected) < 1e-3 * expected
    fixed = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    fixed.compose(dp.SampledWithoutReplacementDpEvent(1000, 40, dp.GaussianDpEvent(noise / 2)), 10)
    expected = fixed.compose(dp.GaussianDpEvent(other / 2), 3).get_epsilon(DELTA)
    assert abs(Accountant("fixed", noise, 1000, 40, DELTA).epsilon(10, asked) - expected) < 1e-6
    together = gaussian(2 * sqrt(10 / noise**2 + 3 / other**2))
    for kind in ("fixed", "local"):
        assert abs(Accountant(kind, noise, 50, 50, DELTA).epsilon(10, asked) - together) < 1e-6


def test_class_statistics_add_to_a_private_run() -> None:
    federation = federate("digits", "iid", clients=8, held_out=0.0)

    def trained(method: str, **settings: Any) -> TrainedRun:
        model = partial(models.make, "mlp", classes=10, inputs=(1, 8, 8))
        local = Local(epochs=1, batch_size=32, lr=0.1)
        return go(make(method, **settings), federation=federation, model=model, local=local, rounds=2).trained

    private, known = trained("dp_fedavg", noise=0.05), Accountant("fixed", 0.05, 8, 8, DELTA)
    found = ClassModels(private, uplink=[ClipNoise(clip=1e4, noise=1e-6)]).privacy
    assert found is not None
    assert (found.delta, found.neighbours) == (DELTA, "one client's data replaced")
    assert found.epsilon == known.epsilon(2, 3 * (0.05 / 1e-6) ** 2)
    bare, ccvr = ClassModels(private, uplink=[]).privacy, CCVR().privacy(private)
    assert bare is not None
    assert ccvr is not None
    assert (bare.epsilon, ccvr.epsilon) == (inf, known.epsilon(2, 1))
    assert known.epsilon(2, 1) > known.epsilon(2)
    assert ClassModels(trained("fedavg")).privacy is None


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

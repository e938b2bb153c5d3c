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
    epsilon = Accountant(kind, noise, 50, 50, DELTA).epsilon(rounds)
    assert abs(epsilon - gaussian(2 * sqrt(rounds) / noise)) < 1e-6


@pytest.mark.parametrize(("noise", "cohort", "rounds"), [(1.0, 40, 10), (0.7, 200, 3), (4.0, 100, 100)])
def test_random_cohorts_are_poisson_sampled(noise: float, cohort: int, rounds: int) -> None:
    reference = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    reference.compose(dp.PoissonSampledDpEvent(cohort / 1000, dp.GaussianDpEvent(noise)), rounds)
    expected = reference.get_epsilon(DELTA)
    assert abs(Accountant("poisson", noise, 1000, cohort, DELTA).epsilon(rounds) - expected) < 1e-6


@pytest.mark.parametrize(("noise", "cohort", "rounds"), [(4.0, 40, 10), (8.0, 100, 100)])
def test_cohorts_of_a_fixed_size_are_sampled_without_replacement(noise: float, cohort: int, rounds: int) -> None:
    reference = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    reference.compose(dp.SampledWithoutReplacementDpEvent(1000, cohort, dp.GaussianDpEvent(noise / 2)), rounds)
    assert abs(Accountant("fixed", noise, 1000, cohort, DELTA).epsilon(rounds) - reference.get_epsilon(DELTA)) < 1e-6


@pytest.mark.parametrize(("noise", "noise_of_sums"), [(4.0, 4.0), (4.0, 2.5)])
def test_sums_of_all_clients_add_to_the_rounds(noise: float, noise_of_sums: float) -> None:
    """Three sums with noise z', after ten rounds with noise z: as dp-accounting composes them one by one."""
    weight = 3 * (noise / noise_of_sums) ** 2
    poisson = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    poisson.compose(dp.PoissonSampledDpEvent(0.04, dp.GaussianDpEvent(noise)), 10)
    expected = poisson.compose(dp.GaussianDpEvent(noise_of_sums), 3).get_epsilon(DELTA)
    assert abs(Accountant("poisson", noise, 1000, 40, DELTA).epsilon(10, weight) - expected) < 1e-3 * expected
    fixed = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    fixed.compose(dp.SampledWithoutReplacementDpEvent(1000, 40, dp.GaussianDpEvent(noise / 2)), 10)
    expected = fixed.compose(dp.GaussianDpEvent(noise_of_sums / 2), 3).get_epsilon(DELTA)
    assert abs(Accountant("fixed", noise, 1000, 40, DELTA).epsilon(10, weight) - expected) < 1e-6
    total = gaussian(2 * sqrt(10 / noise**2 + 3 / noise_of_sums**2))
    for kind in ("fixed", "local"):
        assert abs(Accountant(kind, noise, 50, 50, DELTA).epsilon(10, weight) - total) < 1e-6


def test_class_statistics_add_to_a_private_run() -> None:
    federation = federate("digits", "iid", clients=8, held_out=0.0)

    def trained_run(method: str, **settings: Any) -> TrainedRun:
        model = partial(models.make, "mlp", classes=10, inputs=(1, 8, 8))
        local = Local(epochs=1, batch_size=32, lr=0.1)
        return go(make(method, **settings), federation=federation, model=model, local=local, rounds=2).trained

    private, accountant_of_run = trained_run("dp_fedavg", noise=0.05), Accountant("fixed", 0.05, 8, 8, DELTA)
    statement = ClassModels(private, uplink=[ClipNoise(clip=1e4, noise=1e-6)]).privacy
    assert statement is not None
    assert (statement.delta, statement.neighbours) == (DELTA, "one client's data replaced")
    assert statement.epsilon == accountant_of_run.epsilon(2, 3 * (0.05 / 1e-6) ** 2)
    without_noise, ccvr = ClassModels(private, uplink=[]).privacy, CCVR().privacy(private)
    assert without_noise is not None
    assert ccvr is not None
    assert (without_noise.epsilon, ccvr.epsilon) == (inf, accountant_of_run.epsilon(2, 1))
    assert accountant_of_run.epsilon(2, 1) > accountant_of_run.epsilon(2)
    assert ClassModels(trained_run("fedavg")).privacy is None


def test_cohorts_that_may_be_empty_cost_what_drawing_them_anew_does() -> None:
    few = Accountant("poisson", 5.0, 60, 12, DELTA)
    redrawn = 0.8**60
    plain = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    plain.compose(dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(5.0)), 2)
    epsilon = few.epsilon(2)
    assert epsilon > plain.get_epsilon(DELTA)
    assert plain.get_delta(epsilon) + (1 + exp(epsilon)) * 2 * redrawn <= DELTA * (1 + 1e-6)
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
    expected = accountant(experiment(make("dp_fedavg", noise=2.0), **settings))
    assert expected is not None
    assert expected.kind == {"all": "fixed"}.get(kind, kind)
    assert expected.cohort == {"all": 400}.get(kind, 40)
    assert [r["privacy/epsilon"] for r in result.history] == [expected.epsilon(1), expected.epsilon(2)]
    assert result.summary["privacy"]["delta"] == DELTA
    assert result.summary["privacy"]["noise"] == 2.0
    replaced = "one client more or less" if kind == "poisson" else "one client's data replaced"
    assert result.summary["privacy"]["neighbours"] == replaced


@pytest.mark.parametrize("kind", ["poisson", "all"])
def test_noise_is_found_from_a_target(kind: str) -> None:
    settings = {"federation": classes(MANY), "rounds": 30, **CONDITIONS[kind]}
    task = FederatedTask(experiment(make("dp_fedavg", epsilon=3.0), **settings))
    clip_noise: Any = task.experiment.method.uplink[0]
    assert task.accountant is not None
    assert 2.97 < task.accountant.epsilon(30) <= 3.0
    assert task.accountant.noise == clip_noise.noise == task.plan.method.uplink[0].noise  # type: ignore[attr-defined]

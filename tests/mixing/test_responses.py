"""The source of fair policies' responses, the fallback without any, and the step size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import with_validation
from helpers.rounds import round_info
from helpers.runs import experiment, go, theta

from fedloom.base.errors import ConfigError
from fedloom.core.context import RoundInfo
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.methods import make
from fedloom.parts.drift import Scaffold
from fedloom.parts.mixing import AAggFFD, AAggFFS
from fedloom.parts.objectives import CrossEntropy

FAIR = ("afl", "q_ffl", "term", "aaggff_s", "aaggff_d")
FULL_BATCH = Local(steps=1, batch_size=0, lr=0.2)


def mean_response(name: str, federation: Federation, **changes: Any) -> float:
    """The mixture of the losses that a policy reads in the first round, before any training."""
    method = make(name, response="validation")
    record = go(method, federation=federation, rounds=1, local=FULL_BATCH, **changes).history[0]
    return record["mixing/validation_objective"]


@pytest.mark.parametrize("name", FAIR)
def test_responses_on_validation_samples_never_touch_training_samples(name: str) -> None:
    """Other training samples change no response, other validation samples do; local work sees the former alone."""
    usual = mean_response(name, with_validation())
    assert mean_response(name, with_validation(moved_client=3)) == usual
    assert mean_response(name, with_validation(shift=0.5)) != usual
    moved = [theta(go(make(name), federation=with_validation(shift), local=FULL_BATCH)) for shift in (0.0, 0.5)]
    assert np.array_equal(*moved), "response=train reads no validation sample"


@pytest.mark.parametrize("name", FAIR)
@pytest.mark.parametrize("compute", ["live", "batched"])
def test_engines_agree_on_held_out_responses(name: str, compute: str) -> None:
    same = {"federation": with_validation(), "local": Local(batch_size=4, lr=0.2), "compute": compute}
    ends = [theta(go(make(name, response="validation"), engine=engine, **same)) for engine in ("serial", "processes")]
    assert np.array_equal(*ends)
    assert not np.array_equal(ends[0], theta(go(make(name), **same)))


def test_responses_without_validation_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mixing 'term' takes responses on validation samples.* validation=0\.1"):
        experiment(make("term", response="validation"))
    with pytest.raises(ConfigError, match="response is 'test'; there are: train, validation"):
        make("afl", response="test")
    with pytest.raises(ConfigError, match="prior is 'size'"):
        make("aaggff_s", prior="size")
    with pytest.raises(ConfigError, match="step is 'large'"):
        make("aaggff_d", step="large")


def test_a_prior_of_samples_at_zero_tilt_is_fedavg() -> None:
    """Where all responses are equal: with a constant loss, that of a model that says nothing."""

    class Silent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 3)
            torch.nn.init.zeros_(self.head.weight)
            torch.nn.init.zeros_(self.head.bias)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    where: dict[str, Any] = {"model": Silent, "rounds": 1, "local": FULL_BATCH}
    for name, cohort in (("aaggff_s", None), ("aaggff_d", 4)):
        model = theta(go(make(name, prior="samples"), cohort=cohort, **where))
        np.testing.assert_allclose(model, theta(go("fedavg", cohort=cohort, **where)), rtol=0, atol=1e-12)
        assert np.abs(theta(go(make(name), cohort=cohort, **where)) - model).max() > 1e-4


def test_a_client_that_is_missing_at_first_has_its_own_prior_later() -> None:
    sizes, state, part = np.array([30, 10, 60]), {}, AAggFFS(prior="samples")
    for members in ([0, 1], [0, 1, 2]):
        info = round_info(sizes[members], [0.7] * len(members), cohort=members, clients=3, sizes=sizes)
        state, p = part.coefficients(state, info)
        np.testing.assert_allclose(p, sizes[members] / sizes[members].sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("policy", [AAggFFS(prior="samples"), AAggFFD(prior="samples"), AAggFFD(step="visits")])
def test_a_larger_loss_has_a_larger_weight_than_the_prior_gives(policy: AAggFFS | AAggFFD) -> None:
    n, state = np.array([30, 10, 20, 40]), {}
    prior = n / n.sum() if policy.prior == "samples" else np.full(4, 0.25)
    for _ in range(30):
        state, p = policy.coefficients(state, round_info(n, [0.5, 0.5, 2.0, 0.5]))
    tilt = p / prior
    assert tilt[2] > 1.02
    assert (tilt[[0, 1, 3]] < 1).all()
    if isinstance(policy, AAggFFD):  # its tilt is a factor
        np.testing.assert_allclose(tilt[[0, 1, 3]], tilt[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("rounds", "ratio"),
    [(2000, 2 * np.sqrt(1000 / 5)), (300, 2 * np.sqrt(300 / np.log(1000))), (1, np.sqrt(8 / np.log(1000)))],
)
def test_the_step_by_visits_is_that_much_larger_where_few_clients_come(rounds: int, ratio: float) -> None:
    """2√(K/n) times the published one once clients were there log K times, before that 2√((t + 1)/log K)."""
    info = RoundInfo.of_cohort(range(5), [10] * 5, clients=1000, losses=[1.0, 0.1, 0.1, 0.1, 0.1])
    before = {"total": torch.zeros(1000, dtype=torch.float64), "rounds": torch.tensor(rounds - 1)}
    odds = []
    for step in ("published", "visits"):
        _, p = AAggFFD(step=step).coefficients(before, info)
        odds.append(np.log(p[0] / p[1]))  # of two members
    assert odds[1] / odds[0] == pytest.approx(ratio, rel=0.005)


def test_held_out_responses_combine_with_drift_and_private_heads() -> None:
    part = make("term", response="validation").mixing
    for name in ("fedper", "p_avg_proto", "ditto"):
        method = replace(make(name), mixing=part, name="m")
        assert np.isfinite(theta(go(method, federation=with_validation(), local=FULL_BATCH))).all()
    scaffold = Method("m", (CrossEntropy(),), drift=Scaffold(), mixing=part)
    assert np.isfinite(theta(go(scaffold, federation=with_validation(), local=FULL_BATCH))).all()

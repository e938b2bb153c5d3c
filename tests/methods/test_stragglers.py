"""Clients that stop early (FedProx, section 5.2): who they are, what they send, and what becomes of averages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.federations import classes, regression
from helpers.networks import line, tanh_net
from helpers.runs import experiment, go, theta

from fedloom.base.errors import ConfigError
from fedloom.cli import main
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Drift, Mixing
from fedloom.experiment.federated import run
from fedloom.experiment.fingerprint import describe
from fedloom.methods import make
from fedloom.parts.drift import FedNovaDrift, Scaffold
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import SquaredError
from fedloom.rounds.plan import ClientPlan

SIZES, RATE, STEPS = (6, 14, 8, 20), 0.05, 9
SLOW = Local(steps=STEPS, batch_size=0, lr=RATE, stragglers=0.6)


def data(seed: int = 3) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draw = np.random.default_rng(seed)
    x = [draw.normal(size=(n, 3)) for n in SIZES]
    return x, [rows @ draw.normal(size=3) for rows in x]


def trained(drift: Drift, rounds: int, local: Local = SLOW, mixing: Mixing | None = None) -> np.ndarray:
    method = Method("test", (SquaredError(),), drift=drift, mixing=mixing or Mixing())
    return theta(run(experiment(method, federation=regression(*data()), model=line(3), local=local, rounds=rounds)))


def step_counts(round: int, local: Local = SLOW, seed: int = 0) -> list[int]:
    return [local.steps_of(n, seed, round, client) for client, n in enumerate(SIZES)]


def descent(start: np.ndarray, client: int, steps: int) -> np.ndarray:
    """θ after so many steps of gradient descent on the mean of (y - xθ)²/2."""
    (x, y), at = (values[client] for values in data()), start
    for _ in range(steps):
        at = at - RATE * x.T @ (x @ at - y) / len(y)
    return at


def fedavg(start: np.ndarray, steps: list[int]) -> np.ndarray:
    shares = np.array(SIZES) / sum(SIZES)
    return sum(p * descent(start, i, steps[i]) for i, p in enumerate(shares))


def fednova(start: np.ndarray, steps: list[int]) -> np.ndarray:
    """Wang et al. 2020, eq. (6): θ - τ_eff Σ p_i (θ - θ_i)/τ_i with τ_eff = Σ p_i τ_i."""
    shares = np.array(SIZES) / sum(SIZES)
    moved = [p * (start - descent(start, i, steps[i])) / steps[i] for i, p in enumerate(shares)]
    return start - shares @ np.array(steps) * sum(moved)


@pytest.mark.parametrize(("drift", "rule"), [(Drift(), fedavg), (FedNovaDrift(), fednova)])
def test_what_they_have_done_enters_the_average(
    drift: Drift, rule: Callable[[np.ndarray, list[int]], np.ndarray]
) -> None:
    seed = experiment().seed
    at = trained(drift, 1, Local(steps=1, batch_size=0, lr=1e-300))
    for round in range(5):
        steps = step_counts(round, seed=seed)
        assert min(steps) < STEPS
        at = rule(at, steps)
        np.testing.assert_allclose(trained(drift, round + 1), at, rtol=1e-10)


def test_control_variates_count_the_steps_that_were_taken() -> None:
    """SCAFFOLD's option II with K_i steps, c_i = c_i - c + (θ - θ_i)/(K_i η), reaches the minimiser."""
    x, y = data()
    best = np.linalg.solve(
        sum(rows.T @ rows / len(rows) for rows in x), sum(rows.T @ z / len(z) for rows, z in zip(x, y, strict=True))
    )
    assert np.abs(trained(Scaffold(), 80, mixing=Uniform()) - best).max() < 1e-5
    assert np.abs(trained(Drift(), 80, mixing=Uniform()) - best).max() > 1e-2


def test_they_are_drawn_anew_in_every_round_as_the_paper_draws_them() -> None:
    counts = np.array([SLOW.steps_of(8, 1, round, client) for round in range(200) for client in range(50)])
    early = counts[counts < STEPS]
    # a straggler may draw all steps: P(τ < E) = s (E - 1)/E
    assert len(early) / len(counts) == pytest.approx(0.6 * (STEPS - 1) / STEPS, abs=0.02)
    frequencies = np.bincount(early, minlength=STEPS)[1:] / len(early)
    np.testing.assert_allclose(frequencies, 1 / (STEPS - 1), atol=0.02)
    assert counts.min() == 1
    again = Local(steps=STEPS, batch_size=3, lr=9.0, stragglers=0.6)  # whatever else is set, and whatever the method
    assert step_counts(4) == step_counts(4, again) != step_counts(5)


def planned(share: float) -> ClientPlan:
    local = Local(epochs=2, batch_size=3, stragglers=share)
    return ClientPlan.of(tanh_net().double(), make("fedavg"), classes().train, local, seed=3)


def test_their_batches_are_the_first_of_those_that_they_would_have_had() -> None:
    slow, fast = planned(1.0), planned(0.0)
    for client in range(len(slow.data.index)):
        few, everything = (plan.batches(7, client) for plan in (slow, fast))
        steps = slow.local.steps_of(len(slow.data.index[client]), 3, 7, client)
        assert [batch.tolist() for batch in few] == [batch.tolist() for batch in everything][:steps]


def test_batches_that_nobody_may_know_come_from_the_private_seed() -> None:
    """Poisson sampling is private only if the server cannot draw it again; the number of steps is no secret."""
    local = Local(steps=6, batch_size=3, dp_clip=1.0, poisson=True, stragglers=0.5)
    plan = ClientPlan.of(tanh_net().double(), make("fedavg"), classes().train, local, seed=3)
    hidden = replace(plan, noise_seed=99)
    batches = [[batch.tolist() for batch in p.batches(0, 1)] for p in (plan, hidden)]
    assert batches[0] != batches[1]
    assert len(batches[0]) == len(batches[1]) == plan.steps(0, 1)
    supports = [[batch.tolist() for batch in p.batches(0, 1, "support")] for p in (plan, hidden)]
    assert supports[0] == supports[1]


def test_without_them_nothing_changes() -> None:
    names = [describe(experiment(local=local), planned(0.0))["local"] for local in (Local(), SLOW)]
    assert ["stragglers" in name for name in names] == [False, True]  # so that runs begun before them go on
    same = [go(local=Local(steps=1, batch_size=4, lr=0.1, stragglers=share)) for share in (0.0, 1.0)]
    assert (theta(same[0]) == theta(same[1])).all()  # of one step, one is taken


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"stragglers must lie in \[0, 1\]"):
            Local(stragglers=share)
    assert main(["online", "--dry-run", "local.stragglers=0.5"]) == 2
    assert "no stragglers; leave local.stragglers out" in capsys.readouterr().err

"""Corrections that infer gradients from displacements, with local momentum: a constant gradient is recovered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from helpers.federations import regression
from helpers.networks import line
from helpers.runs import experiment, leaves, theta
from torch import Tensor, nn

from fedloom.core.context import Batch, Context, Output
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Drift, Term
from fedloom.experiment.federated import RunResult, run
from fedloom.parts.drift import FedCMDrift, FedDCDrift, FedNovaDrift, Scaffold
from fedloom.parts.personal import Alternating

SIZES, DIM, RATE = (6, 14, 9), 4, 0.3


@dataclass(frozen=True)
class Tilted(Term):
    """ℓ = y f(x): with f(x) = θᵀx the gradient is the mean of y x, wherever θ is."""

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return (out.logits * batch.y).sum(1)


def data() -> tuple[list[np.ndarray], list[np.ndarray]]:
    draw = np.random.default_rng(0)
    return [draw.normal(size=(n, DIM)) for n in SIZES], [draw.normal(size=n) for n in SIZES]


def slopes() -> np.ndarray:
    return np.array([x.T @ y / len(y) for x, y in zip(*data(), strict=True)])


def ran(drift: Drift, local: Local, rounds: int = 1) -> RunResult:
    method = Method("m", (Tilted(),), drift=drift)
    return run(experiment(method, federation=regression(*data()), model=line(DIM), local=local, rounds=rounds))


def states(result: RunResult) -> dict[str, np.ndarray]:
    return {key: value.numpy() for key, value in leaves(result.snapshot)}


HEAVY = {
    "heavy ball": Local(steps=7, batch_size=0, lr=RATE, momentum=0.9),
    "nesterov": Local(steps=5, batch_size=0, lr=RATE, momentum=0.6, nesterov=True),
    "none": Local(steps=5, batch_size=0, lr=RATE),
}


@pytest.mark.parametrize("local", HEAVY.values(), ids=HEAVY)
def test_control_variates_are_the_gradients(local: Local) -> None:
    """SCAFFOLD's c_i, the direction of FedCM, and what FedDC reads from its displacements."""
    state = states(ran(Scaffold(), local))
    for i, g in enumerate(slopes()):
        np.testing.assert_allclose(state[f"client {i}/drift/c"], g, rtol=1e-12)
    np.testing.assert_allclose(state["server/drift/c"], slopes().mean(0), rtol=1e-12)
    shares = np.array(SIZES) / sum(SIZES)
    direction = states(ran(FedCMDrift(1.0), local))["server/drift/direction"]
    np.testing.assert_allclose(direction, shares @ slopes(), rtol=1e-12)


@pytest.mark.parametrize("local", HEAVY.values(), ids=HEAVY)
def test_a_second_round_of_scaffold_and_feddc_takes_all_clients_the_same_way(local: Local) -> None:
    """Their corrected gradient is the mean of all: SCAFFOLD's g - c_i + c, FedDC's g + (g_i - g)/(η‖a‖₁)."""
    for drift in (Scaffold(), FedDCDrift(0.0)):
        first, second = (ran(drift, local, rounds) for rounds in (1, 2))
        mean = slopes().mean(0) if isinstance(drift, Scaffold) else np.array(SIZES) / sum(SIZES) @ slopes()
        step = RATE * local.effective_steps(local.steps or 0) * mean
        if isinstance(drift, FedDCDrift):  # without the drifts that it adds to the mean
            step = step - states(second)["server/drift/h"]
        np.testing.assert_allclose(theta(first) - theta(second), step, rtol=1e-11)


class Halves(nn.Module):
    """f(x) = ⟨a, x⟩ + ⟨b, x⟩ from zero, with a body a and a head b."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (nn.Linear(DIM, 1, bias=False) for _ in range(2))
        for layer in (self.body, self.head):
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.head(x)


@pytest.mark.parametrize("local", HEAVY.values(), ids=HEAVY)
@pytest.mark.parametrize("fraction", [0.6, 0.0, 1.0])
def test_steps_in_which_shared_parameters_rest_do_not_count(local: Local, fraction: float) -> None:
    """SCAFFOLD on the body of FedRep: its control variates are the gradients, however long the head is trained."""
    method = Method("m", (Tilted(),), Scaffold(), Alternating(fraction))
    setup = experiment(method, federation=regression(*data()), model=Halves, local=local, rounds=1)
    state = states(run(setup))
    for i, g in enumerate(slopes()):
        np.testing.assert_allclose(state[f"client {i}/drift/c"], g * (fraction < 1), rtol=1e-12)


def test_feddc_corrects_by_control_variates_in_every_round_and_by_displacements_in_every_other_one() -> None:
    """Constant gradients, α = 0: a displacement that was corrected no longer tells the clients' gradients apart."""
    local = HEAVY["none"]
    for control, differs in ((True, [True, False, False, False]), (False, [True, False, True, False])):
        drifts = []
        for rounds in (1, 2, 3, 4):
            state = states(ran(FedDCDrift(0.0, control=control), local, rounds))
            drifts.append(np.array([state[f"client {i}/drift/h"] for i in range(len(SIZES))]))
        moved = np.diff([np.zeros_like(drifts[0]), *drifts], axis=0)  # [rounds, K, P]
        assert [bool(np.ptp(change, axis=0).max() > 1e-9) for change in moved] == differs
        if control:
            np.testing.assert_allclose(state["server/drift/g"], slopes().mean(0), rtol=1e-11)


@pytest.mark.parametrize("local", HEAVY.values(), ids=HEAVY)
def test_fednova_moves_by_the_mean_gradient_whatever_the_numbers_of_steps(local: Local) -> None:
    unequal = Local(epochs=2, batch_size=0, lr=local.lr, momentum=local.momentum, nesterov=local.nesterov)
    shares = np.array(SIZES) / sum(SIZES)
    for setting in (local, unequal):
        reach = np.array([setting.effective_steps(setting.steps_for(n)) for n in SIZES])
        step = RATE * (shares @ reach) * (shares @ slopes())
        np.testing.assert_allclose(-theta(ran(FedNovaDrift(), setting)), step, rtol=1e-12)


def test_without_momentum_the_effective_steps_are_the_steps_exactly() -> None:
    for steps in range(1, 3000):
        assert Local().effective_steps(steps) == steps


def test_effective_steps_are_those_of_sgd() -> None:
    for nesterov in (False, True):
        local = Local(momentum=0.8, nesterov=nesterov)
        at = velocity = 0.0
        for steps in range(1, 40):
            velocity = 0.8 * velocity + 1
            at += 1 + 0.8 * velocity if nesterov else velocity
            assert local.effective_steps(steps) == pytest.approx(at, rel=1e-12)

"""DiSK as its authors coded it: losses against NumPy, schedules, and the switches that restore the paper's version."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.distilling import Problem, weights
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.parts.objectives.guidance import budget, multiplier
from fedloom_apps import distill
from fedloom_apps.distill import Guide, disk, distillers
from fedloom_apps.distill.method import Outputs
from fedloom_apps.distill.methods import SelectiveResponse
from fedloom_apps.distill.task import guide_warnings

N, C, K = 7, 6, 2

PUBLISHED = {
    "tau_s": 2.0,
    "delta": 0.1,
    "lam_min": 0.1,
    "lam_max": 50.0,
    "guide_lr": 0.003,
    "normaliser": 0.0,
    "support": "top_k",
    "truncate": False,
    "price": "label",
    "lr_restarts": False,
}


def random_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student and teacher [N, C], labels and guide [N]; most labels are outside the teacher's top K."""
    draw = torch.Generator().manual_seed(5)
    s, t = (3 * torch.randn(N, C, dtype=torch.float64, generator=draw) for _ in range(2))
    return s, t, torch.randint(C, (N,), generator=draw), torch.rand(N, dtype=torch.float64, generator=draw)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def test_the_losses_of_the_code() -> None:
    s, t, y, g = random_batch()
    tau, tau_s, expected = 4.0, 3.5, []
    for student, teacher, label, help in zip(s.numpy(), t.numpy(), y.numpy(), g.numpy(), strict=True):
        inside = set(np.argsort(-teacher)[:K]) | {int(label)}
        u = np.array([teacher[c] / tau if c in inside else teacher.min() for c in range(C)])
        p, q = softmax(u), softmax(student / tau_s)
        near = -tau * tau_s * sum(p[c] * np.log(q[c] + help) for c in inside)
        expected.append(near + np.log(1 + K * help))
    term = disk(as_coded=True, top_k=K).terms[1]
    assert isinstance(term, SelectiveResponse)
    np.testing.assert_allclose(term.guided(s, Outputs(t, t), y, g, tau_s=9.0).numpy(), expected, rtol=1e-12)
    assert any(int(label) not in np.argsort(-row)[:K] for row, label in zip(t.numpy(), y.numpy(), strict=True))


def test_no_more_classes_are_helped_than_there_are() -> None:
    s, t, y, g = random_batch()
    few, many = (disk(as_coded=True, top_k=k).terms[1].guided(s, Outputs(t, t), y, g, tau_s=1.0) for k in (C, 5 * C))
    torch.testing.assert_close(few, many, rtol=0, atol=0)


def test_help_is_priced_by_the_teachers_class_up_to_the_cap() -> None:
    s, t, y, g = random_batch()
    price = [min(-np.log(softmax(row)[top]), 2.0) for row, top in zip(s.numpy(), t.argmax(1).numpy(), strict=True)]
    wrong = sum(int(row.argmax() != label) for row, label in zip(s.numpy(), y.numpy(), strict=True))
    expected = max(sum(np.array(price) * g.numpy()) / wrong - 0.05, 0)
    assert float(budget(s, y, g, 0.05, priced=t.argmax(1), cap=2.0)) == pytest.approx(expected, rel=1e-12)
    assert max(price) == 2.0


def test_the_budget_falls_in_periods_and_the_rates_restart_with_the_multiplier() -> None:
    guide = disk(as_coded=True).guide
    assert guide is not None
    assert guide.budget_of(95, 0.6) > guide.budget_of(80, 0.6)  # from then on the start is below the end
    for r in (0, 7, 20, 33, 80, 199):  # the loop of the authors' script: the start shrinks every 20 rounds
        most = 0.6
        for epoch in range(1, r + 1):
            most *= 0.9 if epoch % 20 == 0 else 1
        expected = most + (0.4 - most) * (1 - np.cos(np.pi * (r % 20) / 20)) / 2
        assert guide.budget_of(r, 0.6) == pytest.approx(expected)
    for r in range(200):
        begin, end = guide.phase(r, 200)
        assert (begin, end) == (r // 50 * 50, r // 50 * 50 + 50)
        assert multiplier(begin, 200, 1.0, 5.0, 50) == 1.0
    assert Guide().phase(60, 200) == (0, 200)
    assert Guide().budget_of(60, 0.3) == 0.3


def test_every_switch_back_is_the_paper(vectors: Problem) -> None:
    plain = disk(tau_s=2.0, delta=0.1)
    back = disk(as_coded=True, cap=1e9, **PUBLISHED)  # type: ignore[arg-type]
    assert back.guide is not None
    back = replace(back, guide=replace(back.guide, first_passes=0, delta_end=None))  # no arguments of the method
    first, second = (distill.run(vectors.experiment(method, epochs=4)) for method in (plain, back))
    assert torch.equal(weights(first.model), weights(second.model))
    coded = distill.run(vectors.experiment(disk(as_coded=True), epochs=4))
    assert not torch.equal(weights(first.model), weights(coded.model))
    temperatures = [{r["guide/tau_s"] for r in run.history if "guide/tau_s" in r} for run in (first, coded)]
    assert temperatures == [{2.0}, {3.5}]


def test_a_run_says_where_its_guide_helps(vectors: Problem) -> None:
    summary = distill.run(vectors.experiment(disk(delta=5.0), epochs=4)).summary
    assert set(summary["guide"]) == {"mean", "right", "wrong", "spent"}
    warnings = [warning for warning in summary["warnings"] if warning.startswith("the guide helps")]
    assert warnings == guide_warnings(summary["guide"])
    assert guide_warnings({"right": 0.2, "wrong": 0.3}) == guide_warnings({"right": None, "wrong": 0.3}) == []
    assert guide_warnings({"right": 0.732, "wrong": 0.731}) == []
    assert "g 0.30" in guide_warnings({"right": 0.3, "wrong": 0.2})[0]


@pytest.mark.parametrize("wrong", [{"price": "labels"}, {"support": "all"}, {"normaliser": -1.0}, {"cap": 0.0}])
def test_impossible_switches_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        disk(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fitnet", "semckd", "simkd", "simkd_disk"])
@pytest.mark.parametrize("beta", [-1.0, float("inf"), float("nan")])
def test_a_weight_that_no_loss_can_have_is_refused(name: str, beta: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name}': beta must be .*, not {beta}"):
        distillers.make(name, beta=beta)

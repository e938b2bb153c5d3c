"""Selective distillation: its losses against NumPy, their gradients, the schedule, and the federated term's laws."""

from __future__ import annotations

from dataclasses import replace
from math import cos, log, pi
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.networks import teacher_net
from helpers.runs import assert_same_run, experiment, go, leaves, theta
from torch import Tensor

from fedloom import methods
from fedloom.base.errors import ConfigError
from fedloom.core.context import NO_ROUND, Batch, Output
from fedloom.experiment.federated import run
from fedloom.parts.objectives import Distillation, Selective, divergence, guidance
from fedloom.parts.objectives.guidance import budget, guided, helpable_classes, multiplier
from fedloom_apps.distill.method import fit_temperature

NOWHERE = NO_ROUND._replace(down={"guide": torch.zeros(5, dtype=torch.float64)})


def random_batch(n: int = 6, classes: int = 4, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student, teacher, labels and guide."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = (scale * torch.randn(n, classes, dtype=torch.float64, generator=draw) for _ in range(2))
    y, g = torch.randint(classes, (n,), generator=draw), torch.rand(n, dtype=torch.float64, generator=draw)
    return student, teacher, y, g


def softened(logits: Tensor, tau: float) -> np.ndarray:
    e = np.exp(logits.detach().numpy() / tau)
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize(("tau", "tau_s", "top"), [(4.0, 4.0, 1), (2.0, 1.0, 2), (1.0, 3.0, 3), (3.5, 3.5, 9)])
def test_the_distance_is_that_of_the_paper(tau: float, tau_s: float, top: int) -> None:
    student, teacher, _, g = random_batch()
    t, s = softened(teacher, tau), softened(student, tau_s)
    expected = []
    for i in range(len(t)):
        best = sorted(range(4), key=lambda y: -t[i, y])[:top]
        terms = [t[i, y] * log(s[i, y] + (float(g[i]) if y in best else 0.0)) for y in range(4)]
        expected.append(-tau * tau_s * sum(terms))
    np.testing.assert_allclose(guided(student, teacher, g, tau, tau_s, top), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("top", [0, 1, 4])
def test_no_help_is_distillation_up_to_the_teachers_entropy(top: int) -> None:
    """Value and gradient, at one temperature."""
    student, teacher, _, g = random_batch()
    student.requires_grad_()
    none = torch.zeros_like(g) if top else g  # help for no class is no help either
    losses, plain = guided(student, teacher, none, 4.0, 4.0, top), divergence.kl(teacher, student, 4.0)
    t = softened(teacher, 4.0)
    np.testing.assert_allclose((losses - plain).detach(), -16 * (t * np.log(t)).sum(1), rtol=0, atol=1e-11)
    slopes = [torch.autograd.grad(value.sum(), student, retain_graph=True)[0] for value in (losses, plain)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)


def test_only_the_teachers_likeliest_classes_are_helped() -> None:
    """And as many of them as K says, also where the teacher finds several alike."""
    teacher = torch.tensor([[3.0, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert helpable_classes(teacher, 2)[0].tolist() == [1, 0, 1, 0]
    assert [helpable_classes(teacher, k).sum(1).tolist() for k in (0, 1, 3, 7)] == [[0, 0], [1, 1], [3, 3], [4, 4]]


def test_help_is_worth_less_than_the_student_and_never_negative_in_effect() -> None:
    """More help, less loss; full help leaves a right class with a loss of at most 0."""
    student, teacher, _, _ = random_batch()
    losses = [guided(student, teacher, torch.full((6,), v, dtype=torch.float64), 2.0, 2.0, 4) for v in (0, 0.3, 1)]
    assert (losses[0] > losses[1]).all()
    assert (losses[1] > losses[2]).all()
    assert (losses[2] <= 0).all()  # every logarithm is of something above 1: s + g is not a distribution


def test_the_logarithm_has_a_floor_and_no_ceiling() -> None:
    student = torch.tensor([[-200.0, 0.0]], dtype=torch.float64, requires_grad=True)
    sure = torch.tensor([[200.0, 0.0]], dtype=torch.float64)
    value = guided(student, sure, torch.zeros(1, dtype=torch.float64), 1.0, 1.0, 1)
    assert value.item() == pytest.approx(-log(1e-12))
    value.sum().backward()
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    above = guided(sure, sure, torch.ones(1, dtype=torch.float64), 1.0, 1.0, 1)
    assert above.item() == pytest.approx(-log(2))


def test_the_budget_counts_help_by_surprise_and_divides_by_what_is_wrong() -> None:
    student, _, y, g = random_batch()
    p = softened(student, 1.0)
    surprise = -np.log(p[np.arange(6), y])
    wrong = int((p.argmax(1) != y.numpy()).sum())
    assert 1 < wrong < 6, "the draw should have both"
    cost = float((g.numpy() * surprise).sum() / wrong)
    for delta in (0.0, 0.3, cost - 1e-6):
        assert budget(student, y, g, delta).item() == pytest.approx(cost - delta, abs=1e-12)
    for delta in (cost + 1e-6, 10.0):
        assert budget(student, y, g, delta).item() == 0.0


def test_the_budget_of_a_student_that_is_never_wrong_divides_by_one() -> None:
    student, y = 3 * torch.eye(3), torch.arange(3)
    surprise = log(1 + 2 * np.exp(-3))
    assert budget(student, y, torch.ones(3), 0.0).item() == pytest.approx(3 * surprise, abs=1e-6)


def test_padding_neither_spends_nor_is_wrong() -> None:
    student, _, y, g = random_batch()
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    cut = budget(student[:4], y[:4], g[:4], 0.1)
    torch.testing.assert_close(budget(student, y, g, 0.1, mask), cut, rtol=0, atol=1e-14)


def test_gradients_reach_guide_and_student_as_the_algorithm_wants() -> None:
    """Help pays and costs: both terms move the guide, against each other."""
    student, teacher, y, g = random_batch()
    assert torch.autograd.gradcheck(
        lambda s, h: guided(s, teacher, h, 4.0, 2.0, 2), (student.clone().requires_grad_(), g.clone().requires_grad_())
    )
    assert torch.autograd.gradcheck(lambda h: budget(student, y, h, 0.1), (g.clone().requires_grad_(),))
    s, h = student.clone().requires_grad_(), g.clone().requires_grad_()
    helped = torch.autograd.grad(guided(s, teacher, h, 4.0, 4.0, 2).sum(), h)[0]
    costs = torch.autograd.grad(budget(s, y, h, 0.0), h)[0]
    assert (helped < 0).all()
    assert (costs > 0).all()


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
@pytest.mark.parametrize("delta", [0.1, 5000.0])
def test_slopes_at_the_guide_are_what_autograd_says(shape: tuple[int, ...], delta: float) -> None:
    """Also with rows of padding, for sequences, and where the floor is reached."""
    student, teacher, y, g = random_batch()
    student[0] = torch.tensor([0.0, 0, 0, -500])
    teacher[0, 3], g[0] = 9.0, 0.0
    student, teacher, y, g = student.view(*shape, 4), teacher.view(*shape, 4), y.view(shape), g.view(shape)
    for mask in (None, torch.tensor([1.0] * (shape[0] - 1) + [0.0], dtype=torch.float64)):
        batch, h = Batch(student, y, mask), g.clone().requires_grad_()
        far = batch.mean(guided(student, teacher, h, 4.0, 2.0, 2))
        cost = budget(student, y, h, delta, mask)
        slopes = guidance.slope(student, teacher, y, 4.0, 2.0, 2, delta, mask)(g)
        for value, here in zip((far, cost), slopes, strict=True):
            torch.testing.assert_close(here, torch.autograd.grad(value, h)[0], rtol=0, atol=1e-12)
        assert bool(slopes[1].any()) == (delta < 1)


def test_the_multiplier_rises_and_falls_back_and_ends_at_its_most() -> None:
    values = [multiplier(r, 200, 0.1, 50.0, 50) for r in range(201)]
    expected = [0.1 + 49.9 * (1 - cos(pi * (r % 50) / 50)) / 2 for r in range(200)] + [50.0]
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)
    for first in (0, 50, 100, 150):
        assert values[first] == pytest.approx(0.1)
        assert (np.diff(values[first : first + 50]) > 0).all()


@pytest.mark.parametrize(("rounds", "period"), [(7, 3), (100, 30), (5, 50), (1, 1), (60, 20)])
def test_the_last_period_is_monotone_whatever_is_left_over(rounds: int, period: int) -> None:
    values = np.array([multiplier(r, rounds, 1.0, 9.0, period) for r in range(rounds + 1)])
    last = max(rounds // period - 1, 0) * period
    assert values[last] == 1.0
    assert (np.diff(values[last:]) > 0).all()
    assert values[-1] == pytest.approx(9.0)
    assert values.min() >= 1.0
    assert values.max() <= 9.0


@pytest.mark.parametrize("call", [(0, 5, 2.0, 1.0, 2), (0, 5, -1.0, 1.0, 2)])
def test_a_schedule_that_cannot_be_is_refused(call: tuple[int, int, float, float, int]) -> None:
    with pytest.raises(ConfigError, match="the multiplier"):
        multiplier(*call)


def test_the_students_temperature_is_the_minimum_of_the_divergence() -> None:
    student, teacher, _, _ = random_batch(40)
    teacher = teacher + 2 * student  # something to find
    tau = fit_temperature(teacher, student, tau=4.0)

    def divergence_at(at: float) -> float:
        t, s = softened(teacher, 4.0), softened(student, at)
        return float((t * np.log(t / s)).sum(1).mean())

    assert divergence_at(tau) <= min(divergence_at(tau * (1 + e)) for e in (-1e-3, 1e-3))
    assert divergence_at(tau) <= min(divergence_at(at) for at in np.linspace(0.05, 50, 400)) + 1e-9
    assert fit_temperature(teacher, 3 * student, tau=4.0) == pytest.approx(3 * tau, rel=1e-4)
    assert fit_temperature(student, student, tau=2.5) == pytest.approx(2.5, rel=1e-4)


def test_a_student_that_says_the_opposite_gets_the_highest_temperature() -> None:
    student, _, _, _ = random_batch(40)
    assert fit_temperature(-student, student, tau=4.0) == pytest.approx(50.0, rel=1e-3)


# --- the term of a federation ---


def test_helping_no_class_is_distillation() -> None:
    plain, none = go("distill", cohort=4, rounds=3), go(methods.disk(top_k=0), cohort=4, rounds=3)
    np.testing.assert_allclose(theta(none), theta(plain), rtol=0, atol=1e-12)
    helped = go(methods.disk(lam_max=0.1), cohort=4, rounds=3)
    assert np.abs(theta(helped) - theta(plain)).max() > 1e-3


def test_a_guide_that_is_shut_is_distillation() -> None:
    student, teacher, y, _ = random_batch()
    shut = NOWHERE._replace(down={"guide": torch.tensor([0, 0, 0, 0, -800.0], dtype=torch.float64)})
    out, batch = Output(student.requires_grad_(), teacher=teacher), Batch(student, y)
    slopes = [
        torch.autograd.grad(term.loss(out, batch, shut).mean(), student, retain_graph=True)[0]
        for term in (Selective(0.3, 2.0), Distillation(0.3, 2.0))
    ]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)


def test_labels_alone_are_fedavg() -> None:
    np.testing.assert_array_equal(theta(go(methods.disk(alpha=1.0))), theta(go("fedavg")))


def test_a_dear_budget_shuts_the_guide_and_a_cheap_one_opens_it() -> None:
    """φ moves from 0 to where help is refused or given; its state is at the server alone."""
    ends = []
    for lam_min, lam_max in ((0.0, 0.0), (50.0, 50.0)):
        result = go(methods.disk(lam_min=lam_min, lam_max=lam_max, delta=0.0, guide_lr=0.02), rounds=4)
        states = {key: value for key, value in leaves(result.snapshot) if "guide" in key}
        assert list(states) == ["server/objective.0/guide"]
        ends.append(states["server/objective.0/guide"].numpy())
    teacher = teacher_net().double()(classes().train.arrays.x)
    cheap, dear = (Selective()._guide(torch.tensor(phi), teacher) for phi in ends)
    assert cheap.min() > 0.5
    assert dear.max() < 0.5


def test_the_guide_leaves_the_teacher_as_it_is() -> None:
    teacher = teacher_net()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    run(experiment("disk", teacher=teacher, rounds=2))
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_the_guide_travels_and_is_counted() -> None:
    """C + 1 numbers up, and as many down."""
    plain, helped = (go(name, rounds=1, cohort=4) for name in ("distill", "disk"))
    classes_ = 3
    for key in ("comm/up_params", "comm/down_params"):
        assert helped.history[0][key] - plain.history[0][key] == 4 * (classes_ + 1)


def test_sequences_are_guided_position_by_position() -> None:
    student, teacher, y, _ = random_batch(12)
    phi = torch.tensor([0.3, -1.0, 0.5, 2.0, -0.2], dtype=torch.float64)
    ctx = NOWHERE._replace(down={"guide": phi})
    losses = Selective(0.4, top_k=1).loss(
        Output(student.view(4, 3, 4), teacher=teacher.view(4, 3, 4)), Batch(y.view(4, 3), y.view(4, 3)), ctx
    )
    position_losses = Selective(0.4, top_k=1).loss(Output(student, teacher=teacher), Batch(y, y), ctx)
    torch.testing.assert_close(losses, position_losses.view(4, 3).mean(1), rtol=0, atol=1e-12)


def test_other_engines_train_the_same_guide() -> None:
    """Where some clients have fewer steps than others."""
    serial, processes = (go("disk", rounds=3, engine=e, cohort=4) for e in ("serial", "processes"))
    assert_same_run(serial, processes)


def test_a_multiplier_that_runs_backwards_is_refused() -> None:
    with pytest.raises(ConfigError, match="the multiplier runs from lam_min to lam_max"):
        Selective(lam_min=3.0, lam_max=1.0)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"personal": methods.make("superfed_mm").personal}, "with personal 'subspace' the step's loss"),
        ({"personal": methods.make("ditto").personal}, "with personal 'ditto' the step's loss"),
        ({"adaptation": methods.make("per_fedavg").adaptation}, "with adaptation 'maml' the step's loss"),
    ],
)
def test_the_guide_looks_at_the_model_that_is_trained(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(
        ConfigError, match=f"objective 'selective' inspects the model before every step, but {sentence}"
    ):
        replace(methods.make("disk"), **parts)

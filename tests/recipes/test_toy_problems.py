"""The toy problems of selective distillation: exact properties, the students, and the effect of DiSK."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.recipes import load
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.parts.objectives.guidance import budget, guided

toys, courses = load("distill", "toy_problems"), load("distill", "toy_courses")


@pytest.fixture(scope="module")
def line() -> courses.Toy:
    return toys.intervals(samples=120)


@pytest.fixture(scope="module")
def plane() -> courses.Toy:
    return toys.gaussians(samples=120, test_samples=120)


def random_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student, teacher, labels and guide."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(6, 4, dtype=torch.float64, generator=draw) for _ in range(2))
    return student, teacher, torch.randint(4, (6,), generator=draw), torch.rand(6, dtype=torch.float64, generator=draw)


def test_the_students_pass_has_no_budget_and_the_guides_no_student() -> None:
    student, teacher, y, g = random_batch()
    s, h = student.clone().requires_grad_(), g.clone().requires_grad_()
    settings = {"alpha": 0.3, "tau": 4.0, "tau_s": 4.0, "top_k": 2}
    pass_of_student = courses.lagrangian(s, teacher, y, h.detach(), **settings)
    both = torch.autograd.grad(pass_of_student, (s, h), allow_unused=True)
    assert both[0].abs().sum() > 0
    assert both[1] is None
    with_budget = courses.lagrangian(s.detach(), teacher, y, h, delta=0.1, multiplier=5.0, **settings)
    assert torch.autograd.grad(with_budget, h)[0].abs().sum() > 0
    without_budget = courses.lagrangian(s.detach(), teacher, y, h, **settings)
    assert (with_budget - without_budget).item() == pytest.approx(5 * budget(student, y, g, 0.1).item(), abs=1e-12)


def test_labels_alone_and_the_teacher_alone_are_the_ends_of_alpha() -> None:
    student, teacher, y, g = random_batch()
    settings = {"tau": 4.0, "tau_s": 3.0, "top_k": 2}
    labels = courses.lagrangian(student, teacher, y, g, alpha=1.0, **settings)
    torch.testing.assert_close(labels, torch.nn.functional.cross_entropy(student, y))
    far = courses.lagrangian(student, teacher, y, g, alpha=0.0, **settings)
    torch.testing.assert_close(far, guided(student, teacher, g, 4.0, 3.0, 2).mean())


def test_a_student_is_one_interval(line: courses.Toy) -> None:
    kappa, scale = toys.KAPPA, toys.SCALE
    x = np.linspace(0, 9, 7)
    h = 1 / (1 + np.exp(-kappa * (x - 2))) - 1 / (1 + np.exp(-kappa * (x - 7)))
    logits = line.student(torch.tensor([2.0, 7.0]), torch.from_numpy(x)[:, None].float())
    np.testing.assert_allclose(logits, scale * np.stack([1 - h, h], 1), rtol=0, atol=1e-5)


def test_the_teacher_knows_both_intervals_and_the_best_student_only_one(line: courses.Toy) -> None:
    assert line.test_teacher > 0.93
    x, y = line.train.x[:, 0], line.train.y
    first, second = line.teacher_features.T
    assert (first[(x > 2.2) & (x < 2.8)] > 0.4).all()
    assert (second[(x > 5.3) & (x < 6.7)] > 0.6).all()
    assert (line.teacher_features.sum(1)[y == 0].mean() < 0.2).item()
    ends = torch.tensor(list(toys.MINIMA.values()))
    accuracies = line.accuracy(ends)
    assert (accuracies < line.test_teacher).all()
    assert accuracies.argmin() == 0  # A holds the short interval alone


def test_places_are_named(line: courses.Toy) -> None:
    where = torch.tensor([[2.0, 3.0], [2.3, 6.5], [5.0, 7.0], [4.7, 7.1], [0.0, 9.0]])
    assert courses.counts(line, where) == {"A": 1, "B": 1, "C": 2, "none": 1}


def by_hand(toy: courses.Toy, course: courses.Course, p: Tensor, g: Tensor) -> Tensor:
    """The student's loss of one start, once more."""
    logits = toy.student(p, toy.train.x)
    labels = -logits.log_softmax(-1)[torch.arange(len(g)), toy.train.y].mean()
    far = guided(logits, toy.teacher_logits, g, course.tau, course.tau, course.top_k).mean()
    return course.alpha * labels + (1 - course.alpha) * far


@pytest.mark.parametrize("problem", ["line", "plane"])
def test_all_starts_at_once_are_each_start_alone(problem: str, request: pytest.FixtureRequest) -> None:
    """torch.func.vmap against a plain optimiser on one start after the other."""
    toy: courses.Toy = request.getfixturevalue(problem)
    course = courses.Course(alpha=0.3, tau=2.0, rounds=3, passes=2)
    training = courses.train(toy, course, starts=4)
    for number in range(4):
        p = training.path[0, number].clone().requires_grad_()
        optimiser = torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.01)
        for _ in range(6):
            optimiser.zero_grad()
            by_hand(toy, course, p, torch.zeros(len(toy.train.y))).backward()
            optimiser.step()
            with torch.no_grad():
                p.copy_(toy.keep(p))
        torch.testing.assert_close(training.parameters[number], p.detach(), rtol=0, atol=2e-4)


def test_a_guide_that_may_help_no_class_changes_nothing(line: courses.Toy) -> None:
    course = courses.Course(alpha=0.1, tau=4.0, rounds=4)
    plain = courses.train(line, course, starts=5)
    idle = courses.train(line, replace(course, guide=True, top_k=0), starts=5)
    torch.testing.assert_close(idle.parameters, plain.parameters, rtol=0, atol=1e-6)
    helped = courses.train(line, replace(course, guide=True, top_k=2, lam_max=0.1), starts=5)
    assert (helped.parameters - plain.parameters).abs().max() > 1e-3
    assert plain.help.abs().max() == 0


def test_equal_seeds_are_equal_runs_and_courses_share_their_starts(plane: courses.Toy) -> None:
    course = courses.Course(alpha=0.1, tau=2.0, guide=True, rounds=3)
    first, second = (courses.train(plane, course, starts=3) for _ in range(2))
    assert first.parameters.equal(second.parameters)
    assert first.path[0].equal(courses.train(plane, courses.Course(rounds=1), starts=3).path[0])
    assert not first.path[0].equal(courses.train(plane, courses.Course(rounds=1), starts=3, seed=1).path[0])
    assert first.multipliers == [0.1, *first.multipliers[1:]]
    assert first.path.shape == (4, 3, 17)
    assert first.help.shape == (3, 120)


def test_the_network_is_that_of_torch(plane: courses.Toy) -> None:
    """Linear, batch norm, ReLU, linear: in training mode on the training samples, with their statistics on others."""
    p = courses.train(plane, courses.Course(rounds=1), starts=1).parameters[0]
    net = torch.nn.Sequential(
        torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2, momentum=1.0), torch.nn.ReLU(), torch.nn.Linear(2, 3)
    )
    with torch.no_grad():
        for parameter, piece in zip(net.parameters(), p.split([4, 2, 2, 6, 3]), strict=True):
            parameter.copy_(piece.view_as(parameter))
        logits = net(plane.train.x)
        torch.testing.assert_close(plane.student(p, plane.train.x), logits, rtol=0, atol=1e-5)
        count = len(plane.train.x)
        net.get_buffer("1.running_var").mul_((count - 1) / count)  # torch keeps the unbiased variance for later
        torch.testing.assert_close(plane.student(p, plane.test.x), net.eval()(plane.test.x), rtol=0, atol=1e-5)


def test_the_teacher_of_the_plane_is_nearly_always_right(plane: courses.Toy) -> None:
    assert plane.test_teacher > 0.95
    assert plane.teacher_features.shape == (120, 16)
    torch.testing.assert_close(plane.teacher_features.mean(0), torch.zeros(16), rtol=0, atol=1e-4)


def test_disk_finds_the_minimum_that_others_seldom_find() -> None:
    """The effect itself, with fewer starts and samples than in the recipe."""
    toy, ends = toys.intervals(samples=500), {}
    for name, course in (("KD", courses.Course(alpha=0.0, tau=6.0)), ("DiSK", courses.STRONG)):
        ends[name] = courses.counts(toy, courses.train(toy, course, starts=8).parameters)
    assert ends["DiSK"]["C"] >= ends["KD"]["C"] + 2
    assert ends["DiSK"]["C"] >= 6


@pytest.mark.parametrize(
    "wrong", [{"alpha": -0.1}, {"tau": 0.0}, {"passes": 0}, {"guide_lr": 0.0}, {"lam_min": 2.0, "lam_max": 1.0}]
)
def test_courses_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        courses.Course(**wrong)  # type: ignore[arg-type]


def test_the_recipe_writes_counts_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, problems = load("distill", "toys"), load("distill", "toy_problems")
    train_teacher = problems._train_teacher
    monkeypatch.setattr(problems, "_train_teacher", lambda *about, **_: train_teacher(*about, steps=20))
    small = ["--draws", "1", "2", "--starts", "3", "--tries", "2", "--rounds", "2", "--samples", "60", "--scan", "2"]
    assert recipe.main([*small, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "toys.json").read_text())
    assert set(results["toys"]) == set(results["courses"]) == set(recipe.PROBLEMS)
    for problem in results["toys"].values():
        assert set(problem["methods"]) == {*courses.candidates(2)}
        for draws in problem["methods"].values():
            assert [sum(draw["counts"].values()) for draw in draws.values()] == [3, 3]
    text = (tmp_path / "toys.md").read_text()
    assert "1-D intervals" in text
    assert "2-D Gaussians" in text
    assert all((tmp_path / f"figure_6_{n}.png").stat().st_size > 10_000 for n in (1, 2))
    (tmp_path / "toys.md").unlink()
    assert recipe.main(["--table", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "toys.md").read_text() == text


@pytest.mark.skipif("FEDLOOM_DATA" not in os.environ, reason="FEDLOOM_DATA names no folder with Fashion-MNIST")
def test_the_federated_recipe_runs_and_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("distill", "federated")
    monkeypatch.setattr(recipe, "SAMPLES", 300)
    where = ["--seeds", "0", "--epochs", "1", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    for _ in range(2):
        assert recipe.main([*where, "--rounds", "4"]) == 0
    runs = json.loads((tmp_path / "federated.json").read_text())["runs"]
    assert [runs[name]["0"]["rounds"] for name in recipe.CASES] == [[2, 4]] * 3
    assert runs["FedAvg + DiSK"]["0"]["up"] == runs["FedAvg"]["0"]["up"] + 11
    assert "FedAvg + DiSK" in (tmp_path / "federated.md").read_text()

"""Distillation with the factors of products rounded to bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.distilling import Problem, weights
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.experiment.runtime import reason_against_bf16
from fedloom_apps import distill
from fedloom_apps.distill import Distiller, FeatureTap, SGDConfig, disk, kd, simkd, task
from fedloom_apps.distill.data import TeacherCache

UNIT = 2.0**-8
BF16, FULL = (SGDConfig(batch_size=16, lr=0.05, precision=precision) for precision in ("bf16", "full"))
has_bf16 = pytest.mark.skipif(reason_against_bf16("cpu") is not None, reason="no bfloat16 here")


def single(problem: Problem) -> Problem:
    """The problem in single precision."""
    teacher = copy.deepcopy(problem.teacher).float()
    return problem._replace(teacher=teacher)


def test_layers_multiply_rounded_factors_and_answer_in_the_dtype_of_the_parameters() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(30, 7)

        def features(self, x: Tensor) -> Tensor:
            return x

    model, x = Linear(), torch.randn(5, 30)
    out = FeatureTap(model)(x, torch.bfloat16)
    assert out.logits.dtype == torch.float32
    rounded = [t.detach().bfloat16().double() for t in (x, model.head.weight, model.head.bias)]
    torch.testing.assert_close(out.logits.double(), torch.nn.functional.linear(*rounded), rtol=UNIT, atol=UNIT)
    assert not torch.equal(out.logits, FeatureTap(model)(x).logits)


@has_bf16
@pytest.mark.parametrize("method", [kd(), disk(guide_lr=0.001), simkd()])
def test_a_student_ends_near_that_of_full_precision_and_is_evaluated_exactly(
    images: Problem, method: Distiller
) -> None:
    problem, settings = single(images), {"dtype": "float32", "epochs": 3}
    exact = distill.run(problem.experiment(method, training=FULL, **settings))
    rough = distill.run(problem.experiment(method, training=BF16, **settings))
    again = distill.run(problem.experiment(method, training=BF16, **settings))
    assert torch.equal(weights(rough.model), weights(again.model))
    exact_weights, difference = weights(exact.model), weights(exact.model) - weights(rough.model)
    assert 0 < difference.norm() < 0.1 * exact_weights.norm()
    assert {t.dtype for t in rough.model.state_dict().values() if t.is_floating_point()} == {torch.float32}
    test = problem.data.test
    with torch.no_grad():
        right = (rough.model(test.x[:].float()).argmax(1) == test.y).double().mean()
    assert rough.summary["selected"]["accuracy"] == pytest.approx(float(right))


def test_cached_outputs_of_the_teacher_are_exact(images: Problem) -> None:
    teacher, x = copy.deepcopy(images.teacher).float().eval(), images.data.train.x[:].float()
    rows = torch.arange(20)
    exact = TeacherCache(teacher, x, mode="memory").at(rows)
    cached, computed = (
        TeacherCache(teacher, x, mode=mode, operands=torch.bfloat16).at(rows) for mode in ("memory", "none")
    )
    assert torch.equal(cached.logits, exact.logits)
    assert 0 < (computed.logits - exact.logits).norm() < 0.1 * exact.logits.norm()


def test_what_cannot_be_rounded_is_refused(images: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"training\.precision is 'half'; there are: bf16, full"):
        SGDConfig(precision="half")
    with pytest.raises(ConfigError, match=r"training\.precision=bf16 rounds to fewer digits than dtype=float64 keeps"):
        images.experiment(kd(), training=BF16)
    monkeypatch.setattr(task, "reason_against_bf16", lambda device: "this processor does not multiply in bfloat16")
    with pytest.raises(
        ConfigError, match=r"training\.precision=bf16: this processor .* choose training\.precision=full"
    ):
        distill.run(single(images).experiment(kd(), training=BF16, dtype="float32"))

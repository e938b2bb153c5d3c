"""What parts cannot do with this experiment is refused before a run directory is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.federations import CLASSES, FEATURES
from helpers.runs import experiment
from torch import nn

from fedloom.base.errors import ConfigError
from fedloom.core.method import Method
from fedloom.experiment.federated import run
from fedloom.methods import make
from fedloom.models import wrap
from fedloom.parts.mixing import Fixed, FLTrust
from fedloom.parts.objectives import CrossEntropy, Distillation

OUTPUTS = rf"needs one output for each class, but the model has {CLASSES + 2} outputs for {CLASSES} classes"


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, CLASSES + 2))


def wide_with_head() -> nn.Module:
    return wrap(wide(), head="2")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"method": make("fedlc"), "model": wide}, f"objective 'calibrated' {OUTPUTS}"),
        ({"method": make("fedrod"), "model": wide_with_head}, f"objective 'balanced' {OUTPUTS}"),
        (
            {
                "method": Method("mine", (CrossEntropy(), Distillation())),
                "model": wide,
                "teacher": nn.Linear(FEATURES, CLASSES),
            },
            f"objective 'distillation' {OUTPUTS}",
        ),
        ({"method": Method("mine", (CrossEntropy(),), mixing=Fixed((1.0, 2.0)))}, "has 2 weights, but there are 6"),
        ({"method": Method("mine", (CrossEntropy(),), mixing=FLTrust(6))}, "root is 6, but there are 6 clients"),
        (
            {"method": make("pfedme", lam=15.0)},
            "the local learning rate is 0.2, but with lam 15 steps of 0.133",
        ),
    ],
)
def test_what_a_part_cannot_do_here_is_refused_before_anything_is_written(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run(experiment(**settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_more_outputs_than_classes_are_no_harm_to_a_loss_that_never_reads_them() -> None:
    assert not run(experiment(model=wide, rounds=1)).failures

"""Clients that number the classes in their own way, in the arrays or not: nothing compares their classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.base.errors import ConfigError, DataError
from fedloom.core.federation import Federation, Unlabelled
from fedloom.core.method import Method
from fedloom.data.partitions import Alid
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run as go
from fedloom.parts.objectives import CrossEntropy, Distillation, WeightedCrossEntropy
from fedloom_apps.audit.attacks import Backdoor, LabelFlip, SignFlip
from fedloom_apps.customise.head import linear_head
from fedloom_apps.synthesis.judge import SyntheticEvaluator
from fedloom_apps.synthesis.synthetic_set import with_shared_set

pytestmark = pytest.mark.filterwarnings("ignore:partition 'alid'")


@pytest.fixture(params=["all", "local"])
def federation(request: pytest.FixtureRequest) -> Federation:
    return fl.data.federate("digits", Alid(3, 30, names=request.param), clients=10, held_out=0.2)


def model(federation: Federation) -> Any:
    return lambda: fl.models.make("mlp", classes=federation.classes, inputs=(1, 8, 8), hidden=(8,))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"method": Method("mine", (CrossEntropy(), Distillation())), "teacher": "runs/none"},
            "'distillation' uses class numbers",
        ),
        (
            {"method": Method("mine", (WeightedCrossEntropy((1.0,) * 3),))},
            "'weighted_cross_entropy' uses class numbers",
        ),
        ({"method": fl.methods.make("fedproto")}, "'alignment' uses class numbers"),
        ({"method": fl.methods.make("fedevg")}, "'energy' uses class numbers"),
        ({"method": fl.methods.make("feddf")}, "'ensemble' uses class numbers"),
        ({"method": fl.methods.make("fedssa"), "views": ("blur",)}, "'ssa' uses class numbers"),
        ({"attack": LabelFlip(0.9)}, "hostile clients of this attack aim at classes by their numbers"),
        ({"attack": Backdoor(0.9)}, "hostile clients of this attack aim at classes by their numbers"),
    ],
)
def test_what_goes_by_class_numbers_is_refused(federation: Federation, settings: dict[str, Any], sentence: str) -> None:
    settings = {"method": fl.methods.make("fedavg"), **settings}
    federation = replace(federation, unlabelled=Unlabelled(federation.test.x))
    with pytest.raises(ConfigError, match=sentence) as error:
        Experiment(federation=federation, model=model(federation), **settings)
    assert not federation.pooled().classes_alike
    assert "but each of these clients numbers the classes in its own way; choose data" in str(error.value)


def test_what_does_not_go_by_class_numbers_runs(federation: Federation) -> None:
    fedavg = fl.methods.make("fedavg")
    trained = go(Experiment(fedavg, federation, model(federation), rounds=1, attack=SignFlip(0.2))).trained
    with pytest.raises(ConfigError, match="needs classes with the same numbers at all clients"):
        linear_head(trained, "ccvr")


def test_no_synthetic_set_is_shared_or_judged(federation: Federation) -> None:
    with pytest.raises(DataError, match="number the classes differently"):
        with_shared_set(federation, federation.train.arrays.take(torch.arange(5)))
    with pytest.raises(ConfigError, match="number the classes differently"):
        SyntheticEvaluator(federation)

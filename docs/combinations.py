"""What does not combine, and why: the smallest case of each refusal of a combination of parts and conditions.

The page of the site is made from these cases, and a test runs them: each is refused, and no refusal is without a case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Term
from fedloom.data import federate
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import FederatedTask
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.adaptation import FineTune
from fedloom.parts.drift import FedSplitDrift, Scaffold
from fedloom.parts.mixing import QFFL, Krum, Uniform
from fedloom.parts.objectives import (
    Contrastive,
    CrossEntropy,
    Distillation,
    Energy,
    NotTrueDistillation,
    Robustness,
    SquaredError,
)
from fedloom.parts.personal import APFL
from fedloom.parts.uplink import ClipNoise, SecureSum, TopK
from fedloom_apps.audit.attacks import ALIE, LabelFlip, SignFlip

Case = Callable[[], Any]


def method(name: str = "fedavg", **parts: Any) -> Case:
    """A named method with some parts replaced."""
    return lambda: replace(make(name), **parts)


def run(name: str = "fedavg", **conditions: Any) -> Case:
    """An experiment of a named method on a few made-up samples of three clients, with some conditions changed."""

    def case() -> Experiment:
        told = {key: value() if value in (alid, shifted) else value for key, value in conditions.items()}
        x, y = torch.arange(24.0).reshape(12, 2), torch.arange(12) % 2
        data = federate((x, y), "iid", 3, held_out=0.25)
        usual: dict[str, Any] = {"federation": data, "model": lambda: nn.Linear(2, 2)}
        made = told.get("method", make(name))
        return Experiment(**usual | told | {"method": made})

    return case


def loss(*terms: Any) -> tuple[Any, ...]:
    """An objective: cross entropy and further terms."""
    return (CrossEntropy(), *terms)


def alid() -> Any:
    """Clients that number the classes in their own way."""
    x, y = torch.arange(24.0).reshape(12, 2), torch.arange(12) % 2
    return replace(federate((x, y), "iid", 3), own_classes=True)


def shifted() -> Any:
    """Data with unlabelled inputs of a target distribution."""
    return federate("digits", "iid", 3, target="uniform")


def small() -> nn.Module:
    """A network whose layers can be cut."""
    return models.make("mlp", classes=2, inputs=(2,), hidden=(3,))


def nested(**parts: Any) -> Case:
    """The plan of HeteroFL with some parts replaced."""
    return lambda: FederatedTask(run(method=replace(make("heterofl"), **parts), model=small)())


@dataclass(frozen=True)
class Boast(Term):
    """A loss that is negative for good models."""

    def loss(self, out: Any, batch: Any, ctx: Any) -> Any:
        return -out.logits.max(1).values


CASES: dict[str, dict[str, Case]] = {
    "Parts of a method": {
        "no loss": method(objective=()),
        "two models × adaptation": method("apfl", adaptation=FineTune()),
        "the model on other inputs × training through an adaptation": method("per_fedavg", objective=loss(Energy())),
        "received logits × training through an adaptation": method("per_fedavg", objective=loss(NotTrueDistillation())),
        "the model on other inputs × two models": method("apfl", objective=loss(Energy())),
        "inspecting the model × two models": lambda: replace(make("disk"), personal=APFL()),
        "shared parameters × nothing shared": method("local", drift=Scaffold()),
        "gradients from displacements × a start elsewhere": lambda: replace(make("fedala"), drift=Scaffold()),
        "weights by losses × a loss below 0": lambda: replace(make("q_ffl"), objective=loss(Boast())),
        "classes × numbers": method(objective=loss(SquaredError())),
        "models for a target × a generator": lambda: replace(make("fedcvae"), mixing=make("fedssa").mixing),
        "models for a target × other uploads": lambda: replace(make("fedssa"), drift=FedSplitDrift()),
    },
    "Uplinks": {
        "an uplink × pooled data": method("centralised", uplink=(TopK(),)),
        "an uplink × a slice that nobody uploads": method(uplink=(TopK(slices=("drift/control",)),)),
        "private uploads × a slice without a bound": method("scaffold", uplink=(ClipNoise(bounds={"update": 1.0}),)),
        "sums alone × every client's own upload": method(mixing=Krum(), uplink=(SecureSum(),)),
        "private uploads × the client's loss": method(mixing=QFFL(), uplink=(ClipNoise(noise=1.0, noise_at="client"),)),
        "sums alone × a later uplink": method(mixing=Uniform(), uplink=(SecureSum(), TopK())),
        "sums alone × unequal weights": method(uplink=(SecureSum(),)),
    },
    "Clients of different size": {
        "× adaptation": nested(adaptation=FineTune()),
        "× models as vectors of one length": nested(mixing=Krum()),
        "× steps of the whole cohort": nested(drift=make("fednova").drift),
        "× sums of one length": nested(uplink=(SecureSum(),), mixing=Uniform()),
        "× further uploads": nested(drift=Scaffold()),
        "× pooled data": nested(pooled=True),
        "× batch statistics": lambda: FederatedTask(
            run("heterofl", model=lambda: models.make("mlp", classes=2, inputs=(2,), hidden=(3,), norm="batch"))()
        ),
        "clusters × a model for every client": lambda: FederatedTask(
            run(method=replace(make("ifca"), objective=loss(Contrastive())), model=small)()
        ),
    },
    "Data and conditions": {
        "every client × a part of them": run("fltrust", participation=0.5),
        "two augmented views × no augmentation": run(method=Method("twin", loss(Robustness()))),
        "a target × no unlabelled inputs": run("fedssa"),
        "a teacher × none": run(method=Method("taught", loss(Distillation()))),
        "a teacher × a method without use for one": run(teacher="runs/teacher"),
        "class numbers × clients that number classes themselves": run(
            method=Method("taught", loss(Distillation())), teacher="runs/teacher", federation=alid
        ),
        "gradients from displacements × adam": run("scaffold", local=Local(optimiser="adam", lr=0.1)),
        "responses on validation samples × none": run(
            method=Method("fair", loss(), mixing=QFFL(response="validation"))
        ),
        "two views of a target × no augmentation": run("fedssa", federation=shifted, views=()),
    },
    "Attacks": {
        "× pooled data": run("centralised", attack=SignFlip(0.5)),
        "no hostile client": run(attack=SignFlip(0.1)),
        "on classes × clients that number classes themselves": run(attack=LabelFlip(0.5), federation=alid),
        "that see updates × sums alone": run(
            method=Method("summed", loss(), mixing=Uniform(), uplink=(SecureSum(),)), attack=ALIE(0.5)
        ),
        "that see updates × clients of different size": run("heterofl", attack=ALIE(0.5)),
    },
}

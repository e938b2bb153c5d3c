"""What does not combine, and why: the smallest case of each refusal of a combination of parts and conditions.

The page of the site is made from these cases, and a test runs them: each is refused, and no refusal is without a case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Term, Topology
from fedloom.data import federate
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import FederatedTask
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.adaptation import FineTune
from fedloom.parts.drift import FedSplitDrift, KeptMomentum, Scaffold
from fedloom.parts.mixing import QFFL, Krum, Uniform
from fedloom.parts.objectives import (
    Contrastive,
    CrossEntropy,
    Distillation,
    Energy,
    Mutual,
    NotTrueDistillation,
    Robustness,
    SquaredError,
)
from fedloom.parts.personal import APFL, PrivateHead
from fedloom.parts.topology import Clusters, Hierarchy, Ring
from fedloom.parts.uplink import ClipNoise, SecureSum, TopK
from fedloom.parts.weighting import InverseProbability
from fedloom_apps.audit.attacks import ALIE, LabelFlip, SignFlip
from fedloom_apps.deploy.recipe import Recipe
from fedloom_apps.deploy.settings import DEPLOY

Case = Callable[[], Any]


def method(name: str = "fedavg", **parts: Any) -> Case:
    """A named method with some parts replaced."""
    return lambda: replace(make(name), **parts)


def run(name: str = "fedavg", **conditions: Any) -> Case:
    """An experiment of a named method on a few made-up samples of three clients, with some conditions changed."""

    def case() -> Experiment:
        arguments = {key: value() if value in (alid, shifted, untested) else value for key, value in conditions.items()}
        x, y = torch.arange(24.0).reshape(12, 2), torch.arange(12) % 2
        data = federate((x, y), "iid", 3, held_out=0.25)
        usual: dict[str, Any] = {"federation": data, "model": lambda: nn.Linear(2, 2)}
        return Experiment(**usual | {"method": make(name)} | arguments)

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


def untested() -> Any:
    """Data without test samples."""
    return federate((torch.arange(24.0).reshape(12, 2), torch.arange(12) % 2), "iid", 3, held_out=0)


class Headed(nn.Module):
    """A head on the inputs themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def features(self, x: Any) -> Any:
        return x

    def forward(self, x: Any) -> Any:
        return self.head(x)


def small() -> nn.Module:
    """A network whose layers can be cut."""
    return models.make("mlp", classes=2, inputs=(2,), hidden=(3,))


def planned(name: str = "fedavg", **conditions: Any) -> Case:
    """The plan of such an experiment."""
    return lambda: FederatedTask(run(name, **conditions)())


def normed() -> nn.Module:
    """A network with batch statistics."""
    return models.make("mlp", classes=2, inputs=(2,), hidden=(3,), norm="batch")


class Centred(nn.Linear):
    """A layer whose outputs for a sample depend on the others of its batch."""

    def forward(self, input: Any) -> Any:
        out = super().forward(input)
        return out - out.mean(0)


@dataclass(frozen=True)
class Stranger(SignFlip):
    """An attack by a client that does not exist."""

    def hostile(self, clients: int, seed: int, trusted: Any = ()) -> Any:
        return np.array([clients])


@dataclass(frozen=True)
class Emptied(SignFlip):
    """An attack that leaves no data."""

    def poison(self, data: Any, hostile: Any, seed: int) -> Any:
        return None


def even() -> nn.Module:
    """A network of which half can be cut off."""
    return models.make("mlp", classes=2, inputs=(2,), hidden=(4,))


def nested(**parts: Any) -> Case:
    """The plan of HeteroFL with some parts replaced."""
    return lambda: FederatedTask(run(method=replace(make("heterofl"), **parts), model=small)())


def deployed(*words: str) -> Case:
    """The recipe of a deployment to nodes with two numbers a sample."""
    usual = ["deploy.inputs=[2]", "deploy.classes=2", "model=logistic", "evaluation.what=[]"]
    return lambda: Recipe.of(DEPLOY.resolve([*usual, *words]))


@dataclass(frozen=True)
class Boast(Term):
    """A loss that is negative for good models."""

    def loss(self, out: Any, batch: Any, ctx: Any) -> Any:
        return -out.logits.max(1).values


QUIET = Evaluation(what=())
PRIVATE = Local(steps=2, batch_size=4, dp_clip=1.0)
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
    },
    "Several models": {
        "× pooled data": method("centralised", topology=Ring()),
        "× clients of different size": method("heterofl", topology=Hierarchy()),
        "× weights for all clients": method("afl", topology=Hierarchy()),
        "× noise for one sum": method(topology=Hierarchy(), mixing=Uniform(), uplink=(ClipNoise(noise=1.0),)),
        "models of others × one model": method("apple", topology=Topology()),
        "models sent to each other × an uplink": method(topology=Ring(), uplink=(TopK(),)),
        "means that mixing keeps × a directed graph": method("kgt", topology=Ring(push_sum=True)),
        "models that clients choose × what they keep of one": method(
            topology=Clusters(), objective=loss(Contrastive())
        ),
        "sums alone × a model of one client": planned(
            method=Method("summed", loss(), mixing=Uniform(), uplink=(SecureSum(),), topology=Hierarchy(3))
        ),
        "× hostile clients that see updates": run(method=Method("ring", loss(), topology=Ring()), attack=ALIE(0.5)),
    },
    "Data and conditions": {
        "every client × a part of them": run("fltrust", participation=0.5),
        "factors 1/π × a schedule whose π is not known": run(
            method=Method("inverse", loss(), weighting=(InverseProbability(),)),
            schedule="buffered",
            devices="lognormal",
        ),
        "two augmented views × no augmentation": run(method=Method("twin", loss(Robustness()))),
        "a target × no unlabelled inputs": run("fedssa"),
        "public inputs × no unlabelled inputs": run("fedmd"),
        "a teacher × none": run(method=Method("taught", loss(Distillation()))),
        "a teacher × a method without use for one": run(teacher="runs/teacher"),
        "class numbers × clients that number classes themselves": run(
            method=Method("taught", loss(Distillation())), teacher="runs/teacher", federation=alid
        ),
        "gradients from displacements × adam": run("scaffold", local=Local(optimiser="adam", lr=0.1)),
        "momentum between rounds × steps without": planned(method=Method("kept", loss(), drift=KeptMomentum())),
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
    "The model": {
        "other inputs × batch statistics": planned(method=Method("energy", loss(Energy())), model=normed),
        "sums alone × batch statistics": planned(
            method=Method("summed", loss(), mixing=Uniform(), uplink=(SecureSum(),)), model=normed
        ),
        "models for a target × a private head": planned(
            method=replace(make("fedssa"), personal=PrivateHead()),
            federation=shifted,
            model=lambda: models.make("mlp", classes=10, inputs=(1, 8, 8)),
        ),
        "a network of one's own beside the shared one × one network": planned(method=Method("alone", (Mutual(),))),
        "a generator × a predictor": planned("fedcvae", model=small, evaluation=QUIET),
        "data that an attack makes": planned(attack=Emptied(0.5)),
        "clients that an attack names": planned(attack=Stranger(0.5)),
        "features × a model without a head": planned("moon"),
        "features that are trained × features without parameters": planned("p_avg_proto", model=lambda: Headed()),
        "a private head × a model without one": planned("fedper"),
        "a private body × a model without a head": planned("lg_fedavg"),
    },
    "Private gradients of single samples": {
        "× batch statistics": planned(local=PRIVATE, model=normed),
        "× outputs that depend on the batch": planned(local=PRIVATE, model=lambda: Centred(2, 2)),
        "× several gradients a step": planned("per_fedavg", local=PRIVATE),
        "× a loss of the whole mini-batch": planned("propfair", local=PRIVATE),
        "× what is read of the data": planned("fedala", local=PRIVATE),
        "× several gradients of a mini-batch": planned("fedsam", local=PRIVATE),
    },
    "Evaluation": {
        "a mean of models × clusters": run("ifca", evaluation=Evaluation(what=("average",))),
        "a target × a loss that only training has": run("fedlc", evaluation=Evaluation(target=1, metric="global/loss")),
        "a target × a metric that is not measured": run(evaluation=Evaluation(target=1, metric="global/cross_entropy")),
        "× a generator": run("fedcvae", evaluation=Evaluation(what=("global",))),
        "× models that no round keeps": run("fedevg", evaluation=Evaluation(what=("global",))),
        "the last round × an early end": run(
            "fedssa", federation=shifted, evaluation=Evaluation(target=0.9, stop_at_target=True)
        ),
        "a mean of models × no test samples": planned(federation=untested, evaluation=Evaluation(what=("average",))),
        "a mean of networks of different size × no common test set": planned(
            "heterofl", model=even, evaluation=Evaluation(what=("average",))
        ),
    },
    "Deployments": {
        "× pooled data": deployed("method=centralised"),
        "× measures that need what nodes keep": deployed("evaluation.what=[average]"),
        "× several models": deployed("method=dpsgd"),
        "× masks that the server knows": deployed("method.uplink=[secure_sum]", "method.mixing=uniform"),
        "× a teacher": deployed("method=distill", "teacher=runs/teacher"),
        "× weights by classes": deployed("method=feddisco"),
        "a first model × private parameters": deployed("method=fedper", "init=model.safetensors"),
        "× clients with settings of their own": deployed("client_local={0:{lr:0.1}}"),
        "× a simulated clock": deployed("devices=lognormal"),
        "factors 1/π × a deadline": deployed("method.weighting=[inverse_probability]", "schedule=buffered"),
        "× simulated failures": deployed("drop_rate=0.1"),
        "× attacks": deployed("attack=sign_flip"),
        "× simulated stragglers": deployed("local.stragglers=0.5"),
    },
}

"""Keys that all commands share (data, model, checkpoints and trackers), and the configuration of ``fedloom run``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedloom.base.errors import ConfigError
from fedloom.base.files import check_memory
from fedloom.base.ranges import Count, check_ranges
from fedloom.base.settings import format_unquoted
from fedloom.compute import computes
from fedloom.config.schema import CommandSchema, Config
from fedloom.config.sections import Choice, MethodChoice, Record, Section, Terms, arguments, sections_of
from fedloom.core.attack import attacks
from fedloom.core.federation import Arrays, Federation
from fedloom.core.local import CHANGEABLE, check_one_size
from fedloom.core.method import Method
from fedloom.core.samples import Samples
from fedloom.core.slots import SEVERAL, SLOTS
from fedloom.core.targets import TargetKind, outputs_for
from fedloom.data import federate, noises, partitions, sources, targets
from fedloom.engines import engines
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.rundir import FEDERATED
from fedloom.experiment.runtime import pick_device
from fedloom.methods import methods
from fedloom.models import models
from fedloom.timing import devices, schedules, selections

T = TypeVar("T")
DATA = Choice(sources)
MODEL = Choice(models, hidden=("classes", "inputs", "low", "high"))  # these follow from the data


@dataclass(frozen=True)
class Checkpoints:
    """Settings of checkpoints.

    Args:
        every: rounds between checkpoints; one is also written at the end and on Ctrl-C.
        keep: number of checkpoints to keep.
    """

    every: Count = 10
    keep: Count = 2

    def __post_init__(self) -> None:
        check_ranges(self, "checkpoint.")


def tracking(trackers: tuple[str, ...] = ()) -> list[Callback]:
    """Make trackers.

    Args:
        trackers: log every round's record to these, in addition to the run directory: tensorboard, mlflow, wandb.
    """
    if not trackers:
        return []
    from fedloom.experiment.trackers import trackers as known

    return [known.make(name) for name in trackers]


COMMON: Mapping[str, Section] = {"checkpoint": Record(Checkpoints), **sections_of(tracking)}
"""Keys of every command that trains."""


def run_settings(config: Config) -> dict[str, Any]:
    """The arguments of every task's ``run``: checkpoint settings, and trackers as callbacks."""
    checkpoints = COMMON["checkpoint"].instantiate(config["checkpoint"])
    callbacks = tracking(tuple(config["trackers"]))
    return {"checkpoint_every": checkpoints.every, "keep": checkpoints.keep, "callbacks": callbacks}


class Shared:
    """A cache of data for the runs of a sweep; equal settings are built once.

    >>> shared, made = Shared(), []
    >>> for settings in ({"seed": 1}, {"seed": 2}, {"seed": 1}):
    ...     shared("data", settings, made.append)
    >>> made
    [{'seed': 1}, {'seed': 2}]
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __call__(self, what: str, settings: Mapping[str, Any], make: Callable[[Mapping[str, Any]], T]) -> T:
        """The result of ``make(settings)``, from the cache if it is there."""
        key = f"{what} {json.dumps(settings, sort_keys=True)}"
        if key not in self._made:
            self._made[key] = make(settings)
        return self._made[key]


def model_factory(
    values: Mapping[str, Any], arrays: Arrays, targets: TargetKind | None = None
) -> Callable[[], nn.Module]:
    """Make a model factory for given data and, if the method declares it, their kind of targets.

    It is tried on the meta device, to detect invalid settings.
    """
    make = functools.partial(MODEL.instantiate, values, **model_arguments(values["name"], arrays, targets))
    try:
        with torch.device("meta"):
            model = make()
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ConfigError(
            f"model={values['name']}: its layers are larger than any memory; choose smaller sizes."
        ) from error
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values() if not is_lazy(t))
    check_memory(f"model={values['name']}", size)
    return make


def model_arguments(name: str, arrays: Arrays, targets: TargetKind | None = None) -> dict[str, Any]:
    """The arguments of a model that follow from the data: outputs, inputs, and the value range of a generator."""
    if isinstance(arrays.x, Samples) and "inputs" in models[name].parameters:
        raise ConfigError(f"model={name} takes one tensor, but collate makes structures; give a module of your own.")
    arguments: dict[str, Any] = {
        "classes": arrays.classes if arrays.has_structures else outputs_for(arrays.y, arrays.classes, targets),
        "inputs": tuple(arrays.x.shape[1:]),
    }
    if arrays.std:  # the value range of normalised pixels; [0, 1] otherwise
        pairs = list(zip(arrays.mean, arrays.std, strict=True))
        arguments |= {"low": tuple((0 - m) / s for m, s in pairs), "high": tuple((1 - m) / s for m, s in pairs)}
    return {key: value for key, value in arguments.items() if key in models[name].parameters}


METHOD = MethodChoice(
    methods, slots={slot: (Terms if slot in SEVERAL else Choice)(registry) for slot, registry in SLOTS.items()}
)
OWN = ("y", "test", "validation_set", "collate", "features", "label", "client", "standardise")  # of data in Python
FEDERATION = sections_of(federate, ("source", *OWN), partition=partitions, noise=noises, target=targets)


def dealing(data_seed: int | None = None) -> int | None:
    """The seed by which data are dealt.

    Args:
        data_seed: seed of the partition, splits, noise and target; by default the run's ``seed``.
    """
    return data_seed


FEDERATION |= sections_of(dealing)
CONDITIONS = sections_of(
    Experiment, ("method", "federation", "model", "config"), engine=engines, compute=computes, attack=attacks,
    schedule=schedules, devices=devices, selection=selections,
)  # fmt: skip

_GENERATES = {"clients": 10, "participation": 1.0, "rounds": 40, "evaluation": {"what": []}}
_ADAM = {"steps": 15, "batch_size": 32, "lr": 1e-3, "optimiser": "adam", "weight_decay": 0.0}


def has_clients(data: Mapping[str, Any]) -> bool:
    """Whether data name each sample's client: by the column ``client``, ``client_train``, its file or its folder."""
    kind, path = data.get("name"), data.get("path")
    has_column = data.get("client") is not None or data.get("by_client") is True
    if has_column or not isinstance(path, str) or kind not in ("npz", "table", "text"):
        return has_column
    from fedloom.data.sources.arrays import array_names

    place = Path(path).expanduser()
    return "client_train" in array_names(place) if kind == "npz" else place.is_dir()


def refuse_overridden(recipe: set[str], words: set[str], full: Mapping[str, Any]) -> None:
    """Raise a ``ConfigError`` if ``cohort`` overrides a given ``participation``, or ``local.steps`` given epochs.

    A recipe with all conditions, such as the ``config.yaml`` of a run, was written by FedLoom and has both keys.
    """
    sizes = {"participation", "cohort"}
    by_hand = not CONDITIONS.keys() <= recipe and sizes <= recipe and not words & sizes
    if by_hand or "participation" in words:
        clients = None if full["unseen"] else full["clients"]
        remedy = "" if "cohort" in words or by_hand else ", or add cohort=null"
        check_one_size(clients, full["participation"], full["cohort"], remedy)
    if "local.epochs" in words and full["local"]["steps"] is not None:
        both_set = " and ".join(f"local.{name}={format_unquoted(full['local'][name])}" for name in ("epochs", "steps"))
        remedy = "" if "local.steps" in words else ", or add local.steps=null"
        raise ConfigError(f"{both_set} both set the length of local training; leave one out{remedy}.")


RUN = CommandSchema(
    FEDERATED,
    {"method": METHOD, "data": DATA, **FEDERATION, "model": MODEL, **CONDITIONS, **COMMON},
    defaults={
        "method": "fedavg",
        "data": "digits",
        "partition": "dirichlet",
        "model": "mlp",
        "clients": 20,
        "participation": 0.5,
        "rounds": 50,
        "local": {"weight_decay": 1e-3},
        "attack": "none",
        "schedule": "rounds",
        "devices": "none",
        "selection": "uniform",
    },
    choice_defaults={
        ("data", "synthetic"): {"partition": "natural", "model": "logistic", "local": {"weight_decay": 1e-5}},
        ("method", "fedevg"): {**_GENERATES, "model": "energy_cnn", "local": _ADAM},
        ("method", "fedevg_kept"): {**_GENERATES, "model": "energy_cnn", "local": _ADAM},
        ("method", "fedcgan"): {**_GENERATES, "model": "conditional_gan", "local": {**_ADAM, "beta1": 0.5}},
        ("method", "fedcvae"): {**_GENERATES, "model": "conditional_vae", "local": {**_ADAM, "lr": 2e-3}},
        ("method", "fedbuff"): {"schedule": "buffered", "devices": "lognormal"},
        ("method", "fedasync"): {"schedule": "asynchronous", "devices": "lognormal"},
        ("data", has_clients): {"partition": "natural"},
        ("partition", "natural"): {"clients": None},
        ("partition", "file"): {"clients": None},
        ("partition", "acid"): {"clients": 100, "held_out": "common"},
        ("partition", "alid"): {"clients": 100, "held_out": "common"},
        ("partition", "niid1"): {"clients": 5, "participation": 1.0},
        ("partition", "niid2"): {"clients": 10, "participation": 1.0},
    },
    default_sweep=lambda keys: (
        "method=fedavg,feddyn",
        *(() if {"data", "evaluation"} & keys else ("evaluation.target=0.9",)),  # both reach it on digits
    ),
    check_conflicts=refuse_overridden,
    may_change=(
        *("engine", "compute", "device", "client_state", "checkpoint", "trackers"),
        *(f"local.{name}" for name in CHANGEABLE),
    ),
    extendable="rounds",
)


resolve, sweep = RUN.resolve, RUN.sweep


def build(config: Config, shared: Shared | None = None) -> Experiment:
    """Build the experiment of a configuration; the cheapest checks come first.

    >>> experiment = build(resolve(["method=feddyn", "method.mixing=by_samples", "clients=5"]))
    >>> experiment.method.name, len(experiment.federation), experiment.rounds
    ('feddyn+by_samples', 5, 50)

    Args:
        config: of ``fedloom run``, or of another command with its keys.
        shared: the cache of a sweep, in which equal federations are built once.
    """
    values = config.values
    method = build_method(config)
    conditions = arguments(Experiment, CONDITIONS, values)
    if values["device"] != "auto":  # to choose would initialise CUDA, and workers may be forked from this process
        pick_device(values["device"])
    federation = build_federation(config, shared)
    model = model_factory(values["model"], federation.train.arrays, method.targets)
    return Experiment(method=method, federation=federation, model=model, config=values, **conditions)


def of_models(values: Mapping[str, Any], networks: Sequence[int] = ()) -> Config:
    """The configuration of a run for the models that it has trained, without what says when clients worked and how.

    Only training needs that: the tables named there are not opened, whoever has named them, and no cluster is joined.

    Args:
        values: all settings of the run.
        networks: each client's, where they were dealt by the clients' devices.
    """
    plain = {"schedule": "rounds", "devices": "none", "selection": "uniform", "engine": "auto"}
    choices = {key: {"name": name} for key, name in plain.items()}
    method, evaluation = dict(values["method"]), values["evaluation"] | {"hours": None}
    if networks:
        method["personal"] = method["personal"] | {"members": networks}
    if "pairs" in method.get("topology", {}):
        method["topology"] = method["topology"] | {"pairs": []}
    return Config({**values, **choices, "client_local": {}, "presence": {}, "evaluation": evaluation, "method": method})


def build_method(config: Config) -> Method:
    """Build the method alone; with model=several, for clients that train one of its networks each."""
    method, model = METHOD.instantiate(config["method"]), config.values.get("model", {})
    if model.get("name") != "several":
        return method
    from fedloom.parts.personal.architectures import for_networks

    return for_networks(method, len(model["names"]))


def build_federation(config: Config, shared: Shared | None = None) -> Federation:
    """Build the federation, or take it from the cache."""
    shared = shared or Shared()

    def deal(settings: Mapping[str, Any]) -> Federation:
        source = shared("source", settings["data"], DATA.instantiate)
        return federate(source, **arguments(federate, FEDERATION, settings))

    return shared("federation", dealt(config.values), deal)


def dealt(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a federation, with the seed by which its data are dealt."""
    seed = values["seed"] if values["data_seed"] is None else values["data_seed"]
    return {key: values[key] for key in ("data", *FEDERATION)} | {"seed": seed}

"""A node's assignment in a run: settings by name, never code, and the numbers of the population."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch

from fedloom.base.errors import ConfigError, DataError
from fedloom.base.ranges import Range, check_ranges
from fedloom.base.settings import from_plain, signature, to_plain, validate
from fedloom.config.keys import CONDITIONS, build_method, model_factory
from fedloom.config.schema import Config
from fedloom.config.sections import arguments
from fedloom.core.federation import Arrays, Federation, Index, Population, Split
from fedloom.core.method import Method
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.setup import make_plan, to_device
from fedloom.parts.uplink import ClipNoise
from fedloom.rounds.exchange import State
from fedloom.rounds.plan import ClientPlan
from fedloom.timing import Rounds
from fedloom_apps.deploy.allowed import WHOLE, check
from fedloom_apps.deploy.data import DataSpec, NodeData, placeholder
from fedloom_apps.deploy.messages import MODERATE, Code, Refusal
from fedloom_apps.deploy.settings import DEPLOY
from fedloom_apps.deploy.wire import MOST

SENT = ("method", "model", "local", "augment", "evaluation", "compute", "seed", "rounds", "dtype")
"""The keys of the configuration that are sent to nodes."""
Number = Annotated[int, Range(0, WHOLE)]
"""Of clients, for each of which a node has a few numbers."""
Positive = Annotated[float, Range(0, MODERATE, above=True)]


@dataclass(frozen=True)
class Assignment:
    """A node's part in a run.

    Args:
        run: the run's identifier.
        settings: the keys ``SENT`` of the configuration.
        data: requirements on the node's samples, the settings of a ``DataSpec``.
        client: the node's client number.
        clients: K; 0 while nodes are still joining.
        mean_size: mean number of training samples per client; 0 while it is not known.
        cohort: the usual |S_t|.
        expected_cohort: E|S_t| for Bernoulli sampling; None for cohorts of fixed size.
        noise: the noise multiplier of private uplinks, where it was computed from a privacy budget.
        model: digest of the model's architecture at the server; empty if unknown.
    """

    run: str
    settings: Mapping[str, Any]
    data: Mapping[str, Any]
    client: Number = 0
    clients: Number = 0
    mean_size: Annotated[float, Range(0, MOST)] = 0.0
    cohort: Annotated[int, Range(1, WHOLE)] = 1
    expected_cohort: Positive | None = None
    noise: Positive | None = None
    model: str = ""

    def __post_init__(self) -> None:
        check_ranges(self, "an assignment: ")

    @property
    def facts(self) -> dict[str, Any]:
        """The assignment as plain data."""
        return asdict(self)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Assignment:
        """The assignment in a message."""
        if not isinstance(facts, Mapping):
            raise ConfigError("a message holds no assignment.")
        parameters = signature(cls)
        return cls(**from_plain(parameters, validate("an assignment", "", parameters, facts)))

    @property
    def spec(self) -> DataSpec:
        """The requirements on the node's samples."""
        parameters = signature(DataSpec)
        return DataSpec(**from_plain(parameters, validate("a data specification", "data.", parameters, self.data)))

    @cached_property
    def values(self) -> dict[str, Any]:
        """The complete configuration, validated."""
        if strange := self.settings.keys() - set(SENT):
            raise ConfigError(f"an assignment sets {sorted(strange)[0]!r}, which is not for the server to set.")
        values = DEPLOY.complete(self.settings)
        check(values)
        return values

    def method(self) -> Method:
        """The method, with the noise that a privacy budget requires."""
        method = build_method(Config(self.values))
        if self.noise is None:
            return method
        uplink = (replace(u, noise=self.noise) if isinstance(u, ClipNoise) else u for u in method.uplink)
        return replace(method, uplink=tuple(uplink))


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that is sent to nodes."""
    return {key: to_plain(values[key]) for key in SENT}


Forms = dict[tuple[str, str], tuple[torch.Size, torch.dtype]]
"""The shape and type of every slice of a message, by place and name."""


def forms(slices: State) -> Forms:
    """The forms of what parts send."""
    return {(place, name): (t.shape, t.dtype) for place, tensors in slices.items() for name, t in tensors.items()}


@dataclass
class Workspace:
    """Everything that a node needs for the work of an assignment."""

    assignment: Assignment
    experiment: Experiment  # with the node as its only client
    plan: ClientPlan  # with the node's samples under its number, as in ``federation``
    federation: Federation
    client: int
    computes: dict[int, Any] = field(default_factory=dict)  # those made so far, by level
    later_forms: Forms = field(default_factory=dict)


def prepare(assignment: Assignment, data: NodeData, most: float = float("inf")) -> Workspace:
    """Set up the work of an assignment, whose model takes at most so many bytes."""
    values, client = assignment.values, assignment.client
    clients = max(assignment.clients, client + 1)
    single_client = _federation(data, 0, 1)
    conditions = arguments(Experiment, CONDITIONS, values) | {
        "participation": 1.0, "cohort": None, "sampling": "fixed", "engine": "serial", "engine_settings": {},
        "device": "cpu", "teacher": None, "client_state": "memory", "schedule": Rounds(), "devices": None,
    }  # fmt: skip
    conditions["evaluation"] = replace(conditions["evaluation"], hours=None)  # when is the server's
    method = assignment.method()
    try:
        model = model_factory(values["model"], data.train, method.targets)
    except DataError as error:  # of this machine's memory, of which the code says no more than of the limit
        raise Refusal(Code.QUOTA, str(error)) from error
    with torch.device("meta"):
        numbers = sum(t.numel() for t in model().state_dict().values())
    if numbers * getattr(torch, values["dtype"]).itemsize > most:
        raise Refusal(Code.QUOTA, f"the model has {numbers:,} numbers, more than a message of {most:,} bytes holds.")
    if assignment.mean_size and (steps := conditions["local"].steps_for(int(assignment.mean_size))) > WHOLE:
        raise ConfigError(
            f"clients take {steps:,} local steps on average, where {WHOLE:,} are allowed; set local.steps."
        )
    experiment = Experiment(method=method, federation=single_client, model=model, config=values, **conditions)
    federation = to_device(_federation(data, client, clients), getattr(torch, experiment.dtype), "cpu")
    plan = make_plan(experiment, federation, "cpu")
    if assignment.model and assignment.model != model_digest(plan):
        raise Refusal(
            Code.VERSION,
            "the model has other parameters here than at the server; install the same versions of fedloom and torch "
            "as there.",
        )
    population = Population(clients, np.zeros(0, np.int64), assignment.mean_size or float(len(data.train)))
    plan = replace(plan, all_clients=population, cohort=assignment.cohort, expected_cohort=assignment.expected_cohort)
    return Workspace(assignment, experiment, plan, federation, client)


def prepare_without_data(assignment: Assignment, most: float = float("inf")) -> Workspace:
    """The workspace of an assignment without any node's data, see ``placeholder``."""
    samples = placeholder(assignment.spec)
    return prepare(assignment, NodeData(samples, samples, samples), most)


def model_digest(plan: ClientPlan) -> str:
    """Digest of the model's architecture: names, shapes and order of its parameters and buffers."""
    return hashlib.blake2b(repr(plan.layout).encode(), digest_size=16).hexdigest()


def _federation(data: NodeData, client: int, clients: int) -> Federation:
    """A federation in which one client holds all samples."""
    train, validation, test = (
        _single_split(arrays, client, clients) for arrays in (data.train, data.validation, data.test)
    )
    return Federation(train, validation, test, data.test)


def _single_split(arrays: Arrays, client: int, clients: int) -> Split:
    """A split in which one client holds all rows."""
    offsets = np.zeros(clients + 1, np.int64)
    offsets[client + 1 :] = len(arrays)
    return Split(arrays, Index(np.arange(len(arrays)), offsets))

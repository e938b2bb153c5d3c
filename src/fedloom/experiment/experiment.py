"""An experiment: a method and the conditions under which it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from torch import nn

from fedloom.base.checks import DType, one_of
from fedloom.base.errors import ConfigError, DataError, in_words, nearest
from fedloom.base.ranges import Decay, Range
from fedloom.base.settings import check_fields, short_repr
from fedloom.core.attack import Attack
from fedloom.core.compose import rename
from fedloom.core.federation import Federation
from fedloom.core.local import OWN, Local, cohort_size
from fedloom.core.method import Method
from fedloom.core.slots import label
from fedloom.core.timeline import Schedule
from fedloom.data.augment import Augmentation, augmentation, pipeline
from fedloom.experiment.evaluation import VALIDATION, Evaluation, check_evaluation
from fedloom.methods import methods
from fedloom.timing.devices import Devices, devices
from fedloom.timing.schedules import Buffered, Deadline, Replay, Rounds, Tiers, schedules
from fedloom.timing.selection import Selection, Uniform, selections


def _by_client(path: Path) -> dict[str, dict[str, Any]]:
    """The cells of a table with the column ``client``, by client and column; empty ones are left out."""
    from pandas import isna

    from fedloom.data.columns import clients_of
    from fedloom.data.sources.table import read_frame

    frame = read_frame(path, texts=("client",))
    if "client" not in frame.columns:
        raise DataError(f"{path} has no column 'client', with the name or number of each client.")
    names = [str(name) for name in clients_of(frame["client"], str(path))]
    if len(set(names)) < len(names):
        raise DataError(f"{path} has several rows of client {max(names, key=names.count)!r}; leave one.")
    rows = frame.drop(columns="client").convert_dtypes().to_dict("records")  # whole numbers as such, beside gaps too
    return {who: {key: v for key, v in row.items() if not isna(v)} for who, row in zip(names, rows, strict=True)}


OWN_CLASSES = (
    "but each of these clients numbers the classes in its own way; choose data with common class numbers, like "
    "partition=acid in place of alid"
)


def check_objects(method: object, federation: object) -> None:
    """Raise a ``ConfigError`` if method or federation are of the wrong type."""
    if not isinstance(method, Method):
        raise ConfigError(f"the method is {in_words(method)}; give one of fl.methods, or its name to fl.run.")
    if not isinstance(federation, Federation):
        raise ConfigError(f"the federation is {in_words(federation)}; make one with fl.data.federate(...).")


@dataclass(frozen=True)
class Experiment:
    """A method, data, a model and run conditions; equal experiments give the same bits on one machine.

    Args:
        method: the method; if it has the name of a preset but other parts, it is renamed, for example to
            ``feddyn+adam``.
        federation: the clients' data.
        model: a factory for an initialised model; called once, under a seed that depends on ``seed`` alone.
        rounds: T, the number of communication rounds; 0 evaluates the initial model without training it.
        participation: C in (0, 1]; the cohort has max(⌊C·K⌋, 1) clients.
        cohort: cohort size, instead of ``participation``, which then has no effect.
        sampling: ``fixed`` (exactly that many clients) or ``bernoulli`` (each client independently with that
            probability).
        local: settings of local training.
        client_local: clients' own settings of local training, by name or number, where ``*`` matches anything:
            ``{"phone*": {"epochs": 1, "lr": 0.01}}``; if several match, the last one counts. Or a table, CSV or
            parquet, with a column ``client`` and a column for each such setting, in which empty cells change nothing.
        presence: when clients join and leave, by name or number: with ``{"3": [10, 30]}`` client 3 takes part from
            round 10 until before round 30, counted from 0, and with ``{"3": [10]}`` until the end. Its state is kept.
            Or a table with the columns ``client``, ``joins`` and ``leaves``; the last one may be empty.
        augment: augmentations applied to every mini-batch, in order: names (crop, flip, cutout, jitter, blur,
            autoaugment, randaugment), or mappings like ``{"name": "cutout", "size": 8}``.
        views: augmentations, likewise, that make two views of the server's unlabelled inputs, for methods that use
            them.
        init: where the initial parameters come from: a file of tensors by name (``.safetensors``, or written by
            ``torch.save``), or a run directory, for its final server model; None for the model's own.
        teacher: for distillation objectives: a trained model, or the run directory of one.
        evaluation: what is measured.
        engine: where client work runs: ``serial``, ``processes``, ``ray``, or ``auto``, which chooses by work, cores
            and device without changing results.
        engine_settings: settings of the engine, like ``{"workers": 4}``.
        compute: how clients are stepped: ``live``, ``batched`` or ``auto``.
        compute_settings: settings of the compute.
        seed: seed of everything that is random.
        drop_rate: probability that a cohort member drops out of a round (simulated failures).
        schedule: when the server takes a step, and with whose work: ``rounds`` waits for the whole cohort (see
            ``fl.timing``). ``rounds`` and ``evaluation.every`` count steps of the server.
        devices: how fast clients compute, send and receive, and when they are there; records then have a clock, in
            seconds. None if time is of no interest.
        selection: which clients are invited, with what probability; ``uniform`` by default.
        attack: what hostile clients do, for studies (see ``fl.attacks``); None if there are none.
        dtype: ``float32`` or ``float64``.
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
        client_state: where client states are kept between rounds, without effect on results: ``memory``, ``disk`` (in
            files of the run directory, but for 64 MB), ``shared`` (such files, which the workers of ``engine=ray`` read
            and write themselves; all nodes must see the run directory) or ``auto`` (disk if the states of all potential
            participants exceed 2 GB).
        config: the settings as the user gave them, stored in the run directory.

    Raises:
        ConfigError: for impossible settings, before the run starts.
    """

    method: Method
    federation: Federation
    model: Callable[[], nn.Module]
    rounds: Annotated[int, Range(0, 100_000_000)] = 100
    participation: float = 1.0
    cohort: int | None = None
    sampling: Literal["fixed", "bernoulli"] = "fixed"
    local: Local = field(default_factory=Local)
    client_local: Path | Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    presence: Path | Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    augment: tuple[str | Mapping[str, Any] | Augmentation, ...] = ()
    views: tuple[str | Mapping[str, Any] | Augmentation, ...] = ("jitter", "blur")
    init: Path | None = None
    teacher: nn.Module | Path | str | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    engine: str = "auto"
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    compute: str = "auto"
    compute_settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    drop_rate: Decay = 0.0
    schedule: Schedule = field(default_factory=Rounds)
    devices: Devices | None = None
    selection: Selection = field(default_factory=Uniform)
    attack: Attack | None = None
    dtype: DType = "float32"
    device: str = "auto"
    client_state: Literal["auto", "memory", "disk", "shared"] = "auto"
    config: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return short_repr(self)

    def __post_init__(self) -> None:
        self._check_objects()
        check_fields(self)
        object.__setattr__(self, "method", rename(methods, self.method))
        object.__setattr__(self, "method", self._deal_networks())
        object.__setattr__(self, "local", self.local.until(self.rounds))
        self._check_conditions()
        self._check_needs()
        self._check_schedule()
        self._check_attack()
        self._check_clients()
        check_evaluation(self.method, self.evaluation)
        if self.augment:
            pipeline(self.augment, self.federation.train.arrays)  # raises if it does not suit the data
        empty = (self.federation.train.index.sizes == 0).nonzero()[0]
        if len(empty):
            raise ConfigError(f"{len(empty)} clients have no training samples; the first is client {empty[0]}.")

    def _deal_networks(self) -> Method:
        """The method with the number of each client's network, where networks are dealt by the clients' devices."""
        if not self.method.personal.levels:
            return self.method
        from fedloom.parts.personal import Architectures

        personal, clients = self.method.personal, len(self.federation)
        if not isinstance(personal, Architectures) or personal.by == "turn" or personal.members:
            return self.method
        fleet = None if self.devices is None else self.devices.fleet(clients, self.seed)
        if fleet is None or np.isinf(values := getattr(fleet, personal.by)).all():
            raise ConfigError(
                f"personal {label(personal)!r} deals networks by the {personal.by} of devices, which is not known; set "
                f"devices, like devices=lognormal{' devices.memory=1e8' * (personal.by == 'memory')}."
            )
        rank = values.argsort(kind="stable").argsort()
        members = tuple((rank * personal.count // clients).tolist())
        return replace(self.method, personal=replace(personal, members=members))

    def _check_conditions(self) -> None:
        """Raise a ``ConfigError`` for a condition that is impossible by itself, or with this local training."""
        if self.expected_cohort is not None and self.expected_cohort < 1e-3:  # empty ones are drawn again
            raise ConfigError(
                f"participation is {self.participation:g}, so that with sampling=bernoulli nearly all cohorts would be "
                f"empty; with {self.federation.seen} clients it must be at least {1e-3 / self.federation.seen:.3g}."
            )
        if VALIDATION in self.evaluation.what and not len(self.federation.validation.index.rows):
            raise ConfigError(
                "evaluation.what=validation measures on the clients' validation samples, but they have none; set some "
                "aside, with validation=0.1."
            )
        if self.local.precision != "full" and self.dtype != "float32":
            raise ConfigError(
                f"local.precision={self.local.precision} rounds to fewer digits than dtype={self.dtype} keeps; "
                "choose dtype=float32, or local.precision=full."
            )
        if self.local.precision != "full" and not self.method.predicts:
            raise ConfigError(
                f"method {self.method.name!r} trains generative networks, which local.precision="
                f"{self.local.precision} does not cover; choose local.precision=full."
            )
        couples = next((label(term) for term in self.method.objective if term.per_sample is False), None)
        if self.local.micro_batch and (couples or self.method.adaptation.trains or not self.method.predicts):
            who = couples or (label(self.method.adaptation) if self.method.predicts else self.method.name)
            raise ConfigError(f"local.micro_batch cuts mini-batches, which {who!r} takes whole; leave it out.")

    def _check_clients(self) -> None:
        """Raise a ``ConfigError`` for settings of single clients that are impossible, or that nothing accounts for."""
        for key in ("client_local", "presence"):
            if getattr(self, key) and (
                self.local.dp_clip is not None or any("noise" in up.guarantees for up in self.method.uplink)
            ):
                raise ConfigError(f"the privacy accountant counts the same rounds for all clients; leave {key} out.")
        _ = self.own_local
        if self.presence and self.method.needs("full_participation"):
            raise ConfigError(
                f"{self.method.who_needs('full_participation')} needs every client in every round; leave presence out."
            )
        for t in sorted({0.0, *self._spans[1].tolist()} if self.presence else ()):  # of intervals, gaps begin at ends
            if t >= max(self.rounds, 1):
                break
            if not len(self.present(int(t))):
                raise ConfigError(f"presence leaves no client in round {int(t)}, counted from 0.")

    def _matches(self, key: str, pattern: str) -> list[int]:
        """The clients that a name or number with ``*`` fits."""
        names, participants = self.federation.names, self.federation.seen
        matches = [
            k for k in range(participants) if fnmatchcase(names[k] if names else str(k), pattern) or str(k) == pattern
        ]
        if not matches:
            choices = names[:participants] if names else [str(k) for k in range(participants)]
            raise ConfigError(f"{key} names client {pattern!r}, but there is none; {nearest(pattern, choices)}")
        return matches

    @cached_property
    def own_local(self) -> dict[int, Local]:
        """The settings of local training of clients that have some of their own."""
        by_client: dict[int, dict[str, Any]] = {}
        client_local = self.client_local
        for pattern, settings in (_by_client(client_local) if isinstance(client_local, Path) else client_local).items():
            for name in settings:
                one_of(f"client_local: {pattern} has no own", name, OWN)
            for client in self._matches("client_local", pattern):
                by_client.setdefault(client, {}).update(settings)
        return {client: replace(self.local, **settings) for client, settings in by_client.items()}

    @cached_property
    def spans(self) -> Mapping[str, Sequence[int]]:
        """``presence`` as a mapping."""
        if not isinstance(self.presence, Path):
            return self.presence
        rows = _by_client(self.presence)
        if strange := {key for row in rows.values() for key in row} - {"joins", "leaves"}:
            raise ConfigError(f"{self.presence} has a column {min(strange)!r}; name client, joins and leaves.")
        return {who: (row.get("joins", 0), *[v for k, v in row.items() if k == "leaves"]) for who, row in rows.items()}

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """The rounds from and until which clients are present, float64 [seen] each."""
        start, end = np.zeros(self.federation.seen), np.full(self.federation.seen, np.inf)
        for pattern, span in self.spans.items():
            if not 1 <= len(span) <= 2 or span[0] < 0 or (len(span) == 2 and span[1] <= span[0]):
                raise ConfigError(
                    f"presence: {pattern} is {list(span)}, but it must be [joins] or [joins, leaves] in rounds from 0."
                )
            clients = self._matches("presence", pattern)
            start[clients], end[clients] = span[0], span[1] if len(span) == 2 else np.inf
        return start, end

    def present(self, round: int) -> np.ndarray:
        """The clients that may take part in round t, sorted, int64."""
        start, end = self._spans
        return np.flatnonzero((start <= round) & (round < end))

    def _check_needs(self) -> None:
        """Raise a ``ConfigError`` for the first need of a part that the conditions do not meet."""
        federation, size = self.federation, self.cohort_size
        all_settings = (self.local, *self.own_local.values())
        uneven = next((settings for settings in all_settings if settings.optimiser != "sgd" or settings.rates), None)
        validation = federation.validation.first(federation.seen)
        requirements = {  # whether it is missing, and the message
            "full_participation": (size < federation.seen, "needs every client in every round, but the cohort holds "
                                   f"{size} of {federation.seen}; set participation=1."),
            "probabilities": (not self.has_probabilities, "divides by the probabilities with which clients take part, "
                              "which are known with schedule=rounds, or deadline without local.stragglers, and devices "
                              "that are always there; choose these."),
            "twin": (not self.augment, "compares two augmented views, but nothing is augmented; set it with "
                     "augment=[crop,flip]."),
            "target": (federation.unlabelled is None, "learns from unlabelled inputs of a target distribution, but the "
                       "data have none; choose a target, like target=skew or target=uniform."),
            "public": (federation.unlabelled is None, "sends unlabelled inputs to clients, but there are none; choose "
                       "a target, like target=uniform, or give the federation some, with replace(federation, "
                       "unlabelled=Unlabelled(x))."),
            "views": (not self.views, "compares two views of inputs; choose their augmentations with "
                      "views=[jitter,blur]."),
            "teacher": (self.teacher is None, "needs a trained model to learn from; give its run directory, with "
                        "teacher=runs/...."),
            "common_classes": (not federation.classes_alike, f"uses class numbers, {OWN_CLASSES}."),
            "sgd": (uneven is not None, "reads gradients from displacements and so needs local training by sgd, "
                    f"{'without local.rates' if uneven and uneven.rates else f'not {uneven and uneven.optimiser}'}."),
            "validation": (not validation.index.sizes.all(), "takes responses on validation samples, but some clients "
                           "have none; set some aside, with validation=0.1, or take response=train."),
        }  # fmt: skip
        for need, (is_missing, message) in requirements.items():
            if is_missing and self.method.needs(need):
                raise ConfigError(f"{self.method.who_needs(need)} {message}")
        of_clients = {
            "client_local": self.client_local, "presence": self.presence, "attack": self.attack,
            "schedule": not isinstance(self.schedule, Rounds), "selection": self.selection != Uniform(),
        }  # fmt: skip
        if self.method.pooled and (vain := next((key for key, value in of_clients.items() if value), None)):
            raise ConfigError(f"method {self.method.name!r} trains on pooled data, without clients; leave {vain} out.")
        if self.method.needs("views"):
            pipeline(self.views, federation.train.arrays)
        for view in self.views:  # of methods without any, too, so that a slip in a name is told
            augmentation(view)
        if self.teacher is not None and not self.method.needs("teacher"):
            raise ConfigError(
                f"method {self.method.name!r} learns from no teacher; leave teacher= out, "
                "or add a term that uses one, like method.objective=[cross_entropy,distillation]."
            )

    @property
    def has_probabilities(self) -> bool:
        """Whether the probability is known with which each client takes part in a round."""
        waits = isinstance(self.schedule, Rounds) or (isinstance(self.schedule, Deadline) and not self.local.stragglers)
        return waits and (self.devices is None or self.devices.always)

    def _check_schedule(self) -> None:
        """Raise a ``ConfigError`` for a schedule or devices that do not go with the method or the other conditions."""
        method, schedule, size = self.method, self.schedule, self.cohort_size
        name = schedules.name_of(type(schedule)) or type(schedule).__name__
        if self.devices is None and self.evaluation.hours is not None:
            raise ConfigError("evaluation.hours goes by the clock; set devices, like devices=lognormal, or every.")
        if self.devices is not None and method.topology.chooses:
            raise ConfigError(
                f"clients of method {method.name!r} choose their network by its loss, so that durations are not known "
                "before training; leave devices out."
            )
        self._check_selection(name)
        plain = isinstance(schedule, Rounds) and (self.devices is None or self.devices.always)
        if self.presence and not (plain and self.selection == Uniform()):
            raise ConfigError(
                "presence changes who can be invited between rounds; choose schedule=rounds, selection=uniform and "
                "devices that are always there, or devices with intervals in place of presence."
            )
        if method.needs("full_participation") and not plain:
            raise ConfigError(
                f"{method.who_needs('full_participation')} needs every client in every step; choose schedule=rounds, "
                "and devices that are always there."
            )
        noisy = [label(uplink) for uplink in method.uplink if "noise" in uplink.guarantees]
        if noisy and not plain:
            raise ConfigError(
                f"the privacy of uplink {noisy[0]!r} holds for cohorts drawn uniformly, but clients that are fast or "
                "often there would take part more often; choose schedule=rounds, and devices that are always there."
            )
        if isinstance(schedule, Rounds):
            return
        if self.devices is None and not isinstance(schedule, Replay):
            raise ConfigError(f"schedule={name} goes by the time clients take; set devices, like devices=lognormal.")
        if self.sampling != "fixed":
            raise ConfigError(f"schedule={name} keeps a fixed number of clients at work; choose sampling=fixed.")
        if isinstance(schedule, Buffered) and (schedule.k or 1) > size:
            raise ConfigError(
                f"schedule.k={schedule.k} clients never arrive together, since only {size} are at work; raise cohort."
            )
        if schedule.stale and not method.topology.is_identity:
            raise ConfigError(
                f"topology {label(method.topology)!r} mixes models at the end of rounds, and schedule={name} has no "
                "rounds; choose schedule=rounds, deadline or over_select."
            )
        if schedule.stale and (taught := method.hooks["lessons"]):
            raise ConfigError(
                f"objective {label(taught[0][1])!r} compares clients' outputs on the same inputs, but with "
                f"schedule={name} they receive different ones; choose schedule=rounds, deadline or over_select."
            )
        sums = [label(uplink) for uplink in method.uplink if "sums" in uplink.guarantees]
        if schedule.stale and sums:
            raise ConfigError(
                f"uplink {sums[0]!r} masks the sums of clients that are invited together, and with schedule={name} "
                "they are not; choose schedule=rounds, deadline or over_select."
            )

    def _check_selection(self, schedule: str) -> None:
        """Raise a ``ConfigError`` for a selection that does not go with the method or the other conditions."""
        method, selection = self.method, self.selection
        if selection == Uniform():
            return
        name = selections.name_of(type(selection)) or type(selection).__name__
        if self.sampling != "fixed":
            raise ConfigError(f"selection={name} invites a fixed number of clients; choose sampling=fixed.")
        private = [label(uplink) for uplink in method.uplink if uplink.guarantees]
        if private or self.local.dp_clip is not None:
            raise ConfigError(
                f"selection={name} invites some clients more often than others, which no privacy account "
                "here covers; choose selection=uniform."
            )
        if self.schedule.stale or isinstance(self.schedule, Tiers):
            raise ConfigError(
                f"selection={name} draws the cohorts of rounds, but schedule={schedule} draws clients its own way; "
                "choose schedule=rounds, deadline or over_select."
            )

    def _check_objects(self) -> None:
        """Raise a ``ConfigError`` for what is of the wrong type."""
        check_objects(self.method, self.federation)
        for name, registry, kind in (
            ("schedule", schedules, Schedule), ("devices", devices, Devices), ("selection", selections, Selection),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, registry.make(value))
            elif not isinstance(value, kind) and not (name == "devices" and value is None):
                raise ConfigError(f"{name} is {in_words(value)}; give one of fl.timing, or the name of one.")
        if self.attack is not None and not isinstance(self.attack, Attack):
            raise ConfigError(
                f"the attack is {in_words(self.attack)}; give one of fl.attacks, like SignFlip(fraction=0.2)."
            )
        if isinstance(self.model, nn.Module):
            raise ConfigError(
                f"the model is a module, {type(self.model).__name__}(...), but runs make their own; give a function "
                f"that makes it, like lambda: {type(self.model).__name__}(...)."
            )
        if not callable(self.model):
            raise ConfigError(
                f"the model is {in_words(self.model)}; give a function that makes a module, or fl.run a name."
            )

    def _check_attack(self) -> None:
        attack, method = self.attack, self.method
        if attack is None:
            return
        if attack.fraction and not len(self.hostile):
            least = 1 / self.federation.seen
            raise ConfigError(
                f"attack.fraction={attack.fraction:g} of {self.federation.seen} clients is none; "
                f"take at least {least:.3g}, or attack=none."
            )
        if attack.targets_classes and not self.federation.classes_alike:
            raise ConfigError(f"hostile clients of this attack aim at classes by their numbers, {OWN_CLASSES}.")
        if not attack.colludes:
            return
        hidden = [label(uplink) for uplink in method.uplink if "sums" in uplink.guarantees]
        if hidden:
            raise ConfigError(
                f"hostile clients of this attack see individual updates, but uplink {hidden[0]!r} reveals only sums; "
                "choose an attack that needs none, like attack=sign_flip."
            )
        if not method.topology.is_identity:
            raise ConfigError(
                f"hostile clients of this attack see the updates of one model, but with topology "
                f"{label(method.topology)!r} there are several; choose an attack that needs none, like "
                "attack=sign_flip."
            )
        if method.personal.levels:
            raise ConfigError(
                f"hostile clients of this attack see updates of equal size, but with personal "
                f"{label(method.personal)!r} they differ; choose an attack that needs none, like attack=sign_flip."
            )

    @property
    def hostile(self) -> np.ndarray:
        """The hostile clients, sorted, int64 [f]."""
        if self.attack is None:
            return np.zeros(0, dtype=np.int64)
        clients = self.attack.hostile(self.federation.seen, self.seed, self.method.mixing.trusted)
        return np.asarray(clients, dtype=np.int64)

    @property
    def cohort_size(self) -> int:
        """|S_t| for fixed sampling; its mean for Bernoulli sampling."""
        return cohort_size(self.federation.seen, self.participation, self.cohort)

    @property
    def expected_cohort(self) -> float | None:
        """E|S_t| for Bernoulli sampling; None if |S_t| is fixed."""
        if self.sampling == "fixed":
            return None
        return float(self.cohort or self.participation * self.federation.seen)

"""An experiment: a method and the conditions under which it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedloom.core.attack import Attack
from fedloom.core.checks import DTYPES, one_of
from fedloom.core.compose import named
from fedloom.core.errors import ConfigError, in_words
from fedloom.core.federation import Federation
from fedloom.core.local import Local, cohort_size
from fedloom.core.method import Method
from fedloom.core.settings import check_fields
from fedloom.core.slots import label
from fedloom.data.augment import Augmentation, augmentation, pipeline
from fedloom.experiment.evaluation import Evaluation, check_evaluation
from fedloom.methods import methods

ROUNDS = 100_000_000
OWN_CLASSES = (
    "but each of these clients numbers the classes in its own way; choose data with common class numbers, like "
    "partition=acid in place of alid"
)
CLIENT_STATE = ("auto", "memory", "disk", "shared")


@dataclass(frozen=True)
class Experiment:
    """A method, data, a model and run conditions; equal experiments give the same bits on one machine.

    Args:
        method: the method; if it has the name of a preset but other parts, it is renamed, for example to
            ``feddyn+adam``.
        federation: the clients' data.
        model: a factory for an initialised model; called once, under a seed that depends on ``seed`` alone.
        rounds: T, the number of communication rounds.
        participation: C in (0, 1]; the cohort has max(⌊C·K⌋, 1) clients.
        cohort: cohort size, instead of ``participation``, which then has no effect.
        sampling: ``fixed`` (exactly that many clients) or ``bernoulli`` (each client independently with that
            probability).
        local: settings of local training.
        augment: augmentations applied to every mini-batch, in order: names (crop, flip, cutout, jitter, blur,
            autoaugment, randaugment), or mappings like ``{"name": "cutout", "size": 8}``.
        views: augmentations, likewise, that make two views of the server's unlabelled inputs, for methods that use
            them.
        teacher: for distillation objectives: a trained model, or the run directory of one.
        evaluation: what is measured.
        engine: where client work runs: ``serial``, ``processes``, ``ray``, or ``auto``, which chooses by work, cores
            and device without changing results.
        engine_settings: settings of the engine, like ``{"workers": 4}``.
        compute: how clients are stepped: ``live``, ``batched`` or ``auto``.
        compute_settings: settings of the compute.
        seed: seed of everything that is random.
        drop_rate: probability that a cohort member drops out of a round (simulated failures).
        attack: what hostile clients do, for studies (see ``fedloom.attacks``); None if there are none.
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
    rounds: int = 100
    participation: float = 1.0
    cohort: int | None = None
    sampling: str = "fixed"
    local: Local = field(default_factory=Local)
    augment: tuple[str | Mapping[str, Any] | Augmentation, ...] = ()
    views: tuple[str | Mapping[str, Any] | Augmentation, ...] = ("jitter", "blur")
    teacher: nn.Module | Path | str | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    engine: str = "auto"
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    compute: str = "auto"
    compute_settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    drop_rate: float = 0.0
    attack: Attack | None = None
    dtype: str = "float32"
    device: str = "auto"
    client_state: str = "auto"
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_objects()
        check_fields(self)
        object.__setattr__(self, "method", named(methods, self.method))
        self._check_conditions()
        self._check_needs()
        self._check_attack()
        check_evaluation(self.method, self.evaluation)
        if self.augment:
            pipeline(self.augment, self.federation.train.arrays)  # raises if it does not suit the data
        empty = (self.federation.train.index.sizes == 0).nonzero()[0]
        if len(empty):
            raise ConfigError(f"{len(empty)} clients have no training samples; the first is client {empty[0]}.")

    def _check_conditions(self) -> None:
        """Raise a ``ConfigError`` for a condition that is impossible by itself, or with this local training."""
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}, but at least 1 is needed.")
        if self.rounds > ROUNDS:
            raise ConfigError(f"rounds is {self.rounds:.3g}, but at most {ROUNDS:,} are allowed.")
        one_of("unknown sampling", self.sampling, ("fixed", "bernoulli"))
        if self.expected_cohort is not None and self.expected_cohort < 1e-3:  # empty ones are drawn again
            raise ConfigError(
                f"participation is {self.participation:g}, so that with sampling=bernoulli nearly all cohorts would be "
                f"empty; with {self.federation.seen} clients it must be at least {1e-3 / self.federation.seen:.3g}."
            )
        if not 0 <= self.drop_rate < 1:
            raise ConfigError(f"drop_rate is {self.drop_rate:g}, but it must lie in [0, 1).")
        one_of("unknown dtype", self.dtype, DTYPES)
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
        one_of("unknown client_state", self.client_state, CLIENT_STATE)

    def _check_needs(self) -> None:
        """Raise a ``ConfigError`` for the first need of a part that the conditions do not meet."""
        federation, size = self.federation, self.cohort_size
        validation = federation.validation.first(federation.seen)
        lacking = {  # whether it is missing, and the message
            "full_participation": (size < federation.seen, "needs every client in every round, but the cohort holds "
                                   f"{size} of {federation.seen}; set participation=1."),
            "twin": (not self.augment, "compares two augmented views, but nothing is augmented; set it with "
                     "augment=[crop,flip]."),
            "target": (federation.unlabelled is None, "learns from unlabelled inputs of a target distribution, but the "
                       "data have none; choose a target, like target=skew or target=uniform."),
            "views": (not self.views, "compares two views of inputs; choose their augmentations with "
                      "views=[jitter,blur]."),
            "teacher": (self.teacher is None, "needs a trained model to learn from; give its run directory, with "
                        "teacher=runs/...."),
            "common_classes": (not federation.classes_alike, f"goes by the numbers of classes, {OWN_CLASSES}."),
            "sgd": (self.local.optimiser != "sgd", "reads gradients from displacements and so needs local training by "
                    f"sgd, not {self.local.optimiser}."),
            "validation": (not validation.index.sizes.all(), "takes responses on validation samples, but some clients "
                           "have none; set some aside, with validation=0.1, or take response=train."),
        }  # fmt: skip
        for need, (lacks, told) in lacking.items():
            if lacks and self.method.needs(need):
                raise ConfigError(f"{self.method.who_needs(need)} {told}")
        if self.method.needs("views"):
            pipeline(self.views, federation.train.arrays)
        for one in self.views:  # of methods without any, too, so that a slip in a name is told
            augmentation(one)
        if self.teacher is not None and not self.method.needs("teacher"):
            raise ConfigError(
                f"method {self.method.name!r} learns from no teacher; leave teacher= out, "
                "or add a term that uses one, like method.objective=[cross_entropy,distillation]."
            )

    def _check_objects(self) -> None:
        """Raise a ``ConfigError`` if method, federation or model are of the wrong type."""
        if not isinstance(self.method, Method):
            raise ConfigError(
                f"the method is {in_words(self.method)}; give one from fl.methods, or its name to fl.run."
            )
        if not isinstance(self.federation, Federation):
            raise ConfigError(f"the federation is {in_words(self.federation)}; make one with fl.data.federate(...).")
        if self.attack is not None and not isinstance(self.attack, Attack):
            raise ConfigError(
                f"the attack is {in_words(self.attack)}; give one of fedloom.attacks, like SignFlip(fraction=0.2)."
            )
        if isinstance(self.model, nn.Module):
            raise ConfigError(
                f"the model is a module, {type(self.model).__name__}(...), but runs make their own; give a function "
                f"that makes it, like lambda: {type(self.model).__name__}(...)."
            )
        if not callable(self.model):
            raise ConfigError(
                f"the model is {in_words(self.model)}; give a function that makes a module, without arguments."
            )

    def _check_attack(self) -> None:
        attack, method = self.attack, self.method
        if attack is None:
            return
        if method.pooled:
            raise ConfigError(f"method {method.name!r} trains on pooled data, so there are no clients to be hostile.")
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
        hidden = [label(uplink) for uplink in method.uplink if uplink.only_sums]
        if hidden:
            raise ConfigError(
                f"hostile clients of this attack see individual updates, but uplink {hidden[0]!r} reveals only sums; "
                "choose an attack that needs none, like attack=sign_flip."
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
        found = self.attack.hostile(self.federation.seen, self.seed, self.method.mixing.trusted)
        return np.asarray(found, dtype=np.int64)

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

"""Experts of an online learner: their configurations, grids of them, and groups that differ in numbers alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fedloom.core.errors import ConfigError
from fedloom.core.local import Local
from fedloom.core.parts import Adaptation
from fedloom.core.slots import label
from fedloom.core.tree import Tree
from fedloom_apps.online.learners import OnlineLearner


@dataclass(frozen=True)
class ExpertConfig:
    """The configuration of one expert: its learner, its adaptation and its K steps.

    Args:
        learner: the online method.
        adaptation: U.
        local: K (``steps``), β (``lr``), batch size, weight decay and clipping.
    """

    learner: OnlineLearner
    adaptation: Adaptation
    local: Local

    def vmapped_fields(self) -> dict[str, float]:
        """The numeric settings in which the experts of one group may differ, by dotted name."""
        values = {f"learner.{name}": getattr(self.learner, name) for name in self.learner.vmapped_fields}
        if any(f.name == "lr" for f in fields(self.adaptation)):
            values["adaptation.lr"] = self.adaptation.lr  # type: ignore[attr-defined]
        return values | {"local.lr": self.local.lr, "local.weight_decay": self.local.weight_decay}

    def static_fields(self) -> tuple[Any, ...]:
        """All other settings, which the experts of a group share."""
        skipped = self.vmapped_fields()
        parts = (("learner", self.learner), ("adaptation", self.adaptation), ("local", self.local))
        settings = (
            (where, type(part), f.name, getattr(part, f.name))
            for where, part in parts
            for f in fields(part)
            if f"{where}.{f.name}" not in skipped
        )
        return tuple((*place, tuple(it.items()) if isinstance(it, Mapping) else it) for *place, it in settings)


def grid(
    learner: OnlineLearner, adaptation: Adaptation, local: Local, over: Mapping[str, Sequence[Any]]
) -> tuple[ExpertConfig, ...]:
    """Make the experts of a grid of settings, like ``{"learner.alpha": (1, 5), "local.steps": (10, 20)}``.

    >>> from fedloom.parts.adaptation import Maml
    >>> from fedloom_apps.online.proximal import Moml
    >>> found = grid(Moml(), Maml(), Local(steps=10), {"learner.alpha": (1.0, 5.0), "adaptation.lr": (0.1, 0.01)})
    >>> [(e.learner.alpha, e.adaptation.lr) for e in found]
    [(1.0, 0.1), (1.0, 0.01), (5.0, 0.1), (5.0, 0.01)]

    Raises:
        ConfigError: if a key is not a setting.
    """
    base = {"learner": learner, "adaptation": adaptation, "local": local}
    experts = []
    for key in over:
        part, _, name = key.partition(".")
        if part not in base or name not in {f.name for f in fields(base[part])}:
            raise ConfigError(f"a grid cannot vary {key!r}: it is not a setting of learner, adaptation or local.")
    for values in itertools.product(*over.values()):
        settings = dict(base)
        for key, value in zip(over, values, strict=True):
            part, _, name = key.partition(".")
            settings[part] = replace(settings[part], **{name: value})
        experts.append(ExpertConfig(**settings))
    return tuple(experts)


@dataclass(frozen=True)
class Group:
    """Experts that differ in numbers alone.

    Attributes:
        places: their indices among all experts.
        first: the first of them.
        numbers: the settings that differ, [G] each.
    """

    places: tuple[int, ...]
    first: ExpertConfig
    numbers: Tree

    @classmethod
    def of(cls, experts: Sequence[ExpertConfig], dtype: torch.dtype) -> tuple[Group, ...]:
        """Partition experts into groups."""
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for place, expert in enumerate(experts):
            kinds.setdefault(expert.static_fields(), []).append(place)
        groups = []
        for places in kinds.values():
            varied = [experts[place].vmapped_fields() for place in places]
            differ = [name for name in varied[0] if len({values[name] for values in varied}) > 1]
            numbers = {name: torch.tensor([values[name] for values in varied], dtype=dtype) for name in differ}
            groups.append(cls(tuple(places), experts[places[0]], numbers))
        return tuple(groups)

    def instantiate(self, numbers: Mapping[str, Any]) -> tuple[OnlineLearner, Adaptation, Any, Any]:
        """Learner, adaptation, β and weight decay with the given numbers substituted."""
        parts: dict[str, dict[str, Any]] = {"learner": {}, "adaptation": {}, "local": {}}
        for key, value in numbers.items():
            where, _, name = key.partition(".")
            parts[where][name] = value
        learner, adaptation = self.first.learner, self.first.adaptation
        if parts["learner"]:
            learner = replace(learner, **parts["learner"])
        if parts["adaptation"]:
            adaptation = replace(adaptation, **parts["adaptation"])
        local = {"lr": self.first.local.lr, "weight_decay": self.first.local.weight_decay} | parts["local"]
        return learner, adaptation, local["lr"], local["weight_decay"]


def expert_label(expert: ExpertConfig) -> str:
    """A label for tables: the expert's steps K or epochs E, its adaptation and the settings of its learner.

    >>> from fedloom.parts.adaptation import Maml
    >>> from fedloom_apps.online.proximal import Moml
    >>> expert_label(ExpertConfig(Moml(alpha=1.0), Maml(lr=0.1), Local(steps=10)))
    'K 10, maml(lr 0.1, steps 1), alpha 1'
    """
    own = [f"{f.name} {getattr(expert.learner, f.name):g}" for f in fields(expert.learner)]
    inner = [
        f"{f.name} {getattr(expert.adaptation, f.name):g}"
        for f in fields(expert.adaptation)
        if f.name in ("lr", "steps")
    ]
    name = label(expert.adaptation)
    amount = f"E {expert.local.epochs}" if expert.local.steps is None else f"K {expert.local.steps}"
    steps = [amount] if expert.learner.trains else []
    return ", ".join([*steps, f"{name}({', '.join(inner)})" if inner else name, *own])

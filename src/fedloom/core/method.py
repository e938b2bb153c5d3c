"""A federated method as data: one frozen record of parts, validated on creation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedloom.core.errors import ConfigError
from fedloom.core.parts import (
    HOOKS,
    Adaptation,
    Drift,
    Mixing,
    Paired,
    Part,
    Personal,
    ServerOptimizer,
    Term,
    overrides,
)
from fedloom.core.slots import SLOTS, label


@dataclass(frozen=True)
class Method:
    """A composition of parts; every slot but the objective defaults to its identity, which makes the method FedAvg.

    Args:
        name: the name in tables and plots.
        objective: the terms whose sum is the local loss.
        drift: the correction of client drift.
        personal: personalisation: which parameters are private.
        adaptation: how a model is adapted to a client before it is used.
        mixing: how the mixing coefficients p are chosen.
        server: the server optimiser.
        pooled: train on the pooled data of all clients (centralised training, the papers' oracle); no communication.
        citation: BibTeX of the paper.

    Raises:
        ConfigError: if two parts are incompatible; the message names both.
    """

    name: str
    objective: tuple[Term, ...]
    drift: Drift = field(default_factory=Drift)
    personal: Personal = field(default_factory=Personal)
    adaptation: Adaptation = field(default_factory=Adaptation)
    mixing: Mixing = field(default_factory=Mixing)
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    pooled: bool = False
    citation: str = ""

    def __post_init__(self) -> None:
        if not any(overrides(term, "loss") for term in self.objective):
            raise ConfigError(f"method {self.name!r} has no term with a loss on the data; add CrossEntropy().")
        if isinstance(self.personal, Paired) and not self.adaptation.is_identity:
            raise ConfigError(
                f"adaptation {label(self.adaptation)!r} fits one model, but with personal {label(self.personal)!r} "
                "a client has two."
            )
        if self.needs("model") and self.adaptation.trains:
            raise ConfigError(
                f"{self.who_needs('model')} evaluates the model on inputs of its own, but adaptation "
                f"{label(self.adaptation)!r} has a model only for the current mini-batch."
            )
        if self.needs("received") and self.adaptation.trains:
            raise ConfigError(
                f"{self.who_needs('received')} compares with the received model's logits, but adaptation "
                f"{label(self.adaptation)!r} trains on the logits of an adapted model."
            )
        if self.needs("model") and isinstance(self.personal, Paired):
            raise ConfigError(
                f"{self.who_needs('model')} evaluates the model on other inputs, but with personal "
                f"{label(self.personal)!r} a client has two models."
            )
        if self.personal.private("body.weight") and self.personal.private("head.weight"):
            for slot, part in self.parts.items():
                if part.needs.shared:
                    raise ConfigError(
                        f"{slot} {label(part)!r} works on shared parameters, "
                        f"but personal {label(self.personal)!r} shares none."
                    )

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All parts by place: ``objective.0``, ``objective.1``, ..., then the other slots."""
        terms: dict[str, Part] = {f"objective.{i}": term for i, term in enumerate(self.objective)}
        return terms | {slot: getattr(self, slot) for slot in SLOTS if slot != "objective"}

    @cached_property
    def hooks(self) -> dict[str, list[tuple[str, Any]]]:
        """For each hook, the parts that override it, with their places."""
        return {hook: [(place, part) for place, part in self.parts.items() if overrides(part, hook)] for hook in HOOKS}

    @cached_property
    def uploading(self) -> list[tuple[str, Part]]:
        """The parts that upload slices, with their places."""
        return [(place, part) for place, part in self.parts.items() if part.uploads]

    @cached_property
    def is_cross_entropy(self) -> bool:
        """Whether the loss on a mini-batch is the cross entropy of the logits alone, whose gradient is known."""
        return [isinstance(part, Term) and part.is_cross_entropy for _, part in self.hooks["loss"]] == [True]

    @cached_property
    def answers(self) -> bool:
        """Whether some term uses the model's output on the mini-batch, which makes the model a predictor."""
        return any(part.needs.output for _, part in self.hooks["loss"])

    def needs(self, what: str) -> bool:
        """Whether any part declares the given field of ``Needs``."""
        return any(getattr(part.needs, what) for part in self.parts.values())

    def who_needs(self, what: str) -> str:
        """The parts that declare it, for error messages, like ``drift 'scaffold'``."""
        return " and ".join(f"{place} {label(p)!r}" for place, p in self.parts.items() if getattr(p.needs, what))

    def citations(self) -> Iterator[str]:
        """BibTeX entries of the method and its parts, without repetitions."""
        seen: dict[str, None] = {}
        for entry in (self.citation, *(part.citation for part in self.parts.values())):
            if entry:
                seen.setdefault(entry.strip())
        yield from seen

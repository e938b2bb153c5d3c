"""The slots of a method, and what follows from the parts in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.base.errors import ConfigError, in_words
from fedloom.core.hooks import HOOKS, overridden, overrides
from fedloom.core.parts import (
    UPDATE,
    Adaptation,
    Drift,
    Mixing,
    Paired,
    Part,
    Personal,
    ServerOptimizer,
    Term,
    Topology,
    Uplink,
    Use,
    Weighting,
)
from fedloom.core.slots import SEVERAL, SLOTS, label
from fedloom.core.targets import CLASSES, ONE_CLASS, TargetKind


@dataclass(frozen=True)
class Composition:
    """Parts by slot, as ``Method`` describes them, and what follows from them, whether they go together or not."""

    name: str
    objective: tuple[Term, ...]
    drift: Drift = field(default_factory=Drift)
    personal: Personal = field(default_factory=Personal)
    adaptation: Adaptation = field(default_factory=Adaptation)
    mixing: Mixing = field(default_factory=Mixing)
    weighting: tuple[Weighting, ...] = ()
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    topology: Topology = field(default_factory=Topology)
    uplink: tuple[Uplink, ...] = ()
    pooled: bool = False
    citation: str = field(default="", repr=False)

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """The slices that leave a client, other than batch statistics: ``update``, and ``<place>/<name>`` of parts."""
        parts = {place: part for place, part in self.parts.items() if not isinstance(part, Uplink)}
        return UPDATE, *(f"{place}/{n}" for place, part in parts.items() for n in part.uploads if n != UPDATE)

    @cached_property
    def boundable(self) -> tuple[str, ...]:
        """Those that may be clipped to a norm bound: neither functions of the update nor slices that have no bound."""
        declared = ((place, part.boundable, part.update_statistics) for place, part in self.parts.items())
        names = {UPDATE, *(f"{place}/{n}" for place, bounded, again in declared for n in bounded if n not in again)}
        return tuple(slot for slot in self.slots if slot in names)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All parts by place: ``objective.0``, ``objective.1``, ..., then the other slots, ``uplink.0``, ..."""
        parts: dict[str, Part] = {}
        for slot in SLOTS:
            filled = getattr(self, slot)
            parts |= {f"{slot}.{i}": part for i, part in enumerate(filled)} if slot in SEVERAL else {slot: filled}
        return parts

    @cached_property
    def hooks(self) -> dict[str, list[tuple[str, Any]]]:
        """For each hook, the parts that override it, with their places."""
        implementations: dict[str, list[tuple[str, Any]]] = {hook: [] for hook in HOOKS}
        for place, part in self.parts.items():
            for hook in overridden(type(part)) & implementations.keys():
                implementations[hook].append((place, part))
        return implementations

    @cached_property
    def is_paired(self) -> bool:
        """Whether clients train a second model v beside the shared w."""
        return isinstance(self.personal, Paired)

    @cached_property
    def keeps_own(self) -> bool:
        """Whether clients keep a whole model of their own, so that no parameter that they use is common to all."""
        return self.is_paired or overrides(self.personal, "start") or overrides(self.personal, "point")

    @cached_property
    def shares_nothing(self) -> bool:
        """Whether all parameters are private, whatever the model."""
        body, head = (self.personal.is_private(f"{part}.weight", nn.Identity()) for part in ("body", "head"))
        return body and head

    def private_in(self, model: nn.Module) -> Callable[[str], bool]:
        """Whether a parameter or buffer of the model is private, by its name."""
        return lambda name: self.personal.is_private(name, model.get_submodule(name.rpartition(".")[0]))

    @cached_property
    def extras(self) -> Tensor:
        """Initial values of the E scalars that a pair trains beside v, [E]; tried on a model of one parameter."""
        return self._private_start(None)[0][1:] if self.is_paired else torch.zeros(0)

    @cached_property
    def continues(self) -> bool:
        """Whether private values go on from one round to the next."""
        private = torch.zeros(1 + len(self.extras), dtype=torch.float64)
        return not torch.equal(self._private_start(private)[0], self._private_start(private + 1)[0])

    @cached_property
    def keeps_private(self) -> bool:
        """Whether clients keep private values: to go on from them, or to deploy v."""
        return self.continues or self.is_paired

    @cached_property
    def draws_models(self) -> bool:
        """Whether private values start from other random initialisations of the model."""
        return self._private_start(None)[1]

    def _private_start(self, private: Tensor | None) -> tuple[Tensor, bool]:
        """The private values with which a model of one parameter starts, and whether another one was drawn."""
        zero, draws = torch.zeros(1, dtype=torch.float64), list[int]()

        def initialise() -> Tensor:
            draws.append(1)
            return zero

        start: Any = self.personal.private_start(zero, zero, private, initialise)
        if not (isinstance(start, Tensor) and start.ndim == 1):
            who = f"personal {label(self.personal)!r}"
            raise ConfigError(f"{who}: private_start returned {in_words(start)} instead of a vector of private values.")
        return start, bool(draws)

    @cached_property
    def choices(self) -> tuple[Use, ...]:
        """The models among which a client with enough samples chooses the one it uses; () if there is no choice."""
        private = {"private": torch.cat([torch.zeros(1), self.extras]), "buffers": torch.zeros(0)}
        state = self.personal.init_client(torch.zeros(1)) | private
        uses = self.personal.uses(0, lambda: state, sys.maxsize)
        return uses if len(uses) > 1 else ()

    @cached_property
    def uploading(self) -> list[tuple[str, Part]]:
        """The parts that upload slices, with their places."""
        return [(place, part) for place, part in self.parts.items() if part.uploads]

    @cached_property
    def only_sums(self) -> bool:
        """Whether the server sees sums alone, of floats or of numbers in a ring of an uplink's own."""
        return any("sums" in uplink.guarantees for uplink in self.uplink)

    @cached_property
    def is_cross_entropy(self) -> bool:
        """Whether the loss on a mini-batch is the cross entropy of the logits alone, whose gradient is known."""
        return [isinstance(part, Term) and part.is_cross_entropy for _, part in self.hooks["loss"]] == [True]

    @cached_property
    def targets(self) -> TargetKind | None:
        """The kind of targets that the method is defined for; None if no part says so."""
        kind: TargetKind | None = next((part.targets for part in self.parts.values() if part.targets), None)
        return CLASSES if kind == ONE_CLASS else kind

    @cached_property
    def test_loss(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The loss (outputs, targets) -> [B] or [] that evaluations report: the sum of the terms' ``test_loss``.

        None if no term has one, for example because the loss needs a teacher or the client's label counts; evaluations
        then report the cross entropy under its own name.
        """
        terms = [term for term in self.objective if term.has_test_loss()]
        if len(terms) == 1:
            return terms[0].test_loss  # pyright: ignore[reportReturnType]

        def total(out: Tensor, y: Tensor) -> Tensor:
            values = [value for term in terms if (value := term.test_loss(out, y)) is not None]
            return sum((v.reshape(len(y), -1).mean(1) if v.ndim else v for v in values), out.new_zeros(()))

        return total if terms else None

    @cached_property
    def data_terms(self) -> tuple[Term, ...]:
        """The terms that learn from the data, wherever they stand; the first one with a loss if none says so."""
        losses = [term for _, term in self.hooks["loss"]]
        terms = [term for term in losses if term.learns or term.has_test_loss()]
        return tuple(terms or losses[:1])

    @cached_property
    def predicts(self) -> bool:
        """Whether some term uses the model's output on the mini-batch, which makes the model a predictor."""
        return any("generator" not in part.needs for _, part in self.hooks["loss"])

    def needs(self, what: str) -> bool:
        """Whether any part declares the given field of ``Needs``, or sets one to this word."""
        return what in self._needs_words

    @cached_property
    def _needs_words(self) -> frozenset[str]:
        return frozenset().union(*map(self._needs_of, self.parts.values()))

    def _needs_of(self, part: Part) -> frozenset[str]:
        """The words of a part's needs, with every client in every round for means that a topology keeps only then."""
        is_kept_by_all = part.mixed and self.topology.mean == "kept_by_all"
        return part.needs.words | ({"full_participation"} if is_kept_by_all else set[str]())

    @cached_property
    def keep_momentum(self) -> tuple[str, ...]:
        """The places of parts that keep the momentum of local steps."""
        return tuple(place for place, part in self.parts.items() if part.needs.momentum)

    @property
    def uses_unlabelled(self) -> bool:
        """Whether any part needs unlabelled inputs at the server."""
        return self.needs("target") or self.needs("public")

    def who_needs(self, what: str) -> str:
        """The parts that declare it, for error messages, like ``drift 'scaffold'``."""
        places = ((place.partition(".")[0], p) for place, p in self.parts.items() if what in self._needs_of(p))
        return " and ".join(f"{slot} {label(part)!r}" for slot, part in places)

"""A federated method as data: one frozen record of parts, validated on creation."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.applications import shown
from fedloom.core.context import NO_ROUND, Batch, Output, RoundInfo
from fedloom.core.documentation import bibtex
from fedloom.core.errors import ConfigError, closest, in_words, nearest, outside
from fedloom.core.hooks import HOOKS, overridden, overrides
from fedloom.core.parts import (
    UPDATE,
    Adaptation,
    Drift,
    Mixing,
    Needs,
    Paired,
    Part,
    Personal,
    Reduce,
    ServerOptimizer,
    Term,
    Topology,
    Uplink,
    Use,
    Weighting,
)
from fedloom.core.settings import brief
from fedloom.core.slots import BASES, SEVERAL, SLOTS, label
from fedloom.core.targets import CLASSES, ONE_CLASS, TargetKind


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
        weighting: factors of clients' shares beside p, such as those of stale work.
        server: the server optimiser.
        topology: how many models there are, who receives which, and how they are mixed with each other.
        uplink: transforms, in order, of everything that leaves a client.
        pooled: train on the pooled data of all clients (centralised training, the papers' oracle); no communication.
        citation: BibTeX of the paper, or its keys in ``citations.bib``.

    Raises:
        ConfigError: if two parts are incompatible; the message names both.
    """

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

    def __post_init__(self) -> None:
        self._check_slots()
        if not any(overrides(term, "loss") for term in self.objective):
            raise ConfigError(
                f"method {self.name!r} has no term with a loss on the data; add CrossEntropy(), or "
                "cross_entropy to the list of objectives."
            )
        if self.is_paired and not self.adaptation.is_identity:
            raise ConfigError(
                f"adaptation {label(self.adaptation)!r} fits one model, but with personal {label(self.personal)!r} "
                "a client has two."
            )
        if self.needs("model") and self.adaptation.trains:
            raise ConfigError(
                f"{self.who_needs('model')} evaluates the model on inputs of its own, but adaptation "
                f"{label(self.adaptation)!r} has a model only for the current mini-batch."
            )
        with_logits = [term for term in self.objective if term.needs.received and not term.needs.features]
        if with_logits and self.adaptation.trains:
            raise ConfigError(
                f"objective {label(with_logits[0])!r} compares with the received model's logits, but adaptation "
                f"{label(self.adaptation)!r} trains on the logits of an adapted model."
            )
        if self.needs("model") and self.is_paired:
            raise ConfigError(
                f"{self.who_needs('model')} evaluates the model on other inputs, but with personal "
                f"{label(self.personal)!r} a client has two models."
            )
        if self.hooks["on_step"] and (self.adaptation.trains or self.is_paired):
            place, part = self.hooks["on_step"][0]
            other = (
                f"adaptation {label(self.adaptation)!r}"
                if self.adaptation.trains
                else f"personal {label(self.personal)!r}"
            )
            raise ConfigError(
                f"{place.partition('.')[0]} {label(part)!r} inspects the model before every step, but with {other} the "
                "step's loss is that of another model; leave one of them out."
            )
        if self.shares_nothing:
            for slot, part in self.parts.items():
                if _works_on_shared(part):
                    raise ConfigError(
                        f"{slot} {label(part)!r} works on shared parameters, "
                        f"but personal {label(self.personal)!r} shares none."
                    )

        for place, part in (*self.hooks["start"], *self.hooks["lessons"]) if self.needs("sgd") else ():
            raise ConfigError(
                f"{self.who_needs('sgd')} infers gradients from the way from the received model, but with "
                f"{place.partition('.')[0]} {label(part)!r} local steps start elsewhere; choose a drift like dynamic, "
                "or none."
            )
        signed = [term for term in self.objective if self.mixing.weighs_losses and _is_signed(term)]
        if signed:
            raise ConfigError(
                f"mixing {label(self.mixing)!r} weights clients by losses of at least 0, but objective "
                f"{label(signed[0])!r} is negative for good models; choose another of the two."
            )
        if self.needs("target"):
            self._check_target()
        kinds = {place: CLASSES if part.targets == ONE_CLASS else part.targets for place, part in self.parts.items()}
        declared = {kind: (place, self.parts[place]) for place, kind in kinds.items() if kind}
        if len(declared) > 1:
            (kind, (one, part)), (other_kind, (other, second)) = list(declared.items())[:2]
            raise ConfigError(
                f"{one} {label(part)!r} is defined for {kind}, but {other} {label(second)!r} for {other_kind}; "
                "leave one of them out."
            )
        for uplink in self.uplink:
            self._check(uplink)
        if self.needs("heard") and not overrides(self.topology, "heard"):
            raise ConfigError(
                f"{self.who_needs('heard')} reads models of other clients, but topology {label(self.topology)!r} sends "
                "a client one; set method.topology=cores."
            )
        if not self.topology.is_identity:
            self._check_topology()
        if self.is_paired:
            self._check_scalars()

    def __repr__(self) -> str:
        """The parts that differ from FedAvg's.

        >>> from fedloom.methods import make
        >>> make("fedprox", mu=0.1)
        Method(name='fedprox', objective=(CrossEntropy(), Proximal(mu=0.1)))
        """
        return brief(self)

    def _repr_html_(self) -> str | None:
        return shown(self)

    def _check_slots(self) -> None:
        """Raise a ``ConfigError`` if a slot holds anything but its parts; a list of parts becomes a tuple."""
        if not isinstance(self.name, str):
            raise ConfigError(f"the name of a method is text, not {self.name!r:.60}.")
        for slot in SLOTS:
            held, kind = getattr(self, slot), BASES[slot]
            if slot in SEVERAL:
                held = tuple(held) if isinstance(held, list | tuple) else (held,)
                object.__setattr__(self, slot, held)
            for part in held if slot in SEVERAL else (held,):
                if isinstance(part, type) and issubclass(part, kind):
                    raise ConfigError(f"{slot} is the class {part.__name__}; give an instance, {part.__name__}(...).")
                if not isinstance(part, kind):
                    raise ConfigError(
                        f"{slot} is {in_words(part)}, but it must be a {kind.__name__} of fedloom.core.parts."
                    )
                if type(part) is not kind:
                    _check_declarations(f"{slot} {label(part)!r}", part)

    def with_loss(self, term: Term) -> Method:
        """The method with another loss on the data in place of the cross entropy; its name says so.

        >>> from fedloom.methods import make
        >>> from fedloom.parts.objectives import SquaredError
        >>> make("fedprox").with_loss(SquaredError()).name
        'fedprox+squared_error'

        Raises:
            ConfigError: if the method has no cross entropy because it is defined by a loss of its own.
        """
        kept = [one for one in self.objective if not one.is_cross_entropy]
        if len(kept) == len(self.objective):
            raise ConfigError(
                f"method {self.name!r} has a loss of its own ({', '.join(map(label, kept))}) instead of the cross "
                "entropy, so loss= cannot replace it; choose another method."
            )
        made = replace(self, objective=(term, *kept))
        return replace(made, name=self.name + made.changes(self))

    def changes(self, base: Method) -> str:
        """The parts in which the method differs from another one, as a suffix of its name.

        Added parts follow a plus, in the order of the slots; parts removed without a replacement follow a minus. A
        cross entropy that another loss replaces is not mentioned.

        >>> from fedloom.methods import make
        >>> from fedloom.parts.server import Adam
        >>> fedavg = make("fedavg")
        >>> fedadam = replace(fedavg, server=Adam())
        >>> fedadam.changes(fedavg), fedavg.changes(fedadam)
        ('+adam', '-adam')
        """
        found = ""
        for slot in SLOTS:
            terms: list[tuple[Part, ...]] = []
            for method in (base, self):
                filled = getattr(method, slot)
                terms.append(filled if isinstance(filled, tuple) else (filled,))
            before, now = [[*map(label, parts)] for parts in terms]
            gone, come = [part for part in before if part not in now], [part for part in now if part not in before]
            if come and any(overrides(part, "loss") for part in terms[1] if label(part) in come):
                gone = [part for part in gone if part != "cross_entropy"]
            if slot in SEVERAL or come == ["none"]:
                found += "".join(f"-{part}" for part in gone)
            found += "".join(f"+{part}" for part in come if part != "none")
        return found + "+pooled" * (self.pooled and not base.pooled) + "-pooled" * (base.pooled and not self.pooled)

    def _check_target(self) -> None:
        """Raise ``ConfigError`` if clients have no models that the server could evaluate on inputs of its own."""
        mine = f"{self.who_needs('target')} evaluates the clients' models on unlabelled inputs"
        if not self.predicts:
            raise ConfigError(f"{mine}, but method {self.name!r} trains no predictor.")
        if self.drift.update_kind == "other":
            raise ConfigError(
                f"{mine}, but clients with drift {label(self.drift)!r} upload something else; choose one whose updates "
                "lead to their models, like scaffold or dynamic."
            )

    def _check(self, uplink: Uplink) -> None:
        """Raise ``ConfigError`` if an uplink cannot cover a slice of the method."""
        mine = f"uplink {label(uplink)!r}"
        if self.pooled:
            raise ConfigError(f"method {self.name!r} trains on pooled data, so nothing passes {mine}.")
        for slot in uplink.covered:
            if slot not in self.slots:
                raise ConfigError(f"{mine}: nothing called {slot!r} is uploaded; {nearest(slot, self.slots)}")
        missing = [slot for slot in self.boundable if slot not in uplink.covered]
        if "noise" in uplink.guarantees and uplink.covered and missing:
            raise ConfigError(f"{mine} has no bound for {missing[0]!r}; give one in bounds.")
        for place, part in self.parts.items():
            if isinstance(part, Uplink):
                continue
            other = f"{place} {label(part)!r}"
            single = part.needs.updates or part.needs.losses or Reduce.ALL in part.uploads.values()
            if "sums" in uplink.guarantees and single:
                raise ConfigError(f"{other} needs every client's own upload, but {mine} shows the server only sums.")
            if "noise" in uplink.guarantees:
                unbounded = [n for n in part.uploads if n != UPDATE and f"{place}/{n}" not in self.boundable]
                counts = isinstance(part, Mixing) and part.needs.label_counts
                if unbounded or part.needs.losses or counts:
                    what = f"{unbounded[0]!r}" if unbounded else f"the client's {'classes' if counts else 'loss'}"
                    raise ConfigError(f"{other} sends {what}, which has no bound that {mine} could protect.")
        if "sums" not in uplink.guarantees:
            return
        if not all(later.guarantees == {"sums"} for later in self.uplink[self.uplink.index(uplink) + 1 :]):
            raise ConfigError(f"{mine} must be the last uplink, since a later one could undo what it guarantees.")
        unequal = [] if self.mixing.is_uniform else [f"mixing {label(self.mixing)!r}"]
        if unequal := unequal + [f"weighting {label(part)!r}" for part in self.weighting]:
            raise ConfigError(
                f"{unequal[0]} does not give all clients of a cohort equal weight, as {mine} requires; choose "
                "method.mixing=uniform, without method.weighting."
            )

    def _check_topology(self) -> None:
        """Raise a ``ConfigError`` if a part is defined for one model only."""
        topology, mixing = self.topology, f"mixing {label(self.mixing)!r}"
        mine = f"topology {label(topology)!r}"
        if self.pooled:
            raise ConfigError(f"method {self.name!r} trains on pooled data, so nobody hears anybody in {mine}.")
        if self.personal.levels:
            raise ConfigError(
                f"personal {label(self.personal)!r} gives clients networks of different size, which {mine} cannot mix "
                "with each other."
            )
        if self.mixing.trusted or _counts_clients(self.mixing):
            raise ConfigError(
                f"{mixing} chooses among all clients, but with {mine} each model has receivers of its own; choose one "
                "that looks at the cohort alone, like by_samples, term or q_ffl."
            )
        noisy = [label(uplink) for uplink in self.uplink if "noise" in uplink.guarantees]
        if noisy:
            raise ConfigError(
                f"uplink {noisy[0]!r} has noise for one sum over all clients, but with {mine} there are several in a "
                "round; leave one of them out."
            )
        if topology.home == "clients" and self.uplink:
            raise ConfigError(
                f"uplink {label(self.uplink[0])!r} changes what clients send to a server, but in {mine} they send "
                "whole models to each other; leave it out."
            )
        tracking = next((place for place, part in self.parts.items() if part.mixed and not topology.keeps_mean), None)
        if tracking:
            raise ConfigError(
                f"{tracking} {label(self.parts[tracking])!r} relies on means over models that mixing them keeps, but "
                f"with {mine} columns of the matrix do not sum to 1; choose an undirected graph."
            )
        if topology.chooses and (self.hooks["init_client"] or self.keeps_own):
            place, part = next(iter(self.hooks["init_client"]), ("personal", self.personal))
            raise ConfigError(
                f"{place} {label(part)!r} keeps something of its model at every client, who with {mine} may choose "
                "another one in the next round; leave one of them out."
            )

    def _check_scalars(self) -> None:
        """Raise a ``ConfigError`` if the scalars with which a paired part starts are no numbers in [0, 1]."""
        personal, who = self.personal, f"personal {label(self.personal)!r}"
        extras = self.extras.tolist()
        if not all(map(_in_unit_interval, extras)):
            raise ConfigError(f"{who}: private_start adds {extras} to v, but these must be numbers in [0, 1].")
        for values in {tuple(extras), (0.0,) * len(extras), (1.0,) * len(extras)}:  # training may move them anywhere
            own = {"private": torch.tensor((0.0, *values)), "buffers": torch.zeros(0)}
            uses: Any = personal.uses(0, lambda own=own: own, 0)
            if not (isinstance(uses, tuple) and uses and all(isinstance(use, Use) for use in uses)):
                raise ConfigError(
                    f"{who}: uses returned {uses!r:.60}, but it must be a tuple of Use(...), like (Use(lam=1.0),)."
                )
            for at in (use.lam for use in uses if not _in_unit_interval(use.lam)):
                told = f"{at!r:.60}" + f" for the scalars {list(values)}" * bool(values)
                raise ConfigError(f"{who}: uses returned λ = {told}, but it must be a number in [0, 1].")

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """The slices that leave a client, other than batch statistics: ``update``, and ``<place>/<name>`` of parts."""
        parts = {place: part for place, part in self.parts.items() if not isinstance(part, Uplink)}
        return UPDATE, *(f"{place}/{n}" for place, part in parts.items() for n in part.uploads if n != UPDATE)

    @cached_property
    def boundable(self) -> tuple[str, ...]:
        """Those that may be clipped to a norm bound: neither functions of the update nor slices that have no bound."""
        declared = ((place, part.boundable, part.measured) for place, part in self.parts.items())
        names = {UPDATE, *(f"{place}/{n}" for place, bounded, again in declared for n in bounded if n not in again)}
        return tuple(slot for slot in self.slots if slot in names)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All parts by place: ``objective.0``, ``objective.1``, ..., then the other slots, ``uplink.0``, ..."""
        found: dict[str, Part] = {}
        for slot in SLOTS:
            filled = getattr(self, slot)
            found |= {f"{slot}.{i}": part for i, part in enumerate(filled)} if slot in SEVERAL else {slot: filled}
        return found

    @cached_property
    def hooks(self) -> dict[str, list[tuple[str, Any]]]:
        """For each hook, the parts that override it, with their places."""
        found: dict[str, list[tuple[str, Any]]] = {hook: [] for hook in HOOKS}
        for place, part in self.parts.items():
            for hook in overridden(type(part)) & found.keys():
                found[hook].append((place, part))
        return found

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
        own = torch.zeros(1 + len(self.extras), dtype=torch.float64)
        return not torch.equal(self._private_start(own)[0], self._private_start(own + 1)[0])

    @cached_property
    def keeps_private(self) -> bool:
        """Whether clients keep private values: to go on from them, or to deploy v."""
        return self.continues or self.is_paired

    @cached_property
    def draws_models(self) -> bool:
        """Whether private values start from other random initialisations of the model."""
        return self._private_start(None)[1]

    def _private_start(self, own: Tensor | None) -> tuple[Tensor, bool]:
        """The private values with which a model of one parameter starts, and whether another one was drawn."""
        one, drawn = torch.zeros(1, dtype=torch.float64), list[int]()

        def another() -> Tensor:
            drawn.append(1)
            return one

        begun: Any = self.personal.private_start(one, one, own, another)
        if not (isinstance(begun, Tensor) and begun.ndim == 1):
            who = f"personal {label(self.personal)!r}"
            raise ConfigError(f"{who}: private_start returned {in_words(begun)} instead of a vector of private values.")
        return begun, bool(drawn)

    @cached_property
    def choices(self) -> tuple[Use, ...]:
        """The models among which a client with enough samples chooses the one it uses; () if there is no choice."""
        private = {"private": torch.cat([torch.zeros(1), self.extras]), "buffers": torch.zeros(0)}
        own = self.personal.init_client(torch.zeros(1)) | private
        uses = self.personal.uses(0, lambda: own, sys.maxsize)
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
        terms = [term for term in self.objective if type(term).test_loss is not Term.test_loss]
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
        found = [term for term in losses if term.learns or type(term).test_loss is not Term.test_loss]
        return tuple(found or losses[:1])

    @cached_property
    def predicts(self) -> bool:
        """Whether some term uses the model's output on the mini-batch, which makes the model a predictor."""
        return any("generator" not in part.needs for _, part in self.hooks["loss"])

    def needs(self, what: str) -> bool:
        """Whether any part declares the given field of ``Needs``, or sets one to this word."""
        return what in self._needed

    @cached_property
    def _needed(self) -> frozenset[str]:
        return frozenset().union(*(part.needs.words for part in self.parts.values()))

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
        named = ((place.partition(".")[0], p) for place, p in self.parts.items() if what in p.needs)
        return " and ".join(f"{slot} {label(part)!r}" for slot, part in named)

    def citations(self) -> Iterator[str]:
        """BibTeX entries of the method and its parts, without repetitions."""
        seen: dict[str, None] = {}
        for entry in (self.citation, *(part.citation for part in self.parts.values())):
            if entry:
                seen.setdefault(bibtex(entry))
        yield from seen


def _check_declarations(who: str, part: Part) -> None:
    """Raise a ``ConfigError`` about ``who`` if a part's declarations do not have the types that ``Part`` states."""
    if not isinstance(part.needs, Needs):
        raise ConfigError(f"{who}: needs is {part.needs!r:.60}, but it must be Needs(...), like Needs(twin=True).")
    for name in ("downloads", "boundable", "mixed"):
        names = getattr(part, name)
        if not (isinstance(names, tuple | list) and all(isinstance(one, str) for one in names)):
            told = f"{names!r:.60}"
            raise ConfigError(f"{who}: {name} is {told}, but it must be a tuple of names, like ('momentum',).")
    if part.common and Reduce.MIX in part.uploads.values():
        raise ConfigError(
            f"{who} is common to several models, between which coefficients p do not compare; reduce its uploads by "
            "another rule than MIX, like Reduce.MEAN."
        )
    for name, fits, example in (("uploads", _is_reduction, "Reduce.MEAN"), ("measured", callable, "torch.norm")):
        held = getattr(part, name)
        if not isinstance(held, Mapping):
            raise ConfigError(f"{who}: {name} is {held!r:.60}, but it must be a dict, like {{'control': {example}}}.")
        for key, value in held.items():
            if not (isinstance(key, str) and fits(value)):
                raise ConfigError(
                    f"{who}: {name} has {value!r:.60} for {key!r:.60}, but it must map names, like "
                    f"{{'control': {example}}}."
                )
    if overrides(part, "lessons") and part.needs.model != "inputs":
        raise ConfigError(
            f"{who} takes steps on other inputs than the client's samples; declare needs = Needs(model='inputs')."
        )
    _check_names(who, part)


def _works_on_shared(part: Part) -> bool:
    """Whether a part works on shared parameters, or on updates of them."""
    if isinstance(part, Drift | Uplink) and not part.is_identity:
        return True
    acts = any(overrides(part, hook) for hook in ("grad", "prox", "combine", "step", "refine"))
    return acts or part.needs.updates or part.needs.received


def _is_signed(term: Term) -> bool:
    """Whether a loss is negative where the right classes are certain; by trial."""
    y = torch.arange(3)
    try:
        value = term.loss(Output(100 * torch.eye(3)), Batch(torch.eye(3), y), NO_ROUND)
    except Exception:  # it needs more than outputs and classes
        return False
    return bool((value < 0).any())


def _counts_clients(mixing: Mixing) -> bool:
    """Whether a policy has an entry for each of the K clients, by their numbers; by trial."""
    try:
        mixing.coefficients({}, RoundInfo.of_cohort([8, 9], [1, 1], 2, [1.0, 1.0]))
    except IndexError:
        return True
    except Exception:  # it needs more than losses
        return False
    return False


def _is_reduction(value: object) -> bool:
    return isinstance(value, Reduce)


def _check_names(who: str, part: Part) -> None:
    """Name methods of a part that are almost hooks: an error if it overrides no hook at all, else a warning."""
    kinds = type(part).__mro__
    bases = [kind for kind in kinds if kind.__module__ == Part.__module__]
    known = {name for kind in bases for name in vars(kind) if not name.startswith("_")}
    own = {name: held for kind in kinds if kind not in (*bases, object) for name, held in vars(kind).items()}
    missing, works = known - own.keys(), bool(known & own.keys())
    for name, held in own.items():
        if name in known or name.startswith("_") or not callable(held):
            continue
        if not (close := closest(name, missing, alike=0.75 if works else 0.6)):
            continue
        if not works:
            raise ConfigError(f"{who} does nothing: it has no hook {name!r}; did you mean {close!r}?")
        helper = f"if it is a method of your own, call it {'_' + name!r}"
        warnings.warn(
            f"{who}: {name!r} is not a hook; did you mean {close!r}? Otherwise, {helper}.", stacklevel=outside()
        )


def _in_unit_interval(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1

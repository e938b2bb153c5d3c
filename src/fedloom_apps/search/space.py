"""The search space: named methods, in which one slot's part may be replaced, with their numerical settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fedloom.base import ranges
from fedloom.base.checks import one_of
from fedloom.base.ranges import Count, Fraction, NonNegativeInt, Positive, check_ranges
from fedloom.base.registry import Registry
from fedloom.core.hooks import overrides
from fedloom.core.method import Method
from fedloom.core.parts import Part
from fedloom.core.slots import SLOTS, label

if TYPE_CHECKING:
    from optuna import Trial

SEARCH_SLOTS = ("objective", "drift", "personal", "adaptation", "mixing", "server")


@dataclass(frozen=True)
class SearchSettings:
    """How a search spends its budget, and by which metric it compares candidates.

    Args:
        budget: what all candidates of the search may use together, in ``unit``, not including the final comparison on
            held-out seeds.
        unit: unit of the budget: communication ``rounds``, ``bytes`` communicated, or ``minutes`` of training. With
            minutes, a repeated search may try other candidates.
        goal: the metric to optimise, measured on validation samples: ``clients/accuracy/mean``,
            ``clients/accuracy/worst10``, ``global/accuracy``, ….
        equal: what is equal for all candidates: they run for the same ``rounds``, or end early once they have
            communicated the ``bytes`` that FedAvg communicates in so many rounds.
        sampler: how candidates are proposed: ``tpe`` (tree-structured Parzen estimator) or ``random``.
        methods: the named methods to start from; empty: all that fit the data and conditions.
        slots: the slots whose part may be replaced in a named method; empty: only named methods are tried.
        also: further keys to search, of numbers around the configuration's value.
        rungs: number of times that a candidate is compared with the others before its last round.
        eta: the best 1/η of the candidates continue after each of these comparisons.
        validation: fraction of each client's training samples on which candidates are compared.
        finalists: number of candidates in the final comparison, in addition to FedAvg.
        seeds: number of held-out seeds of the final comparison.
    """

    budget: Positive = 1000.0
    unit: Literal["rounds", "bytes", "minutes"] = "rounds"
    goal: str = "clients/accuracy/mean"
    equal: Literal["rounds", "bytes"] = "rounds"
    sampler: Literal["tpe", "random"] = "tpe"
    methods: tuple[str, ...] = ()
    slots: tuple[str, ...] = SEARCH_SLOTS
    also: tuple[str, ...] = ("local.lr",)
    rungs: NonNegativeInt = 2
    eta: Annotated[int, ranges.Range(2)] = 3
    validation: Fraction = 0.2
    finalists: Count = 3
    seeds: Annotated[int, ranges.Range(2)] = 3

    def __post_init__(self) -> None:
        check_ranges(self, "search.")
        for slot in self.slots:
            one_of("search.slots has", slot, SEARCH_SLOTS)

    def milestones(self, rounds: int) -> list[int]:
        """The rounds after which a candidate is compared with the others, ascending, without the last one.

        >>> SearchSettings(rungs=2, eta=3).milestones(54), SearchSettings(rungs=2, eta=3).milestones(2)
        ([6, 18], [1])
        """
        first = max(rounds // self.eta**self.rungs, 1)
        return [first * self.eta**k for k in range(self.rungs) if first * self.eta**k < rounds]


Candidate = dict[str, Any]
"""Overrides of the configuration of ``fedloom run`` by dotted key: ``method``, ``method.alpha``, ``local.lr``, …."""


NO_REPLACEMENT = "own"  # the choice of a slot: nothing is replaced


@dataclass(frozen=True)
class Range:
    """The range of a positive number x around a central value c, logarithmic.

    It reaches from c/10 to 10c, but not beyond 1 if c is below 1, like a probability or a decay. If c lies between 1/2
    and 1, like a momentum, 1 - x is searched instead, from (1 - c)/10 to 10(1 - c).

    >>> Range(0.03).limits, Range(0.99).value(0.1)
    ((0.003, 0.3), 0.9)
    """

    centre: float

    @property
    def is_complement(self) -> bool:
        """Whether 1 - x is searched instead of x."""
        return 0.5 <= self.centre < 1

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and largest x, or 1 - x."""
        c = 1 - self.centre if self.is_complement else self.centre
        high = min(10 * c, 1.0) if self.centre < 1 else 10 * c
        return round(c / 10, 12), round(high, 12)

    def value(self, number: float) -> float:
        """x, with four significant digits, for a number drawn from ``limits``."""
        return float(f"{1 - number if self.is_complement else number:.4g}")

    def inverse(self, value: float) -> float:
        """The number to draw for x, the inverse of ``value``, within the range."""
        low, high = self.limits
        return min(max(1 - value if self.is_complement else value, low), high)


def search_ranges(parameters: Mapping[str, Parameter]) -> dict[str, Range]:
    """The settings that are searched: real numbers with a positive default.

    Whole numbers, switches and choices keep their defaults: they tend to change what a round costs, or what is run.
    """
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return {name: Range(x) for name, x in defaults.items() if isinstance(x, float) and 0 < x < float("inf")}


@dataclass(frozen=True)
class Space:
    """The set of all candidates.

    Args:
        registry: the named methods.
        names: names of the methods to start from.
        slots: the slots whose part may be replaced.
        also: further keys of the configuration, with their ranges.
    """

    registry: Registry[Method]
    names: tuple[str, ...]
    slots: tuple[str, ...]
    also: Mapping[str, Range]

    def start(self, name: str, also: Mapping[str, float]) -> dict[str, Any]:
        """The parameters of the Optuna trial that proposes a named method with its own settings."""
        spans = search_ranges(self.registry[name].parameters)
        settings = {f"{name}.{key}": span.inverse(span.centre) for key, span in spans.items()}
        further = {key: self.also[key].inverse(x) for key, x in also.items()}
        return {"method": name, "slot": NO_REPLACEMENT, **settings, **further}

    def suggest(self, trial: Trial) -> Candidate:
        """A candidate that an Optuna trial proposes: a named method, at most one other part, and all settings."""
        name = trial.suggest_categorical("method", self.names)
        suggestion: Candidate = {"method": name}
        slot = trial.suggest_categorical("slot", (NO_REPLACEMENT, *self.slots))
        method = self.registry.make(name)
        for key, span in search_ranges(self.registry[name].parameters).items():
            suggestion[f"method.{key}"] = self._draw(trial, f"{name}.{key}", span)
        if slot != NO_REPLACEMENT:
            parts = self.parts(slot)
            part = trial.suggest_categorical(f"{slot} part", tuple(parts))
            suggestion |= replacement(method, slot, parts[part])
            prefix = f"method.{slot}.{part}." if slot == "objective" else f"method.{slot}."
            for key, span in search_ranges(SLOTS[slot][part].parameters).items():
                suggestion[prefix + key] = self._draw(trial, f"{slot}.{part}.{key}", span)
        for key, span in self.also.items():
            suggestion[key] = self._draw(trial, key, span)
        return effective_candidate(self.registry, suggestion)

    def parts(self, slot: str) -> dict[str, Part]:
        """The parts that named methods have in a slot, by name, including the identity."""
        defaults = [getattr(self.registry.make(name), slot) for name in self.names]
        all_parts = [part for parts in defaults for part in (parts if isinstance(parts, tuple) else (parts,))]
        return {label(part): part for part in all_parts}

    @staticmethod
    def _draw(trial: Trial, name: str, span: Range) -> float:
        return span.value(trial.suggest_float(name, *span.limits, log=True))


def replacement(method: Method, slot: str, part: Part) -> Candidate:
    """The overrides that put a part into a slot of a method.

    A term of the objective with a loss on the data takes the place of the method's own; any other is added.
    """
    name = label(part)
    if slot != "objective":
        return {f"method.{slot}": name}
    terms = [label(term) for term in method.objective if not (overrides(part, "loss") and overrides(term, "loss"))]
    return {"method.objective": [*(term for term in terms if term != name), name]}


def effective_candidate(registry: Registry[Method], candidate: Candidate) -> Candidate:
    """The candidate without settings of its named method that concern only parts that it replaces.

    >>> from fedloom.methods import methods
    >>> effective_candidate(methods, {"method": "feddyn", "method.alpha": 0.03, "method.drift": "scaffold"})
    {'method': 'feddyn', 'method.drift': 'scaffold'}
    """
    name, superfluous = candidate["method"], set()
    default_parts = registry.make(name).parts
    for key in registry[name].parameters:
        if (key_of_method := f"method.{key}") in candidate:
            parts = registry.make(name, **{key: candidate[key_of_method]}).parts
            places = [place for place, part in parts.items() if part != default_parts.get(place)]
            if places and all(_replaces(candidate, place.partition(".")[0], parts[place]) for place in places):
                superfluous.add(key_of_method)
    return {key: value for key, value in candidate.items() if key not in superfluous}


def _replaces(candidate: Candidate, slot: str, part: Part) -> bool:
    """Whether a candidate replaces a part of its named method, or has settings of its own for it."""
    key, name = f"method.{slot}", label(part)
    if key not in candidate:
        return False
    prefix = f"{key}.{name}." if slot == "objective" else f"{key}."
    is_same = name in candidate[key] if slot == "objective" else name == candidate[key]
    return not is_same or any(other.startswith(prefix) for other in candidate)


def without_part(candidate: Candidate, slot: str) -> Candidate:
    """The candidate with a slot as FedAvg has it."""
    key = f"method.{slot}"
    rest = {name: value for name, value in candidate.items() if name != key and not name.startswith(f"{key}.")}
    fedavg_parts = {"objective": ["cross_entropy"], "mixing": "by_samples"}
    return {**rest, key: fedavg_parts.get(slot, "none")}

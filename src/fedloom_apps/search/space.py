"""The search space: named methods, in which one slot's part may be replaced, with their numerical settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fedloom.base import ranges
from fedloom.base.checks import one_of
from fedloom.base.ranges import Count, Fraction, NonNegativeInt, Positive, within
from fedloom.base.registry import Registry
from fedloom.core.hooks import overrides
from fedloom.core.method import Method
from fedloom.core.parts import Part
from fedloom.core.slots import SLOTS, label

if TYPE_CHECKING:
    from optuna import Trial

SEARCHED = ("objective", "drift", "personal", "adaptation", "mixing", "server")


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
    slots: tuple[str, ...] = SEARCHED
    also: tuple[str, ...] = ("local.lr",)
    rungs: NonNegativeInt = 2
    eta: Annotated[int, ranges.Range(2)] = 3
    validation: Fraction = 0.2
    finalists: Count = 3
    seeds: Annotated[int, ranges.Range(2)] = 3

    def __post_init__(self) -> None:
        within(self, "search.")
        for slot in self.slots:
            one_of("search.slots has", slot, SEARCHED)

    def milestones(self, rounds: int) -> list[int]:
        """The rounds after which a candidate is compared with the others, ascending, without the last one.

        >>> SearchSettings(rungs=2, eta=3).milestones(54), SearchSettings(rungs=2, eta=3).milestones(2)
        ([6, 18], [1])
        """
        first = max(rounds // self.eta**self.rungs, 1)
        return [first * self.eta**k for k in range(self.rungs) if first * self.eta**k < rounds]


Candidate = dict[str, Any]
"""Overrides of the configuration of ``fedloom run`` by dotted key: ``method``, ``method.alpha``, ``local.lr``, …."""


OWN = "own"  # the choice of a slot: nothing is replaced


@dataclass(frozen=True)
class Range:
    """The range of a positive number x around a central value c, logarithmic.

    From c/10 to 10c; of a number below 1, like a probability or a decay, not beyond 1; and of one from 1/2 to 1, like a
    momentum, 1 - x is searched from (1 - c)/10 to 10(1 - c).

    >>> Range(0.03).limits, Range(0.99).value(0.1)
    ((0.003, 0.3), 0.9)
    """

    centre: float

    @property
    def turned(self) -> bool:
        """Whether 1 - x is searched instead of x."""
        return 0.5 <= self.centre < 1

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and largest x, or 1 - x."""
        c = 1 - self.centre if self.turned else self.centre
        high = min(10 * c, 1.0) if self.centre < 1 else 10 * c
        return round(c / 10, 12), round(high, 12)

    def value(self, drawn: float) -> float:
        """x, with four significant digits, for a drawn number."""
        return float(f"{1 - drawn if self.turned else drawn:.4g}")

    def drawn(self, value: float) -> float:
        """The number to draw for x, the inverse of ``value``, within the range."""
        low, high = self.limits
        return min(max(1 - value if self.turned else value, low), high)


def searched(parameters: Mapping[str, Parameter]) -> dict[str, Range]:
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
        spans = searched(self.registry[name].parameters)
        own = {f"{name}.{key}": span.drawn(span.centre) for key, span in spans.items()}
        return {"method": name, "slot": OWN, **own, **{key: self.also[key].drawn(x) for key, x in also.items()}}

    def suggest(self, trial: Trial) -> Candidate:
        """A candidate that an Optuna trial proposes: a named method, at most one other part, and all settings."""
        name = trial.suggest_categorical("method", self.names)
        suggestion: Candidate = {"method": name}
        slot = trial.suggest_categorical("slot", (OWN, *self.slots))
        method = self.registry.make(name)
        for key, span in searched(self.registry[name].parameters).items():
            suggestion[f"method.{key}"] = self._draw(trial, f"{name}.{key}", span)
        if slot != OWN:
            parts = self.parts(slot)
            part = trial.suggest_categorical(f"{slot} part", tuple(parts))
            suggestion |= replacement(method, slot, parts[part])
            prefix = f"method.{slot}.{part}." if slot == "objective" else f"method.{slot}."
            for key, span in searched(SLOTS[slot][part].parameters).items():
                suggestion[prefix + key] = self._draw(trial, f"{slot}.{part}.{key}", span)
        for key, span in self.also.items():
            suggestion[key] = self._draw(trial, key, span)
        return effective(self.registry, suggestion)

    def parts(self, slot: str) -> dict[str, Part]:
        """The parts that named methods have in a slot, by name, including the identity."""
        defaults = [getattr(self.registry.make(name), slot) for name in self.names]
        each = [part for parts in defaults for part in (parts if isinstance(parts, tuple) else (parts,))]
        return {label(part): part for part in each}

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
    kept = [label(term) for term in method.objective if not (overrides(part, "loss") and overrides(term, "loss"))]
    return {"method.objective": [*(term for term in kept if term != name), name]}


def effective(registry: Registry[Method], candidate: Candidate) -> Candidate:
    """The candidate without settings of its named method that concern only parts that it replaces.

    >>> from fedloom.methods import methods
    >>> effective(methods, {"method": "feddyn", "method.alpha": 0.03, "method.drift": "scaffold"})
    {'method': 'feddyn', 'method.drift': 'scaffold'}
    """
    name, lost = candidate["method"], set()
    usual = registry.make(name).parts
    for key in registry[name].parameters:
        if (key_of_method := f"method.{key}") in candidate:
            parts = registry.make(name, **{key: candidate[key_of_method]}).parts
            changed = [place for place, part in parts.items() if part != usual.get(place)]
            if changed and all(_replaces(candidate, place.partition(".")[0], parts[place]) for place in changed):
                lost.add(key_of_method)
    return {key: value for key, value in candidate.items() if key not in lost}


def _replaces(candidate: Candidate, slot: str, part: Part) -> bool:
    """Whether a candidate replaces a part of its named method, or has settings of its own for it."""
    key, name = f"method.{slot}", label(part)
    if key not in candidate:
        return False
    own = f"{key}.{name}." if slot == "objective" else f"{key}."
    kept = name in candidate[key] if slot == "objective" else name == candidate[key]
    return not kept or any(other.startswith(own) for other in candidate)


def without(candidate: Candidate, slot: str) -> Candidate:
    """The candidate with a slot as FedAvg has it."""
    key = f"method.{slot}"
    kept = {name: value for name, value in candidate.items() if name != key and not name.startswith(f"{key}.")}
    plain = {"objective": ["cross_entropy"], "mixing": "by_samples"}
    return {**kept, key: plain.get(slot, "none")}

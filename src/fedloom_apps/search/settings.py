"""The settings of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fedloom.core.checks import one_of
from fedloom.core.ranges import Count, Fraction, NonNegativeInt, Positive, Range, within

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
    eta: Annotated[int, Range(2)] = 3
    validation: Fraction = 0.2
    finalists: Count = 3
    seeds: Annotated[int, Range(2)] = 3

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

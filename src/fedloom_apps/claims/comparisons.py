"""Published comparisons of two runs, and how the claims of a file state them: by figures, and by what is compared.

What stands in a claim that holds further ``claims`` stands for each of them. ``figures`` are the published ones by run;
where runs have cases by case and run, or by a run's whole name. A figure is a number, a bound like ``1000+``, or null.
``compare`` names the run that is compared with every other one that has a figure; or several such runs, which are not
compared with each other; or, by run, those that it is compared with. Of two runs the one with the better figure is said
to be better, or the one that ``compare`` names where a figure is null; of equal figures nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import isnan
from typing import Annotated, Any, Literal

from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError, nearest
from fedloom.base.ranges import Positive, Range, elements
from fedloom.base.settings import check_fields
from fedloom.experiment.console import in_percent
from fedloom.metrics import direction, rounds_to_target
from fedloom_apps.claims.rule import AtLeast, Claim

ENTRIES = 200
FIGURE = re.compile(r"-?\d{1,9}(\.\d{1,18})?(e-\d\d)?\+?", re.ASCII)
ON_TEST = "as_published/"
"""Metrics of what clients have with the λ that is best on their test samples."""


@dataclass(frozen=True)
class Figure:
    """What is measured in a run: a metric's last or best value, or what it takes until the metric reaches a target.

    Attributes:
        figure: ``last``, ``best``, ``rounds`` until the target, or ``transmissions``, in rounds of FedAvg.
        metric: of the records, like ``average/accuracy``.
        target: the value to reach, for the last two.
    """

    figure: Literal["last", "best", "rounds", "transmissions"] = "last"
    metric: str = "global/accuracy"
    target: float | None = None

    def __call__(self, run: Mapping[str, Any], _: Mapping[str, Any]) -> float:
        """The figure of a run as ``of_run`` stores it; a bound if it ended before its target.

        >>> run = {"rounds": 3, "cost": 2, "curves": {"global/accuracy": [0.5, None, 0.7]}}
        >>> Figure("best")(run, {}), Figure("transmissions", target=0.6)(run, {})
        (0.7, 6)
        >>> Figure("rounds", target=0.9)(run, {}).__class__.__name__
        'AtLeast'
        """
        curve = run["curves"][self.metric]
        evaluated = [value for value in curve if value is not None]
        there = [value for value in evaluated if not isnan(value)]
        if self.target is None:
            best = max if direction(self.metric) == "max" else min
            return (best(there) if self.figure == "best" else evaluated[-1]) if there else float("nan")
        cost = run["cost"] if self.figure == "transmissions" else 1
        values = [float("nan") if value is None else value for value in curve]
        at = rounds_to_target(values, range(1, len(values) + 1), self.target, direction(self.metric)) if there else None
        return AtLeast(run["rounds"] * cost) if at is None else at * cost


@dataclass(frozen=True, kw_only=True)
class Published(Figure):
    """One published comparison of two runs; ``claim`` is what the rule judges.

    Attributes:
        table: where it is published.
        says: the sentence; ``{}`` stands for the two runs, ``{case}`` for their case, ``{target}`` for the target in %.
        ours: the run that is said to be better.
        other: the run that it is compared with.
        published: both figures, as ``90 : 208``; ``-`` if one is not.
        unit: factor on the figures, like 100 for percent.
        digits: of the figures.
        seeds: fewer cannot decide.
        importance: relative to other claims.
        differs: how this comparison differs from the publication, beyond the runs.
    """

    table: str
    says: str
    ours: str = ""
    other: str = ""
    published: str = "-"
    unit: Positive = 1.0
    digits: Annotated[int, Range(0, 6)] = 1
    seeds: Annotated[int, Range(2, 1000)] = 3
    importance: Annotated[float, Range(0, 100)] = 1.0
    differs: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.target is None) != (self.figure in ("last", "best")):
            raise ConfigError("rounds and transmissions need a target, and other figures none.")
        if self.target is not None and in_percent(self.metric) and self.target > 1:
            raise ConfigError(f"a target of {self.metric} is a fraction, not {self.target:g}.")

    @property
    def lower(self) -> bool:
        """Whether the smaller figure is the better one."""
        return self.target is not None or direction(self.metric) == "min"

    def of(self, run: str, other: str, case: str, figures: Mapping[str, Any]) -> Published | None:
        """What the figures of two runs in a case say; None if they are equal or one is lacking."""
        if run == other or not {run, other} <= figures.keys():
            return None
        pair, published, says = [figures[run], figures[other]], "-", self.says.replace("{case}", case, 1)
        if None not in pair:
            value, other_value = (float(str(figure).rstrip("+")) for figure in pair)
            if self.target is None and in_percent(self.metric) and max(value, other_value) > self.unit == 1:
                raise ConfigError(f"figures of {self.metric} above 1 are in percent, and need unit: 100.")
            if value == other_value:
                return None
            if (value < other_value) != self.lower:
                run, other, pair = other, run, pair[::-1]
            published = " : ".join(text if isinstance(text, str) else f"{text:.{self.digits}f}" for text in pair)
        if self.target is not None:
            says = says.replace("{target}", f"{100 * self.target:.1f} %", 1)
        return replace(self, says=says, ours=in_case(run, case), other=in_case(other, case), published=published)

    def claim(self, differs: str, scripts: bool = False) -> Claim:
        """The claim that the rule judges, with how its runs differ from the publication."""
        says = self.says.replace("{}", self.ours, 1).replace("{}", self.other, 1)
        return Claim(
            self.table, says, f"runs > {self.ours} > *", f"runs > {self.other} > *", self.published, self, self.unit,
            self.digits, self.lower, "; ".join(filter(None, (differs, self.differs))), scripts, seeds=self.seeds,
            on_test=self.metric.startswith(ON_TEST),
        )  # fmt: skip


KEYS = (*(name for name in Published.__dataclass_fields__ if name not in ("ours", "other", "published")),
        "compare", "figures", "claims")  # fmt: skip


def in_case(run: str, case: str) -> str:
    """The name of a run in a case, ``FedAvg, IID``; without a case its own."""
    return f"{run}, {case}" if case else run


def comparisons(
    claims: Any, runs: Collection[str], names: Collection[str], shared: Mapping[str, Any] = {}
) -> Iterator[Published | None]:
    """Every pair of runs that claims compare, in their order; None for a pair of which nothing is said.

    ``runs`` are the names of a file's runs, ``names`` those in its cases; ``shared`` stands for all of the claims.

    Raises:
        ConfigError: if they are not what claims must be; the sentence begins with the entry.
    """
    if not isinstance(claims, list) or not 0 < len(claims) <= ENTRIES:
        raise ConfigError(f"claims must be a list of 1 to {ENTRIES} entries.")
    for number, entry in enumerate(claims):
        try:
            if not isinstance(entry, Mapping):
                raise ConfigError("it must be a mapping.")
            for key in entry:
                one_of("unknown key", key, KEYS)
            about = {**shared, **entry}
            if "claims" in about:
                yield from comparisons(about.pop("claims"), runs, names, about)
            else:
                yield from _compared(about, runs, names)
        except ConfigError as error:
            raise ConfigError(f"claims[{number}]: {error}") from error


def _compared(about: dict[str, Any], runs: Collection[str], names: Collection[str]) -> list[Published | None]:
    """The pairs of a claim that holds no further ones."""
    if lacking := {"table", "says", "compare", "figures"} - about.keys():
        raise ConfigError(f"it lacks {', '.join(sorted(lacking))}.")
    figures, compare = _figures(about.pop("figures"), names), about.pop("compare")
    pairings = compare if isinstance(compare, Mapping) else {run: [] for run in map(str, elements(compare))}
    rivals = {run: [*map(str, elements(run_rivals))] for run, run_rivals in pairings.items()}
    if len(compared_names := [*rivals, *chain(*rivals.values())]) > ENTRIES:
        raise ConfigError(f"it compares more than {ENTRIES} runs.")
    for name in compared_names:
        if name not in runs and name not in names:
            raise ConfigError(f"it compares {name!r}; {nearest(str(name), runs)}")
    claim = Published(**about)
    pairs = [
        claim.of(run, other, case, row)
        for case, row in figures.items()
        for run, run_rivals in rivals.items()
        for other in run_rivals or [name for name in row if name not in rivals]
    ]
    if not any(pairs):
        raise ConfigError("no two runs that it compares have different figures.")
    return pairs


def _figures(content: Any, names: Collection[str]) -> dict[str, Mapping[str, Any]]:
    """Published figures by case and run; the case is empty where they are by a run's whole name."""
    by_case = isinstance(content, Mapping) and all(isinstance(row, Mapping) for row in content.values())
    figures = {str(case): row for case, row in content.items()} if by_case else {"": content}
    if not all(isinstance(row, Mapping) for row in figures.values()) or sum(map(len, figures.values())) > ENTRIES:
        raise ConfigError(f"figures must be a mapping of runs to at most {ENTRIES} figures, or one for each case.")
    for case, row in figures.items():
        for run, figure in row.items():
            if (name := in_case(run, case)) not in names:
                raise ConfigError(f"its figures name {name!r}; {nearest(str(name), names)}")
            if figure is not None and not FIGURE.fullmatch(str(figure)):
                raise ConfigError(f"the figure of {name} must be a number, a bound like 1000+, or null.")
    return figures

"""How results of runs decide a published claim: differences paired by seed, Student's t, and a fixed rule.

A claim says that one method is better than another: a sentence of a paper, or the order of two figures of a table. Its
*gain* in a seed is the margin by which it holds, negative where it does not. The verdict is

- *not run as published* if more than 5 % of a run's updates were excluded, if data, scale or settings differ from the
  published ones, or if a seed has no difference because a run produced no number or both of its runs ended before the
  target;
- *needs more seeds* with fewer than three (five for rounds to a target, which curves near their plateau cross by
  chance), or if the 95 % interval of the mean gain (Student's t, paired by seed) decides nothing; with how many it
  would decide if mean and spread stayed as they are;
- *reproduced* if that interval lies above zero (*with the scripts' settings* where the authors' scripts differ from
  their text and the runs follow the scripts; *with λ chosen on test images* where each client takes the λ that suits
  its test images best, as the authors' code does, which favours methods that have one);
- *only the order reproduced* if the interval lies above zero but below half the published gain, where that is known in
  the same unit;
- *not reproduced* if the interval lies below zero, or contains zero and lies below half the published gain.

Seeds that were added because the first ones did not decide are a further look at the data, and each look could take
chance for a difference: the interval is one of 95 % for all ``looks`` together (Bonferroni).

Where one method is said to be ahead of several, each of them is judged, and the least favourable verdict counts.

A run that did not reach its target counts with what it had spent when it ended, which bounds the gain from one side: a
bound can decide only in its own direction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from math import isnan
from statistics import fmean
from typing import Any

from scipy.special import stdtrit

from fedloom.base.ranges import elements
from fedloom.metrics.curves import LEVEL, paired

MOST = 0.05
"""The share of updates that a run may exclude; beyond it, its figures are not those of the method."""
SEEDS, TARGET_SEEDS = 3, 5
"""Fewer seeds cannot decide; rounds to a target need more."""
HOLDS, OPPOSITE = "holds here", "the opposite holds here"
"""What enough seeds show about a claim that they cannot decide because something differs from the publication."""
Measure = Callable[[Any, Mapping[str, Any]], float]
"""Reads a figure from a stored run; the second argument is the whole content of its file."""


class Verdict(str, Enum):
    """What stored results say about a published claim."""

    __str__ = str.__str__

    REPRODUCED = "reproduced"
    SCRIPTS = "reproduced with the scripts' settings"
    ON_TEST = "reproduced with λ chosen on test images"
    ORDER = "only the order reproduced"
    NOT_REPRODUCED = "not reproduced"
    OTHERWISE = "not run as published"
    SEEDS = "needs more seeds"

    @property
    def open(self) -> bool:
        """Whether it decides nothing."""
        return self in (Verdict.OTHERWISE, Verdict.SEEDS)


LEAST = (Verdict.NOT_REPRODUCED, OPPOSITE, Verdict.OTHERWISE, Verdict.SEEDS, HOLDS, Verdict.ORDER, Verdict.ON_TEST,
         Verdict.SCRIPTS, Verdict.REPRODUCED)  # fmt: skip
"""What is known of a lead over one of several others, from what speaks most against a lead over all of them on."""


class AtLeast(float):
    """A lower bound, from a run that ended before its target: the true figure is at least as large."""


@dataclass(frozen=True)
class Claim:
    """A published claim, and how its evidence is read from a file of results.

    ``ours`` and ``other`` are paths with `` > `` between keys and ``*`` in place of the seed. Of several others
    the one over which the lead is the least certain counts: a method is ahead of all only if the interval over each
    lies above zero (an intersection–union test, which needs no correction for their number). One that has no number
    in some seed counts only if all others have none, too. ``measure`` reads the figure of a run,
    ``cost`` what the run sent or kept. ``lower``: smaller figures are better. ``differs``: what differs from the
    publication. Fewer than ``seeds`` seeds cannot decide; ``looks`` says how often seeds were judged: one more each
    time that some were added for want of a verdict. ``entry`` says which of several others an index is.
    ``on_test``: our figure is the best on test images over the values of a setting, as the authors' code has it.
    """

    table: str
    says: str
    ours: str
    other: str | tuple[str, ...]
    published: str = "-"
    measure: Measure = lambda run, _: run
    unit: float = 1.0
    digits: int = 1
    lower: bool = False
    differs: str = ""
    scripts: bool = False
    cost: tuple[Measure, str] | None = None
    seeds: int = SEEDS
    looks: int = 1
    entry: Callable[[int], str] = "entry {}".format
    on_test: bool = False


@dataclass(frozen=True)
class Evidence:
    """What a file of results says about a claim: the mean figures, the paired gain with its interval, the verdict."""

    ours: str
    other: str
    against: str
    gain: Mapping[str, float]
    left_out: str
    cost: str
    verdict: Verdict
    reason: str
    looks: int

    @property
    def kind(self) -> str:
        """The verdict; of a claim not run as published, whether it or its opposite holds here, if that is known."""
        here = self.reason.rpartition("; ")[2]
        return here if here in (HOLDS, OPPOSITE) else self.verdict


def find(results: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The values at a path, by seed; the seed is "0" if the path has no ``*``.

    >>> find({"runs": {"FedAvg": {"1": {"loss": [2, 1]}}}}, "runs > FedAvg > * > loss > -1")
    {'1': 1}
    """
    values: list[tuple[str, Any]] = [("0", results)]
    for step in path.split(" > "):
        if step == "*":
            values = list(values[0][1].items())
        else:
            values = [(seed, at[int(step)] if isinstance(at, list) else at[step]) for seed, at in values]
    return dict(values)


def dropped(results: Mapping[str, Any], path: str) -> list[float]:
    """The updates excluded in each run on a path: a share where one is stored, else a count."""
    for end in range(len(steps := path.split(" > ")), 0, -1):
        runs = find(results, " > ".join(steps[:end])).values()
        for key in ("left_out", "failures"):
            if all(isinstance(run, Mapping) and key in run for run in runs):
                return [run[key] for run in runs]
    return []


def judge(
    gain: Mapping[str, float],
    *,
    differs: str = "",
    scripts: bool = False,
    on_test: bool = False,
    left_out: float = 0.0,
    at_least: bool = False,
    at_most: bool = False,
    seeds_needed: int = SEEDS,
    published: float = 0.0,
    without: int = 0,
    looks: int = 1,
) -> tuple[Verdict, str]:
    """The verdict by this module's rule, and the reason.

    ``gain`` comes from ``paired``; ``at_least`` and ``at_most`` say that some of its differences are bounds; fewer than
    ``seeds_needed`` seeds cannot decide. ``published`` is the published gain, 0 if unknown; ``without`` is the number
    of seeds without a difference; a ``left_out`` of 1 or more is a count of updates, whose share is unknown. The
    interval allows for all ``looks``.

    >>> judge({"mean": 2.0, "low": 1.6, "high": 2.4, "seeds": 3})
    (<Verdict.REPRODUCED: 'reproduced'>, 'interval above 0')
    >>> judge({"mean": 2.0, "low": float("nan"), "high": float("nan"), "seeds": 1})
    (<Verdict.SEEDS: 'needs more seeds'>, '1 seed; the difference has the claimed sign')
    >>> judge({"mean": 0.5, "low": -0.2, "high": 1.2, "seeds": 5, "se": 0.25})
    (<Verdict.SEEDS: 'needs more seeds'>, 'the interval contains 0; about 10 seeds would decide')
    >>> judge({"mean": 0.1, "low": -0.2, "high": 0.4, "seeds": 5}, published=1.0)
    (<Verdict.NOT_REPRODUCED: 'not reproduced'>, 'the interval contains 0 and lies below half the published gain')
    >>> judge({"mean": 0.2, "low": 0.1, "high": 0.3, "seeds": 5}, published=1.0)
    (<Verdict.ORDER: 'only the order reproduced'>, 'interval above 0, but below half the published gain')
    """
    seeds, interval = int(gain["seeds"]), "interval" if looks == 1 else f"interval for {looks} looks"
    above = seeds >= seeds_needed and gain["low"] > 0 and not at_most
    below = seeds >= seeds_needed and gain["high"] < 0 and not at_least
    small = seeds >= seeds_needed and gain["high"] < published / 2 and not (at_least or at_most)
    none = small and gain["low"] <= 0 <= gain["high"]
    if left_out > MOST:
        lost = f"{left_out:.0%} of the updates" if left_out < 1 else f"{left_out:.0f} updates (share unknown)"
        return Verdict.OTHERWISE, f"{lost} were excluded"
    if without:
        why = "no number, or neither run reached the target"
        return Verdict.OTHERWISE, f"{without} of {seeds + without} seeds cannot be compared ({why})"
    if above and small and not differs:
        return Verdict.ORDER, f"{interval} above 0, but below half the published gain"
    if above and not differs:
        less = published and gain["high"] < published and not at_least
        beside = "; less than published" if less else "; more than published" if gain["low"] > published > 0 else ""
        kind = Verdict.ON_TEST if on_test else Verdict.SCRIPTS if scripts else Verdict.REPRODUCED
        return kind, f"{interval} above 0{beside}"
    if below and not differs:
        return Verdict.NOT_REPRODUCED, f"{interval} below 0"
    if none and not differs:
        return Verdict.NOT_REPRODUCED, f"the {interval} contains 0 and lies below half the published gain"
    if seeds < seeds_needed:
        sign = (
            "has the claimed sign" if gain["mean"] > 0 else "has the opposite sign" if gain["mean"] < 0 else "is zero"
        )
        if (at_least and gain["mean"] <= 0) or (at_most and gain["mean"] >= 0):
            sign = "is only a bound"
        here = f"{seeds} seed{'s' * (seeds != 1)}; the difference {sign}"
    elif above or below:
        here = HOLDS if above else OPPOSITE
    else:
        here = f"the {interval} contains 0" if gain["low"] <= 0 <= gain["high"] else "the gain is only a bound"
    if differs:
        return Verdict.OTHERWISE, f"{differs}; {here}"
    if here == "the gain is only a bound":
        return Verdict.OTHERWISE, f"{here}, since runs ended before the target"
    return Verdict.SEEDS, here + (f"; about {n} seeds would decide" if (n := deciding(gain, published, looks)) else "")


def deciding(gain: Mapping[str, float], published: float = 0.0, looks: int = 1) -> int:
    """The number of seeds with which a further look would decide if mean and spread stayed; 0: unknown, or over 1000.

    It decides where it lies on one side of 0, or below half the published gain.

    >>> deciding({"mean": 1.0, "se": 1.0, "seeds": 4}), deciding({"mean": 0.0, "se": 1.0, "seeds": 4}, published=4.0)
    (24, 9)
    """
    if not gain.get("se", 0.0) > 0:
        return 0
    spread = gain["se"] * gain["seeds"] ** 0.5
    distance = max(abs(gain["mean"]), published / 2 - gain["mean"] if published else 0.0)
    level = 1 - (1 - LEVEL) / (2 * (looks + 1))
    return next((n for n in range(SEEDS, 1001) if stdtrit(n - 1, level) * spread / n**0.5 < distance), 0)


def evidence(claim: Claim, results: Mapping[str, Any], differs: str = "") -> Evidence:
    """A claim's evidence in the content of its file; ``differs``: how all its runs differ from the publication."""
    figures_by_path = {path: figures_by_seed(claim, results, path) for path in elements(claim.other)}
    paths = [path for path, figures in figures_by_path.items() if not any(map(isnan, figures.values()))] or [
        *figures_by_path
    ]
    against = [_against(claim, results, path, differs) for path in paths]
    return min(against, key=lambda item: (LEAST.index(item.kind), item.gain["mean"]))


def _against(claim: Claim, results: Mapping[str, Any], path: str, differs: str) -> Evidence:
    """The evidence for a claim's being true of one of the others."""
    figures, rivals = figures_by_seed(claim, results, claim.ours), figures_by_seed(claim, results, path)
    seeds = [
        s for s in figures if s in rivals and not (isinstance(figures[s], AtLeast) and isinstance(rivals[s], AtLeast))
    ]
    both = [s for s in figures if s in rivals] or [*figures]
    scale = (-1 if claim.lower else 1) * claim.unit
    looks = max(1, min(claim.looks, 1 + len(seeds) - claim.seeds))  # no further look without a further seed
    gain = paired({s: scale * figures[s] for s in seeds}, {s: scale * rivals[s] for s in seeds}, looks)
    late = [any(isinstance(v[s], AtLeast) for s in seeds) for v in (figures, rivals)]
    at_least, at_most = reversed(late) if claim.lower else late
    lost = [*dropped(results, claim.ours), *dropped(results, path)]
    share = max(lost, default=0.0)
    verdict, reason = judge(
        gain, differs=claim.differs or differs, scripts=claim.scripts, on_test=claim.on_test, left_out=share,
        at_least=at_least, at_most=at_most, seeds_needed=claim.seeds, published=published_gain(claim),
        without=len(both) - int(gain["seeds"]), looks=looks,
    )  # fmt: skip
    return Evidence(
        ours=figure({s: figures[s] for s in both}, claim),
        other=figure({s: v for s, v in rivals.items() if s in both} or rivals, claim),
        against=name(path, claim),
        gain=gain,
        left_out="-" if not lost else f"{share:.1%}" if share else f"{sum(lost):.0f}",
        cost=" : ".join(mean_cost(claim.cost[0], results, runs) for runs in (claim.ours, path)) + f" {claim.cost[1]}"
        if claim.cost else "-",
        verdict=verdict,
        reason=reason,
        looks=looks,
    )  # fmt: skip


def published_gain(claim: Claim) -> float:
    """The margin by which the claim holds in the paper, in the unit of ``Evidence.gain``; 0 if not published.

    >>> [published_gain(Claim("", "", "", "", text, lower=True)) for text in ("90 : 208", "221 : 783 to 88.8 %", "-")]
    [118.0, 0.0, 0.0]
    """
    parts = claim.published.partition(" : ")
    try:
        first, second = float(parts[0]), float(parts[2] or 0.0)
    except ValueError:
        return 0.0
    if not parts[1]:
        return first if claim.published.startswith("+") else 0.0
    return second - first if claim.lower else first - second


def mean_error(values: Collection[float], scale: float = 1.0, digits: int = 1) -> str:
    """Mean and standard error of figures of several seeds.

    >>> mean_error([0.5, 0.75, 1.0], 100), mean_error([2.0]), mean_error([])
    ('75.0 ± 14.4', '2.0', '-')
    """
    if not values:
        return "-"
    moments = paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    error = f" ± {scale * moments['se']:.{digits}f}" if moments["seeds"] > 1 else ""
    return f"{scale * moments['mean']:.{digits}f}{error}"


def difference(gain: Mapping[str, float], digits: int = 1) -> str:
    """The result of ``paired`` as all pages print it: mean ± standard error (95 % interval); ``-`` without seeds.

    >>> difference(paired({1: 3.0, 2: 4.0, 3: 5.0}, {1: 2.0, 2: 2.0, 3: 2.0}))
    '+2.0 ± 0.6 (-0.5 to +4.5)'
    """
    if not gain["seeds"]:
        return "-"
    text = f"{gain['mean']:+.{digits}f}"
    if gain["seeds"] > 1:
        text += f" ± {gain['se']:.{digits}f} ({gain['low']:+.{digits}f} to {gain['high']:+.{digits}f})"
    return text


def format_gain(ours: Mapping[str, float], other: Mapping[str, float], scale: float = 1.0, digits: int = 1) -> str:
    """The margin by which one method's figures exceed another's, paired by seed; ``-`` without a common seed."""
    first, second = ({seed: scale * value for seed, value in figures.items()} for figures in (ours, other))
    return difference(paired(first, second), digits)


def mean_cost(cost: Measure, results: Mapping[str, Any], path: str) -> str:
    """The mean over seeds of what the runs at a path sent or kept."""
    return f"{fmean(cost(run, results) for run in find(results, path).values()):.3g}"


def figures_by_seed(claim: Claim, results: Mapping[str, Any], path: str) -> dict[str, float]:
    """The claim's figure for all runs at a path, by seed."""
    return {seed: claim.measure(run, results) for seed, run in find(results, path).items()}


def figure(values: Mapping[str, float], claim: Claim) -> str:
    """The mean over seeds, with ≥ if some of them are bounds."""
    bound = "≥ " if any(isinstance(v, AtLeast) for v in values.values()) else ""
    return f"{bound}{claim.unit * fmean(values.values()):.{claim.digits}f}"


def name(path: str, claim: Claim) -> str:
    """The part of a path that distinguishes it from ours: usually a method."""
    keys = [a for a, b in zip(path.split(" > "), claim.ours.split(" > "), strict=True) if a != b]
    return ", ".join(claim.entry(int(key)) if key.isdigit() else key.rpartition("/")[2] for key in keys)

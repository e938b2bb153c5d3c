"""How a published claim is judged by stored results: differences paired by seed, Student's t, and a stated rule.

A claim says that one method is ahead of another, or of a published figure. Its *gain* in a seed is by how much that
holds, positive where it does. The verdict is

- *cannot be decided here* where a run left out more than 5 % of its updates, data or scale are not the published ones,
  or there are fewer than three seeds (five for rounds to a target, which curves cross by chance near their plateau);
- *reproduced* where the 95 % interval of the mean gain (Student's t, paired by seed) is above zero (*with the scripts'
  settings* where the authors' scripts differ from their text, and the runs follow the scripts);
- *reproduced in order alone* where it is above zero, but excludes half the published gain, where that is known in the
  same unit;
- *not reproduced* where the interval is below zero, or contains zero and excludes half the published gain;
- *cannot be decided here* otherwise, and where a seed has no difference, since a run gave no number or both of its runs
  ended before the target.

A target that a run did not reach counts with what had been spent by then, which bounds the gain from one side: a bound
decides only towards its own side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

from reporting import MOST

from fedloom.metrics.comparison import paired

ROOT = Path(__file__).parent
SEEDS, TARGET_SEEDS = 3, 5
"""Fewer seeds cannot decide; rounds to a target need more."""
HOLDS, CONTRARY = "holds here", "the contrary holds here"
"""What enough seeds show about a claim that they do not decide, since data or scale are not the published ones."""
Measure = Callable[[Any, Mapping[str, Any]], float]
"""A figure of a stored run; the file's whole content is there too."""


class Verdict(StrEnum):
    """What stored results say about a published claim."""

    REPRODUCED = "reproduced"
    SCRIPTS = "reproduced with the scripts' settings"
    ORDER = "reproduced in order alone"
    NOT_REPRODUCED = "not reproduced"
    UNDECIDED = "cannot be decided here"


class AtLeast(float):
    """A figure that a run did not live to see: the true one is as large or larger."""


@dataclass(frozen=True)
class Claim:
    """A published claim, and how the evidence is read from a file of results.

    ``ours`` and ``other`` are paths with `` > `` between keys and ``*`` in the place of seeds; of several others the
    one with the best mean counts, and a number is a published figure. ``measure`` reads the figure of a run, ``cost``
    what it sent or kept. ``lower`` is better for some figures. ``differs`` says what is not as published. Fewer than
    ``seeds`` seeds cannot decide.
    """

    table: str
    says: str
    ours: str
    other: str | tuple[str, ...] | float
    published: str = "-"
    measure: Measure = lambda found, _: found
    unit: float = 1.0
    digits: int = 1
    lower: bool = False
    differs: str = ""
    scripts: bool = False
    cost: tuple[Measure, str] | None = None
    seeds: int = SEEDS


@dataclass(frozen=True)
class Evidence:
    """What a claim's file of results says: the mean figures, the paired gain with its interval, and the verdict."""

    ours: str
    other: str
    against: str
    gain: Mapping[str, float]
    left_out: str
    cost: str
    verdict: Verdict
    reason: str


def find(results: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What lies at a path, by seed; "0" where the path has no ``*``.

    >>> find({"runs": {"FedAvg": {"1": {"loss": [2, 1]}}}}, "runs > FedAvg > * > loss > -1")
    {'1': 1}
    """
    found: list[tuple[str, Any]] = [("0", results)]
    for step in path.split(" > "):
        if step == "*":
            found = list(found[0][1].items())
        else:
            found = [(seed, at[int(step)] if isinstance(at, list) else at[step]) for seed, at in found]
    return dict(found)


def dropped(results: Mapping[str, Any], path: str) -> list[float]:
    """The updates that each run on a path left out: a share where one is stored, else a whole number."""
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
    left_out: float = 0.0,
    at_least: bool = False,
    at_most: bool = False,
    needed: int = SEEDS,
    published: float = 0.0,
    without: int = 0,
) -> tuple[Verdict, str]:
    """The verdict by this module's rule, and why.

    ``gain`` is what ``paired`` gives; ``at_least`` and ``at_most`` say that some of its differences are bounds; fewer
    than ``needed`` seeds cannot decide. ``published`` is the published gain, 0 where it is unknown; ``without`` is the
    number of seeds that have no difference; a ``left_out`` of 1 and more is a number of updates, of an unknown share.

    >>> judge({"mean": 2.0, "low": 1.6, "high": 2.4, "seeds": 3})
    (<Verdict.REPRODUCED: 'reproduced'>, 'interval above 0')
    >>> judge({"mean": 2.0, "low": float("nan"), "high": float("nan"), "seeds": 1})
    (<Verdict.UNDECIDED: 'cannot be decided here'>, '1 seed; the difference is as claimed')
    >>> judge({"mean": 0.1, "low": -0.2, "high": 0.4, "seeds": 5}, published=1.0)
    (<Verdict.NOT_REPRODUCED: 'not reproduced'>, 'the interval contains 0 and excludes half the published gain')
    >>> judge({"mean": 0.2, "low": 0.1, "high": 0.3, "seeds": 5}, published=1.0)
    (<Verdict.ORDER: 'reproduced in order alone'>, 'interval above 0, but below half the published gain')
    """
    seeds = int(gain["seeds"])
    above = seeds >= needed and gain["low"] > 0 and not at_most
    below = seeds >= needed and gain["high"] < 0 and not at_least
    small = seeds >= needed and gain["high"] < published / 2 and not (at_least or at_most)
    none = small and gain["low"] <= 0 <= gain["high"]
    if left_out > MOST:
        lost = f"{left_out:.0%} of the updates" if left_out < 1 else f"{left_out:.0f} updates, of an unknown share,"
        return Verdict.UNDECIDED, f"{lost} were left out"
    if without:
        return Verdict.UNDECIDED, f"{without} of {seeds + without} seeds have no difference"
    if above and small and not differs:
        return Verdict.ORDER, "interval above 0, but below half the published gain"
    if above and not differs:
        less = published and gain["high"] < published and not at_least
        beside = "; less than published" if less else "; more than published" if gain["low"] > published > 0 else ""
        return Verdict.SCRIPTS if scripts else Verdict.REPRODUCED, f"interval above 0{beside}"
    if below and not differs:
        return Verdict.NOT_REPRODUCED, "interval below 0"
    if none and not differs:
        return Verdict.NOT_REPRODUCED, "the interval contains 0 and excludes half the published gain"
    if seeds < needed:
        sign = "as claimed" if gain["mean"] > 0 else "the other way round" if gain["mean"] < 0 else "zero"
        if (at_least and gain["mean"] <= 0) or (at_most and gain["mean"] >= 0):
            sign = "but a bound"
        here = f"{seeds} seed{'s' * (seeds != 1)}; the difference is {sign}"
    elif above or below:
        here = HOLDS if above else CONTRARY
    else:
        here = "the interval contains 0" if gain["low"] <= 0 <= gain["high"] else "the gain is but a bound"
    return Verdict.UNDECIDED, f"{differs}; {here}" if differs else here


def evidence(claim: Claim, results: Mapping[str, Any], differs: str = "") -> Evidence:
    """A claim's evidence in the content of its file; ``differs`` is what none of its runs has as published."""
    ours = measured(claim, results, claim.ours)
    sign = -1 if claim.lower else 1
    best, against, rivals = claim.ours, "published", {}
    if isinstance(claim.other, float | int):
        rivals = dict.fromkeys(ours, claim.other)
    else:
        paths = (claim.other,) if isinstance(claim.other, str) else claim.other
        tried = {path: measured(claim, results, path) for path in paths}
        best = max(tried, key=lambda path: sign * fmean(tried[path].values()))
        against, rivals = name(best, claim.ours), tried[best]
    seeds = [s for s in ours if s in rivals and not (isinstance(ours[s], AtLeast) and isinstance(rivals[s], AtLeast))]
    both = [s for s in ours if s in rivals] or [*ours]
    scale = sign * claim.unit
    gain = paired({s: scale * ours[s] for s in seeds}, {s: scale * rivals[s] for s in seeds})
    late = [any(isinstance(v[s], AtLeast) for s in seeds) for v in (ours, rivals)]
    at_least, at_most = reversed(late) if claim.lower else late
    lost = [*dropped(results, claim.ours), *dropped(results, best)]
    share = max(lost, default=0.0)
    verdict, reason = judge(
        gain, differs=claim.differs or differs, scripts=claim.scripts, left_out=share, at_least=at_least,
        at_most=at_most, needed=claim.seeds, published=published_gain(claim),
        without=len(both) - int(gain["seeds"]),
    )  # fmt: skip
    return Evidence(
        ours=figure({s: ours[s] for s in both}, claim),
        other=figure({s: v for s, v in rivals.items() if s in both} or rivals, claim),
        against=against,
        gain=gain,
        left_out="-" if not lost else f"{share:.1%}" if share else f"{sum(lost):.0f}",
        cost=" : ".join(spent(claim.cost[0], results, path) for path in (claim.ours, best)) + f" {claim.cost[1]}"
        if claim.cost else "-",
        verdict=verdict,
        reason=reason,
    )  # fmt: skip


def published_gain(claim: Claim) -> float:
    """By how much the claim holds in the paper, in the unit of ``Evidence.gain``; 0 where that is not published.

    >>> [published_gain(Claim("", "", "", "", said, lower=True)) for said in ("90 : 208", "221 : 783 to 88.8 %", "-")]
    [118.0, 0.0, 0.0]
    """
    said = claim.published.partition(" : ")
    try:
        ours, other = float(said[0]), float(said[2] or 0.0)
    except ValueError:
        return 0.0
    if not said[1]:
        return ours if claim.published.startswith("+") else 0.0
    return other - ours if claim.lower else ours - other


def mean_error(values: Collection[float], scale: float = 1.0, digits: int = 1) -> str:
    """Mean and standard error of figures of several seeds.

    >>> mean_error([0.5, 0.75, 1.0], 100), mean_error([2.0]), mean_error([])
    ('75.0 ± 14.4', '2.0', '-')
    """
    if not values:
        return "-"
    found = paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    error = f" ± {scale * found['se']:.{digits}f}" if found["seeds"] > 1 else ""
    return f"{scale * found['mean']:.{digits}f}{error}"


def difference(gain: Mapping[str, float], digits: int = 1) -> str:
    """What ``paired`` found, as all pages print it: mean ± standard error (95 % interval).

    >>> difference(paired({1: 3.0, 2: 4.0, 3: 5.0}, {1: 2.0, 2: 2.0, 3: 2.0}))
    '+2.0 ± 0.6 (-0.5 to +4.5)'
    """
    shown = f"{gain['mean']:+.{digits}f}"
    if gain["seeds"] > 1:
        shown += f" ± {gain['se']:.{digits}f} ({gain['low']:+.{digits}f} to {gain['high']:+.{digits}f})"
    return shown


def gained(ours: Mapping[str, float], other: Mapping[str, float], scale: float = 1.0, digits: int = 1) -> str:
    """By how much one method's figures exceed another's, paired by seed; ``-`` without a common seed."""
    first, second = ({seed: scale * value for seed, value in one.items()} for one in (ours, other))
    found = paired(first, second)
    return difference(found, digits) if found["seeds"] else "-"


def spent(cost: Measure, results: Mapping[str, Any], path: str) -> str:
    """What the runs at a path sent or kept, mean over seeds."""
    return f"{fmean(cost(run, results) for run in find(results, path).values()):.3g}"


def measured(claim: Claim, results: Mapping[str, Any], path: str) -> dict[str, float]:
    """The claim's figure of all runs at a path, by seed."""
    return {seed: claim.measure(run, results) for seed, run in find(results, path).items()}


def figure(values: Mapping[str, float], claim: Claim) -> str:
    """The mean over seeds, with ≥ where some are bounds."""
    bound = "≥ " if any(isinstance(v, AtLeast) for v in values.values()) else ""
    return f"{bound}{claim.unit * fmean(values.values()):.{claim.digits}f}"


def name(path: str, ours: str) -> str:
    """The part of a path that tells it from ours: mostly a method."""
    keys = [a for a, b in zip(path.split(" > "), ours.split(" > "), strict=True) if a != b]
    return ", ".join(f"entry {key}" if key.isdigit() else key.rpartition("/")[2] for key in keys)


def stored(file: str) -> dict[str, Any]:
    """A file of results, by its path in ``recipes`` without ``results`` and ending: ``feddyn/table_a4``."""
    folder, _, rest = file.partition("/")
    return json.loads((ROOT / folder / "results" / f"{rest}.json").read_text())


def files() -> list[str]:
    """All files of results, named as ``stored`` reads them."""
    return sorted(f"{p.parts[0]}/{Path(*p.parts[2:]).with_suffix('')}" for p in
                  (path.relative_to(ROOT) for path in ROOT.glob("*/results/**/*.json")))  # fmt: skip

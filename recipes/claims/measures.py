"""How a claim is read from a file of results: the place of its evidence, and what is measured there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from protocol import TARGET_SEEDS, AtLeast, Claim, Measure, find

from fedloom_apps.claims.comparisons import Figure
from fedloom_apps.online.evaluate import samples_needed


@dataclass(frozen=True)
class Result:
    """A file of results: its title, its differences from the publication, the claims it bears on, and a remark."""

    title: str
    differs: str
    claims: Sequence[Claim]
    note: str = ""


Row = tuple[str, str | Sequence[str], str]
"""A method; another method or several others; the published figures of both."""


ALL = 300  # transmissions after which a run of table A.4 ends without reaching its target


def claims(table: str, says: str, path: str, *rows: Row, **about: Any) -> list[Claim]:
    """One claim per row; ``{}`` stands for the two methods in ``says``, and for one of them in ``path``."""
    claim_list = []
    for method, other, published in rows:
        if isinstance(other, str):
            against, paths = other, path.format(other)
        else:
            against, paths = "all rivals run here", tuple(path.format(name) for name in other)
        claim_list.append(Claim(table, says.format(method, against), path.format(method), paths, published, **about))
    return claim_list


def transmissions_to(target: float) -> Measure:
    """Transmissions until the average model reaches an accuracy, in rounds of FedAvg."""

    figure = Figure("transmissions", "average/accuracy", target)
    return lambda run, content: figure(run | {"curves": {figure.metric: run["average"]}}, content)


def transmissions_at_end(run: Any, _: Mapping[str, Any]) -> float:
    """Transmissions of a run that ends at its target or after ``ALL`` of them."""
    transmissions = run["rounds"] * run["cost"]
    return AtLeast(transmissions) if transmissions >= ALL else transmissions


def best_of(curve: str, rounds: str, *paths: str) -> Measure:
    """Rounds until a run reaches the best value that all runs at these paths reach."""

    def measure(run: Any, results: Mapping[str, Any]) -> float:
        target = min(max(contender[curve]) for path in paths for contender in find(results, path).values())
        hit = next((at for at, value in zip(run[rounds], run[curve], strict=True) if value >= target), None)
        return AtLeast(run[rounds][-1]) if hit is None else hit

    return measure


def tasks_until(samples: float, sizes: Sequence[int], target: float) -> Measure:
    """Tasks until so many samples of a new task suffice for an accuracy, by means over a fifth of the measurements."""

    def measure(run: Any, _: Mapping[str, Any]) -> float:
        places, accuracies = zip(*run["efficiency"], strict=True)
        window = 1 + len(places) // 5
        for end in range(window, len(places) + 1):
            means = [fmean(column) for column in zip(*accuracies[end - window : end], strict=True)]
            size = samples_needed(sizes, means, target)
            if size is not None and size <= samples:
                return places[end - 1]
        return AtLeast(run["tasks"])

    return measure


def kept_megabytes(run: Any, _: Mapping[str, Any]) -> float:
    """The task data that a learner keeps at the end, in MB."""
    return run["bytes"][-1] / 1e6


ROUNDS: dict[str, Any] = {"lower": True, "digits": 0, "seeds": TARGET_SEEDS}
PERCENT: dict[str, Any] = {"unit": 100}
SENT: dict[str, Any] = {"cost": (lambda run, _: run["sent"] / 1e6, "M numbers")}
KEPT: dict[str, Any] = {"unit": 100, "cost": (kept_megabytes, "MB kept")}
TRANSMITTED: dict[str, Any] = {"measure": transmissions_at_end, **ROUNDS}
CTM: dict[str, Any] = {"measure": lambda run, _: fmean(run["ctm"]), **KEPT}
LTM: dict[str, Any] = {"measure": lambda run, _: run["ltm"][-1][1], **KEPT}
BEST: dict[str, Any] = {"unit": 100, "digits": 2, "measure": lambda run, _: max(mean for mean, _ in run["accuracy"])}
IMAGES: dict[str, Any] = {"unit": 100, "measure": lambda run, _: run["clients/accuracy/mean"], **SENT}
FID: dict[str, Any] = {"lower": True, "measure": lambda run, _: run["fid"], **SENT}
CROSS_ENTROPY = best_of("accuracy", "rounds", "runs > FedAvg cross entropy > *")

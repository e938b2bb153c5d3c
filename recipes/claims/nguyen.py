"""Claims of Nguyen et al. (AISTATS 2022): FedBuff."""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import Any

from protocol import AtLeast

from .measures import Result, claims


def doublings(run: Any, _: Mapping[str, Any]) -> float:
    """log₂ of the virtual seconds until the higher target, so that a difference of 1 is a factor of 2."""
    hours = run["hours"][1]
    return AtLeast(log2(3600 * run["end"])) if hours is None else log2(3600 * hours)


LATER: dict[str, Any] = {"lower": True, "digits": 2, "measure": doublings}
DATA = {"mnist": ("MNIST", "88 %"), "cifar10": ("CIFAR-10", "36 %")}
DEVICES = {"independent": "devices independent of the data", "rare": "slow devices hold the rare classes"}
RESULTS: dict[str, Result] = {
    "devices/hours": Result("FedBuff on unequal devices (Nguyen)", "MNIST by writer, 100 at work; 10 000 images of "
                            "CIFAR-10, Dirichlet (.3), 50 at work; simulated devices", [
        claim
        for data, (title, target) in DATA.items()
        for condition, words in DEVICES.items()
        for times, other, published in (("3.3", "FedAvg", "+1.72"), ("2.5", "FedAsync", "+1.32"))
        for claim in claims(
            "abstract", f"{title}, {words}: {{}} reaches {target} {times} times sooner than {{}} (log₂ s)",
            f"cells > {data} > {condition} > {{}} > *", ("FedBuff", other, published), **LATER
        )
    ], "Published: up to 3.3 times more efficient than synchronous and 2.5 times than asynchronous learning. The factor"
       " over synchronous learning grows with the spread of the devices: here it spans two decades, and a round waits "
       "for the slowest of 100 or 50."),
}  # fmt: skip

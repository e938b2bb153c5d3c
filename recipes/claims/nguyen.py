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


DATA = "MNIST by writer, 100 at work, simulated devices"
LATER: dict[str, Any] = {"lower": True, "digits": 2, "measure": doublings}
RESULTS: dict[str, Result] = {
    "devices/hours": Result("FedBuff on unequal devices (Nguyen)", DATA, [
        *claims("abstract", "devices independent of the data: {} reaches 88 % 3.3 times sooner than {} (log₂ s)",
                "cells > mnist > independent > {} > *", ("FedBuff", "FedAvg", "+1.72"), **LATER),
        *claims("abstract", "devices independent of the data: {} reaches 88 % 2.5 times sooner than {} (log₂ s)",
                "cells > mnist > independent > {} > *", ("FedBuff", "FedAsync", "+1.32"), **LATER),
        *claims("abstract", "slow devices hold the rare classes: {} reaches 88 % 3.3 times sooner than {} (log₂ s)",
                "cells > mnist > rare > {} > *", ("FedBuff", "FedAvg", "+1.72"), **LATER),
        *claims("abstract", "slow devices hold the rare classes: {} reaches 88 % 2.5 times sooner than {} (log₂ s)",
                "cells > mnist > rare > {} > *", ("FedBuff", "FedAsync", "+1.32"), **LATER),
    ], "Published: up to 3.3 times more efficient than synchronous and 2.5 times than asynchronous learning. The factor"
       " over synchronous learning grows with the spread of the devices: here it spans two decades, and a round waits "
       "for the slowest of 100."),
}  # fmt: skip

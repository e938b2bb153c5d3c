"""Every client has a model at the server, its core, and downloads cores of others: APPLE's exchange."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.base.ranges import Count
from fedloom.parts.topology.graphs import OwnModel


@dataclass(frozen=True)
class Cores(OwnModel):
    """Client i receives its model w_i and, with it, models w_j of others; the server mixes none of them.

    The others are sent if a part reads them, such as ``personal=combined``. With ``models=M`` they are M others, drawn
    anew for each client and round; each is a download of P numbers. B = I. Luo & Wu, IJCAI 2022.

    Args:
        models: M ≥ 1; None for all K - 1.
    """

    models: Count | None = None

    home = "server"
    mean = "unused"
    citation = "luo2022apple"

    def heard(self, number: int, models: int, draws: np.random.Generator) -> np.ndarray:
        candidates = np.delete(np.arange(models), number)
        if self.models is None or self.models >= len(candidates):
            return candidates
        return np.sort(draws.choice(candidates, self.models, replace=False))

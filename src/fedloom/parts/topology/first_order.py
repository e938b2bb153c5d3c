"""FedFomo: every client mixes those models that do better on its own samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import Count, Probability
from fedloom.base.tree import Tree
from fedloom.core.context import Facts, Meeting
from fedloom.core.links import Links
from fedloom.parts.topology.graphs import OwnModel


@dataclass(frozen=True)
class FirstOrder(OwnModel):
    """Client i mixes the models that lower its loss, the more the steeper the way to them.

    With θ_i^t the client's model before the round and w_n the models after it, its own among them::

        B_in ∝ max(0, (F_i(θ_i^t) - F_i(w_n)) / ‖w_n - θ_i^t‖)

    normalised over n; a client keeps its own model if none is better. F_i is the loss on the client's validation
    samples, or on its training samples where it has none: as many passes as it hears models. A message is counted for
    each, whatever its weight. Zhang et al., ICLR 2021, eqs. (3) and (4).

    With ``models=M`` a client hears only M others of the round: those with the largest sum of weights so far, each
    replaced by a random one with probability ε. The server then keeps the K² sums.

    Args:
        models: M ≥ 1; None for all of the round.
        explore: ε.
    """

    models: Count | None = None
    explore: Probability = 0.3

    mean = "unused"
    reads_losses = True
    citation = "zhang2021fedfomo"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        if self.models is None:
            return {}
        return {"affinity": torch.zeros(facts.clients, facts.clients, dtype=torch.float64)}

    def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, Links]:
        active, clients = meeting.active, meeting.facts.clients
        affinity = state["affinity"].cpu().numpy().copy() if state else np.zeros((clients, clients))
        sources = [np.append(self._neighbours(affinity, i, meeting), i) for i in active.tolist()]
        before = {i: float(meeting.received_losses(i, np.array([i]))[0]) for i in active.tolist()}
        row, source = np.repeat(active, [len(models) for models in sources]), np.concatenate(sources)
        gain, squared = np.zeros(len(row)), np.zeros(len(row))
        for n in np.unique(source).tolist():
            at = np.flatnonzero(source == n)
            gain[at] = [before[i] for i in row[at].tolist()] - meeting.losses(n, row[at])
            squared[at] = [float((meeting.theta(n) - meeting.received(i)).square().sum()) for i in row[at].tolist()]
        slope = np.where(squared > 0, np.nan_to_num(gain, nan=0.0) / np.sqrt(np.maximum(squared, 1e-300)), 0.0)
        slope = np.maximum(slope, 0.0)
        if self.models is not None:
            affinity[row, source] += slope
            state = {"affinity": torch.from_numpy(affinity)}
        total = np.bincount(row, slope, clients)[row]
        weight = np.where(total > 0, slope / np.where(total > 0, total, 1.0), row == source)
        return state, Links.of(active, row, source, weight)

    def _neighbours(self, affinity: np.ndarray, client: int, meeting: Meeting) -> np.ndarray:
        """The clients of the round whose models a client hears beside its own."""
        candidates = meeting.active[meeting.active != client]
        if self.models is None or self.models >= len(candidates):
            return candidates
        ranked = candidates[np.argsort(-affinity[client, candidates], kind="stable")]
        best, rest = ranked[: self.models].copy(), ranked[self.models :]
        replaced = np.flatnonzero(meeting.draws.random(len(best)) < self.explore)[: len(rest)]
        best[replaced] = meeting.draws.choice(rest, len(replaced), replace=False)
        return best

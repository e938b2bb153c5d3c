"""FLTrust: updates are weighted by their cosine similarity to the server's own update."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import NonNegativeInt
from fedloom.base.tree import Tree
from fedloom.core.context import Facts, RoundInfo
from fedloom.core.local import Local
from fedloom.core.parts import Halves, Mixing, Needs


@dataclass(frozen=True)
class FLTrust(Mixing):
    """Δ = Σ s_i (‖Δ_0‖/‖Δ_i‖) Δ_i / Σ s_i with trust scores s_i = max(cos(Δ_i, Δ_0), 0), Δ_0 the server's own update.

    The server's data set is held by one client, the root, which trains like all others, participates in every round and
    is not mixed itself. If it drops out, the round has no effect; if no client is trusted, Δ = 0, and batch statistics
    are the root's.

    Breakdown point: any number of hostile clients: the result is never longer than ‖Δ_0‖ and never points away from
    Δ_0, and a client whose update does (cos ≤ 0) has p_i = 0 exactly. Within that half space hostile clients can still
    choose the direction. All updates of the cohort are held in memory. Cao, Fang, Liu & Gong, NDSS 2021, section IV,
    where the root data set belongs to the server, which trains on it with the clients' settings: equivalent to a root
    client.

    Args:
        root: number of the client that holds the server's data.

    Raises:
        ConfigError: if ``root`` is not the number of a client.
    """

    root: NonNegativeInt = 0

    needs = Needs(updates=True, full_participation=True)
    citation = "cao2021fltrust"

    @property
    def trusted(self) -> tuple[int, ...]:
        return (self.root,)

    def check(self, local: Local, facts: Facts) -> None:
        if self.root >= facts.clients:
            raise ConfigError(f"mixing 'fltrust': root is {self.root}, but there are {facts.clients} clients.")

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """s_i/‖Δ_i‖ normalised to sum to 1; the factor of the mixture is kept for ``combine``."""
        rows = np.flatnonzero(info.cohort == self.root)
        n = len(info.cohort)
        if not len(rows):
            return {"scale": torch.tensor(0.0)}, np.full(n, np.nan)
        flat = torch.stack(list(info.updates)).double()
        norms = torch.linalg.vector_norm(flat, dim=1).cpu().numpy()
        root = rows[0]
        inner = (flat @ flat[root]).cpu().numpy()
        length = norms[root]
        scores = np.divide(inner, norms * length, out=np.zeros(n), where=norms * length > 0).clip(min=0)
        scores[root] = 0
        raw = np.divide(scores, norms, out=np.zeros(n), where=norms > 0)
        if raw.sum() == 0:
            return {"scale": torch.tensor(0.0)}, np.eye(n)[root]
        scale = torch.tensor(length * raw.sum() / scores.sum(), dtype=torch.float64)
        return {"scale": scale}, raw / raw.sum()

    def combine(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The weighted sum of the updates, rescaled to the root's length."""
        return {}, state["scale"].to(update) * update

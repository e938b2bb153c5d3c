"""Made-up records of rounds, for testing the server halves of parts alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from fedloom.core.context import Facts, RoundInfo


def facts(clients: int = 1, rounds: int = 1, seed: int = 0) -> Facts:
    """An experiment with inputs [4] between 0 and 1, and three classes."""
    low, high = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    return Facts((4,), 3, low, high, clients, rounds, seed)


def round_info(
    samples: ArrayLike, losses: ArrayLike | None = None, *, cohort: ArrayLike | None = None, clients: int = 0,
    **fields: Any,
) -> RoundInfo:  # fmt: skip
    """A round of members with these numbers of samples [|S|] and losses [|S|], one local step each.

    Members are the first clients unless ``cohort`` names them, and there are no other clients unless ``clients`` says
    so; ``others`` are further fields of the record.
    """
    n = np.asarray(samples, dtype=np.int64)
    who = np.arange(len(n)) if cohort is None else np.asarray(cohort, dtype=np.int64)
    defaults: dict[str, Any] = {
        "t": 0, "lr": 0.1, "cohort": who, "samples": n, "effective_steps": np.ones(len(n)),
        "facts": facts(clients or len(n)), "received": torch.zeros(0, dtype=torch.float64),
        "losses": None if losses is None else np.asarray(losses, dtype=np.float64),
    }  # fmt: skip
    return RoundInfo(**defaults | fields)

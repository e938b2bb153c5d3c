"""Mini-batches from sample rows: inputs, the client's labels, augmentation."""

from __future__ import annotations

import numpy as np
import torch

from fedloom.core import rng
from fedloom.core.context import Batch
from fedloom.core.plan import ClientPlan


def minibatch(
    plan: ClientPlan, rows: np.ndarray, client: int, round: int, step: int, purpose: str = "augment"
) -> Batch:
    """The mini-batch of one local step; ``purpose`` names the random stream of its augmentation."""
    at = torch.from_numpy(rows)
    x, y = plan.data.arrays.x[at], plan.data.labels(at, client)
    if plan.augment is None:
        return Batch(x, y)
    views = (
        plan.augment(x, [(rng.stream(plan.seed, purpose, round, client, step, view), len(rows))])
        for view in range(1 + plan.has_twin)
    )
    return Batch(next(views), y, twin=next(views, None))

"""The results of a block of clients that were trained together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedloom.core.client import ClientWork, Result, Vectors
from fedloom.core.context import Context


def finished(
    order: Sequence[int], jobs: Sequence[ClientWork], held: Sequence[Vectors],
    contexts: Sequence[Mapping[str, Context]], losses: Sequence[float],
) -> list[Result]:  # fmt: skip
    """The clients' results, in the block's order; an exception becomes the failure of that client alone.

    Args:
        order: the place in the block of each client below.
        jobs: the clients' work.
        held: their memories, with the trained models.
        contexts: their contexts.
        losses: their mean training losses.
    """
    found: dict[int, Result] = {}
    for place, job, at, seen, loss in zip(order, jobs, held, contexts, losses, strict=True):
        try:
            found[int(place)] = job.finish(at, seen, loss)
        except Exception as error:
            found[int(place)] = job.failed(error)
    return [found[place] for place in range(len(found))]

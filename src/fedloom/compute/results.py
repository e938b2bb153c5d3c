"""The results of a block of clients that were trained together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fedloom.core.context import Context
from fedloom.rounds.client import ClientWork, Vectors
from fedloom.rounds.exchange import Result


def block_results(
    order: Sequence[int], jobs: Sequence[ClientWork], vectors_of: Callable[[int], Vectors],
    contexts: Sequence[Mapping[str, Context]], losses: Sequence[float],
) -> Iterator[Result]:  # fmt: skip
    """The clients' results, in the block's order; an exception becomes the failure of that client alone.

    A client is finished when its result is asked for, so that its vectors are still in the caches when it is summed.

    Args:
        order: the place in the block of each client below.
        jobs: the clients' work.
        vectors_of: returns the memory with the trained model of a client below.
        contexts: their contexts.
        losses: their mean training losses.
    """

    def result(row: int) -> Result:
        try:
            return jobs[row].finish(vectors_of(row), contexts[row], losses[row])
        except Exception as error:
            return jobs[row].as_failure(error)

    return map(result, sorted(range(len(order)), key=order.__getitem__))

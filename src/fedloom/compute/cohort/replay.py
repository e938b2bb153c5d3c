"""Local steps that are recorded once and replayed, so that a GPU need not wait for the host.

A step of a small network is a few dozen short kernels, which the host issues one by one. A CUDA graph issues all of
them at once: the same kernels on the same memory, with the same bits.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Step = Callable[..., Tensor]
"""A local step of c clients, from inputs, labels [c, B, ...], weights [c, B] and other tensors to their losses [c]."""

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Records the operations of a function without running them; returns a function that repeats them in place."""

OFTEN = 3  # a step is recorded after so many equal ones, since recording a step takes about as long as taking it
CAPACITY = 32  # recordings per network, since cohorts and batches have several sizes


def cuda_graph(operations: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """Record operations on CUDA tensors as a CUDA graph, with its intermediate values in a pool of memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        operations()
    return graph.replay


def recorder(device: torch.device) -> Recorder | None:
    """A recorder of operations on a device; None if recording gains nothing there.

    What it records shares one pool, which is as large as the largest step: no two graphs are replayed at the same time,
    and none reads what another one has computed. The pool ends with the last graph, so networks have their own.
    """
    return partial(cuda_graph, pool=torch.cuda.graph_pool_handle()) if device.type == "cuda" else None


@dataclass
class Recording:
    """A recorded step and the memory that it reads and writes."""

    inputs: tuple[Tensor | None, ...]
    losses: Tensor
    replay: Callable[[], None]


class Replays:
    """The recorded steps of a network.

    Example:
        >>> def record(operations):  # runs them, where a graph would only note them
        ...     operations()
        ...     return operations
        >>> x, none = torch.ones(1, 2), torch.zeros(1)
        >>> steps = Replays(record)
        >>> losses = [steps(lambda x, y, weights: x.sum(1), "the rule", x, none, none) for _ in range(OFTEN + 1)]
        >>> losses[-1], len(steps.recordings)
        (tensor([2.]), 1)
    """

    def __init__(self, record: Recorder) -> None:
        self.record: Recorder | None = record
        self.recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self.counts: Counter[Hashable] = Counter()

    def __call__(self, step: Step, rule: Hashable, *inputs: Tensor | None) -> Tensor:
        """Take a step; the losses [c] are overwritten by the next one.

        Args:
            step: the step; anything it reads in addition to its inputs must stay at the same address in memory.
            rule: everything other than tensors that it computes with, such as the learning rate.
            inputs: what the step reads that changes from one to the next, on the device.
        """
        key = (rule, *(value is not None and (value.shape, value.stride(), value.dtype) for value in inputs))
        if key in self.recordings:
            self.recordings.move_to_end(key)
            recording = self.recordings[key]
            for memory, value in zip(recording.inputs, inputs, strict=True):
                if memory is not None and value is not None:
                    memory.copy_(value)
            recording.replay()
            return recording.losses
        losses = step(*inputs)
        self.counts[key] += 1
        if self.record is not None and self.counts[key] >= OFTEN:
            self._keep(key, step, inputs)
        return losses

    def _keep(self, key: Hashable, step: Step, inputs: tuple[Tensor | None, ...]) -> None:
        """Record a step for next time; if that is impossible, warn once and keep taking steps unrecorded."""
        assert self.record is not None
        copies, losses = tuple(None if value is None else value.clone() for value in inputs), []
        self.counts.clear()  # of rules that will not come again, too
        try:
            replay = self.record(lambda: losses.append(step(*copies)))
        except RuntimeError as error:
            self.record = None
            reason = str(error).partition("\n")[0]
            warnings.warn(f"local steps are not recorded as CUDA graphs, which is slower: {reason}", stacklevel=2)
            return
        self.recordings[key] = Recording(copies, losses[0], replay)
        if len(self.recordings) > CAPACITY:
            self.recordings.popitem(last=False)

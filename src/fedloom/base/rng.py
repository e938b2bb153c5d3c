"""Counter-based random streams: every draw is a function of (seed, purpose, counters) alone.

There is no generator state. All engines therefore draw the same numbers, all methods see the same cohorts, and an
interrupted run resumes to the same bits.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def key(seed: int, purpose: str, *counters: int) -> int:
    """The 128-bit key of one stream.

    >>> key(1, "cohort", 3) == key(1, "cohort", 3), key(1, "cohort", 3) == key(1, "batches", 3)
    (True, False)
    """
    text = "/".join([str(int(seed)), purpose, *(str(int(c)) for c in counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A NumPy generator for one purpose, for example ``stream(seed, "batches", round, client)``.

    >>> int(stream(0, "cohort", 1).integers(100)) == int(stream(0, "cohort", 1).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *counters)))


class ReusedGenerator:
    """One generator for many streams: to set it to the beginning of a stream takes a sixth of making another."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state, self._draws = self._philox.state, np.random.Generator(self._philox)

    def stream(self, seed: int, purpose: str, *counters: int) -> np.random.Generator:
        """The generator of ``stream``, until the next call.

        >>> generator = ReusedGenerator()
        >>> [int(generator.stream(0, "cohort", t).integers(100)) for t in (1, 2)] == [
        ...     int(stream(0, "cohort", t).integers(100)) for t in (1, 2)
        ... ]
        True
        """
        stream_key = key(seed, purpose, *counters)
        self._state["state"]["key"][:] = stream_key & (2**64 - 1), stream_key >> 64
        self._philox.state = self._state
        return self._draws


def torch_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed for PyTorch's generators (initialisation, dropout)."""
    return key(seed, purpose, *counters) & (2**63 - 1)


def seed_torch(seed: int, purpose: str, *counters: int) -> None:
    """Seed PyTorch's default generators, which initialisation and dropout use, from one stream.

    Unlike ``torch.manual_seed`` this does not queue a call with a formatted stack trace for every unused device, which
    would cost more than a client's step.
    """
    value = torch_seed(seed, purpose, *counters)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


@contextmanager
def restore_generators() -> Iterator[Callable[[], bool]]:
    """Restore the global CPU generators of PyTorch, Python and NumPy afterwards; yields whether any was used.

    >>> with restore_generators() as has_drawn:
    ...     before, _ = has_drawn(), random.random()
    ...     before, has_drawn()
    (False, True)
    """
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    numpy_state = np.random.get_state(legacy=False)

    def has_drawn() -> bool:
        now = np.random.get_state(legacy=False)["state"]
        same = all(np.array_equal(value, now[key]) for key, value in numpy_state["state"].items())
        return not (
            same and torch.equal(torch_state, torch.default_generator.get_state()) and python_state == random.getstate()
        )

    try:
        yield has_drawn
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)

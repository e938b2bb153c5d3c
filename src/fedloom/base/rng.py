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


class Restarted:
    """One generator that is set to the beginning of one stream after another, which takes a sixth of making them."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state, self._draws = self._philox.state, np.random.Generator(self._philox)

    def stream(self, seed: int, purpose: str, *counters: int) -> np.random.Generator:
        """The generator of ``stream``, until the next call.

        >>> restarted = Restarted()
        >>> [int(restarted.stream(0, "cohort", t).integers(100)) for t in (1, 2)] == [
        ...     int(stream(0, "cohort", t).integers(100)) for t in (1, 2)
        ... ]
        True
        """
        whole = key(seed, purpose, *counters)
        self._state["state"]["key"][:] = whole & (2**64 - 1), whole >> 64
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
def undisturbed() -> Iterator[Callable[[], bool]]:
    """Give the global CPU generators of PyTorch, Python and NumPy back as they were; yields whether any was used.

    >>> with undisturbed() as drawn:
    ...     before, _ = drawn(), random.random()
    ...     before, drawn()
    (False, True)
    """
    torchs, pythons = torch.default_generator.get_state(), random.getstate()
    numpys = np.random.get_state(legacy=False)

    def drawn() -> bool:
        now = np.random.get_state(legacy=False)["state"]
        same = all(np.array_equal(value, now[key]) for key, value in numpys["state"].items())
        return not (same and torch.equal(torchs, torch.default_generator.get_state()) and pythons == random.getstate())

    try:
        yield drawn
    finally:
        torch.default_generator.set_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)

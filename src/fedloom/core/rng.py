"""Counter-based random streams: every draw is a function of (seed, purpose, counters), never of what ran before.

That is what makes all engines do the same work, makes methods comparable (the same cohorts for every method), and lets
a run that was killed go on to the same bits: there is no generator state to save.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def key(seed: int, purpose: str, *counters: int) -> int:
    """A 128-bit key for one stream.

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


def torch_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed for PyTorch's generators (initialisation, dropout)."""
    return key(seed, purpose, *counters) & (2**63 - 1)


def seed_torch(seed: int, purpose: str, *counters: int) -> None:
    """Point PyTorch's default generators at one stream; initialisation and dropout draw from them.

    Unlike ``torch.manual_seed`` it does not queue a call with a formatted stack for every device that is not in use,
    which would cost more than a client's step.
    """
    value = torch_seed(seed, purpose, *counters)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)

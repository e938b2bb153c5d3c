"""The errors a person can cause, each told in one sentence that says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedLoomError(Exception):
    """Base of every error that FedLoom raises on purpose; the command line prints it alone and exits with 2."""


class ConfigError(FedLoomError, ValueError):
    """A setting that is unknown, of the wrong type, or impossible with the others."""


class DataError(FedLoomError, ValueError):
    """Data or a partition that cannot be used as asked."""


class CheckpointError(FedLoomError, RuntimeError):
    """A run directory or checkpoint that cannot be written, read or continued."""


class ClientError(FedLoomError, RuntimeError):
    """Local work that failed at every client of a round, so that nothing could be aggregated.

    Args:
        sentence: what happened.
        trace: the traceback of the first failure, for ``--debug``.
    """

    def __init__(self, sentence: str, trace: str = "") -> None:
        super().__init__(sentence)
        self.trace = trace


def nearest(name: str, valid: Iterable[str]) -> str:
    """The hint that ends an "unknown ..." sentence: the nearest valid name, then all of them.

    >>> nearest("fedavgg", ["fedavg", "feddyn"])
    "did you mean 'fedavg'? There are: fedavg, feddyn."
    """
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? There are" if close else "there are") + f": {', '.join(valid) or 'none'}."

"""Clients that are left out of a round, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FailureKind(StrEnum):
    """The reason why a client is left out of a round."""

    CODE = "code"  # an exception in a part, the model or the data
    DIED = "died"  # its worker process died
    DIVERGED = "diverged"  # something in its result is not finite
    MALFORMED = "malformed"  # a tensor of its result has another shape or type than the plan's or the others'
    ABSENT = "absent"  # it dropped out after receiving the model
    REFUSED = "refused"  # it declined the work, for its data do not fit


@dataclass
class Failure:
    """A client left out of a round's aggregation, and why.

    Attributes:
        round: t, from 0; messages count rounds from 1, as records do.
        client: its number.
        kind: what went wrong.
        reason: the reason of the failure, as text.
        stage: of the local work, like ``step 1 of 4``; empty if it had not started.
        trace: the traceback if its work raised an exception.
    """

    round: int
    client: int
    kind: FailureKind
    reason: str
    stage: str = ""
    trace: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self.kind = FailureKind(self.kind)

    def __str__(self) -> str:
        where = f"failed in {self.stage}: " if self.kind is FailureKind.CODE and self.stage else ""
        return f"round {self.round + 1}, client {self.client}: {where}{self.reason}"

"""Where client states live between rounds."""

from __future__ import annotations

from collections.abc import Iterator

from fedloom.core.client import State


class MemoryStore:
    """Client states in memory, only of clients that have taken part.

    >>> store = MemoryStore()
    >>> store.get(3) is None
    True
    """

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def get(self, client: int) -> State | None:
        """The client's state, or None if it has not taken part yet."""
        return self._states.get(client)

    def update(self, states: dict[int, State]) -> None:
        """Take over the new states at the end of a round; empty ones take no room."""
        self._states.update({client: state for client, state in states.items() if state})

    def __iter__(self) -> Iterator[tuple[int, State]]:
        return iter(self._states.items())

    def __len__(self) -> int:
        return len(self._states)

"""A bar over long reads: on a terminal, on standard error, gone when done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")
FEW = 2000
"""So many small files are read before anyone looks for a bar."""


def with_progress(items: Sequence[T], title: str, few: int = FEW) -> Iterator[T]:
    """The items one after the other, with a bar if there are more than ``few`` and somebody is watching.

    >>> list(with_progress([1, 2], "counting"))
    [1, 2]
    """
    console = Console(stderr=True)
    if len(items) <= few or not console.is_terminal:
        yield from items
    else:
        yield from track(items, title, console=console, transient=True)

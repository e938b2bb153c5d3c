"""Handling of Ctrl-C and SIGTERM at safe points."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from fedloom.core.errors import FedLoomError
from fedloom.experiment.rundir import Status


class Interruptible:
    """Turns SIGINT and SIGTERM into ``KeyboardInterrupt``, and defers them while state is being changed.

    Used as a context manager around a run; inside it, ``with held():`` marks sections that must not be interrupted. The
    exception is raised again before such a section if it was lost, as Python ignores all exceptions in finalisers and
    callbacks of the garbage collector. Outside the main thread, where Python delivers no signals, it does nothing.

    Args:
        finish: called with the status and the reason if the run ends early; the exception then propagates.
    """

    def __init__(self, finish: Callable[[Status, str | None], object]) -> None:
        self._finish = finish
        self._holding = False
        self._came = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if isinstance(error, KeyboardInterrupt):
            self._finish(Status.INTERRUPTED, None)
        elif isinstance(error, FedLoomError):
            self._finish(Status.FAILED, str(error))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if not self._holding:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer signals until the end of the block; a signal that came before it raises instead of entering it."""
        self._stop_if_asked()
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._came:
            raise KeyboardInterrupt

"""A contestant's side of taking turns: it waits for its turn, does a round, and says how long it took."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np


class Turns:
    """Talks with the comparison over the standard streams; what others print goes to the log."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._begun = 0.0
        self._path = ""

    def wait(self) -> bool:
        """Wait for the next turn; False when there is none."""
        line = sys.stdin.readline().strip()
        if line != "go":
            self._path = line.partition(" ")[2]
        self.start()
        return line == "go"

    def start(self) -> None:
        """The round begins now."""
        self._begun = time.perf_counter()

    def stop(self) -> None:
        """The round is over."""
        if os.environ["DEVICE"] != "cpu":
            import torch

            torch.cuda.synchronize()
        print(time.perf_counter() - self._begun, file=self._answers, flush=True)

    def finish(self, weights: Sequence[Any]) -> None:
        """Write the last model to the requested file."""
        if self._path:
            np.savez(self._path, *(np.asarray(value) for value in weights))
            print("saved", file=self._answers, flush=True)

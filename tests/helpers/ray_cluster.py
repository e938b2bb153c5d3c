"""A Ray cluster on this machine that is used by several engines, one after the other."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fedloom_apps.ray.actor import Packed
from fedloom_apps.ray.cluster import Cluster


class Lent(Cluster):
    """A cluster that outlives the engines that use it: its workers take one plan after the other."""

    def prepare(self, plan: Packed, data: Packed) -> None:
        if not self.members:
            return super().prepare(plan, data)
        self.prepared = self.ray.put(plan), self.ray.put(data)
        for member in self.members:
            member.ready, member.joining = False, member.actor.prepare.remote(*self.prepared)
        while any(not member.ready for member in self.members):
            self.settle(60)
        return None

    def close(self) -> None:
        """Stay."""


def processes_of(folder: str, seconds: float = 20) -> list[int]:
    """The processes that are called with a folder, after some time to end."""
    assert folder
    deadline = time.monotonic() + seconds
    while True:
        processes = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if folder.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                    processes.append(int(path.parent.name))
            except OSError:
                continue
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(0.1)

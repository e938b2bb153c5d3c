"""Some of the kills of ``benchmarks/kills.py``: the same bits, no orphan processes, nothing left behind."""

from __future__ import annotations

import mmap
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fedloom.experiment import store

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "kills.py"


@pytest.mark.exhaustive
@pytest.mark.parametrize("states", ["memory", "disk"])
@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_parents_and_workers_killed_at_random_moments(
    engine: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ROOM", 0)
    disturb = runpy.run_path(str(BENCHMARK))["disturb"]
    outcome = disturb("scaffold", engine, 4, np.random.default_rng(0), tmp_path, states)
    assert outcome["parents"] + outcome["workers"] >= 4
    assert {k: outcome[k] for k in ("same", "orphans", "left_over")} == {"same": True, "orphans": 0, "left_over": 0}
    assert all(list((tmp_path / "run-0" / kind).iterdir()) for kind in ("clients", "models"))


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is looked up in /proc")
def test_shared_memory_is_counted_for_the_processes_that_map_it() -> None:
    mapped = runpy.run_path(str(BENCHMARK))["mapped"]
    with (
        tempfile.NamedTemporaryFile(dir="/dev/shm") as shared,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as unrelated,
    ):
        shared.truncate(mmap.PAGESIZE)
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            memory = mmap.mmap(shared.fileno(), mmap.PAGESIZE)
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(len(memory) and 0)
        os.waitpid(child, os.WUNTRACED)
        try:
            assert mapped(child) == {Path(shared.name)}, f"{unrelated.name} is another program's"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

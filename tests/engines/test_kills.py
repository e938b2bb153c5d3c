"""Some of the kills of ``benchmarks/kills.py``: the same bits, no orphan processes, nothing left behind."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from fedloom.experiment import store

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "kills.py"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_parents_and_workers_killed_at_random_moments(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WHOLE", 0)
    disturb = runpy.run_path(str(BENCHMARK))["disturb"]
    found = disturb("scaffold", engine, 4, np.random.default_rng(0), tmp_path)
    assert found["parents"] + found["workers"] >= 4
    assert {k: found[k] for k in ("same", "orphans", "left_over")} == {"same": True, "orphans": 0, "left_over": 0}
    kinds = {path.name.partition("-")[0] for path in (tmp_path / "run-0" / "clients").iterdir()}
    assert kinds == {"states", "models"}, "checkpoints held states and models themselves"
